"""Driver: the loop that keeps copies up to date. Ask the source, plan, run, commit; then again.

A flow that cannot go on for now (its source or its store does not answer) waits and tries again
from its position, which it reads anew; the others go on. A flow that must not go on (corruption, a
position that makes no sense, wrong usage) stops its mirror at the next commit boundary, the end of
the tick; what then becomes of the process is said in `health`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.archive.claims import ClaimTakenError
from logmirror.cluster.client import LATEST
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.mirror.drift import DriftSchedule
from logmirror.mirror.follow import LONG_MS, SHORT_MS
from logmirror.mirror.observer import Observer
from logmirror.mirror.plan import DAY_MS, FlowState, next_daily_ms, plan
from logmirror.mirror.ports import (
    SLOT_BYTES,
    ArchiveSpec,
    EngineLostError,
    FlowId,
    PositionMovedError,
    Work,
)
from logmirror.mirror.record_lag import RecordLag
from logmirror.mirror.source_views import check_partitions, position, source_views
from logmirror.mirror.stopped import OnFatal, StoppedMirrors, Unopened, backoff_ms
from logmirror.monitoring.metrics import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.health import MirrorHealth
    from logmirror.mirror.ports import DestinationSpec, Runner, SliceResult
    from logmirror.mirror.source_views import MirrorSpec

_LOG = logging.getLogger("logmirror.mirror")

_FOR_NOW: Final = (UnavailableError, OutcomeUnknownError)
"""What waiting may mend."""

POLL_MS: Final = 250
"""Between two questions to the source. Each costs one request per broker, whatever the number of
partitions."""

DISCOVERY_MS: Final = 5_000
"""Between two looks at topics: new partitions, other incarnations, configuration."""

ATTEMPTS_UNTIL_NOW: Final = 5
"""Failures in a row after which `--until-now` gives up: about half a minute of waiting."""


class Service:
    """The mirrors of one process.

    Args:
        mirrors: What to copy.
        client: Opens, or returns the open, client of a source; driver side only.
        destination: The driver's side of a kind of destination.
        runner: Where slices are carried out.
        writer_id: Of this run.
        clock: Time.
        on_fatal: What a fatal error of one mirror means for the others.
        memory_bytes: What all slots together may hold; None: `SLOT_BYTES` each.
        observer: Is told what is done; None: nobody asks.
        hasty_client: Of a source, for what the loop can do without: it waits for seconds at most.
            None: `client`.
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
        on_fatal: OnFatal = "exit",
        memory_bytes: int | None = None,
        observer: Observer | None = None,
        hasty_client: Callable[[ConnectionSettings], ClusterClient] | None = None,
    ) -> None:
        self._mirrors, self._client = mirrors, client
        self._destination, self._runner = destination, runner
        self._writer_id, self._clock = writer_id, clock
        self._observer = observer or Observer([m.name for m in mirrors], Recorder(), clock)
        self._states: dict[FlowId, FlowState] = {}
        self._mirror_of: dict[FlowId, MirrorSpec] = {}
        self._drift = DriftSchedule(clock)
        self._record_lag = RecordLag(hasty_client or client, clock, self._observer)
        self._discovered_ms: int | None = None
        self._window_ms = SHORT_MS
        self._memory_bytes = memory_bytes
        self._stopping = self._until_now = False
        self._unopened: dict[tuple[str, str], Unopened] = {}
        """By mirror and destination; all destinations where the source is the reason: empty."""

        self._stopped = StoppedMirrors(on_fatal, [mirror.name for mirror in mirrors])

    def health(self) -> list[MirrorHealth]:
        """How each mirror is; any thread may ask."""
        return self._observer.board.mirrors()

    def stop(self) -> None:
        """Ask the loop to flush what has been seen and end; safe from a signal handler."""
        self._stopping = True
        self._runner.end_follow_windows()

    def run(self, *, until_now: bool = False) -> None:
        """Copy until `stop`; with `until_now` until the ends that were found at the start.

        Raises:
            LogmirrorError: A mirror must not go on; its kind is the process's exit code.
        """
        self._until_now = until_now
        self._copy()
        self._stopped.raise_first()

    def _copy(self) -> None:
        targets_set = False
        while True:
            self._discover()
            self._look_for_drift()
            stopping = self._stopping
            self._poll()
            self._settle()
            if targets_set or ((self._until_now or stopping) and self._all_seen()):
                self._set_targets()
                targets_set = True
            ticked = self._tick(explicit=targets_set)
            self._record_lag.look(self._states, self._mirror_of)
            self._observer.turned(self._states.values())
            if ticked:
                self._settle()
                continue
            is_done = targets_set and all(state.reached for state in self._states.values())
            if is_done and not self._unopened:
                return
            if is_done or (stopping and self._blocked()):
                self._log_unflushed()
                return
            self._clock.sleep_ms(POLL_MS)

    def _settle(self) -> None:
        """A commit boundary: forget the flows of stopped mirrors; raises if the process is over."""
        for flow in [flow for flow in self._states if flow.mirror in self._stopped]:
            del self._states[flow], self._mirror_of[flow]
        for opening in [opening for opening in self._unopened if opening[0] in self._stopped]:
            del self._unopened[opening]
        self._stopped.raise_if_over()

    # -- what there is to copy -------------------------------------------------------------------

    def _discover(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._discovered_ms is not None and now_ms - self._discovered_ms < DISCOVERY_MS:
            return
        first = self._discovered_ms is None
        by_source: dict[ConnectionSettings, list[MirrorSpec]] = defaultdict(list)
        for mirror in self._mirrors:
            if mirror.name not in self._stopped and not self._must_wait(mirror.name, ""):
                by_source[mirror.source].append(mirror)
        for source, mirrors in by_source.items():
            topics = self._describe(source, mirrors)
            for mirror in mirrors:
                if mirror.name in topics:
                    try:
                        self._discover_mirror(mirror, topics[mirror.name], first=first)
                    except LogmirrorError as error:
                        self._not_opened(mirror, "", error)
                self._settle()
        if first and not self._states:
            for unopened in self._unopened.values():
                raise unopened.error
        self._discovered_ms = now_ms

    def _describe(
        self, source: ConnectionSettings, mirrors: Sequence[MirrorSpec]
    ) -> dict[str, TopicMetadata]:
        """The topics of the mirrors of one source, by mirror, without those that cannot be had."""
        client, found = self._client(source), {}
        try:
            topics = client.describe_topics({mirror.topic for mirror in mirrors})
            found = {mirror.name: topics[mirror.topic] for mirror in mirrors}
        except _FOR_NOW as error:
            for mirror in mirrors:
                self._not_opened(mirror, "", error)
        except LogmirrorError:
            for mirror in mirrors:  # whose topic is it?
                try:
                    found[mirror.name] = client.topic(mirror.topic)
                except LogmirrorError as error:
                    self._not_opened(mirror, "", error)
        return found

    def _not_opened(self, mirror: MirrorSpec, destination: str, error: LogmirrorError) -> None:
        """A mirror, or one destination of it, could not be looked at or opened."""
        if not isinstance(error, _FOR_NOW) or (self._until_now and self._discovered_ms is None):
            self._stop_mirror(mirror.name, error)
            return
        before = self._unopened.get((mirror.name, destination))
        failures = before.failures + 1 if before else 1
        wait_ms = backoff_ms(failures)
        self._unopened[mirror.name, destination] = Unopened(
            error, self._clock.monotonic_ms() + wait_ms, failures
        )
        facts: dict[str, object] = {"mirror": mirror.name, "topic": mirror.topic}
        facts["destination"] = destination
        facts |= {"failures": failures, "retry_in_ms": wait_ms}
        self._observer.not_opened(facts, error)

    def _discover_mirror(self, mirror: MirrorSpec, topic: TopicMetadata, *, first: bool) -> None:
        client = self._client(mirror.source)
        numbers = check_partitions(mirror, topic)
        flows = [
            (FlowId(mirror=mirror.name, destination=name, topic=mirror.topic, partition=n), spec)
            for name, spec in mirror.destinations
            for n in numbers
        ]
        self._unopened.pop((mirror.name, ""), None)
        new = [flow for flow, _ in flows if flow not in self._states]
        for flow, _ in flows:
            known = self._states.get(flow)
            if known and known.topic_id != topic.topic_id:
                known.topic_id = topic.topic_id
                known.lost = True  # the next look at the destination finds the mismatch
        if new:
            configs = client.describe_topic_configs(mirror.topic)
            for name, spec in mirror.destinations:
                of_spec = [flow for flow in new if flow.destination == name]
                if of_spec and not self._must_wait(mirror.name, name):
                    try:
                        ready = self._destination(spec).prepare(
                            spec, client, topic, mirror.partitions
                        )
                        self._open_flows(mirror, ready, of_spec, topic.topic_id, configs)
                        self._unopened.pop((mirror.name, name), None)
                    except _FOR_NOW as error:
                        self._not_opened(mirror, name, error)
        opened = [flow for flow in new if flow in self._states]
        unopened = {name for of, name in self._unopened if of == mirror.name}
        self._observer.mirror_opened(mirror.name, unopened)
        if first or opened:
            self._observer.mirror_starts(mirror, [self._states[flow] for flow in opened])

    def _must_wait(self, mirror: str, destination: str) -> bool:
        unopened = self._unopened.get((mirror, destination))
        return unopened is not None and unopened.retry_at_ms > self._clock.monotonic_ms()

    def _open_flows(
        self,
        mirror: MirrorSpec,
        spec: DestinationSpec,
        flows: Sequence[FlowId],
        topic_id: bytes | None,
        configs: Mapping[str, str | None],
    ) -> None:
        destination = self._destination(spec)
        found = destination.positions(spec, flows, mirror.chain_start)
        sources = {flow.source for flow in flows}
        views = source_views(self._client(mirror.source), sources, topic_id)
        daily_s = spec.daily_at_utc_s if isinstance(spec, ArchiveSpec) else None
        for flow in flows:
            state = FlowState(
                flow=flow,
                destination=spec,
                topic_id=topic_id,
                compacted="compact" in (configs.get("cleanup.policy") or ""),
                delete_retention_ms=int(configs.get("delete.retention.ms") or DAY_MS),
                log_start=views[flow.source].log_start,
                position=destination.check(spec, flow, position(found[flow]), views[flow.source]),
                next_daily_ms=next_daily_ms(daily_s, self._clock.now_ms()),
                proven=isinstance(spec, ArchiveSpec),
            )
            self._observer.opened(state)
            destination.opened(state)
            self._mirror_of[flow], self._states[flow] = mirror, state

    # -- one tick --------------------------------------------------------------------------------

    def _poll(self) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.now_ms()
        by_source: dict[ConnectionSettings, list[FlowState]] = defaultdict(list)
        for flow, state in self._states.items():
            if not state.reached and state.retry_at_ms <= now_ms:
                by_source[self._mirror_of[flow].source].append(state)
        for source, asked in by_source.items():
            partitions = {state.flow.source for state in asked}
            try:
                ends = self._client(source).list_offsets(partitions, LATEST)
            except LogmirrorError as error:
                self._not_polled(asked, error)
                continue
            for state in asked:
                self._observe(state, ends[state.flow.source], now_ms, wall_ms)
        failpoints.reach("plan.positions")

    def _look_for_drift(self) -> None:
        for state in self._drift.due(self._states):
            try:
                state.lost |= self._destination(state.destination).drifted(state)
            except LogmirrorError as error:
                self._failed(state, error)

    def _not_polled(self, asked: Sequence[FlowState], error: LogmirrorError) -> None:
        """The ends of some flows could not be had: one by one, whose business is it?"""
        for state in [s for s in asked if s.flow.mirror not in self._stopped]:
            why: LogmirrorError = error
            if not isinstance(error, _FOR_NOW):
                client = self._client(self._mirror_of[state.flow].source)
                try:
                    client.list_offsets({state.flow.source}, LATEST)
                    continue
                except LogmirrorError as own:
                    why = own
            self._failed(state, why)

    def _observe(self, state: FlowState, end: int, now_ms: int, wall_ms: int) -> None:
        try:
            # An end below the position is looked into: is it another topic of the same name?
            if state.lost or end < state.position:
                end = self._find_position(state, self._mirror_of[state.flow])
        except LogmirrorError as error:
            self._failed(state, error)
            return
        before = (state.position, state.source_end)
        if not state.lost:
            state.observe(end, now_ms, wall_ms)
        if (state.position, state.source_end) != before:
            self._observer.saw(state)

    def _find_position(self, state: FlowState, mirror: MirrorSpec) -> int:
        """Read a flow's position anew; returns the source's end as it was after that."""
        flow, client, spec = state.flow, self._client(mirror.source), state.destination
        destination = self._destination(spec)
        found = destination.positions(spec, [flow], mirror.chain_start)
        state.topic_id = client.topic(mirror.topic).topic_id
        view = source_views(client, {flow.source}, state.topic_id)[flow.source]
        state.position = destination.check(spec, flow, position(found[flow]), view)
        state.log_start = view.log_start
        state.probed_bytes, state.probed_end = 0, state.position
        state.lost, state.proven = False, isinstance(spec, ArchiveSpec)
        state.fenced = False
        destination.opened(state)
        self._observer.saw(state)
        return view.last_stable_offset

    def _tick(self, *, explicit: bool) -> bool:
        """Run what is due; whether anything was."""
        slots = self._runner.slots
        memory_bytes = self._memory_bytes // slots if self._memory_bytes else SLOT_BYTES
        self._observer.budget(slots * memory_bytes)
        planned = plan(
            self._states.values(),
            slots=slots,
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.now_ms(),
            explicit=explicit,
        )
        self._observer.planned(self._states, {p.slice.flow for p in planned})
        if not planned:
            return False
        failpoints.reach("plan.dispatch")
        works = [
            Work(
                slice=p.slice,
                source=self._mirror_of[p.slice.flow].source,
                destination=self._states[p.slice.flow].destination,
                writer_id=self._writer_id,
                estimated_bytes=p.estimated_bytes,
                proven=self._states[p.slice.flow].proven,
                fenced=self._states[p.slice.flow].fenced,
                window_ms=0 if explicit else self._window_ms,
                memory_bytes=memory_bytes,
            )
            for p in planned
        ]
        try:
            with self._observer.ticking():
                results = self._runner.run(works)
        except EngineLostError:
            raise
        except UnavailableError as error:
            for flow in {work.slice.flow for work in works}:
                self._states[flow].lost = True
                self._failed(self._states[flow], error)
            return True
        self._observer.ran(results)
        self._commit(works, results)
        return True

    def _commit(self, works: Sequence[Work], results: Iterable[SliceResult]) -> None:
        by_flow: dict[FlowId, list[SliceResult]] = defaultdict(list)
        for result in results:
            by_flow[result.slice.flow].append(result)
        works_of: dict[FlowId, list[Work]] = defaultdict(list)
        for work in works:
            works_of[work.slice.flow].append(work)
        for flow, of_flow in by_flow.items():
            state = self._states[flow]
            destination = self._destination(state.destination)
            error = destination.commit(state, works_of[flow], of_flow)
            self._observer.saw(state)
            if error is None:
                state.failures, state.retry_at_ms = 0, 0
                self._observer.committed(state)
            elif isinstance(error, ClaimTakenError | PositionMovedError):
                state.lost = True
                self._observer.conflict(flow)
            else:
                state.lost = True
                self._failed(state, error)
        if any(result.error for of_flow in by_flow.values() for result in of_flow):
            self._window_ms = SHORT_MS
        else:
            self._window_ms = self._longer_window_ms()

    def _longer_window_ms(self) -> int:
        """Leases grow while nobody waits for their end: a flow into files, or one that failed."""
        others_wait = any(
            isinstance(state.destination, ArchiveSpec) or state.lost or state.failures
            for state in self._states.values()
        )
        return SHORT_MS if others_wait else min(2 * self._window_ms, LONG_MS)

    # -- waiting and ending ----------------------------------------------------------------------

    def _failed(self, state: FlowState, error: LogmirrorError) -> None:
        """Something of a flow failed: it waits, or its mirror stops."""
        if not isinstance(error, _FOR_NOW):
            self._stop_mirror(state.flow.mirror, error, state.flow)
            return
        state.failures += 1
        wait_ms = backoff_ms(state.failures)
        state.retry_at_ms = self._clock.monotonic_ms() + wait_ms
        if state.target is not None and state.failures >= ATTEMPTS_UNTIL_NOW:
            self._stop_mirror(state.flow.mirror, error, state.flow)
            return
        self._observer.waits(state, error, wait_ms)

    def _stop_mirror(self, mirror: str, error: LogmirrorError, flow: FlowId | None = None) -> None:
        """Let a mirror end at the next commit boundary; only its first error counts."""
        if mirror not in self._stopped:
            self._stopped.add(mirror, error)
            topic = next(spec.topic for spec in self._mirrors if spec.name == mirror)
            self._observer.stopped(mirror, topic, error, flow)

    def _log_unflushed(self) -> None:
        for mirror in self._mirrors:
            flows = [s for f, s in self._states.items() if f.mirror == mirror.name and s.pending]
            if flows or any(name == mirror.name for name, _ in self._unopened):
                facts = {"mirror": mirror.name, "topic": mirror.topic, "flows": len(flows)}
                _LOG.warning(
                    "stopped with flows that could not be flushed: they wait at the source",
                    extra={"facts": facts},
                )

    def _all_seen(self) -> bool:
        return all(state.source_end >= 0 for state in self._states.values())

    def _set_targets(self) -> None:
        """Each flow ends where its source ended when it was first seen."""
        for state in self._states.values():
            if state.target is None:
                state.target = max(state.source_end, state.position)

    def _blocked(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        waiting = [s for s in self._states.values() if not s.reached]
        return all(s.retry_at_ms > now_ms for s in waiting)
