"""Where a log begins and ends: ListOffsets and OffsetForLeaderEpoch.

ListOffsets (key 2, versions 1-10):

    timestamp  means                         answered with
    >= 0       the first record that is      its offset and timestamp; -1 if there is none
               not older
    -1         latest                        the watermark (L1 in `partition_log`)
    -2, -4     earliest; earliest local      the log start
    -3         the largest timestamp         the first record that has it
    -5         latest tiered                 -1: nothing is tiered

A look-up by time reads the index, the headers of one interval, and decodes one batch. It runs off
the event loop, because a segment that was not read for long is indexed first, and a batch may be
compressed. A transaction marker counts, as in Kafka: it has an offset and a time.

OffsetForLeaderEpoch (key 23, versions 2-4): there is one leader epoch, 0, and its end is `log_end`,
where the next batch will land, also while what is before it is not durable yet. Who lost the answer
to a Produce asks this before deciding whether to send again (I7), and only `log_end` helps:

- The watermark would hide a batch that is appended and waits for the disk. Sent again without a
  producer id it would be stored twice.
- `log_end` is no promise that the batch stays: it becomes durable, or the partition goes offline
  (L3), or the broker dies and the connection with it. In all three cases the next request says so,
  and who counts progress counts it by the watermark, not by this.

Apache Kafka draws the same line between its log end, shown here, and its high watermark.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.segment import BatchAt, Segment, walk
from logmirror.errors import LogmirrorError
from logmirror.model import OFFSET_MAX
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.scan import BatchScanner
from logmirror.wire.serve_markers import CONTROL_FLAG
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
_NOT_FOUND: Final = (-1, -1)
_EPOCH: Final = 0
_NO_EPOCH: Final = -1
_CONTROL_AT: Final = 22
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
            code, timestamp_ms, offset = await _response(broker, asked.name, wanted)
            partitions.append(
                kind.entity(
                    "ListOffsetsPartitionResponse",
                    partition_index=wanted.partition_index,
                    error_code=code,
                    timestamp=timestamp_ms,
                    offset=offset,
                    leader_epoch=_EPOCH if offset >= 0 else _NO_EPOCH,
                )
            )
        topics.append(
            kind.entity("ListOffsetsTopicResponse", name=asked.name, partitions=tuple(partitions))
        )
    return kind.frame(header.correlation_id, topics=tuple(topics))


async def _response(broker: Broker, name: str, wanted: Message) -> tuple[ErrorCode, int, int]:
    """Return error, timestamp and offset for one partition."""
    topic = broker.topics.by_name.get(name)
    if topic is None or not 0 <= wanted.partition_index < len(topic.logs):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, *_NOT_FOUND
    log, timestamp_ms = topic.logs[wanted.partition_index], wanted.timestamp
    refused = ErrorCode.NONE
    if code := epoch_error(wanted.current_leader_epoch):
        refused = code
    elif log.failure is not None:
        refused = ErrorCode.KAFKA_STORAGE_ERROR
    elif timestamp_ms < LATEST_TIERED:
        refused = ErrorCode.INVALID_REQUEST
    if refused:
        return refused, *_NOT_FOUND
    fixed = {
        LATEST: log.high_watermark,
        EARLIEST: log.log_start,
        EARLIEST_LOCAL: log.log_start,
        LATEST_TIERED: -1,
    }
    if timestamp_ms in fixed:
        return ErrorCode.NONE, -1, fixed[timestamp_ms]
    loop = asyncio.get_running_loop()
    while True:
        segments = log.readable_segments()
        try:
            found_ms, offset = await loop.run_in_executor(
                broker.executor, _find_time, broker.cache, segments, log.log_start, timestamp_ms
            )
        except (LogmirrorError, OSError) as error:
            if any(segment.is_deleted for segment, _ in segments):
                continue  # between two looks records were deleted, with the file they were in
            _LOG.warning("%s-%d: look-up by time: %s", name, wanted.partition_index, error)
            return ErrorCode.KAFKA_STORAGE_ERROR, *_NOT_FOUND
        return ErrorCode.NONE, found_ms, offset


def epoch_error(current_leader_epoch: int) -> ErrorCode:
    """Return what is wrong with the epoch that a client takes for ours; `none` if it says none."""
    if current_leader_epoch in (_EPOCH, _NO_EPOCH):
        return ErrorCode.NONE
    if current_leader_epoch > _EPOCH:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    return ErrorCode.FENCED_LEADER_EPOCH


def offset_for_leader_epoch(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Answer an OffsetForLeaderEpoch request."""
    kind = response_kind(Api.OFFSET_FOR_LEADER_EPOCH, header.version)
    topics = []
    for asked in request.topics:
        partitions = []
        for wanted in asked.partitions:
            code, epoch, end_offset = _end_of_epoch(broker, asked.topic, wanted)
            partitions.append(
                kind.entity(
                    "EpochEndOffset",
                    error_code=code,
                    partition=wanted.partition,
                    leader_epoch=epoch,
                    end_offset=end_offset,
                )
            )
        topics.append(
            kind.entity(
                "OffsetForLeaderTopicResult", topic=asked.topic, partitions=tuple(partitions)
            )
        )
    return kind.frame(header.correlation_id, topics=tuple(topics))


def _end_of_epoch(broker: Broker, name: str, wanted: Message) -> tuple[ErrorCode, int, int]:
    """Return error, epoch and its end for one partition."""
    topic = broker.topics.by_name.get(name)
    if topic is None or not 0 <= wanted.partition < len(topic.logs):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, *_NOT_FOUND
    log = topic.logs[wanted.partition]
    if code := epoch_error(wanted.current_leader_epoch):
        return code, *_NOT_FOUND
    if log.failure is not None:
        return ErrorCode.KAFKA_STORAGE_ERROR, *_NOT_FOUND
    if wanted.leader_epoch != _EPOCH:
        return ErrorCode.NONE, *_NOT_FOUND
    return ErrorCode.NONE, _EPOCH, log.log_end


def _find_time(
    cache: SegmentCache, segments: list[tuple[Segment, int]], log_start: int, timestamp_ms: int
) -> tuple[int, int]:
    """Return timestamp and offset of the record that is asked for; (-1, -1): there is none."""
    if timestamp_ms == MAX_TIMESTAMP:
        timestamp_ms = _largest(cache, segments, log_start)
    for segment, end in segments:
        file, index = cache.loaded(segment)
        position = index.first_interval_reaching(timestamp_ms)
        if position is None:
            continue
        for batch in walk(file, position, end):
            if batch.max_timestamp_ms >= timestamp_ms and batch.last_offset >= log_start:
                for times_ms, offsets in _records(file, batch, log_start):
                    rows = np.flatnonzero(times_ms >= timestamp_ms)
                    if len(rows):
                        return int(times_ms[rows[0]]), int(offsets[rows[0]])
    return _NOT_FOUND


def _largest(cache: SegmentCache, segments: list[tuple[Segment, int]], log_start: int) -> int:
    """Return the largest timestamp of all readable records."""
    largest = 0
    for segment, end in segments:
        file, index = cache.loaded(segment)
        if end == segment.size_bytes and segment.first >= log_start:
            largest = max(largest, index.max_timestamp_ms)
            continue
        # The index also knows batches that are not durable yet, or deleted; nobody may hear of
        # those.
        for batch in walk(file, index.position_before(log_start), end):
            if batch.base_offset >= log_start:
                largest = max(largest, batch.max_timestamp_ms)
            elif batch.last_offset >= log_start:
                for times_ms, _ in _records(file, batch, log_start):
                    largest = max(largest, int(times_ms.max()))
    return largest


def _records(
    file: OpenFile, batch: BatchAt, log_start: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield timestamps and offsets of a batch's records from the log start on, never none."""
    data = os.pread(file.fd, batch.size_bytes, batch.position)
    if data[_CONTROL_AT] & CONTROL_FLAG:
        yield np.array([batch.max_timestamp_ms]), np.array([batch.base_offset])
        return
    batches = BatchScanner().scan(data, len(data))
    decoder = RecordDecoder(max_chunk_bytes=_CHUNK_BYTES)
    for columns in decoder.decode(data, batches, first=log_start, end=OFFSET_MAX):
        if len(columns.offsets):
            yield columns.timestamps_ms, columns.offsets
