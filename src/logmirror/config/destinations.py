"""The destinations of a mirror as settings, with all defaults filled in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from logmirror.config.destination_model import (
    ArchiveBucketModel,
    FilesystemModel,
    IdentityModel,
    KafkaModel,
    S3Model,
    SharedFilesystemModel,
    SharedKafkaModel,
    SharedS3Model,
)
from logmirror.config.kafka_rules import replica_of_mirrormaker
from logmirror.config.secret_rules import secret, with_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.config.model import MirrorModel
    from logmirror.config.scalars import Gaps, Offsets, TimestampMode, TopicSync
    from logmirror.references import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemDestination:
    """A directory for objects: `<root>/<name>/<partition>/`."""

    name: str
    """Name of the directory below `root`: one path component."""

    root: Path
    """Absolute, without `..`. It need not exist."""

    drift_check_ms: int = 60_000
    """100..86,400,000."""

    affects_readiness: bool = True
    """Whether `/readyz` reports not ready while it cannot be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDestination:
    """A topic of another cluster."""

    name: str
    """Name in logs, metrics and reports."""

    bootstrap_servers: str
    """`host:port`, separated by commas, without spaces."""

    topic: str
    """Its name in that cluster. Partitions have the numbers of the source."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Connection properties under librdkafka's names, not checked here."""

    offsets: Offsets = "preserve"

    gaps: Gaps = "markers"
    """The key `holes`; not used with `offsets: translate`."""

    topic_sync: TopicSync = "create"
    timestamp_mode: TimestampMode = "source"

    replication_factor: int | None = None
    """Of topics that logmirror creates, 1..32767; None for the cluster's default."""

    takeover: Literal["mm2"] | None = None
    """The program whose copy is continued; only with `offsets: translate`."""

    max_batch_bytes: int = 1_000_000
    """Batches are merged up to this size, 0..2^31-1; 0 disables merging."""

    affects_readiness: bool = True
    """Whether `/readyz` reports not ready while it cannot be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Credentials:
    """Credentials for a store; the standard AWS sources supply what is empty."""

    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    profile: str = ""
    role_arn: str = ""
    sts_endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Destination:
    """A bucket for objects: `<prefix>/<name>/<partition>/`."""

    name: str
    """Name of the directory below `prefix`: one path component."""

    bucket: str

    prefix: str = ""
    """Without leading and trailing slashes."""

    region: str = ""
    endpoint: str = ""
    path_style: bool = False
    ca_file: str = ""
    sse: str = ""
    kms_key_id: str = ""
    checksums: Literal["when-supported", "when-required"] = "when-supported"
    require_atomic_create: bool = True

    drift_check_ms: int = 60_000
    """100..86,400,000."""

    affects_readiness: bool = True
    """Whether `/readyz` reports not ready while it cannot be written to."""

    write: S3Credentials = field(default_factory=S3Credentials)
    read: S3Credentials = field(default_factory=S3Credentials)


Destination = FilesystemDestination | KafkaDestination | S3Destination


def destinations_of(
    mirror: MirrorModel,
    shared: SharedFilesystemModel | SharedKafkaModel | SharedS3Model | None,
    path: str,
    references: Mapping[str, Reference],
) -> Iterator[Destination]:
    """Yield the destinations of a mirror, in the order of the file.

    Args:
        mirror: A valid mirror.
        shared: The file's one destination for all mirrors, if it has one.
        path: The mirror's path in the file.
        references: The references of secrets, by path.
    """
    if shared is not None:
        name = mirror.destination_name_override or mirror.topic
        if isinstance(shared, SharedKafkaModel):
            found = _kafka(shared, mirror, name, name)
            yield _with_cluster_secrets(found, "destination", references)
        elif isinstance(shared, SharedS3Model):
            yield _with_bucket_secrets(_s3(shared, name), shared, "destination", references)
        else:
            yield _filesystem(shared, name)
        return
    for index, item in enumerate(mirror.destinations or ()):
        place = f"{path}.destinations[{index}]"
        name = item.name or mirror.name
        if isinstance(item, KafkaModel):
            found = _kafka(item, mirror, name, item.topic or _default_topic(item, mirror))
            yield _with_cluster_secrets(found, place, references)
        elif isinstance(item, S3Model):
            yield _with_bucket_secrets(_s3(item, name), item, place, references)
        else:
            yield _filesystem(item, name)


def _kafka(
    cluster: KafkaModel | SharedKafkaModel, mirror: MirrorModel, name: str, topic: str
) -> KafkaDestination:
    return KafkaDestination(
        name=name,
        bootstrap_servers=cluster.bootstrap_servers,
        topic=topic,
        properties=cluster.properties,
        offsets=cluster.offsets,
        gaps=cluster.gaps,
        topic_sync=cluster.topic_sync,
        timestamp_mode=cluster.timestamp_mode or mirror.timestamp_mode or "source",
        replication_factor=cluster.replication_factor,
        takeover=cluster.takeover if isinstance(cluster, KafkaModel) else None,
        max_batch_bytes=cluster.max_batch_bytes,
        affects_readiness=cluster.affects_readiness,
    )


def _default_topic(item: KafkaModel, mirror: MirrorModel) -> str:
    if item.takeover is None or mirror.groups is None:
        return mirror.topic
    return replica_of_mirrormaker(mirror.groups.source_alias, mirror.topic)


def _filesystem(
    directory: FilesystemModel | SharedFilesystemModel, name: str
) -> FilesystemDestination:
    # Lexical, as in a shell: `Path.resolve` would pin a link that may be switched later.
    root = Path(os.path.abspath(directory.root))  # noqa: PTH100  # resolve() would follow links
    return FilesystemDestination(
        name=name,
        root=root,
        drift_check_ms=directory.drift_check_ms,
        affects_readiness=directory.affects_readiness,
    )


def _s3(bucket: S3Model | SharedS3Model, name: str) -> S3Destination:
    credentials = bucket.credentials
    return S3Destination(
        name=name,
        bucket=bucket.bucket,
        prefix=bucket.prefix or "",
        region=bucket.region or "",
        endpoint=bucket.endpoint or "",
        path_style=bool(bucket.endpoint) if bucket.path_style is None else bucket.path_style,
        ca_file=bucket.ca_file or "",
        sse=bucket.sse or "",
        kms_key_id=bucket.kms_key_id or "",
        checksums=bucket.checksums,
        require_atomic_create=bucket.require_atomic_create,
        drift_check_ms=bucket.drift_check_ms,
        affects_readiness=bucket.affects_readiness,
        write=_credentials(credentials.write or credentials),
        read=_credentials(credentials.read or credentials),
    )


def archive_bucket(bucket: ArchiveBucketModel) -> S3Destination:
    """Return the bucket of an archive that is only read."""
    credentials = _credentials(bucket.credentials)
    return S3Destination(
        name="",
        bucket=bucket.bucket,
        prefix=bucket.prefix or "",
        region=bucket.region or "",
        endpoint=bucket.endpoint or "",
        path_style=bool(bucket.endpoint) if bucket.path_style is None else bucket.path_style,
        ca_file=bucket.ca_file or "",
        write=credentials,
        read=credentials,
    )


def _credentials(identity: IdentityModel) -> S3Credentials:
    return S3Credentials(
        access_key_id=identity.access_key_id or "",
        secret_access_key=identity.secret_access_key or "",
        session_token=identity.session_token or "",
        profile=identity.profile or "",
        role_arn=identity.role_arn or "",
        sts_endpoint=identity.sts_endpoint or "",
    )


def _with_cluster_secrets(
    destination: KafkaDestination, path: str, references: Mapping[str, Reference]
) -> KafkaDestination:
    properties = with_secrets(destination.properties, f"{path}.properties", references)
    return replace(destination, properties=properties)


def _with_bucket_secrets(
    destination: S3Destination,
    bucket: S3Model | SharedS3Model,
    path: str,
    references: Mapping[str, Reference],
) -> S3Destination:
    def of(credentials: S3Credentials, where: str) -> S3Credentials:
        key, token = credentials.secret_access_key, credentials.session_token
        return replace(
            credentials,
            secret_access_key=secret(key, f"{where}.secret-access-key", references),
            session_token=secret(token, f"{where}.session-token", references),
        )

    where = f"{path}.credentials"
    return replace(
        destination,
        write=of(destination.write, f"{where}.write" if bucket.credentials.write else where),
        read=of(destination.read, f"{where}.read" if bucket.credentials.read else where),
    )
