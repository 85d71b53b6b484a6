"""What runs in threads of a broker on a bucket, run by its owner's thread, one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any
from unittest import mock

from logmirror.broker.bucket import files, logs, opening, recovery, tiling
from logmirror.broker.bucket.bundles import Bundler
from logmirror.broker.bucket.database_shipping import Snapshots
from logmirror.broker.bucket.journal import Journal
from logmirror.broker.bucket.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Inline(Executor):
    """Runs calls at once, in the thread of the caller."""

    def __init__(self, *_: object) -> None:
        """Take what `ThreadPoolExecutor` takes."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """See `Executor.submit`."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **more))
        except BaseException as error:  # noqa: BLE001  # as executors do
            done.set_exception(error)
        return done

    def map(self, fn: Callable[..., Any], *several: Any, **_: Any) -> Iterator[Any]:  # type: ignore[override]  # its limits of time are not used
        """See `Executor.map`."""
        return iter([fn(*one) for one in zip(*several, strict=True)])

    def shutdown(self, *_: Any, **__: Any) -> None:
        """See `Executor.shutdown`."""


class _Journal(Journal):
    """Writes when it is drained, or when its result is needed."""

    def start(self) -> None:
        self.pause = lambda _: None

    def begin_shipping(self, name: str, payload: bytes, *, is_snapshot: bool = False) -> Any:
        outcome = super().begin_shipping(name, payload, is_snapshot=is_snapshot)
        self.drain()
        return outcome

    def drain(self) -> bool:
        """Write what was submitted; returns whether there was something."""
        is_busy = bool(self._waiting)
        while self._waiting:
            self.commit()
        return is_busy


class DueUploads(Uploads):
    """Has no thread, and no pauses: what was submitted is due."""

    def _run(self) -> None:
        """End the thread at once."""

    def _next(self) -> Any:
        with self._changed:
            for queue in self._queues.values():
                queue.due_ms = 0
            if not self._queues:
                return None
        return super()._next()

    def work(self) -> None:
        """Do what was submitted, however often it fails."""
        super()._run()


class _Uploads(DueUploads):
    """Works when it is drained, or when its result is needed."""

    def submit(self, *args: Any, **more: Any) -> Future[Any]:
        done = super().submit(*args, **more)

        def result(timeout: float | None = None) -> Any:
            del timeout
            if not done.done():
                self.drain()
            return Future.result(done, 0)

        done.result = result  # type: ignore[method-assign]  # no thread does the work
        return done

    def drain(self) -> bool:
        """Do what was submitted; returns whether there was something."""
        is_busy = bool(self._queues)
        self.work()
        return is_busy


class _Snapshots(Snapshots):
    """Makes snapshots when it is drained."""

    def __init__(self, when_made: Callable[[], object]) -> None:
        super().__init__(when_made)
        self._due: list[str] = []

    def due(self, name: str) -> None:
        if name in self._makers and name not in self._due:
            self._due.append(name)

    def drain(self) -> bool:
        """Make those that are due; returns whether there were some."""
        due, self._due = self._due, []
        for name in due:
            self._make(name)
        return bool(due)


class _NoHeart:
    """No signs of life: they decide nothing."""

    def __init__(self, *_: object) -> None:
        """Take what `Heart` takes."""

    def start(self) -> None:
        """Do nothing."""

    stop = start


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log nothing: thousands of faults do."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let brokers run in one thread each, and bundle, index and merge little.

    Nothing is flushed: nothing on the machine of an owner is used by the next one.
    """
    with (
        silent(),
        mock.patch.multiple(
            logs,
            Journal=_Journal,
            Uploads=_Uploads,
            Snapshots=_Snapshots,
            Heart=_NoHeart,
            Bundler=lambda: Bundler(least=2, most=3),
            INDEXED_BYTES=1,
        ),
        mock.patch.object(recovery, "ThreadPoolExecutor", Inline),
        mock.patch.object(opening, "ThreadPoolExecutor", Inline),
        mock.patch.object(files, "INDEXED_BYTES", 1),
        mock.patch.object(tiling, "MIN_OBJECTS", 2),
        mock.patch.multiple(os, fsync=lambda _: None, fdatasync=lambda _: None),
    ):
        yield
