"""The configuration: reads one YAML file, and returns frozen settings or every problem at once.

    settings = load(Path("logmirror.yaml"))

Invariants:

1. `Settings` exist only for a file without problems. No other code validates them again.
2. Every default is filled in, every directory is absolute, every number is in range.
3. Values of connection and Spark properties may be secrets: no `repr` and no error shows them.
4. Loading reads the file, the environment, the files that `${file:PATH}` names, and symbolic links
   of the destination directories. It creates nothing and connects to nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from logmirror.config.broker_settings import BrokerSettings, broker_settings
from logmirror.config.destination_model import (
    SharedFilesystemModel,
    SharedKafkaModel,
    SharedS3Model,
)
from logmirror.config.destinations import (
    Destination,
    FilesystemDestination,
    KafkaDestination,
    S3Credentials,
    S3Destination,
    destinations_of,
)
from logmirror.config.files import read_file
from logmirror.config.groups_model import GroupsSettings, groups_settings
from logmirror.config.problems import ConfigError, Locations, Problem, config_error
from logmirror.config.rules import PropertyCheck, check
from logmirror.config.scalars import (
    Compaction,
    Compression,
    Encoding,
    Format,
    MetricsPrefix,
    OnFatal,
    Secrets,
    parse_partitions,
    parse_size,
    parse_snapshots,
    parse_time_of_day,
)
from logmirror.config.schema import json_schema
from logmirror.config.secret_rules import with_secrets
from logmirror.config.source import parse
from logmirror.config.until_model import UntilSettings, until_settings
from logmirror.model import ColumnTypes, Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.config.layout_model import FlushModel
    from logmirror.config.model import ConfigModel, MirrorModel
    from logmirror.config.source import Source
    from logmirror.references import Reference

__all__ = [
    "BrokerSettings",
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
    """Spark properties by name. Every name begins with `spark.`."""

    allow_plain: bool = False
    """Whether a cluster may receive tasks, with the credentials in them, in clear."""

    secrets: Secrets = "driver"
    """`executors`: tasks hold references to secrets, which each executor resolves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """The source cluster of a mirror."""

    bootstrap_servers: str
    """`host:port`, separated by commas, without spaces."""

    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Connection properties under librdkafka's names, not checked here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """When an object ends. The first limit that is reached ends it."""

    max_time_ms: int
    """Longest time that a record is pending, in milliseconds, 1..2^63-1."""

    max_bytes: int
    """Payload bytes of one object, 1..2^63-1."""

    max_offsets: int
    """Offsets that one object covers, 1..2^63-1."""

    daily_at_utc_s: int | None = None
    """Seconds after midnight UTC at which all pending records are written; None for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """One topic and its destinations."""

    name: str
    """Unique in the file."""

    enabled: bool
    source: SourceSettings
    topic: str

    partitions: tuple[int, ...] | None
    """Ascending, without duplicates; None for all, which includes partitions added later."""

    destinations: tuple[Destination, ...]
    """At least one. Names are unique in the mirror."""

    format: Format

    compression: Compression
    """Compression of Parquet objects; not used for other formats."""

    encoding: Encoding
    """Encoding of keys and values in NDJSON objects; not used for other formats."""

    flush: FlushSettings | None
    """None if, and only if, all destinations are Kafka topics."""

    chain_start: Literal["earliest"] | int | None
    """First offset of a new archive: an offset, the source's log start offset, or None for 0.
    Replicas in Kafka start where the source's log starts."""

    path: str
    """Path of the mirror in the file, such as `mirrors[0]`; see `Settings.locations`."""

    compaction: Compaction | None = None
    """`log`: objects are snapshots of the latest record of each key."""

    keep_snapshots: int | None = None
    """How many of the newest snapshots are kept, at least 1; None for all."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """The types of keys and values."""

    groups: GroupsSettings | None = None
    """The consumer groups; None: they are not translated."""

    until: UntilSettings | None = None
    """Where the copy ends; None: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole configuration. Picklable, but with a `Reference` in place of each `Secret`."""

    mirrors: tuple[MirrorSettings, ...]
    """In the order of the file, including disabled ones. At least one, unless there is `broker`."""

    broker: BrokerSettings | None = None
    """The embedded broker; None if the file has no such section."""

    spark: SparkSettings = field(default_factory=SparkSettings)

    on_fatal: OnFatal = "exit"
    """Whether a non-retriable error of one mirror ends the process, or stops only that mirror."""

    metrics_prefix: MetricsPrefix = "logmirror"
    """`mirror_v3`: `/metrics` also has mirror-v3's names."""

    memory_budget_bytes: int | None = None
    """Memory of all slots together for records of archives that are being written; None for the
    default of each slot."""

    limits: Limits = field(default_factory=Limits)
    """The largest record and batch that are unpacked in memory."""

    unset_variables: tuple[str, ...] = ()
    """Environment variables for credentials that are not set, if the caller of `load` did not
    require them."""

    name: str = ""
    """The file as the user named it."""

    locations: Locations = field(default_factory=lambda: Locations({}), repr=False, compare=False)
    """Line and column of every setting, for problems that a later check finds."""


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
        environ: The variables for `${VAR}`; None for the environment of this process.
        check_properties: Called with the connection properties of each cluster; returns a property
            name, a message and a suggestion (which may be empty) for each wrong property.
        needs_variables: Whether a variable that holds credentials (`...-env`) must be set. A
            caller that does not connect can pass False.

    Raises:
        ConfigError: The file cannot be read or is invalid; carries all problems.
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
    """Read a configuration from a text. `name` stands for the file in errors; see `load`."""
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
    references = source.references if model.spark.secrets == "executors" else {}
    mirrors = (
        _mirror(mirror, model, f"mirrors[{index}]", references)
        for index, mirror in enumerate(model.mirrors)
    )
    spark = SparkSettings(
        master=model.spark.master,
        properties=model.spark.properties,
        allow_plain=model.spark.allow_plain,
        secrets=model.spark.secrets,
    )
    return Settings(
        mirrors=tuple(mirrors),
        broker=None if model.broker is None else broker_settings(model.broker),
        spark=spark,
        on_fatal=model.on_fatal,
        metrics_prefix=model.metrics_prefix,
        memory_budget_bytes=model.memory_budget,
        limits=Limits(
            max_record_bytes=model.limits.max_record_bytes,
            max_batch_unpacked_bytes=model.limits.max_batch_unpacked_bytes,
        ),
        name=name,
        locations=source.locations,
        unset_variables=tuple(dict.fromkeys(source.unset)),
    )


def _mirror(
    mirror: MirrorModel, model: ConfigModel, path: str, references: Mapping[str, Reference]
) -> MirrorSettings:
    shared = model.destination
    layout: MirrorModel | SharedFilesystemModel | SharedS3Model = (
        mirror if shared is None or isinstance(shared, SharedKafkaModel) else shared
    )
    return MirrorSettings(
        name=mirror.name,
        enabled=mirror.enabled,
        source=SourceSettings(
            bootstrap_servers=mirror.source.bootstrap_servers,
            properties=with_secrets(
                mirror.source.properties, f"{path}.source.properties", references
            ),
        ),
        topic=mirror.topic,
        partitions=(
            parse_partitions(mirror.partitions) if mirror.partition is None else (mirror.partition,)
        ),
        destinations=tuple(destinations_of(mirror, shared, path, references)),
        format=layout.format,
        compression=layout.compression,
        encoding=layout.encoding,
        compaction=layout.compaction,
        keep_snapshots=parse_snapshots(layout.snapshots or "keep-all"),
        flush=None if layout.flush is None else _flush(layout.flush),
        chain_start=mirror.chain_start,
        path=path,
        types=ColumnTypes(
            key="bytes" if mirror.keys is None else mirror.keys.type,
            value="bytes" if mirror.values is None else mirror.values.type,
        ),
        groups=None if mirror.groups is None else groups_settings(mirror.groups),
        until=None if mirror.until is None else until_settings(mirror.until),
    )


def _flush(flush: FlushModel) -> FlushSettings:
    return FlushSettings(
        max_time_ms=min(flush.max_time_ms, _LIMIT_MAX),
        max_bytes=min(flush.max_bytes, _LIMIT_MAX),
        max_offsets=min(flush.max_offsets, _LIMIT_MAX),
        daily_at_utc_s=None if flush.daily is None else parse_time_of_day(flush.daily.at_utc),
    )
