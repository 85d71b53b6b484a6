"""Driver: shares the engine's slots among lanes, so that a stalled lane cannot take them all.

A lane has one seat. A lane into clusters has two, because its next job starts before the current
one ends. With at least as many slots as seats, each seat can always get one. The others go to the
seats that ask first. With fewer slots than seats, lanes whose previous slices did not end in time
hold all slots but one, if there are several: the other lanes take turns with the last one.
"""

from __future__ import annotations

import threading
from typing import Final

SLOW_MS: Final = 10_000
"""A lane whose slices held their slots for longer does not get the last slot of several."""


class SlotPool:
    """The slots of the engine. Safe from any thread.

    Args:
        seats: The number of seats, at least 1.
    """

    def __init__(self, seats: int) -> None:
        self._seats = max(seats, 1)
        self._held: dict[object, int] = {}
        self._slow: set[object] = set()
        """The seats that hold slots for lanes whose previous slices did not end in time."""

        self._lock = threading.Lock()

    def limit(self, total: int) -> int:
        """Return how many of `total` slots one seat may hold, at least 1."""
        return max(total - self._seats + 1, 1)

    def take(self, seat: object, wanted: int, total: int, *, is_slow: bool = False) -> int:
        """Take slots for a seat, which holds none. Does not wait.

        Args:
            seat: Identifies the seat.
            wanted: How many slots it can use, at least 1.
            total: How many slots the engine has now, at least 1.
            is_slow: Whether the lane's previous slices held their slots for longer than `SLOW_MS`.

        Returns:
            How many slots the seat holds now. 0: none is free, try again later.
        """
        with self._lock:
            free = total - sum(self._held.values())
            others_without = self._seats - len(self._held) - 1
            if total >= self._seats:
                granted = min(wanted, self.limit(total), max(free - others_without, 0))
            else:
                slow_max = max(total - 1, 1)
                granted = int(free > 0 and (not is_slow or len(self._slow) < slow_max))
            if granted:
                self._held[seat] = granted
                if is_slow:
                    self._slow.add(seat)
            return granted

    def give_back(self, seat: object) -> None:
        """Give back the slots of a seat."""
        with self._lock:
            self._held.pop(seat, None)
            self._slow.discard(seat)
