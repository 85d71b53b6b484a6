"""The client's Produce (key 0, versions 3-9), encoded by hand: batches are sent without a copy.

Versions 3 to 8 have fixed lengths. From 9 on the message is flexible: compact lengths (unsigned
varint of length + 1) and tagged fields. Later versions are not used: 10 and 11 add nothing needed
here, 12 adds partitions to transactions implicitly (KIP-890), 13 has topic IDs. The request:

    size                    int32
    api key, version        int16, int16
    correlation id          int32
    client id               string
    tagged fields           9+
    transactional id        nullable string     9+: compact
    acks                    int16
    timeout ms              int32
    topic count             int32               9+: compact
      topic                 string              9+: compact
      partition count       int32               9+: compact
        partition           int32
        record size         int32               9+: compact
        -- the caller's batch --
        tagged fields       9+
      tagged fields         9+
    tagged fields           9+

The response, with topics and partitions in any order:

    correlation id          int32
    tagged fields           9+
    topic count             int32               9+: compact
      topic                 string              9+: compact
      partition count       int32               9+: compact
        partition           int32
        error code          int16
        base offset         int64
        log append time     int64
        log start offset    int64               5+
        record errors       8+: count, then int32 batch index, nullable string
        error message       8+: nullable string
        tagged fields       9+
      tagged fields         9+
    throttle ms             int32
    tagged fields           9+

Invariants:
1. Batches are neither copied nor read: each is a separate buffer between encoded parts.
2. A response is read whole, and every length is checked against its frame before it is used.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.model import TopicPartition
from logmirror.wire.frames import Cursor, pack_uvarint
from logmirror.wire.messages import PRODUCE

if TYPE_CHECKING:
    from collections.abc import Sequence

PRODUCE_VERSION_MIN: Final = 3
"""The first version with record batches of magic 2; older brokers are refused."""
PRODUCE_VERSION_MAX: Final = 9

ACKS_ALL: Final = -1
"""The leader responds when all in-sync replicas, at least `min.insync.replicas`, have the batch."""
ACKS_LEADER: Final = 1
"""The response is sent when the leader has the batch."""

_FLEXIBLE: Final = 9
_LOG_START_SINCE: Final = 5
_RECORD_ERRORS_SINCE: Final = 8

_SIZE: Final = struct.Struct(">i")
_HEADER: Final = struct.Struct(">hhih")
_ACKS: Final = struct.Struct(">hi")
_INT: Final = struct.Struct(">i")
_PARTITION: Final = struct.Struct(">ii")
_RESPONSE: Final = struct.Struct(">ihqq")
_RESPONSE_START: Final = struct.Struct(">ihqqq")


class ProduceRequest(NamedTuple):
    """A Produce request."""

    batches: Sequence[tuple[TopicPartition, memoryview]]
    """One record batch (magic 2) per partition, as contiguous views. No partition twice."""
    acks: int = ACKS_ALL
    timeout_ms: int = 30_000
    """How long the leader waits for the replicas before it returns REQUEST_TIMED_OUT (7)."""
    transactional_id: str | None = None


class ProduceResult(NamedTuple):
    """The result for one partition."""

    partition: TopicPartition
    error_code: int
    base_offset: int
    """Offset of the first record. -1 after an error, except where the batch was written (7, 20).
    For a duplicate: the offset of the first write."""
    log_append_time_ms: int
    """The append time with `message.timestamp.type=LogAppendTime`, else -1. A duplicate (error 0,
    not written again) has a time on every topic."""
    log_start_offset: int
    """-1 if the broker does not report it."""
    message: str | None
    """The broker's error message, if any."""


class ProduceResponses(NamedTuple):
    """One response frame."""

    results: list[ProduceResult]
    throttle_ms: int
    """How long the broker will not read the next request, in ms."""


def encode_produce(
    request: ProduceRequest, *, version: int, correlation_id: int, client_id: bytes
) -> list[bytes | memoryview]:
    """Return the request frame as buffers, which include the caller's views.

    Args:
        request: The request. Its views are read when the buffers are sent, not before.
        version: 3 to 9.
        correlation_id: Returned in the response.
        client_id: UTF-8.

    Returns:
        Buffers to send in order. The first begins with the size of the whole frame.
    """
    flexible = version >= _FLEXIBLE
    topics: dict[str, list[tuple[int, memoryview]]] = {}
    for where, view in request.batches:
        topics.setdefault(where.topic, []).append((where.partition, view))
    head = bytearray(_HEADER.pack(PRODUCE, version, correlation_id, len(client_id)))
    head += client_id
    if flexible:
        head += b"\0"
    head += _nullable(request.transactional_id, flexible=flexible)
    head += _ACKS.pack(request.acks, request.timeout_ms)
    head += _count(len(topics), flexible=flexible)
    buffers: list[bytes | memoryview] = []
    for topic, partitions in topics.items():
        head += _name(topic.encode(), flexible=flexible)
        head += _count(len(partitions), flexible=flexible)
        for partition, view in partitions:
            if flexible:
                head += _INT.pack(partition) + pack_uvarint(view.nbytes + 1)
            else:
                head += _PARTITION.pack(partition, view.nbytes)
            buffers += (bytes(head), view)
            head = bytearray(b"\0" if flexible else b"")
        if flexible:
            head += b"\0"
    if flexible:
        head += b"\0"
    if head:
        buffers.append(bytes(head))
    size = sum(len(buffer) if isinstance(buffer, bytes) else buffer.nbytes for buffer in buffers)
    return [_SIZE.pack(size) + bytes(buffers[0]), *buffers[1:]]


def parse_produce(frame: memoryview, *, version: int, correlation_id: int) -> ProduceResponses:
    """Read a response.

    Args:
        frame: The response without its size field.
        version: The request's version.
        correlation_id: The request's correlation ID.

    Raises:
        CorruptionError: The response does not match the request, or is malformed.
    """
    flexible = version >= _FLEXIBLE
    cursor = Cursor(frame)
    if (found := cursor.int32()) != correlation_id:
        raise CorruptionError(
            "response has another request's correlation ID", expected=correlation_id, found=found
        )
    if flexible:
        cursor.tagged_fields()
    results: list[ProduceResult] = []
    for _ in range(cursor.count(compact=flexible, least_bytes=3)):
        topic = cursor.name(compact=flexible)
        count = cursor.count(compact=flexible, least_bytes=_RESPONSE.size)
        results += [_partition(cursor, topic, version) for _ in range(count)]
        if flexible:
            cursor.tagged_fields()
    throttle_ms = cursor.int32()
    if flexible:
        cursor.tagged_fields()
    if cursor.remaining:
        raise CorruptionError(
            "bytes after the end of a Produce response", left_bytes=cursor.remaining
        )
    return ProduceResponses(results, throttle_ms)


def _partition(cursor: Cursor, topic: str, version: int) -> ProduceResult:
    start = -1
    if version >= _LOG_START_SINCE:
        layout = _RESPONSE_START
        number, error, base, appended, start = layout.unpack(cursor.take(layout.size))
    else:
        number, error, base, appended = _RESPONSE.unpack(cursor.take(_RESPONSE.size))
    message = None
    flexible = version >= _FLEXIBLE
    if version >= _RECORD_ERRORS_SINCE:
        for _ in range(cursor.count(compact=flexible, least_bytes=5)):
            cursor.int32()
            text = cursor.string(compact=flexible)
            message = message or text
            if flexible:
                cursor.tagged_fields()
        message = cursor.string(compact=flexible) or message
    if flexible:
        cursor.tagged_fields()
    return ProduceResult(
        TopicPartition(topic, number), error, base, appended, start, message or None
    )


def _count(count: int, *, flexible: bool) -> bytes:
    return pack_uvarint(count + 1) if flexible else _INT.pack(count)


def _name(text: bytes, *, flexible: bool) -> bytes:
    return (pack_uvarint(len(text) + 1) if flexible else struct.pack(">h", len(text))) + text


def _nullable(text: str | None, *, flexible: bool) -> bytes:
    if text is None:
        return b"\0" if flexible else b"\xff\xff"
    return _name(text.encode(), flexible=flexible)
