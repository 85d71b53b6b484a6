"""Goal: a client that lost a Produce response reads the log end offset, and no record too early.

Method: the broker's parts run with a disk whose flush waits for the test. Meanwhile the handlers
get a mirror's requests: log end offset and producer state include the batch, the high watermark and
Fetch do not.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.partition_client import data_batch
from kit.judges.raw_client import build, message_class, nested, read_response, request_frame
from kit.servers.coordinators import coordinators
from logmirror.broker.apis import Api
from logmirror.broker.broker import Broker, Caller
from logmirror.broker.handlers.fetch import fetch
from logmirror.broker.handlers.produce import ProduceResponse, produce
from logmirror.broker.log.disk import Disk, OpenFile
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment import FileRange
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.options import BrokerOptions
from logmirror.broker.protocol.dispatch import response
from logmirror.broker.topics import Topics
from logmirror.errors import UnavailableError
from logmirror.wire.frames import read_header
from logmirror.wire.serve_fetch import parse_fetch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

PRODUCER = 8
TOPIC = "orders"


class SlowDisk(Disk):
    """A disk whose flushes wait."""

    def __init__(self) -> None:
        super().__init__()
        self.may_flush = threading.Event()

    def sync(self, file: OpenFile) -> None:
        assert self.may_flush.wait(60)
        super().sync(file)


def _with_broker(root: Path, act: Callable[[Broker, SlowDisk], Awaitable[None]]) -> None:
    async def run() -> None:
        disk = SlowDisk()
        store = MetadataStore(root / "db")
        try:
            with ThreadPoolExecutor(2) as executor:
                cache, options = SegmentCache(disk), BrokerOptions(log_dir=root)
                commits = GroupCommit(lambda _: executor, disk)
                topics = Topics(options, store, executor, disk, cache, commits)
                await topics.create(TOPIC, 1, {})
                with coordinators(root, store, topics, commits, executor) as others:
                    broker = Broker(options=options, cache=cache, **others)
                    try:
                        await act(broker, disk)
                    finally:
                        disk.may_flush.set()
                await commits.drain()
        finally:
            store.close()

    asyncio.run(run())


async def _ask(broker: Broker, api: Api, version: int, **fields: object) -> Any:
    request = build(message_class(api, version, "request"), **fields)
    frame = memoryview(bytearray(request_frame(api, version, request)))
    found = response(broker, read_header(frame), frame, Caller("127.0.0.1"))
    whole = found if isinstance(found, bytes | list) else await found
    assert isinstance(whole, bytes)
    return read_response(api, version, whole[4:])[1]


def _produce(broker: Broker, sequence: int) -> ProduceResponse:
    batch = data_batch(10, producer_id=PRODUCER, sequence=sequence)
    data = build(nested(0, 9, "request", "PartitionProduceData"), index=0, records=batch)
    topic = build(nested(0, 9, "request", "TopicProduceData"), name=TOPIC, partition_data=(data,))
    request = build(
        message_class(0, 9, "request"),
        transactional_id=None,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=(topic,),
    )
    frame = memoryview(bytearray(request_frame(Api.PRODUCE, 9, request)))
    return produce(broker, read_header(frame), frame, Caller("127.0.0.1"), lambda: None)


def _error_and_offset(found: ProduceResponse) -> tuple[int, int]:
    assert found.frame is not None
    _, response = read_response(Api.PRODUCE, 9, bytes(found.frame)[4:])
    [partition] = response.responses[0].partition_responses
    return int(partition.error_code), partition.base_offset


async def _log_end(broker: Broker) -> tuple[ErrorCode, int]:
    fields = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
    partition = build(nested(23, 4, "request", "OffsetForLeaderPartition"), **fields)
    names = {"topic": TOPIC, "partitions": (partition,)}
    topic = build(nested(23, 4, "request", "OffsetForLeaderTopic"), **names)
    response = await _ask(broker, Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=(topic,))
    [found] = response.topics[0].partitions
    return ErrorCode(found.error_code), found.end_offset


async def _watermark(broker: Broker) -> int:
    fields = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    partition = build(nested(2, 7, "request", "ListOffsetsPartition"), **fields)
    names = {"name": TOPIC, "partitions": (partition,)}
    topic = build(nested(2, 7, "request", "ListOffsetsTopic"), **names)
    asked = {"replica_id": -1, "isolation_level": 0, "topics": (topic,)}
    response = await _ask(broker, Api.LIST_OFFSETS, 7, **asked)
    return int(response.topics[0].partitions[0].offset)


async def _last_sequence(broker: Broker) -> int:
    names = {"name": TOPIC, "partition_indexes": (0,)}
    topic = build(nested(61, 0, "request", "TopicRequest"), **names)
    response = await _ask(broker, Api.DESCRIBE_PRODUCERS, 0, topics=(topic,))
    [producer] = response.topics[0].partitions[0].active_producers
    return int(producer.last_sequence)


async def _fetch(broker: Broker, offset: int, *, wait_ms: int) -> Any:
    partition = build(
        nested(1, 11, "request", "FetchPartition"),
        partition=0,
        fetch_offset=offset,
        partition_max_bytes=1 << 20,
    )
    topic = build(nested(1, 11, "request", "FetchTopic"), topic=TOPIC, partitions=(partition,))
    request = build(
        message_class(1, 11, "request"),
        replica_id=-1,
        max_wait=timedelta(milliseconds=wait_ms),
        min_bytes=1,
        topics=(topic,),
        forgotten_topics_data=(),
    )
    frame = memoryview(bytearray(request_frame(Api.FETCH, 11, request)))
    found = fetch(broker, read_header(frame), parse_fetch(frame, 11), Caller("127.0.0.1"))
    parts = found if isinstance(found, list) else await found
    whole = b"".join(
        os.pread(part.file.fd, part.size_bytes, part.position)
        if isinstance(part, FileRange)
        else part
        for part in parts
    )
    [responded] = read_response(Api.FETCH, 11, whole[4:])[1].responses
    return responded.partitions[0]


def test_a_batch_that_waits_for_the_disk_shows_in_the_log_end_and_nowhere_else(tmp_path):
    async def act(broker: Broker, disk: SlowDisk) -> None:
        first = _produce(broker, 0)

        assert await _log_end(broker) == (ErrorCode.none, 10)
        assert await _last_sequence(broker) == 9
        assert await _watermark(broker) == 0
        assert first.frame is None
        # A client that continues appends there; one that resends gets the duplicate's offset.
        second, again = _produce(broker, 10), _produce(broker, 0)
        assert await _log_end(broker) == (ErrorCode.none, 20)
        assert (second.frame, again.frame) == (None, None)

        disk.may_flush.set()
        await broker.commits.drain()

        assert [_error_and_offset(found) for found in (first, second, again)] == [
            (0, 0),
            (0, 10),
            (0, 0),
        ]
        assert await _watermark(broker) == 20

    _with_broker(tmp_path, act)


def test_a_marker_has_response_when_it_is_durable_and_not_before(tmp_path):
    async def act(broker: Broker, disk: SlowDisk) -> None:
        names = {"name": TOPIC, "partition_indexes": (0,)}
        topic = build(nested(27, 1, "request", "WritableTxnMarkerTopic"), **names)
        fields = {"producer_id": 9, "producer_epoch": 0, "transaction_result": True}
        marker = build(
            nested(27, 1, "request", "WritableTxnMarker"),
            topics=(topic,),
            coordinator_epoch=0,
            **fields,
        )
        asked = asyncio.create_task(_ask(broker, Api.WRITE_TXN_MARKERS, 1, markers=(marker,)))
        await asyncio.sleep(0.1)

        assert await _log_end(broker) == (ErrorCode.none, 1)
        assert not asked.done()
        disk.may_flush.set()
        [found] = (await asked).markers
        assert found.topics[0].partitions[0].error_code == ErrorCode.none
        assert await _watermark(broker) == 1

    _with_broker(tmp_path, act)


@pytest.mark.statement("T14")
def test_an_offline_partition_returns_no_offset(tmp_path):
    async def act(broker: Broker, disk: SlowDisk) -> None:
        first = _produce(broker, 0)
        log = broker.topics.by_name[TOPIC].logs[0]

        log.take_offline(UnavailableError("flush failed"))

        assert _error_and_offset(first) == (ErrorCode.kafka_storage_error, -1)
        assert await _log_end(broker) == (ErrorCode.kafka_storage_error, -1)

    _with_broker(tmp_path, act)


@pytest.mark.statement("C14")
def test_a_reader_of_a_batch_that_waits_for_the_disk_waits_too_and_is_not_sent_away(tmp_path):
    async def act(broker: Broker, disk: SlowDisk) -> None:
        _produce(broker, 0)

        for offset in (0, 9, 10):
            found = await _fetch(broker, offset, wait_ms=1)
            assert (found.error_code, found.records, found.high_watermark) == (0, b"", 0), offset
        beyond = await _fetch(broker, 11, wait_ms=1)
        assert beyond.error_code == ErrorCode.offset_out_of_range
        waiting = asyncio.create_task(_fetch(broker, 9, wait_ms=60_000))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        disk.may_flush.set()
        found = await waiting
        assert (found.error_code, found.high_watermark) == (0, 10)
        assert found.records

    _with_broker(tmp_path, act)
