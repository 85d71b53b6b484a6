"""Probes a log directory after an error in it, and takes one that failed offline.

    error -> probe -> passed: only the operation failed
                   -> failed, or no end by the deadline: offline until the next start

Only errors cost something. One probe of a directory runs at a time, in a thread of its own, which a
disk that hangs may keep for good. The rules are in `log_dirs.failures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

from logmirror.broker.log_dirs.failures import (
    LogDirError,
    end_of_broker,
    end_without_database,
    failure_of,
    probe,
    suggests_failure,
)
from logmirror.broker.own_thread import in_own_thread
from logmirror.errors import FencedError, LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log_dirs.placement import LogDirs
    from logmirror.errors import UnavailableError

_LOG: Final = logging.getLogger(__name__)
DEADLINE_S: Final = 10
"""For a probe. In whole seconds that the event loop has seen, so that a suspended machine does not
make a probe late."""

PAUSE_S: Final = 2.0
"""Between two probes of a directory."""

STOP_S: Final = 20.0
"""How long a stop may wait for a directory that failed."""

STOP_LOOK_S: Final = 5.0
"""After this time of a stop the directories are probed: one may hang without an error."""


class StopLimit:
    """Ends the process if a stop waits for a disk that does not respond.

    Whatever was acknowledged is on a disk already, as after a crash.
    """

    def __init__(self) -> None:
        self._timer = threading.Timer(STOP_S, _end)
        self._timer.daemon = True

    def begin(self) -> None:
        """Begin to count, if that has not begun."""
        if self._timer.ident is None:
            self._timer.start()

    def cancel(self) -> None:
        """The stop is over."""
        self._timer.cancel()


def _end() -> None:
    _LOG.error("a log directory that failed holds up the stop: the broker ends without it")
    os._exit(LogDirError.exit_code)


class DirFailures:
    """The failures of the log directories on disks.

    Args:
        dirs: The log directories.
        disk: The system calls.
        vital: The directories without which the broker stops.
        when_offline: Called when a directory has failed.
        stop_limit: Begins with a stop while a directory is offline.

    Attributes:
        fatal: Completes when the broker must stop.
    """

    def __init__(
        self,
        dirs: LogDirs,
        disk: Disk,
        vital: Collection[Path],
        when_offline: Callable[[Path, LogDirError], None],
        stop_limit: StopLimit,
    ) -> None:
        self._dirs, self._disk, self._vital = dirs, disk, vital
        self._when_offline, self._stop_limit = when_offline, stop_limit
        self._loop = asyncio.get_running_loop()
        self._probing: dict[Path, asyncio.Task[None]] = {}
        self._causes: dict[Path, BaseException] = {}
        self._is_stopping = False
        self.fatal: asyncio.Future[UnavailableError] = self._loop.create_future()

    def begin_stop(self) -> None:
        """Bound the stop of the broker, if a directory is offline, or hangs."""
        self._is_stopping = True
        if self._dirs.offline:
            self._stop_limit.begin()
        late = OSError(errno.ETIMEDOUT, f"the stop takes longer than {STOP_LOOK_S:g} s")
        self._loop.call_later(STOP_LOOK_S, self._suspect, late, ())

    def suspect(self, error: BaseException, *paths: Path) -> None:
        """Probe the log directories of some paths after an error. Safe from any thread.

        Args:
            error: What failed.
            paths: Files or folders; none: the directory is not known, and all are probed.
        """
        if not suggests_failure(error):
            return
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._suspect, error, paths)

    def database_failed(self, error: BaseException, path: Path) -> None:
        """See `Database.when_failed`. The broker stops if the database is not written any more.

        An owner that was replaced stops by itself, and a stop may be without the bucket.
        """
        if not isinstance(error, LogmirrorError):
            self.suspect(error, path)
        elif not isinstance(error, FencedError):
            with contextlib.suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(self._database_ended, error, path)

    def _database_ended(self, error: LogmirrorError, path: Path) -> None:
        if not self._is_stopping:
            self._end_broker(end_without_database(path, error))

    def _end_broker(self, end: UnavailableError) -> None:
        if not self.fatal.done():
            _LOG.error("%s; %s", end, end.hint)
            self.fatal.set_result(end)

    def _suspect(self, error: BaseException, paths: tuple[Path, ...]) -> None:
        for log_dir in self._dirs.on_disk:
            is_meant = not paths or any(path.is_relative_to(log_dir) for path in paths)
            if is_meant and log_dir not in self._dirs.offline:
                self._causes.setdefault(log_dir, error)
                if log_dir not in self._probing:
                    self._probing[log_dir] = asyncio.ensure_future(self._probe(log_dir))

    async def _probe(self, log_dir: Path) -> None:
        try:
            while (cause := self._causes.pop(log_dir, None)) is not None:
                failed = await self._probed(log_dir)
                if failed is not None:
                    self._failed(log_dir, cause, failed)
                    return
                _LOG.info("%s: can be written after an error: %s", log_dir, cause)
                await asyncio.sleep(PAUSE_S)
        finally:
            del self._probing[log_dir]

    async def _probed(self, log_dir: Path) -> OSError | None:
        """Run a probe within its deadline; returns what failed."""
        outcome = in_own_thread(functools.partial(probe, self._disk, log_dir), "probe")
        for _ in range(DEADLINE_S):
            done, _ = await asyncio.wait([outcome], timeout=1)
            if done:
                return outcome.result()
        return OSError(errno.ETIMEDOUT, f"no response within {DEADLINE_S} s", str(log_dir))

    def _failed(self, log_dir: Path, cause: BaseException, probed: OSError) -> None:
        failure = failure_of(self._dirs.name_of(log_dir), cause, probed)
        self._dirs.offline[log_dir] = failure
        if self._is_stopping:
            self._stop_limit.begin()
        _LOG.error("%s; %s", failure, failure.hint)
        self._when_offline(log_dir, failure)
        end = end_of_broker(self._dirs, self._vital)
        if end is not None:
            self._end_broker(end)
