"""Goal: moves of many partitions are accepted at once, and take turns.

Method: a broker with 10,000 partitions; one with a large partition and 20 small ones; and the real
logs and moves of as many on a model of disks, a step at a time (`moving_log`).
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, fill
from broker.moves.test_tools import Plan
from kit.runs.commands import wait_until
from kit.runs.moving_log import KEY, Life, Rows, append, prepare, run, until
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import SegmentCopy

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

PARTITIONS = 10_000
TIMEOUT_S = 10
"""How long `kafka-reassign-partitions` waits for a response by default."""

ACTIVE, SMALL = 8, 20
LARGE, EACH, LIMIT = 2_000, 30, 400_000
"""Batches of the large partition in a broker, and of a small one; the limit there."""

SEGMENTS, FEW = 150, 10
"""Of the large partition, and of a small one. A step copies one at most."""


@pytest.mark.slow
@pytest.mark.move("E100")
def test_e100_ten_thousand_moves_are_accepted_within_the_timeout_of_kafkas_tool(dirs):
    dirs.create("t", PARTITIONS)
    with dirs.client() as client:
        began_s = time.monotonic()
        codes = client.move({dirs.b: {"t": tuple(range(PARTITIONS))}})
        assert time.monotonic() - began_s < TIMEOUT_S
        assert len(codes) == PARTITIONS
        assert set(codes.values()) == {0}
        for number in (0, PARTITIONS - 1):
            assert str(dirs.b) in client.where("t", number), "moved, or being moved"


@pytest.mark.gate("10,000 partitions")
@pytest.mark.move("E100")
def test_e100_kafkas_tool_moves_ten_thousand_partitions_with_one_plan(apache_tools, dirs, tmp_path):
    """Its requests have the tool's own timeouts: one that copied would not end within them."""
    dirs.create("t", PARTITIONS)
    fill(dirs, "t")
    dirs.limit(1)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b, PARTITIONS)
    started = "Successfully started moving log directory to "
    found = [line for line in plan.run("--execute") if line.startswith(started)]
    assert len(set(found)) == PARTITIONS
    assert "Reassignment of replica t-0-1 is still in progress." in plan.run("--verify")
    dirs.limit(None)
    expected = {
        f"Reassignment of replica t-{n}-1 completed successfully." for n in range(PARTITIONS)
    }
    wait_until(lambda: expected <= {*plan.run("--verify")}, what=lambda: "all moves")


@pytest.mark.move("E49")
def test_e49_a_large_partition_holds_up_no_small_ones(tmp_path, monkeypatch):
    """It is requested first, and ends last. Few copies are in progress at any time."""
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(49))
    logs: list[PartitionLog] = []
    moved, most = list[str](), [0]
    begin = SegmentCopy.__init__

    def noted(copy: SegmentCopy, *parts: object) -> None:
        begin(copy, *parts)  # type: ignore[arg-type]  # its own
        folders = (tmp_path / "dirs" / "b" / "t").glob("*-future")
        most[0] = max(most[0], len(list(folders)))

    monkeypatch.setattr(SegmentCopy, "__init__", noted)

    async def work() -> None:
        await life.start()
        life.moves.when_moved = lambda _, new: moved.append(new.name)
        logs.append(life.log)
        logs.extend(opened(life, number) for number in range(1, 1 + SMALL))
        for log in logs:
            while len(log.segments) < (SEGMENTS if log is life.log else FEW):
                append(log, log.log_end // 2)
            life.commits.schedule(log)
            await life.commits.flushed(log, log.log_end)
        target = tmp_path / "dirs" / "b"
        await life.moves.change([((KEY[0], n), log, target) for n, log in enumerate(logs)])
        await until(lambda: not life.moves.all)
        await life.moves.close()

    assert not run(life, work)
    assert len(moved) == len(logs)
    assert moved[-1] == "0"
    assert most == [ACTIVE]


@pytest.mark.slow
@pytest.mark.move("E49")
def test_e49_small_partitions_are_moved_while_a_large_one_has_its_turns(dirs):
    """In a broker, behind a limit: in a turn, a tenth of a second's bytes are copied."""
    dirs.create("large", segment_bytes="1000000")
    fill(dirs, "large", LARGE)
    topics = [f"small-{number}" for number in range(SMALL)]
    for topic in topics:
        dirs.create(topic)
        fill(dirs, topic, EACH)
    dirs.limit(LIMIT)
    with dirs.client() as client:
        codes = client.move({dirs.b: dict.fromkeys(["large", *topics], (0,))})
        assert set(codes.values()) == {0}
        most = 0
        while any([*client.where(topic)] != [str(dirs.b)] for topic in topics):
            copies = list(dirs.b.glob("*/*-future"))
            most = max(most, len(copies))
        large = client.where("large")[str(dirs.b)]
        assert large.is_future
        assert 0 < large.size_bytes < LARGE * len(BATCH) / 2
        assert 1 < most <= ACTIVE
        dirs.limit(None)
    for topic, count in (("large", LARGE), *((topic, EACH) for topic in topics)):
        dirs.wait_in(topic, dirs.b)
        with dirs.partition(topic) as partition:
            assert [offset for offset, _ in contents(partition)] == [*range(100 * count)]


def opened(life: Life, number: int) -> PartitionLog:
    folder: Path = life.log.folder.with_name(str(number))
    return recover(
        folder, disk=life.disk, cache=SegmentCache(life.disk), segment_bytes=700, durable=None
    )
