"""docs/python.md: its examples run as they are on the page, one after the other, with Spark.

Method: the code blocks are joined to one program that runs beside the README's configuration, with
a free port in place of 9092, against the embedded broker with 1,000 records. A writer adds records
while the program waits for a flush.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kit.judges.clients import Message, produce
from kit.runs.commands import QUIET, BrokerCommand

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS: Final = 1_000


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


CHECKS: Final = f"""
assert flushed and stop.is_set()
assert all(row.error is None for row in logmirror.status(settings))
(report,) = logmirror.verify(settings, deep=True)
assert report.ok and report.records > {RECORDS}
"""


def record(number: int) -> Message:
    return Message(None, b"%d" % number, (), 1_700_000_000_000 + number)


@contextlib.contextmanager
def adding_records(bootstrap: str) -> Iterator[None]:
    """Write a record twice a second, meanwhile."""
    is_over = threading.Event()

    def write() -> None:
        while not is_over.wait(0.5):
            produce(bootstrap, "orders", [record(RECORDS)])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_the_examples_of_the_page_run(tmp_path):
    configuration, _ = blocks(README, "yaml")
    broker = BrokerCommand(tmp_path / "broker")
    try:
        broker.start()
        broker.create_topic("orders")
        produce(broker.bootstrap, "orders", [record(n) for n in range(RECORDS)])
        here = tmp_path / "here"
        here.mkdir()
        address = ("127.0.0.1:9092", broker.bootstrap)
        (here / "mirror.yaml").write_text(configuration.replace(*address))
        with adding_records(broker.bootstrap):
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "\n".join(blocks(PAGE, "python")).replace(*address) + CHECKS,
                ],
                cwd=here,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
                env={**os.environ, **QUIET},
            )
    finally:
        broker.remove()

    assert done.returncode == 0, done.stdout + done.stderr
    first = re.search(r"^orders 0 (\d+) records ok$", done.stdout, re.MULTILINE)
    assert first, done.stdout
    assert int(first[1]) >= RECORDS
    assert "topix" in done.stdout
