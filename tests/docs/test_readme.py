"""The README: every command in it is run, in the order in which it stands there.

Method: the code blocks are read out of the page. Commands of `logmirror` and `kcat` run in an empty
folder beside the page's own configuration, with a free port in place of 9092. `make` targets cannot
run inside `make test`; they must exist and do what the page says. A command that no rule here knows
fails the test, so nothing can be added to the page that is not run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.runs import page
from kit.runs.bucket_load import Load, Reading
from kit.runs.page import Reader
from kit.servers.apache import ApacheTools
from kit.servers.machine import program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.s3 import LogBucket

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS: Final = "127.0.0.1:9092"
STANDBY: Final = "127.0.0.1:9093"
MOVING: Final = "127.0.0.1:9094"
RECORDS: Final = 100_000


def blocks(language: str) -> list[str]:
    return page.blocks(README, language)


COMMANDS: Final = page.commands(README)


@pytest.fixture
def reader(tmp_path: Path, place: LogBucket) -> Iterator[Reader]:
    assert place.environment
    made = Reader(tmp_path, ADDRESS, STANDBY, MOVING)
    made.use(ApacheTools("4.3.1"))
    yield made
    made.end()


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_do_what_it_says(reader: Reader) -> None:
    configuration, standby = blocks("yaml")
    (query,) = blocks("sql")
    reader.write("mirror.yaml", configuration)
    reader.write("standby.yaml", standby)
    commands = deque(c for c in COMMANDS if not c.startswith(("make ", "export PATH=")))

    assert commands[0].startswith("logmirror broker ")
    reader.leave_running(
        commands.popleft(), until=lambda output: "\nlistening on " in f"\n{output}"
    )
    assert commands[0].startswith("seq ")
    reader.type(commands.popleft())
    assert commands[0].startswith("logmirror validate ")
    assert reader.type(commands.popleft()).startswith("OK: 1 mirror(s)")

    assert commands[0].startswith("logmirror run ")
    mirror = reader.leave_running(commands.popleft(), until=lambda log: "INFO mirror starts" in log)
    mirror.signal(signal.SIGTERM)
    mirror.popen.wait(100)
    assert mirror.popen.returncode == 0, mirror.tail()

    assert commands[0].startswith("logmirror status ")
    lags = [line.split()[-1] for line in reader.type(commands.popleft()).splitlines()[1:]]
    assert lags == ["0", "0", "0"]
    assert commands[0].startswith("logmirror verify ")
    verdicts = [line.split()[-1] for line in reader.type(commands.popleft()).splitlines()[1:]]
    assert verdicts == ["ok", "ok", "ok"]

    assert commands[0].startswith("seq ")
    reader.type(commands.popleft())
    assert "-G billing" in commands[0]
    assert sorted(map(int, reader.type(commands[0]).split())) == list(range(1, 11))
    reader.type("seq 91 100 | kcat -P -b 127.0.0.1:9092 -t payments")
    assert sorted(map(int, reader.type(commands.popleft()).split())) == list(range(91, 101))
    move_to_s3(reader, commands)
    assert commands[0].startswith("logmirror broker ")
    reader.leave_running(
        commands.popleft(), until=lambda output: "\nlistening on " in f"\n{output}"
    )
    *steps, last = commands
    for command in steps:
        reader.type(command)
    assert f"-b {STANDBY} -G billing" in last
    assert sorted(map(int, reader.type(last).split())) == list(range(11, 21))

    query = query.replace("archive/", f"{reader.folder}/archive/").strip().removesuffix(";")
    assert "newest" in str(duckdb.sql(query))
    # DuckDB's rows of Python objects would need pytz for the time.
    found = duckdb.sql(f"SELECT * EXCLUDE newest FROM ({query})").fetchall()
    numbers = [row[0] for row in found]
    assert numbers == sorted(set(numbers) & {0, 1, 2})  # kcat draws partitions, not always all
    assert sum(row[1] for row in found) == RECORDS
    assert all(1 <= int(row[2]) <= RECORDS for row in found)


def move_to_s3(reader: Reader, commands: deque[str]) -> None:
    """Type the commands of "Move a partition to S3 while it is written"."""
    assert commands[0].startswith("logmirror broker --log-dir hot ")
    broker = reader.leave_running(
        commands.popleft(), until=lambda output: "\nlistening on " in f"\n{output}"
    )
    reader.type(commands.popleft())
    address = next(word for word in broker.tail(10_000).split() if word.startswith("127.0.0.1:"))
    idempotent = {"enable.idempotence": True}
    with (
        Reading(address, "clicks", partitions=1) as reading,
        Load(address, "clicks", per_s=500, partitions=1, **idempotent) as load,
    ):
        reader.type(commands.popleft())
        execute, verify = commands.popleft(), commands.popleft()
        assert execute.endswith(" --execute")
        carry_out(reader, execute, verify)
        load.wait_for(100)
        reader.type(f"sed 's|s3://[^\"]*|{reader.folder}/hot|' plan.json > back.json")
        back = [command.replace("plan.json", "back.json") for command in (execute, verify)]
        carry_out(reader, *back)
        load.wait_for(100)
        load.stop()
        assert load.flush() == 0
        reading.wait_for(RECORDS + load.sent)
    assert load.failures == reading.errors == []
    found = reading.found()
    of_page = [value for at, value in sorted(found.items()) if at not in load.acked]
    assert of_page == [b"%d" % number for number in range(1, RECORDS + 1)]
    assert {at: found[at] for at in load.acked} == load.acked
    assert len(load.acked) == load.sent
    rows = rows_by_librdkafka(address, "clicks")
    assert {(0, row.offset): row.value for row in rows} == found


def carry_out(reader: Reader, execute: str, verify: str) -> None:
    """Begin a move with Apache Kafka's tool, and wait until that says that it is complete."""
    reader.type(execute)
    deadline = time.monotonic() + 60
    while "completed successfully" not in (found := reader.type(verify)):
        assert time.monotonic() < deadline, found


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program_of_the_page,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", program_of_the_page],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", done.stdout)


def test_nothing_follows_at_once_on_what_takes_a_moment_to_be_ready() -> None:
    """A pasted block gives a program in the background no time to start."""
    started = [
        block.splitlines() for block in blocks("sh") if re.search(r"&$", block, re.MULTILINE)
    ]

    assert started
    for lines in started:
        assert [line for line in lines if line.endswith("&")] == [lines[-1]]


def test_the_make_targets_of_the_page_exist_and_do_what_it_says() -> None:
    targets = [c.removeprefix("make ") for c in COMMANDS if c.startswith("make ")]
    steps = {
        target: subprocess.run(
            [program("make"), "--dry-run", "--no-print-directory", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()
        for target in targets
    }

    assert list(steps) == ["demo", "test", "install"]
    assert steps["install"] == ["scripts/setup.sh"]
    assert steps["demo"][0] == steps["install"][0]
    assert steps["demo"][-1].endswith(" logmirror demo")
    assert steps["test"][0] == "scripts/setup.sh tests"
    assert " pytest " in steps["test"][-1]


def test_the_page_puts_the_command_where_make_install_puts_it() -> None:
    exports = [c for c in COMMANDS if c.startswith("export")]
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")

    assert exports == ['export PATH="$PWD/.venv/bin:$PATH"']
    assert '"$python" -m venv .venv' in setup


def test_the_table_of_commands_is_complete() -> None:
    shown = re.findall(r"^\| `logmirror ([a-z]+)(?: [a-z]+)?`", README, re.MULTILINE)
    usage = subprocess.run(
        [sys.executable, "-m", "logmirror", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout
    listed = re.findall(r"^\W*([a-z]+)  ", usage.partition("Commands")[2], re.MULTILINE)

    assert sorted(shown) == sorted(listed)


def test_every_link_of_the_page_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_what_the_product_is_fits_on_one_screen() -> None:
    first_screen = README.partition("\n## ")[0].splitlines()

    assert len(first_screen) <= 40
    assert max(len(line) for line in first_screen) <= 100
