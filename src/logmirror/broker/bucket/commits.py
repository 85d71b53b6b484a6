"""Group commit into a bucket: one object for all partitions that have something to commit.

    appended, due ... -> [gather] -> pieces of many partitions -> one commit object -> responses

One gathering is in flight at a time; what is appended meanwhile is in the next one. An outage of
the bucket takes no partition offline: the bytes stay, and become durable when it is back. Producers
that wait for longer than `commit_timeout_ms` get an error that their clients retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.bucket.commit_format import Entry, Kind
from logmirror.broker.bucket.journal import MAX_OBJECT_BYTES, Submission
from logmirror.broker.bucket.merging import Merger
from logmirror.broker.bucket.stop_deadline import GIVE_UP_S, not_stored
from logmirror.broker.log.file_names import open_path, sealed_path
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.reading import StorageError
from logmirror.broker.log.segment import opened, walk
from logmirror.broker.log.unflushed_limit import UnflushedLimit
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import FencedError, LogmirrorError, OutcomeUnknownError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from concurrent.futures import Executor

    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.sync_job import SyncJob

_LOG: Final = logging.getLogger(__name__)
_PIECE_BYTES: Final = MAX_OBJECT_BYTES // 2
_TICK_S: Final = 1.0


class _Place(NamedTuple):
    """How far a log is in the chain: a segment's first offset, and a position in its file."""

    first: int
    position: int


class _Range(NamedTuple):
    """Whole batches of a file."""

    first: int
    next: int
    file: OpenFile
    position: int
    size_bytes: int


class BucketCommit(GroupCommit):
    """Commits the logs of a log dir in a bucket.

    Args:
        threads: As in `GroupCommit`; those of a log in the bucket remove deleted segments.
        bucket: The log dir.
        interval_ms: Least time between two gatherings.
        timeout_ms: How long a producer waits for the bucket.
        max_unflushed_bytes: Limit for the bytes that are not in the bucket, of all partitions.
        tail_age_ms: Age of the oldest commit at which the segments that need it are sealed.
        max_commits: Number of commits at which the same is done.
        max_seals_per_s: Limit for the segments that are sealed for that, those that hold the oldest
            commits first. Full ones do not count.
    """

    def __init__(  # noqa: PLR0913  # the settings of a bucket
        self,
        threads: Callable[[PartitionLog], Executor],
        bucket: BucketLogs,
        *,
        interval_ms: int,
        timeout_ms: int,
        max_unflushed_bytes: int,
        tail_age_ms: int,
        max_commits: int,
        max_seals_per_s: int,
    ) -> None:
        super().__init__(threads, bucket.disk, max_unflushed_bytes=max_unflushed_bytes)
        self.unflushed.counts_all = True
        self._on_disk = UnflushedLimit(max_unflushed_bytes)
        self._bucket = bucket
        self._interval_ms, self._timeout_ms = interval_ms, timeout_ms
        self._tail_age_ms, self._max_commits = tail_age_ms, max_commits
        self._max_seals = int(max_seals_per_s * _TICK_S)
        self._due: dict[PartitionLog, None] = {}
        self._since_ms: dict[PartitionLog, int] = {}
        self._places: dict[PartitionLog, _Place] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._began_ms = SYSTEM_CLOCK.monotonic_ms() - interval_ms
        self.merger = Merger(bucket)
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        bucket.journal.when_fenced = lambda error: self._soon(self._fence, error)
        bucket.when_uploaded = lambda key: self._soon(self._uploaded, key)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    @property
    def bucket(self) -> BucketLogs:
        """The log dir."""
        return self._bucket

    def oldest_unflushed_ms(self) -> int:
        """Return the age of the oldest record that is not in the bucket; 0: there is none.

        Safe from any thread.
        """
        since = [*self._since_ms.values()]
        since += [ms for log in self.unflushed.logs if (ms := log.unflushed.since_ms) is not None]
        return SYSTEM_CLOCK.monotonic_ms() - min(since) if since else 0

    # What a log asks for

    def schedule(self, log: PartitionLog) -> None:
        """See `GroupCommit.schedule`."""
        self._limit_of(log).count(log)
        super().schedule(log)

    def may_be_replaced(self, log: PartitionLog) -> bool:
        """See `GroupCommit.may_be_replaced`."""
        return self._bucket.is_open(log)

    async def is_owner(self, timeout_s: float) -> bool:
        """See `GroupCommit.is_owner`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._bucket.journal.confirm())
        except (LogmirrorError, TimeoutError):
            return False
        return True

    def must_wait(self, log: PartitionLog) -> bool:
        """See `GroupCommit.must_wait`; all logs of the bucket wait, as an outage may last."""
        if not self._bucket.is_open(log):
            return super().must_wait(log)
        return self.unflushed.is_reached and log.failure is None

    def _limit_of(self, log: PartitionLog) -> UnflushedLimit:
        return self.unflushed if self._bucket.is_open(log) else self._on_disk

    def arrive(self, log: PartitionLog, confirm: Callable[[int], Awaitable[None]]) -> None:
        """See `GroupCommit.arrive`; the log dir has just taken the log over, or let it go."""
        for limit in (self.unflushed, self._on_disk):
            limit.forget(log)
        self._limit_of(log).count(log)
        self._places.pop(log, None)
        self._due.pop(log, None)
        super().arrive(log, confirm)

    def _begin(self, log: PartitionLog) -> None:
        if not self._bucket.is_open(log):
            super()._begin(log)
            return
        self._scheduled.discard(log)
        self._due[log] = None
        self._gather_soon()

    def _gather_soon(self) -> None:
        if self._timer is None and not self._in_flight and self._due:
            wait_ms = self._began_ms + self._interval_ms - SYSTEM_CLOCK.monotonic_ms()
            self._timer = self._loop.call_later(max(0, wait_ms) / 1000, self._gather)

    def _gather(self) -> None:
        self._timer = None
        due, self._due = self._due, {}
        for log in due:
            since_ms = log.unflushed.since_ms
            job = log.begin_sync(is_due=self.is_arriving(log))
            if job is not None:
                if since_ms is not None:
                    self._since_ms[log] = since_ms
                self._began_ms = SYSTEM_CLOCK.monotonic_ms()
                self._submit(log, job)

    def _submit(self, log: PartitionLog, job: SyncJob) -> None:
        running: asyncio.Future[None] = self._loop.create_future()
        self._follow(log, job, running)
        self._in_flight += 1
        try:
            pieces = list(self._pieces(log, job))
        except Exception as error:  # noqa: BLE001  # of the local disk: that partition only
            self._soon(self._committed, log, job, running, error)
            return
        failed: list[BaseException] = []
        for number, (ranges, cut) in enumerate(pieces, 1):
            is_last = number == len(pieces)

            def done(_: int, error: BaseException | None, *, is_last: bool = is_last) -> None:
                if error is not None:
                    failed.append(error)
                if is_last or error is not None:
                    self._soon(self._committed, log, job, running, error)

            key = self._bucket.key_of(log)
            size = sum(one.size_bytes for one in ranges)
            read = _reader(key, ranges, cut, failed)
            self._bucket.journal.submit(Submission(size, read, done))

    def _pieces(
        self, log: PartitionLog, job: SyncJob
    ) -> Iterator[tuple[list[_Range], tuple[int, int] | None]]:
        """Yield what one submission holds: batches, and the cut of a segment behind them."""
        ends = [
            (seal.segment, seal.segment.size_bytes, seal.segment.next_offset) for seal in job.seals
        ]
        tail = job.tail, job.tail_bytes, job.end_offset
        for segment, end, next_offset in [*ends, tail]:
            place = self._places.get(log, _Place(-1, 0))
            start = place.position if place.first == segment.first else 0
            for found in _ranges(segment, start, end, next_offset):
                yield [found], None
            if segment is not job.tail:
                yield [], (segment.first, next_offset)
            self._places[log] = _Place(segment.first, end)
        if not ends and job.tail_bytes == 0:
            yield [], None

    def opened(self) -> None:
        """See `GroupCommit.opened`; everything that the logs hold is in the chain."""
        for log in self._bucket.logs:
            if log.tail is not None:
                self._places[log] = _Place(log.tail.first, log.tail.size_bytes)
            self.merger.consider(log)
        self._bucket.opened()

    def _committed(
        self,
        log: PartitionLog,
        job: SyncJob,
        running: asyncio.Future[None],
        error: BaseException | None,
    ) -> None:
        if running.done():
            return
        self._in_flight -= 1
        self._since_ms.pop(log, None)
        if isinstance(error, FencedError):
            self._fence(error)
        try:
            if error is None:
                for seal in job.seals:
                    first, after = seal.segment.first, seal.segment.next_offset
                    source, target = (
                        open_path(job.folder, first),
                        sealed_path(job.folder, first, after),
                    )
                    self._disk.rename(source, target)
        except OSError as failed:
            error = failed
        if error is None:
            running.set_result(None)
            for seal in job.seals:
                self._bucket.seal(log, seal.segment, seal.snapshot)
        else:
            running.set_exception(error)
        self._gather_soon()

    def _uploaded(self, key: Key) -> None:
        log = self._bucket.log_of(key)
        if log is not None:
            self.touch(log)
            self.merger.consider(log)

    def stored_end(self, log: PartitionLog) -> int:
        """See `GroupCommit.stored_end`; their objects exist."""
        if not self._bucket.is_open(log):
            return super().stored_end(log)
        return min(super().stored_end(log), self._bucket.uploaded_end(log))

    # Deleting

    def _removal(self, log: PartitionLog) -> Callable[[list[Segment]], None]:
        if not self._bucket.is_open(log):
            return super()._removal(log)
        return lambda segments: self._bucket.remove(log, segments)

    # Time

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        since_ms = self._bucket.journal.failing_since_ms
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        if since_ms is not None and now_ms - since_ms > self._timeout_ms:
            failure = OutcomeUnknownError(
                "the bucket cannot be written", hint="the records may become durable later"
            )
            for log in {*self._running, *self._due, *self._scheduled}:
                if self._bucket.is_open(log) or self.is_arriving(log):
                    log.fail_waiters(failure)
        self.merger.tick()
        self._seal_early(self._bucket.holding(now_ms - self._tail_age_ms, self._max_commits))

    def _seal_early(self, held: Iterable[tuple[PartitionLog, int]]) -> None:
        """Seal open segments that hold old commits."""
        left = self._max_seals
        for log, end in held:
            if log.failure is None and log.tail is not None and log.tail.first < end:
                try:
                    log.roll()
                except StorageError as error:
                    _LOG.warning("%s: open segment could not be sealed: %s", log.folder, error)
                    continue
                self._flush_soon(log)
                left -= 1
                if not left:
                    return

    def _fence(self, error: FencedError) -> None:
        """Stop at once: nothing is acknowledged or served any more."""
        if not self.fenced.done():
            self.fenced.set_result(error)
            for log in self._bucket.logs:
                log.take_offline(error)

    async def drain(self) -> None:
        """Commit everything appended, and wait for it, at most `GIVE_UP_S`."""
        deadline = self._loop.time() + GIVE_UP_S
        self.merger.stop()
        while self._loop.time() < deadline:
            logs = {*self._scheduled, *self._timers, *self.unflushed.logs, *self._on_disk.logs}
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()  # else a log that waits for its time would be begun without end
            for log in logs:
                if log not in self._running:
                    self._begin(log)
            waiting = {*self._running.values(), *self._removing.values()}
            if waiting:
                await asyncio.wait(waiting, timeout=1)
            elif self._due:
                await asyncio.sleep(self._interval_ms / 1000)
            else:
                break
        self._ticker.cancel()

    def check_drained(self) -> None:
        """Check that everything appended is in the bucket.

        Raises:
            UnavailableError: It is not.
        """
        logs = [log for log in self._bucket.logs if log.failure is None]
        if missing := sum(log.durable < log.log_end for log in logs):
            raise not_stored(missing)


def _ranges(segment: Segment, start: int, end: int, next_offset: int) -> Iterator[_Range]:
    """Split a part of a file at batch boundaries."""
    _, file, index = opened(segment)
    first = _offset_at(segment, file, start, next_offset)
    while start < end:
        stop, after = end, next_offset
        if end - start > _PIECE_BYTES:
            boundary = index.boundary_before(start + _PIECE_BYTES)
            if boundary <= start:
                boundary = next((at for at in index.positions if at > start), end)
            if boundary < end:
                stop, after = boundary, index.offset_after(boundary, next_offset)
        yield _Range(first, after, file, start, stop - start)
        start, first = stop, after


def _offset_at(segment: Segment, file: OpenFile, position: int, end: int) -> int:
    """Return the base offset of the batch at a position; `end` behind the last one."""
    if position == 0:
        return segment.first
    if position >= segment.size_bytes:
        return end
    return next(walk(file, position, segment.size_bytes)).base_offset


def _reader(
    key: tuple[bytes, int],
    ranges: list[_Range],
    cut: tuple[int, int] | None,
    failed: list[BaseException],
) -> Callable[[], list[Entry]]:
    def read() -> list[Entry]:
        if failed:  # a piece before it is not in the chain, and a start refuses a gap
            raise failed[0]
        entries = [Entry(Kind.DATA, *key, one.first, one.next, _whole(one)) for one in ranges]
        if cut is not None:
            entries.append(Entry(Kind.CUT, *key, *cut))
        return entries

    return read


def _whole(one: _Range) -> bytes:
    data = os.pread(one.file.fd, one.size_bytes, one.position)
    if len(data) != one.size_bytes:
        raise OSError(errno.EIO, "open segment is shorter than it was")
    return data
