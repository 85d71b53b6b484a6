"""The configuration: one YAML file in, frozen settings out, or every problem at once.

    settings = load(Path("logmirror.yaml"))

Invariants:

1. `Settings` exist only for a file without any problem; nothing downstream checks them again.
2. Every default is filled in, every folder is absolute, every number is in range.
3. Values of connection and Spark properties may be secrets: no `repr` and no error shows them.
4. Loading looks at the file, the environment and the files that `${file:PATH}` names, and at
   symbolic links of the destination folders; it creates nothing and connects to nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from logmirror.config.files import read_file
from logmirror.config.model import (
    ConfigModel,
    FilesystemModel,
    FlushModel,
    IdentityModel,
    KafkaModel,
    MirrorModel,
    S3Model,
    SharedFilesystemModel,
    SharedKafkaModel,
    SharedS3Model,
    SourceModel,
)
from logmirror.config.problems import ConfigError, Locations, Problem, config_error
from logmirror.config.rules import PropertyCheck, check
from logmirror.config.scalars import (
    Compaction,
    Compression,
    Encoding,
    Format,
    Holes,
    MetricsPrefix,
    Offsets,
    OnFatal,
    TimestampMode,
    TopicSync,
    parse_partitions,
    parse_size,
    parse_snapshots,
    parse_time_of_day,
)
from logmirror.config.schema import json_schema
from logmirror.config.source import parse
from logmirror.model import ColumnTypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.config.source import Source

__all__ = [
    "ConfigError",
    "Destination",
    "FilesystemDestination",
    "FlushSettings",
    "KafkaDestination",
    "Locations",
    "MirrorSettings",
    "Problem",
    "PropertyCheck",
    "S3Credentials",
    "S3Destination",
    "Settings",
    "SourceSettings",
    "SparkSettings",
    "config_error",
    "json_schema",
    "load",
    "load_text",
    "parse_size",
]

_LIMIT_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """The Spark session that runs the work."""

    master: str = "local[*]"
    """Spark's master URL."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Spark properties by name; every name begins with `spark.`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """The cluster that a mirror reads."""

    bootstrap_servers: str
    """`host:port`, separated by commas, without spaces."""

    group_id: str
    """Consumer group that stands for the mirror in monitoring; positions never come from it."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Connection properties under librdkafka's names, not checked here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemDestination:
    """A folder that receives objects, in `<root>/<name>/<partition>/`."""

    name: str
    """Name of the folder below `root`: one path component."""

    root: Path
    """Absolute, without `..`; it need not exist."""

    drift_check_ms: int = 60_000
    """100..86,400,000."""

    affects_readiness: bool = True
    """Whether `/readyz` says no while it cannot be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDestination:
    """A topic of another cluster that receives record batches."""

    name: str
    """Stands for the destination in logs, metrics and reports."""

    bootstrap_servers: str
    """`host:port`, separated by commas, without spaces."""

    topic: str
    """Its name there; partitions have the numbers of the source."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Connection properties under librdkafka's names, not checked here."""

    offsets: Offsets = "preserve"
    holes: Holes = "markers"
    """Without meaning for `offsets: translate`."""

    topic_sync: TopicSync = "create"
    timestamp_mode: TimestampMode = "source"

    replication_factor: int | None = None
    """Of a topic that is made, 1..32767; None for the cluster's own default."""

    max_batch_bytes: int = 1_000_000
    """Batches are merged up to this size, 0..2^31-1; 0 for never."""

    affects_readiness: bool = True
    """Whether `/readyz` says no while it cannot be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Credentials:
    """Who we are for a store; what is empty is found as the AWS tools find it."""

    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    profile: str = ""
    role_arn: str = ""
    sts_endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Destination:
    """A bucket that receives objects, under `<prefix>/<name>/<partition>/`."""

    name: str
    """Name of the folder below `prefix`: one path component."""

    bucket: str
    prefix: str = ""
    """Without slashes around it."""

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
    """Whether `/readyz` says no while it cannot be written to."""

    write: S3Credentials = field(default_factory=S3Credentials)
    read: S3Credentials = field(default_factory=S3Credentials)


Destination = FilesystemDestination | KafkaDestination | S3Destination


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """When an object ends; the first limit that is reached ends it."""

    max_time_ms: int
    """Longest wait of a record, in milliseconds, 1..2^63-1."""

    max_bytes: int
    """Payload bytes of one object, 1..2^63-1."""

    max_offsets: int
    """Offsets that one object covers, 1..2^63-1."""

    daily_at_utc_s: int | None = None
    """Seconds after midnight UTC at which everything that waits is written; None for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """One topic and where it goes."""

    name: str
    """Unique in the file."""

    enabled: bool
    source: SourceSettings
    topic: str

    partitions: tuple[int, ...] | None
    """Ascending, without duplicates; None for all, those added later included."""

    destinations: tuple[Destination, ...]
    """At least one; names are unique in the mirror."""

    format: Format
    compression: Compression
    """Of Parquet objects; without meaning for other formats."""

    encoding: Encoding
    """Of NDJSON objects; without meaning for other formats."""

    flush: FlushSettings | None
    """None where no destination receives files, and only there."""

    chain_start: Literal["earliest"] | int | None
    """Where a new archive begins: an offset, the first one of the source, or None for 0. Copies in
    Kafka begin where the source begins."""

    path: str
    """Where the mirror stands in the file, such as `mirrors[0]`; see `Settings.locations`."""

    compaction: Compaction | None = None
    """`log`: objects are snapshots of the latest record of each key."""

    keep_snapshots: int | None = None
    """How many of the newest snapshots are kept, at least 1; None for all."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """What keys and values must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole configuration. Picklable."""

    mirrors: tuple[MirrorSettings, ...]
    """At least one, in the order of the file, disabled ones included."""

    spark: SparkSettings = field(default_factory=SparkSettings)

    on_fatal: OnFatal = "exit"
    """Whether the first mirror that must not go on ends the process, or the last one."""

    metrics_prefix: MetricsPrefix = "logmirror"
    """`mirror_v3`: `/metrics` has mirror-v3's names, too."""

    memory_budget_bytes: int | None = None
    """What all slots may hold of records on their way into archives; None: so much for each."""

    unset_variables: tuple[str, ...] = ()
    """Names of environment variables with credentials that are not set, where a caller of `load`
    does not need them."""

    name: str = ""
    """The file as the user named it."""

    locations: Locations = field(default_factory=lambda: Locations({}), repr=False, compare=False)
    """Line and column of every setting, for problems that only a later check can find."""


def load(
    path: Path | str,
    *,
    environ: Mapping[str, str] | None = None,
    check_properties: PropertyCheck | None = None,
    needs_variables: bool = True,
) -> Settings:
    """Read a configuration file.

    Args:
        path: The YAML file.
        environ: What `${VAR}` refers to; the environment of this process if None.
        check_properties: Called with the connection properties of each source; returns a property
            name, a message and a suggestion (which may be empty) for each one that is wrong.
        needs_variables: Whether variables must be set that only name credentials (`...-env`). Who
            connects to nothing can do without.

    Raises:
        ConfigError: The file cannot be read or anything in it is wrong; carries all problems.
    """
    text = read_file(Path(path))
    return load_text(
        text,
        environ=environ,
        name=str(path),
        check_properties=check_properties,
        needs_variables=needs_variables,
    )


def load_text(
    text: str,
    *,
    environ: Mapping[str, str] | None = None,
    name: str = "configuration",
    check_properties: PropertyCheck | None = None,
    needs_variables: bool = True,
) -> Settings:
    """Read a configuration from a text; `name` stands for it in errors. See `load`."""
    environ = os.environ if environ is None else environ
    source = parse(text, environ=environ)
    model = check(
        source,
        environ=environ,
        check_properties=check_properties,
        needs_variables=needs_variables,
    )
    if model is None:
        raise config_error(name, source.problems)
    return _settings(model, name, source)


def _settings(model: ConfigModel, name: str, source: Source) -> Settings:
    mirrors = (
        _mirror(mirror, model, f"mirrors[{index}]") for index, mirror in enumerate(model.mirrors)
    )
    spark = SparkSettings(master=model.spark.master, properties=model.spark.properties)
    return Settings(
        mirrors=tuple(mirrors),
        spark=spark,
        on_fatal=model.on_fatal,
        metrics_prefix=model.metrics_prefix,
        memory_budget_bytes=model.memory_budget,
        name=name,
        locations=source.locations,
        unset_variables=tuple(dict.fromkeys(source.unset)),
    )


def _mirror(mirror: MirrorModel, model: ConfigModel, path: str) -> MirrorSettings:
    shared = model.destination
    layout: MirrorModel | SharedFilesystemModel | SharedS3Model = (
        mirror if shared is None or isinstance(shared, SharedKafkaModel) else shared
    )
    return MirrorSettings(
        name=mirror.name,
        enabled=mirror.enabled,
        source=_source(mirror.source, mirror.name),
        topic=mirror.topic,
        partitions=(
            parse_partitions(mirror.partitions) if mirror.partition is None else (mirror.partition,)
        ),
        destinations=tuple(_destinations(mirror, shared)),
        format=layout.format,
        compression=layout.compression,
        encoding=layout.encoding,
        compaction=layout.compaction,
        keep_snapshots=parse_snapshots(layout.snapshots or "keep-all"),
        flush=None if layout.flush is None else _flush(layout.flush),
        chain_start=mirror.chain_start,
        path=path,
        types=_types(mirror),
    )


def _types(mirror: MirrorModel) -> ColumnTypes:
    key, value = (None if asked is None else asked.type for asked in (mirror.keys, mirror.values))
    return ColumnTypes(key=key or "bytes", value=value or "bytes")


def _destinations(
    mirror: MirrorModel, shared: SharedFilesystemModel | SharedKafkaModel | SharedS3Model | None
) -> Iterator[Destination]:
    if shared is not None:
        name = mirror.destination_name_override or mirror.topic
        if isinstance(shared, SharedKafkaModel):
            yield _kafka(shared, mirror, name, name)
        elif isinstance(shared, SharedS3Model):
            yield _s3(shared, name)
        else:
            yield _filesystem(name, shared)
        return
    for item in mirror.destinations or ():
        name = item.name or mirror.name
        if isinstance(item, KafkaModel):
            yield _kafka(item, mirror, name, item.topic or mirror.topic)
        elif isinstance(item, S3Model):
            yield _s3(item, name)
        else:
            yield _filesystem(name, item)


def _source(source: SourceModel, mirror_name: str) -> SourceSettings:
    return SourceSettings(
        bootstrap_servers=source.bootstrap_servers,
        group_id=source.group_id or f"logmirror-{mirror_name}",
        properties=source.properties,
    )


def _kafka(
    copy: KafkaModel | SharedKafkaModel, mirror: MirrorModel, name: str, topic: str
) -> KafkaDestination:
    return KafkaDestination(
        name=name,
        bootstrap_servers=copy.bootstrap_servers,
        topic=topic,
        properties=copy.properties,
        offsets=copy.offsets,
        holes=copy.holes,
        topic_sync=copy.topic_sync,
        timestamp_mode=copy.timestamp_mode or mirror.timestamp_mode or "source",
        replication_factor=copy.replication_factor,
        max_batch_bytes=copy.max_batch_bytes,
        affects_readiness=copy.affects_readiness,
    )


def _filesystem(
    name: str, folder: FilesystemModel | SharedFilesystemModel
) -> FilesystemDestination:
    # Lexical, as a shell does it: `Path.resolve` would freeze a link that may be switched later.
    root = Path(os.path.abspath(folder.root))  # noqa: PTH100  # resolve() would follow links
    return FilesystemDestination(
        name=name,
        root=root,
        drift_check_ms=folder.drift_check_ms,
        affects_readiness=folder.affects_readiness,
    )


def _s3(bucket: S3Model | SharedS3Model, name: str) -> S3Destination:
    own = bucket.credentials
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
        write=_credentials(own.write or own),
        read=_credentials(own.read or own),
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


def _flush(flush: FlushModel) -> FlushSettings:
    return FlushSettings(
        max_time_ms=min(flush.max_time_ms, _LIMIT_MAX),
        max_bytes=min(flush.max_bytes, _LIMIT_MAX),
        max_offsets=min(flush.max_offsets, _LIMIT_MAX),
        daily_at_utc_s=None if flush.daily is None else parse_time_of_day(flush.daily.at_utc),
    )
