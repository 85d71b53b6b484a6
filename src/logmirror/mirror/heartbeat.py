"""Driver: a periodic log event for each mirror, which shows that the loop makes progress.

The loop logs it after it has run what is due, so no flush waits for it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.clock import Clock
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import FlowId

_LOG = logging.getLogger("logmirror.mirror")


class Heartbeat:
    """Logs the heartbeats and keeps the positions of the previous one.

    Args:
        interval_ms: Time between two heartbeats, in milliseconds. 0: none are logged.
        clock: Time.
    """

    def __init__(self, interval_ms: int, clock: Clock) -> None:
        self._interval_ms, self._clock = interval_ms, clock
        self._next_ms = clock.monotonic_ms() + interval_ms
        self._positions: dict[FlowId, int] = {}

    def beat(self, states: Iterable[FlowState]) -> None:
        """Log one event for each mirror if it is due. Positions are sums over flows."""
        now_ms = self._clock.monotonic_ms()
        if not self._interval_ms or now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._interval_ms
        if not _LOG.isEnabledFor(logging.DEBUG):
            return
        by_mirror: dict[tuple[str, str], list[FlowState]] = defaultdict(list)
        for state in states:
            by_mirror[state.flow.mirror, state.flow.topic].append(state)
        for (mirror, topic), of_mirror in by_mirror.items():
            facts = {
                "mirror": mirror,
                "topic": topic,
                "flows": len(of_mirror),
                "position": sum(state.position for state in of_mirror),
                "progress": sum(self._progress(state) for state in of_mirror),
                "lag": sum(max(state.source_end - state.position, 0) for state in of_mirror),
                "waiting": sum(state.backs_off(now_ms) for state in of_mirror),
            }
            _LOG.debug("heartbeat", extra={"facts": facts})

    def opened(self, state: FlowState) -> None:
        """Start counting a flow's progress from its current position."""
        self._positions.setdefault(state.flow, state.position)

    def _progress(self, state: FlowState) -> int:
        before = self._positions.get(state.flow, state.position)
        self._positions[state.flow] = state.position
        return state.position - before
