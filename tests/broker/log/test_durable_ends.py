"""Goal: the recorded durable end of a partition is never lost, torn or given to another topic.

Method: the file of durable ends is written, damaged copy by copy, and opened again. A disk that
loses power keeps any mixture of what was written since the last flush.
"""

from __future__ import annotations

import asyncio
import errno
import random
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kit.runs.small_logs import append, flush, open_log
from logmirror.broker.log import durable_ends
from logmirror.broker.log.disk import Disk, OpenFile
from logmirror.broker.log.durable_ends import BackgroundFlush, DurableEnd, DurableEnds
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore, TopicRow
from logmirror.broker.options import BrokerOptions
from logmirror.broker.topics import Topics
from logmirror.errors import CorruptionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOPIC = b"t" * 16
OTHER = b"o" * 16


class LosingDisk(Disk):
    """Keeps what the file was at its last flush, and each write since, in pieces of 16 bytes."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.unsafe: list[tuple[int, bytes]] = []
        self.failing: OSError | None = None

    def write_synced(self, path, parts) -> None:
        data = b"".join(parts)
        super().write_synced(path, [data])
        self.durable = bytearray(data)

    def write_at(self, file: OpenFile, position: int, data: bytes) -> None:
        super().write_at(file, position, data)
        self.unsafe += [(position + at, data[at : at + 16]) for at in range(0, len(data), 16)]

    def sync(self, file: OpenFile) -> None:
        if self.failing is not None:
            self.unsafe.clear()  # Linux: readable, and never written
            raise self.failing
        self.durable = self.after_power_loss(lambda: True)
        self.unsafe.clear()

    def after_power_loss(self, some: Callable[[], bool]) -> bytearray:
        left = bytearray(self.durable)
        for position, data in self.unsafe:
            if some():
                left.extend(bytes(max(0, position + len(data) - len(left))))
                left[position : position + len(data)] = data
        return left


def _end(path: Path, topic: bytes = TOPIC, partition: int = 0) -> DurableEnd | None:
    return DurableEnds(path, Disk()).slot(topic, partition).end


def test_an_end_that_was_recorded_is_read_after_kill_9(tmp_path):
    ends = DurableEnds(tmp_path / "ends", Disk())
    for partition in range(200):
        for offset in range(1, 8):
            ends.slot(TOPIC, partition).record(DurableEnd(offset * partition, partition))
            if offset % 2:
                ends.begin_flush()

    again = DurableEnds(tmp_path / "ends", Disk())  # nothing was flushed

    found = [again.slot(TOPIC, partition).end for partition in range(200)]
    assert found == [DurableEnd(7 * partition, partition) for partition in range(200)]
    assert again.slot(OTHER, 0).end is None


def test_idle_partitions_take_no_space(tmp_path):
    ends = DurableEnds(tmp_path / "ends", Disk())
    for partition in range(10_000):
        ends.slot(TOPIC, partition)
    assert (tmp_path / "ends").stat().st_size < 1000


def test_a_torn_copy_leaves_the_value_before_it(tmp_path):
    path = tmp_path / "ends"
    ends = DurableEnds(path, Disk())
    slot = ends.slot(TOPIC, 3)
    written = []
    for offset in (5, 9, 12, 20):
        before = path.read_bytes().ljust(64 * 192 + 192, b"\0")
        slot.record(DurableEnd(offset, 0))
        after = path.read_bytes()
        changed = [n for n in range(len(after)) if after[n : n + 1] != before[n : n + 1]]
        written.append(changed[0] // 64 * 64)
        ends.begin_flush()
        ends.flush()
        ends.finish_flush(failed=False)
    assert written[0] == written[3]
    assert len(set(written)) == 3
    whole = path.read_bytes()

    for bit in range(8 * 48):
        data = bytearray(whole)
        data[written[-1] + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert _end(path, partition=3) == (12, 0), f"bit {bit}"


@pytest.mark.parametrize("seed", range(60))
def test_a_power_loss_loses_at_most_what_was_recorded_since_the_flush_before(tmp_path, seed):
    chance = random.Random(seed)
    disk = LosingDisk()
    ends = DurableEnds(tmp_path / "ends", disk)
    now = dict.fromkeys(range(5), 0)
    flushed = dict(now)
    begun: dict[int, int] | None = None
    for _ in range(chance.randrange(300)):
        step = chance.random()
        if step < 0.8:
            partition = chance.randrange(len(now))
            now[partition] += chance.randrange(1, 9)
            ends.slot(TOPIC, partition).record(DurableEnd(now[partition], 0))
        elif begun is None:
            begun = dict(now)
            ends.begin_flush()
        else:
            disk.failing = OSError(errno.EIO, "bad disk") if chance.random() < 0.2 else None
            try:
                ends.flush()
                flushed = begun
                ends.finish_flush(failed=False)
            except OSError:
                ends.finish_flush(failed=True)
            begun = None

    after = tmp_path / "after"
    after.write_bytes(disk.after_power_loss(lambda: chance.random() < 0.5))

    left = DurableEnds(after, Disk())
    found = {partition: left.slot(TOPIC, partition).end or (0, 0) for partition in now}
    assert {p: flushed[p] <= end[0] <= now[p] for p, end in found.items()} == dict.fromkeys(
        now, True
    ), (flushed, found, now)


def test_slots_of_deleted_topics_are_used_again_and_their_ends_are_not(tmp_path):
    path = tmp_path / "ends"
    ends = DurableEnds(path, Disk())
    for partition in range(64):
        for offset in (100, 200, 300):
            ends.slot(TOPIC, partition).record(DurableEnd(offset, 7))
            ends.begin_flush()
    size = path.stat().st_size
    ends.forget(TOPIC, 64)
    for partition in range(64):
        ends.slot(OTHER, partition).record(DurableEnd(1, 0))

    assert path.stat().st_size == size
    again = DurableEnds(path, Disk())
    assert {again.slot(OTHER, partition).end for partition in range(64)} == {(1, 0)}
    assert {again.slot(TOPIC, partition).end for partition in range(64)} == {None}
    again.keep_only([])
    again.slot(TOPIC, 0).record(DurableEnd(4, 0))
    assert path.stat().st_size == size
    assert _end(path) == (4, 0)


def test_another_file_of_that_name_is_refused_and_not_changed(tmp_path):
    (tmp_path / "ends").write_bytes(b"something else")

    with pytest.raises(CorruptionError):
        DurableEnds(tmp_path / "ends", Disk())

    assert (tmp_path / "ends").read_bytes() == b"something else"


class FullDisk(Disk):
    def write_at(self, file: OpenFile, position: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")


def test_a_disk_that_is_full_refuses_the_first_batch_and_the_partition_stays_online(tmp_path):
    ends = DurableEnds(tmp_path / "ends", FullDisk())
    log = open_log(tmp_path / "t" / "0", Disk())
    log.end_slot = ends.slot(TOPIC, 0)

    with pytest.raises(UnavailableError, match="could not be written"):
        append(log, 0)

    assert log.failure is None
    assert log.log_end == 0
    log.end_slot = DurableEnds(tmp_path / "other", Disk()).slot(TOPIC, 0)
    assert append(log, 0) == 0


@pytest.mark.statement("T15")
def test_a_durable_end_is_recorded_before_its_response_and_a_failure_is_no_response(tmp_path):
    ends = DurableEnds(tmp_path / "ends", Disk())
    log = open_log(tmp_path / "t" / "0", Disk())
    slot = log.end_slot = ends.slot(TOPIC, 0)
    recorded: list[object] = []
    for number in range(2):
        append(log, number)
        log.when_durable(log.log_end, lambda error: recorded.append((error, slot.end)))
        if number:
            ends._disk = FullDisk()  # noqa: SLF001  # a disk that fails from now on
        flush(log)

    assert recorded[0] == (None, (2, 0))
    assert isinstance(recorded[1][0], UnavailableError)
    assert log.failure is not None


async def _with_topics(
    root: Path, act: Callable[[Topics, MetadataStore], object] = lambda *_: None
) -> None:
    store = MetadataStore(root / "db")
    try:
        with ThreadPoolExecutor(1) as executor:
            disk = Disk()
            commits = GroupCommit(lambda _: executor, disk)
            options = BrokerOptions(log_dir=root)
            topics = Topics(options, store, executor, disk, SegmentCache(disk), commits)
            topics.load()
            result = act(topics, store)
            if asyncio.iscoroutine(result):
                await result
            await commits.drain()
            await topics.close()
    finally:
        store.close()


def _older(root: Path, ends: dict[bytes, tuple[int, int]]) -> None:
    """Write ends as an older version did."""
    database = sqlite3.connect(root / "db")
    database.execute(
        "CREATE TABLE durable_ends (topic_id BLOB NOT NULL, partition INTEGER NOT NULL, end_offset"
        " INTEGER NOT NULL, written_from INTEGER NOT NULL, PRIMARY KEY (topic_id, partition))"
    )
    rows = [(topic, 0, *end) for topic, end in ends.items()]
    database.executemany("INSERT INTO durable_ends VALUES (?, ?, ?, ?)", rows)
    database.commit()
    database.close()


def test_ends_in_an_older_database_are_taken_over_once_and_the_greater_value_counts(tmp_path):
    ids = [uuid.uuid4() for _ in range(3)]
    store = MetadataStore(tmp_path / "db")
    for number, topic_id in enumerate(ids):
        row = TopicRow(name=f"t{number}", topic_id=topic_id, partition_count=1, configs={})
        store.create_topic(row)
    store.close()
    path = tmp_path / ".logmirror" / "durable-ends"
    ends = DurableEnds(path, Disk())
    ends.slot(ids[1].bytes, 0).record(DurableEnd(50, 3))
    ends.slot(ids[2].bytes, 0).record(DurableEnd(5, 3))
    _older(tmp_path, {topic_id.bytes: (9, 2) for topic_id in ids} | {OTHER: (9, 2)})

    def check(topics: Topics, store: MetadataStore) -> None:
        assert store.older_durable_ends() == {}
        # Their folders are gone: what was acknowledged is missing.
        facts = [topics.by_name[f"t{n}"].logs[0].failure.facts["durable_end"] for n in range(3)]
        assert facts == [9, 50, 9]

    for _ in range(2):
        asyncio.run(_with_topics(tmp_path, check))

    assert [_end(path, topic_id.bytes) for topic_id in ids] == [(9, 2), (50, 3), (9, 2)]
    assert _end(path, OTHER) is None


def test_a_recreated_topic_does_not_get_the_end_of_the_old_one(tmp_path):
    async def act(topics: Topics, store: MetadataStore) -> None:
        for count in (5, 1):
            topic = await topics.create("orders", 1, {})
            assert topic is not None
            for number in range(count):
                append(topic.logs[0], number)
            topics._commits.schedule(topic.logs[0])  # noqa: SLF001  # as Produce does
            await topics._commits.drain()  # noqa: SLF001  # the same
            if count == 5:
                await topics.delete(topic)

    def check(topics: Topics, store: MetadataStore) -> None:
        log = topics.by_name["orders"].logs[0]
        assert (log.failure, log.log_end) == (None, 2)
        assert log.end_slot is not None
        assert log.end_slot.end == (2, 0)
        assert log.end_slot.number == 1

    asyncio.run(_with_topics(tmp_path, act))
    asyncio.run(_with_topics(tmp_path, check))


def test_changes_are_flushed_in_the_background_and_nothing_is_done_without_any(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(durable_ends, "FLUSH_S", 0.001)
    monkeypatch.setattr(durable_ends, "_RETRY_S", 0.001)
    flushed: list[bytearray] = []
    disk = LosingDisk()
    sync = disk.sync
    done: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def counted(file: OpenFile) -> None:
        sync(file)
        flushed.append(disk.durable)
        loop.call_soon_threadsafe(done.set)

    disk.sync = counted

    async def act() -> None:
        nonlocal done, loop
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        ends = DurableEnds(tmp_path / "ends", disk)
        flush = BackgroundFlush(ends)
        await asyncio.sleep(0.02)
        assert flushed == []
        disk.failing = OSError(errno.EIO, "bad disk")
        for offset in range(1, 4):
            ends.slot(TOPIC, 0).record(DurableEnd(offset, 0))
        await asyncio.sleep(0.02)
        disk.failing = None
        await asyncio.wait_for(done.wait(), 10)
        await asyncio.sleep(0.02)
        assert len(flushed) <= 2
        ends.slot(TOPIC, 0).record(DurableEnd(9, 0))
        await flush.close()

    asyncio.run(act())

    for number, offset in ((0, 3), (-1, 9)):
        (tmp_path / "after").write_bytes(flushed[number])
        assert _end(tmp_path / "after") == (offset, 0)
