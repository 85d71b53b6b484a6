"""Flushes logs off the event loop, one flush for everybody who waits.

While a partition's flush runs, everything that is appended waits for the next one; so the busier a
partition is, the more batches share a flush. Partitions flush side by side, as many as there are
worker threads.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from logmirror.broker.partition_log import PartitionLog, SyncJob

_LOG: Final = logging.getLogger(__name__)


class GroupCommit:
    """Runs the sync jobs of all partitions."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._scheduled: set[PartitionLog] = set()
        self._running: dict[PartitionLog, asyncio.Future[None]] = {}

    def schedule(self, log: PartitionLog) -> None:
        """See to it that what the log has now becomes durable.

        The flush begins after the requests that are in hand already, so that they share it.
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
            _LOG.error("%s: flush failed, the partition is offline", job.folder, exc_info=error)
        if error is not None and not isinstance(error, OSError):
            error = OSError(f"flush failed: {error!r}")
        log.finish_sync(job, error)
        self._begin(log)

    async def settle(self, log: PartitionLog) -> None:
        """Wait until a log is not being flushed."""
        while (running := self._running.get(log)) is not None:
            await asyncio.wait([running])

    async def drain(self) -> None:
        """Flush what was appended, and wait for it."""
        for log in tuple(self._scheduled):
            self._begin(log)
        while self._running:
            await asyncio.wait(tuple(self._running.values()))
