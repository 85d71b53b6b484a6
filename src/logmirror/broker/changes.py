"""Runs changes of durable state one after the other, and bounds how long a request waits for them.

A log dir in a bucket may not be writable for long. A request that has waited for its deadline gets
an error that clients retry. A change that has begun by then runs to its end: it is made when the
bucket is back, like that of any request that timed out. One that has not begun is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror.broker.error_codes import ErrorCode
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")
_BEHIND_STUCK_S: Final = 1.0


class LateChangeError(UnavailableError):
    """A change was not durable by the deadline of its request. It may become so later."""


async def in_time(work: asyncio.Future[_Result], timeout_s: float | None) -> _Result:
    """Wait for work that runs to its end in any case; returns its result.

    Args:
        work: The work.
        timeout_s: The limit; None: there is none.

    Raises:
        LateChangeError: It has not ended within the limit.
    """
    work.add_done_callback(_ignore)
    done, _ = await asyncio.wait([work], timeout=timeout_s)
    if done:
        return work.result()
    raise LateChangeError(
        "the change is not durable yet",
        hint="it may become durable when the log directory can be written again",
    )


def _ignore(work: asyncio.Future[Any]) -> None:
    """Take an outcome for which a request does not wait any more."""
    if not work.cancelled():
        work.exception()


async def pooled(work: asyncio.Future[_Result], timeout_s: float | None) -> _Result:
    """As `in_time`, for work of a pool of threads; it is dropped if it has not begun."""
    try:
        return await in_time(work, timeout_s)
    except LateChangeError:
        work.cancel()
        raise


def code_of(error: LogmirrorError | OSError) -> ErrorCode:
    """Return the code for a change of a topic, a user, an ACL or a quota that failed."""
    is_late = isinstance(error, LateChangeError)
    return ErrorCode.REQUEST_TIMED_OUT if is_late else ErrorCode.KAFKA_STORAGE_ERROR


class Changes:
    """Changes that are stored first and applied then. Runs on the event loop.

    Each that has begun runs to its end even if its client disconnects, so that memory and database
    agree, and in the order in which they came, for the same reason.

    Args:
        timeout_s: How long a request waits; None: without a limit.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._begun: asyncio.Task[Any] | None = None
        self._is_stuck = False
        """The change that has begun was late. Those behind it do not wait for long, as a request
        may have many."""

    def left_s(self, began_s: float) -> float | None:
        """Return what is left of the limit of a request, by the loop's clock."""
        if self.timeout_s is None:
            return None
        return max(0, began_s + self.timeout_s - asyncio.get_running_loop().time())

    async def run(self, change: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a change after those before it; returns its result.

        Raises:
            LateChangeError: It is not durable in time.
        """
        task = asyncio.ensure_future(self._next(change))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await in_time(task, _BEHIND_STUCK_S if self._is_stuck else self.timeout_s)
        except LateChangeError:
            if task is self._begun:
                self._is_stuck = True
            else:
                task.cancel()
            raise

    async def _next(self, change: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.current_task()
        with contextlib.closing(change):  # also if it never begins
            async with self._turn:
                self._begun = task
                try:
                    return await change
                finally:
                    self._begun, self._is_stuck = None, False
