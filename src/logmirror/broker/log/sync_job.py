"""The files of a partition's folder, and the job that makes them durable.

<first>-<last>.batches   a sealed segment: durable, never changed
.<first>.open            the open segment
.<next>.producers        the producer state before offset <next>
.<first>.cleaned         a compacted segment that is being written, see `cleaner`
.<first>.cut             what recovery cut off the log from offset <first> on; never read again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from logmirror.archive.naming import NATIVE, format_name
from logmirror.model import OffsetRange

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment


class Seal(NamedTuple):
    """A full segment, and the producer state at its end."""

    segment: Segment
    file: OpenFile
    snapshot: bytes


def open_path(folder: Path, first: int) -> Path:
    """Return the path of the open segment that begins at `first`."""
    return folder / f".{first:020d}.open"


def first_of(path: Path) -> int:
    """Return the first offset in the name of an open segment or of cut-off bytes."""
    return int(path.name[1:21])


def cut_path(folder: Path, first: int) -> Path:
    """Return the path of the bytes that recovery cut off at `first`."""
    return folder / f".{first:020d}.cut"


def cleaned_path(folder: Path, first: int) -> Path:
    """Return the path of a compacted segment that begins at `first`, while it is written."""
    return folder / f".{first:020d}.cleaned"


def snapshot_path(folder: Path, next_offset: int) -> Path:
    """Return the path of the producer snapshot at `next_offset`."""
    return folder / f".{next_offset:020d}.producers"


def sealed_path(folder: Path, first: int, next_offset: int) -> Path:
    """Return the path of a sealed segment."""
    return folder / format_name(OffsetRange(first=first, last=next_offset - 1), NATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncJob:
    """Makes a log durable up to `end_offset`. Blocks; runs in a worker thread.

    It holds everything that it needs: `PartitionLog` may continue to append meanwhile.
    """

    disk: Disk
    folder: Path
    seals: tuple[Seal, ...]
    obsolete_snapshot: Path | None
    tail: Segment
    tail_file: OpenFile
    tail_bytes: int
    end_offset: int
    total_bytes: int
    """See `Unflushed`."""

    new_folder: bool
    new_names: bool

    def run(self) -> None:
        """Flush, seal and publish, in the order of L2 in `partition_log`.

        Raises:
            OSError: The flush failed; it is unknown what is durable.
        """
        disk, obsolete = self.disk, self.obsolete_snapshot
        for seal in self.seals:
            segment = seal.segment
            disk.sync(seal.file)
            snapshot = snapshot_path(self.folder, segment.next_offset)
            disk.write_synced(snapshot, [seal.snapshot])
            seal_file(disk, self.folder, segment.first, segment.next_offset)
            if obsolete is not None:
                disk.unlink(obsolete)
            obsolete = snapshot
        disk.sync(self.tail_file)
        if self.new_names:
            disk.sync_folder(self.folder)
        if self.new_folder:
            disk.sync_folder(self.folder.parent)
            disk.sync_folder(self.folder.parent.parent)


def seal_file(disk: Disk, folder: Path, first: int, next_offset: int) -> None:
    """Give a durable open segment its final name.

    It links and unlinks: a link never replaces a file, a rename would. The new name is made durable
    before the old one is removed, because a file system may persist two changes of one folder in
    either order, which could leave the file without a name.
    """
    source = open_path(folder, first)
    disk.link(source, sealed_path(folder, first, next_offset))
    disk.sync_folder(folder)
    disk.unlink(source)
