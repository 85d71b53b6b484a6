"""The copy of a sealed segment as an object in a bucket; see `copying` for files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from logmirror.broker.bucket.parts import create_index
from logmirror.broker.bucket.sealed_objects import object_name, publish
from logmirror.broker.bucket.tiling import INDEXED_BYTES
from logmirror.broker.log.batch_scan import Seen, scan
from logmirror.broker.moves.copying import verified
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment
    from logmirror.stores.base import BlobStore, StagedObject

_READ_BYTES = 1024 * 1024


class _Staging(Seen):
    """Stages what a scan has verified."""

    def __init__(self, staged: StagedObject) -> None:
        super().__init__()
        self._staged = staged

    def passed(self, data: memoryview) -> None:
        self._staged.write(data)


class SegmentUpload:
    """The copy of one sealed segment. Its methods block.

    What is uploaded is what was verified. The store verifies the checksum of each request.

    Args:
        store: The log dir.
        disk: The system calls.
        segment: The segment.
        folder: The folder of the partition's residence.
        version: See `bucket.replacing`; empty: none.

    Attributes:
        segment: The segment.
        position: How many bytes are staged.
        next_offset: The offset behind them.
        source: The segment's file.
        path: The segment's, for messages.

    Raises:
        UsageError: The segment came from an archive, and does not hold every offset. One of which
            that is not known, after a power loss, is read.
        OSError: It could not be opened.
    """

    def __init__(
        self, store: BlobStore, disk: Disk, segment: Segment, folder: str, version: str
    ) -> None:
        self.segment, self._store, self._folder = segment, store, folder
        self._version = version
        self.path = segment.path
        self.source = disk.open_for_reading(segment.path)
        if not segment.is_exact and not _has_every_offset(self.source, segment):
            raise UsageError(
                "a segment with offset gaps or leader epochs cannot be moved to a bucket",
                hint="if it came from an archive: mount that with --archive, or copy the topic "
                "with logmirror run",
                path=str(segment.path),
            )
        self.position, self.next_offset = 0, segment.first
        self._staged = store.stage(f"segment-{segment.first}")

    def append(self, end: int, limit_bytes: int) -> int:
        """Stage batches, about as many bytes as the limit; returns how many. See `SegmentCopy`.

        Raises:
            CorruptionError: A batch is damaged.
            UnavailableError: There is no space to stage them.
        """
        begin = self.position
        seen = _Staging(self._staged)
        self.position, self.next_offset = verified(self, end, limit_bytes, seen)
        return self.position - begin

    def sync(self) -> None:
        """Nothing of it is durable before `finish`."""

    def finish(self) -> None:
        """Create the object, and its index.

        Raises:
            CorruptionError: Another object has its name.
            UnavailableError, OutcomeUnknownError: Begin again.
        """
        segment, name = self.segment, self.name
        publish(self._store, self._staged, name, segment.size_bytes)
        if segment.size_bytes >= INDEXED_BYTES:
            create_index(self._store, name, segment.index or segment.indexed(self.source))

    @property
    def name(self) -> str:
        """The name of the object."""
        segment = self.segment
        return object_name(self._folder, segment.first, segment.next_offset, self._version)


def _has_every_offset(file: OpenFile, segment: Segment) -> bool:
    """Whether a segment is as this broker writes them: no offset is missing. Blocks."""
    end = segment.first
    seen = Seen()
    for batch in scan(file, segment.first, contiguous=True, seen=seen):
        end = batch.last_offset + 1
    return seen.end == segment.size_bytes and end == segment.next_offset


def is_uploaded(store: BlobStore, disk: Disk, segment: Segment, name: str) -> bool:
    """Whether an object holds a sealed segment. Blocks.

    Both are read, and the segment's batches are verified.

    Raises:
        OSError: The segment could not be read.
        UnavailableError: The bucket could not be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with store.open(name) as found:
            while data := found.read(_READ_BYTES):
                digest.update(data)
    except KeyError:
        return False
    file, seen = disk.open_for_reading(segment.path), Seen()
    for _ in scan(file, segment.first, contiguous=segment.is_exact, seen=seen):
        pass
    is_whole = seen.end == segment.size_bytes
    return is_whole and seen.digest.hexdigest() == digest.hexdigest()
