"""`logmirror groups`: consumer groups of the source, translated to the replicas in other clusters.

    committed offsets at the source -> translation -> plan -> commits at the destination

A plan only reads. What it commits is never before the offset that the destination has, and `apply`
reads each commit back. Groups with members at the destination are not touched: the coordinator
refuses such a commit. With `OffsetsFrom`, the committed offsets are those of an archive's snapshot,
and the source is not contacted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from logmirror.app.archived_offsets import NO_SYNCS, STALE, archived, needed
from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.specs import mirror_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST
from logmirror.cluster.groups import GroupOffset
from logmirror.errors import LogmirrorError, UsageError
from logmirror.groups.replica_logs import (
    CONSUMERS,
    NO_EPOCH,
    Replica,
    described,
    logs,
    topic_ids,
    translation,
)
from logmirror.groups.replicas import SyncReader
from logmirror.groups.resume import BUDGET_MS, ResumeReader
from logmirror.groups.target_sync import UNCHANGED, compared
from logmirror.groups.translation import Translated
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.source_views import check_partitions
from logmirror.model import TopicPartition
from logmirror.reports import GroupOutcome, GroupPlan, GroupStep
from logmirror.source.compare import chunks
from logmirror.source.partition import KafkaSource
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import syncs_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from logmirror.app.archived_offsets import Archived, OffsetsFrom
    from logmirror.archive.group_offsets import Snapshot
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import GroupListing
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.settings import Settings
    from logmirror.groups.offset_syncs import SyncIndex
    from logmirror.groups.translation import Log
    from logmirror.mirror.source_views import MirrorSpec

_ACTIVE: Final = "the group has members at the destination; stop them first"
_HAS_MEMBERS: Final = ("UNKNOWN_MEMBER_ID", "NON_EMPTY_GROUP", "GROUP_SUBSCRIBED_TO_TOPIC")
"""Refusals of a change while a group has members."""

_Wanted = dict["TopicPartition", Any]

_OnProgress: TypeAlias = "Callable[[int, int], None]"
"""Receives how many steps are done, and how many there are."""

_COUNT_MS: Final = 60_000
"""How long a plan counts records; further rows are not counted."""


def plan_groups(
    settings: Settings,
    groups: Collection[str] = (),
    offsets_from: OffsetsFrom | None = None,
    on_progress: _OnProgress | None = None,
) -> list[GroupPlan]:
    """Return the plan of each group for each destination; see `logmirror.plan_groups`."""
    specs = mirror_specs(settings)
    snapshots = needed(specs, offsets_from) if offsets_from is not None else None
    clients = Clients(COMMAND_BUDGET_MS)
    steps = _Steps(on_progress)
    try:
        plans = list(_Planning(specs, clients, steps, snapshots).plans(groups))
    finally:
        clients.close()
    if missing := set(groups) - {plan.group for plan in plans}:
        raise UsageError(
            "no such group has committed offsets of a mirrored partition", groups=sorted(missing)
        )
    return plans


class _Steps:
    """Counts the steps of a command: offsets of a group that are read, planned or committed."""

    def __init__(self, on_progress: _OnProgress | None) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def expect(self, count: int) -> None:
        """Count steps that will be done."""
        self._total += count

    def done(self) -> None:
        """Count one that was done."""
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


class _Planning:
    """The requests of one plan."""

    def __init__(
        self,
        specs: Sequence[MirrorSpec],
        clients: Clients,
        steps: _Steps,
        snapshots: dict[str, Snapshot] | None = None,
    ) -> None:
        self._specs, self._clients, self._steps = specs, clients, steps
        self._snapshots = snapshots
        self._numbers: dict[str, Sequence[int]] = {}
        self._decoder = RecordDecoder()
        self._count_until_ms = SYSTEM_CLOCK.monotonic_ms() + _COUNT_MS
        self._links: dict[tuple[ConnectionSettings, str, ConnectionSettings], list[Replica]] = (
            defaultdict(list)
        )
        for spec in specs:
            written = {name: one for name, one in spec.destinations if isinstance(one, KafkaSpec)}
            for name, one in written.items():
                numbers = self._partitions(spec)
                self._links[spec.source, name, one.cluster] += [
                    Replica.of(spec.name, TopicPartition(spec.topic, number), one)
                    for number in numbers
                ]

    def _partitions(self, spec: MirrorSpec) -> Sequence[int]:
        """Return the partitions of a mirror, with a snapshot those that it had then."""
        if self._snapshots is not None:
            return spec.partitions or sorted(self._snapshots[spec.name].header.positions)
        if spec.name not in self._numbers:
            topic = self._clients(spec.source).topic(spec.topic)
            self._numbers[spec.name] = check_partitions(spec, topic)
        return self._numbers[spec.name]

    def plans(self, groups: Collection[str]) -> Iterator[GroupPlan]:
        """Yield the plans by destination and group."""
        offsets: dict[ConnectionSettings, _Offsets] = {}
        snapshots = archived(self._specs, self._snapshots or {}, groups)
        left_ms: float = BUDGET_MS
        for (source, name, destination), replicas in self._links.items():
            held = snapshots.get(source)
            if source not in offsets:
                offsets[source] = (
                    self._held(source, held) if held else self._committed(source, groups)
                )
            there = self._clients(destination)
            states = {listing.group: listing.state for listing in there.groups.listed()}
            syncs = self._read_syncs(source, name, replicas)  # before the log ends
            targets = {replica.target for replica in replicas}
            topics = described(there, {one.topic for one in targets})
            bounds, ids = logs(there, topics, targets), topic_ids(topics)
            resume = ResumeReader(there, self._decoder, SYSTEM_CLOCK, left_ms)
            cluster_id = there.cluster_id()
            for listing, committed in offsets[source].items():
                mine = [replica for replica in replicas if replica.source in committed]
                if mine:
                    current = there.groups.offsets(
                        listing.group, [replica.target for replica in mine]
                    )
                    client = self._clients(source) if held is None else None
                    stale = frozenset() if held is None else held.stale
                    view = _View(
                        client, listing.group, committed, current, bounds, syncs, ids, stale, resume
                    )
                    yield GroupPlan(
                        group=listing.group,
                        destination=name,
                        cluster_id=cluster_id,
                        source_state=listing.state,
                        target_state=states.get(listing.group, ""),
                        as_of_ms=None if held is None else held.as_of_ms,
                        steps=tuple(self._step(replica, view) for replica in mine),
                    )
                self._steps.done()
            left_ms = resume.left_ms

    def _committed(self, source: ConnectionSettings, groups: Collection[str]) -> _Offsets:
        """Return all committed offsets of the groups of consumers."""
        client = self._clients(source)
        listings = [
            listing
            for listing in client.groups.listed()
            if listing.protocol_type in CONSUMERS and (not groups or listing.group in groups)
        ]
        self._steps.expect(len(listings) * (1 + self._link_count(source)))
        found: _Offsets = {}
        for listing in listings:
            found[listing] = client.groups.all_offsets(listing.group)
            self._steps.done()
        return found

    def _held(self, source: ConnectionSettings, held: Archived) -> _Offsets:
        """Return the committed offsets of a snapshot."""
        self._steps.expect(len(held.committed) * self._link_count(source))
        return held.committed

    def _link_count(self, source: ConnectionSettings) -> int:
        return sum(one == source for one, _, _ in self._links)

    def _step(self, replica: Replica, view: _View) -> GroupStep:
        committed, current = view.committed[replica.source], view.current[replica.target]
        if view.source is None and replica.written.offsets == "translate":
            found = Translated(None, committed.offset, NO_SYNCS)
        else:
            log = view.logs.get(replica.target)
            topic_id = view.topic_ids.get(replica.target.topic)
            found = translation(replica, committed.offset, log, view.syncs, topic_id)
        is_stale = (view.group, replica.source) in view.stale
        step = GroupStep(
            mirror=replica.mirror,
            topic=replica.source.topic,
            partition=replica.source.partition,
            target_topic=replica.written.topic,
            source_offset=committed.offset,
            target_offset=found.offset,
            current_offset=None if current is None else current.offset,
            metadata=committed.metadata,
            current_metadata="" if current is None else current.metadata,
            reason=found.reason or (STALE if is_stale else ""),
        )
        if found.offset is None:
            return step
        next_offset = max(found.offset, step.current_offset or 0)
        step = replace(step, next_record=view.resume.at(replica.target, next_offset))
        if found.read_again_from >= committed.offset:
            return step
        if view.source is None:
            return replace(step, read_again=None)
        count = self._count(view.source, replica.source, found.read_again_from, committed.offset)
        return replace(step, read_again=count)

    def _count(
        self, client: ClusterClient, partition: TopicPartition, first: int, end: int
    ) -> int | None:
        """Return how many visible records the source has in first..end-1; None: time is over."""
        log = KafkaSource(client, partition, topic_id=None)
        start = client.list_offsets([partition], EARLIEST)[partition]
        found = 0
        for table, _ in chunks(log, self._decoder, max(first, start), end):
            found += table.num_rows
            if SYSTEM_CLOCK.monotonic_ms() > self._count_until_ms:
                return None
        return found

    def _read_syncs(
        self, source: ConnectionSettings, destination: str, replicas: Iterable[Replica]
    ) -> Mapping[TopicPartition, SyncIndex]:
        """Return the offset syncs of a destination; none if all its replicas keep their offsets."""
        if self._snapshots is not None:
            return {}
        if all(replica.written.offsets == "preserve" for replica in replicas):
            return {}
        reader = SyncReader(self._clients(source), syncs_topic(destination), self._decoder)
        reader.refresh()
        return reader.indexes


class _View(NamedTuple):
    """What both clusters have of one group."""

    source: ClusterClient | None
    """None: the offsets are from a snapshot."""
    group: str
    committed: Mapping[TopicPartition, GroupOffset]
    """At the source."""
    current: Mapping[TopicPartition, GroupOffset | None]
    """At the destination."""
    logs: Mapping[TopicPartition, Log]
    """Of the destination's partitions that exist."""
    syncs: Mapping[TopicPartition, SyncIndex]
    topic_ids: Mapping[str, bytes | None]
    """Of the destination's topics."""
    stale: Collection[tuple[str, TopicPartition]]
    resume: ResumeReader


_Offsets = dict["GroupListing", dict["TopicPartition", GroupOffset]]


# -- changes ---------------------------------------------------------------------------------------


def apply_groups(
    settings: Settings, plans: Iterable[GroupPlan], on_progress: _OnProgress | None = None
) -> list[GroupOutcome]:
    """Commit what plans say; see `logmirror.apply_groups`."""
    return _changed(settings, plans, _apply, _Steps(on_progress))


def rollback_groups(
    settings: Settings, plans: Iterable[GroupPlan], on_progress: _OnProgress | None = None
) -> list[GroupOutcome]:
    """Restore what there was before; see `logmirror.rollback_groups`."""
    return _changed(settings, plans, _roll_back, _Steps(on_progress))


def _changed(
    settings: Settings,
    plans: Iterable[GroupPlan],
    change: Callable[[ClusterClient, GroupPlan], list[GroupOutcome]],
    steps: _Steps,
) -> list[GroupOutcome]:
    plans = list(plans)
    steps.expect(len(plans))
    clusters = {
        name: written.cluster
        for spec in mirror_specs(settings)
        for name, written in spec.destinations
        if isinstance(written, KafkaSpec)
    }
    clients = Clients(COMMAND_BUDGET_MS)
    outcomes: list[GroupOutcome] = []
    try:
        for plan in plans:
            outcomes += change(_client_of(plan, clusters, clients), plan)
            steps.done()
    finally:
        clients.close()
    return outcomes


def _client_of(
    plan: GroupPlan, clusters: Mapping[str, ConnectionSettings], clients: Clients
) -> ClusterClient:
    if plan.destination not in clusters:
        raise UsageError(
            "the plan has a destination that the configuration does not have",
            destination=plan.destination,
            destinations=sorted(clusters),
        )
    client = clients(clusters[plan.destination])
    if (found := client.cluster_id()) != plan.cluster_id:
        raise UsageError(
            "the plan was made for another cluster",
            hint="make a new plan",
            destination=plan.destination,
            expected=plan.cluster_id,
            found=found,
        )
    return client


def _apply(client: ClusterClient, plan: GroupPlan) -> list[GroupOutcome]:
    wanted = {_target(step): step for step in plan.steps}
    current = client.groups.offsets(plan.group, wanted)
    due: dict[TopicPartition, GroupOffset] = {}
    reasons: dict[TopicPartition, str] = {}
    for partition, step in wanted.items():
        now = _offset(current[partition])
        if step.target_offset is None:
            reasons[partition] = step.reason
        elif reason := compared(step.target_offset, now):
            reasons[partition] = reason
        elif now != step.current_offset:
            reasons[partition] = "the group has committed since the plan was made"
        else:
            due[partition] = GroupOffset(step.target_offset, NO_EPOCH, step.metadata)
    reasons |= _refused(plan.group, due, client.groups.commit)
    found = client.groups.offsets(plan.group, wanted)
    return [
        _outcome(plan, step, _offset(found[partition]), reasons.get(partition, ""))
        for partition, step in wanted.items()
    ]


def _roll_back(client: ClusterClient, plan: GroupPlan) -> list[GroupOutcome]:
    wanted = {_target(step): step for step in plan.steps if step.is_committed}
    current = client.groups.offsets(plan.group, wanted)
    before: dict[TopicPartition, GroupOffset] = {}
    new: list[TopicPartition] = []
    reasons: dict[TopicPartition, str] = {}
    for partition, step in wanted.items():
        if _offset(current[partition]) == step.current_offset:
            reasons[partition] = UNCHANGED
        elif _offset(current[partition]) != step.target_offset:
            reasons[partition] = "the group has committed since the plan was applied"
        elif step.current_offset is None:
            new.append(partition)
        else:
            before[partition] = GroupOffset(step.current_offset, NO_EPOCH, step.current_metadata)
    reasons |= _refused(plan.group, before, client.groups.commit)
    reasons |= _refused(plan.group, dict.fromkeys(new), client.groups.delete_offsets)
    found = client.groups.offsets(plan.group, wanted)
    return [
        GroupOutcome(
            group=plan.group,
            destination=plan.destination,
            target_topic=step.target_topic,
            partition=step.partition,
            offset=_offset(found[partition]),
            is_done=_offset(found[partition]) == step.current_offset,
            reason=reasons.get(partition, ""),
        )
        for partition, step in wanted.items()
    ]


def _refused(
    group: str,
    wanted: _Wanted,
    send: Callable[[str, _Wanted], Mapping[TopicPartition, LogmirrorError | None]],
) -> dict[TopicPartition, str]:
    """Send a change; return why partitions were refused. One partition does not affect others."""
    if not wanted:
        return {}
    try:
        errors = send(group, wanted)
    except LogmirrorError as error:
        errors = dict.fromkeys(wanted, error)
    return {
        partition: _ACTIVE if error.facts.get("error") in _HAS_MEMBERS else error.message
        for partition, error in errors.items()
        if error is not None
    }


def _target(step: GroupStep) -> TopicPartition:
    return TopicPartition(step.target_topic, step.partition)


def _offset(committed: GroupOffset | None) -> int | None:
    return None if committed is None else committed.offset


def _outcome(plan: GroupPlan, step: GroupStep, offset: int | None, reason: str) -> GroupOutcome:
    is_there = step.target_offset is not None and offset is not None
    is_done = is_there and offset >= step.target_offset  # type: ignore[operator]  # both are numbers
    return GroupOutcome(
        group=plan.group,
        destination=plan.destination,
        target_topic=step.target_topic,
        partition=step.partition,
        offset=offset,
        is_done=is_done,
        reason=reason,
    )
