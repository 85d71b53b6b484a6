"""The segments that one connection waits for, also from one of its Fetch requests to the next."""

from __future__ import annotations

import asyncio
import functools
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Executor

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.segment import Segment, SparseIndex
    from logmirror.broker.log.segment_cache import SegmentCache

    Load = asyncio.Future[tuple[OpenFile, SparseIndex]]


_KEPT_S: Final = 10.0
"""How long a result waits for the next request: it keeps a file open."""


class SegmentLoads:
    """The loads in progress, of which each executor has one at most, and those that have ended.

    Each has a key: the segment, and the offset that is wanted, because a part of a segment may be
    loaded (`SegmentCache.loaded_at`).
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[Segment, int], Load] = {}
        self._running: dict[Executor, Load] = {}

    def running(self, executor: Executor) -> Load | None:
        """Return the load that is in progress in an executor."""
        load = self._running.get(executor)
        return None if load is None or load.done() else load

    def get(self, segment: Segment, offset: int) -> Load | None:
        """Return a load that was begun."""
        return self._loads.get((segment, offset))

    def begin(
        self, cache: SegmentCache, executor: Executor, segment: Segment, offset: int, size: int
    ) -> Load:
        """Load a segment, or `size` bytes of it from an offset on, if that is cheaper."""
        loop = asyncio.get_running_loop()
        load = loop.run_in_executor(executor, cache.loaded_at, segment, offset, size)
        self._loads[segment, offset] = self._running[executor] = load
        load.add_done_callback(functools.partial(self._ended, (segment, offset), executor))
        return load

    def _ended(self, key: tuple[Segment, int], executor: Executor, load: Load) -> None:
        if self._running.get(executor) is load:
            del self._running[executor]  # it would keep the file open
        if not load.cancelled():
            load.exception()  # marked as seen: the next request for the segment gets it
        asyncio.get_running_loop().call_later(_KEPT_S, self._forget, key, weakref.ref(load))

    def _forget(self, key: tuple[Segment, int], load: weakref.ref[Load]) -> None:
        if key in self._loads and self._loads[key] is load():
            del self._loads[key]

    def take(self, segment: Segment, offset: int) -> tuple[OpenFile, SparseIndex]:
        """Return the result of a load that has ended. Raises as that does."""
        return self._loads.pop((segment, offset)).result()

    def keep(self, wanted: Collection[tuple[Segment, int]]) -> None:
        """Let go of the results that the last request did not want."""
        for key in [key for key, load in self._loads.items() if load.done() and key not in wanted]:
            del self._loads[key]
