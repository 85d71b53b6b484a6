"""Recovery: opens a partition's log from its files, after a clean stop or a crash.

    files                           state
    <first>-<last>.batches          sealed: durable before it got this name
    .<first>.open                   open: whole batches, possibly a partial one at the end
    .<first>.open beside a sealed   a crash between link and unlink: the same file under two names
    more than one open              a crash before the older ones were sealed
    sealed, before the log start    a crash during a deletion: removed now
    sealed, within another sealed   a crash after a compaction: removed now, see `cleaner`
    .<first>.cleaned                a crash during a compaction: removed now
    .<next>.producers               the producer state before offset <next>
    .<first>.cut                    bytes that an earlier recovery cut off

First everything is read, and nothing is changed (`survey`). If acknowledged records are damaged or
missing (`open_segments`), the partition is not opened, and every byte stays. Otherwise the log ends
before the first torn batch: what follows is copied to a `.cut` file, of which a partition keeps the
newest `KEPT_CUTS`, and cut off. Sealed segments are checked when they are first served
(`segment_check`).

Bytes after the recorded durable end are written again before anything is served. The page cache is
not believed: after a failed flush it may show bytes that never reached the disk, and a second flush
would report success. The failure itself need not be recorded, which a crash could prevent: it does
not advance the durable end, so the bytes in doubt are always after it.

With `accept_loss`, a damaged open segment is sealed as it is. Nothing is removed: intact batches
are served, and damaged offsets are refused. The log continues behind every offset that the damaged
bytes can have held, so that no offset is used twice.

Afterwards a producer snapshot exists at the end of the last sealed segment, so any sealed segment
can be deleted later without losing producer state.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.batch_check import MAX_BODY_BYTES
from logmirror.broker.log.batch_scan import WINDOW_BYTES
from logmirror.broker.log.file_names import cut_path, first_of, open_path, snapshot_path
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.segment import HEADER_BYTES, Segment
from logmirror.broker.log.survey import Survey, survey
from logmirror.broker.log.sync_job import seal_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.durable_ends import DurableEnd
    from logmirror.broker.log.open_segments import OpenSegment
    from logmirror.broker.log.segment_cache import SegmentCache

_LOG: Final = logging.getLogger(__name__)
_CUT: Final = re.compile(r"\.[0-9]{20}\.cut")
KEPT_CUTS: Final = 4
"""Files of cut-off bytes that a partition keeps: the newest ones."""

_BATCH_OFFSETS: Final = MAX_BODY_BYTES // 7
"""More offsets than one batch can hold: a record takes at least 7 bytes."""


def recover(  # noqa: PLR0913  # what is known of a partition
    folder: Path,
    *,
    disk: Disk,
    cache: SegmentCache,
    segment_bytes: int,
    log_start: int = 0,
    durable: DurableEnd | None = None,
    accept_loss: bool = False,
    synced: set[Path] | None = None,
) -> PartitionLog:
    """Open a partition's log. Everything in the returned log is durable.

    Args:
        folder: The partition's folder.
        disk: The system calls.
        cache: The cache for sealed segments.
        segment_bytes: As in `PartitionLog`.
        log_start: The log start offset in the metadata. The first stored record may be later.
        durable: The recorded durable end; None: not recorded yet.
        accept_loss: Whether to open the log although acknowledged records are damaged or missing.
        synced: The folders above partitions that were flushed since the process started; those that
            this call flushes are added. Partitions of one topic share them.

    Raises:
        DamagedLogError: Acknowledged records are damaged or missing. Nothing was changed.
        CorruptionError: The files contradict each other, in a way that no crash explains. Nothing
            was changed.
        OSError: The folder cannot be read or written.
    """
    found = survey(folder, disk, log_start=log_start, durable=durable, accept_loss=accept_loss)
    recovery = _Recovery(folder, disk, found, set() if synced is None else synced)
    recovery.run(log_start)
    segments = recovery.segments
    return PartitionLog(
        folder,
        disk=disk,
        cache=cache,
        segment_bytes=segment_bytes,
        segments=segments,
        tail=recovery.tail,
        log_start=max(log_start, segments[0].first) if segments else 0,
        producers=found.producers,
        snapshot=recovery.snapshot,
        written_from=found.written_from,
    )


class _Recovery:
    """Brings the files of a surveyed folder into the state of a running log."""

    def __init__(self, folder: Path, disk: Disk, found: Survey, synced: set[Path]) -> None:
        self._folder, self._disk, self._found, self._synced = folder, disk, found, synced
        self.segments = list(found.sealed)
        self.tail: Segment | None = None
        self.snapshot = found.snapshot

    def run(self, log_start: int) -> None:
        folder, disk, found = self._folder, self._disk, self._found
        for path in found.to_remove:
            disk.unlink(path)
        self._keep_unreachable()
        if self.snapshot is not None:
            # The page cache is not believed, see above.
            disk.rewrite(self.snapshot, 0, self.snapshot.stat().st_size)
        if found.snapshot_due is not None:
            path = snapshot_path(folder, found.sealed[-1].next_offset)
            disk.write_synced(path, [found.snapshot_due])
            disk.sync_folder(folder)
            self._replace_snapshot(path)
        for opened in found.opened:
            if opened.is_damaged(found.durable_end):
                self._seal_damaged(opened)
            elif opened.is_whole and opened.following is not None:
                self._seal(opened, opened.following, opened.snapshot)
            else:
                self._open_tail(opened)
        log_end = self.segments[-1].next_offset if self.segments else log_start
        if log_end < found.durable_end:
            self._stand_in(log_end)
        self._keep_few_cuts()
        if found.names:
            disk.sync_folder(folder)
        if self.segments:
            self._make_reachable()

    def _make_reachable(self) -> None:
        """Make the names of the folders durable."""
        for path in (self._folder.parent, self._folder.parent.parent):
            if path not in self._synced:
                self._disk.sync_folder(path)
                self._synced.add(path)

    def _seal_file(self, first: int, next_offset: int, snapshot: bytes) -> None:
        """Seal an open segment.

        The old producer snapshot stays until a sealed segment ends at the new one: a start does not
        believe a snapshot at any other offset.
        """
        path = snapshot_path(self._folder, next_offset)
        self._disk.write_synced(path, [snapshot])
        seal_file(self._disk, self._folder, first, next_offset)
        self._replace_snapshot(path)

    def _replace_snapshot(self, path: Path) -> None:
        old, self.snapshot = self.snapshot, path
        if old is not None:
            self._disk.unlink(old)

    def _seal(self, opened: OpenSegment, next_offset: int, snapshot: bytes) -> None:
        self._disk.rewrite(opened.path, opened.durable_bytes, opened.found_bytes)
        self._seal_file(opened.first, next_offset, snapshot)
        self.segments.append(Segment(self._folder, opened.first, next_offset, opened.found_bytes))

    def _seal_damaged(self, opened: OpenSegment) -> None:
        end, snapshot = opened.following, opened.snapshot
        if end is None:
            durable_end, bad_bytes = (
                self._found.durable_end,
                opened.found_bytes - opened.later_bytes,
            )
            end = max(opened.next_offset, opened.later_end or 0)
            if bad_bytes or end < durable_end:
                end = _unused(max(end, durable_end), bad_bytes)
            snapshot = self._found.producers.to_bytes(end)
        self._seal(opened, end, snapshot)
        _LOG.warning(
            "%s: loss accepted: damaged from byte %d, offset %d; the segment ends at offset %d",
            self.segments[-1].path,
            opened.size_bytes,
            opened.next_offset,
            end,
        )

    def _stand_in(self, first: int) -> None:
        """Seal an empty segment in the place of missing ones."""
        folder, disk, end = self._folder, self._disk, _unused(self._found.durable_end, 0)
        disk.make_folder(folder)
        disk.create(open_path(folder, first))
        self._seal_file(first, end, self._found.producers.to_bytes(end))
        self.segments.append(Segment(folder, first, end, 0))
        self._synced -= {folder.parent, folder.parent.parent}  # their names are new
        _LOG.warning("%s: loss accepted: stands for missing records", self.segments[-1].path)

    def _open_tail(self, opened: OpenSegment) -> None:
        disk, end = self._disk, opened.size_bytes
        if opened.found_bytes > end:
            cut = cut_path(self._folder, opened.next_offset)
            _LOG.warning(
                "%s: truncated from %d to %d bytes; the log ends at offset %d; the rest is in %s",
                opened.path,
                opened.found_bytes,
                end,
                opened.next_offset,
                cut,
            )
            source = disk.open_for_reading(opened.path)
            disk.write_synced(cut, _pieces(source, end, opened.found_bytes))
            disk.sync_folder(self._folder)
        file = disk.open_for_append(opened.path)
        if opened.found_bytes > end:
            disk.truncate(file, end)
        if opened.found_bytes > opened.durable_bytes:
            disk.rewrite(opened.path, opened.durable_bytes, end)
        self.tail = Segment(
            self._folder,
            opened.first,
            opened.next_offset,
            end,
            is_sealed=False,
            file=file,
            index=opened.index,
        )
        self.segments.append(self.tail)

    def _keep_unreachable(self) -> None:
        for path in self._found.unreachable:
            _LOG.warning("%s: cut off: the log ends before it", path)
            self._keep(path)

    def _keep(self, path: Path) -> None:
        """Rename an open segment that does not belong to the log to a cut."""
        cut = cut_path(self._folder, first_of(path))
        self._disk.unlink(cut)
        self._disk.link(path, cut)
        self._disk.sync_folder(self._folder)
        self._disk.unlink(path)

    def _keep_few_cuts(self) -> None:
        if not self._folder.is_dir():
            return
        cuts = sorted(path for path in self._folder.iterdir() if _CUT.fullmatch(path.name))
        for path in cuts[:-KEPT_CUTS]:
            self._disk.unlink(path)


def _unused(end: int, bad_bytes: int) -> int:
    """Return an offset that was never used: behind `end` and what bad bytes can have held."""
    return end + (1 + bad_bytes // HEADER_BYTES) * _BATCH_OFFSETS


def _pieces(file: OpenFile, start: int, end: int) -> Iterator[bytes]:
    while start < end and (piece := os.pread(file.fd, min(WINDOW_BYTES, end - start), start)):
        yield piece
        start += len(piece)
