"""Goal: moves of many partitions are accepted at once, and take turns.

Method: a broker with 10,000 partitions; and the real logs and moves of 21 partitions on a model of
disks, a step at a time (`moving_log`).
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

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


def opened(life: Life, number: int) -> PartitionLog:
    folder: Path = life.log.folder.with_name(str(number))
    return recover(
        folder, disk=life.disk, cache=SegmentCache(life.disk), segment_bytes=700, durable=None
    )
