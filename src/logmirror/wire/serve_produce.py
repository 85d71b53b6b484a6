"""The server's Produce (key 0, versions 3-12), encoded and decoded by hand.

A generated codec copies the records and takes ten times as long for the response; with requests of
16 KiB that costs as much as the rest of the broker. Records are views of the frame.

    request   transactional id (nullable) | int16 acks | int32 timeout_ms | topics
              topic: name | partitions;  partition: int32 index | bytes records
    response  topics | int32 throttle_time_ms
              topic: name | partitions
              partition: int32 index | int16 error | int64 base offset | int64 append time
                         | int64 log start (v5+) | record errors (v8+) | message (v8+)
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.wire.frames import body_cursor, pack_uvarint

if TYPE_CHECKING:
    from collections.abc import Sequence

API_KEY: Final = 0
FIRST_VERSION: Final = 3
LAST_VERSION: Final = 12
FLEXIBLE_FROM: Final = 9
THROTTLE_FROM_END: Final = {False: -4, True: -5}
"""Where a response has its throttle time, by whether its version is flexible."""

_ACKS: Final = Struct(">hi")
_HEAD: Final = Struct(">ii")
_COUNT: Final = Struct(">i")
_PARTITION: Final = Struct(">ihqqq")
_PARTITION_V3: Final = Struct(">ihqq")
_NO_ERRORS: Final = b"\0\0\0\0\xff\xff"  # no record errors, null message
_NO_ERRORS_COMPACT: Final = b"\1\0\0"  # the same, then no tagged fields


class ProducePartition(NamedTuple):
    """The records for one partition."""

    partition: int
    records: memoryview | None


class ProduceTopic(NamedTuple):
    """The partitions of one topic."""

    name: str
    partitions: list[ProducePartition]


class ProduceRequest(NamedTuple):
    """A Produce request. Its record views are valid as long as the frame."""

    transactional_id: str | None
    acks: int
    topics: list[ProduceTopic]
    version: int


class Produced(NamedTuple):
    """The response for one partition."""

    partition: int
    error: int
    base_offset: int
    log_start: int
    append_time_ms: int = -1
    """The append time with `message.timestamp.type=LogAppendTime`, else -1."""


def parse_produce(frame: memoryview, version: int) -> ProduceRequest:
    """Read a whole frame.

    Raises:
        RemoteProtocolError: The bytes are not a Produce request of that version.
    """
    compact = version >= FLEXIBLE_FROM
    cursor = body_cursor(frame, flexible=compact)
    transactional_id = cursor.string(compact=compact)
    acks, _timeout_ms = _ACKS.unpack(cursor.take(_ACKS.size))
    topics = []
    for _ in range(cursor.count(compact=compact)):
        name = cursor.name(compact=compact)
        partitions = []
        for _ in range(cursor.count(compact=compact, least_bytes=5)):
            index = cursor.int32()
            partitions.append(ProducePartition(index, cursor.blob(compact=compact)))
            if compact:
                cursor.tagged_fields()
        if compact:
            cursor.tagged_fields()
        topics.append(ProduceTopic(name, partitions))
    if compact:
        cursor.tagged_fields()
    return ProduceRequest(transactional_id, acks, topics, version)


def pack_produce_response(
    version: int, correlation_id: int, topics: Sequence[tuple[str, Sequence[Produced]]]
) -> bytearray:
    """Return a response frame, size field included."""
    compact = version >= FLEXIBLE_FROM
    out = bytearray(_HEAD.pack(0, correlation_id))
    if compact:
        out += b"\0" + pack_uvarint(len(topics) + 1)
    else:
        out += _COUNT.pack(len(topics))
    for name, partitions in topics:
        encoded = name.encode()
        if compact:
            out += pack_uvarint(len(encoded) + 1) + encoded + pack_uvarint(len(partitions) + 1)
        else:
            out += len(encoded).to_bytes(2) + encoded + _COUNT.pack(len(partitions))
        for index, error, base_offset, log_start, append_time_ms in partitions:
            if version < 5:  # noqa: PLR2004  # log start came with v5
                out += _PARTITION_V3.pack(index, error, base_offset, append_time_ms)
                continue
            out += _PARTITION.pack(index, error, base_offset, append_time_ms, log_start)
            if version >= 8:  # noqa: PLR2004  # record errors came with v8
                out += _NO_ERRORS_COMPACT if compact else _NO_ERRORS
        if compact:
            out += b"\0"
    out += b"\0\0\0\0\0" if compact else b"\0\0\0\0"
    _COUNT.pack_into(out, 0, len(out) - 4)
    return out
