"""Flushes logs and removes deleted segments, in worker threads.

Group commit: batches appended during a partition's flush share the next one, so a busier partition
has more batches per flush. Partitions flush in parallel, up to the number of worker threads.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.sync_job import SyncJob

_LOG: Final = logging.getLogger(__name__)


class GroupCommit:
    """Runs the sync jobs of all partitions."""

    def __init__(self, executor: Executor, disk: Disk) -> None:
        self._executor = executor
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._scheduled: set[PartitionLog] = set()
        self._running: dict[PartitionLog, asyncio.Future[None]] = {}
        self._removing: dict[PartitionLog, asyncio.Future[None]] = {}
        self._advanced: set[PartitionLog] = set()

    def schedule(self, log: PartitionLog) -> None:
        """Flush what the log holds now.

        The flush begins after the requests of this turn of the event loop, so that they share it.
        """
        if log not in self._scheduled:
            self._scheduled.add(log)
            self._loop.call_soon(self._begin, log)

    def _begin(self, log: PartitionLog) -> None:
        self._scheduled.discard(log)
        job = log.begin_sync()
        if job is None:
            return
        running = self._loop.run_in_executor(self._executor, job.run)
        self._running[log] = running
        running.add_done_callback(lambda done: self._finish(log, job, done))

    def _finish(self, log: PartitionLog, job: SyncJob, done: asyncio.Future[None]) -> None:
        del self._running[log]
        error = done.exception()
        if error is not None:
            _LOG.error("%s: flush failed; the partition is offline", job.folder, exc_info=error)
        if error is not None and not isinstance(error, OSError):
            error = OSError(f"flush failed: {error!r}")
        log.finish_sync(job, error)
        if error is None:
            self._advanced.add(log)
        if job.seals:
            self.remove_deleted(log)
        self._begin(log)

    def take_advanced(self) -> list[PartitionLog]:
        """Return the logs whose durable end advanced since the last call."""
        taken, self._advanced = self._advanced, set()
        return list(taken)

    def put_back(self, logs: list[PartitionLog]) -> None:
        """Return logs that could not be recorded; the next `take_advanced` has them again."""
        self._advanced.update(logs)

    def remove_deleted(self, log: PartitionLog) -> None:
        """Start to remove the files of segments before the log start; `wait_removed` waits for it.

        Files that cannot be removed now are removed at the next start.
        """
        segments = log.take_deleted() if log not in self._removing else []
        if not segments:
            return
        removing = self._loop.run_in_executor(self._executor, _remove, self._disk, segments)
        self._removing[log] = removing
        removing.add_done_callback(lambda done: self._removed(log, done))

    def _removed(self, log: PartitionLog, done: asyncio.Future[None]) -> None:
        del self._removing[log]
        error = done.exception()
        if error is not None:
            _LOG.warning("%s: deleted segments could not be removed: %s", log.folder, error)
        self.remove_deleted(log)

    async def quiesce(self, log: PartitionLog) -> None:
        """Wait until no file of the log is being flushed or removed."""
        while (running := self._running.get(log)) is not None:
            await asyncio.wait([running])
        await self.wait_removed(log)

    async def wait_removed(self, log: PartitionLog) -> None:
        """Wait until no file of the log is being removed."""
        while (removing := self._removing.get(log)) is not None:
            await asyncio.wait([removing])

    async def drain(self) -> None:
        """Flush everything appended, and wait for running flushes and removals."""
        for log in tuple(self._scheduled):
            self._begin(log)
        while self._running or self._removing:
            await asyncio.wait((*self._running.values(), *self._removing.values()))


def _remove(disk: Disk, segments: list[Segment]) -> None:
    """Unlink files, oldest first. Blocks."""
    for segment in segments:
        disk.unlink(segment.path)
    disk.sync_folder(segments[0].path.parent)
