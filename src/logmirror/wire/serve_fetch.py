"""The server's Fetch (key 1, versions 4-17), encoded and decoded by hand.

A response is encoded around the records: the caller gives the number of record bytes of each
partition and gets the parts before, between and after them. So records go from file to socket
without passing through a codec.

    request   int32 replica (..v14) | int32 max_wait_ms | int32 min_bytes | int32 max_bytes
              | int8 isolation | int32 session id, int32 session epoch (v7+) | topics
              | forgotten topics (v7+) | rack (v11+)
              topic: name (..v12) or 16-byte id (v13+) | partitions
              partition: int32 index | int32 leader epoch (v9+) | int64 offset
                         | int32 last fetched epoch (v12+) | int64 log start (v5+) | int32 max bytes
    response  int32 throttle_time_ms | int16 error, int32 session id (v7+) | topics
              partition: int32 index | int16 error | int64 high watermark | int64 last stable
                         | int64 log start (v5+) | aborted | int32 preferred replica (v11+)
                         | records
              aborted: int64 producer id | int64 first offset
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.wire.frames import Cursor, body_cursor, pack_uvarint

if TYPE_CHECKING:
    from collections.abc import Sequence

API_KEY: Final = 1
FIRST_VERSION: Final = 4
LAST_VERSION: Final = 17
TOPIC_ID_FROM: Final = 13
FLEXIBLE_FROM: Final = 12
_READ_COMMITTED: Final = 1

_LIMITS: Final = Struct(">iiib")
_SESSION: Final = Struct(">ii")
_SIZE: Final = Struct(">i")
_HEAD: Final = Struct(">ii")
_ERROR: Final = Struct(">hi")
_PARTITION: Final = Struct(">ihqq")
_LOG_START: Final = Struct(">q")
_ABORTED: Final = Struct(">qq")


class FetchPartition(NamedTuple):
    """One partition of a Fetch request."""

    partition: int
    leader_epoch: int
    """The client's current leader epoch; -1 if not given."""
    offset: int
    max_bytes: int


class FetchTopic(NamedTuple):
    """One topic of a Fetch request."""

    name: str | bytes
    """The name; from version 13 on, the 16 bytes of the topic ID."""
    partitions: list[FetchPartition]


class FetchRequest(NamedTuple):
    """A Fetch request."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]
    read_committed: bool = False


class Fetched(NamedTuple):
    """The response for one partition, without its records."""

    partition: int
    error: int
    high_watermark: int
    log_start: int
    records_bytes: int
    last_stable: int
    aborted: Sequence[tuple[int, int]] | None = None
    """Producer ID and first offset of aborted transactions; None for read_uncommitted."""


def parse_fetch(frame: memoryview, version: int) -> FetchRequest:
    """Read a whole frame.

    Raises:
        RemoteProtocolError: The bytes are not a Fetch request of that version.
    """
    compact = version >= FLEXIBLE_FROM
    cursor = body_cursor(frame, flexible=compact)
    if version <= 14:  # noqa: PLR2004  # replica id, later a tagged field; there are no followers
        cursor.int32()
    max_wait_ms, min_bytes, max_bytes, isolation = _LIMITS.unpack(cursor.take(_LIMITS.size))
    session_id, session_epoch = 0, -1
    if version >= 7:  # noqa: PLR2004  # sessions came with v7
        session_id, session_epoch = _SESSION.unpack(cursor.take(_SESSION.size))
    topics = []
    for _ in range(cursor.count(compact=compact)):
        name = _topic(cursor, version)
        count = cursor.count(compact=compact, least_bytes=16)
        partitions = [_partition(cursor, version) for _ in range(count)]
        if compact:
            cursor.tagged_fields()
        topics.append(FetchTopic(name, partitions))
    _skip_tail(cursor, version)
    limits = max_wait_ms, min_bytes, max_bytes
    is_committed = isolation == _READ_COMMITTED
    return FetchRequest(*limits, session_id, session_epoch, topics, is_committed)


def _skip_tail(cursor: Cursor, version: int) -> None:
    """Check and skip the forgotten topics and the rack, which are not used."""
    compact = version >= FLEXIBLE_FROM
    if version >= 7:  # noqa: PLR2004  # sessions came with v7
        for _ in range(cursor.count(compact=compact)):
            _topic(cursor, version)
            cursor.take(4 * max(0, cursor.count(compact=compact, least_bytes=4)))
            if compact:
                cursor.tagged_fields()
    if version >= 11:  # noqa: PLR2004  # racks came with v11
        cursor.string(compact=compact)
    if compact:
        cursor.tagged_fields()


def _topic(cursor: Cursor, version: int) -> str | bytes:
    if version >= TOPIC_ID_FROM:
        return bytes(cursor.take(16))
    return cursor.name(compact=version >= FLEXIBLE_FROM)


def _partition(cursor: Cursor, version: int) -> FetchPartition:
    index = cursor.int32()
    leader_epoch = cursor.int32() if version >= 9 else -1  # noqa: PLR2004  # came with v9
    offset = cursor.int64()
    if version >= FLEXIBLE_FROM:
        cursor.int32()
    if version >= 5:  # noqa: PLR2004  # a follower's log start
        cursor.int64()
    max_bytes = cursor.int32()
    if version >= FLEXIBLE_FROM:
        cursor.tagged_fields()
    return FetchPartition(index, leader_epoch, offset, max_bytes)


def pack_fetch_response(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[str | bytes, Sequence[Fetched]]],
    *,
    error: int = 0,
) -> list[bytearray]:
    """Return the parts of a response frame. The size field in the first part includes the records.

    The records of the n-th partition with records (`records_bytes` > 0) belong between parts n and
    n + 1, so there is one part more than partitions with records.
    """
    compact = version >= FLEXIBLE_FROM
    out = bytearray(_HEAD.pack(0, correlation_id) + (b"\0" if compact else b"") + b"\0\0\0\0")
    pieces = [out]
    records_bytes = 0
    if version >= 7:  # noqa: PLR2004  # sessions: id 0 says that there is none
        out += _ERROR.pack(error, 0)
    out += pack_uvarint(len(topics) + 1) if compact else _SIZE.pack(len(topics))
    for name, partitions in topics:
        _pack_topic(out, version, name, len(partitions))
        for fetched in partitions:
            _pack_partition(out, version, fetched)
            if fetched.records_bytes:
                records_bytes += fetched.records_bytes
                out = bytearray()
                pieces.append(out)
            if compact:
                out += b"\0"
        if compact:
            out += b"\0"
    if compact:
        out += b"\0"
    _SIZE.pack_into(pieces[0], 0, sum(map(len, pieces)) + records_bytes - 4)
    return pieces


def _pack_topic(out: bytearray, version: int, name: str | bytes, partition_count: int) -> None:
    if isinstance(name, bytes):
        out += name
    else:
        encoded = name.encode()
        if version >= FLEXIBLE_FROM:
            out += pack_uvarint(len(encoded) + 1) + encoded
        else:
            out += len(encoded).to_bytes(2) + encoded
    compact = version >= FLEXIBLE_FROM
    out += pack_uvarint(partition_count + 1) if compact else _SIZE.pack(partition_count)


def _pack_partition(out: bytearray, version: int, fetched: Fetched) -> None:
    offsets = fetched.high_watermark, fetched.last_stable
    out += _PARTITION.pack(fetched.partition, fetched.error, *offsets)
    if version >= 5:  # noqa: PLR2004  # log start came with v5
        out += _LOG_START.pack(fetched.log_start)
    compact = version >= FLEXIBLE_FROM
    _pack_aborted(out, fetched.aborted, compact=compact)
    if version >= 11:  # noqa: PLR2004  # preferred read replica: none
        out += b"\xff\xff\xff\xff"
    size = fetched.records_bytes
    out += pack_uvarint(size + 1) if compact else _SIZE.pack(size)


def _pack_aborted(
    out: bytearray, aborted: Sequence[tuple[int, int]] | None, *, compact: bool
) -> None:
    if aborted is None:
        out += b"\0" if compact else b"\xff\xff\xff\xff"
        return
    out += pack_uvarint(len(aborted) + 1) if compact else _SIZE.pack(len(aborted))
    for transaction in aborted:
        out += _ABORTED.pack(*transaction)
        if compact:
            out += b"\0"
