"""ListOffsets (key 2, versions 1-10).

    timestamp  means                         answered with
    >= 0       the first record that is      its offset and timestamp; -1 if there is none
               not older
    -1         latest                        the watermark (L1 in `partition_log`)
    -2, -4     earliest; earliest local      the log start
    -3         the largest timestamp         the first record that has it
    -5         latest tiered                 -1: nothing is tiered

A look-up by time reads the index, the headers of one interval, and decodes one batch. It runs off
the event loop, because a segment that was not read for long is indexed first, and a batch may be
compressed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

import numpy as np
from kio.schema.errors import ErrorCode

from logmirror.broker.apis import Api
from logmirror.broker.segment import BatchAt, Segment, walk
from logmirror.errors import LogmirrorError
from logmirror.model import OFFSET_MAX
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.scan import BatchScanner
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.disk import OpenFile
    from logmirror.broker.segment_cache import SegmentCache
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
_NOT_FOUND: Final = (-1, -1)
_CHUNK_BYTES: Final = 4 * 1024 * 1024


async def list_offsets(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Answer a ListOffsets request."""
    kind = response_kind(Api.LIST_OFFSETS, header.version)
    topics = []
    for asked in request.topics:
        partitions = []
        for wanted in asked.partitions:
            code, timestamp_ms, offset = await _answer(broker, asked.name, wanted)
            partitions.append(
                kind.entity(
                    "ListOffsetsPartitionResponse",
                    partition_index=wanted.partition_index,
                    error_code=code,
                    timestamp=timestamp_ms,
                    offset=offset,
                    leader_epoch=0 if offset >= 0 else -1,
                )
            )
        topics.append(
            kind.entity("ListOffsetsTopicResponse", name=asked.name, partitions=tuple(partitions))
        )
    return kind.frame(header.correlation_id, topics=tuple(topics))


async def _answer(broker: Broker, name: str, wanted: Message) -> tuple[ErrorCode, int, int]:
    """Return error, timestamp and offset for one partition."""
    topic = broker.topics.by_name.get(name)
    if topic is None or not 0 <= wanted.partition_index < len(topic.logs):
        return ErrorCode.unknown_topic_or_partition, *_NOT_FOUND
    log, timestamp_ms = topic.logs[wanted.partition_index], wanted.timestamp
    refused = ErrorCode.none
    if getattr(wanted, "current_leader_epoch", -1) > 0:
        refused = ErrorCode.unknown_leader_epoch
    elif log.failure is not None:
        refused = ErrorCode.kafka_storage_error
    elif timestamp_ms < LATEST_TIERED:
        refused = ErrorCode.invalid_request
    if refused:
        return refused, *_NOT_FOUND
    fixed = {
        LATEST: log.high_watermark,
        EARLIEST: log.log_start,
        EARLIEST_LOCAL: log.log_start,
        LATEST_TIERED: -1,
    }
    if timestamp_ms in fixed:
        return ErrorCode.none, -1, fixed[timestamp_ms]
    loop = asyncio.get_running_loop()
    segments = log.readable_segments()
    try:
        found_ms, offset = await loop.run_in_executor(
            broker.executor, _find_time, broker.cache, segments, timestamp_ms
        )
    except (LogmirrorError, OSError) as error:
        _LOG.warning("%s-%d: look-up by time: %s", name, wanted.partition_index, error)
        return ErrorCode.kafka_storage_error, *_NOT_FOUND
    return ErrorCode.none, found_ms, offset


def _find_time(
    cache: SegmentCache, segments: list[tuple[Segment, int]], timestamp_ms: int
) -> tuple[int, int]:
    """Return timestamp and offset of the record that is asked for; (-1, -1): there is none."""
    if timestamp_ms == MAX_TIMESTAMP:
        timestamp_ms = _largest(cache, segments)
    for segment, end in segments:
        file, index = cache.loaded(segment)
        position = index.first_interval_reaching(timestamp_ms)
        if position is None:
            continue
        for batch in walk(file, position, end):
            if batch.max_timestamp_ms >= timestamp_ms:
                found = _first_record(file, batch, timestamp_ms)
                if found is not None:
                    return found
    return _NOT_FOUND


def _largest(cache: SegmentCache, segments: list[tuple[Segment, int]]) -> int:
    """Return the largest timestamp of all readable batches."""
    largest = 0
    for segment, end in segments:
        file, index = cache.loaded(segment)
        if end == segment.size_bytes:
            largest = max(largest, index.max_timestamp_ms)
        else:
            # The index also knows batches that are not durable yet; nobody may hear of those.
            largest = max(largest, *(batch.max_timestamp_ms for batch in walk(file, 0, end)))
    return largest


def _first_record(file: OpenFile, batch: BatchAt, timestamp_ms: int) -> tuple[int, int] | None:
    """Return the first record of a batch that is not older; None if only the header said so."""
    data = os.pread(file.fd, batch.size_bytes, batch.position)
    batches = BatchScanner().scan(data, len(data))
    decoder = RecordDecoder(max_chunk_bytes=_CHUNK_BYTES)
    for columns in decoder.decode(data, batches, first=0, end=OFFSET_MAX):
        rows = np.flatnonzero(columns.timestamps_ms >= timestamp_ms)
        if len(rows):
            return int(columns.timestamps_ms[rows[0]]), int(columns.offsets[rows[0]])
    return None
