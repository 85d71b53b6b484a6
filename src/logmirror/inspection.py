"""The composition root of `validate --check`, and what other commands that only look share.

They create nothing anywhere, and load no kernels, which takes a second. `status` is in
`logmirror.overview`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError
from logmirror.mirror.ports import ArchiveSpec, FlowId, KafkaSpec
from logmirror.mirror.source_views import MirrorSpec, position, source_views
from logmirror.mirror.topic_sync import check_topic
from logmirror.stores.locations import S3Location
from logmirror.stores.opening import open_store
from logmirror.wiring import PATIENCE_MS, Clients, destinations, mirror_specs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config import Settings
    from logmirror.mirror.ports import DestinationSpec, SourceView
    from logmirror.model import TopicPartition


def look_at_topic(spec: MirrorSpec, clients: Clients) -> tuple[tuple[int, ...], bytes | None]:
    """The mirror's partitions and the topic's id."""
    topic = clients(spec.source).topic(spec.topic)
    return spec.partitions or tuple(sorted(topic.partitions)), topic.topic_id


def flows_of(spec: MirrorSpec, numbers: tuple[int, ...]) -> list[tuple[FlowId, DestinationSpec]]:
    """Each destination's flow of each partition."""
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), written)
        for name, written in spec.destinations
        for n in numbers
    ]


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


def check(settings: Settings) -> list[CheckRow]:
    """Look at the clusters and folders of every enabled mirror. Creates nothing anywhere."""
    rows: list[CheckRow] = []
    clients = Clients(PATIENCE_MS)
    try:
        for spec in mirror_specs(settings):
            rows += _check_mirror(spec, clients)
    finally:
        clients.close()
    return rows


def _check_mirror(spec: MirrorSpec, clients: Clients) -> Iterator[CheckRow]:
    try:
        topic = clients(spec.source).topic(spec.topic)
        numbers = spec.partitions or tuple(topic.partitions)
        flows = flows_of(spec, tuple(n for n in numbers if n in topic.partitions))
        views = source_views(
            clients(spec.source), {flow.source for flow, _ in flows}, topic.topic_id
        )
    except LogmirrorError as error:
        yield _failed(spec.name, "", "source", error)
        return
    missing = [n for n in numbers if n not in topic.partitions]
    offsets = sum(view.stable_end - view.log_start for view in views.values())
    yield CheckRow(
        mirror=spec.name,
        destination="",
        severity="error" if missing else "ok",
        what="source",
        found=f"topic {spec.topic}, {len(topic.partitions)} partitions, {offsets} offsets",
        advice=f"there is no partition {missing}" if missing else "",
    )
    for name, written in spec.destinations:
        try:
            yield from _check_destination(spec, name, written, clients)
            of_destination = [flow for flow, of in flows if of is written]
            yield _check_positions(spec, written, clients, of_destination, views)
        except LogmirrorError as error:
            yield _failed(spec.name, name, "destination", error)


def _check_destination(
    spec: MirrorSpec, name: str, written: DestinationSpec, clients: Clients
) -> Iterator[CheckRow]:
    if isinstance(written, ArchiveSpec):
        if isinstance(written.location, S3Location):
            yield _check_bucket(spec, name, written.location)
            return
        root = Path(written.location.root)
        there = next(path for path in (root, *root.parents) if path.exists())
        fits = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        state = "is there" if there == root else f"will be made in {there}"
        yield CheckRow(
            mirror=spec.name,
            destination=name,
            severity="ok" if fits else "error",
            what="folder",
            found=f"{root} {state}",
            advice="" if fits else f"we may not write in {there}",
        )
        return
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


def _check_bucket(spec: MirrorSpec, name: str, location: S3Location) -> CheckRow:
    """Whether the bucket is there and may be listed; what may be written, only writing tells."""
    store = open_store(location, "-")
    count = sum(1 for _ in store.folders(name))
    return CheckRow(
        mirror=spec.name,
        destination=name,
        severity="ok",
        what="bucket",
        found=f"{location} can be listed, {count} partitions",
    )


def _check_positions(
    spec: MirrorSpec,
    written: DestinationSpec,
    clients: Clients,
    flows: list[FlowId],
    views: dict[TopicPartition, SourceView],
) -> CheckRow:
    """Whether the copy could go on from where it stands."""
    name = next(name for name, of in spec.destinations if of is written)
    side = destinations(clients, lambda location: open_store(location, "-"), "-")
    try:
        found = side(written).positions(written, flows, spec.chain_start)
    except NotFoundError:
        if isinstance(written, KafkaSpec) and written.topic_sync == "create":
            return CheckRow(
                mirror=spec.name,
                destination=name,
                severity="ok",
                what="position",
                found="a new copy: `run` makes the topic",
            )
        raise
    total = 0
    for flow in flows:
        total += side(written).check(written, flow, position(found[flow]), views[flow.source])
    return CheckRow(
        mirror=spec.name,
        destination=name,
        severity="ok",
        what="position",
        found=f"{len(flows)} partitions, {total} offsets are copied",
    )


def _failed(mirror: str, destination: str, what: str, error: LogmirrorError) -> CheckRow:
    return CheckRow(
        mirror=mirror,
        destination=destination,
        severity="error",
        what=what,
        found=str(error),
        advice=error.hint,
    )
