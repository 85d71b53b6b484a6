"""Driver: when each chain is looked at again, to see whether it still ends with what we know.

Whoever copies into an archive asks it nothing while all goes well, so objects that somebody else
adds or removes would be met at the next start only. A look is one listing of a chain's end; it
costs a bucket's owner money and the loop time, so looks are rare, spread over their interval, and
take a small part of the loop's time however many flows there are.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from logmirror.mirror.ports import ArchiveSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.clock import Clock
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import FlowId

BUDGET_MS: Final = 100
"""Of one pass of the loop, which polls four times a second when idle. A thousand flows into a store
that answers in 30 ms are looked at every two minutes or so, whatever was asked for."""

_GOLDEN: Final = 0.618_033_988_75
"""Multiples of it, modulo 1, are spread evenly however many there are."""


class DriftSchedule:
    """Which flows into archives are looked at in this pass of the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: list[tuple[float, int, int, FlowId]] = []
        """Time of the next look, a number that keeps equal times apart, interval."""

        self._known: set[FlowId] = set()

    def due(self, states: Mapping[FlowId, FlowState]) -> Iterator[FlowState]:
        """Yield the flows whose time has come, longest due first, until the budget is spent.

        Args:
            states: All flows. Those that wait, have reached their target or read their position
                anyway are passed over until their next time.
        """
        began_ms = self._clock.monotonic_ms()
        self._take_in(states, began_ms)
        while self._queue and self._queue[0][0] <= began_ms:
            _, number, interval_ms, flow = self._queue[0]
            heapq.heapreplace(self._queue, (began_ms + interval_ms, number, interval_ms, flow))
            state = states.get(flow)
            if state and not (state.lost or state.reached or state.retry_at_ms > began_ms):
                yield state
            if self._clock.monotonic_ms() - began_ms >= BUDGET_MS:
                return

    def _take_in(self, states: Mapping[FlowId, FlowState], now_ms: int) -> None:
        for flow in [flow for flow in states if flow not in self._known]:
            number = len(self._known)
            self._known.add(flow)
            spec = states[flow].destination
            if isinstance(spec, ArchiveSpec):
                first_ms = now_ms + (1 - number * _GOLDEN % 1) * spec.drift_check_ms
                heapq.heappush(self._queue, (first_ms, number, spec.drift_check_ms, flow))
