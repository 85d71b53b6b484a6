"""Goal: a partition that has left the bucket is what it was, also after a power loss at once.

Method: all of a broker but its network on models of disks and a store in memory (`placed_logs`).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kit.fakes.places import FailingStore, Power, make_disks
from kit.runs.placed_known import TRANSACTIONAL, KnownTopic
from kit.runs.placed_logs import Life
from logmirror.broker.log import durable_ends
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.durable_ends import DurableEnds
from logmirror.broker.metadata import MetadataStore


@pytest.mark.move("E71")
def test_a_partition_has_left_the_bucket_only_when_its_durable_end_survives_a_power_loss(
    tmp_path, monkeypatch
):
    """Without it, a start takes sealed segments for an archive's: open transactions commit."""
    chance, ends = random.Random(1), []
    life = Life(make_disks(tmp_path / "now"), FailingStore(chance), KnownTopic(), chance, Power(0))
    leave = MetadataStore.leave_bucket

    def left(rows: MetadataStore, *what: Any) -> None:
        life.disk.after_power_loss(tmp_path / "left", keep=lambda _: 0, some=lambda: False)
        path = tmp_path / "left" / life.topics.partitions.ends.path.relative_to(life.root)
        ends.append(DurableEnds(path, Disk()).slot(life.topic.topic_id.bytes, 0).end)
        leave(rows, *what)

    monkeypatch.setattr(durable_ends, "FLUSH_S", 0.2)
    monkeypatch.setattr(MetadataStore, "leave_bucket", left)

    async def work() -> None:
        await life.start()
        await life.move(0, "w")
        await life.quiet()
        life.writer(0).append(TRANSACTIONAL)
        await life.flushed()
        await life.move(0, "b")
        await life.quiet()
        await life.stop()

    asyncio.run(work())
    assert [end and end.offset for end in ends] == [2]
