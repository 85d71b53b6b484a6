"""Fetch (key 1, versions 4-17): serves whole, durable record batches.

A response holds as many whole batches as fit. The first partition with data gets at least one batch
even if it exceeds all limits, so that a consumer always makes progress (KIP-74). Only durable
records are served (L1 in `partition_log`). A request for damaged records gets CORRUPT_MESSAGE (L7).
Offsets from the high watermark to the log end are in range, as in Kafka, and return no records yet.
With less than `min_bytes` available, the request waits until there are enough bytes, an error
occurs, or `max_wait_ms` has passed.

Deviations from Kafka: there are no fetch sessions (every response has session ID 0, so clients send
full requests); a batch is never truncated.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.offsets import epoch_error
from logmirror.broker.log.partition_log import ColdSegmentError
from logmirror.broker.log.segment import FileRange
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.wire.serve_fetch import (
    TOPIC_ID_FROM,
    Fetched,
    FetchPartition,
    FetchRequest,
    pack_fetch_response,
    parse_fetch,
)

if TYPE_CHECKING:
    from collections.abc import Container, Coroutine

    from logmirror.broker.broker import Broker
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.topics import Topic
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_FULL_FETCH_EPOCHS: Final = (-1, 0)

Part = bytes | bytearray | FileRange
"""A part of a response: bytes, or a range of a file."""


class _Found(NamedTuple):
    """The result of reading the requested partitions once."""

    topics: list[tuple[str | bytes, list[Fetched]]]
    ranges: list[list[FileRange]]
    """The file ranges of each partition with records, in order."""
    records_bytes: int
    has_error: bool
    logs: list[PartitionLog]


def fetch(
    broker: Broker, header: RequestHeader, frame: memoryview
) -> list[Part] | Coroutine[None, None, list[Part]]:
    """Handle Fetch: returns the response, or a coroutine that waits for `min_bytes`.

    Raises:
        RemoteProtocolError: The frame is not a Fetch request.
    """
    request = parse_fetch(frame, header.version)
    if request.session_epoch not in _FULL_FETCH_EPOCHS:
        code = ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        return list(pack_fetch_response(header.version, header.correlation_id, [], error=code))
    try:
        found = _read_all(broker, request, header.version)
    except ColdSegmentError:
        return _wait(broker, header, request, None)
    if _must_wait(request, found):
        return _wait(broker, header, request, found)
    return _pack(header, found)


def _pack(header: RequestHeader, found: _Found) -> list[Part]:
    pieces = pack_fetch_response(header.version, header.correlation_id, found.topics)
    parts: list[Part] = [pieces[0]]
    for piece, ranges in zip(pieces[1:], found.ranges, strict=True):
        parts += ranges
        parts.append(piece)
    return parts


def _must_wait(request: FetchRequest, found: _Found) -> bool:
    return not found.has_error and found.records_bytes < request.min_bytes


async def _wait(
    broker: Broker, header: RequestHeader, request: FetchRequest, found: _Found | None
) -> list[Part]:
    if found is None:
        found = await _read_all_loading(broker, request, header.version)
    loop = asyncio.get_running_loop()
    wait_ms = min(request.max_wait_ms, broker.options.max_fetch_wait_ms)
    moved, is_over = asyncio.Event(), asyncio.Event()

    def give_up() -> None:
        is_over.set()
        moved.set()

    timer = loop.call_later(max(0, wait_ms) / 1000, give_up)
    logs = set(found.logs)
    for log in logs:
        log.watch(moved.set)
    try:
        while not is_over.is_set() and _must_wait(request, found):
            await moved.wait()
            moved.clear()
            found = await _read_all_loading(broker, request, header.version)
    finally:
        timer.cancel()
        for log in logs:
            log.unwatch(moved.set)
    return _pack(header, found)


async def _read_all_loading(broker: Broker, request: FetchRequest, version: int) -> _Found:
    """Read as `_read_all` does, and load cold segments in the executor."""
    loop = asyncio.get_running_loop()
    unreadable: set[Segment] = set()
    while True:
        try:
            return _read_all(broker, request, version, unreadable)
        except ColdSegmentError as cold:
            segment = cold.segment
        try:
            await loop.run_in_executor(broker.executor, broker.cache.loaded, segment)
        except (LogmirrorError, OSError):
            if segment.is_deleted:
                continue  # deleted meanwhile; the next read returns OFFSET_OUT_OF_RANGE
            _LOG.exception("%s: segment could not be read", segment.path)
            unreadable.add(segment)


def _read_all(
    broker: Broker, request: FetchRequest, version: int, unreadable: Container[Segment] = ()
) -> _Found:
    by_id = version >= TOPIC_ID_FROM
    left = max(0, min(request.max_bytes, broker.options.max_fetch_bytes))
    found = _Found([], [], 0, has_error=False, logs=[])
    has_error = False
    records_bytes = 0
    for name, partitions in request.topics:
        responses: list[Fetched] = []
        found.topics.append((name, responses))
        topic = _topic(broker, name)
        for wanted in partitions:
            at_least_one = records_bytes == 0
            try:
                response, ranges = _read(
                    topic, wanted, left, at_least_one=at_least_one, by_id=by_id
                )
            except ColdSegmentError as cold:
                if cold.segment not in unreadable:
                    raise
                response, ranges = _failed(wanted.partition, ErrorCode.KAFKA_STORAGE_ERROR), []
            responses.append(response)
            has_error = has_error or response.error != 0
            if topic is not None and response.error == 0:
                found.logs.append(topic.logs[wanted.partition])
            if ranges:
                found.ranges.append(ranges)
                records_bytes += response.records_bytes
                left = max(0, left - response.records_bytes)
    return found._replace(records_bytes=records_bytes, has_error=has_error)


def _failed(number: int, code: ErrorCode) -> Fetched:
    return Fetched(number, code, -1, -1, 0)


def _topic(broker: Broker, name: str | bytes) -> Topic | None:
    if isinstance(name, bytes):
        return broker.topics.by_id.get(name)
    return broker.topics.by_name.get(name)


def _read(
    topic: Topic | None, wanted: FetchPartition, left: int, *, at_least_one: bool, by_id: bool
) -> tuple[Fetched, list[FileRange]]:
    number = wanted.partition
    if topic is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return Fetched(number, code, -1, -1, 0), []
    if not 0 <= number < len(topic.logs):
        return Fetched(number, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, 0), []
    if code := epoch_error(wanted.leader_epoch):
        return Fetched(number, code, -1, -1, 0), []
    log = topic.logs[number]
    watermark, start = log.high_watermark, log.log_start
    if log.failure is None and not start <= wanted.offset <= log.log_end:
        return Fetched(number, ErrorCode.OFFSET_OUT_OF_RANGE, watermark, start, 0), []
    try:
        limit = min(left, max(0, wanted.max_bytes))
        ranges = log.read(wanted.offset, limit, at_least_one=at_least_one)
    except LogmirrorError as error:
        _LOG.warning("%s-%d: %s", topic.name, number, error)
        is_damaged = isinstance(error, CorruptionError)
        code = ErrorCode.CORRUPT_MESSAGE if is_damaged else ErrorCode.KAFKA_STORAGE_ERROR
        return _failed(number, code), []
    size_bytes = sum(found.size_bytes for found in ranges)
    return Fetched(number, 0, watermark, start, size_bytes), ranges
