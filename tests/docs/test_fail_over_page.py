"""docs/fail-over.md: groups that are moved by the page's commands read each record once."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kit.runs.page import Reader, blocks, commands

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "fail-over.md").read_text("utf-8")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path, "127.0.0.1:9092", "127.0.0.1:9093")
    yield made
    made.end()


@pytest.mark.jvm
@pytest.mark.timeout(300)
def test_the_groups_of_the_page_read_every_record_once(reader):
    (configuration,) = blocks(PAGE, "yaml")
    reader.write("mirror.yaml", configuration)
    rest = deque(commands(PAGE))
    for _ in range(2):
        reader.leave_running(rest.popleft(), until=lambda output: "listening on " in output)
    printed = {command: reader.type(command) for command in rest}

    for group, count in (("billing", 40), ("shipping", 70)):
        before, after = (text for command, text in printed.items() if f"-G {group}" in command)
        assert before.split() == [str(number) for number in range(1, count + 1)]
        assert after.split() == [str(number) for number in range(count + 1, 101)]
    planned, applied = (text for command, text in printed.items() if " groups " in command)
    step = ["shipping", "standby", "orders", "0", "70"]
    assert planned.splitlines()[1].split()[:7] == [*step, "70", "-"]
    assert applied.splitlines()[1].split() == [*step, "ok"]
