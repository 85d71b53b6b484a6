"""Follow windows: how long slices keep polling for new records, and how windows end early.

Between two ticks nothing is copied, so a follow window should be long. A shutdown, a failed flow or
an idle slot must not wait for its end. Each slot therefore holds a connection to the driver while
it runs. No data is sent on it; closing it is the signal:

    a slot closes its connection     its task is over: the windows of all slots end
    the driver closes connections    it shuts down, or has ended: the windows end

An executor that cannot reach the driver uses short windows.
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
"""Length of a window that cannot be ended early."""

LONG_MS: Final = 10_000
"""Longest window. Between two windows nothing is copied for about 60 ms, so fewer than 1 % of all
records are delayed by that."""

SLICE_MS: Final = 2_000
"""A slice with a backlog ends after this time, or with its window if that is later: a shutdown and
other flows wait for it. Between two slices Spark takes 30-100 ms, and as much CPU time."""

LISTEN_MS: Final = 250
"""Longest interval at which a slot checks whether its window was ended."""

_CONNECT_S: Final = 1.0
_SLOTS_MAX: Final = 10_000
_unreachable: set[tuple[str, int]] = set()


class FollowWindow:
    """One slot's follow window. Use as a context manager: leaving it ends those of other slots.

    Args:
        duration_ms: Length of the window, from now on.
        clock: Time.
        connection: Non-blocking connection to the driver. None: the window cannot be ended early.
    """

    def __init__(
        self, duration_ms: int, clock: Clock, connection: socket.socket | None = None
    ) -> None:
        self._clock, self._connection = clock, connection
        self._until_ms = clock.monotonic_ms() + duration_ms

    @property
    def left_ms(self) -> int:
        """Remaining time in milliseconds. 0: the window is over."""
        left_ms = self._until_ms - self._clock.monotonic_ms()
        if left_ms > 0 and self._connection is not None and _is_closed(self._connection):
            self.end()
            return 0
        return max(left_ms, 0)

    def part(self, duration_ms: int) -> FollowWindow:
        """Return a shorter window within this one. The end of the part does not end this one."""
        return FollowWindow(min(self.left_ms, duration_ms), self._clock, self._connection)

    def end(self) -> None:
        """End the window now."""
        self._until_ms = self._clock.monotonic_ms()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()


def open_follow_window(
    stop_channel: tuple[str, int] | None, duration_ms: int, clock: Clock
) -> FollowWindow:
    """Open a slot's follow window. It is short if the driver cannot be reached.

    Args:
        stop_channel: Host and port of the driver's `StopChannel`. None: there is none.
        duration_ms: Length of the window. 0: no slice follows, and no connection is made.
        clock: Time.
    """
    if duration_ms <= 0 or stop_channel is None or stop_channel in _unreachable:
        return FollowWindow(min(duration_ms, SHORT_MS), clock)
    try:
        connection = socket.create_connection(stop_channel, timeout=_CONNECT_S)
    except OSError:
        # Tried once per process: a firewall may drop the packets, which costs the whole timeout.
        _unreachable.add(stop_channel)
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
    """The driver's side: ends the follow windows of one tick together. Use as a context manager.

    Args:
        bind: The address to listen on. Empty: all addresses of this machine.
        host: The host name or address under which executors reach it.
    """

    def __init__(self, bind: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((bind, 0))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._tick, self._ended_tick = 0, 0
        self._is_over, self._closing = False, False
        self._slots: dict[socket.socket, int] = {}
        """The open connections of slots, and the tick in which each was accepted."""

        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="follow-windows", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start a tick: windows opened from now on belong to it, older ones end."""
        self._tick += 1
        self._wake()

    def end(self) -> None:
        """End all windows, including those of later ticks: a shutdown may precede a tick.

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
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    if self._slots.get(key.fileobj) == self._tick:
                        self._ended_tick = self._tick
                    self._close_slot(key.fileobj)
            for slot, tick in list(self._slots.items()):
                if self._is_over or tick <= self._ended_tick or tick < self._tick:
                    self._close_slot(slot)
        for opened in (*self._slots, self._listener, self._wake_in, self._wake_out):
            opened.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            slot, _ = self._listener.accept()
            if len(self._slots) >= _SLOTS_MAX:
                slot.close()
                return
            self._slots[slot] = self._tick
            self._selector.register(slot, selectors.EVENT_READ)

    def _close_slot(self, slot: socket.socket) -> None:
        if self._slots.pop(slot, None) is not None:
            self._selector.unregister(slot)
            slot.close()
