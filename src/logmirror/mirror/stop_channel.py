"""Driver: the port to which running tasks connect; see `follow` for its signals.

Connections belong to jobs. The windows of one job end together; other jobs are not affected. A
connection that does not send the token of a running job is closed.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.mirror.follow import JobAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOKEN_BYTES: Final = 16
_TOKEN_MS: Final = 10_000
"""Time in which a new connection must send its token."""

_SLOTS_MAX: Final = 10_000
_PAUSE_MS: Final = 100
"""Pause after a failure to accept a connection, such as one without file descriptors."""


@dataclass(slots=True, eq=False)
class _Job:
    on_progress: Callable[[], None]
    is_over: bool = False


class StopChannel:
    """Ends follow windows, and receives the progress of tasks. Use as a context manager.

    Args:
        bind: The address to listen on. Empty: all addresses of this machine.
        host: The host name or address under which executors reach it.
    """

    def __init__(self, bind: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((bind, 0))
        self._listener.setblocking(False)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._is_over, self._closing = False, False
        self._jobs: dict[bytes, _Job] = {}
        self._job_of: dict[socket.socket, _Job] = {}
        self._tokens: dict[socket.socket, tuple[bytes, int]] = {}
        """New connections: what each has sent of its token, and its deadline."""

        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="stop-channel", daemon=True)
        self._thread.start()

    @property
    def slot_count(self) -> int:
        """The number of connected tasks."""
        return len(self._job_of)

    @contextlib.contextmanager
    def job(self, on_progress: Callable[[], None] = lambda: None) -> Iterator[JobAddress]:
        """Context in which the tasks of a job run; its windows end with it.

        Args:
            on_progress: Called in another thread when a task reports progress. Must not block.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._jobs[token] = job = _Job(on_progress)
        try:
            yield JobAddress(self._host, self._port, token)
        finally:
            job.is_over = True
            del self._jobs[token]
            self._wake()

    def end(self) -> None:
        """End all windows, including those of later jobs: a shutdown may precede a job.

        Safe from a signal handler.
        """
        self._is_over = True
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all windows and stop listening."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        # A full socket already wakes the thread; a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!")

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_TOKEN_MS / 1000 if self._tokens else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            self._close_over()
        for opened in (*self._tokens, *self._job_of):
            opened.close()
        for opened in (self._listener, self._wake_in, self._wake_out):
            opened.close()
        self._selector.close()

    def _close_over(self) -> None:
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        for new in [new for new, (_, until_ms) in self._tokens.items() if until_ms <= now_ms]:
            self._close_slot(new)
        for slot in [s for s, job in self._job_of.items() if self._is_over or job.is_over]:
            self._close_slot(slot)

    def _accept(self) -> None:
        try:
            slot, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has disconnected
        except OSError:
            SYSTEM_CLOCK.sleep_ms(_PAUSE_MS)
            return
        if len(self._tokens) + len(self._job_of) >= _SLOTS_MAX:
            slot.close()
            return
        slot.setblocking(False)
        self._tokens[slot] = (b"", SYSTEM_CLOCK.monotonic_ms() + _TOKEN_MS)
        self._selector.register(slot, selectors.EVENT_READ)

    def _receive(self, slot: socket.socket) -> None:
        job = self._job_of.get(slot)
        try:
            received = slot.recv(4096 if job else _TOKEN_BYTES - len(self._tokens[slot][0]))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            if job is not None:
                job.is_over = True
            self._close_slot(slot)
        elif job is not None:
            job.on_progress()
        else:
            self._receive_token(slot, received)

    def _receive_token(self, slot: socket.socket, received: bytes) -> None:
        before, until_ms = self._tokens[slot]
        token = before + received
        self._tokens[slot] = (token, until_ms)
        if len(token) < _TOKEN_BYTES:
            return
        job = self._jobs.get(token)
        if job is None:
            self._close_slot(slot)
            return
        del self._tokens[slot]
        self._job_of[slot] = job

    def _close_slot(self, slot: socket.socket) -> None:
        self._tokens.pop(slot, None)
        self._job_of.pop(slot, None)
        self._selector.unregister(slot)
        slot.close()
