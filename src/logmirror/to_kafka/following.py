"""Executor: how slices into one cluster fetch from and follow their sources.

A slice fetches below its limit as long as the source delivers. When every slice has reached its
limit, those with a follow window wait for new records: a single slice by a long poll at the source,
several by asking for all log ends in one request.

An error of one slice ends that slice alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from logmirror import progress
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
shortest of the last `_RECENT` response times where that is longer, up to `LISTEN_MS`.
"""

_RECENT: Final = 8
"""So many responses in turn are slow where the source is. Fewer are slow in a pause of its broker,
or while other clients keep it busy, and the next response may be fast."""


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


def attempt(slice_: _S, action: Callable[[_S], bool]) -> bool:
    """Run an action for one slice; a LogmirrorError ends that slice and returns False."""
    try:
        return action(slice_)
    except LogmirrorError as error:
        slice_.fail(error)
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
        self._took_ms = deque([0] * _RECENT, maxlen=_RECENT)
        """How long the last requests for log ends took."""

    def step(self, slice_: _S) -> bool:
        """Fetch once, without waiting, and write what came; returns whether anything came."""
        polled = slice_.source.poll(slice_.next_offset, max_wait_ms=0, limit=slice_.limit)
        slice_.known_end = max(slice_.known_end, polled.last_stable_offset)
        if polled.fetched is None:
            slice_.note_stall(slice_.next_offset, self._clock.monotonic_ms())
            return False
        slice_.stalled_ms = None
        self._write(slice_, polled.fetched, min(slice_.limit, polled.last_stable_offset))
        return True

    def wait(self, slices: Sequence[_S]) -> bool:
        """Wait until the source has more records; False when the follow window is over."""
        if any(slice_.next_offset < slice_.limit and slice_.error is None for slice_ in slices):
            self._clock.sleep_ms(_POLL_MS)  # stable at the source, and not delivered yet
            return True
        watched = [slice_ for slice_ in slices if slice_.work.window_ms and slice_.error is None]
        while watched and self._window.left_ms:
            if len(watched) == 1:
                return attempt(watched[0], self._long_poll)
            if self._poll_ends(watched):
                return True
        return False

    def _long_poll(self, slice_: _S) -> bool:
        wait_ms = min(self._window.left_ms, LISTEN_MS)
        polled = slice_.source.poll(slice_.next_offset, max_wait_ms=wait_ms)
        slice_.known_end = max(slice_.known_end, polled.last_stable_offset)
        if polled.fetched is not None and slice_.next_offset < polled.last_stable_offset:
            self._write(slice_, polled.fetched, polled.last_stable_offset)
        return True

    def _poll_ends(self, watched: Sequence[_S]) -> bool:
        begun_ms = self._clock.monotonic_ms()
        try:
            sources = {slice_.work.slice.flow.source for slice_ in watched}
            ends = self._source_client.list_offsets(sources, LATEST)
            progress.moved()
        except LogmirrorError as error:
            for slice_ in watched:
                slice_.fail(error.copy())
            return True
        for slice_ in watched:
            slice_.known_end = max(slice_.known_end, ends[slice_.work.slice.flow.source])
        if any(slice_.next_offset < slice_.known_end for slice_ in watched):
            return True
        self._took_ms.append(self._clock.monotonic_ms() - begun_ms)
        pause_ms = max(_POLL_MS, 10 * min(self._took_ms))
        self._clock.sleep_ms(min(pause_ms, LISTEN_MS, self._window.left_ms))
        return False
