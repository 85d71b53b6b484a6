"""The job that makes the files of a partition's folder durable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from logmirror.broker.log.file_names import open_path, sealed_path, snapshot_path

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.shadow import Shadow


class Seal(NamedTuple):
    """A full segment, and the producer state at its end."""

    segment: Segment
    file: OpenFile
    snapshot: bytes


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
    shadow: Shadow | None
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
        if self.shadow is not None:
            self.shadow.sync()
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
