"""The request to end a run: by a signal, or by the caller's event.

Signals are held back while the program loads, which takes a second on a busy machine. From then on
the first one makes the request, and the second one ends the process. Work that takes seconds before
replication begins runs in a thread, so that the request does not wait for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a run. An orchestrator sends the first, Ctrl-C the second."""

_POLL_S: Final = 0.05
"""How often a thread that waits checks whether a stop was requested."""

_ABORT_S: Final = 30.0
"""Limit for work to end after it was aborted. A session in a JVM of `spark-submit` has to begin
before it can end."""

_T = TypeVar("_T")


class StoppedError(Exception):
    """A stop was requested before the work was done. Not a failure: the run ends in order."""


class LateError(Exception):
    """The work has not ended within its limit."""


class StopRequest:
    """Whether a run must end. Safe from any thread.

    Args:
        event: The caller's event; setting it makes the request. None: there is none.
    """

    def __init__(self, event: threading.Event | None = None) -> None:
        self._event = event
        self._is_made = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._is_made or (self._event is not None and self._event.is_set())

    def request(self) -> None:
        """Make the request. Safe from a signal handler."""
        self._is_made = True
        for callback in tuple(self._callbacks):
            callback()

    @contextlib.contextmanager
    def on_stop(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within the block, call a function when a stop is requested; now if it already was.

        Args:
            callback: Safe from a signal handler, and if it is called twice.
        """
        is_over = threading.Event()
        watcher = None
        if self._event is not None:
            arguments = (self._event, is_over, callback)
            watcher = threading.Thread(target=_watch, args=arguments, name="stop", daemon=True)
            watcher.start()
        self._callbacks.append(callback)
        try:
            if self.requested:
                callback()
            yield
        finally:
            self._callbacks.remove(callback)
            is_over.set()
            if watcher is not None:
                watcher.join()

    def unless_stopped(
        self,
        work: Callable[[], _T],
        abort: Callable[[], None] | None = None,
        *,
        within_s: float = math.inf,
    ) -> _T:
        """Do work in a thread, and return what it returns or raise what it raises.

        Args:
            work: The work. Without `abort` it may continue in its thread after a stop, until it
                ends or the process does.
            abort: Makes the work end, within 30 seconds. Called if a stop is requested, and if the
                calling thread is interrupted.
            within_s: Limit for the work, in seconds.

        Raises:
            StoppedError: A stop was requested before the work was done.
            LateError: The work has not ended within its limit.
        """
        if self.requested:
            raise StoppedError
        future: Future[_T] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # the calling thread raises it
                future.set_exception(error)

        is_done = False
        polls = 0
        try:
            threading.Thread(target=do, name="start", daemon=True).start()
            while not is_done and not self.requested:
                is_done = bool(wait([future], timeout=_POLL_S).done)
                polls += 1
                if not is_done and polls * _POLL_S >= within_s:
                    raise LateError
        finally:
            if not is_done and abort is not None:
                abort()
                wait([future], timeout=_ABORT_S)
        if not is_done:
            raise StoppedError
        return future.result()


def _watch(event: threading.Event, is_over: threading.Event, callback: Callable[[], None]) -> None:
    while not is_over.is_set():
        if event.wait(_POLL_S):
            callback()
            return


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Within the block, keep `STOP_SIGNALS` pending until `handle_signals` accepts them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handle_signals(request: StopRequest) -> Iterator[None]:
    """Within the block, the first of `STOP_SIGNALS` makes the request.

    The second one ends the process at once, with 128 plus its number. Nothing is lost by that: no
    acknowledged state is in memory. Only in the main thread.
    """
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        request.request()

    before = [signal.signal(number, handle) for number in STOP_SIGNALS]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


# -- commands that have nothing to flush -----------------------------------------------------------

INTERRUPT_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupt:
    """The state of `interrupts` in the main thread."""

    def __init__(self) -> None:
        self.held = 0
        self.is_pending = False


_interrupt = _Interrupt()


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt within the block at the first of `INTERRUPT_SIGNALS`.

    Later ones are ignored, so that what the block cleans up is not left half done. Only in the main
    thread.
    """
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if not received:
            received.append(number)
            if not _interrupt.held:
                raise KeyboardInterrupt
            _interrupt.is_pending = True

    before = [signal.signal(number, handle) for number in INTERRUPT_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(INTERRUPT_SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold the KeyboardInterrupt of `interrupts` back until the block ends.

    A process that is started within it is known to who ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupt.held += 1
    try:
        yield
    finally:
        _interrupt.held -= 1
        if not _interrupt.held and _interrupt.is_pending:
            _interrupt.is_pending = False
            raise KeyboardInterrupt
