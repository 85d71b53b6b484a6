"""Timers of all groups in one heap."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Timer(NamedTuple):
    """Something to look at when its time comes. The owner checks whether it is still due."""

    due_ms: int
    number: int
    group_id: str
    kind: str
    key: str


class Timers:
    """A heap by due time on the monotonic clock. Setting one takes O(log n), firing the same.

    Timers are not removed: one that is no longer due is ignored by its owner when it fires.
    """

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, due_ms: int, group_id: str, kind: str, key: str = "") -> None:
        """Add a timer."""
        self._number += 1
        heapq.heappush(self._heap, Timer(due_ms, self._number, group_id, kind, key))

    def next_due_ms(self) -> int | None:
        """Return when the next timer is due; None without timers."""
        return self._heap[0].due_ms if self._heap else None

    def take_due(self, now_ms: int) -> Timer | None:
        """Remove and return the first timer that is due; None if there is none."""
        if self._heap and self._heap[0].due_ms <= now_ms:
            return heapq.heappop(self._heap)
        return None
