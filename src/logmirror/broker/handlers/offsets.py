"""Log start, log end and offsets by timestamp: ListOffsets and OffsetForLeaderEpoch.

ListOffsets (key 2, versions 1-10):

    timestamp  meaning                       response
    >= 0       the first record with at      its offset and timestamp; -1 if there is none
               least this timestamp
    -1         latest                        the high watermark (L1 in `partition_log`); for
                                             read_committed the last stable offset
    -2, -4     earliest; earliest local      the log start offset
    -3         the largest timestamp         the first record that has it
    -5         latest tiered                 -1: there is no tiered storage

With read_committed, records behind the last stable offset are not found.

A lookup by timestamp reads the index and the headers of one interval, and decodes one batch. It
runs in the executor, because a cold segment is indexed first and a batch may be compressed. Of an
archive it reads few objects (`mounted_times`). A
transaction marker counts as a record, as in Kafka: it has an offset and a timestamp. A lookup that
would pass damaged records is an error: they may be what it looks for. A partition that a request
names twice gets INVALID_REQUEST, once.

OffsetForLeaderEpoch (key 23, versions 2-4): the only leader epoch is 0. Its end offset is the log
end, where the next batch is appended, including batches that are not durable yet. A client that
lost a Produce response reads it before it decides whether to resend (I7):

- The high watermark would hide a batch that is appended and waits for the disk. Resent without a
  producer ID, that batch would be stored twice.
- The log end does not promise that the batch stays. It becomes durable, or the partition goes
  offline (L3), or the broker stops and closes the connection; the next request shows which.
  Progress is therefore measured by the high watermark.

Apache Kafka also returns its log end offset here, not its high watermark.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.log.mounted_log import MountedLog
from logmirror.broker.log.mounted_times import first_reaching, newest_objects, newest_time
from logmirror.broker.log.segment import BatchAt, Segment, walk
from logmirror.broker.security.acls import ResourceType
from logmirror.errors import LogmirrorError
from logmirror.wire.record_times import record_times
from logmirror.wire.serve_markers import CONTROL_FLAG
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog
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
_READ_COMMITTED: Final = 1
_CONTROL_AT: Final = 22
_MAX_BODY_BYTES: Final = 256 * 1024 * 1024
"""Limit for a decompressed batch; batches of an archive may be larger than this broker accepts."""


async def list_offsets(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle ListOffsets."""
    kind = response_kind(Api.LIST_OFFSETS, header.version)
    topics = []
    turns = Turns()
    named: dict[str, dict[int, list[Message]]] = {}
    committed = request.isolation_level == _READ_COMMITTED
    for asked in request.topics:
        numbers = named.setdefault(asked.name, {})
        for wanted in asked.partitions:
            numbers.setdefault(wanted.partition_index, []).append(wanted)
    for name, numbers in named.items():
        partitions = []
        denied = broker.authorizer.refusal(caller, Api.LIST_OFFSETS, ResourceType.TOPIC, name)
        for number, all_wanted in numbers.items():
            await turns.took()
            found = ErrorCode.INVALID_REQUEST, *_NOT_FOUND
            if denied:
                found = denied, *_NOT_FOUND
            elif len(all_wanted) == 1:
                found = await _response(broker, name, all_wanted[0], committed=committed)
            code, timestamp_ms, offset = found
            partitions.append(
                kind.entity(
                    "ListOffsetsPartitionResponse",
                    partition_index=number,
                    error_code=code,
                    timestamp=timestamp_ms,
                    offset=offset,
                    leader_epoch=_EPOCH if offset >= 0 else _NO_EPOCH,
                )
            )
        topics.append(
            kind.entity("ListOffsetsTopicResponse", name=name, partitions=tuple(partitions))
        )
    return await turns.encoded(broker, kind, header, topics=tuple(topics))


async def _response(
    broker: Broker, name: str, wanted: Message, *, committed: bool
) -> tuple[ErrorCode, int, int]:
    """Return error code, timestamp and offset for one partition."""
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
        refused = ErrorCode.UNSUPPORTED_VERSION
    if refused:
        return refused, *_NOT_FOUND
    if committed and timestamp_ms == LATEST and not await _knows_stable_end(broker, log):
        return ErrorCode.KAFKA_STORAGE_ERROR, *_NOT_FOUND
    fixed = {
        LATEST: log.last_stable_offset if committed else log.high_watermark,
        EARLIEST: log.log_start,
        EARLIEST_LOCAL: log.log_start,
        LATEST_TIERED: -1,
    }
    if timestamp_ms in fixed:
        return ErrorCode.NONE, -1, fixed[timestamp_ms]
    return await _by_time(broker, name, wanted, log, committed=committed)


async def _knows_stable_end(broker: Broker, log: PartitionLog) -> bool:
    """Read what the last stable offset of an archive's partition depends on."""
    loop = asyncio.get_running_loop()
    try:
        while isinstance(log, MountedLog) and (tail := log.unread_tail()) is not None:
            await loop.run_in_executor(log.executor, broker.cache.loaded, tail)
    except (LogmirrorError, OSError) as error:
        _LOG.warning("%s: the end could not be read: %s", log.folder, error)
        return False
    return True


async def _by_time(
    broker: Broker, name: str, wanted: Message, log: PartitionLog, *, committed: bool
) -> tuple[ErrorCode, int, int]:
    """Look up a timestamp."""
    timestamp_ms = wanted.timestamp
    executor = log.executor if isinstance(log, MountedLog) else broker.executor
    loop = asyncio.get_running_loop()
    while True:
        segments = log.readable_segments()
        try:
            found_ms, offset = await loop.run_in_executor(
                executor, _find_time, broker.cache, segments, log.log_start, timestamp_ms
            )
        except (LogmirrorError, OSError) as error:
            if any(segment.is_deleted for segment, _ in segments):
                continue  # a segment was deleted during the lookup
            _LOG.warning(
                "%s-%d: lookup by timestamp failed: %s", name, wanted.partition_index, error
            )
            log.disk_failed(error)
            return ErrorCode.KAFKA_STORAGE_ERROR, *_NOT_FOUND
        is_hidden = committed and offset >= log.last_stable_offset
        return ErrorCode.NONE, *(_NOT_FOUND if is_hidden else (found_ms, offset))


def epoch_error(current_leader_epoch: int) -> ErrorCode:
    """Check the `current_leader_epoch` of a request; -1 is not checked."""
    if current_leader_epoch in (_EPOCH, _NO_EPOCH):
        return ErrorCode.NONE
    if current_leader_epoch > _EPOCH:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    return ErrorCode.FENCED_LEADER_EPOCH


async def offset_for_leader_epoch(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle OffsetForLeaderEpoch. Of a partition that is named twice, the last entry counts."""
    kind = response_kind(Api.OFFSET_FOR_LEADER_EPOCH, header.version)
    topics = []
    turns = Turns()
    named: dict[str, dict[int, Message]] = {}
    for asked in request.topics:
        numbers = named.setdefault(asked.topic, {})
        numbers.update((wanted.partition, wanted) for wanted in asked.partitions)
    for name, numbers in named.items():
        partitions = []
        api, topic_type = Api.OFFSET_FOR_LEADER_EPOCH, ResourceType.TOPIC
        denied = broker.authorizer.refusal(caller, api, topic_type, name)
        for wanted in numbers.values():
            await turns.took()
            found = (denied, *_NOT_FOUND) if denied else _end_of_epoch(broker, name, wanted)
            code, epoch, end_offset = found
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
            kind.entity("OffsetForLeaderTopicResult", topic=name, partitions=tuple(partitions))
        )
    return await turns.encoded(broker, kind, header, topics=tuple(topics))


def _end_of_epoch(broker: Broker, name: str, wanted: Message) -> tuple[ErrorCode, int, int]:
    """Return error code, leader epoch and end offset for one partition."""
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
    """Return timestamp and offset of the first matching record; (-1, -1) if there is none."""
    if segments and segments[0][0].source is not None:
        newest_ms = newest_time(cache, [segment for segment, _ in segments])
        if timestamp_ms == MAX_TIMESTAMP:
            few = segments[newest_objects(len(segments), newest_ms) :]
            timestamp_ms = _largest(cache, few, log_start)
        segments = segments[first_reaching(len(segments), newest_ms, timestamp_ms) :]
    elif timestamp_ms == MAX_TIMESTAMP:
        timestamp_ms = _largest(cache, segments, log_start)
    for segment, readable in segments:
        file, index = cache.loaded(segment)
        end = readable if segment.source is None else segment.size_bytes
        segment.check_intact(log_start)
        position = index.first_interval_reaching(timestamp_ms)
        if position is None:
            continue
        for batch in walk(file, position, end):
            if batch.max_timestamp_ms >= timestamp_ms and batch.last_offset >= log_start:
                for found_ms, offset in _records(file, batch, log_start):
                    if found_ms >= timestamp_ms:
                        return found_ms, offset
    return _NOT_FOUND


def _largest(cache: SegmentCache, segments: list[tuple[Segment, int]], log_start: int) -> int:
    """Return the largest timestamp of all readable records."""
    largest = 0
    for segment, readable in segments:
        file, index = cache.loaded(segment)
        end = readable if segment.source is None else segment.size_bytes
        segment.check_intact(log_start)
        if end == segment.size_bytes and segment.first >= log_start:
            largest = max(largest, index.max_timestamp_ms)
            continue
        # The index also counts batches that are not durable yet, and deleted ones.
        for batch in walk(file, index.position_before(log_start), end):
            if batch.base_offset >= log_start:
                largest = max(largest, batch.max_timestamp_ms)
            elif batch.last_offset >= log_start:
                for found_ms, _ in _records(file, batch, log_start):
                    largest = max(largest, found_ms)
    return largest


def _records(file: OpenFile, batch: BatchAt, log_start: int) -> Iterator[tuple[int, int]]:
    """Yield timestamp and offset of a batch's records from the log start on."""
    data = os.pread(file.fd, batch.size_bytes, batch.position)
    if data[_CONTROL_AT] & CONTROL_FLAG:
        yield batch.max_timestamp_ms, batch.base_offset
        return
    for timestamp_ms, offset in record_times(data, max_body_bytes=_MAX_BODY_BYTES):
        if offset >= log_start:
            yield timestamp_ms, offset
