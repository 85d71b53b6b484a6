"""Executor: how a slot and the driver signal each other while slices run.

Each task holds one connection to the driver (`stop_channel`):

    task -> driver   token           which job it belongs to
                     `.`             data has moved; at most once per second
                     `+` positions   all its slices have ended without an error, at these positions
                     closed          the task is over: the windows of the same job end
    driver -> task   `+` positions   those of the job before this one: begin here
                     half closed     the window ends: a shutdown, or another slot has ended

So that nothing waits while one job follows another, the driver starts the next job before a window
ends. Its tasks wait for the positions of their predecessors, and begin within milliseconds.

An executor that cannot reach the driver uses short windows and reports no progress.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.mirror.ports import SliceResult, Work

SHORT_MS: Final = 1_000
"""Length of a window that cannot be ended early."""

LONG_MS: Final = 10_000
"""Longest window. The driver needs its end to commit, and to see new partitions."""

SLICE_MS: Final = 2_000
"""A slice with a backlog ends after this time, or with its window if that is later: a shutdown and
other flows wait for it. Between two slices Spark takes 30-100 ms, and as much CPU time."""

LISTEN_MS: Final = 250
"""Longest interval at which a slot checks whether its window was ended."""

BEAT_MS: Final = 1_000
"""Shortest time between two reports of progress."""

HAND_OVER_MS: Final = 60_000
"""Longest time for which a task waits for its predecessor."""

MESSAGE_MAX: Final = 64 << 20
"""Limit for the size of a message with positions, in bytes."""

_HEADER: Final = 5
"""Bytes before the positions: `+` and their size."""

_CONNECT_S: Final = 1.0
_unreachable: set[tuple[str, int]] = set()


class JobAddress(NamedTuple):
    """Where the slots of one job connect to."""

    host: str
    port: int
    token: bytes
    """Identifies the job. The driver closes connections that do not send a current one."""

    waits: bool = False
    """Whether the job has a predecessor, whose positions its tasks wait for."""


class Reached(NamedTuple):
    """Where a slice has ended."""

    position: int
    """The next offset to copy."""

    leader_epoch: int
    """See `Slice.leader_epoch`."""


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
        self._waits = address is not None and address.waits
        self._beat_at_ms = 0

    def take_over(self, works: Sequence[Work]) -> Sequence[Work]:
        """Wait for the predecessor, if there is one, and return the works from its positions on.

        Returns:
            None of the works if the predecessor failed, or did not end within `HAND_OVER_MS`.
        """
        if not self._waits:
            return works
        positions = self._receive_positions()
        if positions is None:
            return ()
        return [_begin_at(work, *positions[str(work.slice.flow)]) for work in works]

    def hand_over(self, results: Iterable[SliceResult]) -> None:
        """Report where the slices ended, if none failed. Nothing of them is in flight."""
        ended = list(results)
        if self._connection is None or any(result.error for result in ended):
            return
        positions = {
            str(result.slice.flow): Reached(result.next_offset, result.leader_epoch)
            for result in ended
        }
        self._connection.setblocking(True)
        self._connection.settimeout(_CONNECT_S)
        with contextlib.suppress(OSError):  # the driver then starts the next job when this one ends
            self._connection.sendall(message_of(positions))

    def _receive_positions(self) -> Mapping[str, Reached] | None:
        if self._connection is None:
            return None
        until_ms = self._clock.monotonic_ms() + HAND_OVER_MS
        received = bytearray()
        poll = select.poll()  # `select` refuses the connection of a process with many open files
        poll.register(self._connection, select.POLLIN)
        while (left_ms := until_ms - self._clock.monotonic_ms()) > 0:
            poll.poll(left_ms)
            try:
                part = self._connection.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not part:
                return None
            received += part
            positions = positions_in(received)
            if positions is not None:
                return positions
        return None

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


def message_of(positions: Mapping[str, Reached]) -> bytes:
    """Return the message with these positions, by flow."""
    body = json.dumps(positions).encode()
    return b"+" + len(body).to_bytes(_HEADER - 1, "big") + body


def positions_in(received: bytearray) -> dict[str, Reached] | None:
    """Return the positions of a message. None: it is not complete yet.

    Raises:
        ValueError: It is no such message.
    """
    if len(received) < _HEADER:
        return None
    size = int.from_bytes(received[1:_HEADER], "big")
    if received[:1] != b"+" or size > MESSAGE_MAX:
        raise ValueError("not a message with positions")
    if len(received) < _HEADER + size:
        return None
    found = json.loads(received[_HEADER : _HEADER + size])
    return {
        str(flow): Reached(int(position), int(epoch)) for flow, (position, epoch) in found.items()
    }


def _begin_at(work: Work, position: int, leader_epoch: int) -> Work:
    end = max(work.slice.end, position)
    part = replace(work.slice, first=position, end=end, leader_epoch=leader_epoch)
    return replace(work, slice=part, in_flight_max=1)  # the predecessor may have closed its window


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
