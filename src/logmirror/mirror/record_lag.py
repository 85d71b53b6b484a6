"""Driver: record lag: the age of the oldest record that a flow has not copied, by its timestamp.

The timestamp is read from the source: the header of the batch at the flow's position. It is read
once for each position, at most every `EVERY_MS`, and not before a flow has lagged for `FIRST_MS`. A
flow without lag costs nothing. All reads together take a small part of the loop's time for any
number of lagging flows, and a read without a response ends within seconds. Until a flow's first
read, its oldest record counts as old as the lag itself; between two reads, the last timestamp
counts.

All records of a batch count as old as the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.cluster.batch_timestamp import BatchTimestamps
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.ports import FlowId
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition

FIRST_MS: Final = 1_000
"""A flow that catches up sooner causes no read."""

EVERY_MS: Final = 10_000
"""Shortest time between two reads for one flow."""

FAILED_MS: Final = 60_000
"""Back-off after a failed read. Errors are not reported here: the flows report them."""

BUDGET_MS: Final = 25
"""Limit for one pass of the loop, which polls four times a second when idle. No read starts after
it."""


@dataclass(slots=True)
class _Behind:
    """A flow that lags."""

    source: ConnectionSettings
    read_at_ms: float
    """Monotonic time of the next read."""

    position: int = -1
    """The position of the last read. -1: none yet."""

    pending_since_ms: int | None = None
    """The flow's `pending_since_ms` as last reported."""


class RecordLag:
    """Keeps the record lag of all flows current; see `Observer.set_lag`.

    Args:
        client: Returns the open client of a source, whose requests end within seconds.
        clock: Time.
        observer: Receives the lags.
    """

    def __init__(
        self,
        client: Callable[[ConnectionSettings], ClusterClient],
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._client, self._clock, self._observer = client, clock, observer
        self._behind: dict[FlowId, _Behind] = {}
        self._known: set[FlowId] = set()
        self._not_before_ms: dict[ConnectionSettings, float] = {}
        self._timestamps = BatchTimestamps()

    def update(
        self, states: Mapping[FlowId, FlowState], mirror_of: Mapping[FlowId, MirrorSpec]
    ) -> None:
        """Process the current positions, and do the reads that are due, longest overdue first."""
        began_ms = self._clock.monotonic_ms()
        for flow, state in states.items():
            if state.source_end >= 0:
                self._update_flow(state, mirror_of[flow].source, began_ms)
        for flow in [flow for flow in self._behind if flow not in states]:
            del self._behind[flow]  # its mirror has stopped; its lag continues to grow
        due = [
            (behind.read_at_ms, flow, behind)
            for flow, behind in self._behind.items()
            if self._is_due(states[flow], behind, began_ms)
        ]
        self._read(sorted(due, key=lambda item: item[0]), states, began_ms)

    def _update_flow(self, state: FlowState, source: ConnectionSettings, now_ms: int) -> None:
        flow, wall_ms = state.flow, self._clock.now_ms()
        behind = self._behind.get(flow)
        if state.position >= state.source_end:
            if behind is not None or flow not in self._known:
                self._known.add(flow)
                self._behind.pop(flow, None)
                self._observer.set_lag(flow, None)
                self._observer.set_stalled(flow, None)
            return
        if behind is None:
            self._known.add(flow)
            behind = self._behind[flow] = _Behind(source, now_ms + FIRST_MS)
            self._observer.set_lag(flow, wall_ms)
        since_ms = state.pending_since_ms
        if since_ms is not None and since_ms != behind.pending_since_ms:
            behind.pending_since_ms = since_ms
            self._observer.set_stalled(flow, wall_ms - (now_ms - since_ms))

    def _is_due(self, state: FlowState, behind: _Behind, now_ms: int) -> bool:
        if behind.read_at_ms > now_ms or behind.position == state.position:
            return False
        return state.is_free(now_ms) and self._not_before_ms.get(behind.source, 0) <= now_ms

    def _read(
        self,
        due: Iterable[tuple[float, FlowId, _Behind]],
        states: Mapping[FlowId, FlowState],
        began_ms: int,
    ) -> None:
        found: dict[tuple[ConnectionSettings, TopicPartition, int], int | None] = {}
        for _, flow, behind in due:
            state = states[flow]
            place = (behind.source, flow.source, state.position)
            if place not in found:
                if self._clock.monotonic_ms() - began_ms >= BUDGET_MS:
                    return
                if self._not_before_ms.get(behind.source, 0) > began_ms:
                    continue
                try:
                    found[place] = self._timestamp_ms(behind.source, state)
                except LogmirrorError:
                    self._not_before_ms[behind.source] = began_ms + FAILED_MS
                    continue
            behind.position, behind.read_at_ms = state.position, began_ms + EVERY_MS
            found_ms = found[place]
            if found_ms is not None:
                self._observer.set_lag(flow, found_ms)

    def _timestamp_ms(self, source: ConnectionSettings, state: FlowState) -> int | None:
        client, partition = self._client(source), state.flow.source
        return self._timestamps.read_ms(client, partition, state.position, topic_id=state.topic_id)
