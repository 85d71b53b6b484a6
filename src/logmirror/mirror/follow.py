"""Executor: how a slot and the driver signal each other while slices run.

Each task holds one connection to the driver (`stop_channel`). The task sends a byte when data has
moved, at most once per second, so that the driver can distinguish a slow slice from a stalled one.
The driver never sends data. Closing the connection is the signal that follow windows end:

    a slot closes its connection     its task is over: the windows of the same job end
    the driver closes connections    it shuts down, or has ended: the windows end

An executor that cannot reach the driver uses short windows and reports no progress.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror import progress

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

BEAT_MS: Final = 1_000
"""Shortest time between two reports of progress."""

_CONNECT_S: Final = 1.0
_unreachable: set[tuple[str, int]] = set()


class JobAddress(NamedTuple):
    """Where the slots of one job connect to."""

    host: str
    port: int
    token: bytes
    """Identifies the job. The driver closes connections that do not send a current one."""


class FollowWindow:
    """One slot's follow window.

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


class SlotLink:
    """A task's connection to the driver. Use as a context manager, which reports progress.

    Args:
        address: The job's address. None: there is no driver to connect to.
        clock: Time.
    """

    def __init__(self, address: JobAddress | None, clock: Clock) -> None:
        self._clock = clock
        self._connection = None if address is None else _connect(address)
        self._beat_at_ms = 0

    def window(self, duration_ms: int) -> FollowWindow:
        """Return a follow window of this task. It is short if the driver cannot be reached."""
        if self._connection is None:
            duration_ms = min(duration_ms, SHORT_MS)
        return FollowWindow(duration_ms, self._clock, self._connection)

    def beat(self) -> None:
        """Report progress to the driver, at most every `BEAT_MS`."""
        now_ms = self._clock.monotonic_ms()
        if self._connection is None or now_ms < self._beat_at_ms:
            return
        self._beat_at_ms = now_ms + BEAT_MS
        with contextlib.suppress(
            OSError
        ):  # a full socket has beats enough; a closed one needs none
            self._connection.send(b".")

    def __enter__(self) -> Self:
        progress.report_to(self.beat)
        return self

    def __exit__(self, *_: object) -> None:
        progress.report_to(None)
        if self._connection is not None:
            self._connection.close()


def _connect(address: JobAddress) -> socket.socket | None:
    place = (address.host, address.port)
    if place in _unreachable:
        return None
    try:
        connection = socket.create_connection(place, timeout=_CONNECT_S)
        connection.sendall(address.token)
    except OSError:
        # Tried once per process: a firewall may drop the packets, which costs the whole timeout.
        _unreachable.add(place)
        return None
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
