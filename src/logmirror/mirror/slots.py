"""Driver: shares the engine's slots among lanes, so that a stalled lane cannot take them all.

With at least as many slots as lanes, each lane can always get one. The others go to the lanes that
ask first. With fewer slots than lanes, the last free slot is kept for a lane whose previous slices
ended in time.
"""

from __future__ import annotations

import threading
from typing import Final

SLOW_MS: Final = 10_000
"""A lane whose slices held their slots for longer does not get the last free slot."""


class SlotPool:
    """The slots of the engine. Safe from any thread.

    Args:
        lanes: The number of lanes, at least 1.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = max(lanes, 1)
        self._held: dict[object, int] = {}
        self._lock = threading.Lock()

    def limit(self, total: int) -> int:
        """Return how many of `total` slots one lane may hold, at least 1."""
        return max(total - self._lanes + 1, 1)

    def take(self, lane: object, wanted: int, total: int, *, is_slow: bool = False) -> int:
        """Take slots for a lane, which holds none. Does not wait.

        Args:
            lane: The lane.
            wanted: How many slots it can use, at least 1.
            total: How many slots the engine has now, at least 1.
            is_slow: Whether the lane's previous slices held their slots for longer than `SLOW_MS`.

        Returns:
            How many slots the lane holds now. 0: none is free, try again later.
        """
        with self._lock:
            free = total - sum(self._held.values())
            others_without = self._lanes - len(self._held) - 1
            if total >= self._lanes:
                granted = min(wanted, self.limit(total), max(free - others_without, 0))
            else:
                granted = min(1, max(free - is_slow, 0))
            if granted:
                self._held[lane] = granted
            return granted

    def give_back(self, lane: object) -> None:
        """Give back the slots of a lane."""
        with self._lock:
            self._held.pop(lane, None)
