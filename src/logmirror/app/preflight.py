"""The composition root of `validate --check`: can the copies of a configuration be made?

    clusters    do they answer, is what `acls` lists allowed, do the settings of the topics fit
    places      folders and buckets: an object is created under a name of its own, a second one of
                that name is refused, and it is removed
    copies      where they end, and whether they could go on from there

Nothing else is written anywhere. A fault hides no other one: each has its row.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.app.acls import acls_of
from logmirror.app.run import PATIENCE_MS, Clients, destinations, mirror_specs
from logmirror.clock import new_nonce
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, UsageError
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.source_views import flows_of, position, source_views
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.locations import FolderLocation, S3Location
from logmirror.stores.opening import open_store
from logmirror.to_kafka.topic_setup import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logmirror.app.acls import Acl
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.config.settings import Settings
    from logmirror.mirror.ports import DestinationSpec, FlowId, SourceView
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition
    from logmirror.stores.base import BlobStore

_PROBES: Final = ".logmirror/probes"
"""Below the root of a bucket; no listing of a chain shows it."""

_SCRATCH: Final = ".logmirror-probe-"
"""Begins the name of the folder that is made and removed for a probe."""

_SOMETIMES: Final = frozenset({"Alter", "Delete"})
"""Operations that a copy needs only when its source grows, or begins above offset 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One thing that `validate --check` looked at."""

    mirror: str
    destination: str
    """Empty: the source."""

    severity: str
    """`ok`, `note`, `warning` or `error`."""

    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """What the source says of a mirror's topic."""

    topic: TopicMetadata
    flows: list[tuple[FlowId, DestinationSpec]]
    views: Mapping[TopicPartition, SourceView]


def check(settings: Settings) -> list[CheckRow]:
    """Look at the clusters, folders and buckets of every enabled mirror."""
    rows: list[CheckRow] = []
    clients = Clients(PATIENCE_MS)
    try:
        for spec in mirror_specs(settings):
            rows += _check_mirror(spec, clients)
    finally:
        clients.close()
    return rows


def _check_mirror(spec: MirrorSpec, clients: Clients) -> Iterator[CheckRow]:
    origin: _Origin | None = None
    try:
        origin = _look_at_source(spec, clients(spec.source))
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
            standing = _check_positions(spec, name, written, clients, origin)
            yield from _reported_row(standing, spec, name, "position")


def _reported_row(
    rows: Iterator[CheckRow], spec: MirrorSpec, destination: str, what: str
) -> Iterator[CheckRow]:
    """These rows; an error is the last of them."""
    try:
        yield from rows
    except LogmirrorError as error:
        yield _failed(spec.name, destination, what, error)


def _failed(mirror: str, destination: str, what: str, error: LogmirrorError) -> CheckRow:
    return CheckRow(
        mirror=mirror,
        destination=destination,
        severity="error",
        what=what,
        found=str(error),
        advice=error.hint,
    )


# -- the source ------------------------------------------------------------------------------------


def _look_at_source(spec: MirrorSpec, source: ClusterClient) -> _Origin:
    topic = source.topic(spec.topic)
    numbers = spec.partitions or tuple(topic.partitions)
    flows = flows_of(spec, tuple(n for n in numbers if n in topic.partitions))
    views = source_views(source, {flow.source for flow, _ in flows}, topic.topic_id)
    return _Origin(topic=topic, flows=flows, views=views)


def _source_row(spec: MirrorSpec, origin: _Origin) -> CheckRow:
    there = origin.topic.partitions
    missing = [n for n in spec.partitions or () if n not in there]
    offsets = sum(view.last_stable_offset - view.log_start for view in origin.views.values())
    return CheckRow(
        mirror=spec.name,
        destination="",
        severity="error" if missing else "ok",
        what="source",
        found=f"topic {spec.topic}, {len(there)} partitions, {offsets} offsets",
        advice=f"there is no partition {missing}" if missing else "",
    )


def _source_settings(spec: MirrorSpec, source: ClusterClient) -> Iterator[CheckRow]:
    """What the settings of the source's topic mean for copies that are archives."""
    configs = source.describe_topic_configs(spec.topic)
    policy = configs.get("cleanup.policy") or ""
    for name, written in spec.destinations:
        if isinstance(written, ArchiveSpec):
            for severity, what, found, advice in _about_archive(configs, policy, written):
                yield CheckRow(
                    mirror=spec.name,
                    destination=name,
                    severity=severity,
                    what=what,
                    found=found,
                    advice=advice,
                )


def _about_archive(
    configs: Mapping[str, str | None], policy: str, archive: ArchiveSpec
) -> Iterator[tuple[str, str, str, str]]:
    """Severity, setting, what it is, what to do."""
    if archive.compaction is None and "compact" in policy:
        advice = "records that are compacted away before they are copied are told as gaps; for the "
        advice += "latest record of each key say `compaction: log`"
        yield "note", "cleanup.policy", policy, advice
    if archive.compaction is not None and "compact" not in policy:
        advice = "the source deletes records by age or size, and the table forgets their keys only "
        advice += "when it is built anew"
        yield "note", "cleanup.policy", policy, advice
    kept_ms = int(configs.get("retention.ms") or -1)
    if "delete" in policy and 0 <= kept_ms <= archive.max_time_ms:
        found = f"{kept_ms}, and a record may wait {archive.max_time_ms} ms to be written"
        advice = "the source may delete it first: lower `max-time-ms`, or let the source keep more"
        yield "warning", "retention.ms", found, advice


# -- what is allowed -------------------------------------------------------------------------------


def _permissions(spec: MirrorSpec, destination: str, clients: Clients) -> Iterator[CheckRow]:
    """Whether brokers allow what `acls` lists, as far as they tell without being asked to do it."""
    told = 0
    missing: list[Acl] = []
    try:
        for name, cluster, acls in acls_of(spec):
            if name == destination:
                for allowed, acl in _told(clients(cluster), acls):
                    told += 1
                    missing += [] if acl.operation in allowed else [acl]
    except LogmirrorError as error:
        yield _failed(spec.name, destination, "permissions", error)
        return
    for acl in missing:
        severity = "warning" if acl.operation in _SOMETIMES else "error"
        yield CheckRow(
            mirror=spec.name,
            destination=destination,
            severity="note" if acl.is_optional else severity,
            what="permissions",
            found=f"{acl.operation} on the {acl.resource} {acl.name} is not allowed",
            advice=f"it is for {acl.purpose}; `logmirror acls print` has the command",
        )
    if told and not any(not acl.is_optional for acl in missing):
        yield CheckRow(
            mirror=spec.name,
            destination=destination,
            severity="ok",
            what="permissions",
            found="what is needed is allowed, as far as brokers tell",
        )


def _told(client: ClusterClient, acls: Iterable[Acl]) -> Iterator[tuple[frozenset[str], Acl]]:
    """Each ACL of which the cluster says something, with all that is allowed there."""
    known: dict[str, frozenset[str] | None] = {}
    for acl in acls:
        if acl.resource == "transactional-id":
            continue  # only their use tells
        if acl.name not in known:
            is_topic = acl.resource == "topic"
            known[acl.name] = (
                client.admin.topic_operations(acl.name)
                if is_topic
                else client.admin.cluster_operations()
            )
        allowed = known[acl.name]
        # A topic that is there need not be made, and of one that is not nothing is told.
        if allowed is not None and acl.operation != "Create":
            yield allowed, acl


# -- folders and buckets ---------------------------------------------------------------------------


def _check_place(spec: MirrorSpec, name: str, archive: ArchiveSpec) -> Iterator[CheckRow]:
    location = archive.location
    if isinstance(location, S3Location):
        found, advice = _check_bucket(name, location)
        what, severity = "bucket", "note" if advice else "ok"
    else:
        what, found, advice = "folder", _check_folder(Path(location.root)), ""
        severity = "ok"
    yield CheckRow(
        mirror=spec.name,
        destination=name,
        severity=severity,
        what=what,
        found=found,
        advice=advice,
    )


def _check_folder(root: Path) -> str:
    """Try the folder, or the nearest one above it that is there.

    Raises:
        UsageError: We may not write there, or it is no folder.
        UnavailableError: It has no space.
    """
    there = next(path for path in (root, *root.parents) if path.exists())
    scratch = there / f"{_SCRATCH}{new_nonce()}"
    try:
        _try_create_only(open_store(FolderLocation(str(scratch)), "probe"), str(root))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    free_gib = shutil.disk_usage(there).free / (1 << 30)
    state = "is there" if there == root else f"will be made in {there}"
    return f"{root} {state}, {free_gib:.1f} GiB are free"


def _check_bucket(name: str, location: S3Location) -> tuple[str, str]:
    """List the bucket and try to create; returns what was found, and what is left behind."""
    store = open_store(location, "probe")
    count = sum(1 for _ in store.folders(name))
    left = _try_create_only(store, str(location), replaces=not location.require_atomic_create)
    found = f"{location} can be listed, {count} partitions, and written to"
    return found, f"we may not delete, so {left} stays; nobody looks at it" if left else ""


def _try_create_only(store: BlobStore, where: str, *, replaces: bool = False) -> str:
    """Create an object, try to replace it, read it, remove it; returns its name if it is left.

    Args:
        store: Where.
        where: For the error.
        replaces: The store is known to replace, and its user has accepted it.
    """
    name = f"{_PROBES}/{new_nonce()}-check"
    store.create(name, b"first")
    try:
        if not replaces:
            with contextlib.suppress(AlreadyExistsError):
                store.create(name, b"second")
        if store.read(name) != b"first":
            raise UsageError(
                "the store replaces objects that are there, though it was told not to",
                hint="use a store that honours `If-None-Match: *`, or say `require-atomic-create: "
                "false` where only one mirror ever writes there",
                location=where,
            )
    finally:
        left = _is_left(store, name)
    return name if left else ""


def _is_left(store: BlobStore, name: str) -> bool:
    """Remove an object; whether we may not, as whoever only archives may not."""
    try:
        store.delete(name)
    except UsageError:
        return True
    return False


# -- clusters and copies ---------------------------------------------------------------------------


def _check_topics(
    spec: MirrorSpec, name: str, written: KafkaSpec, clients: Clients
) -> Iterator[CheckRow]:
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
        yield CheckRow(
            mirror=spec.name,
            destination=name,
            severity=finding.severity,
            what=finding.setting,
            found=f"source {finding.source or '-'}, destination {finding.destination or '-'}",
            advice=finding.advice,
        )
    if not any(finding.severity == "error" for finding in findings):
        yield CheckRow(
            mirror=spec.name,
            destination=name,
            severity="ok",
            what="topic",
            found=f"{written.topic} fits",
        )


def _check_positions(
    spec: MirrorSpec, name: str, written: DestinationSpec, clients: Clients, origin: _Origin
) -> Iterator[CheckRow]:
    """Whether the copy could go on from where it stands."""
    flows = [flow for flow, of in origin.flows if of is written]
    side = destinations(clients, lambda location: open_store(location, "-"), "-")

    try:
        at = side(written).positions(written, flows, spec.chain_start)
    except NotFoundError:
        if not (isinstance(written, KafkaSpec) and written.topic_sync == "create"):
            raise
        found = "a new copy: `run` makes the topic"
    else:
        views = origin.views
        copied = sum(
            side(written).check(written, flow, position(at[flow]), views[flow.source])
            for flow in flows
        )
        found = f"{len(flows)} partitions, {copied} offsets are copied"
    yield CheckRow(mirror=spec.name, destination=name, severity="ok", what="position", found=found)
