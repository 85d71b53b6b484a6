"""One partition's log: sealed segments, the open one, and the watermark between known and durable.

    log_start ........ high_watermark ........ log_end
    |  durable, readable |  written, waiting for the disk  |  next append

- L1 A record is readable and its producer told only when it is durable (I6). There is one
  watermark, it never steps back, and every API shows it.
- L2 Durability comes in order: a segment is durable and sealed before anything in the one after it
  counts as durable. So what recovery may have to cut off was never acknowledged.
- L3 A failed flush fails exactly those who wait, and the partition is offline until the next start:
  after such a failure nobody knows what the kernel still holds, so nothing is built on it.
- L4 A failed write changes nothing: the part of it that reached the file is cut off again.
- L5 The log start never steps back, not by a crash either: it is durable before anybody sees it,
  and files go after that, oldest first. The last segment stays.
- L6 Whoever asks where the next batch goes is told `log_end`, durable or not.

One thread calls the methods here. Only `SyncJob.run` runs elsewhere; it touches nothing but what it
was given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from logmirror.archive.naming import NATIVE, format_name
from logmirror.broker.log.batch_check import place
from logmirror.broker.log.producer_state import ProducerState, SequencedBatch, last_sequence
from logmirror.broker.log.segment import FileRange, Segment, SparseIndex, find_batch, whole_batches
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.model import OffsetRange
from logmirror.wire.serve_markers import pack_marker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.log.batch_check import BatchFacts
    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment_cache import SegmentCache


class StorageError(UnavailableError):
    """The disk refused; what was asked for did not happen."""


class ColdSegmentError(Exception):
    """A read needs a segment whose index is not in memory."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(str(segment.path))
        self.segment = segment


class Marker(NamedTuple):
    """How a transaction of a producer ends, as its coordinator says."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int


class _Seal(NamedTuple):
    """A full segment, and the producers as they were at its end."""

    segment: Segment
    file: OpenFile
    snapshot: bytes


def open_path(folder: Path, first: int) -> Path:
    """Where the open segment that begins at `first` is."""
    return folder / f".{first:020d}.open"


def snapshot_path(folder: Path, next_offset: int) -> Path:
    """Where the producers as of `next_offset` are."""
    return folder / f".{next_offset:020d}.producers"


def sealed_path(folder: Path, first: int, next_offset: int) -> Path:
    """Where the sealed segment of these offsets is."""
    return folder / format_name(OffsetRange(first=first, last=next_offset - 1), NATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncJob:
    """Everything that makes the log durable up to `end_offset`; blocking, for a worker thread."""

    disk: Disk
    folder: Path
    seals: tuple[_Seal, ...]
    obsolete_snapshot: Path | None
    tail: Segment
    tail_file: OpenFile
    tail_bytes: int
    end_offset: int
    new_folder: bool
    new_names: bool

    def run(self) -> None:
        """Flush, seal and publish, in the order of L2.

        Raises:
            OSError: Something is not durable; nothing may be said about the rest.
        """
        disk = self.disk
        for seal in self.seals:
            segment = seal.segment
            disk.sync(seal.file)
            disk.write_synced(snapshot_path(self.folder, segment.next_offset), [seal.snapshot])
            seal_file(disk, self.folder, segment.first, segment.next_offset)
        disk.sync(self.tail_file)
        if self.new_names:
            disk.sync_folder(self.folder)
        if self.new_folder:
            disk.sync_folder(self.folder.parent)
            disk.sync_folder(self.folder.parent.parent)
        if self.seals and self.obsolete_snapshot is not None:
            disk.unlink(self.obsolete_snapshot)


def seal_file(disk: Disk, folder: Path, first: int, next_offset: int) -> Path:
    """Give a durable open segment its final name. A link never replaces; a rename would.

    The new name is durable before the old one goes: a file system may keep two changes of one
    folder in either order, and then no name at all might be left.
    """
    path = sealed_path(folder, first, next_offset)
    source = open_path(folder, first)
    disk.link(source, path)
    disk.sync_folder(folder)
    disk.unlink(source)
    return path


class PartitionLog:
    """The log of one partition.

    Args:
        folder: `<log dir>/<topic>/<partition>`; made with the first record.
        segments: Those that are there, ascending, without a gap.
        tail: The open segment, which is then also the last of `segments`.
        log_start: The first offset that can be read.
        producers: As of the end of the last segment.
        snapshot: The newest producer snapshot, or None.
        segment_bytes: An open segment that would grow beyond this is sealed first.
    """

    def __init__(  # noqa: PLR0913  # what recovery found, each a thing of its own
        self,
        folder: Path,
        *,
        disk: Disk,
        cache: SegmentCache,
        segment_bytes: int,
        segments: list[Segment] | None = None,
        tail: Segment | None = None,
        log_start: int = 0,
        producers: ProducerState | None = None,
        snapshot: Path | None = None,
    ) -> None:
        self.folder = folder
        self.failure: LogmirrorError | None = None
        self.log_start = log_start
        self.producers = producers or ProducerState()
        self._disk = disk
        self._cache = cache
        self.segment_bytes = segment_bytes
        self._segments = segments or []
        self._firsts = [segment.first for segment in self._segments]
        self._tail = tail
        self.log_end = self._segments[-1].next_offset if self._segments else log_start
        self.high_watermark = self.log_end
        self._durable_tail = tail
        self._durable_tail_bytes = tail.size_bytes if tail else 0
        self._seals: list[_Seal] = []
        self._snapshot = snapshot
        self._new_folder = not self._segments
        self._new_names = False
        self._syncing = False
        self._ack_waiters: deque[tuple[int, Callable[[LogmirrorError | None], None]]] = deque()
        self._watchers: set[Callable[[], None]] = set()

    # Writing

    def append(self, records: memoryview, facts: BatchFacts) -> int:
        """Write one checked batch behind the last one; returns its base offset.

        The batch's header is changed in place. The record is not durable yet: `when_durable`.

        Raises:
            StorageError: The partition is offline, or the disk refused; nothing was appended.
        """
        base_offset = self._write(records, facts.record_count, facts.max_timestamp_ms)
        if facts.producer_id >= 0:
            first, timestamp_ms = facts.base_sequence, facts.max_timestamp_ms
            last = last_sequence(first, facts.record_count)
            stored = SequencedBatch(first, last, base_offset, self.log_end - 1, timestamp_ms)
            self.producers.stored(facts.producer_id, facts.producer_epoch, stored)
        return base_offset

    def append_marker(self, marker: Marker, timestamp_ms: int) -> int:
        """Write a transaction marker behind the last batch; returns its offset, as `append` does.

        Raises:
            RefusedSequenceError: The producer or its coordinator has a higher epoch.
            StorageError: As in `append`.
        """
        producer_id, epoch, is_commit, coordinator_epoch = marker
        self.producers.check_marker(producer_id, epoch, coordinator_epoch)
        batch = pack_marker(
            producer_id,
            epoch,
            commit=is_commit,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=timestamp_ms,
        )
        offset = self._write(memoryview(batch), 1, timestamp_ms)
        if producer_id >= 0:
            self.producers.marked(producer_id, epoch, coordinator_epoch, timestamp_ms)
        return offset

    def _write(self, batch: memoryview, offset_count: int, max_timestamp_ms: int) -> int:
        self.check_online()
        base_offset = self.log_end
        try:
            tail, file, index = self._tail_with_room(len(batch))
        except OSError as error:
            raise self._refused(error) from error
        place(batch, base_offset)
        try:
            self._disk.append(file, batch)
        except OSError as error:
            self._cut_back(file, tail.size_bytes)
            raise self._refused(error) from error
        index.add(base_offset, tail.size_bytes, max_timestamp_ms)
        tail.size_bytes += len(batch)
        self.log_end = tail.next_offset = base_offset + offset_count
        return base_offset

    def check_online(self) -> None:
        """Raise what took the partition offline, if anything did."""
        if self.failure is not None:
            raise StorageError(
                "partition is offline", folder=str(self.folder), cause=str(self.failure)
            ) from self.failure

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            "the disk refused a record batch", folder=str(self.folder), cause=str(error)
        )

    def _cut_back(self, file: OpenFile, size_bytes: int) -> None:
        try:
            self._disk.truncate(file, size_bytes)
        except OSError as error:
            self.take_offline(
                UnavailableError(
                    "a half-written batch could not be cut off",
                    folder=str(self.folder),
                    cause=str(error),
                )
            )

    def _tail_with_room(self, size_bytes: int) -> tuple[Segment, OpenFile, SparseIndex]:
        tail = self._tail
        if tail is not None and tail.size_bytes + size_bytes > self.segment_bytes:
            if tail.size_bytes == 0:
                return _opened(tail)
            tail = None
        if tail is not None:
            return _opened(tail)
        if not self._segments:
            self._disk.make_folder(self.folder)
        path = open_path(self.folder, self.log_end)
        file, index = self._disk.create(path), SparseIndex()
        if self._tail is not None:
            _, full_file, _ = _opened(self._tail)
            snapshot = self.producers.to_bytes(self.log_end)
            self._seals.append(_Seal(self._tail, full_file, snapshot))
        tail = Segment(path, self.log_end, self.log_end, 0, file=file, index=index)
        self._tail = tail
        self._segments.append(tail)
        self._firsts.append(tail.first)
        self._new_names = True
        return tail, file, index

    # Becoming durable

    def when_durable(self, offset: int, tell: Callable[[LogmirrorError | None], None]) -> None:
        """Call `tell` once all before `offset` is durable, or with the reason why it is not.

        Calls come in the order of their offsets, from within `finish_sync`, or at once.
        """
        if self.failure is not None:
            tell(self.failure)
        elif offset <= self.high_watermark:
            tell(None)
        else:
            self._ack_waiters.append((offset, tell))

    def begin_sync(self) -> SyncJob | None:
        """Return the work that makes everything written so far durable; None: nothing to do.

        One job at a time: None also while one runs. The caller runs it and calls `finish_sync`.
        """
        idle = self._syncing or self.failure is not None or self._tail is None
        if idle or self.high_watermark == self.log_end:
            return None
        tail, file, _ = _opened(self._tail)
        job = SyncJob(
            disk=self._disk,
            folder=self.folder,
            seals=tuple(self._seals),
            obsolete_snapshot=self._snapshot,
            tail=tail,
            tail_file=file,
            tail_bytes=tail.size_bytes,
            end_offset=self.log_end,
            new_folder=self._new_folder,
            new_names=self._new_names,
        )
        self._seals = []
        self._new_names = self._new_folder = False
        self._syncing = True
        return job

    def finish_sync(self, job: SyncJob, error: OSError | None) -> None:
        """Count a job as done, and tell those whom it concerns."""
        self._syncing = False
        if self.failure is not None:
            return
        if error is not None:
            self.take_offline(
                UnavailableError(
                    "records could not be made durable",
                    hint="the partition is offline until the broker starts again",
                    folder=str(self.folder),
                    cause=str(error),
                )
            )
            return
        for seal in job.seals:
            segment = seal.segment
            segment.path = sealed_path(self.folder, segment.first, segment.next_offset)
            self._snapshot = snapshot_path(self.folder, segment.next_offset)
            self._cache.sealed(segment)
        self._durable_tail, self._durable_tail_bytes = job.tail, job.tail_bytes
        self.high_watermark = job.end_offset
        while self._ack_waiters and self._ack_waiters[0][0] <= job.end_offset:
            self._ack_waiters.popleft()[1](None)
        self._wake_watchers()

    @property
    def is_syncing(self) -> bool:
        """Whether a job is running."""
        return self._syncing

    # Deleting

    def advance_start(self, offset: int) -> None:
        """Show nothing before `offset` any more; that this is so must be durable already (L5)."""
        self.log_start = max(self.log_start, offset)
        self._wake_watchers()

    def take_deleted(self) -> list[Segment]:
        """Take sealed segments that lie wholly before the log start out of the log, oldest first.

        Their files are the caller's to remove.
        """
        count = 0
        for segment in self._segments[:-1]:
            if not segment.is_sealed or segment.next_offset > self.log_start:
                break
            count += 1
        taken, self._segments = self._segments[:count], self._segments[count:]
        del self._firsts[:count]
        for segment in taken:
            segment.is_deleted = True
            self._cache.forget(segment)
        return taken

    def take_offline(self, failure: LogmirrorError) -> None:
        """Refuse everything from now on, and fail all who wait (L3)."""
        self.failure = failure
        waiters, self._ack_waiters = self._ack_waiters, deque()
        for _, tell in waiters:
            tell(failure)
        self._wake_watchers()

    # Reading

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the watermark moves or the partition goes offline."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Stop calling `wake`."""
        self._watchers.discard(wake)

    def _wake_watchers(self) -> None:
        for wake in tuple(self._watchers):
            wake()

    def read(self, offset: int, max_bytes: int, *, at_least_one: bool) -> list[FileRange]:
        """Find the whole batches from the one that holds `offset`, up to the watermark.

        Args:
            offset: From `log_start` to `log_end`.
            max_bytes: How much at most, except for `at_least_one`.
            at_least_one: Whether the first batch comes even if it alone is larger.

        Returns:
            Where the bytes are, in order; empty from the watermark on, or if nothing fits.

        Raises:
            ColdSegmentError: The first segment is not loaded; load it off the loop and try again.
            StorageError: The partition is offline, or a segment cannot be read.
        """
        self.check_online()
        found: list[FileRange] = []
        left = max_bytes
        number = max(0, bisect_right(self._firsts, offset) - 1)
        while number < len(self._segments) and offset < self.high_watermark:
            segment = self._segments[number]
            end = self._readable_bytes(segment)
            loaded = self._cache.if_loaded(segment)
            if loaded is None:
                if found:
                    break
                raise ColdSegmentError(segment)
            file, index = loaded
            try:
                start = find_batch(file, index, offset, end)
            except OSError as error:
                raise StorageError(
                    "a segment could not be read", path=str(segment.path), cause=str(error)
                ) from error
            number, offset = number + 1, segment.next_offset
            if start is None:
                continue
            stop = whole_batches(file, index, start, end, left)
            if stop == start.position and at_least_one and not found:
                stop += start.size_bytes
            if stop > start.position:
                found.append(FileRange(file, start.position, stop - start.position))
            left -= stop - start.position
            if stop < end or left <= 0:
                break
        return found

    def _readable_bytes(self, segment: Segment) -> int:
        if segment.next_offset <= self.high_watermark:
            return segment.size_bytes
        return self._durable_tail_bytes if segment is self._durable_tail else 0

    def readable_segments(self) -> list[tuple[Segment, int]]:
        """Return the segments below the watermark, each with how many of its bytes are."""
        pairs = ((segment, self._readable_bytes(segment)) for segment in self._segments)
        return [(segment, size_bytes) for segment, size_bytes in pairs if size_bytes]


def _opened(segment: Segment | None) -> tuple[Segment, OpenFile, SparseIndex]:
    """The parts of an open segment, which are always in memory."""
    assert segment is not None  # noqa: S101  # an invariant of ours: the tail is open
    assert segment.file is not None  # noqa: S101  # the same
    assert segment.index is not None  # noqa: S101  # the same
    return segment, segment.file, segment.index
