"""One partition's log: sealed segments, the open segment, high watermark and log end offset.

    log_start ........ high_watermark ........ log_end
    |  durable, readable |  written, not durable yet  |  next append

- L1 A record becomes readable, and its producer gets a response, only when it is durable (I6). The
  high watermark never moves back, and every API returns the same one.
- L2 Durability is in order: a segment is durable and sealed before records of the next one count as
  durable. So records behind a segment that is not sealed were never acknowledged.
- L3 A failed flush fails all waiting requests, and the partition is offline until the next start.
  After such a failure it is unknown what the kernel still holds, so nothing is appended to it, and
  recovery writes again what it finds after the recorded durable end (`recovery`).
- L4 A failed write changes nothing: its partial bytes are truncated.
- L5 The log start offset never moves back, not even by a crash. It is durable before it is visible;
  files are removed afterwards, oldest first. The last segment stays.
- L6 The log end offset includes batches that are not durable yet.
- L7 Damaged records are refused, never skipped: a read ends before them, and one that begins at
  them is an error.

All methods run on one thread. Only `SyncJob.run` runs in another; it uses only its own fields.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.log.batch_check import place
from logmirror.broker.log.producer_state import (
    MAX_SNAPSHOT_BYTES,
    ProducerState,
    SequencedBatch,
    last_sequence,
)
from logmirror.broker.log.segment import (
    DamagedRecordsError,
    FileRange,
    Segment,
    SparseIndex,
    find_batch,
    whole_batches,
)
from logmirror.broker.log.sync_job import Seal, SyncJob, open_path, sealed_path, snapshot_path
from logmirror.broker.metadata import DurableEnd
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.wire.serve_markers import pack_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from logmirror.broker.log.batch_check import BatchFacts
    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment_cache import SegmentCache


_NO_SEGMENTS: Final[Mapping[Segment, tuple[OpenFile, SparseIndex]]] = MappingProxyType({})


class StorageError(UnavailableError):
    """The disk failed; the operation had no effect."""


class ColdSegmentError(Exception):
    """A read needs a segment whose index is not in memory."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(str(segment.path))
        self.segment = segment


class Marker(NamedTuple):
    """A transaction marker: the outcome of a producer's transaction, from its coordinator."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int


class PartitionLog:
    """The log of one partition.

    Args:
        folder: `<log dir>/<topic>/<partition>`. Created with the first record.
        segments: The existing segments, in ascending order, without a gap.
        tail: The open segment, which is also the last of `segments`.
        log_start: The log start offset.
        producers: The producer state at the end of the last segment.
        snapshot: The newest producer snapshot, or None.
        segment_bytes: An open segment that would exceed this size is sealed first, unless the
            snapshot of its producers would be larger.
        written_from: See `DurableEnd`.
    """

    def __init__(  # noqa: PLR0913  # the result of recovery
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
        written_from: int = 0,
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
        self._seals: list[Seal] = []
        self._snapshot = snapshot
        self._written_from = written_from
        self._new_folder = not self._segments
        self._new_names = False
        self._syncing = False
        self._ack_waiters: deque[tuple[int, Callable[[LogmirrorError | None], None]]] = deque()
        self._watchers: set[Callable[[], None]] = set()

    # Writing

    def append(self, records: memoryview, facts: BatchFacts) -> int:
        """Append one checked batch; returns its base offset.

        Changes the batch's header in place. The batch is not durable yet, see `when_durable`.

        Raises:
            StorageError: The partition is offline, or the write failed; nothing was appended.
        """
        base_offset = self._write(records, facts.record_count, facts.max_timestamp_ms)
        if facts.producer_id >= 0:
            first, timestamp_ms = facts.base_sequence, facts.max_timestamp_ms
            last = last_sequence(first, facts.record_count)
            stored = SequencedBatch(first, last, base_offset, self.log_end - 1, timestamp_ms)
            self.producers.stored(facts.producer_id, facts.producer_epoch, stored)
        return base_offset

    def append_marker(self, marker: Marker, timestamp_ms: int) -> int:
        """Append a transaction marker; returns its offset.

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
        """Check that the partition is online.

        Raises:
            StorageError: It is offline.
        """
        if self.failure is not None:
            raise StorageError(
                "partition is offline", folder=str(self.folder), cause=str(self.failure)
            ) from self.failure

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            "record batch could not be written", folder=str(self.folder), cause=str(error)
        )

    def _cut_back(self, file: OpenFile, size_bytes: int) -> None:
        try:
            self._disk.truncate(file, size_bytes)
        except OSError as error:
            self.take_offline(
                UnavailableError(
                    "partial batch could not be truncated",
                    folder=str(self.folder),
                    cause=str(error),
                )
            )

    def _tail_with_room(self, size_bytes: int) -> tuple[Segment, OpenFile, SparseIndex]:
        tail = self._tail
        # Sealing writes a snapshot of all producers: at most as many bytes as there are records.
        limit = max(self.segment_bytes, len(self.producers) * MAX_SNAPSHOT_BYTES)
        if tail is not None and tail.size_bytes + size_bytes > limit:
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
            self._seals.append(Seal(self._tail, full_file, snapshot))
        tail = Segment(path, self.log_end, self.log_end, 0, file=file, index=index)
        self._tail = tail
        self._segments.append(tail)
        self._firsts.append(tail.first)
        self._new_names = True
        return tail, file, index

    # Durability

    def when_durable(self, offset: int, done: Callable[[LogmirrorError | None], None]) -> None:
        """Call `done` once everything before `offset` is durable, or with the failure.

        Calls are made in the order of offsets, from within `finish_sync`, or at once.
        """
        if self.failure is not None:
            done(self.failure)
        elif offset <= self.high_watermark:
            done(None)
        else:
            self._ack_waiters.append((offset, done))

    def begin_sync(self) -> SyncJob | None:
        """Return the job that makes everything written so far durable.

        None if there is nothing to do or a job is running. The caller runs the job and calls
        `finish_sync`.
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
        """Record a job's outcome, advance the high watermark and notify waiting requests."""
        self._syncing = False
        if self.failure is not None:
            return
        if error is not None:
            self.take_offline(
                UnavailableError(
                    "records could not be flushed to disk",
                    hint="the partition is offline until the broker restarts",
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
        self._notify_watchers()

    def durable_end(self) -> DurableEnd:
        """Return the end of what is durable, to be recorded."""
        return DurableEnd(self.high_watermark, self._written_from)

    # Deleting

    def advance_start(self, offset: int) -> None:
        """Advance the log start offset, which the caller has made durable already (L5)."""
        self.log_start = max(self.log_start, offset)
        self._notify_watchers()

    def take_deleted(self) -> list[Segment]:
        """Remove sealed segments before the log start from the log and return them, oldest first.

        The caller removes their files.
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
        """Refuse all further requests, and fail all waiting ones (L3)."""
        self.failure = failure
        waiters, self._ack_waiters = self._ack_waiters, deque()
        for _, done in waiters:
            done(failure)
        self._notify_watchers()

    # Reading

    def watch(self, notify: Callable[[], None]) -> None:
        """Call `notify` when high watermark or log start advance, or the partition goes offline."""
        self._watchers.add(notify)

    def unwatch(self, notify: Callable[[], None]) -> None:
        """Stop calling `notify`."""
        self._watchers.discard(notify)

    def _notify_watchers(self) -> None:
        for notify in tuple(self._watchers):
            notify()

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        pinned: Mapping[Segment, tuple[OpenFile, SparseIndex]] = _NO_SEGMENTS,
    ) -> list[FileRange]:
        """Find the whole batches from the one that holds `offset`, up to the high watermark.

        Args:
            offset: From `log_start` to `log_end`.
            max_bytes: Limit in bytes, except for `at_least_one`.
            at_least_one: Whether to return the first batch even if it exceeds `max_bytes`.
            pinned: Segments that the caller has loaded, and that the cache may have evicted since.

        Returns:
            File ranges in order; empty from the high watermark on, or if no batch fits.

        Raises:
            ColdSegmentError: The first segment is not loaded; load it in the executor and retry.
            StorageError: The partition is offline, or a segment cannot be read.
            DamagedRecordsError: The records at `offset` are damaged.
        """
        self.check_online()
        found: list[FileRange] = []
        left = max_bytes
        number = max(0, bisect_right(self._firsts, offset) - 1)
        while number < len(self._segments) and offset < self.high_watermark:
            segment = self._segments[number]
            end = self._readable_bytes(segment)
            loaded = pinned.get(segment) or self._cache.if_loaded(segment)
            if loaded is None:
                if found:
                    break
                raise ColdSegmentError(segment)
            must_have = at_least_one and not found
            try:
                place, reached = _batches_in(segment, loaded, offset, end, left, must_have)
            except DamagedRecordsError:
                if found:
                    break
                raise
            except OSError as error:
                raise StorageError(
                    "segment could not be read", path=str(segment.path), cause=str(error)
                ) from error
            if place is not None:
                found.append(place)
                left -= place.size_bytes
            number, offset = number + 1, segment.next_offset
            if reached < end or left <= 0:
                break
        return found

    def _readable_bytes(self, segment: Segment) -> int:
        if segment.next_offset <= self.high_watermark:
            return segment.size_bytes
        return self._durable_tail_bytes if segment is self._durable_tail else 0

    def readable_segments(self) -> list[tuple[Segment, int]]:
        """Return the segments below the high watermark, each with its readable bytes.

        A sealed segment without bytes stands for lost records.
        """
        pairs = ((segment, self._readable_bytes(segment)) for segment in self._segments)
        return [(found, size_bytes) for found, size_bytes in pairs if size_bytes or found.is_sealed]


def _batches_in(  # noqa: PLR0913, PLR0917  # the state of a read
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


def _opened(segment: Segment | None) -> tuple[Segment, OpenFile, SparseIndex]:
    """Return the parts of the open segment, which are always in memory."""
    assert segment is not None  # noqa: S101  # invariant: the tail is open
    assert segment.file is not None  # noqa: S101  # the same
    assert segment.index is not None  # noqa: S101  # the same
    return segment, segment.file, segment.index
