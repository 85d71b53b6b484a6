"""Driver: limits log lines that repeat: a store that is down fails thousands of flows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from logmirror.clock import Clock

INTERVAL_MS: Final = 60_000
"""One line for each cause in this time."""

_CAUSES_MAX: Final = 10_000


class Repeated:
    """Decides which events are logged, and counts the others.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._causes: dict[object, tuple[int, int]] = {}
        """Monotonic time of the last line about a cause, and the events since then."""

    def admit(self, cause: object) -> int | None:
        """Return how many events of this cause were not logged since its last line.

        Returns:
            None if this event is not to be logged.
        """
        now_ms = self._clock.monotonic_ms()
        logged_ms, count = self._causes.get(cause, (now_ms - INTERVAL_MS, 0))
        if now_ms - logged_ms < INTERVAL_MS:
            self._causes[cause] = (logged_ms, count + 1)
            return None
        if len(self._causes) >= _CAUSES_MAX:
            self._causes.clear()
        self._causes[cause] = (now_ms, 0)
        return count
