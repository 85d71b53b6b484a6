"""The thread that uploads, removes and deletes the objects of a log dir.

    submitted, by partition ... -> [one at a time, in order within a partition] -> done

Nothing depends on when that is: a segment's commits stay until its object exists. So what fails is
tried again, less and less often, and what is behind it of the same partition waits: only then are
the objects of a partition one chain. Other partitions do not wait for it. What cannot be done at
all fails what is behind it too, until the next start; unless it was submitted to fail alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.clock import SYSTEM_CLOCK, jittered_ms
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_LOG: Final = logging.getLogger(__name__)
_FIRST_PAUSE_MS: Final = 1_000.0
_LONGEST_PAUSE_MS: Final = 30_000.0


class _Work(NamedTuple):
    """Something to be done."""

    call: Callable[[], Any]
    done: Future[Any]
    fails_alone: bool


@dataclass(slots=True)
class _Queue:
    """What is to be done for a partition."""

    works: deque[_Work] = field(default_factory=deque)
    due_ms: float = 0
    pause_ms: float = _FIRST_PAUSE_MS


class Uploads:
    """The thread. Its methods are safe from any other."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, _Queue] = {}
        self._failures: dict[Hashable, Exception] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="logmirror-upload", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: Hashable,
        work: Callable[[], Any],
        *,
        covers_earlier: bool = False,
        fails_alone: bool = False,
    ) -> Future[Any]:
        """Do something after what was submitted before under the same key.

        Args:
            key: The partition, or what else it belongs to.
            work: May be called several times, until it succeeds.
            covers_earlier: It does what earlier ones under this key had to do.
            fails_alone: What is behind it does not need it, and is done also if it cannot be done.

        Returns:
            A future of what it returns, however often it is tried; or of
            `UnavailableError`, if the broker stops before.
        """
        done: Future[Any] = Future()
        with self._changed:
            failure = _stopping() if self._is_closing else self._failures.get(key)
            if failure is not None:
                done.set_exception(failure)
                return done
            works = self._queues.setdefault(key, _Queue()).works
            if covers_earlier and len(works) > 1:
                _end(works.pop().done, None)
            works.append(_Work(work, done, fails_alone))
            self._changed.notify()
        return done

    def drop(self, matches: Callable[[Hashable], bool]) -> None:
        """Forget what was submitted under some keys; it counts as done."""
        with self._changed:
            dropped = [self._queues.pop(key) for key in tuple(self._queues) if matches(key)]
        for queue in dropped:
            for work in queue.works:
                _end(work.done, None)

    def close(self, timeout_s: float) -> None:
        """End the thread; waits for the request in progress, up to a limit."""
        with self._changed:
            self._is_closing = True
            queues, self._queues = self._queues, {}
            self._changed.notify()
        for queue in queues.values():
            for work in queue.works:
                _end(work.done, _stopping())
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, queue, work = found
            try:
                result = work.call()
            except Exception as error:  # noqa: BLE001  # also of the local disk
                self._failed(key, queue, work, error)
            else:
                self._finished(key, queue)
                _end(work.done, None, result)

    def _next(self) -> tuple[Hashable, _Queue, _Work] | None:
        """Wait for something that is due; None: the broker stops."""
        with self._changed:
            while not self._is_closing:
                now_ms = SYSTEM_CLOCK.monotonic_ms()
                key = min(self._queues, key=lambda one: self._queues[one].due_ms, default=None)
                if key not in self._queues:
                    self._changed.wait()
                elif self._queues[key].due_ms > now_ms:
                    self._changed.wait((self._queues[key].due_ms - now_ms) / 1000)
                else:
                    queue = self._queues.pop(key)
                    self._queues[key] = queue  # behind the others that are due
                    return key, queue, queue.works[0]
        return None

    def _finished(self, key: Hashable, queue: _Queue) -> None:
        with self._changed:
            if self._queues.get(key) is not queue:
                return  # dropped meanwhile
            queue.works.popleft()
            queue.due_ms, queue.pause_ms = 0, _FIRST_PAUSE_MS
            if not queue.works:
                del self._queues[key]

    def _failed(self, key: Hashable, queue: _Queue, work: _Work, error: Exception) -> None:
        if self._queues.get(key) is not queue:
            return  # dropped meanwhile, as its files may be
        if isinstance(error, CorruptionError) or not isinstance(error, LogmirrorError):
            if work.fails_alone:
                _LOG.warning("the bucket could not be changed: %s", error)
                self._finished(key, queue)
                _end(work.done, error)
            else:
                self._give_up(key, queue, error)
            return
        with self._changed:
            if queue.pause_ms == _FIRST_PAUSE_MS:
                _LOG.warning("the bucket cannot be changed; it is tried again: %s", error)
            queue.due_ms = SYSTEM_CLOCK.monotonic_ms() + jittered_ms(queue.pause_ms)
            queue.pause_ms = min(2 * queue.pause_ms, _LONGEST_PAUSE_MS)

    def _give_up(self, key: Hashable, queue: _Queue, error: Exception) -> None:
        _LOG.error(
            "the bucket could not be changed; what is behind it waits for the next start",
            exc_info=error,
        )
        with self._changed:
            if self._queues.get(key) is queue:
                del self._queues[key]
                self._failures[key] = error
        for work in queue.works:
            _end(work.done, error)


def _end(done: Future[Any], error: Exception | None, result: object = None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _stopping() -> UnavailableError:
    return UnavailableError("the broker is stopping")
