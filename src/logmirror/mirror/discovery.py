"""Driver: find the topics and partitions of each mirror, and open their flows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError
from logmirror.mirror.backoff import RETRIABLE
from logmirror.mirror.cleanup_policy import CleanupPolicies, delete_retention_ms, is_compacted
from logmirror.mirror.flow_state import FlowState, Phase, next_daily_ms
from logmirror.mirror.histories import EpochChanges
from logmirror.mirror.opening import Opening
from logmirror.mirror.source_views import (
    check_partitions,
    compared_views,
    flows_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.ports import FlowId
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition

DISCOVERY_MS: Final = 5_000
"""Interval between two discoveries of new partitions, recreated topics and topic configurations."""


class Discovery:
    """Opens flows at the start, and again when partitions appear or a failed source recovers.

    Args:
        mirrors: The mirrors of the lane.
        table: Takes the opened flows and the failures.
        context: Clients, destinations, observer and clock.
    """

    def __init__(
        self, mirrors: Sequence[MirrorSpec], table: FlowTable, context: LoopContext
    ) -> None:
        self._mirrors, self._table, self._context = mirrors, table, context
        self._observer, self._clock = context.observer, context.clock
        self._epochs = EpochChanges(context, table)
        self._last_ms: int | None = None
        """Monotonic time of the last discovery; None: there was none yet."""

        self._gives_up = self._until_now = False
        self._policies = CleanupPolicies(context.clock)

    @property
    def has_run(self) -> bool:
        """Whether the first discovery is over. Safe from any thread."""
        return self._last_ms is not None

    def run(self, *, until_now: bool) -> None:
        """Discover what each mirror copies, at most every `DISCOVERY_MS`.

        Args:
            until_now: The first discovery does not wait for sources or destinations that fail.

        Raises:
            LogmirrorError: The process must end.
        """
        now_ms = self._clock.monotonic_ms()
        if self._last_ms is not None and now_ms - self._last_ms < DISCOVERY_MS:
            return
        is_first = self._last_ms is None
        self._until_now, self._gives_up = until_now, until_now and is_first
        for source, mirrors in self._due().items():
            topics = self._describe(source, mirrors)
            self._refresh_policies(source, topics)
            for mirror in mirrors:
                if mirror.name in topics:
                    try:
                        self._open_mirror(mirror, topics[mirror.name], is_first=is_first)
                    except LogmirrorError as error:
                        self._failed(mirror, "", error)
                self._table.drop_stopped()
        self._last_ms = now_ms

    def _refresh_policies(self, source: ConnectionSettings, mirrors: Collection[str]) -> None:
        """Read the cleanup policies of the topics of these mirrors again."""
        states = [s for flow, s in self._table.states.items() if flow.mirror in mirrors]
        self._policies.refresh(source, self._context.client(source), states)

    def _due(self) -> dict[ConnectionSettings, list[MirrorSpec]]:
        by_source: dict[ConnectionSettings, list[MirrorSpec]] = defaultdict(list)
        for mirror in self._mirrors:
            is_stopped = mirror.name in self._table.stopped
            if not is_stopped and not self._table.opening_backs_off(mirror.name, ""):
                by_source[mirror.source].append(mirror)
        return by_source

    def _describe(
        self, source: ConnectionSettings, mirrors: Sequence[MirrorSpec]
    ) -> dict[str, TopicMetadata]:
        """Return the topics of one source's mirrors, by mirror, without those that failed."""
        client, found = self._context.client(source), {}
        try:
            topics = client.describe_topics({mirror.topic for mirror in mirrors})
            found = {mirror.name: topics[mirror.topic] for mirror in mirrors}
        except RETRIABLE as error:
            for mirror in mirrors:
                self._failed(mirror, "", error)
        except LogmirrorError:
            for mirror in mirrors:  # one request for all topics: find the one that failed
                try:
                    found[mirror.name] = client.topic(mirror.topic)
                except LogmirrorError as error:
                    self._failed(mirror, "", error)
        return found

    def _failed(self, mirror: MirrorSpec, destination: str, error: LogmirrorError) -> None:
        """Back off, or stop the mirror; an empty destination means the source."""
        if not isinstance(error, RETRIABLE) or self._gives_up:
            self._table.stop_mirror(mirror.name, error)
        else:
            self._table.fail_opening(mirror, destination, error)

    def _open_mirror(self, mirror: MirrorSpec, topic: TopicMetadata, *, is_first: bool) -> None:
        states, unopened = self._table.states, self._table.unopened
        flows = [flow for flow, _ in flows_of(mirror, check_partitions(mirror, topic))]
        unopened.pop((mirror.name, ""), None)
        new = [flow for flow in flows if flow not in states]
        for flow in flows:
            state = states.get(flow)
            if state and state.topic_id != topic.topic_id:
                state.recreated(topic.topic_id)
        self._epochs.compare(mirror, topic)
        if new:
            self._open_new(mirror, topic, new)
        opened = [states[flow] for flow in new if flow in states]
        self._observer.mirror_opened(
            mirror.name,
            [name for name, _ in mirror.destinations],
            {name for of, name in unopened if of == mirror.name},
        )
        if is_first or opened:
            self._observer.mirror_starts(mirror, opened)

    def _open_new(self, mirror: MirrorSpec, topic: TopicMetadata, new: Sequence[FlowId]) -> None:
        client = self._context.client(mirror.source)
        configs = client.describe_topic_configs(mirror.topic)
        for name, _ in mirror.destinations:
            flows = [flow for flow in new if flow.destination == name]
            if not flows or self._table.opening_backs_off(mirror.name, name):
                continue
            destination = self._context.destinations[mirror.name, name]
            try:
                destination.prepare(client, topic, mirror.partitions)
                self._open_flows(mirror, destination, flows, topic, configs)
                self._table.unopened.pop((mirror.name, name), None)
            except RETRIABLE as error:
                self._failed(mirror, name, error)

    def _open_flows(
        self,
        mirror: MirrorSpec,
        destination: Destination,
        flows: Sequence[FlowId],
        topic: TopicMetadata,
        configs: Mapping[str, str | None],
    ) -> None:
        spec, compacted = destination.spec, is_compacted(configs)
        client = self._context.client(mirror.source)
        silent = {} if self._until_now else _silent(client, flows, waits=not self._table.states)
        flows = [flow for flow in flows if flow.source not in silent]
        opening = Opening(destination, flows, mirror.chain_start)
        views = compared_views(client, topic, opening.epochs)
        for flow in flows:
            start = opening.start(flow, views[flow.source], compacted=compacted)
            state = FlowState(
                flow=flow,
                destination=spec,
                topic_id=topic.topic_id,
                compacted=compacted,
                delete_retention_ms=delete_retention_ms(configs),
                position=start.position,
                phase=Phase.STALE,
                next_daily_ms=next_daily_ms(spec.daily_at_utc_s, self._clock.now_ms()),
            )
            self._observer.flow_opened(state)
            begun = destination.begin(flow, start)
            state.opened(start, begun, self._clock.monotonic_ms())
            self._table.add(mirror, state)
        for error in silent.values():
            raise error.copy()  # the opened flows stay open


def _silent(
    client: ClusterClient, flows: Sequence[FlowId], *, waits: bool
) -> dict[TopicPartition, LogmirrorError]:
    """Return the partitions that do not respond to one attempt.

    `waits`: nothing else is copied, so if none responds, they may be waited for.
    """
    found = client.try_list_offsets({flow.source for flow in flows}, LATEST)
    silent: dict[TopicPartition, LogmirrorError] = {
        partition: end for partition, end in found.items() if isinstance(end, RETRIABLE)
    }
    return {} if waits and len(silent) == len(found) else silent
