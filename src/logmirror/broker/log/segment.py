"""One file of a partition's log and the sparse index that finds offsets in it.

A sealed segment is a native archive object: `<first>-<last>.batches`, whole record batches and
nothing else (`archive/naming.py`, `docs/formats/native.md`). The open one has the same bytes under
the name `.<first>.open`, which no listing of an archive shows.

The index holds one entry for about every 16 KiB: base offset, position, and the largest timestamp
from there to the next entry. So memory is 24 bytes per 16 KiB of log, and finding an offset costs a
bisection and a walk over the headers of at most 16 KiB of small batches, or one large one.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.log.disk import OpenFile

INDEX_INTERVAL_BYTES: Final = 16 * 1024
_WALK_BYTES: Final = 16 * 1024
HEADER_BYTES: Final = 61
_LENGTH_END: Final = 12
_WALKED: Final = Struct(">qi11xi8xq")
"""Base offset, length, last offset delta, max timestamp of a batch header."""

_LEAST_TIMESTAMP: Final = -(2**63)


class FileRange(NamedTuple):
    """Bytes of an open file, to be sent."""

    file: OpenFile
    position: int
    size_bytes: int


class BatchAt(NamedTuple):
    """A batch's place and what its header says."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int


def walk(file: OpenFile, position: int, end: int) -> Iterator[BatchAt]:
    """Yield the batches from `position`, where one must begin, until `end`.

    Only headers are read, and only what the log has checked before; so a length that makes no
    sense here is damage since then.

    Raises:
        CorruptionError: A batch ends behind `end`, or has an impossible length.
    """
    window = b""
    window_start = position
    while position < end:
        at = position - window_start
        if at + HEADER_BYTES > len(window):
            window = os.pread(file.fd, min(_WALK_BYTES, end - position), position)
            window_start, at = position, 0
            if len(window) < HEADER_BYTES:
                raise CorruptionError("log ends inside a batch header", position=position, end=end)
        base_offset, length, last_delta, max_timestamp_ms = _WALKED.unpack_from(window, at)
        size_bytes = _LENGTH_END + length
        if size_bytes < HEADER_BYTES or position + size_bytes > end:
            raise CorruptionError(
                "batch does not fit its segment", position=position, size=size_bytes, end=end
            )
        yield BatchAt(position, size_bytes, base_offset, base_offset + last_delta, max_timestamp_ms)
        position += size_bytes


class SparseIndex:
    """Base offsets, positions and largest timestamps at intervals."""

    __slots__ = ("max_timestamp_ms", "offsets", "positions", "timestamps_ms")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.positions = array("q")
        self.timestamps_ms = array("q")
        self.max_timestamp_ms = _LEAST_TIMESTAMP

    def add(self, base_offset: int, position: int, max_timestamp_ms: int) -> None:
        """Count the next batch."""
        if not self.positions or position - self.positions[-1] >= INDEX_INTERVAL_BYTES:
            self.offsets.append(base_offset)
            self.positions.append(position)
            self.timestamps_ms.append(max_timestamp_ms)
        elif max_timestamp_ms > self.timestamps_ms[-1]:
            self.timestamps_ms[-1] = max_timestamp_ms
        self.max_timestamp_ms = max(self.max_timestamp_ms, max_timestamp_ms)

    def position_before(self, offset: int) -> int:
        """Return the position of an indexed batch at or before `offset`; 0 if there is none."""
        found = bisect_right(self.offsets, offset) - 1
        return self.positions[found] if found >= 0 else 0

    def boundary_before(self, position: int) -> int:
        """Return the greatest indexed batch boundary that is not behind `position`."""
        found = bisect_right(self.positions, position) - 1
        return self.positions[found] if found >= 0 else 0

    def first_interval_reaching(self, timestamp_ms: int) -> int | None:
        """Return where the first interval begins that holds a timestamp of at least this."""
        # By number, not by iterator: the open segment's index may grow while this runs elsewhere.
        for number in range(len(self.timestamps_ms)):
            if self.timestamps_ms[number] >= timestamp_ms:
                return self.positions[number]
        return None


class Segment:
    """A run of the log in one file.

    Attributes:
        first: The first offset that belongs to it.
        next_offset: The first offset that belongs to the segment after it.
        size_bytes: How long it is, counting only whole batches.
        path: Where it is; changes once, when the segment is sealed.
        is_deleted: Whether its file is gone, since all its records were deleted.
        index: None while it is not in memory, which only happens to sealed segments.
    """

    __slots__ = ("file", "first", "index", "is_deleted", "next_offset", "path", "size_bytes")

    def __init__(  # noqa: PLR0913  # a value with six parts
        self,
        path: Path,
        first: int,
        next_offset: int,
        size_bytes: int,
        *,
        file: OpenFile | None = None,
        index: SparseIndex | None = None,
    ) -> None:
        self.path = path
        self.first = first
        self.next_offset = next_offset
        self.size_bytes = size_bytes
        self.file = file
        self.index = index
        self.is_deleted = False

    @property
    def is_sealed(self) -> bool:
        """Whether it has its final name; what has not is hidden."""
        return not self.path.name.startswith(".")

    def load(self, file: OpenFile) -> tuple[OpenFile, SparseIndex]:
        """Take an open file and build the index from its headers."""
        index = SparseIndex()
        for batch in walk(file, 0, self.size_bytes):
            index.add(batch.base_offset, batch.position, batch.max_timestamp_ms)
        self.file, self.index = file, index
        return file, index


def find_batch(file: OpenFile, index: SparseIndex, offset: int, end: int) -> BatchAt | None:
    """Return the first batch that holds `offset` or a later one; None if none before `end` does."""
    for batch in walk(file, index.position_before(offset), end):
        if batch.last_offset >= offset:
            return batch
    return None


def whole_batches(
    file: OpenFile, index: SparseIndex, start: BatchAt, end: int, max_bytes: int
) -> int:
    """Return where whole batches from `start` end, with at most `max_bytes` of them.

    The answer may be up to one index interval short of what would fit, and is `start.position` if
    the first batch alone is larger.
    """
    limit = start.position + max_bytes
    if end <= limit:
        return end
    boundary = index.boundary_before(limit)
    if boundary > start.position:
        return boundary
    boundary = start.position
    for batch in walk(file, start.position, end):
        if batch.position + batch.size_bytes > limit:
            break
        boundary = batch.position + batch.size_bytes
    return boundary
