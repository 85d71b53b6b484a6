"""Driver: the schedule of drift checks: does a chain still end with its last known object?

A mirror reads an archive only at its start and after errors, so objects that another process adds
or removes would be noticed at the next start only. A drift check lists the end of one chain. It
costs the owner of a bucket money and the loop time. Checks are therefore rare, spread over their
interval, and limited to a small part of the loop's time for any number of flows.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.clock import Clock
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import FlowId

BUDGET_MS: Final = 100
"""Limit for one pass of the loop, which polls four times a second when idle. With 1,000 flows and
a store that responds in 30 ms, each chain is checked about every two minutes."""

_GOLDEN: Final = 0.618_033_988_75
"""Multiples of the golden ratio, modulo 1, are spread evenly for any number of flows."""


class DriftSchedule:
    """Selects the flows into archives whose chains are checked in a pass of the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: list[tuple[float, int, int, FlowId]] = []
        """Monotonic time of the next check, a tie-breaker, the interval, the flow."""

        self._known: set[FlowId] = set()

    def due(self, states: Mapping[FlowId, FlowState]) -> Iterator[FlowState]:
        """Yield the flows that are due, longest overdue first, until the time budget is used up.

        Args:
            states: All flows. A flow that backs off, has reached its target or reads its position
                anyway is skipped for one interval.
        """
        began_ms = self._clock.monotonic_ms()
        self._schedule_new(states, began_ms)
        while self._queue and self._queue[0][0] <= began_ms:
            _, number, interval_ms, flow = self._queue[0]
            heapq.heapreplace(self._queue, (began_ms + interval_ms, number, interval_ms, flow))
            state = states.get(flow)
            if state and state.is_free(began_ms) and not state.reached:
                yield state
            if self._clock.monotonic_ms() - began_ms >= BUDGET_MS:
                return

    def _schedule_new(self, states: Mapping[FlowId, FlowState], now_ms: int) -> None:
        for flow in [flow for flow in states if flow not in self._known]:
            number = len(self._known)
            self._known.add(flow)
            interval_ms = states[flow].destination.drift_check_ms
            if interval_ms is not None:
                first_ms = now_ms + (1 - number * _GOLDEN % 1) * interval_ms
                heapq.heappush(self._queue, (first_ms, number, interval_ms, flow))
