"""Executor: how slices into one cluster follow their sources, whatever offsets they write.

A slice fetches below its limit as long as the source delivers. When every slice has reached its
limit, those with a follow window wait for new records: a single slice by a long poll at the source,
several by asking for all log ends in one request.

An error of one slice ends that slice alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError
from logmirror.mirror.follow import LISTEN_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import Work
    from logmirror.source.partition import Fetched, KafkaSource

_POLL_MS: Final = 10
"""Pause between two requests for the log ends of several partitions. The pause is ten times the
response time where that is longer."""


class FollowingSlice(Protocol):
    """What following needs of a slice."""

    work: Work
    source: KafkaSource
    known_end: int
    stalled_ms: int | None

    @property
    def next_offset(self) -> int:
        """The next source offset to fetch."""

    @property
    def limit(self) -> int:
        """One past the last offset that the slice may copy, as far as known."""

    @property
    def error(self) -> LogmirrorError | None:
        """Why the slice ends; None while it does not."""

    def fail(self, error: LogmirrorError) -> None:
        """End the slice with an error; the first error counts."""

    def note_stall(self, next_offset: int, now_ms: int) -> None:
        """Record that the source delivered nothing below the limit."""


_S = TypeVar("_S", bound=FollowingSlice)


def attempt(piece: _S, action: Callable[[_S], bool]) -> bool:
    """Run an action for one slice; a LogmirrorError ends that slice and returns False."""
    try:
        return action(piece)
    except LogmirrorError as error:
        piece.fail(error)
        return False


class Following(Generic[_S]):
    """Fetches for the slices of one transfer, and waits for more.

    Args:
        source_client: The source cluster, for the log ends of many partitions at once.
        window: How long to wait for new records.
        clock: Time.
        write: Writes what was fetched for a slice, up to an offset.
    """

    def __init__(
        self,
        source_client: ClusterClient,
        window: FollowWindow,
        clock: Clock,
        write: Callable[[_S, Fetched, int], None],
    ) -> None:
        self._source_client, self._window, self._clock = source_client, window, clock
        self._write = write

    def step(self, piece: _S) -> bool:
        """Fetch once, without waiting, and write what came; returns whether anything came."""
        polled = piece.source.poll(piece.next_offset, max_wait_ms=0, limit=piece.limit)
        piece.known_end = max(piece.known_end, polled.last_stable_offset)
        if polled.fetched is None:
            piece.note_stall(piece.next_offset, self._clock.monotonic_ms())
            return False
        piece.stalled_ms = None
        self._write(piece, polled.fetched, min(piece.limit, polled.last_stable_offset))
        return True

    def wait(self, pieces: Sequence[_S]) -> bool:
        """Wait until the source has more records; False when the follow window is over."""
        if any(piece.next_offset < piece.limit and piece.error is None for piece in pieces):
            self._clock.sleep_ms(_POLL_MS)  # stable at the source, and not delivered yet
            return True
        watched = [piece for piece in pieces if piece.work.window_ms and piece.error is None]
        while watched and self._window.left_ms:
            if len(watched) == 1:
                return attempt(watched[0], self._long_poll)
            if self._poll_ends(watched):
                return True
        return False

    def _long_poll(self, piece: _S) -> bool:
        wait_ms = min(self._window.left_ms, LISTEN_MS)
        polled = piece.source.poll(piece.next_offset, max_wait_ms=wait_ms)
        piece.known_end = max(piece.known_end, polled.last_stable_offset)
        if polled.fetched is not None and piece.next_offset < polled.last_stable_offset:
            self._write(piece, polled.fetched, polled.last_stable_offset)
        return True

    def _poll_ends(self, watched: Sequence[_S]) -> bool:
        begun_ms = self._clock.monotonic_ms()
        try:
            sources = {piece.work.slice.flow.source for piece in watched}
            ends = self._source_client.list_offsets(sources, LATEST)
        except LogmirrorError as error:
            for piece in watched:
                piece.fail(error.copy())
            return True
        for piece in watched:
            piece.known_end = max(piece.known_end, ends[piece.work.slice.flow.source])
        if any(piece.next_offset < piece.known_end for piece in watched):
            return True
        took_ms = self._clock.monotonic_ms() - begun_ms
        self._clock.sleep_ms(max(_POLL_MS, 10 * took_ms))
        return False
