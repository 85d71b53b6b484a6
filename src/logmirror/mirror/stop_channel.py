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
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.mirror.follow import JobAddress, Reached, message_of, positions_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.mirror.ports import Job

_TOKEN_BYTES: Final = 16
_TOKEN_MS: Final = 10_000
"""Time in which a new connection must send its token."""

_SEND_S: Final = 1.0
"""How long the thread waits for a task to receive positions."""

_SLOTS_MAX: Final = 10_000
_NEW_MAX: Final = 256
"""Limit for connections without a token. The oldest is closed: other programs cannot keep out
tasks, which send their token at once."""

_PAUSE_MS: Final = 100
"""Pause after a failure to accept a connection, such as one without file descriptors."""


@dataclass(slots=True, eq=False)
class _Slots:
    """The tasks of one job."""

    job: Job
    count: int
    """How many tasks the job has."""

    connected: set[socket.socket] = field(default_factory=set)
    received: dict[socket.socket, bytearray] = field(default_factory=dict)
    """What a task has sent of its positions."""

    handed_over: list[dict[str, Reached]] = field(default_factory=list)
    """The positions of the tasks that have ended without an error."""

    has_failed: bool = False
    """A task has ended without handing over."""

    has_ended: bool = False
    """The job has ended, and what its tasks have sent is received."""

    @property
    def positions(self) -> dict[str, Reached] | None:
        """The positions of all tasks. None: not all have handed over."""
        if len(self.handed_over) < self.count:
            return None
        return {flow: at for part in self.handed_over for flow, at in part.items()}


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
        self._jobs: dict[bytes, _Slots] = {}
        self._of_job: weakref.WeakKeyDictionary[Job, _Slots] = weakref.WeakKeyDictionary()
        """Also of jobs that have ended, as long as a successor refers to them."""

        self._slots_of: dict[socket.socket, _Slots] = {}
        self._tokens: dict[socket.socket, tuple[bytes, int]] = {}
        """New connections: what each has sent of its token, and its deadline."""

        self._informed: set[socket.socket] = set()
        """The tasks that know the positions of their predecessors."""

        self._over: set[socket.socket] = set()
        """The tasks whose windows have ended."""

        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="stop-channel", daemon=True)
        self._thread.start()

    @property
    def slot_count(self) -> int:
        """The number of connected tasks."""
        return len(self._slots_of)

    @contextlib.contextmanager
    def job(self, job: Job, task_count: int = 1) -> Iterator[JobAddress]:
        """Context in which the tasks of a job run; its windows end with it.

        Args:
            job: The job.
            task_count: How many tasks it has.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._jobs[token] = slots = _Slots(job, task_count)
        self._of_job[job] = slots
        try:
            yield JobAddress(self._host, self._port, token, waits=job.after is not None)
        finally:
            job.is_over, job.after = True, None
            slots.has_ended = True
            del self._jobs[token]
            self._wake()

    def end(self, job: Job | None = None) -> None:
        """End the windows of a job. None: all windows, including those of later jobs.

        Safe from a signal handler.
        """
        if job is None:
            self._is_over = True
        else:
            job.is_over = True
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
        for opened in (*self._tokens, *self._slots_of):
            opened.close()
        for opened in (self._listener, self._wake_in, self._wake_out):
            opened.close()
        self._selector.close()

    def _close_over(self) -> None:
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        for new in [new for new, (_, until_ms) in self._tokens.items() if until_ms <= now_ms]:
            self._close_slot(new)
        for slot, slots in list(self._slots_of.items()):
            if slots.has_ended:
                self._receive(slot)  # what arrived since the last select
                self._close_slot(slot)
            elif self._is_over or slots.job.is_over:
                self._end_window(slot)
            elif slots.job.after is not None:
                self._pass_on(slot, slots.job)

    def _end_window(self, slot: socket.socket) -> None:
        """Close the driver's half of a connection: the task may still report its positions."""
        if slot not in self._over:
            self._over.add(slot)
            with contextlib.suppress(OSError):
                slot.shutdown(socket.SHUT_WR)

    def _pass_on(self, slot: socket.socket, job: Job) -> None:
        """Send the predecessor's positions to a task, or end its window if it failed."""
        before = self._of_job.get(job.after) if job.after else None
        positions = before.positions if before else None
        if before is None or before.has_failed or (before.has_ended and positions is None):
            self._end_window(slot)
            return
        if positions is not None and slot not in self._informed:
            self._informed.add(slot)
            slot.setblocking(True)
            slot.settimeout(_SEND_S)
            try:
                slot.sendall(message_of(positions))
            except OSError:
                self._close_slot(slot)
                return
            slot.setblocking(False)

    def _accept(self) -> None:
        try:
            slot, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has disconnected
        except OSError:
            SYSTEM_CLOCK.sleep_ms(_PAUSE_MS)
            return
        if len(self._slots_of) >= _SLOTS_MAX:
            slot.close()
            return
        if len(self._tokens) >= _NEW_MAX:
            self._close_slot(next(iter(self._tokens)))
        slot.setblocking(False)
        self._tokens[slot] = (b"", SYSTEM_CLOCK.monotonic_ms() + _TOKEN_MS)
        self._selector.register(slot, selectors.EVENT_READ)

    def _receive(self, slot: socket.socket) -> None:
        slots = self._slots_of.get(slot)
        try:
            received = slot.recv(1 << 16 if slots else _TOKEN_BYTES - len(self._tokens[slot][0]))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            if slots is not None:
                self._task_ended(slot, slots)
            self._close_slot(slot)
        elif slots is None:
            self._receive_token(slot, received)
        else:
            self._receive_from_task(slot, slots, received)

    def _receive_from_task(self, slot: socket.socket, slots: _Slots, received: bytes) -> None:
        slots.job.on_progress()
        message = slots.received.setdefault(slot, bytearray())
        message += received if message else received.lstrip(b".")
        try:
            positions = positions_in(message)
        except ValueError:
            self._close_slot(slot)
            return
        if positions is not None:
            slots.handed_over.append(positions)
            del slots.received[slot]
            slots.connected.discard(slot)

    @staticmethod
    def _task_ended(slot: socket.socket, slots: _Slots) -> None:
        slots.job.is_over = True
        if slot in slots.connected:
            slots.has_failed = True

    def _receive_token(self, slot: socket.socket, received: bytes) -> None:
        before, until_ms = self._tokens[slot]
        token = before + received
        self._tokens[slot] = (token, until_ms)
        if len(token) < _TOKEN_BYTES:
            return
        slots = self._jobs.get(token)
        if slots is None:
            self._close_slot(slot)
            return
        del self._tokens[slot]
        self._slots_of[slot] = slots
        slots.connected.add(slot)

    def _close_slot(self, slot: socket.socket) -> None:
        if slot not in self._tokens and slot not in self._slots_of:
            return  # closed already
        self._tokens.pop(slot, None)
        self._slots_of.pop(slot, None)
        self._informed.discard(slot)
        self._over.discard(slot)
        self._selector.unregister(slot)
        slot.close()
