"""Goal: a Fetch over any number of segments that are not in memory ends, within its time.

Method: a broker restarts with more partitions of sealed segments than it keeps open. librdkafka and
a raw client read all records. A slow disk then makes one Fetch run out of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition

from kit.judges.burden import measured
from kit.judges.partition_client import data_batch
from kit.judges.raw_client import (
    RawClient,
    build,
    message_class,
    nested,
    read_response,
    request_frame,
)
from kit.servers.coordinators import coordinators
from kit.servers.embedded import EmbeddedBroker
from logmirror.broker.apis import Api
from logmirror.broker.broker import Broker, Caller
from logmirror.broker.handlers import fetch
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk, OpenFile
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment import FileRange
from logmirror.broker.log.segment_cache import DEFAULT_LOADED_SEGMENTS, SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.options import BrokerOptions
from logmirror.broker.protocol.dispatch import response
from logmirror.broker.topics import Topics
from logmirror.wire.frames import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

TOPIC: Final = "cold"
PARTITIONS: Final = DEFAULT_LOADED_SEGMENTS + 64
BATCHES: Final = 4
RECORDS: Final = 20
"""In a batch of about 600 bytes, so that a segment of 1,024 bytes has one."""


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that has just started, with sealed segments in every partition."""
    broker = EmbeddedBroker(
        tmp_path_factory.mktemp("cold"), segment_bytes=1024, default_partitions=PARTITIONS
    )
    with broker:
        with RawClient(broker.port, timeout_s=60) as client:
            name = build(nested(3, 9, "request", "MetadataRequestTopic"), name=TOPIC)
            client.ask(
                Api.METADATA,
                9,
                topics=(name,),
                allow_auto_topic_creation=True,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=False,
            )
            for _ in range(BATCHES):
                _produce(client)
        broker.stop()
        broker.start()
        yield broker


def _produce(client: RawClient) -> None:
    batch = data_batch(RECORDS)
    data = tuple(
        build(nested(0, 9, "request", "PartitionProduceData"), index=number, records=batch)
        for number in range(PARTITIONS)
    )
    topic = build(nested(0, 9, "request", "TopicProduceData"), name=TOPIC, partition_data=data)
    client.send_frame(
        request_frame(
            0,
            9,
            build(
                message_class(0, 9, "request"),
                transactional_id=None,
                acks=-1,
                timeout=timedelta(minutes=1),
                topic_data=(topic,),
            ),
        )
    )
    _, found = read_response(0, 9, client.receive_frame())
    assert {int(one.error_code) for one in found.responses[0].partition_responses} == {0}


def fetch_frame(
    offsets: dict[int, int], *, max_wait_ms: int, max_bytes: int = 50_000_000, min_bytes: int = 1
) -> bytes:
    partitions = tuple(
        build(
            nested(1, 11, "request", "FetchPartition"),
            partition=number,
            current_leader_epoch=-1,
            fetch_offset=offset,
            log_start_offset=-1,
            partition_max_bytes=1_000_000,
        )
        for number, offset in offsets.items()
    )
    topic = build(nested(1, 11, "request", "FetchTopic"), topic=TOPIC, partitions=partitions)
    request = build(
        message_class(1, 11, "request"),
        replica_id=-1,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=(topic,),
        forgotten_topics_data=(),
        rack_id="",
        max_wait=timedelta(milliseconds=max_wait_ms),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
    )
    return request_frame(1, 11, request)


def fetched(frame: bytes, codes: Collection[int] = (0,)) -> dict[int, Any]:
    _, found = read_response(1, 11, frame)
    partitions = found.responses[0].partitions
    assert {int(partition.error_code) for partition in partitions} <= {*codes}
    return {partition.partition_index: partition for partition in partitions}


def _next_offset(records: bytes) -> int:
    """The offset after the last batch."""
    position = last = 0
    while position < len(records):
        base_offset, length = struct.unpack_from(">qi", records, position)
        last = base_offset + struct.unpack_from(">i", records, position + 23)[0]
        position += 12 + length
    return last + 1


def test_one_fetch_of_more_segments_than_stay_open_gets_all_of_them(cold):
    offsets, size_bytes = dict.fromkeys(range(PARTITIONS), 0), len(data_batch(RECORDS))
    min_bytes = PARTITIONS * BATCHES * size_bytes  # so that it waits for all
    with measured(cold) as burden, RawClient(cold.port, timeout_s=30) as client:
        began = time.monotonic()
        client.send_frame(fetch_frame(offsets, max_wait_ms=5_000, min_bytes=min_bytes))

        found = fetched(client.receive_frame())

        assert time.monotonic() - began < 15
        assert list(found) == list(offsets)
        assert all(partition.records for partition in found.values())
    assert burden.cpu_s < 5
    assert burden.longest_turn_s < 0.2


def test_librdkafka_reads_every_record_of_all_partitions(cold):
    consumer = Consumer(
        {"bootstrap.servers": cold.bootstrap, "group.id": "-", "enable.auto.commit": False}
    )
    with measured(cold) as burden:
        consumer.assign([TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
        found: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        missing = PARTITIONS * BATCHES * RECORDS
        deadline = time.monotonic() + 90
        while missing and time.monotonic() < deadline:
            for message in consumer.consume(10_000, 0.5):
                assert message.error() is None
                found[message.partition()].append(message.offset())
                missing -= 1
        consumer.close()

    assert set(map(tuple, found.values())) == {tuple(range(BATCHES * RECORDS))}
    assert burden.cpu_s < 30


def test_a_full_response_waits_for_no_segment_and_the_next_begins_with_the_rest(cold):
    """A partition is served again while the segment of the next one is loaded."""
    offsets = dict.fromkeys(range(40), 0)
    served, deadline = set[int](), time.monotonic() + 60
    with RawClient(cold.port, timeout_s=30) as client:
        while served != set(offsets) and time.monotonic() < deadline:
            client.send_frame(fetch_frame(offsets, max_wait_ms=500, max_bytes=1))
            found = fetched(client.receive_frame())
            with_records = [number for number, one in found.items() if one.records]
            assert len(with_records) == 1
            assert list(found) == list(offsets)
            served.update(with_records)

    assert served == set(offsets)


class SlowDisk(Disk):
    """A disk that takes 50 ms to open a sealed segment."""

    def open_for_reading(self, path: Path) -> OpenFile:
        time.sleep(0.05)
        return super().open_for_reading(path)


async def _ask(broker: Broker, caller: Caller, frame: bytes) -> dict[int, Any]:
    view = memoryview(bytearray(frame))
    found = response(broker, read_header(view), view, caller)
    parts = found if isinstance(found, bytes | list) else await found
    assert isinstance(parts, list)
    whole = b"".join(
        os.pread(part.file.fd, part.size_bytes, part.position)
        if isinstance(part, FileRange)
        else part
        for part in parts
    )
    return fetched(whole[4:])


class HangingDisk(Disk):
    """A disk on which one folder hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.may_go_on = "none", threading.Event()
        self.opened: list[Path] = []

    def open_for_reading(self, path: Path) -> OpenFile:
        if path.parent.name == self.folder:
            self.opened.append(path)
            assert self.may_go_on.wait(60)
        return super().open_for_reading(path)


class _World(NamedTuple):
    """What a broker on a disk consists of."""

    broker: Broker
    topics: Topics
    commits: GroupCommit

    async def fill(self, partitions: int) -> list[PartitionLog]:
        """Create the topic, with some batches in each partition."""
        topic = await self.topics.create(TOPIC, partitions, {})
        assert topic is not None
        for log in topic.logs:
            for _ in range(BATCHES):
                batch = memoryview(bytearray(data_batch(RECORDS)))
                log.append(batch, check_batch(batch, max_bytes=10**6))
                self.commits.schedule(log)
        await self.commits.drain()
        return topic.logs


def _run(
    folder: Path, disk: Disk, work: Callable[[_World], Coroutine[None, None, None]], *, loaded: int
) -> None:
    """Run with a broker that keeps so many segments open."""

    async def inside() -> None:
        options = BrokerOptions(log_dir=folder, segment_bytes=1024)
        cache, commits = (
            SegmentCache(disk, max_loaded=loaded),
            GroupCommit(lambda _: executor, disk),
        )
        topics = Topics(options, store, executor, disk, cache, commits)
        parts = coordinators(folder, store, topics, commits, executor)
        broker = Broker(options=options, cache=cache, **stack.enter_context(parts))
        await work(_World(broker, topics, commits))

    store = MetadataStore(folder / "db")
    with ThreadPoolExecutor(2) as executor, contextlib.ExitStack() as stack:
        asyncio.run(inside())
    store.close()


def test_a_segment_that_does_not_come_keeps_no_records_of_other_partitions(tmp_path):
    disk, caller, offsets = HangingDisk(), Caller("127.0.0.1"), dict.fromkeys(range(2), 0)

    async def ask(world: _World) -> dict[int, int]:
        frame = fetch_frame(offsets, max_wait_ms=20_000, max_bytes=1)
        found = await asyncio.wait_for(_ask(world.broker, caller, frame), 5)
        return {n: _next_offset(bytes(part.records)) for n, part in found.items() if part.records}

    async def run(world: _World) -> None:
        try:
            logs = await world.fill(2)
            disk.folder = "0"
            for segment in logs[0].segments:
                if segment.is_sealed:
                    world.broker.cache.close(segment)
            for number in range(1, BATCHES):
                assert await ask(world) == {1: number * RECORDS}
                offsets[1] = number * RECORDS
        finally:
            disk.may_go_on.set()
        if (load := caller.loads.running(world.broker.executor)) is not None:
            await asyncio.wait((load,), timeout=30)
        assert await ask(world) == {0: RECORDS}, "it was left out before"

    _run(tmp_path, disk, run, loaded=100)


def test_a_fetch_of_a_segment_that_does_not_come_ends_and_the_next_waits_for_it(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(fetch, "_LONGEST_WAIT_S", 0.3)
    disk, caller = HangingDisk(), Caller("127.0.0.1")
    frame = fetch_frame({0: 0}, max_wait_ms=100)

    async def run(world: _World) -> None:
        [log] = await world.fill(1)
        disk.folder = "0"
        for segment in log.segments:
            if segment.is_sealed:
                world.broker.cache.close(segment)
        try:
            for _ in range(3):
                found = await asyncio.wait_for(_ask(world.broker, caller, frame), 5)
                assert not found[0].records
                assert len(disk.opened) == 1
        finally:
            disk.may_go_on.set()
        found = await asyncio.wait_for(_ask(world.broker, caller, frame), 5)
        assert found[0].records

    _run(tmp_path, disk, run, loaded=100)
    assert caplog.text.count("a Fetch ends before it could be loaded") == 3


def test_a_fetch_that_runs_out_of_time_returns_what_it_has_and_the_next_gets_the_rest(tmp_path):
    count = 60

    async def run(world: _World) -> None:
        await world.fill(count)
        caller, offsets = Caller("127.0.0.1"), dict.fromkeys(range(count), 0)
        rounds = 0
        while any(offset < BATCHES * RECORDS for offset in offsets.values()):
            rounds += 1
            began = time.monotonic()
            found = await asyncio.wait_for(
                _ask(world.broker, caller, fetch_frame(offsets, max_wait_ms=300)), 5
            )
            assert time.monotonic() - began < 2
            moved = {n: _next_offset(bytes(p.records)) for n, p in found.items() if p.records}
            assert moved, "a Fetch made no progress"
            offsets |= moved
            assert rounds < 500
        assert rounds > BATCHES

    _run(tmp_path, SlowDisk(), run, loaded=4)
