"""The durable form of groups and offsets: short binary values that begin with a version.

Strings and bytes have their length plus one in front, as in Kafka's flexible messages; numbers are
big-endian. Keys of offsets begin with the group, so that they sort by group.

    group           key: group ID      value: version | type | state of that type
    offset          key: group, topic, partition
                    value: version | topic ID | offset | leader epoch | commit and expiry time |
                    metadata
    pending-offset  key: group, producer ID, topic, partition      value: as for offset
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from logmirror.broker.groups.values import CommittedOffset
from logmirror.errors import CorruptionError
from logmirror.wire.frames import Cursor, RemoteProtocolError, pack_uvarint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    T = TypeVar("T")

VERSION: Final = 1
_OFFSET: Final = struct.Struct(">B16sqiqq")
_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_TOPIC_ID_BYTES: Final = 16


def put_bytes(value: bytes | None) -> bytes:
    """Encode bytes with their length; None has the length 0."""
    return b"\0" if value is None else pack_uvarint(len(value) + 1) + value


def put_text(value: str | None) -> bytes:
    """Encode a string; None is allowed."""
    return put_bytes(None if value is None else value.encode())


def put_texts(values: Iterable[str]) -> bytes:
    """Encode a list of strings."""
    parts = [put_text(value) for value in values]
    return pack_uvarint(len(parts) + 1) + b"".join(parts)


def put_int32(value: int) -> bytes:
    """Encode a signed 32-bit number."""
    return _INT32.pack(value)


def put_int64(value: int) -> bytes:
    """Encode a signed 64-bit number."""
    return _INT64.pack(value)


def get_bytes(cursor: Cursor) -> bytes:
    """Read bytes; None reads as empty."""
    return bytes(cursor.blob(compact=True) or b"")


def get_texts(cursor: Cursor) -> list[str]:
    """Read a list of strings."""
    return [cursor.name(compact=True) for _ in range(cursor.count(compact=True))]


def decoded(what: str, key: bytes, value: bytes, read: Callable[[Cursor], T]) -> T:
    """Read a stored value.

    Raises:
        CorruptionError: The value is damaged, or another version of logmirror wrote it.
    """
    cursor = Cursor(memoryview(value))
    cause = ""
    try:
        version = cursor.int8()
        found = read(cursor) if version == VERSION else None
        if version != VERSION:
            cause = f"version {version}"
        elif cursor.remaining:
            cause = f"{cursor.remaining} bytes after the last field"
    except (RemoteProtocolError, ValueError) as error:
        cause = str(error)
    if cause or found is None:
        raise CorruptionError(
            f"the stored state of a {what} cannot be read",
            hint="restore .logmirror/state.sqlite from a backup; without that file the broker "
            "starts with no groups and no committed offsets",
            key=key.hex(),
            cause=cause,
        )
    return found


def offset_key(group_id: str, topic: str, partition: int) -> bytes:
    """Return the key of a committed offset."""
    return put_text(group_id) + put_text(topic) + put_int32(partition)


def read_offset_key(key: bytes) -> tuple[str, str, int]:
    """Return group, topic and partition."""
    cursor = Cursor(memoryview(key))
    return cursor.name(compact=True), cursor.name(compact=True), cursor.int32()


def pending_key(group_id: str, producer_id: int, topic: str, partition: int) -> bytes:
    """Return the key of an offset in an open transaction."""
    return put_text(group_id) + put_int64(producer_id) + put_text(topic) + put_int32(partition)


def read_pending_key(key: bytes) -> tuple[str, int, str, int]:
    """Return group, producer ID, topic and partition."""
    cursor = Cursor(memoryview(key))
    return (
        cursor.name(compact=True),
        cursor.int64(),
        cursor.name(compact=True),
        cursor.int32(),
    )


def put_offset(found: CommittedOffset) -> bytes:
    """Encode a committed offset."""
    head = _OFFSET.pack(
        VERSION,
        found.topic_id,
        found.offset,
        found.leader_epoch,
        found.commit_ms,
        found.expire_ms,
    )
    return head + put_text(found.metadata)


def get_offset(cursor: Cursor) -> CommittedOffset:
    """Read a committed offset, after its version."""
    return CommittedOffset(
        topic_id=bytes(cursor.take(_TOPIC_ID_BYTES)),
        offset=cursor.int64(),
        leader_epoch=cursor.int32(),
        commit_ms=cursor.int64(),
        expire_ms=cursor.int64(),
        metadata=cursor.name(compact=True),
    )
