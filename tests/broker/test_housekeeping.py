"""Goal: topics keep what their settings say, at run time, after restarts, and at little cost.

Method: the broker's own parts with a clock that the test moves, then a real broker whose topics get
short retentions through stock clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import confluent_kafka.admin as confluent
import pytest
from confluent_kafka import KafkaException

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, PartitionClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.compaction import Compactor, OnDisk
from logmirror.broker.housekeeping import Housekeeping
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.options import BrokerOptions
from logmirror.broker.topics import Topics
from logmirror.clock import Clock
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.topic import Topic

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
OFFSET_OUT_OF_RANGE = 1


class _Moved(Clock):
    ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class Parts:
    """The parts of a broker without its network."""

    def __init__(self, executor: ThreadPoolExecutor, disk: Disk, folder: Path, *more: Path) -> None:
        for one in (folder, *more):
            (one / ".logmirror").mkdir(parents=True, exist_ok=True)
        options = BrokerOptions(log_dir=folder, more_log_dirs=more)
        self.clock = _Moved()
        self.store = MetadataStore(folder / ".logmirror" / "broker.sqlite")
        self.commits = GroupCommit(lambda _: executor, disk)
        cache = SegmentCache(disk)
        self.topics = Topics(options, self.store, executor, disk, cache, self.commits)
        self.topics.load()
        self.housekeeping = Housekeeping(
            self.topics, self.commits, cache, disk, executor, self.clock
        )
        self.compactor = Compactor(
            *(self.topics, self.commits, cache, disk, self.store, executor, executor, self.clock),
            *(self.housekeeping.reconsider, OnDisk(disk, executor)),
        )
        self.housekeeping.compactor = self.compactor

    async def create(self, partitions: int = 1, **configs: str) -> Topic:
        values = {name.replace("_", "."): value for name, value in configs.items()}
        topic = await self.topics.create("t", partitions, values)
        assert topic is not None
        return topic

    def write(self, log: PartitionLog, *times_ms: int, key: bytes | None = None) -> None:
        """Append a batch, which is flushed soon."""
        records = [Record(n, time_ms, 0, key, b"x" * 50, ()) for n, time_ms in enumerate(times_ms)]
        batch = memoryview(bytearray(encode_reference(records)))
        log.append(batch, check_batch(batch, max_bytes=10**6))
        self.commits.schedule(log)

    async def append(self, log: PartitionLog, *times_ms: int, key: bytes | None = None) -> None:
        self.write(log, *times_ms, key=key)
        await asyncio.sleep(0)
        await self.commits.drain()
        await self.housekeeping.tick()

    async def change(self, topic: Topic, **configs: str) -> None:
        """Change settings of a topic, and keep its others."""
        values = {name.replace("_", "."): value for name, value in configs.items()}
        await self.topics.set_configs(topic, lambda old: {**old.values, **values}, dry_run=False)

    async def tick(self, after_ms: int = 0) -> None:
        """Let time pass, and as many ticks as a real broker has in a few seconds."""
        self.clock.ms += after_ms
        for _ in range(4):
            await self.housekeeping.tick()
            await asyncio.sleep(0)
            await self.commits.drain()
            await self.compactor.run_once()


@contextlib.asynccontextmanager
async def parts_of(*folders: Path, disk: Disk | None = None) -> AsyncIterator[Parts]:
    with ThreadPoolExecutor(2) as executor:
        parts = Parts(executor, disk or Disk(), *folders)
        try:
            await parts.tick()
            yield parts
        finally:
            await parts.commits.drain()
            parts.store.close()


def _run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(test)


def test_an_expired_log_becomes_empty_and_its_end_stays(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(retention_ms=str(HOUR_MS))
            [log] = topic.logs
            await parts.append(log, START_MS - 5, START_MS)
            await parts.tick(HOUR_MS)
            assert log.log_start == 0
            await parts.tick(1)
            assert (log.log_start, log.log_end, log.size_bytes) == (2, 2, 0)
            assert not list(log.folder.glob("*.batches"))
            await parts.append(log, parts.clock.ms)
            assert log.log_end == 3
        async with parts_of(tmp_path) as parts:
            [log] = parts.topics.by_name["t"].logs
            assert (log.log_start, log.log_end) == (2, 3)

    _run(act())


def test_the_open_segment_is_sealed_by_age_and_young_records_stay(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(retention_ms=str(HOUR_MS), segment_ms="1000")
            [log] = topic.logs
            for number in range(5):
                await parts.append(log, START_MS + number * 2000)
                await parts.tick(1999)
                await parts.tick(1)
            assert [segment.first for segment in log.segments] == [0, 1, 2, 3, 4, 5]
            assert log.log_start == 0
            parts.clock.ms = START_MS + HOUR_MS
            await parts.tick(4000)
            assert log.log_start == 2
            await parts.tick(1)
            assert log.log_start == 3

    _run(act())


def test_without_a_limit_nothing_is_deleted_and_sealed_after_a_week(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create()).logs
            await parts.append(log, 5)
            await parts.tick(7 * 24 * HOUR_MS - 1)
            assert log.tail is not None
            await parts.tick(1)
            assert log.tail is None
            await parts.tick(1000 * 24 * HOUR_MS)
            assert (log.log_start, len(log.segments)) == (0, 2)

    _run(act())


def test_settings_apply_at_once_and_size_is_kept(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(segment_bytes="1024")
            [log] = topic.logs
            for _ in range(100):
                await parts.append(log, START_MS)
            await parts.tick()
            assert log.log_start == 0
            await parts.change(topic, retention_bytes="3000")
            await parts.tick()
            assert 0 < log.log_start < 90
            for _ in range(100):
                await parts.append(log, START_MS)
                await parts.housekeeping.tick()
                await parts.commits.drain()
                assert 3000 <= log.size_bytes <= 3000 + 2 * 1024

    _run(act())


@pytest.mark.parametrize(("retention_ms", "start"), [("-1", 0), (str(2 * HOUR_MS), 0), ("1", 2)])
def test_retention_that_was_replaced_when_it_was_decided_deletes_nothing(
    tmp_path, monkeypatch, retention_ms, start
):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(retention_ms=str(HOUR_MS))
            [log] = topic.logs
            await parts.append(log, START_MS, START_MS)
            delete_records, starts = parts.topics.delete_records, list[int]()

            async def after_a_change(*arguments: Any) -> None:
                if not starts:
                    await parts.change(topic, retention_ms=retention_ms)
                try:
                    await delete_records(*arguments)
                finally:
                    starts.append(log.log_start)

            monkeypatch.setattr(parts.topics, "delete_records", after_a_change)
            await parts.tick(HOUR_MS + 1)
            assert starts[0] == 0
            await parts.tick()
            assert log.log_start == start

    _run(act())


def test_after_a_restart_what_is_due_is_deleted_and_the_rest_when_it_is_due(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(3, retention_ms=str(HOUR_MS), segment_ms="1")
            for log, age_ms in zip(topic.logs, (HOUR_MS + 1, HOUR_MS, 0), strict=True):
                await parts.append(log, START_MS - age_ms)
                await parts.append(log, START_MS - age_ms)
        for _ in range(2):
            async with parts_of(tmp_path) as parts:
                logs = parts.topics.by_name["t"].logs
                await parts.tick(50)
                assert [log.log_start for log in logs] == [2, 2, 0]
                await parts.tick(HOUR_MS - 50)
                assert [log.log_start for log in logs] == [2, 2, 0]
            async with parts_of(tmp_path) as parts:
                logs = parts.topics.by_name["t"].logs
                await parts.tick(HOUR_MS)
                assert [log.log_start for log in logs] == [2, 2, 0]
        async with parts_of(tmp_path) as parts:
            logs = parts.topics.by_name["t"].logs
            await parts.tick(HOUR_MS + 1)
            assert [log.log_start for log in logs] == [2, 2, 2]

    _run(act())


def test_quiet_partitions_cost_nothing(tmp_path, monkeypatch):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(50, retention_ms=str(HOUR_MS))
            for log in topic.logs:
                await parts.append(log, START_MS)
            await parts.tick()
            considered: list[PartitionLog] = []
            really = parts.housekeeping._consider  # noqa: SLF001  # how often it is called

            async def counted(log, *rest):
                considered.append(log)
                return await really(log, *rest)

            monkeypatch.setattr(parts.housekeeping, "_consider", counted)
            for _ in range(100):
                await parts.append(topic.logs[7], START_MS)
                await parts.tick(1000)
            assert considered == []
            await parts.topics.delete(topic)
            await parts.tick()
            await parts.tick(2 * HOUR_MS)
            assert considered == []
            assert not parts.housekeeping._known  # noqa: SLF001  # nothing is kept of it
            assert not parts.housekeeping._due  # noqa: SLF001  # the same

    _run(act())


def test_a_failing_database_deletes_nothing_and_is_tried_again(tmp_path, monkeypatch, caplog):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(retention_ms="0", segment_ms="1")).logs
            await parts.append(log, START_MS)
            database = parts.store._database  # noqa: SLF001  # a database that fails
            real = database._connection  # noqa: SLF001  # the same

            class Failing:
                in_transaction = False

                def execute(self, *_: object) -> None:
                    raise sqlite3.OperationalError("disk I/O error")

            monkeypatch.setattr(database, "_connection", Failing())
            await parts.tick(10)
            monkeypatch.setattr(database, "_connection", real)
            assert "old records could not be deleted" in caplog.text
            assert log.log_start == 0
            assert list(log.folder.glob("*.batches"))
            await parts.tick(60_000)
            assert log.log_start == 1

    _run(act())


def test_a_response_in_progress_keeps_its_segment(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(retention_ms="0", segment_ms="1")).logs
            await parts.append(log, START_MS)
            [found] = log.read(0, 1000, at_least_one=True)
            await parts.tick(10)
            assert not list(log.folder.glob("*.batches"))
            assert len(os.pread(found.file.fd, found.size_bytes, found.position)) > 100

    _run(act())


def test_what_is_stored_while_a_log_is_considered_is_considered_too(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(cleanup_policy="compact")).logs
            await parts.append(log, START_MS, key=b"k")
            consider, ends = parts.compactor.consider, list[int]()

            async def and_store_more(*arguments: Any) -> int | None:
                ends.append(parts.commits.stored_end(log))
                due_ms = await consider(*arguments)
                if len(ends) == 1:
                    log.roll()
                    parts.commits.schedule(log)
                    await asyncio.sleep(0)
                    await parts.commits.drain()
                return due_ms

            parts.compactor.consider = and_store_more
            parts.commits.touch(log)
            parts.housekeeping.reconsider(log)
            await parts.housekeeping.tick()
            await parts.housekeeping.tick()
            assert ends == [0, 1]

    asyncio.run(act())


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(
        tmp_path / "broker",
        bucket=log_bucket,
        overrides={"log.retention.ms": "7200000"},
        segment_bytes=2000,
    ) as broker:
        yield broker


def _settings(broker: EmbeddedBroker, kind: str, name: str) -> dict[str, str]:
    admin = confluent.AdminClient({"bootstrap.servers": broker.bootstrap})
    resource = confluent.ConfigResource(kind, name)
    return {n: e.value for n, e in admin.describe_configs([resource])[resource].result(30).items()}


def _alter(broker: EmbeddedBroker, topic: str, **values: str) -> None:
    admin = confluent.AdminClient({"bootstrap.servers": broker.bootstrap})
    entries = [
        confluent.ConfigEntry(
            name.replace("_", "."), value, incremental_operation=confluent.AlterConfigOpType.SET
        )
        for name, value in values.items()
    ]
    resource = confluent.ConfigResource("TOPIC", topic, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(30)


def _sealed(folder: Path, bucket: LogBucket | None, topic: str, *, last: int) -> list[Path]:
    """Return the sealed segments that end at an offset, as files."""
    pattern = f"{topic}*/0/*-{last:020d}.batches"
    return list(folder.glob(f"**/{pattern}")) if bucket is None else bucket.matching(pattern)


@pytest.mark.statement("T17", "C16")
def test_stock_clients_set_retention_and_find_old_records_gone(
    broker, topic_name, log_bucket, tmp_path
):
    create_topic(broker.bootstrap, topic_name, 1, {"segment.ms": "100"})
    assert _settings(broker, "TOPIC", topic_name)["retention.ms"] == "7200000"
    assert _settings(broker, "BROKER", "1")["log.retention.ms"] == "7200000"
    with pytest.raises(KafkaException, match=r"retention\.ms: an integer from -1"):
        _alter(broker, topic_name, retention_ms="-2")
    now_ms = time.time_ns() // 1_000_000
    old = [Message(value=b"%d" % n, timestamp_ms=now_ms - HOUR_MS) for n in range(10)]
    produce(broker.bootstrap, topic_name, old)
    deadline = time.monotonic() + 20
    while not _sealed(tmp_path, log_bucket, topic_name, last=9):  # young ones would keep them
        assert time.monotonic() < deadline
        time.sleep(0.1)
    young = [Message(value=b"young %d" % n, timestamp_ms=now_ms) for n in range(10, 15)]
    assert produce(broker.bootstrap, topic_name, young) == list(range(10, 15))
    _alter(broker, topic_name, retention_ms=str(HOUR_MS // 2), retention_bytes="1000000")

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        deadline = time.monotonic() + 20
        while partition.list_offset(EARLIEST)[2] == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert partition.list_offset(EARLIEST)[2] == 10
        assert partition.list_offset(now_ms - HOUR_MS)[1:] == (now_ms, 10)
    for _ in range(2):
        rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, start=10))
        wanted = [(n, b"young %d" % n) for n in range(10, 15)]
        assert [(row.offset, row.value) for row in rows] == wanted
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            assert partition.fetch(9).error_code == OFFSET_OUT_OF_RANGE
        broker.kill()
        broker.start()
    delete_topic(broker.bootstrap, topic_name)
