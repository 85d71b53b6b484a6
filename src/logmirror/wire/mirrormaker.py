"""Records of MirrorMaker 2, byte for byte. Numbers are big-endian; strings are an int16 and UTF-8.

    OffsetSync   key     string topic of the source, int32 partition
                 value   int64 upstream offset, int64 downstream offset
    Checkpoint   key     string group, string topic of the target, int32 partition
                 value   int16 version 0, int64 upstream offset, int64 downstream offset,
                         string metadata
    Heartbeat    key     string alias of the source, string alias of the target
                 value   int16 version 0, int64 time in ms

An offset sync is in `mm2-offset-syncs.<alias of the destination>.internal` in the source cluster:
the source's record at the upstream offset was written at the downstream offset. A checkpoint is in
`<alias of the source>.checkpoints.internal` in the target cluster: a group that is at the upstream
offset in the source continues at the downstream offset. Heartbeats are in `heartbeats`. All these
topics have one partition and compaction. `replication_policy` has the names in full.

Readers ignore bytes behind the last field, and the version. Never write a null value: MirrorMaker
and `RemoteClusterUtils` fail on it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import TopicPartition
from logmirror.wire.replication_policy import ReplicationPolicy

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_PAIR: Final = struct.Struct(">qq")
_CHECKPOINT: Final = struct.Struct(">hqq")
_HEARTBEAT: Final = struct.Struct(">hq")
_VERSION: Final = 0
_STRING_MAX: Final = 2**15 - 1
_DEFAULT_POLICY: Final = ReplicationPolicy()
SYNC_BYTES: Final = _PAIR.size
"""Length of the value of an offset sync; bytes behind it are ignored."""


class OffsetSync(NamedTuple):
    """One decoded sync."""

    topic: str
    partition: int
    upstream: int
    downstream: int


class Checkpoint(NamedTuple):
    """The position of one group in one partition, in both clusters."""

    group: str
    topic: str
    """Its name in the target."""
    partition: int
    upstream: int
    """The offset that the group reads next in the source."""
    downstream: int
    """The offset that the group reads next in the target."""
    metadata: str
    """What the group committed with its offset; empty if nothing."""


class Heartbeat(NamedTuple):
    """Shows that the target is reached, and from which source."""

    source: str
    target: str
    timestamp_ms: int
    """Since the epoch."""


TOPIC_ID: Final = "logmirror.topic-id"
"""A record header with the ID of the replica's topic, 16 bytes. MirrorMaker's readers ignore it."""


def topic_id_header(topic_id: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of a record about a replica; none if its topic's ID is not known."""
    return () if topic_id is None else ((TOPIC_ID.encode(), topic_id),)


# -- offset syncs ----------------------------------------------------------------------------------


def syncs_topic(alias: str) -> str | None:
    """The topic for syncs of a destination; None if that is not a valid topic name."""
    return _DEFAULT_POLICY.offset_syncs_topic(alias)


def workers_group(source_alias: str) -> str:
    """Return the group of MirrorMaker's workers that copy from a source."""
    return f"{source_alias}-mm2"


def offsets_topic(source_alias: str) -> str:
    """Return the topic in which MirrorMaker's workers store source offsets."""
    return f"mm2-offsets.{source_alias}.internal"


def encode_sync_key(partition: TopicPartition) -> bytes:
    """The key of a partition's syncs, for compaction.

    Raises:
        UsageError: The topic's name has more than 32,767 bytes.
    """
    return _string(partition.topic, "topic") + _INT32.pack(partition.partition)


def encode_sync(upstream: int, downstream: int) -> bytes:
    """The value of one sync."""
    return _PAIR.pack(upstream, downstream)


def decode_sync(key: bytes | None, value: bytes | None) -> OffsetSync:
    """Decode one record; bytes behind the last field are ignored, as MirrorMaker does.

    Raises:
        CorruptionError: Not a sync: null, or shorter than its length fields say.
    """
    key, value = _both("offset sync", key, value)
    partition = decode_sync_key(key)
    upstream, downstream = _Reader("offset sync", value).numbers(_PAIR)
    return OffsetSync(partition.topic, partition.partition, upstream, downstream)


def decode_sync_key(key: bytes) -> TopicPartition:
    """Decode the key of an offset sync.

    Raises:
        CorruptionError: It is truncated, or its topic is not UTF-8.
    """
    reader = _Reader("offset sync", key)
    topic = reader.string()
    (partition,) = reader.numbers(_INT32)
    return TopicPartition(topic, partition)


# -- checkpoints -----------------------------------------------------------------------------------


def encode_checkpoint(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """The key, for compaction, and the value of a checkpoint.

    Raises:
        UsageError: The group, the topic or the metadata has more than 32,767 bytes.
    """
    group, topic, partition, upstream, downstream, metadata = checkpoint
    key = _string(group, "group") + _string(topic, "topic") + _INT32.pack(partition)
    value = _CHECKPOINT.pack(_VERSION, upstream, downstream) + _string(metadata, "metadata")
    return key, value


def decode_checkpoint(key: bytes | None, value: bytes | None) -> Checkpoint:
    """Decode one record; its version and bytes behind its last field are ignored.

    Raises:
        CorruptionError: Not a checkpoint: null, shorter than its length fields say, or not UTF-8.
    """
    key, value = _both("checkpoint", key, value)
    reader = _Reader("checkpoint", key)
    group, topic = reader.string(), reader.string()
    (partition,) = reader.numbers(_INT32)
    reader = _Reader("checkpoint", value)
    _, upstream, downstream = reader.numbers(_CHECKPOINT)
    return Checkpoint(group, topic, partition, upstream, downstream, reader.string())


# -- heartbeats ------------------------------------------------------------------------------------


def encode_heartbeat(heartbeat: Heartbeat) -> tuple[bytes, bytes]:
    """The key, for compaction, and the value of a heartbeat.

    Raises:
        UsageError: An alias has more than 32,767 bytes.
    """
    source, target, timestamp_ms = heartbeat
    key = _string(source, "source") + _string(target, "target")
    return key, _HEARTBEAT.pack(_VERSION, timestamp_ms)


def decode_heartbeat(key: bytes | None, value: bytes | None) -> Heartbeat:
    """Decode one record; its version and bytes behind its last field are ignored.

    Raises:
        CorruptionError: Not a heartbeat: null, shorter than its length fields say, or not UTF-8.
    """
    key, value = _both("heartbeat", key, value)
    reader = _Reader("heartbeat", key)
    source, target = reader.string(), reader.string()
    _, timestamp_ms = _Reader("heartbeat", value).numbers(_HEARTBEAT)
    return Heartbeat(source, target, timestamp_ms)


# -- fields ----------------------------------------------------------------------------------------


def _string(text: str, field: str) -> bytes:
    data = text.encode()
    if len(data) > _STRING_MAX:
        raise UsageError(
            "a string is too long for a record of MirrorMaker",
            field=field,
            bytes=len(data),
            most=_STRING_MAX,
        )
    return _INT16.pack(len(data)) + data


def _both(what: str, key: bytes | None, value: bytes | None) -> tuple[bytes, bytes]:
    if key is None or value is None:
        missing = "key" if key is None else "value"
        raise CorruptionError("a record of MirrorMaker is incomplete", record=what, missing=missing)
    return key, value


class _Reader:
    """Takes fields from the start of a key or a value; each method raises CorruptionError."""

    def __init__(self, what: str, data: bytes) -> None:
        self._what, self._data, self._at = what, data, 0

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            found = layout.unpack_from(self._data, self._at)
        except struct.error as error:
            raise self._error("truncated") from error
        self._at += layout.size
        return found

    def string(self) -> str:
        (length,) = self.numbers(_INT16)
        if length < 0:
            raise self._error("a string of negative length")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise self._error("truncated")
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._error("not UTF-8") from error

    def _error(self, found: str) -> CorruptionError:
        return CorruptionError(
            "a record of MirrorMaker is damaged",
            record=self._what,
            found=found,
            data=self._data[:100].hex(),
        )
