"""A commit object: the pieces of many partitions that became durable together. Big-endian.

    header   magic (8), version (u16), count of entries (u32), epoch (u64),
             sequence (u64), writer (8), oldest (u64)
    entries  one each: kind (u8), ID (16), partition (u32), first (i64), next (i64),
             length of its body (u64), CRC-32C of its body (u32)
    CRC-32C of header and entries (u32)
    bodies   in the order of the entries

Kinds of entries:

    FENCE    the writer took the log dir over; its epoch is higher than all before
    DATA     record batches of a partition, offsets `first` to `next`
    CUT      the partition's segment from `first` to `next` is complete; no other cut begins there
    CHANGE   a change of a database; its name is in the place of the ID
    SNAPSHOT the whole database: it replaces all changes before it
    MERGED   segments from `first` to `next` are one object now; it says that its writer was the
             owner when that object existed (`tiling`), and nothing reads it
"""

from __future__ import annotations

import enum
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.wire.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAGIC: Final = b"LMCOMMIT"
_VERSION: Final = 1
_HEADER: Final = Struct(">8sHIQQ8sQ")
_ENTRY: Final = Struct(">B16sIqqQI")
_CRC: Final = Struct(">I")
NAME_BYTES: Final = 16
"""Longest name of a database."""

FENCE_BYTES: Final = _HEADER.size + _ENTRY.size + _CRC.size
"""Size of an object of one entry without a body, as a fence is."""

MAX_ENTRIES: Final = 1_000_000


class Kind(enum.IntEnum):
    """What an entry is."""

    FENCE = 0
    DATA = 1
    CUT = 2
    CHANGE = 3
    SNAPSHOT = 4
    MERGED = 5


class Entry(NamedTuple):
    """An entry and its body. `id` is a topic ID, or the name of a database."""

    kind: Kind
    id: bytes = b""
    partition: int = 0
    first: int = 0
    next: int = 0
    body: bytes = b""

    @property
    def name(self) -> str:
        """The name of a database."""
        return self.id.rstrip(b"\0").decode()


class Commit(NamedTuple):
    """A commit object."""

    sequence: int
    epoch: int
    writer: bytes
    """8 random bytes of each start: two owners never write the same object."""

    entries: tuple[Entry, ...]

    oldest: int = 0
    """The oldest object that was needed when this one was written."""

    @property
    def is_fence(self) -> bool:
        """Whether its owner took over with it."""
        return any(entry.kind == Kind.FENCE for entry in self.entries)


def of_database(kind: Kind, name: str, payload: bytes) -> Entry:
    """Return an entry of a database: a change or a snapshot."""
    found = name.encode()
    if not 0 < len(found) <= NAME_BYTES:
        raise ValueError(name)
    return Entry(kind, found.ljust(NAME_BYTES, b"\0"), body=payload)


def encode(commit: Commit) -> bytes:
    """Return the bytes of a commit object."""
    head = [
        _HEADER.pack(
            _MAGIC,
            _VERSION,
            len(commit.entries),
            commit.epoch,
            commit.sequence,
            commit.writer,
            commit.oldest,
        )
    ]
    head += (
        _ENTRY.pack(e.kind, e.id, e.partition, e.first, e.next, len(e.body), crc32c(e.body))
        for e in commit.entries
    )
    table = b"".join(head)
    return b"".join((table, _CRC.pack(crc32c(table)), *(e.body for e in commit.entries)))


def decode(data: bytes) -> Commit:
    """Return the commit object of some bytes.

    Raises:
        CorruptionError: They are not one, whole and unchanged.
    """
    try:
        magic, version, count, epoch, sequence, writer, oldest = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or count > MAX_ENTRIES:
            raise _damaged("it does not begin like one")
        end = _HEADER.size + count * _ENTRY.size
        [crc] = _CRC.unpack_from(data, end)
    except struct_error as error:
        raise _damaged("it is too short") from error
    if crc32c(data[:end]) != crc:
        raise _damaged("its table has another checksum")
    rows = _ENTRY.iter_unpack(data[_HEADER.size : end])
    entries = tuple(_entries(data, end + _CRC.size, rows))
    return Commit(sequence, epoch, writer, entries, oldest)


def _entries(
    data: bytes, at: int, rows: Iterable[tuple[int, bytes, int, int, int, int, int]]
) -> Iterable[Entry]:
    for kind, identity, partition, first, after, length, crc in rows:
        body = data[at : at + length]
        if len(body) != length or crc32c(body) != crc:
            raise _damaged("a body has another checksum")
        try:
            yield Entry(Kind(kind), identity, partition, first, after, body)
        except ValueError as error:
            raise _damaged("an entry has an unknown kind") from error
        at += length
    if at != len(data):
        raise _damaged("it has more bytes than its entries")


def _damaged(reason: str) -> CorruptionError:
    return CorruptionError("commit object is damaged", reason=reason)
