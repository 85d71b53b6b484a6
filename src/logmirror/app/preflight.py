"""`logmirror validate --check`: whether the mirrors of a configuration could run.

    clusters    do they respond, do they allow what `acls print` lists, do topic settings fit
    stores      directories and buckets: a probe object is created, a second one of that name must
                be refused, and it is deleted
    positions   where each replica ends, and whether replication could continue there

Nothing else is written. Every problem has a row of its own.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.app.acls import acls_of
from logmirror.app.components import COMMAND_BUDGET_MS, Clients, destinations
from logmirror.app.source_state import read_states
from logmirror.app.specs import mirror_specs
from logmirror.clock import new_nonce
from logmirror.cluster.exposures import exposures
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, UsageError
from logmirror.locations import FolderLocation, S3Location
from logmirror.mirror.opening import Opening
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.source_views import flows_of, source_views
from logmirror.reports import CheckReport
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.opening import open_store
from logmirror.to_kafka.topic_setup import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.config.settings import Settings
    from logmirror.mirror.ports import DestinationSpec, FlowId, SourceView
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition
    from logmirror.reports import Acl, Severity
    from logmirror.stores.base import BlobStore

_PROBES: Final = ".logmirror/probes"
"""Folder of probe objects in a bucket, outside of every chain."""

_SCRATCH: Final = ".logmirror-probe-"
"""Prefix of the temporary folder of a probe."""

_PADDED: Final = ("preserve", "markers")
"""How offsets and gaps must be replicated for padding to be written."""

_HEAD_OFFSETS: Final = 100_000_000
"""From this many offsets on, filling the head of a replica is announced."""

_HEAD_OFFSETS_PER_S: Final = 10_000_000
"""How fast a broker nearby takes padding, which is produced and deleted step by step."""

_HEAD_OFFSETS_PER_MB: Final = 700_000
"""Padding is compressed: 500,000 records are some 700 kB."""

_SOMETIMES: Final = frozenset({"Alter", "Delete"})
"""Operations needed only if the source gets partitions, or begins above offset 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """A mirror's topic at its source."""

    topic: TopicMetadata
    flows: list[tuple[FlowId, DestinationSpec]]
    views: Mapping[TopicPartition, SourceView]


def check(settings: Settings) -> list[CheckReport]:
    """Check what every enabled mirror needs; see `logmirror.check`."""
    rows: list[CheckReport] = []
    clients = Clients(COMMAND_BUDGET_MS)
    try:
        for spec in mirror_specs(settings):
            rows += _check_mirror(spec, clients)
    finally:
        clients.close()
    return rows


def _check_mirror(spec: MirrorSpec, clients: Clients) -> Iterator[CheckReport]:
    yield from _exposures(spec, "", spec.source)
    origin: _Origin | None = None
    try:
        origin = _read_source(spec, clients(spec.source))
    except LogmirrorError as error:
        yield _failed(spec.name, "", "source", error)
    else:
        yield _source_row(spec, origin)
        yield from _reported_row(_source_settings(spec, clients(spec.source)), spec, "", "settings")
        yield from _permissions(spec, "", clients)
    for name, written in spec.destinations:
        if isinstance(written, ArchiveSpec):
            kind = "bucket" if isinstance(written.location, S3Location) else "folder"
            yield from _reported_row(_check_place(spec, name, written), spec, name, kind)
        else:
            yield from _exposures(spec, name, written.cluster)
            try:
                clients(written.cluster).cluster_id()
            except LogmirrorError as error:
                yield _failed(spec.name, name, "cluster", error)
                continue
            yield from _permissions(spec, name, clients)
            if origin is not None:
                fit = _check_topics(spec, name, written, clients)
                yield from _reported_row(fit, spec, name, "topic")
        if origin is not None:
            positions = _check_positions(spec, name, written, clients, origin)
            yield from _reported_row(positions, spec, name, "position")


def _exposures(
    spec: MirrorSpec, destination: str, cluster: ConnectionSettings
) -> Iterator[CheckReport]:
    for one in exposures(cluster):
        yield CheckReport(
            mirror=spec.name,
            destination=destination,
            severity="warning",
            what=one.name,
            found=one.message,
            advice=one.suggestion,
        )


def _reported_row(
    rows: Iterator[CheckReport], spec: MirrorSpec, destination: str, what: str
) -> Iterator[CheckReport]:
    """Yield these rows; an error becomes the last row."""
    try:
        yield from rows
    except LogmirrorError as error:
        yield _failed(spec.name, destination, what, error)


def _failed(mirror: str, destination: str, what: str, error: LogmirrorError) -> CheckReport:
    return CheckReport(
        mirror=mirror,
        destination=destination,
        severity="error",
        what=what,
        found=str(error),
        advice=error.hint,
    )


# -- the source ------------------------------------------------------------------------------------


def _read_source(spec: MirrorSpec, source: ClusterClient) -> _Origin:
    topic = source.topic(spec.topic)
    numbers = spec.partitions or tuple(topic.partitions)
    flows = flows_of(spec, tuple(n for n in numbers if n in topic.partitions))
    views = source_views(source, {flow.source for flow, _ in flows}, topic.topic_id)
    return _Origin(topic=topic, flows=flows, views=views)


def _source_row(spec: MirrorSpec, origin: _Origin) -> CheckReport:
    there = origin.topic.partitions
    missing = [n for n in spec.partitions or () if n not in there]
    offsets = sum(view.last_stable_offset - view.log_start for view in origin.views.values())
    return CheckReport(
        mirror=spec.name,
        destination="",
        severity="error" if missing else "ok",
        what="source",
        found=f"topic {spec.topic}, {len(there)} partitions, {offsets} offsets",
        advice=f"no such partition: {missing}" if missing else "",
    )


def _source_settings(spec: MirrorSpec, source: ClusterClient) -> Iterator[CheckReport]:
    """Check the source topic's settings for archives."""
    configs = source.describe_topic_configs(spec.topic)
    policy = configs.get("cleanup.policy") or ""
    for name, written in spec.destinations:
        if isinstance(written, ArchiveSpec):
            for severity, what, found, advice in _about_archive(configs, policy, written):
                yield CheckReport(
                    mirror=spec.name,
                    destination=name,
                    severity=severity,
                    what=what,
                    found=found,
                    advice=advice,
                )


def _about_archive(
    configs: Mapping[str, str | None], policy: str, archive: ArchiveSpec
) -> Iterator[tuple[Severity, str, str, str]]:
    """Yield severity, setting, value and advice."""
    if archive.compaction is None and "compact" in policy:
        advice = (
            "records compacted away before they are replicated become offset gaps; for the latest "
        )
        advice += "record of each key, set `compaction: log`"
        yield "note", "cleanup.policy", policy, advice
    if archive.compaction is not None and "compact" not in policy:
        advice = (
            "the source deletes records by age or size; the snapshot drops their keys only when "
        )
        advice += "it is rebuilt"
        yield "note", "cleanup.policy", policy, advice
    kept_ms = int(configs.get("retention.ms") or -1)
    if "delete" in policy and 0 <= kept_ms <= archive.max_time_ms:
        found = f"{kept_ms}, but a record may wait {archive.max_time_ms} ms until it is written"
        advice = "the source may delete it first: lower `max-time-ms`, or raise `retention.ms`"
        yield "warning", "retention.ms", found, advice


# -- permissions ----------------------------------------------------------------------------------


def _permissions(spec: MirrorSpec, destination: str, clients: Clients) -> Iterator[CheckReport]:
    """Check what brokers report as allowed against what `acls print` lists."""
    reported = 0
    missing: list[Acl] = []
    try:
        for name, cluster, acls in acls_of(spec):
            if name == destination:
                for allowed, acl in _reported(clients(cluster), acls):
                    reported += 1
                    missing += [] if acl.operation in allowed else [acl]
    except LogmirrorError as error:
        yield _failed(spec.name, destination, "permissions", error)
        return
    for acl in missing:
        severity: Severity = "warning" if acl.operation in _SOMETIMES else "error"
        yield CheckReport(
            mirror=spec.name,
            destination=destination,
            severity="note" if acl.is_optional else severity,
            what="permissions",
            found=f"{acl.operation} on the {acl.resource} {acl.name} is not allowed",
            advice=f"it is for {acl.purpose}; `logmirror acls print` has the command",
        )
    if reported and not any(not acl.is_optional for acl in missing):
        yield CheckReport(
            mirror=spec.name,
            destination=destination,
            severity="ok",
            what="permissions",
            found="required operations are allowed, as far as the brokers report",
        )


def _reported(client: ClusterClient, acls: Iterable[Acl]) -> Iterator[tuple[frozenset[str], Acl]]:
    """Yield each ACL that the cluster reports on, with the operations allowed there."""
    known: dict[str, frozenset[str] | None] = {}
    for acl in acls:
        if acl.resource == "transactional-id":
            continue  # brokers do not report these
        if acl.name not in known:
            is_topic = acl.resource == "topic"
            known[acl.name] = (
                client.admin.topic_operations(acl.name)
                if is_topic
                else client.admin.cluster_operations()
            )
        allowed = known[acl.name]
        # An existing topic need not be created, and nothing is reported for a missing one.
        if allowed is not None and acl.operation != "Create":
            yield allowed, acl


# -- stores ---------------------------------------------------------------------------------------


def _check_place(spec: MirrorSpec, name: str, archive: ArchiveSpec) -> Iterator[CheckReport]:
    location = archive.location
    if isinstance(location, S3Location):
        what = "bucket"
        found, advice = _check_bucket(name, location)
    else:
        what = "folder"
        found, advice = _check_folder(Path(location.root)), ""
    yield CheckReport(
        mirror=spec.name,
        destination=name,
        severity="note" if advice else "ok",
        what=what,
        found=found,
        advice=advice,
    )


def _check_folder(root: Path) -> str:
    """Probe the directory, or its nearest existing parent.

    Raises:
        UsageError: It is not writable, or not a directory.
        UnavailableError: It is full.
    """
    there = next(path for path in (root, *root.parents) if path.exists())
    scratch = there / f"{_SCRATCH}{new_nonce()}"
    try:
        _try_create_only(open_store(FolderLocation(str(scratch)), "probe"), str(root))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    free_gib = shutil.disk_usage(there).free / (1 << 30)
    state = "exists" if there == root else f"will be created in {there}"
    return f"{root} {state}, {free_gib:.1f} GiB free"


def _check_bucket(name: str, location: S3Location) -> tuple[str, str]:
    """List and probe the bucket; return what was found, and advice on a probe object left there."""
    store = open_store(location, "probe")
    count = sum(1 for _ in store.folders(name))
    left = _try_create_only(store, str(location), replaces=not location.require_atomic_create)
    found = f"{location} is readable and writable, {count} partitions"
    return found, f"deleting is not allowed: the probe {left} stays, ignored" if left else ""


def _try_create_only(store: BlobStore, where: str, *, replaces: bool = False) -> str:
    """Create an object, try to overwrite it, read it, delete it; return its name if it stays.

    Args:
        store: The store.
        where: Its location, for the error.
        replaces: The store is known to overwrite, and the configuration accepts that.
    """
    name = f"{_PROBES}/{new_nonce()}-check"
    store.create(name, b"first")
    try:
        if not replaces:
            with contextlib.suppress(AlreadyExistsError):
                store.create(name, b"second")
        if store.read(name) != b"first":
            raise UsageError(
                "the store overwrites existing objects despite `If-None-Match: *`",
                hint="use a store that honours it, or set `require-atomic-create: false` where "
                "only one mirror ever writes",
                location=where,
            )
    finally:
        left = _is_left(store, name)
    return name if left else ""


def _is_left(store: BlobStore, name: str) -> bool:
    """Delete an object; return whether deleting is forbidden, as it is for most archivers."""
    try:
        store.delete(name)
    except UsageError:
        return True
    return False


# -- clusters and positions ------------------------------------------------------------------------


def _check_topics(
    spec: MirrorSpec, name: str, written: KafkaSpec, clients: Clients
) -> Iterator[CheckReport]:
    findings = check_topic(
        clients(spec.source),
        spec.topic,
        clients(written.cluster),
        written.topic,
        mode=written.topic_sync,
        timestamp_mode="source" if written.keeps_timestamps else "destination",
        partitions=spec.partitions,
    )
    for finding in findings:
        yield CheckReport(
            mirror=spec.name,
            destination=name,
            severity=finding.severity,
            what=finding.setting,
            found=f"source {finding.source or '-'}, destination {finding.destination or '-'}",
            advice=finding.advice,
        )
    if not any(finding.severity == "error" for finding in findings):
        yield CheckReport(
            mirror=spec.name,
            destination=name,
            severity="ok",
            what="topic",
            found=f"{written.topic} fits",
        )


def _check_positions(
    spec: MirrorSpec, name: str, written: DestinationSpec, clients: Clients, origin: _Origin
) -> Iterator[CheckReport]:
    """Check whether replication could continue at the replica's position."""
    flows = [flow for flow, of in origin.flows if of is written]
    side = destinations(clients, lambda location: open_store(location, "-"), "-")(written)

    positions = dict.fromkeys(flows, 0)
    try:
        opening = Opening(side, flows, spec.chain_start)
    except NotFoundError:
        if not (isinstance(written, KafkaSpec) and written.topic_sync == "create"):
            raise
        found = "new: `run` creates the topic"
    else:
        epochs = {partition: {epoch} for partition, epoch in opening.epochs.items()}
        states = read_states(clients(spec.source), epochs)
        for flow in flows:
            positions[flow] = states[flow.source].start(flow, opening, origin.topic).position
        found = f"{len(flows)} partitions, {sum(positions.values())} offsets replicated"
    yield CheckReport(
        mirror=spec.name, destination=name, severity="ok", what="position", found=found
    )
    if isinstance(written, KafkaSpec) and (written.offsets, written.gaps) == _PADDED:
        for flow in (flow for flow in flows if not positions[flow]):
            missing = origin.views[flow.source].log_start
            if missing >= _HEAD_OFFSETS:
                yield _head_row(flow, missing)


def _head_row(flow: FlowId, missing: int) -> CheckReport:
    """What filling the offsets below the source's log start offset costs."""
    minutes = max(round(missing / _HEAD_OFFSETS_PER_S / 60), 1)
    gigabytes = missing / _HEAD_OFFSETS_PER_MB / 1000
    return CheckReport(
        mirror=flow.mirror,
        destination=flow.destination,
        severity="note",
        what="head",
        found=f"partition {flow.partition}: {missing} offsets below the source's log start offset",
        advice="before the first record, `run` writes padding for them and deletes it: about "
        f"{gigabytes:.1f} GB through the destination's log, {minutes} min or more",
    )
