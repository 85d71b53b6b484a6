"""The groups part of `logmirror status`: how far groups can continue, and whether a mirror writes.

    committed offsets at the source -> offset syncs -> ends of the replicas -> translation
    the last heartbeat of the link at the target

One request for each group. Records are read of offset syncs, for `offsets: translate`, and of the
last heartbeats. Nothing is created anywhere.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.specs import link_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError, UsageError
from logmirror.groups.replica_logs import (
    CONSUMERS,
    Replica,
    described,
    logs,
    topic_ids,
    translation,
)
from logmirror.model import TopicPartition
from logmirror.reports import GroupLinkStatus
from logmirror.wire.mirrormaker import decode_heartbeat, syncs_topic
from logmirror.wire.records import decode_reference
from logmirror.wire.replication_policy import HEARTBEATS, ReplicationPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import GroupOffset
    from logmirror.config.settings import Settings
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.groups.offset_syncs import SyncIndex

_WIDTH: Final = 8
"""Links that are read at once."""

_GROUPS_MS: Final = 30_000
"""How long the groups of one link are read."""

_TAIL: Final = 64
"""The last offsets of the heartbeats that are read: of several links, each with its marker."""

_TAIL_BYTES: Final = 64 << 10

_Offsets = dict["TopicPartition", "GroupOffset"]


def group_status(settings: Settings) -> list[GroupLinkStatus]:
    """Return a row for each link; see `logmirror.group_status`."""
    specs = link_specs(settings)
    if not specs:
        return []
    with ThreadPoolExecutor(_WIDTH, thread_name_prefix="group-status") as pool:
        return list(pool.map(_status, specs))


def _status(spec: LinkSpec) -> GroupLinkStatus:
    clients = Clients(COMMAND_BUDGET_MS)
    try:
        return _read(spec, clients(spec.source), clients(spec.target))
    except LogmirrorError as error:
        return GroupLinkStatus(source=spec.source_alias, destination=spec.destination, error=error)
    finally:
        clients.close()


def _read(spec: LinkSpec, source: ClusterClient, target: ClusterClient) -> GroupLinkStatus:
    last_ms = _last_heartbeat(spec, target)
    heartbeat_age_s = None if last_ms is None else max(SYSTEM_CLOCK.now_ms() - last_ms, 0) // 1000
    committed, unreadable = _committed(spec, source)
    syncs = _syncs(spec, source)  # before the ends of the replicas
    known = {group: list(_replicas(spec, offsets)) for group, offsets in committed.items()}
    known = {group: found for group, found in known.items() if found}
    targets = {replica.target for found in known.values() for replica, _ in found}
    topics = described(target, {one.topic for one in targets})
    bounds, ids = logs(target, topics, targets), topic_ids(topics)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter({"unreadable": unreadable} if unreadable else {})
    for found in known.values():
        results = [
            translation(replica, offset.offset, bounds.get(target), syncs, ids.get(target.topic))
            for replica, offset in found
            for target in [replica.target]
        ]
        causes = {one.cause for one in results if one.cause is not None}
        reasons.update(causes)
        is_known = all(one.offset is not None for one in results)
        counts["not" if not is_known else "inexact" if causes else "exact"] += 1
    [(reason, _)] = reasons.most_common(1) or [("", 0)]
    return GroupLinkStatus(
        source=spec.source_alias,
        destination=spec.destination,
        groups=len(known) + unreadable,
        exact=counts["exact"],
        inexact=counts["inexact"],
        not_translated=counts["not"] + unreadable,
        reason=reason,
        heartbeat_age_s=heartbeat_age_s,
    )


def _committed(spec: LinkSpec, source: ClusterClient) -> tuple[dict[str, _Offsets], int]:
    """Return the committed offsets of the groups, and how many groups could not be read."""
    until_ms = SYSTEM_CLOCK.monotonic_ms() + _GROUPS_MS
    found: dict[str, _Offsets] = {}
    unreadable = 0
    for listing in source.groups.listed():
        if listing.protocol_type not in CONSUMERS or not spec.selects(listing.group):
            continue
        if SYSTEM_CLOCK.monotonic_ms() > until_ms:
            raise UnavailableError(
                "the groups could not be read in time",
                hint="`include` and `exclude` select groups",
                limit_ms=_GROUPS_MS,
            )
        try:
            found[listing.group] = source.groups.all_offsets(listing.group)
        except LogmirrorError:
            unreadable += 1
    return found, unreadable


def _replicas(spec: LinkSpec, offsets: _Offsets) -> Iterator[tuple[Replica, GroupOffset]]:
    for partition, committed in offsets.items():
        for one in spec.replicas:
            is_mirrored = one.partitions is None or partition.partition in one.partitions
            if one.topic == partition.topic and is_mirrored:
                yield Replica.of(one.mirror, partition, one.written), committed


def _syncs(spec: LinkSpec, source: ClusterClient) -> Mapping[TopicPartition, SyncIndex]:
    if all(one.written.offsets == "preserve" for one in spec.replicas):
        return {}
    from logmirror.groups.replicas import SyncReader  # noqa: PLC0415  # loads kernels
    from logmirror.wire.decode import RecordDecoder  # noqa: PLC0415  # the same

    reader = SyncReader(source, syncs_topic(spec.destination), RecordDecoder())
    reader.refresh()
    return reader.indexes


def _last_heartbeat(spec: LinkSpec, target: ClusterClient) -> int | None:
    """Return when the last heartbeat was written; None if there is none, or it may not be read."""
    topic = ReplicationPolicy().remote_topic(spec.source_alias, HEARTBEATS)
    if topic is None:
        return None
    where = TopicPartition(topic, 0)
    view = memoryview(bytearray(_TAIL_BYTES))
    try:
        end = target.list_offsets([where], LATEST)[where]
        start = max(target.list_offsets([where], EARLIEST)[where], end - _TAIL)
        if start >= end:
            return None
        fetched = target.fetch(where, start, view, topic_id=None, max_wait_ms=0)
    except UsageError:
        return None
    times = []
    for record in decode_reference(bytes(view[: fetched.size]), aborted=fetched.aborted):
        try:
            heartbeat = decode_heartbeat(record.key, record.value)
        except CorruptionError:
            continue
        if heartbeat.source == spec.source_alias and heartbeat.target == spec.destination:
            times.append(record.timestamp_ms)
    return max(times, default=None)
