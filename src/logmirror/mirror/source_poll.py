"""Driver: poll the ends of the source's partitions, and read stale positions again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError
from logmirror.mirror.backoff import RETRIABLE
from logmirror.mirror.drift import DriftSchedule
from logmirror.mirror.histories import checked_start
from logmirror.mirror.source_views import compared_views, position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.plan import FlowState


class SourcePoll:
    """Keeps the source ends and the positions of all flows current.

    Args:
        table: The flows.
        context: Clients, destinations, observer and clock.
    """

    def __init__(self, table: FlowTable, context: LoopContext) -> None:
        self._table, self._context = table, context
        self._observer, self._clock = context.observer, context.clock
        self._drift = DriftSchedule(context.clock)

    def check_drift(self) -> None:
        """Check some chains for objects that other processes added or removed."""
        for state in self._drift.due(self._table.states):
            destination = self._context.destination(state.destination)
            try:
                state.position_stale |= destination.drifted(state)
            except LogmirrorError as error:
                self._table.fail(state, error)

    def poll(self) -> None:
        """Read the last stable offset of each flow that neither backs off nor is at its target.

        One request per broker, whatever the number of partitions.
        """
        now_ms = self._clock.monotonic_ms()
        wall_ms = self._clock.now_ms()
        by_source: dict[ConnectionSettings, list[FlowState]] = defaultdict(list)
        for flow, state in self._table.states.items():
            if not state.reached and state.retry_at_ms <= now_ms:
                by_source[self._table.mirror_of[flow].source].append(state)
        for source, states in by_source.items():
            partitions = {state.flow.source for state in states}
            try:
                ends = self._context.client(source).list_offsets(partitions, LATEST)
            except LogmirrorError as error:
                self._poll_failed(states, error)
                continue
            for state in states:
                self._update(state, ends[state.flow.source], now_ms, wall_ms)
        failpoints.reach("plan.positions")

    def _poll_failed(self, states: Sequence[FlowState], error: LogmirrorError) -> None:
        """Fail the flows of a request that failed.

        An error that is not retriable concerns some of the flows only. A request for each flow
        finds them.
        """
        for state in [s for s in states if s.flow.mirror not in self._table.stopped]:
            cause: LogmirrorError = error
            if not isinstance(error, RETRIABLE):
                client = self._context.client(self._table.mirror_of[state.flow].source)
                try:
                    client.list_offsets({state.flow.source}, LATEST)
                    continue
                except LogmirrorError as its_own:
                    cause = its_own
            self._table.fail(state, cause)

    def _update(self, state: FlowState, end: int, now_ms: int, wall_ms: int) -> None:
        try:
            # An end below the position: the topic may have been recreated.
            if state.position_stale or end < state.position:
                end = self._read_position(state)
        except LogmirrorError as error:
            self._table.fail(state, error)
            return
        before = (state.position, state.source_end)
        if not state.position_stale:
            state.observe(end, now_ms, wall_ms)
        if (state.position, state.source_end) != before:
            self._observer.position_changed(state)

    def _read_position(self, state: FlowState) -> int:
        """Read a flow's position again. Returns the source's end as read after that."""
        mirror = self._table.mirror_of[state.flow]
        flow, client, spec = state.flow, self._context.client(mirror.source), state.destination
        destination = self._context.destination(spec)
        found = destination.positions(spec, [flow], mirror.chain_start)
        topic = client.topic(mirror.topic)
        epoch = destination.leader_epochs(spec, found).get(flow, -1)
        if epoch < 0 and (found[flow], topic.topic_id) == (state.position, state.topic_id):
            epoch = state.leader_epoch
        state.topic_id = topic.topic_id
        view = compared_views(client, topic, {flow.source: epoch})[flow.source]
        start = checked_start(
            destination,
            spec,
            flow,
            position(found[flow]),
            view=view,
            epoch=epoch,
            compacted=state.compacted,
        )
        state.position, state.leader_epoch = start.position, start.leader_epoch
        state.source_epoch = view.leader_epoch
        state.log_start = view.log_start
        state.probed_bytes, state.probed_end = 0, state.position
        state.position_stale, state.tail_checked = False, start.tail_checked
        state.fenced, state.in_flight_max = False, 1
        destination.opened(state)
        self._observer.position_changed(state)
        return view.last_stable_offset
