"""One partition's log: sealed segments, the open segment, high watermark and log end offset.

    log_start ........ high_watermark ........ log_end
    |  durable, readable |  written, not durable yet  |  next append

- L1 A record becomes readable, and its producer gets a response, only when it is durable (I6). The
  high watermark never moves back, and every API returns the same one. Without `flush_on_ack` the
  high watermark is the log end, and `durable` follows it (`flush_rule`).
- L2 Durability is in order: a segment is durable and sealed before records of the next one count as
  durable. So records behind a segment that is not sealed were never acknowledged.
- L3 A failed flush fails all waiting requests, and the partition is offline until the next start.
  What the kernel still holds is unknown then, so nothing is appended, and recovery writes again
  what follows the recorded durable end. The same applies if that end cannot be recorded.
- L4 A failed write changes nothing: its partial bytes are truncated.
- L5 The log start offset never moves back, not even by a crash. It is durable before it is visible;
  files are removed afterwards, oldest first. The last segment stays.
- L6 The log end offset includes batches that are not durable yet.
- L7 Damaged records are refused, never skipped: a read ends before them, and one that begins at
  them is an error.

All methods run on one thread. Only `SyncJob.run` runs in another; it uses only its own fields.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.batch_check import place
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.file_names import open_path, snapshot_path
from logmirror.broker.log.flush_rule import FlushRule, Unflushed
from logmirror.broker.log.producer_state import ProducerState, SequencedBatch, last_sequence
from logmirror.broker.log.readable_log import ReadableLog
from logmirror.broker.log.reading import StorageError
from logmirror.broker.log.segment import Segment, SparseIndex, opened
from logmirror.broker.log.segment_list import SegmentList
from logmirror.broker.log.sync_job import Seal, SyncJob
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.log.batch_check import BatchFacts
    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.durable_ends import EndSlot
    from logmirror.broker.log.partition_transactions import Marker
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.log.shadow import Shadow


_NO_VERSIONS: Final[Mapping[Segment, str]] = MappingProxyType({})
_FOLLOWED_BYTES: Final = 64 * 1024 * 1024
"""By so much a segment with a shadow may be larger, so that a busy log can be moved."""


class PartitionLog(ReadableLog):
    """The log of one partition.

    Args:
        folder: `<log dir>/<topic>/<partition>`, created with the first record.
        segments: The existing segments, in ascending order, without a gap.
        tail: The open segment, which is also the last of `segments`.
        log_start: The log start offset.
        producers: The producer state at the end of the last segment.
        snapshot: The newest producer snapshot, or None.
        segment_bytes: An open segment that would exceed this size is sealed first, unless the
            snapshot of its producers would be larger, or it has a shadow.
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
        super().__init__(folder, cache, SegmentList(segments or [], tail), tail, log_start)
        self.producers = producers or ProducerState()
        self._disk = disk
        self.segment_bytes = segment_bytes
        self._tail = tail
        self.appended_bytes = self.appended_records = self.fetched_bytes = 0  # for the metrics
        self.durable = self.log_end
        self.flush_rule, self.unflushed = FlushRule(), Unflushed()
        self._seals: list[Seal] = []
        self._snapshot = snapshot
        self._written_from = written_from
        self.end_slot: EndSlot | None = None
        self.shadow: Shadow | None = None
        self.when_synced: Callable[[], None] = lambda: None
        """Called after each flush; see `moves.mover`."""

        self._new_folder = not segments
        self._new_names = False
        self._syncing = False
        self._ack_waiters: deque[tuple[int, Callable[[LogmirrorError | None], None]]] = deque()

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
            writer = facts.producer_id, facts.producer_epoch
            self.producers.stored(*writer, stored, is_transactional=facts.is_transactional)
        self._written()
        return base_offset

    def append_marker(self, marker: Marker, timestamp_ms: int) -> int:
        """Append a transaction marker; returns its offset.

        Raises:
            RefusedSequenceError: The producer or its coordinator has a higher epoch.
            StorageError: As in `append`.
        """
        producer_id, epoch, is_commit, coordinator_epoch = marker
        self.producers.check_marker(producer_id, epoch, coordinator_epoch)
        batch = marker.packed(timestamp_ms)
        offset = self._write(memoryview(batch), 1, timestamp_ms)
        if producer_id >= 0:
            self.producers.marked(producer_id, epoch, coordinator_epoch, timestamp_ms)
            transactions = self.producers.transactions
            transactions.ended(producer_id, offset, self.high_watermark, is_commit=is_commit)
        self._written()
        return offset

    def _written(self) -> None:
        """Make a batch readable without a flush, if the rule allows it."""
        if self._tail is not None and not self.flush_rule.on_ack:
            self._advance(self._tail, self._tail.size_bytes, self.log_end)

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
        if self.shadow is not None:
            self.shadow.append(batch)
        index.add(base_offset, tail.size_bytes, max_timestamp_ms)
        tail.size_bytes += len(batch)
        self.log_end = tail.next_offset = base_offset + offset_count
        self.appended_bytes += len(batch)
        self.appended_records += offset_count
        self.unflushed.appended(len(batch))
        return base_offset

    def _refused(self, error: OSError) -> StorageError:
        self.disk_failed(error)
        return StorageError(
            "record batch could not be written", folder=str(self.folder), cause=str(error)
        )

    def _cut_back(self, file: OpenFile, size_bytes: int) -> None:
        try:
            self._disk.truncate(file, size_bytes)
        except OSError as error:
            self.disk_failed(error)
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
        limit = max(self.segment_bytes, self.producers.max_snapshot_bytes)
        if self.shadow is not None:
            limit += _FOLLOWED_BYTES
        if tail is not None and tail.size_bytes + size_bytes > limit:
            if tail.size_bytes == 0:
                return opened(tail)
            tail = None
        return opened(tail) if tail is not None else self._new_tail()

    def _new_tail(self) -> tuple[Segment, OpenFile, SparseIndex]:
        if not self._segments.all:
            self._disk.make_folder(self.folder)
        if self.end_slot is not None:
            self.end_slot.reserve()
        file, index = self._disk.create(open_path(self.folder, self.log_end)), SparseIndex()
        full, start = self._tail, self.log_end
        if full is not None:
            snapshot = self.producers.to_bytes(self.log_end)
            self._seals.append(Seal(full, opened(full)[1], snapshot))
        tail = Segment(self.folder, start, start, 0, is_sealed=False, file=file, index=index)
        self._tail, self.shadow = tail, None
        self._segments.add(tail, full)
        self._new_names = True
        return tail, file, index

    def begin_segment(self) -> None:
        """Create an open segment, if there is none.

        Raises:
            StorageError: The partition is offline, or it could not be created.
        """
        if self._tail is None:
            self.check_online()
            try:
                self._new_tail()
            except OSError as error:
                raise self._refused(error) from error

    def roll(self) -> None:
        """Continue in a new segment, if the open one has records; the next flush seals that.

        Raises:
            StorageError: The partition is offline, or the new segment could not be created.
        """
        if self.tail is None:
            return
        self.check_online()
        try:
            self._new_tail()
        except OSError as error:
            raise self._refused(error) from error

    @property
    def tail(self) -> Segment | None:
        """The open segment, if it has records."""
        return self._tail if self._tail is not None and self._tail.size_bytes else None

    @property
    def open_segment(self) -> Segment | None:
        """The open segment, also if it has no records."""
        return self._tail

    @property
    def snapshot(self) -> Path | None:
        """The producer snapshot at the end of the last sealed segment."""
        return self._snapshot

    @snapshot.setter
    def snapshot(self, path: Path | None) -> None:
        self._snapshot = path

    @property
    def is_at_rest(self) -> bool:
        """Whether no flush is running, and no full segment waits for one."""
        return not self._syncing and not self._seals

    def relocate(self, folder: Path, versions: Mapping[Segment, str] = _NO_VERSIONS) -> None:
        """Continue in another folder: it has all segments, and the shadow as the open one.

        No other work on the files may be running.

        Args:
            folder: The folder.
            versions: Those of segments that have one there.
        """
        for segment in self._segments.all:
            segment.folder, segment.version = folder, versions.get(segment, "")
            self._cache.close(segment)
        if self._tail is not None and self.shadow is not None:
            self._tail.file = self.shadow.file
        if self._snapshot is not None:
            self._snapshot = folder / self._snapshot.name
        self.folder, self.shadow = folder, None
        self._new_folder = self._new_names = True

    @property
    def size_bytes(self) -> int:
        """The size of all segments."""
        return self._segments.full_bytes + (self._tail.size_bytes if self._tail is not None else 0)

    # Durability

    def when_acknowledged(self, offset: int, done: Callable[[LogmirrorError | None], None]) -> None:
        """Call `done` once everything before `offset` is readable, or with the failure."""
        if self.failure is None and offset <= self.high_watermark:
            done(None)
        else:
            self.when_durable(offset, done)

    def when_durable(self, offset: int, done: Callable[[LogmirrorError | None], None]) -> None:
        """Call `done` once everything before `offset` is durable, or with the failure.

        Calls are made in the order of offsets, from within `finish_sync`, or at once.
        """
        if self.failure is not None:
            done(self.failure)
        elif offset <= self.durable:
            done(None)
        else:
            self._ack_waiters.append((offset, done))

    def is_flush_due(self, now_ms: int) -> bool:
        """Whether to flush now: a request or a seal waits for it, or the rule requires it."""
        if self._ack_waiters or self._seals:
            return True
        return self.flush_rule.is_due(self.unflushed, self.log_end - self.durable, now_ms)

    def begin_sync(self, *, is_due: bool = False) -> SyncJob | None:
        """Return the job that makes everything written so far durable.

        None if there is nothing to do or a job is running. The caller runs the job and calls
        `finish_sync`.

        Args:
            is_due: Whether there is something to do in any case: the log is in another place now.
        """
        idle = self._syncing or self.failure is not None or self._tail is None
        if idle or (self.durable == self.log_end and not self._seals and not is_due):
            return None
        tail, file, _ = opened(self._tail)
        job = SyncJob(
            disk=self._disk,
            folder=self.folder,
            seals=tuple(self._seals),
            obsolete_snapshot=self._snapshot,
            tail=tail,
            tail_file=file,
            tail_bytes=tail.size_bytes,
            shadow=self.shadow,
            end_offset=self.log_end,
            total_bytes=self.unflushed.flush_begins(),
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
        error = error or self._recorded(job.end_offset)
        if error is not None:
            self.disk_failed(error)
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
            segment.is_sealed = True
            self._snapshot = snapshot_path(self.folder, segment.next_offset)
            self._cache.sealed(segment)
        self.durable = job.end_offset
        self.unflushed.flushed(job.total_bytes)
        if self.durable >= self.high_watermark:
            self._advance(job.tail, job.tail_bytes, self.durable)
        while self._ack_waiters and self._ack_waiters[0][0] <= job.end_offset:
            self._ack_waiters.popleft()[1](None)
        self.when_synced()

    def _advance(self, tail: Segment, tail_bytes: int, end: int) -> None:
        """Make everything before `end` readable."""
        self._readable_tail, self._readable_tail_bytes = tail, tail_bytes
        self.high_watermark = end
        self._notify_watchers()

    def _recorded(self, end_offset: int) -> OSError | None:
        """Record a durable end, before anything learns of it; returns the error of a failure."""
        try:
            if self.end_slot is not None:
                self.end_slot.record(DurableEnd(end_offset, self._written_from))
        except OSError as error:
            return error
        return None

    def durable_end(self) -> DurableEnd:
        """Return the end of what is durable, to be recorded."""
        return DurableEnd(self.durable, self._written_from)

    # Deleting

    def advance_start(self, offset: int) -> None:
        """Advance the log start offset, which the caller has made durable already (L5)."""
        self.log_start = max(self.log_start, offset)
        self.producers.transactions.drop_before(self.log_start)
        self._notify_watchers()

    def take_deleted(self) -> list[Segment]:
        """Remove sealed segments before the log start from the log and return them, oldest first.

        The caller removes their files.
        """
        taken = self._segments.take_before(self.log_start)
        for segment in taken:
            segment.is_deleted = True
            self._cache.forget(segment)
        return taken

    def replace(self, old: Sequence[Segment], new: Segment, source: Path) -> bool:
        """Put a compacted segment, whose file is at `source`, in the place of segments.

        Returns False if the partition is offline, or one of them was deleted meanwhile. Raises
        OSError if the file could not be renamed.
        """
        place = self._segments.place_of(old)
        if self.failure is not None or place is None:
            return False
        self._cache.replace(old, source, new.path)
        self._segments.replace(place, new)
        return True

    def take_offline(self, failure: LogmirrorError) -> None:
        """Refuse all further requests, and fail all waiting ones (L3)."""
        self.failure = failure
        self.fail_waiters(failure)
        self._notify_watchers()

    def fail_waiters(self, failure: LogmirrorError) -> None:
        """Fail all waiting requests. Their records may become durable later."""
        waiters, self._ack_waiters = self._ack_waiters, deque()
        for _, done in waiters:
            done(failure)
