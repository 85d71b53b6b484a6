"""Flushes logs and removes deleted segments, in worker threads.

Group commit: batches appended during a partition's flush share the next one, so a busier partition
has more batches per flush. Partitions flush in parallel, up to the number of threads of their log
directory.

A log that does not flush before each response (`flush_rule`) is flushed when its rule requires it,
when a request waits for it, at the limit of unflushed bytes, and at the end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.log.unflushed_limit import DEFAULT_UNFLUSHED_BYTES, UnflushedLimit
from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.sync_job import SyncJob
    from logmirror.errors import LogmirrorError

_LOG: Final = logging.getLogger(__name__)
_MAX_TIMER_S: Final = 3600.0
_LOOK_S: Final = 0.2


class Arrival(NamedTuple):
    """A log that came from another place; see `GroupCommit.arrive`."""

    confirm: Callable[[int], Awaitable[None]]
    ended: asyncio.Future[None]


class GroupCommit:
    """Runs the sync jobs of all partitions.

    Args:
        threads: Returns those that flush a log and remove its segments; see `FlushThreads`.
        disk: The system calls.
        max_unflushed_bytes: Limit for the bytes that are not flushed, of all partitions.
    """

    def __init__(
        self,
        threads: Callable[[PartitionLog], Executor],
        disk: Disk,
        *,
        max_unflushed_bytes: int = DEFAULT_UNFLUSHED_BYTES,
    ) -> None:
        self._threads = threads
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._scheduled: set[PartitionLog] = set()
        self._running: dict[PartitionLog, asyncio.Future[None]] = {}
        self._timers: dict[PartitionLog, asyncio.TimerHandle] = {}
        self.unflushed = UnflushedLimit(max_unflushed_bytes)
        self._arrivals: dict[PartitionLog, Arrival] = {}
        self._removing: dict[PartitionLog, asyncio.Future[None]] = {}
        self._beside: dict[PartitionLog, asyncio.Future[None]] = {}
        self._touched: set[PartitionLog] = set()
        self.flushes = 0
        """How many were begun of logs on disks."""
        self._flushing: set[asyncio.Future[None]] = set()
        """Those in progress; `_running` also has what waits for a bucket."""
        self.fenced: asyncio.Future[LogmirrorError] = self._loop.create_future()
        """Completes when another broker took the logs over; see `bucket.commits`."""

    def opened(self) -> None:
        """Note that all logs are open. Called once, before any append."""

    def schedule(self, log: PartitionLog) -> None:
        """Flush what the log holds, now or when its rule requires it.

        The flush begins after the requests of this turn of the event loop, so that they share it.
        """
        if log.flush_rule.on_ack:
            self._flush_soon(log)
            return
        limit = self._limit_of(log)
        limit.count(log)
        if limit.is_reached:
            for other in limit.logs:
                self._flush_soon(other)
        if log.is_flush_due(SYSTEM_CLOCK.monotonic_ms()):
            self._flush_soon(log)
        elif log not in self._timers:
            self._set_timer(log)

    def may_be_replaced(self, log: PartitionLog) -> bool:
        """Whether another broker may own the log without this one knowing it.

        What an owner that was replaced refuses may be right for the next one: an offset behind its
        log end, or a sequence number.
        """
        del self, log
        return False

    async def is_owner(self, timeout_s: float) -> bool:
        """Find out whether this broker still is the owner; False also if that is not known in time.

        Args:
            timeout_s: How long to wait for the bucket.
        """
        del self, timeout_s
        return True

    def must_wait(self, log: PartitionLog) -> bool:
        """Whether a producer to this log must wait for `room`."""
        return self._limit_of(log).is_reached and not log.flush_rule.on_ack

    def room(self, log: PartitionLog) -> asyncio.Future[None]:
        """Return a future that completes when its limit of unflushed bytes is not reached."""
        return self._limit_of(log).room(self._loop)

    def _limit_of(self, log: PartitionLog) -> UnflushedLimit:
        """Return the limit that a log counts for."""
        del log
        return self.unflushed

    def _set_timer(self, log: PartitionLog) -> None:
        """Flush the log when its oldest record requires it."""
        due_ms = log.flush_rule.due_ms(log.unflushed)
        if due_ms is not None and log.failure is None:
            wait_s = min(_MAX_TIMER_S, (due_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000)
            self._timers[log] = self._loop.call_later(wait_s, self._timed, log)

    def _timed(self, log: PartitionLog) -> None:
        self._timers.pop(log, None)
        self.schedule(log)

    def rule_changed(self, log: PartitionLog) -> None:
        """Apply a new flush rule to what is unflushed."""
        timer = self._timers.pop(log, None)
        if timer is not None:
            timer.cancel()
        self._limit_of(log).count(log)
        self.schedule(log)

    def _flush_soon(self, log: PartitionLog) -> None:
        if log not in self._scheduled:
            self._scheduled.add(log)
            self._loop.call_soon(self._begin, log)

    def _begin(self, log: PartitionLog) -> None:
        self._scheduled.discard(log)
        job = log.begin_sync(is_due=log in self._arrivals)
        if job is not None:
            self.flushes += 1
            work = self._loop.run_in_executor(self._threads(log), job.run)
            self._flushing.add(work)
            work.add_done_callback(self._flushing.discard)
            self._follow(log, job, work)

    @property
    def is_flushing(self) -> bool:
        """Whether one of `flushes` is in progress."""
        return bool(self._flushing)

    async def pause(self, timeout_s: float) -> None:
        """Wait until those of `flushes` that are in progress have ended, or the time is over."""
        if self._flushing:
            await asyncio.wait(tuple(self._flushing), timeout=timeout_s)

    def _follow(self, log: PartitionLog, job: SyncJob, work: asyncio.Future[None]) -> None:
        """Finish a job when its work, and what `arrive` has asked for, has ended."""
        arrival = self._arrivals.get(log)
        if arrival is not None:
            work = asyncio.ensure_future(self._confirmed(log, job, work, arrival))
        self._running[log] = work
        work.add_done_callback(lambda done: self._finish(log, job, done))

    def arrive(self, log: PartitionLog, confirm: Callable[[int], Awaitable[None]]) -> None:
        """Take over a log whose records are durable elsewhere.

        Nothing more of it is reported as durable until `confirm` has ended. That is called with
        the end of what is durable here: at least everything that is durable elsewhere.
        """
        self._arrivals[log] = Arrival(confirm, self._loop.create_future())
        self._begin(log)

    def is_arriving(self, log: PartitionLog) -> bool:
        """Whether `confirm` has not ended yet."""
        return log in self._arrivals

    async def arrived(self, log: PartitionLog) -> None:
        """Wait until it has, or has failed."""
        arrival = self._arrivals.get(log)
        while arrival is not None and not arrival.ended.done():
            if log.failure is not None and log not in self._running:
                return
            await asyncio.wait([arrival.ended], timeout=_LOOK_S)

    async def _confirmed(
        self,
        log: PartitionLog,
        job: SyncJob,
        work: asyncio.Future[None],
        arrival: Arrival,
    ) -> None:
        try:
            await work
            await arrival.confirm(job.end_offset)
        finally:
            del self._arrivals[log]
            arrival.ended.set_result(None)

    def _finish(self, log: PartitionLog, job: SyncJob, done: asyncio.Future[None]) -> None:
        del self._running[log]
        error = done.exception()
        if error is not None and log.failure is None:
            _LOG.error("%s: flush failed; the partition is offline", job.folder, exc_info=error)
        if error is not None and not isinstance(error, OSError):
            error = OSError(f"flush failed: {error!r}")
        log.finish_sync(job, error)
        if error is None:
            self.touch(log)
        if job.seals:
            self.remove_deleted(log)
        self._limit_of(log).count(log)
        if log.flush_rule.on_ack:
            self._begin(log)
            return
        end, watermark = log.durable, log.high_watermark
        _LOG.debug("%s: durable up to offset %d of %d", log.folder, end, watermark)
        self.schedule(log)

    def touch(self, log: PartitionLog) -> None:
        """Note that a log or its settings changed, for `Housekeeping`."""
        self._touched.add(log)

    def take_touched(self) -> set[PartitionLog]:
        """Return the logs that changed since the last call."""
        taken, self._touched = self._touched, set()
        return taken

    def stored_end(self, log: PartitionLog) -> int:
        """Return where the segments end that are stored for good: sealed, under their own names."""
        for segment in reversed(log.segments):  # a few at the end may not be sealed yet
            if segment.is_sealed:
                return segment.next_offset
        return 0

    def remove_deleted(self, log: PartitionLog) -> None:
        """Start to remove the files of segments before the log start; `wait_removed` waits for it.

        Files that cannot be removed now are removed at the next start.
        """
        segments = log.take_deleted() if log not in self._removing else []
        if not segments:
            return
        removing = self._loop.run_in_executor(self._threads(log), self._removal(log), segments)
        self._removing[log] = removing
        removing.add_done_callback(lambda done: self._removed(log, done))

    def _removal(self, log: PartitionLog) -> Callable[[list[Segment]], None]:
        """Return the function that removes the files of a log; it blocks."""
        del log
        return functools.partial(_remove, self._disk)

    def _removed(self, log: PartitionLog, done: asyncio.Future[None]) -> None:
        del self._removing[log]
        error = done.exception()
        if error is not None:
            _LOG.warning("%s: deleted segments could not be removed: %s", log.folder, error)
            if isinstance(error, OSError):
                log.disk_failed(error)
        self.remove_deleted(log)

    def take_offline(self, log: PartitionLog, failure: LogmirrorError) -> None:
        """Take a log offline whose directory failed. A flush in progress has no effect any more."""
        log.take_offline(failure)
        timer = self._timers.pop(log, None)
        if timer is not None:
            timer.cancel()
        self._limit_of(log).count(log)

    async def flushed(self, log: PartitionLog, offset: int) -> None:
        """Wait until everything before `offset` is durable.

        Raises:
            LogmirrorError: The partition is offline.
        """
        outcome: asyncio.Future[LogmirrorError | None] = self._loop.create_future()

        def done(failure: LogmirrorError | None) -> None:
            if not outcome.cancelled():
                outcome.set_result(failure)

        log.when_durable(offset, done)
        self.schedule(log)
        failure = await outcome
        if failure is not None:
            raise failure

    def is_busy(self, log: PartitionLog) -> bool:
        """Whether files of the log are being compacted or removed."""
        return log in self._beside or log in self._removing

    def hold(self, log: PartitionLog, work: asyncio.Future[None]) -> None:
        """Let `quiesce` wait for other work on the files of a log as well."""
        self._beside[log] = work
        work.add_done_callback(lambda _: self._beside.pop(log, None))

    async def quiesce(self, log: PartitionLog, is_away: Callable[[PartitionLog], bool]) -> None:
        """Wait until no file of the log is being flushed, compacted or removed.

        Args:
            log: The log, which has a failure.
            is_away: Whether its directory has failed. There a system call may never end, so nothing
                is waited for but what `arrive` has asked for.
        """
        self._limit_of(log).count(log)
        for works in (self._running, self._beside, self._removing):
            while (work := works.get(log)) is not None:
                if is_away(log) and log not in self._arrivals:
                    break
                await asyncio.wait([work], timeout=_LOOK_S)

    async def wait_removed(self, log: PartitionLog) -> None:
        """Wait until no file of the log is being removed."""
        while (removing := self._removing.get(log)) is not None:
            await asyncio.wait([removing])

    def check_drained(self) -> None:
        """Check after `drain` that everything appended is durable, where it may not be."""

    async def drain(self) -> None:
        """Flush everything appended, and wait for running flushes and removals."""
        for log in {*self._scheduled, *self._timers, *self.unflushed.logs}:
            self._begin(log)
        while self._running or self._removing:
            await asyncio.wait((*self._running.values(), *self._removing.values()))
            for log in self.unflushed.logs:
                self._begin(log)


def _remove(disk: Disk, segments: list[Segment]) -> None:
    """Unlink files, oldest first. Blocks."""
    for segment in segments:
        disk.unlink(segment.path)
    disk.sync_folder(segments[0].path.parent)
