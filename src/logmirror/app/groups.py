"""`logmirror groups`: consumer groups of the source, translated to the replicas in other clusters.

    committed offsets at the source -> translation -> plan -> commits at the destination

A plan only reads. What it commits is never before the offset that the destination has, and `apply`
reads each commit back. Groups with members at the destination are not touched: the coordinator
refuses such a commit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.specs import mirror_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.cluster.groups import GroupOffset
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, UsageError
from logmirror.groups.offset_syncs import OffsetSyncs
from logmirror.groups.translation import Log, Translated, preserved, translated
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.source_views import check_partitions
from logmirror.model import TopicPartition
from logmirror.reports import GroupOutcome, GroupPlan, GroupStep
from logmirror.source.compare import chunks
from logmirror.source.partition import KafkaSource
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import syncs_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import GroupListing
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.settings import Settings
    from logmirror.groups.offset_syncs import SyncIndex
    from logmirror.mirror.source_views import MirrorSpec

_CONSUMERS: Final = ("consumer", "")
"""Protocol types of groups that commit offsets of their own topics."""

_ACTIVE: Final = "the group has members at the destination; stop them first"
_HAS_MEMBERS: Final = ("UNKNOWN_MEMBER_ID", "NON_EMPTY_GROUP", "GROUP_SUBSCRIBED_TO_TOPIC")
"""Refusals of a change while a group has members."""

_NO_EPOCH: Final = -1
"""Leader epochs of the source mean nothing at the destination: a consumer would loop on one."""

_Wanted = dict["TopicPartition", Any]

_COUNT_MS: Final = 60_000
"""How long a plan counts records; further rows are not counted."""


def plan_groups(settings: Settings, groups: Collection[str] = ()) -> list[GroupPlan]:
    """Return the plan of each group for each destination; see `logmirror.plan_groups`."""
    clients = Clients(COMMAND_BUDGET_MS)
    try:
        plans = list(_Planning(mirror_specs(settings), clients).plans(groups))
    finally:
        clients.close()
    if missing := set(groups) - {plan.group for plan in plans}:
        raise UsageError(
            "no such group has committed offsets of a mirrored partition", groups=sorted(missing)
        )
    return plans


class _Copy(NamedTuple):
    """A partition and its replica."""

    mirror: str
    source: TopicPartition
    written: KafkaSpec

    @property
    def target(self) -> TopicPartition:
        """The partition at the destination."""
        return TopicPartition(self.written.topic, self.source.partition)


class _Planning:
    """The requests of one plan."""

    def __init__(self, specs: Iterable[MirrorSpec], clients: Clients) -> None:
        self._clients = clients
        self._decoder: RecordDecoder | None = None
        self._count_until_ms = SYSTEM_CLOCK.monotonic_ms() + _COUNT_MS
        self._links: dict[tuple[ConnectionSettings, str, ConnectionSettings], list[_Copy]] = (
            defaultdict(list)
        )
        for spec in specs:
            written = {name: one for name, one in spec.destinations if isinstance(one, KafkaSpec)}
            numbers = check_partitions(spec, clients(spec.source).topic(spec.topic))
            for name, one in written.items():
                self._links[spec.source, name, one.cluster] += [
                    _Copy(spec.name, TopicPartition(spec.topic, number), one) for number in numbers
                ]

    def plans(self, groups: Collection[str]) -> Iterator[GroupPlan]:
        """Yield the plans by destination and group."""
        offsets: dict[ConnectionSettings, _Offsets] = {}
        for (source, name, destination), copies in self._links.items():
            if source not in offsets:
                offsets[source] = _committed(self._clients(source), groups)
            there = self._clients(destination)
            states = {listing.group: listing.state for listing in there.groups.listed()}
            logs = _logs(there, {copy.target for copy in copies})
            cluster_id = there.cluster_id()
            syncs = None
            for listing, committed in offsets[source].items():
                mine = [copy for copy in copies if copy.source in committed]
                if mine and syncs is None:
                    syncs = self._read_syncs(source, name, copies)
                if mine and syncs is not None:
                    current = there.groups.offsets(listing.group, [copy.target for copy in mine])
                    view = _View(self._clients(source), committed, current, logs, syncs)
                    yield GroupPlan(
                        group=listing.group,
                        destination=name,
                        cluster_id=cluster_id,
                        source_state=listing.state,
                        target_state=states.get(listing.group, ""),
                        steps=tuple(self._step(copy, view) for copy in mine),
                    )

    def _step(self, copy: _Copy, view: _View) -> GroupStep:
        committed, current = view.committed[copy.source], view.current[copy.target]
        found = _translated(copy, view)
        step = GroupStep(
            mirror=copy.mirror,
            topic=copy.source.topic,
            partition=copy.source.partition,
            target_topic=copy.written.topic,
            source_offset=committed.offset,
            target_offset=found.offset,
            current_offset=None if current is None else current.offset,
            metadata=committed.metadata,
            current_metadata="" if current is None else current.metadata,
            reason=found.reason,
        )
        if step.target_offset is None or found.read_again_from >= committed.offset:
            return step
        count = self._count(view.source, copy.source, found.read_again_from, committed.offset)
        return replace(step, read_again=count)

    def _count(
        self, client: ClusterClient, partition: TopicPartition, first: int, end: int
    ) -> int | None:
        """Return how many visible records the source has in first..end-1; None: time is over."""
        self._decoder = self._decoder or RecordDecoder()
        log = KafkaSource(client, partition, topic_id=None)
        start = client.list_offsets([partition], EARLIEST)[partition]
        found = 0
        for table, _ in chunks(log, self._decoder, max(first, start), end):
            found += table.num_rows
            if SYSTEM_CLOCK.monotonic_ms() > self._count_until_ms:
                return None
        return found

    def _read_syncs(
        self, source: ConnectionSettings, destination: str, copies: Iterable[_Copy]
    ) -> dict[TopicPartition, SyncIndex]:
        """Return the offset syncs of a destination; none if all its replicas keep their offsets."""
        topic = syncs_topic(destination)
        if topic is None or all(copy.written.offsets == "preserve" for copy in copies):
            return {}
        client, where = self._clients(source), TopicPartition(topic, 0)
        try:
            start = client.list_offsets([where], EARLIEST)[where]
        except NotFoundError:
            return {}
        end = client.list_offsets([where], LATEST)[where]
        self._decoder = self._decoder or RecordDecoder()
        found = OffsetSyncs()
        for table, _ in chunks(
            KafkaSource(client, where, topic_id=None), self._decoder, start, end
        ):
            found.add(table)
        return found.indexes()


class _View(NamedTuple):
    """What both clusters have of one group."""

    source: ClusterClient
    committed: Mapping[TopicPartition, GroupOffset]
    """At the source."""
    current: Mapping[TopicPartition, GroupOffset | None]
    """At the destination."""
    logs: Mapping[TopicPartition, Log]
    """Of the destination's partitions that exist."""
    syncs: Mapping[TopicPartition, SyncIndex]


_Offsets = dict["GroupListing", dict["TopicPartition", GroupOffset]]


def _translated(copy: _Copy, view: _View) -> Translated:
    offset, log = view.committed[copy.source].offset, view.logs.get(copy.target)
    if log is None:
        return Translated(None, offset, "the destination has no such partition")
    if copy.written.offsets == "preserve":
        return preserved(offset, log)
    return translated(offset, log, view.syncs.get(copy.source))


def _committed(client: ClusterClient, groups: Collection[str]) -> _Offsets:
    """Return all committed offsets of the groups of consumers."""
    return {
        listing: client.groups.all_offsets(listing.group)
        for listing in client.groups.listed()
        if listing.protocol_type in _CONSUMERS and (not groups or listing.group in groups)
    }


def _logs(client: ClusterClient, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Log]:
    """Return the bounds of the partitions that exist."""
    by_name: dict[str, list[TopicPartition]] = defaultdict(list)
    for partition in partitions:
        by_name[partition.topic].append(partition)
    found: dict[TopicPartition, Log] = {}
    for topic, wanted in by_name.items():
        try:
            there = client.topic(topic).partitions
        except NotFoundError:
            continue
        existing = [partition for partition in wanted if partition.partition in there]
        starts = client.list_offsets(existing, EARLIEST)
        ends = client.log_ends(existing)
        found |= {one: Log(starts[one], ends[one].end_offset) for one in existing}
    return found


# -- changes ---------------------------------------------------------------------------------------


def apply_groups(settings: Settings, plans: Iterable[GroupPlan]) -> list[GroupOutcome]:
    """Commit what plans say; see `logmirror.apply_groups`."""
    return _changed(settings, plans, _apply)


def rollback_groups(settings: Settings, plans: Iterable[GroupPlan]) -> list[GroupOutcome]:
    """Restore what there was before; see `logmirror.rollback_groups`."""
    return _changed(settings, plans, _roll_back)


def _changed(
    settings: Settings,
    plans: Iterable[GroupPlan],
    change: Callable[[ClusterClient, GroupPlan], list[GroupOutcome]],
) -> list[GroupOutcome]:
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
        elif now is not None and now >= step.target_offset:
            is_ahead = now > step.target_offset
            reasons[partition] = "the destination is ahead" if is_ahead else "unchanged"
        elif now != step.current_offset:
            reasons[partition] = "the group has committed since the plan was made"
        else:
            due[partition] = GroupOffset(step.target_offset, _NO_EPOCH, step.metadata)
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
            reasons[partition] = "unchanged"
        elif _offset(current[partition]) != step.target_offset:
            reasons[partition] = "the group has committed since the plan was applied"
        elif step.current_offset is None:
            new.append(partition)
        else:
            before[partition] = GroupOffset(step.current_offset, _NO_EPOCH, step.current_metadata)
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
