"""Reads a part of a sealed segment that is only in the bucket: whole batches, by one range request.

    .logmirror/broker/indexes/<topic>@<topic ID>/<partition>/<name>   the sparse index of a segment

- P1 An index is created behind its object, and deleted before it. It is only a copy: without it, or
  if it is damaged, the whole segment is fetched. A missing one is created then. While indexes
  cannot be created, nothing waits for them. One that is created late, by a paused owner or after
  many failures, may stay until the topic is deleted.
- P2 What an index says is compared with the batches: a part is used if they are whole, unchanged
  and have the offsets of the index. Otherwise the whole segment is fetched and checked, so that
  damage is reported as always.
- P3 The first read of a segment costs a part, the next one within a minute the whole segment, which
  is fetched once for all readers (`files`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from struct import Struct, pack, unpack_from
from struct import error as struct_error
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.disk import OpenFile
from logmirror.broker.log.segment import SparseIndex
from logmirror.errors import CorruptionError, UsageError
from logmirror.stores.base import AlreadyExistsError
from logmirror.wire.checksum import crc32c

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.segment import Segment
    from logmirror.stores.base import BlobStore

INDEXES: Final = ".logmirror/broker/indexes"
LEAST_BYTES: Final = 1024 * 1024
"""A part is at least so long, unless the segment ends before."""

MOST_BYTES: Final = 8 * 1024 * 1024
_KEPT_ENTRIES: Final = 500_000
"""Entries of the indexes in memory, 24 bytes each."""

_MAGIC: Final = b"LMINDEX\0"
_VERSION: Final = 1
_HEADER: Final = Struct(">8sHI")
_CRC: Final = Struct(">I")


def encode(index: SparseIndex) -> bytes:
    """Return the bytes of an index object."""
    count = len(index.offsets)
    numbers = pack(f">{3 * count}q", *index.offsets, *index.positions, *index.timestamps_ms)
    body = _HEADER.pack(_MAGIC, _VERSION, count) + numbers
    return body + _CRC.pack(crc32c(body))


def decode(data: bytes) -> SparseIndex:
    """Return the index of an object.

    Raises:
        CorruptionError: The bytes are not one.
    """
    try:
        magic, version, count = _HEADER.unpack_from(data)
        [crc] = _CRC.unpack_from(data, len(data) - _CRC.size)
    except struct_error as error:
        raise CorruptionError("index of a segment is damaged", reason="too short") from error
    body = data[: len(data) - _CRC.size]
    is_ours = magic == _MAGIC and version == _VERSION
    if not is_ours or crc != crc32c(body) or len(body) != _HEADER.size + 24 * count or not count:
        raise CorruptionError("index of a segment is damaged", reason="its bytes are not valid")
    numbers = array("q", unpack_from(f">{3 * count}q", body, _HEADER.size))
    index = SparseIndex()
    index.offsets, index.positions = numbers[:count], numbers[count : 2 * count]
    index.timestamps_ms = numbers[2 * count :]
    index.max_timestamp_ms = max(index.timestamps_ms)
    return index


def create_index(store: BlobStore, name: str, index: SparseIndex) -> None:
    """Create the index of an object that exists; a store that refuses it has none (P1).

    Raises:
        UnavailableError, OutcomeUnknownError: Try again with the same arguments.
    """
    with contextlib.suppress(AlreadyExistsError, UsageError):
        store.create(f"{INDEXES}/{name}", encode(index))


def delete_object(store: BlobStore, name: str) -> None:
    """Delete an object of a segment, and its index before it (P1)."""
    store.delete(f"{INDEXES}/{name}")
    store.delete(name)


class Parts:
    """Fetches parts. Safe to call from several threads.

    Args:
        store: The log dir.

    Attributes:
        without_index: Names of objects whose index was missing.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.without_index: set[str] = set()
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, SparseIndex] = OrderedDict()
        self._entries = 0

    def read(
        self, segment: Segment, name: str, offset: int, size_bytes: int
    ) -> tuple[OpenFile, SparseIndex, int] | None:
        """Return a file and an index of batches from the one with an offset on, and their bytes.

        The file is sparse and has no name: bytes are where they are in the segment. None: the whole
        segment must be read (P1, P2).

        Raises:
            LogmirrorError: The bucket could not be read.
        """
        try:
            index = self._index(name)
            first, last = _bounds(index, offset, size_bytes)
            start, end = index.positions[first], _at(index.positions, last, segment.size_bytes)
            data = self._store.read_range(name, start, end - start)
        except (KeyError, CorruptionError):
            return None
        file = _unnamed(segment.path.parents[2], data, start)  # the topic may be deleted meanwhile
        expected = index.offsets[first]
        for batch in scan(file, expected, contiguous=True, start=start):
            expected, start = batch.last_offset + 1, batch.end
        if start != end or expected != _at(index.offsets, last, segment.next_offset):
            return None
        part = SparseIndex()
        part.offsets, part.positions = index.offsets[first:last], index.positions[first:last]
        part.timestamps_ms, part.end = index.timestamps_ms[first:last], end
        return file, part, len(data)

    def _index(self, name: str) -> SparseIndex:
        with self._lock:
            found = self._indexes.get(name)
            if found is not None:
                self._indexes.move_to_end(name)
                return found
        try:
            found = decode(self._store.read(f"{INDEXES}/{name}"))
        except KeyError:
            self.without_index.add(name)
            raise
        with self._lock:
            if name not in self._indexes:
                self._indexes[name] = found
                self._entries += len(found.offsets)
            while self._entries > _KEPT_ENTRIES and len(self._indexes) > 1:
                self._entries -= len(self._indexes.popitem(last=False)[1].offsets)
        return found


def _bounds(index: SparseIndex, offset: int, size_bytes: int) -> tuple[int, int]:
    """Return the first entry to read, and the one behind the last."""
    first = max(0, bisect_right(index.offsets, offset) - 1)
    wanted = min(MOST_BYTES, max(LEAST_BYTES, size_bytes))
    return first, max(first + 1, bisect_left(index.positions, index.positions[first] + wanted))


def _at(column: array[int], entry: int, end: int) -> int:
    return column[entry] if entry < len(column) else end


def _unnamed(folder: Path, data: bytes, position: int) -> OpenFile:
    """Return a file without a name that has bytes at a position, and none before."""
    with tempfile.TemporaryFile(dir=folder) as made:
        made.seek(position)
        made.write(data)
        made.flush()
        return OpenFile(os.dup(made.fileno()))
