"""Two pages list each statement once, with tests that carry its ID: docs/broker-statements.md, and
docs/moves-statements.md for moves between log directories.

Method: the sources of the named tests are parsed. A row stands if each of its tests exists and has
the row's ID in its name or in its `statement` marker, in that of moves in its `move` marker. A
`statement` marker that no row names is an error too. The tests for a log directory in a bucket are
collected, to see that they run on one.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from kit.judges.collected import GROUP, collected
from kit.runs.commands import logmirror

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "broker-statements.md"
OF_MOVES: Final = (DOCS / "moves-statements.md").read_text()
COUNTS: Final = {"S": 14, "B": 6, "N": 9, "T": 18, "C": 18}
"""How many statements of each kind there are; their numbers begin at 1."""
MOVES: Final = [f"E{number}" for number in range(1, 101)]
"""The statements of moves."""

_IN_BUCKET: Final = "## With the log directory in a bucket"
_ROW: Final = re.compile(r"^\| ([A-Z]\d+) \| (?:.+? \| )?([^|]+) \|$", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_IN_NAME: Final = re.compile(r"^test_([sbntc])(\d\d)_")
_MARKED: Final = re.compile(r"'([A-Z]\d+)'|range\((\d+), (\d+)\)")
"""An ID in a marker, or a range of those of moves."""

_OF_KAFKA: Final = re.compile(r"^\| `(\w+(?:\.py)?)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
FAMILIES: Final = {
    *("AlterReplicaLogDirsRequestTest", "DescribeLogDirsRequestTest", "KRaftClusterTest"),
    *("LocalLogTest", "LogCleanerManagerTest", "LogDirFailureTest", "LogDirsCommandTest"),
    *("LogManagerTest", "PartitionTest", "PlaintextAdminIntegrationTest", "ReplicaManagerTest"),
    *("ReassignPartitionsCommandTest", "ReassignPartitionsUnitTest", "UnifiedLogTest"),
    *("ReplicaAlterLogDirsThreadTest", "log_dir_failure_test.py"),
}
"""Apache Kafka's tests that concern moves between log directories."""

_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OF_OTHER_COMMANDS: Final = {"--help", "--no-mirror"}


@cache
def carried(file: str, marker: str = "statement") -> dict[str, set[str]]:
    """Return the test functions of a file, with the IDs that each carries in its name or marker."""
    found: dict[str, set[str]] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = _IN_NAME.match(node.name)
            ids = {f"{named[1].upper()}{int(named[2])}"} if named else set()
            for mark in map(ast.unparse, node.decorator_list):
                if mark.startswith(f"pytest.mark.{marker}("):
                    for one, first, end in _MARKED.findall(mark):
                        ids |= {one} if one else {f"E{n}" for n in range(int(first), int(end))}
            found[node.name] = ids
    return found


PARTS: Final = dict(zip(("directory", "bucket"), PAGE.read_text().split(_IN_BUCKET), strict=True))
"""The page's tables for the two kinds of log directories."""

SHOWN: Final = [
    (place, name, shown) for place, text in PARTS.items() for name, shown in _ROW.findall(text)
]
SHOWN_OF_MOVES: Final = _ROW.findall(OF_MOVES)
OF_KAFKA: Final = _OF_KAFKA.findall(OF_MOVES)
_IDS: Final = [f"{place}-{name}" for place, name, _ in SHOWN]


@pytest.mark.parametrize("place", PARTS)
def test_each_statement_has_one_row(place: str) -> None:
    ids = [name for where, name, _ in SHOWN if where == place]
    assert ids == [f"{kind}{n}" for kind, count in COUNTS.items() for n in range(1, count + 1)]


@pytest.mark.parametrize(("name", "shown"), [found[1:] for found in SHOWN], ids=_IDS)
def test_each_row_names_tests_that_carry_its_id_or_a_reason(name: str, shown: str) -> None:
    tests = _TEST.findall(shown)
    assert tests or shown.startswith("not applicable: ")
    for file, test in tests:
        assert name in carried(file)[test], (file, test)


def test_each_statement_of_moves_has_one_row() -> None:
    assert [name for name, _ in SHOWN_OF_MOVES] == MOVES


@pytest.mark.parametrize(("name", "shown"), SHOWN_OF_MOVES, ids=[one for one, _ in SHOWN_OF_MOVES])
def test_each_row_of_moves_names_tests_that_carry_its_id_or_a_reason(name: str, shown: str) -> None:
    tests = _TEST.findall(shown)
    assert 0 < len(tests) <= 3 or shown.startswith("not applicable: ")
    for file, test in tests:
        assert name in carried(file, "move")[test], (file, test)


@pytest.mark.parametrize(("name", "what", "shown"), OF_KAFKA)
def test_each_row_of_kafkas_tests_names_tests_or_a_reason(name: str, what: str, shown: str) -> None:
    tests = _TEST.findall(shown)
    assert tests or shown.startswith("not applicable: "), (name, what)
    for file, test in tests:
        assert test in carried(file)


def test_the_families_of_kafkas_tests_are_on_the_page() -> None:
    assert {name for name, _, _ in OF_KAFKA} == FAMILIES


@GROUP
def test_the_tests_of_a_bucket_run_on_one() -> None:
    shown = [_TEST.findall(cell) for place, _, cell in SHOWN if place == "bucket"]
    tests = {f"{file}::{test}" for found in shown for file, test in found}
    tests = {one for one in tests if not one.startswith(("tests/broker/bucket/", "tests/docs/"))}
    runs = {test.partition("[")[0] for test in collected() if "bucket" in test.partition("[")[2]}
    assert tests - runs == set()


def test_each_marked_test_is_named_on_the_page() -> None:
    named = {(file, test, name) for _, name, cell in SHOWN for file, test in _TEST.findall(cell)}
    marked = {
        (str(path.relative_to(ROOT)), test, name)
        for path in (ROOT / "tests" / "broker").rglob("test_*.py")
        if "pytest.mark.statement(" in path.read_text()
        for test, ids in carried(str(path.relative_to(ROOT))).items()
        for name in ids
    }
    assert marked - named == set()


@pytest.mark.statement("C18")
def test_the_pages_name_every_option_of_the_broker_and_no_other() -> None:
    pages = "\n".join(
        (DOCS / name).read_text()
        for name in (
            *("embedded-broker.md", "broker.md", "broker-on-s3.md", "broker-security.md"),
            "configuration.md",
        )
    )
    offered = set(_OPTION.findall(logmirror("broker", "--help").stdout))
    offered |= set(_OPTION.findall(logmirror("broker", "users", "add", "--help").stdout))
    named = {
        option
        for block in re.findall(r"^logmirror broker .*(?:\n .*)*", pages, re.MULTILINE)
        for option in _OPTION.findall(block)
    }

    missing = {one.replace("--no-", "--") for one in offered} - OF_OTHER_COMMANDS
    missing = {one for one in missing if one not in pages and f"--no-{one[2:]}" not in pages}
    assert missing == set()
    assert named - offered == set()
