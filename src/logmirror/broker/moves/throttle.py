"""Limits the bytes per second of all moves between log directories together."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from logmirror.clock import Clock

_LOOK_S: Final = 0.1
"""How often a waiting move looks at the rate, which may have changed."""

_CHUNKS_PER_S: Final = 10
_BURST_MS: Final = 500.0
"""Time in which less was copied, for other reasons, and that may be made up for."""


class Throttle:
    """The limit. As in Kafka, the bytes of a step are counted after it, and then it waits.

    Attributes:
        rate: Bytes per second; 0: a batch for each step at most; None: no limit. A change applies
            at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate: int | None = None
        self._free_ms = 0.0

    @property
    def rate(self) -> int | None:
        """Bytes per second; None: no limit."""
        return self._rate

    @rate.setter
    def rate(self, rate: int | None) -> None:
        if rate != self._rate:
            self._rate, self._free_ms = rate, self._clock.monotonic_ms()

    def limit(self, most: int) -> int:
        """Return how many bytes a step may copy, at most `most`."""
        return most if self._rate is None else max(1, min(most, self._rate // _CHUNKS_PER_S))

    def count(self, size_bytes: int, begun_at: int | None) -> None:
        """Note what a step has copied.

        Args:
            size_bytes: How much.
            begun_at: The rate when it began. If that was higher, or no limit, a change does not
                hold up the next step until the new rate has made up for this one.
        """
        if self._rate is not None and begun_at is not None:
            rate, now_ms = max(begun_at, self._rate), self._clock.monotonic_ms()
            takes_ms = 1000 * size_bytes / rate if rate else math.inf
            self._free_ms = max(now_ms - _BURST_MS, self._free_ms) + takes_ms

    async def wait(self) -> bool:
        """Wait a moment, if the limit is reached; whether the next step may begin."""
        left_s = (self._free_ms - self._clock.monotonic_ms()) / 1000
        if self._rate is None or left_s <= 0:
            return True
        await asyncio.sleep(min(left_s, _LOOK_S))
        return left_s <= _LOOK_S
