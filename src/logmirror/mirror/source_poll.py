"""Driver: poll the ends of the source's partitions, and read stale positions again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError
from logmirror.mirror import until
from logmirror.mirror.backoff import RETRIABLE
from logmirror.mirror.drift import DriftSchedule
from logmirror.mirror.opening import Opening
from logmirror.mirror.source_views import compared_views

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.model import TopicPartition


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
            destination = self._context.destination(state.flow)
            try:
                if destination.drifted(state):
                    state.outdated()
            except LogmirrorError as error:
                self._table.fail(state, error)

    def poll(self) -> None:
        """Read the last stable offset of each flow that neither backs off nor is at its target.

        One request per broker, whatever the number of partitions. A partition that does not respond
        holds up the others once at most.
        """
        now_ms = self._clock.monotonic_ms()
        wall_ms = self._clock.now_ms()
        by_source: dict[ConnectionSettings, list[FlowState]] = defaultdict(list)
        for flow, state in self._table.states.items():
            if not state.reached:
                by_source[self._table.mirror_of[flow].source].append(state)
        for source, of_source in by_source.items():
            states = [state for state in of_source if not state.backs_off(now_ms)]
            if not states:
                continue
            try:
                client = self._context.client(source)
                ends = self._ends(client, states, of_source)
                states = [state for state in states if state.flow.source in ends]
                limits = until.limits(client, self._wanted(states), ends, self._clock)
            except LogmirrorError as error:
                self._poll_failed(states, error)
                continue
            for state in states:
                self._update(state, ends[state.flow.source], limits, now_ms, wall_ms)
        failpoints.reach("plan.positions")

    def _ends(
        self, client: ClusterClient, states: Sequence[FlowState], of_source: Iterable[FlowState]
    ) -> Mapping[TopicPartition, int]:
        """Return the ends of the partitions that respond; fail the flows of the others.

        After a failure, one attempt without retries finds the partitions that respond. It includes
        those of flows that back off: if any responds, the failed ones are not waited for, except
        before their flows give up.

        Raises:
            LogmirrorError: No partition has responded, or, without a failure before, one has not.
        """
        if any(state.failures for state in states):
            found = client.try_list_offsets({each.flow.source for each in of_source}, LATEST)
            ends = {at: end for at, end in found.items() if not isinstance(end, LogmirrorError)}
            if ends:
                silent = [state for state in states if state.flow.source not in ends]
                last = [state for state in silent if self._table.gives_up_next(state)]
                try:
                    if last:
                        ends |= client.list_offsets({state.flow.source for state in last}, LATEST)
                except LogmirrorError as error:
                    found |= {state.flow.source: error for state in last}
                for state in silent:
                    end = found[state.flow.source]
                    if state.flow.source not in ends and isinstance(end, LogmirrorError):
                        self._poll_failed([state], end.copy())
                return ends
        return client.list_offsets({state.flow.source for state in states}, LATEST)

    def _wanted(self, states: Iterable[FlowState]) -> Iterator[tuple[TopicPartition, until.Until]]:
        """Yield where the flows end that have no target yet."""
        for state in states:
            wanted = self._table.mirror_of[state.flow].until
            if wanted is not None and state.target is None:
                yield state.flow.source, wanted

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

    def _update(
        self, state: FlowState, polled: int, limits: until.Limits, now_ms: int, wall_ms: int
    ) -> None:
        end, wanted = polled, self._table.mirror_of[state.flow].until
        try:
            if end < state.position:
                state.outdated()  # the topic may have been recreated
            if state.position_stale:
                end = self._read_position(state)
            if wanted is not None:  # the limits are those of the polled end
                limit = limits.get((state.flow.source, wanted))
                end = min(polled, until.limited(state, limit, end))
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
        flow, client = state.flow, self._context.client(mirror.source)
        destination = self._context.destination(flow)
        opening = Opening(destination, [flow], mirror.chain_start)
        topic = client.topic(mirror.topic)
        if topic.topic_id == state.topic_id:
            opening.remember(flow, state.position, state.leader_epoch)
        view = compared_views(client, topic, opening.epochs)[flow.source]
        start = opening.start(flow, view, compacted=state.compacted)
        begun = destination.begin(flow, start)
        state.opened(start, begun, self._clock.monotonic_ms())
        self._observer.position_changed(state)
        return view.last_stable_offset
