"""One segment of a partition's log, and its sparse index.

A sealed segment is a native archive object, `<first>-<last>.batches`: whole record batches and
nothing else (`archive/naming.py`, `docs/formats/native.md`). The open segment has the same content
under the name `.<first>.open`, which listings of an archive ignore.

The index has one entry per about 16 KiB: base offset, position, and the largest timestamp up to the
next entry. It takes 24 bytes per 16 KiB of log. Finding an offset costs a binary search and a walk
over the headers of at most 16 KiB of small batches, or one large batch.
"""

from __future__ import annotations

import os
import sys
from array import array
from bisect import bisect_left, bisect_right
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from logmirror.broker.log.file_names import open_path, sealed_path
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.mounted_transactions import TransactionEvents

INDEX_INTERVAL_BYTES: Final = 16 * 1024
_WALK_BYTES: Final = 16 * 1024
HEADER_BYTES: Final = 61
_LENGTH_END: Final = 12
_WALKED: Final = Struct(">qi11xi8xq")
"""Base offset, length, last offset delta, max timestamp of a batch header."""

_LEAST_TIMESTAMP: Final = -(2**63)


class FileRange(NamedTuple):
    """A range of an open file, to be sent."""

    file: OpenFile
    position: int
    size_bytes: int


class BatchAt(NamedTuple):
    """A batch's position in a segment, and fields of its header."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int


class Damage(NamedTuple):
    """Bytes of a segment that are not valid batches, and the offsets that are missing for it."""

    position: int
    end: int
    """Position of the next intact batch, or the end of the segment."""

    first_offset: int
    next_offset: int


class DamagedRecordsError(CorruptionError):
    """The requested records are damaged on disk. Records before and after them are served."""


def walk(file: OpenFile, position: int, end: int) -> Iterator[BatchAt]:
    """Yield the batches from `position`, a batch boundary, to `end`.

    Reads headers only. The log was checked when it was written, so an impossible length means that
    the file was damaged since.

    Raises:
        CorruptionError: A batch extends beyond `end`, or has an impossible length.
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
    """Base offset, position and largest timestamp of each interval.

    Attributes:
        end: Of a part of a segment: the position where it ends. Otherwise there is no limit.
    """

    __slots__ = ("end", "max_timestamp_ms", "offsets", "positions", "timestamps_ms")

    def __init__(self) -> None:
        self.end = sys.maxsize
        self.offsets = array("q")
        self.positions = array("q")
        self.timestamps_ms = array("q")
        self.max_timestamp_ms = _LEAST_TIMESTAMP

    def add(self, base_offset: int, position: int, max_timestamp_ms: int) -> None:
        """Add the next batch."""
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
        """Return the greatest indexed batch boundary at or before `position`."""
        found = bisect_right(self.positions, position) - 1
        return self.positions[found] if found >= 0 else 0

    def offset_after(self, position: int, end: int) -> int:
        """Return an offset that no batch before a boundary reaches: an indexed one, or `end`."""
        found = bisect_left(self.positions, position)
        return self.offsets[found] if found < len(self.offsets) else end

    def first_interval_reaching(self, timestamp_ms: int) -> int | None:
        """Return the position of the first interval with a timestamp of at least `timestamp_ms`."""
        # By number, not by iterator: the open segment's index may grow while a worker runs this.
        for number in range(len(self.timestamps_ms)):
            if self.timestamps_ms[number] >= timestamp_ms:
                return self.positions[number]
        return None


class SegmentSource(Protocol):
    """Where the batches of a mounted object come from."""

    executor: Executor
    """For opening its objects."""

    is_loaded_ahead: bool
    """Whether it pays to open an object before a consumer has come to it."""

    def path(self, segment: Segment) -> Path:
        """Return the object's path, for messages."""
        ...

    def open(self, segment: Segment) -> OpenFile:
        """Return a file of the object's batches, and set the segment's size. Blocks.

        Raises:
            LogmirrorError: The object cannot be read.
            OSError: The file cannot be opened or written.
        """
        ...

    def reused(self, segment: Segment) -> None:
        """Note that a file that `open` has returned is read again. Never blocks."""

    def newest_ms(self, segment: Segment) -> int | None:
        """Return the largest timestamp of the object, if that needs less than `open`. Blocks.

        -1: its records have none. Raises as `open` does.
        """
        ...


class Segment:
    """One segment. A log may have many thousands, so a sealed one that is not loaded is small.

    Attributes:
        folder: The partition's folder.
        first: The first offset of the segment.
        next_offset: The first offset of the next segment.
        size_bytes: Size in bytes, whole batches only.
        is_sealed: Whether its file has its final name.
        is_deleted: Whether the segment left the log because its records were deleted.
        index: The sparse index. None while not loaded, which only happens to sealed segments.
        is_exact: Whether this broker wrote it, so that it holds every offset. Objects of an archive
            may have offset gaps.
        is_checked: Whether its file was read and every checksum verified.
        damage: What that check found, in order.
        newest_ms: The largest timestamp of its records, by which retention measures their age. If
            no record has one, the time of the last write. None: not known yet.
        source: Of a mounted object: where its file comes from. Its size is 0 until it was opened.
        events: Of a mounted object: its transactions, once it was checked.
        version: Of a segment that was compacted in a bucket: a part of its name, `file_names`.
    """

    __slots__ = (
        "damage",
        "events",
        "file",
        "first",
        "folder",
        "index",
        "is_checked",
        "is_deleted",
        "is_exact",
        "is_sealed",
        "newest_ms",
        "next_offset",
        "size_bytes",
        "source",
        "version",
    )

    def __init__(  # noqa: PLR0913  # a value with eight parts
        self,
        folder: Path,
        first: int,
        next_offset: int,
        size_bytes: int,
        *,
        is_sealed: bool = True,
        file: OpenFile | None = None,
        index: SparseIndex | None = None,
        is_exact: bool = True,
        version: str = "",
    ) -> None:
        self.folder = folder
        self.first = first
        self.next_offset = next_offset
        self.size_bytes = size_bytes
        self.file = file
        self.index = index
        self.is_deleted = False
        self.is_sealed = is_sealed
        self.is_exact = is_exact
        self.is_checked = False
        self.damage: tuple[Damage, ...] = ()
        self.newest_ms: int | None = None
        self.source: SegmentSource | None = None
        self.events: TransactionEvents | None = None
        self.version = version

    @property
    def path(self) -> Path:
        """Path of the file. Changes once, when the segment is sealed."""
        if self.source is not None:
            return self.source.path(self)
        if self.is_sealed:
            return sealed_path(self.folder, self.first, self.next_offset, self.version)
        return open_path(self.folder, self.first)

    def indexed(self, file: OpenFile) -> SparseIndex:
        """Build the index of a checked segment from its batch headers."""
        index, begin = SparseIndex(), 0
        for position, end in [(d.position, d.end) for d in self.damage] + [(self.size_bytes, 0)]:
            for batch in walk(file, begin, position):
                index.add(batch.base_offset, batch.position, batch.max_timestamp_ms)
            begin = end
        return index

    def intact_around(self, offset: int, end: int) -> tuple[int, int]:
        """Return begin and end of the undamaged bytes in which to look for an offset.

        Raises:
            DamagedRecordsError: The offset's own batch is damaged.
        """
        begin = 0
        for damage in self.damage:
            if offset < damage.first_offset:
                return begin, min(end, damage.position)
            if offset < damage.next_offset:
                raise self._damaged(damage)
            begin = damage.end
        return begin, end

    def check_intact(self, log_start: int) -> None:
        """Check that no record from the log start on is damaged.

        Raises:
            DamagedRecordsError: One is.
        """
        for damage in self.damage:
            if damage.next_offset > log_start:
                raise self._damaged(damage)

    def _damaged(self, damage: Damage) -> DamagedRecordsError:
        return DamagedRecordsError(
            "records are damaged on disk",
            hint="restore the file from a backup and restart the broker, or move consumers to "
            "`next_offset`",
            path=str(self.path),
            position=damage.position,
            offset=damage.first_offset,
            next_offset=damage.next_offset,
        )


def find_batch(
    file: OpenFile, index: SparseIndex, offset: int, end: int, begin: int = 0
) -> BatchAt | None:
    """Return the first batch from `begin` to `end` that ends at or after `offset`, or None."""
    for batch in walk(file, max(begin, index.position_before(offset)), end):
        if batch.last_offset >= offset:
            return batch
    return None


def whole_batches(
    file: OpenFile, index: SparseIndex, start: BatchAt, end: int, max_bytes: int
) -> int:
    """Return the end position of the whole batches from `start` that fit into `max_bytes`.

    The result may be up to one index interval below the optimum. It is `start.position` if the
    first batch alone is larger.
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


def end_before(
    segment: Segment, loaded: tuple[OpenFile, SparseIndex], before: int, end: int
) -> int:
    """Return the position of the batch with base offset `before`; `end` if that is not in it.

    Raises:
        OSError: The file cannot be read.
        DamagedRecordsError: The records at `before` are damaged.
    """
    if segment.next_offset <= before:
        return end
    begin, intact_end = segment.intact_around(before, end)
    found = find_batch(*loaded, before, intact_end, begin)
    return end if found is None else found.position


def batches_in(  # noqa: PLR0913, PLR0917  # the state of a read
    segment: Segment,
    loaded: tuple[OpenFile, SparseIndex],
    offset: int,
    end: int,
    max_bytes: int,
    at_least_one: bool,
) -> tuple[FileRange | None, int]:
    """Return the batches from `offset` up to a position, and the position up to which they reach.

    The position is `end` if the segment has no more batches.

    Raises:
        OSError: The file cannot be read.
        DamagedRecordsError: The records at `offset` are damaged.
    """
    file, index = loaded
    begin, intact_end = segment.intact_around(offset, end)
    start = find_batch(file, index, offset, intact_end, begin)
    if start is None:
        return None, intact_end
    stop = whole_batches(file, index, start, intact_end, max_bytes)
    if stop == start.position and at_least_one:
        stop += start.size_bytes
    if stop == start.position:
        return None, stop
    return FileRange(file, start.position, stop - start.position), stop


def opened(segment: Segment | None) -> tuple[Segment, OpenFile, SparseIndex]:
    """Return the parts of the open segment, which are always in memory."""
    assert segment is not None  # noqa: S101  # invariant: the tail is open
    assert segment.file is not None  # noqa: S101  # the same
    assert segment.index is not None  # noqa: S101  # the same
    return segment, segment.file, segment.index
