"""Driver: logs what lanes wait for, so that no wait is silent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.clock import Clock
    from logmirror.mirror.health import LaneProgress

_LOG = logging.getLogger("logmirror.mirror")

FIRST_MS: Final = 1_500
"""A request of the driver without a response for this long is logged."""

EVERY_MS: Final = 10_000
"""Interval of the log lines about one wait. Slices are logged after this time at first."""


class WaitLog:
    """Logs lanes that make no progress: after `FIRST_MS`, then every `EVERY_MS`.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_ms: dict[LaneProgress, int] = {}
        """The time without progress at which a lane is logged again, in milliseconds."""

    def log(self, lanes: Iterable[LaneProgress]) -> None:
        """Log the lanes that are due."""
        for lane in lanes:
            silent_ms = lane.quiet_ms
            first_ms = EVERY_MS if lane.runs_slices else FIRST_MS
            if silent_ms < first_ms or not lane.waits_for:  # an idle lane waits for nothing
                self._next_ms.pop(lane, None)
            elif silent_ms >= self._next_ms.get(lane, first_ms):
                self._next_ms[lane] = silent_ms - silent_ms % EVERY_MS + EVERY_MS
                _LOG.warning("waiting: no response yet", extra={"facts": _facts(lane, silent_ms)})


def _facts(lane: LaneProgress, silent_ms: int) -> dict[str, object]:
    return {
        "mirror": lane.mirrors[0][0],
        "mirrors": len(lane.mirrors),
        **lane.addresses(),
        "step": lane.waits_for,
        "silent_ms": silent_ms,
    }
