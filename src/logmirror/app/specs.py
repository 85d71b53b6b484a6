"""Settings to the mirrors and destinations that the driver's loop works on."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from logmirror.app.store_location import store_location
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import FilesystemDestination, KafkaDestination
from logmirror.errors import InternalError
from logmirror.groups.archive_spec import ArchivedTopic, ArchiveLinkSpec
from logmirror.groups.link_spec import LinkSpec, ReplicaSpec
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.takeover_spec import Takeover
from logmirror.mirror.until import Until

if TYPE_CHECKING:
    from logmirror.config.settings import MirrorSettings, S3Destination, Settings
    from logmirror.mirror.ports import DestinationSpec
    from logmirror.model import Limits

_EXTENSIONS: Final = {"native": NATIVE, "parquet": PARQUET, "ndjson": NDJSON}


def mirror_specs(settings: Settings) -> list[MirrorSpec]:
    """The enabled mirrors as the loop sees them.

    Raises:
        UsageError: A connection property is unknown or wrong.
    """
    return [_mirror_spec(mirror, settings.limits) for mirror in settings.mirrors if mirror.enabled]


def link_specs(settings: Settings) -> list[LinkSpec]:
    """The groups that are translated: one link for each source, destination and `groups`.

    Raises:
        UsageError: A connection property is unknown or wrong.
    """
    groups = {mirror.name: mirror.groups for mirror in settings.mirrors}
    links: dict[tuple[Any, ...], list[ReplicaSpec]] = defaultdict(list)
    for spec in mirror_specs(settings):
        wanted = groups[spec.name]
        for name, written in spec.destinations:
            if wanted is not None and isinstance(written, KafkaSpec):
                replica = ReplicaSpec(spec.name, spec.topic, spec.partitions, written)
                links[spec.source, wanted, written.cluster, name].append(replica)
    return [
        LinkSpec(
            source=source,
            source_alias=wanted.source_alias,
            target=target,
            destination=name,
            replicas=tuple(replicas),
            include=wanted.include,
            exclude=wanted.exclude,
            interval_ms=wanted.interval_ms,
            commits=wanted.sync_group_offsets,
        )
        for (source, wanted, target, name), replicas in links.items()
    ]


def archive_link_specs(settings: Settings) -> list[ArchiveLinkSpec]:
    """The groups whose offsets are stored beside archives: one for each source and archive.

    Raises:
        UsageError: A connection property is unknown or wrong.
    """
    groups = {mirror.name: mirror.groups for mirror in settings.mirrors}
    links: dict[tuple[Any, ...], list[ArchivedTopic]] = defaultdict(list)
    for spec in mirror_specs(settings):
        wanted = groups[spec.name]
        for name, written in spec.destinations:
            if wanted is not None and isinstance(written, ArchiveSpec):
                topic = ArchivedTopic(
                    spec.name, spec.topic, spec.partitions, spec.chain_start, written
                )
                links[spec.source, wanted, written.location, name].append(topic)
    return [
        ArchiveLinkSpec(
            source=source,
            source_alias=wanted.source_alias,
            location=location,
            destination=name,
            topics=tuple(topics),
            include=wanted.include,
            exclude=wanted.exclude,
            interval_ms=wanted.archive_interval_ms,
            keep=wanted.keep_archived,
        )
        for (source, wanted, location, name), topics in links.items()
    ]


def _mirror_spec(mirror: MirrorSettings, limits: Limits) -> MirrorSpec:
    return MirrorSpec(
        name=mirror.name,
        source=connection_settings(mirror.source.bootstrap_servers, dict(mirror.source.properties)),
        topic=mirror.topic,
        partitions=mirror.partitions,
        destinations=tuple(
            (destination.name, _destination_spec(destination, mirror, limits))
            for destination in mirror.destinations
        ),
        chain_start=mirror.chain_start,
        until=None
        if mirror.until is None
        else Until(time_ms=mirror.until.time_ms, offset=mirror.until.offset),
    )


def _destination_spec(
    destination: FilesystemDestination | KafkaDestination | S3Destination,
    mirror: MirrorSettings,
    limits: Limits,
) -> DestinationSpec:
    if isinstance(destination, KafkaDestination):
        return KafkaSpec(
            cluster=connection_settings(
                destination.bootstrap_servers, dict(destination.properties)
            ),
            topic=destination.topic,
            name=destination.name,
            mirror=mirror.name,
            offsets=destination.offsets,
            gaps=destination.gaps,
            topic_sync=destination.topic_sync,
            replication_factor=destination.replication_factor or -1,
            keeps_timestamps=destination.timestamp_mode == "source",
            max_batch_bytes=destination.max_batch_bytes,
            takeover=_takeover(destination, mirror),
            types=mirror.types,
            limits=limits,
        )
    if mirror.flush is None:
        raise InternalError("a mirror into files without `flush`", mirror=mirror.name)
    return ArchiveSpec(
        location=store_location(destination),
        format=mirror.format,
        extension=_EXTENSIONS[mirror.format],
        compression=mirror.compression,
        encoding=mirror.encoding,
        max_bytes=mirror.flush.max_bytes,
        max_offsets=mirror.flush.max_offsets,
        max_time_ms=mirror.flush.max_time_ms,
        daily_at_utc_s=mirror.flush.daily_at_utc_s,
        compaction=mirror.compaction,
        keep_snapshots=mirror.keep_snapshots,
        drift_check_ms=destination.drift_check_ms,
        types=mirror.types,
        limits=limits,
    )


def _takeover(destination: KafkaDestination, mirror: MirrorSettings) -> Takeover | None:
    if destination.takeover is None or mirror.groups is None:
        return None
    source = connection_settings(mirror.source.bootstrap_servers, dict(mirror.source.properties))
    return Takeover(source=source, source_alias=mirror.groups.source_alias)
