"""Driver: the loop that keeps copies up to date. Ask the source, plan, run, commit; then again.

A flow that cannot go on for now (its source or its store does not answer) waits and tries again
from its position, which it reads anew; the others go on. A flow that must not go on (corruption, a
position that makes no sense, wrong usage) ends the process at the next commit boundary with the
kind of its error.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror import crashpoints
from logmirror.archive.claims import ClaimTakenError
from logmirror.clock import Clock, jittered_ms
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError, UsageError
from logmirror.mirror.drift import DriftSchedule
from logmirror.mirror.leases import LONG_MS, SHORT_MS
from logmirror.mirror.plan import FlowState, next_daily_ms, plan
from logmirror.mirror.ports import (
    ArchiveSpec,
    EngineLostError,
    FlowId,
    KafkaSpec,
    PositionMovedError,
    SourceView,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.ports import ChainStart, DestinationSpec, Runner, SliceResult
    from logmirror.model import TopicPartition

_LOG = logging.getLogger("logmirror.mirror")

POLL_MS: Final = 250
"""Between two questions to the source. Each costs one request per broker, whatever the number of
partitions."""

DISCOVERY_MS: Final = 5_000
"""Between two looks at topics: new partitions, other incarnations, configuration."""

BACKOFF_MS: Final = (1_000, 60_000)
"""First and longest wait of a flow that failed for now."""

ATTEMPTS_UNTIL_NOW: Final = 5
"""Failures in a row after which `--until-now` gives up: about half a minute of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSpec:
    """One mirror as the loop sees it: addresses and rules, no secrets spelled out."""

    name: str
    source: ConnectionSettings
    topic: str
    partitions: tuple[int, ...] | None
    """None: all, also those that appear later."""

    destinations: tuple[tuple[str, DestinationSpec], ...]
    """Effective name, and how the copy is written there."""

    chain_start: ChainStart


class Service:
    """The mirrors of one process.

    Args:
        mirrors: What to copy.
        client: Opens, or returns the open, client of a source; driver side only.
        destination: The driver's side of a kind of destination.
        runner: Where slices are carried out.
        writer_id: Of this run.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each port once
        self,
        mirrors: Sequence[MirrorSpec],
        *,
        client: Callable[[ConnectionSettings], ClusterClient],
        destination: Callable[[DestinationSpec], Destination],
        runner: Runner,
        writer_id: str,
        clock: Clock,
    ) -> None:
        self._mirrors, self._client = mirrors, client
        self._destination, self._runner = destination, runner
        self._writer_id, self._clock = writer_id, clock
        self._states: dict[FlowId, FlowState] = {}
        self._mirror_of: dict[FlowId, MirrorSpec] = {}
        self._drift = DriftSchedule(clock)
        self._discovered_ms: int | None = None
        self._lease_ms = SHORT_MS
        self._stopping = False

    def stop(self) -> None:
        """Ask the loop to flush what has been seen and end; safe from a signal handler."""
        self._stopping = True
        self._runner.end_leases()

    def run(self, *, until_now: bool = False) -> None:
        """Copy until `stop`; with `until_now` until the ends that were found at the start.

        Raises:
            LogmirrorError: A flow must not go on; its kind is the process's exit code.
        """
        targets_set = False
        while True:
            self._discover()
            self._look_for_drift()
            stopping = self._stopping
            self._poll()
            if (until_now or stopping) and not targets_set and self._all_seen():
                self._set_targets()
                targets_set = True
            if self._tick(explicit=targets_set):
                continue
            if targets_set and all(state.reached for state in self._states.values()):
                return
            if stopping and self._blocked():
                _LOG.warning(
                    "stopped with flows that could not be flushed: they wait at the source"
                )
                return
            self._clock.sleep_ms(POLL_MS)

    # -- what there is to copy -------------------------------------------------------------------

    def _discover(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._discovered_ms is not None and now_ms - self._discovered_ms < DISCOVERY_MS:
            return
        first = self._discovered_ms is None
        by_source: dict[ConnectionSettings, list[MirrorSpec]] = defaultdict(list)
        for mirror in self._mirrors:
            by_source[mirror.source].append(mirror)
        for source, mirrors in by_source.items():
            try:
                topics = self._client(source).describe_topics({m.topic for m in mirrors})
                for mirror in mirrors:
                    self._discover_mirror(mirror, topics[mirror.topic], first=first)
            except UnavailableError as error:
                if first:
                    raise
                facts = {**error.facts, "error": error.message, "mirrors": len(mirrors)}
                _LOG.warning("cluster not reached", extra={"facts": facts})
        self._discovered_ms = now_ms

    def _discover_mirror(self, mirror: MirrorSpec, topic: TopicMetadata, *, first: bool) -> None:
        client = self._client(mirror.source)
        numbers = check_partitions(mirror, topic)
        flows = [
            (FlowId(mirror=mirror.name, destination=name, topic=mirror.topic, partition=n), spec)
            for name, spec in mirror.destinations
            for n in numbers
        ]
        new = [(flow, spec) for flow, spec in flows if flow not in self._states]
        for flow, _ in flows:
            known = self._states.get(flow)
            if known and known.topic_id != topic.topic_id:
                known.topic_id = topic.topic_id
                known.lost = True  # the next look at the destination finds the mismatch
        if new:
            policy = client.describe_topic_configs(mirror.topic).get("cleanup.policy") or ""
            for name, spec in mirror.destinations:
                destination = self._destination(spec)
                ready = destination.prepare(spec, client, topic, mirror.partitions)
                of_spec = [flow for flow, _ in new if flow.destination == name]
                self._open_flows(mirror, ready, of_spec, topic.topic_id, "compact" in policy)
        if first or new:
            self._log_start(mirror, [flow for flow, _ in new])

    def _open_flows(
        self,
        mirror: MirrorSpec,
        spec: DestinationSpec,
        flows: Sequence[FlowId],
        topic_id: bytes | None,
        compacted: bool,  # one caller, next to this
    ) -> None:
        destination = self._destination(spec)
        found = destination.positions(spec, flows, mirror.chain_start)
        sources = {flow.source for flow in flows}
        views = source_views(self._client(mirror.source), sources, topic_id)
        daily_s = spec.daily_at_utc_s if isinstance(spec, ArchiveSpec) else None
        for flow in flows:
            self._mirror_of[flow] = mirror
            self._states[flow] = state = FlowState(
                flow=flow,
                destination=spec,
                topic_id=topic_id,
                compacted=compacted,
                position=destination.check(spec, flow, position(found[flow]), views[flow.source]),
                next_daily_ms=next_daily_ms(daily_s, self._clock.now_ms()),
                proven=isinstance(spec, ArchiveSpec),
            )
            destination.opened(state)

    def _log_start(self, mirror: MirrorSpec, flows: Sequence[FlowId]) -> None:
        _LOG.info(
            "mirror starts",
            extra={
                "facts": {
                    "mirror": mirror.name,
                    "topic": mirror.topic,
                    "partitions": len({flow.partition for flow in flows}),
                    "destinations": [name for name, _ in mirror.destinations],
                    "formats": [_format(spec) for _, spec in mirror.destinations],
                    "position": sum(self._states[flow].position for flow in flows),
                }
            },
        )

    # -- one tick --------------------------------------------------------------------------------

    def _poll(self) -> None:
        now_ms = self._clock.monotonic_ms()
        by_source: dict[ConnectionSettings, list[FlowState]] = defaultdict(list)
        for flow, state in self._states.items():
            if not state.reached and state.retry_at_ms <= now_ms:
                by_source[self._mirror_of[flow].source].append(state)
        for source, asked in by_source.items():
            partitions = {state.flow.source for state in asked}
            try:
                ends = self._client(source).list_offsets(partitions, LATEST)
            except (UnavailableError, OutcomeUnknownError) as error:
                for state in asked:
                    self._retry_later(state, error)
                continue
            for state in asked:
                self._observe(state, ends[state.flow.source], now_ms)
        crashpoints.reach("plan.positions")

    def _look_for_drift(self) -> None:
        for state in self._drift.due(self._states):
            try:
                state.lost |= self._destination(state.destination).drifted(state)
            except (UnavailableError, OutcomeUnknownError) as error:
                self._retry_later(state, error)

    def _observe(self, state: FlowState, end: int, now_ms: int) -> None:
        try:
            # An end below the position is looked into: is it another topic of the same name?
            if state.lost or end < state.position:
                end = self._find_position(state, self._mirror_of[state.flow])
        except (UnavailableError, OutcomeUnknownError) as error:
            self._retry_later(state, error)
            return
        if not state.lost:
            state.observe(end, now_ms)

    def _find_position(self, state: FlowState, mirror: MirrorSpec) -> int:
        """Read a flow's position anew; returns the source's end as it was after that."""
        flow, client, spec = state.flow, self._client(mirror.source), state.destination
        destination = self._destination(spec)
        found = destination.positions(spec, [flow], mirror.chain_start)
        state.topic_id = client.topic(mirror.topic).topic_id
        view = source_views(client, {flow.source}, state.topic_id)[flow.source]
        state.position = destination.check(spec, flow, position(found[flow]), view)
        state.probed_bytes, state.probed_end = 0, state.position
        state.lost, state.proven = False, isinstance(spec, ArchiveSpec)
        destination.opened(state)
        return view.stable_end

    def _tick(self, *, explicit: bool) -> bool:
        """Run what is due; whether anything was."""
        planned = plan(
            self._states.values(),
            slots=self._runner.slots,
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.now_ms(),
            explicit=explicit,
        )
        if not planned:
            return False
        crashpoints.reach("plan.dispatch")
        works = [
            Work(
                slice=p.slice,
                source=self._mirror_of[p.slice.flow].source,
                destination=self._states[p.slice.flow].destination,
                writer_id=self._writer_id,
                estimated_bytes=p.estimated_bytes,
                proven=self._states[p.slice.flow].proven,
                lease_ms=0 if explicit else self._lease_ms,
            )
            for p in planned
        ]
        try:
            results = self._runner.run(works)
        except EngineLostError:
            raise
        except UnavailableError as error:
            for flow in {work.slice.flow for work in works}:
                self._states[flow].lost = True
                self._retry_later(self._states[flow], error)
            return True
        self._commit(works, results)
        return True

    def _commit(self, works: Sequence[Work], results: Iterable[SliceResult]) -> None:
        by_flow: dict[FlowId, list[SliceResult]] = defaultdict(list)
        for result in results:
            by_flow[result.slice.flow].append(result)
        works_of: dict[FlowId, list[Work]] = defaultdict(list)
        for work in works:
            works_of[work.slice.flow].append(work)
        fatal: list[LogmirrorError] = []
        for flow, of_flow in by_flow.items():
            state = self._states[flow]
            destination = self._destination(state.destination)
            error = destination.commit(state, works_of[flow], of_flow)
            if error is None:
                state.failures, state.retry_at_ms = 0, 0
            elif isinstance(error, ClaimTakenError | PositionMovedError):
                state.lost = True
            elif isinstance(error, UnavailableError | OutcomeUnknownError):
                state.lost = True
                self._retry_later(state, error)
            else:
                fatal.append(error)
        if any(result.error for of_flow in by_flow.values() for result in of_flow):
            self._lease_ms = SHORT_MS
        else:
            self._lease_ms = self._longer_lease_ms()
        for error in fatal:
            _LOG.error("flow stopped: %s", error.message, extra={"facts": error.facts})
        if fatal:
            raise fatal[0]

    def _longer_lease_ms(self) -> int:
        """Leases grow while nobody waits for their end: a flow into files, or one that failed."""
        others_wait = any(
            isinstance(state.destination, ArchiveSpec) or state.lost or state.failures
            for state in self._states.values()
        )
        return SHORT_MS if others_wait else min(2 * self._lease_ms, LONG_MS)

    # -- waiting and ending ----------------------------------------------------------------------

    def _retry_later(self, state: FlowState, error: LogmirrorError) -> None:
        state.failures += 1
        first_ms, longest_ms = BACKOFF_MS
        wait_ms = jittered_ms(min(first_ms * 2 ** (state.failures - 1), longest_ms))
        state.retry_at_ms = self._clock.monotonic_ms() + int(wait_ms)
        if state.target is not None and state.failures >= ATTEMPTS_UNTIL_NOW:
            raise error
        _LOG.warning(
            "flow waits: %s",
            error.message,
            extra={
                "facts": {
                    **error.facts,
                    "mirror": state.flow.mirror,
                    "destination": state.flow.destination,
                    "topic": state.flow.topic,
                    "partition": state.flow.partition,
                    "failures": state.failures,
                    "retry_in_ms": int(wait_ms),
                }
            },
        )

    def _all_seen(self) -> bool:
        return all(state.source_end >= 0 for state in self._states.values())

    def _set_targets(self) -> None:
        for state in self._states.values():
            state.target = max(state.source_end, state.position)

    def _blocked(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        waiting = [s for s in self._states.values() if not s.reached]
        return all(s.retry_at_ms > now_ms for s in waiting)


def check_partitions(mirror: MirrorSpec, topic: TopicMetadata) -> Sequence[int]:
    """The partitions that a mirror copies of its topic.

    Raises:
        UsageError: The topic has no such partition.
    """
    numbers = sorted(topic.partitions) if mirror.partitions is None else mirror.partitions
    missing = [n for n in numbers if n not in topic.partitions]
    if missing:
        raise UsageError(
            "the topic has no such partition",
            hint="correct `partition` or `partitions` of the mirror",
            mirror=mirror.name,
            topic=mirror.topic,
            missing=missing,
            partition_count=len(topic.partitions),
        )
    return numbers


def position(found: int | LogmirrorError | None) -> int | None:
    """A position that was found; raises the error that was found instead."""
    if isinstance(found, LogmirrorError):
        raise found
    return found


def _format(spec: DestinationSpec) -> str:
    return "kafka" if isinstance(spec, KafkaSpec) else spec.format


def source_views(
    client: ClusterClient, partitions: set[TopicPartition], topic_id: bytes | None
) -> dict[TopicPartition, SourceView]:
    """What the source says of these partitions of one topic now."""
    starts = client.list_offsets(partitions, EARLIEST)
    ends = client.list_offsets(partitions, LATEST)
    return {
        partition: SourceView(
            topic_id=topic_id, log_start=starts[partition], stable_end=ends[partition]
        )
        for partition in partitions
    }
