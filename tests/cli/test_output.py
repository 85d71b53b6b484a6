"""What people see of errors and of `status`: whole words in 80 columns, each message once.

Method: rows and errors are printed to a console that is a terminal of 80 columns, and to one that
is a file.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from logmirror.cli.compact import rows_table
from logmirror.cli.output import error_lines, print_error, print_lines
from logmirror.cli.status import print_status
from logmirror.cli.validate import checks_table
from logmirror.cli.verify import print_reports
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError, UnavailableError, UsageError
from logmirror.reports import (
    CheckReport,
    CompactReport,
    PartitionStatus,
    Problem,
    VerifyReport,
)

COLUMNS = 80


def away(partition: int) -> UnavailableError:
    return UnavailableError(
        "could not look up offsets within 10000 ms: no broker could be reached",
        hint="check the addresses, the network, and security.protocol",
        partition=partition,
        brokers={"kafka-a.example.com:9092": "refused", "kafka-b.example.com:9092": "x" * 100},
    )


def printed(rows, *, terminal: bool) -> list[str]:
    out = io.StringIO()
    width = COLUMNS if terminal else 1000
    print_status(Console(file=out, width=width, force_terminal=terminal, color_system=None), rows)
    return out.getvalue().splitlines()


@pytest.fixture
def rows():
    names = {"mirror": "orders", "destination": "lake", "topic": "orders"}
    return [
        PartitionStatus(**names, partition=0, source_end=7, position=5),
        *(PartitionStatus(**names, partition=n, error=away(n)) for n in range(1, 20)),
    ]


def test_the_table_has_a_line_for_each_row_with_the_kind_of_error(rows):
    table = printed(rows, terminal=True)[: 1 + len(rows)]

    assert table[1].split() == ["orders", "lake", "orders", "0", "7", "5", "2"]
    assert [line.split()[-1] for line in table[2:]] == ["unavailable"] * 19
    assert max(map(len, table)) <= COLUMNS


def test_an_error_is_printed_once_below_the_table_with_what_it_affects(rows):
    for terminal in (True, False):
        shown = printed(rows, terminal=terminal)[1 + len(rows) :]
        text = " ".join(" ".join(shown).split())
        assert text.startswith("error (unavailable): could not look up offsets within 10000 ms:")
        assert text.count("error (") == 1
        assert "see docs/errors.md#unavailable affects orders/lake/1, orders/lake/2," in text
        assert text.endswith("orders/lake/8 and 11 more")


def test_without_errors_only_the_table_is_printed(rows):
    assert len(printed(rows[:1], terminal=True)) == 2


def test_a_terminal_breaks_lines_between_words_and_a_file_not_at_all():
    lines = list(error_lines(away(3)))
    out, file = io.StringIO(), io.StringIO()
    print_lines(Console(file=out, width=COLUMNS, force_terminal=True, color_system=None), lines)
    print_lines(Console(file=file, width=COLUMNS), lines)

    assert file.getvalue().splitlines() == lines
    shown = out.getvalue().splitlines()
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(lines).split())
    assert [line for line in shown if len(line) > COLUMNS and " x" not in line] == []
    assert shown[1].startswith("    ")  # continued lines are indented


def test_facts_of_several_values_have_a_line_for_each():
    assert list(error_lines(away(3)))[2:5] == [
        "  brokers:",
        "    kafka-a.example.com:9092: refused",
        f"    kafka-b.example.com:9092: {'x' * 100}",
    ]


def test_what_run_would_refuse_is_named_in_the_table_with_its_position():
    error = PositionError("the source ends below", reason="SourceWentBackwards")
    names = {"mirror": "orders", "destination": "lake", "topic": "orders"}
    row = PartitionStatus(**names, partition=0, source_end=10, position=15, error=error)

    shown = printed([row], terminal=False)

    assert shown[1].split()[4:] == ["10", "15", "0", "SourceWentBackwards"]
    assert "  see docs/errors.md#sourcewentbackwards" in shown


ATTACK = "gone\x1b[2J\x1b]0;title\x07\u202e\nerror (usage): forged"
HARMLESS = r"gone\u001b[2J\u001b]0;title\u0007\u202e\nerror (usage): forged"


def attacked(command: str, out: Console) -> None:
    """Print what a broker or a store has sent, as the command does."""
    error = UnavailableError(ATTACK, hint=ATTACK, each={ATTACK: ATTACK}, one=ATTACK)
    of = {"mirror": "m", "destination": "d", "topic": "t", "partition": 0}
    if command == "status":
        print_status(out, [PartitionStatus(**of, error=error)])
    elif command == "validate":
        what = {"severity": "error", "what": "x", "found": ATTACK, "advice": ATTACK}
        out.print(checks_table([CheckReport(mirror="m", destination="d", **what)]))
    elif command == "compact":
        out.print(rows_table([CompactReport(**of, error=error)]))
    else:
        problem = Problem(kind="corruption", message=ATTACK, hint=ATTACK, facts={"name": ATTACK})
        report = VerifyReport(**of, problems=(problem,))
        print_reports(out, [report], deep=False, against_source=False)


@pytest.mark.parametrize("command", ["status", "validate", "compact", "verify"])
@pytest.mark.parametrize("terminal", [True, False])
def test_text_of_brokers_and_stores_does_not_control_the_terminal(command, terminal):
    out = io.StringIO()
    console = Console(file=out, width=1000, force_terminal=terminal, color_system=None)

    attacked(command, console)

    shown = out.getvalue()
    assert HARMLESS in shown
    assert "\n" + "error (usage): forged" not in shown
    assert [c for c in shown if not c.isprintable() and c != "\n"] == []


def test_an_error_that_ends_a_command_does_not_control_the_terminal(capsys):
    print_error(UnavailableError(ATTACK, name=ATTACK))

    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"error (unavailable): {HARMLESS}", f"  name: {HARMLESS}"]


def test_each_problem_of_a_clients_properties_has_a_line():
    with pytest.raises(UsageError) as refused:
        connection_settings("h", {"security.protocol": "PLAIN", "sasl.mechanism": "PLAIN"})
    lines = list(error_lines(refused.value))
    assert lines[1].startswith("  security.protocol: expects one of PLAINTEXT, SSL")
    assert lines[2].startswith("  sasl.mechanism: has no effect with security.protocol PLAINTEXT (")
    assert "PropertyProblem" not in str(lines)


def test_a_verification_of_nothing_says_so():
    out = io.StringIO()
    print_reports(Console(file=out, width=1000), [], deep=True, against_source=False)
    assert out.getvalue().startswith("nothing is verified: ")
