"""Copies a segment to another folder, batch by batch, in steps of limited size.

What is written is what was verified: each checksum and offset is checked in the buffer that is then
written. A file has its final name only when it is complete and durable, except the copy of an open
segment, which has it from the start, as the segment itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol

import xxhash

from logmirror import failpoints
from logmirror.broker.log.batch_scan import Seen, scan
from logmirror.broker.log.file_names import open_path, sealed_name, sealed_path
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment

_READ_BYTES: Final = 1024 * 1024
_TORN_BYTES: Final = 20
"""Less than any batch."""

PART: Final = ".part"
"""At the end of the name of an incomplete copy."""


class _Copying(Seen):
    """Writes what a scan has verified."""

    def __init__(self, disk: Disk, out: OpenFile, digest: xxhash.xxh3_128) -> None:
        super().__init__()
        self._disk, self._out = disk, out
        self.digest = digest

    def passed(self, data: memoryview) -> None:
        self.digest.update(data)
        if data and failpoints.is_wanted("move.torn"):
            self._disk.append(self._out, data[:-_TORN_BYTES])
            failpoints.reach("move.torn")
            data = data[-_TORN_BYTES:]
        self._disk.append(self._out, data)


class Copying(Protocol):
    """How far a segment is copied."""

    segment: Segment
    source: OpenFile
    position: int
    next_offset: int


class SegmentCopy:
    """The copy of one segment. Its methods block.

    Args:
        disk: The system calls.
        segment: The segment.
        folder: Where the copy is made.

    Attributes:
        source: The segment's file.
        position: How many bytes are copied.
        next_offset: The offset behind what is copied.
        file: The copy.
        path: Its path, until it is finished.
    """

    def __init__(self, disk: Disk, segment: Segment, folder: Path) -> None:
        self.segment, self._disk = segment, disk
        self.source = disk.open_for_reading(segment.path)
        self.position, self.next_offset = 0, segment.first
        self._durable = 0
        self._folder = folder
        self.path = open_path(folder, segment.first)
        if segment.is_sealed:
            self.path = folder / f".{segment.path.name}{PART}"
        disk.unlink(self.path)
        self.file = disk.create(self.path)
        self._digest = xxhash.xxh3_128()

    def append(self, end: int, limit_bytes: int) -> int:
        """Copy batches up to a position, about as many bytes as the limit; returns how many.

        Args:
            end: At most the segment's size when this was called, and where a batch ends.
            limit_bytes: At least one batch is copied.

        Raises:
            CorruptionError: A batch is damaged.
            OSError: A file could not be read or written.
        """
        begin = self.position
        seen = _Copying(self._disk, self.file, self._digest)
        self.position, self.next_offset = verified(self, end, limit_bytes, seen)
        return self.position - begin

    def sync(self) -> None:
        """Make what is copied durable. Safe beside `append`.

        Called for each step: producers, whose records are flushed to the same disk, do not wait for
        a whole segment.

        Raises:
            OSError: That failed.
        """
        position = self.position
        self._disk.sync(self.file)
        self._durable = position

    def finish(self) -> None:
        """Make a complete copy of a sealed segment durable under its name; reads it once more.

        It may have been sealed since the copy was begun.

        Raises:
            CorruptionError: The file does not hold what was written.
            OSError: A file could not be read or written.
        """
        if self._durable < self.position:
            self.sync()
        if (found := digest_of(self.file)) != self._digest.hexdigest():
            raise CorruptionError(
                "the copy of a segment differs from what was written",
                path=str(self.path),
                expected=self._digest.hexdigest(),
                found=found,
            )
        segment = self.segment
        name = sealed_name(segment.first, segment.next_offset)
        self._disk.rename(self.path, self._folder / name)


def verified(copy: Copying, end: int, limit_bytes: int, seen: Seen) -> tuple[int, int]:
    """Verify the next batches of a segment; returns position and offset behind them. Blocks.

    Args:
        copy: What is copied so far.
        end: As in `SegmentCopy.append`.
        limit_bytes: The same.
        seen: Gets the bytes.

    Raises:
        CorruptionError: The first of them is damaged.
        OSError: The file could not be read.
    """
    segment, begin, after = copy.segment, copy.position, copy.next_offset
    position, exact = begin, segment.is_exact
    # The first batch of a segment that came from an archive may begin before it.
    expected = after if exact or begin else 0
    batches = scan(copy.source, expected, contiguous=exact, start=begin, end=end, seen=seen)
    for batch in batches:
        position, after = batch.end, batch.last_offset + 1
        if position - begin >= limit_bytes:
            break
    batches.close()
    if position == begin and begin < end:
        raise CorruptionError(
            "record batch is damaged; the partition stays where it is",
            hint="restore the file from a backup and restart the broker",
            path=str(segment.path),
            position=begin,
            offset=after,
        )
    return position, after


def digest_of(file: OpenFile) -> str:
    """Return the digest of a file. Blocks.

    Raises:
        OSError: The file cannot be read.
    """
    digest, position, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_READ_BYTES))
    while count := os.preadv(file.fd, [buffer], position):
        digest.update(buffer[:count])
        position += count
    return digest.hexdigest()


def is_copied(disk: Disk, segment: Segment, folder: Path) -> bool:
    """Whether a folder has a complete copy of a sealed segment, from before a restart. Blocks.

    Both are read, and the segment's batches are verified.

    Raises:
        OSError: A file could not be read.
    """
    try:
        copy = disk.open_for_reading(sealed_path(folder, segment.first, segment.next_offset))
    except FileNotFoundError:
        return False
    if os.fstat(copy.fd).st_size != segment.size_bytes:
        return False
    file, seen = disk.open_for_reading(segment.path), Seen()
    first = segment.first if segment.is_exact else 0
    for _ in scan(file, first, contiguous=segment.is_exact, seen=seen):
        pass
    return seen.end == segment.size_bytes and seen.digest.hexdigest() == digest_of(copy)
