"""How long slices go on with what arrives, and how that ends before its time.

Between two ticks nothing is copied, so a lease should be long; a stop, a flow that failed, or a
slot that has nothing left to do should not have to wait for its end. So every slot holds a
connection to the driver while it runs. Nothing is ever said on it: that it closes is the message.

    a slot closes its own      its task is over, for whatever reason: all leases end
    the driver closes them     it was asked to stop, or is gone: the lease ends

An executor that cannot reach the driver has short leases instead.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from logmirror.clock import Clock

SHORT_MS: Final = 1_000
"""A lease that nobody can end before its time."""

LONG_MS: Final = 10_000
"""Between two leases lie some 60 ms in which nothing is copied; so fewer than one record in a
hundred meets that."""

SLICE_MS: Final = 2_000
"""A slice that has more to copy ends after so long, or with its lease if that is later: a stop and
other flows wait for it. Between two of them Spark takes 30-100 ms, and as much CPU."""

LISTEN_MS: Final = 250
"""A slot looks at least this often whether its lease was ended."""

_CONNECT_S: Final = 1.0
_SLOTS_MAX: Final = 10_000
_unreachable: set[tuple[str, int]] = set()


class FollowWindow:
    """One slot's lease, from now on. Use as a context manager: leaving it ends all others.

    Args:
        duration_ms: It is over then.
        clock: Time.
        connection: To the driver, non-blocking. None: nobody ends the lease before its time.
    """

    def __init__(
        self, duration_ms: int, clock: Clock, connection: socket.socket | None = None
    ) -> None:
        self._clock, self._connection = clock, connection
        self._until_ms = clock.monotonic_ms() + duration_ms

    @property
    def left_ms(self) -> int:
        """How long it goes on; 0 when it is over."""
        left_ms = self._until_ms - self._clock.monotonic_ms()
        if left_ms > 0 and self._connection is not None and _is_closed(self._connection):
            self.end()
            return 0
        return max(left_ms, 0)

    def part(self, duration_ms: int) -> FollowWindow:
        """A lease within this one, which is left alone when the part ends."""
        return FollowWindow(min(self.left_ms, duration_ms), self._clock, self._connection)

    def end(self) -> None:
        """Let it be over now."""
        self._until_ms = self._clock.monotonic_ms()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()


def open_follow_window(
    stop_channel: tuple[str, int] | None, duration_ms: int, clock: Clock
) -> FollowWindow:
    """A slot's lease; short where the driver's desk cannot be reached.

    Args:
        stop_channel: Host and port of a `StopChannel`; None: there is none.
        duration_ms: How long it may be; 0: there is nothing to wait for, and nobody is asked.
        clock: Time.
    """
    if duration_ms <= 0 or stop_channel is None or stop_channel in _unreachable:
        return FollowWindow(min(duration_ms, SHORT_MS), clock)
    try:
        connection = socket.create_connection(stop_channel, timeout=_CONNECT_S)
    except OSError:
        _unreachable.add(
            stop_channel
        )  # asked once by each process: a firewall may swallow the question
        return FollowWindow(min(duration_ms, SHORT_MS), clock)
    connection.setblocking(False)
    return FollowWindow(duration_ms, clock, connection)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class StopChannel:
    """The driver's side: ends the leases of one tick together. Use as a context manager.

    Args:
        bind: The address to listen on; empty: all of this machine.
        host: How executors reach it.
    """

    def __init__(self, bind: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((bind, 0))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._tick, self._ended_tick = 0, 0
        self._is_over, self._closing = False, False
        self._slots: dict[socket.socket, int] = {}
        """Of the slots that hold a lease: the tick in which they came."""

        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="leases", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A new tick: leases that are opened from now on belong to it, older ones are over."""
        self._tick += 1
        self._wake()

    def end(self) -> None:
        """End all leases, those of later ticks too: a stop may come just before one begins.

        For signal handlers.
        """
        self._is_over = True
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all leases and stop listening."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        # It has enough reasons to wake up, or has seen that we close and is gone.
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wakened:
                    self._wakened.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    if self._slots.get(key.fileobj) == self._tick:
                        self._ended_tick = self._tick
                    self._dismiss(key.fileobj)
            for slot, tick in list(self._slots.items()):
                if self._is_over or tick <= self._ended_tick or tick < self._tick:
                    self._dismiss(slot)
        for opened in (*self._slots, self._listener, self._waker, self._wakened):
            opened.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again
            slot, _ = self._listener.accept()
            if len(self._slots) >= _SLOTS_MAX:
                slot.close()
                return
            self._slots[slot] = self._tick
            self._selector.register(slot, selectors.EVENT_READ)

    def _dismiss(self, slot: socket.socket) -> None:
        if self._slots.pop(slot, None) is not None:
            self._selector.unregister(slot)
            slot.close()
