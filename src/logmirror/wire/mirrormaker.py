"""Records and topics of MirrorMaker 2, byte for byte. Numbers are big-endian, without a version.

    OffsetSync   key     int16 length + UTF-8 topic of the source, int32 partition
                 value   int64 upstream offset, int64 downstream offset

The source's record at the upstream offset was written at the downstream offset. The topic is
`mm2-offset-syncs.<alias of the destination>.internal` in the source cluster, with one partition and
compaction.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.model import TopicPartition

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_PAIR: Final = struct.Struct(">qq")
SYNC_BYTES: Final = _PAIR.size
"""Length of the value of an offset sync; bytes behind it are ignored."""


class OffsetSync(NamedTuple):
    """One decoded sync."""

    topic: str
    partition: int
    upstream: int
    downstream: int


def syncs_topic(alias: str) -> str | None:
    """The topic for syncs of a destination; None if that is not a valid topic name."""
    name = f"mm2-offset-syncs.{alias}.internal"
    return name if _TOPIC.fullmatch(name) else None


def encode_sync_key(partition: TopicPartition) -> bytes:
    """The key of a partition's syncs, for compaction."""
    topic = partition.topic.encode()
    return _INT16.pack(len(topic)) + topic + _INT32.pack(partition.partition)


def encode_sync(upstream: int, downstream: int) -> bytes:
    """The value of one sync."""
    return _PAIR.pack(upstream, downstream)


def decode_sync(key: bytes | None, value: bytes | None) -> OffsetSync:
    """Decode one record; bytes behind the last field are ignored, as MirrorMaker does.

    Raises:
        CorruptionError: Not a sync: null, or shorter than its length fields say.
    """
    if key is None or value is None:
        raise CorruptionError("an offset sync without key or value")
    partition = decode_sync_key(key)
    try:
        upstream, downstream = _PAIR.unpack_from(value)
    except struct.error as error:
        raise CorruptionError("a truncated offset sync", value=value.hex()) from error
    return OffsetSync(partition.topic, partition.partition, upstream, downstream)


def decode_sync_key(key: bytes) -> TopicPartition:
    """Decode the key of an offset sync.

    Raises:
        CorruptionError: It is truncated, or its topic is not UTF-8.
    """
    try:
        (length,) = _INT16.unpack_from(key)
        if length < 0:
            raise CorruptionError("an offset sync with a topic of negative length", length=length)
        topic = key[_INT16.size : _INT16.size + length]
        (partition,) = _INT32.unpack_from(key, _INT16.size + length)
        return TopicPartition(topic.decode(), partition)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptionError(
            "the key of an offset sync is truncated or not UTF-8", key=key.hex()
        ) from error
