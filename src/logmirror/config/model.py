"""The shape of the configuration file: every key, its type, its default, its meaning.

The classes here are what one YAML file says, key by key; what it means for the product is
`logmirror.config.Settings`. The JSON Schema and the reference page are generated from here, so a
docstring below a field is documentation that people read in their editor.

Single values (names, servers, times) are in `logmirror.config.scalars`; rules that need more
than one setting (names that clash, folders that overlap) in `logmirror.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from logmirror.config.scalars import (
    MAX_BATCH_BYTES,
    MAX_DRIFT_CHECK_MS,
    MAX_REPLICATION_FACTOR,
    Bucket,
    ChainStart,
    Compaction,
    Compression,
    Encoding,
    Endpoint,
    EnvironmentName,
    Format,
    GroupId,
    Holes,
    Limit,
    Master,
    MemorySize,
    MetricsPrefix,
    Name,
    Offsets,
    OnFatal,
    PartitionNumber,
    Partitions,
    Prefix,
    Properties,
    Root,
    Servers,
    Snapshots,
    TimeOfDay,
    TimestampMode,
    Topic,
    TopicSync,
)
from logmirror.model import ColumnType  # noqa: TC001  # pydantic looks at it

DESTINATION_TYPES: Final = ("filesystem", "kafka", "s3")
"""The values of `type`, which decides what else a destination says."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=_kebab,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        """`key:` and `key: ${VAR:-}` with nothing behind it mean what leaving the key out means."""
        if not isinstance(value, dict):
            return value
        known = {_kebab(name) for name in cls.model_fields}
        return {k: v for k, v in value.items() if v is not None or k not in known}


class DailyModel(_Model):
    """A time of day at which everything that is waiting is written."""

    at_utc: TimeOfDay
    """Time of day in UTC, `HH:MM` or `HH:MM:SS`."""


class FlushModel(_Model):
    """When an object ends. The first limit that is reached ends it.

    Very large numbers, up to 18446744073709551615, turn a limit off.
    """

    max_time_ms: Limit
    """Longest time, in milliseconds, that a record waits for more before it is written."""

    max_bytes: Limit
    """Size of the records (keys, values, headers) in one object, in bytes."""

    max_offsets: Limit
    """Number of offsets that one object covers."""

    daily: DailyModel | None = None
    """Also write once a day, at a fixed time, whatever the limits say."""


class ColumnModel(_Model):
    """What all keys, or all values, of a topic are."""

    type: ColumnType = "utf8"
    """`bytes`: anything, a binary column in Parquet. `utf8`: UTF-8 text. `json`: UTF-8 text, and
    Parquet marks the column as JSON. `json-parseable`: the same, and each is one JSON value. The
    last three are text columns in Parquet; a record that is not of its type stops the mirror."""


class SourceModel(_Model):
    """The Kafka cluster that is copied."""

    bootstrap_servers: Servers
    """`host:port` of one or more brokers, separated by commas."""

    group_id: GroupId | None = None
    """Name of the consumer group that stands for this mirror; by default `logmirror-` and the name
    of the mirror. A position never comes from a group, and this version commits nothing to it."""

    properties: Properties = Field(default_factory=dict)
    """Connection properties under librdkafka's names, such as `security.protocol`. Values are taken
    as they are written; no message, log line or report shows them, but for the user's name."""


class _ArchiveModel(_Model):
    """What archives in folders and in buckets have in common."""

    drift_check_ms: Annotated[int, Field(ge=100, le=MAX_DRIFT_CHECK_MS)] = 60_000
    """How often each partition's newest objects are listed, also when nothing new comes, to see
    whether somebody else has added or removed some. One listing per partition each time."""

    affects_readiness: bool = True
    """Whether `/readyz` says no while this destination cannot be written to. A mirror that must not
    go on is told as long as any of its destinations says `true`."""


class FilesystemModel(_ArchiveModel):
    """A folder on this machine, or on a file system that it mounts."""

    name: Name | None = None
    """Name of the folder below `root`; by default the name of the mirror. Required where a mirror
    has several destinations."""

    type: Literal["filesystem"]
    """Kind of destination."""

    root: Root
    """Folder that holds the archive, absolute or from the working directory. Objects are written to
    `<root>/<name>/<partition>/`."""


class IdentityModel(_Model):
    """Who we are for a store.

    Without keys and profile: what the AWS tools would find, in the environment, the shared files,
    or the machine's or the pod's role.
    """

    access_key_id: str | None = None
    """Access key."""

    secret_access_key: str | None = None
    """Its secret; best as `${file:PATH}`. No message, log line or report shows it."""

    session_token: str | None = None
    """Token of temporary credentials."""

    access_key_id_env: EnvironmentName | None = None
    """Name of the environment variable that holds the access key, instead of the key itself."""

    secret_access_key_env: EnvironmentName | None = None
    """Name of the environment variable that holds the secret."""

    profile: str | None = None
    """A profile of the AWS configuration files, of the machines that run Spark's executors too."""

    role_arn: str | None = None
    """A role that is assumed with these credentials, and renewed before it ends."""

    sts_endpoint: Endpoint | None = None
    """URL of the service that roles are asked of, where it is not Amazon's; by default what the AWS
    tools would find, for instance in `AWS_ENDPOINT_URL_STS`. `endpoint` is not taken for it."""


class CredentialsModel(IdentityModel):
    """Who we are for a store, the same for all we do or different for writing and reading."""

    write: IdentityModel | None = None
    """Who creates objects, instead of the keys beside it."""

    read: IdentityModel | None = None
    """Who lists and reads objects, instead of the keys beside it."""


class _BucketModel(_ArchiveModel):
    """A bucket of any S3 API, wherever the destination stands."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, value: object) -> object:
        """`prefix: "${PREFIX:-}"` says the same with quotes as without."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v or k not in ("endpoint", "prefix", "region")}

    type: Literal["s3"]
    """Kind of destination."""

    bucket: Bucket
    """Name of the bucket. It must be there."""

    prefix: Prefix | None = None
    """What all names begin with, without slashes around it. Objects are written to
    `<prefix>/<name>/<partition>/`."""

    region: str | None = None
    """Region of the bucket; by default what the AWS tools would find."""

    endpoint: Endpoint | None = None
    """URL of a store that is not Amazon's, such as `https://minio.example:9000`."""

    path_style: bool | None = None
    """Whether the bucket stands in the path and not in the host's name. By default true where an
    endpoint is given."""

    ca_file: str | None = None
    """Certificate of the authority that the store's certificate is from, a PEM file."""

    credentials: CredentialsModel = Field(default_factory=CredentialsModel)
    """Who we are for the store."""

    sse: Literal["AES256", "aws:kms"] | None = None
    """Encryption at rest by the store; by default as the bucket says."""

    kms_key_id: str | None = None
    """Key for `sse: aws:kms`; by default the account's."""

    checksums: Literal["when-supported", "when-required"] = "when-supported"
    """Whether bodies carry a checksum that the store verifies. `when-required` is for stores that
    know none."""

    require_atomic_create: bool = True
    """Whether a store is refused that replaces objects though it was told not to. `false` goes on
    with such a store: claims are read back after a while, which another writer that sleeps for
    longer can slip through, and `status` says "degraded fencing"."""

    encryption: Literal["none"] | None = None
    """Encryption of the objects by us, which this version does not offer; `none` says so."""


class S3Model(_BucketModel):
    """A bucket of any S3 API."""

    name: Name | None = None
    """Name of the folder below `prefix`; by default the name of the mirror. Required where a mirror
    has several destinations."""


class _KafkaCopyModel(_Model):
    """What a copy in another cluster is made of, wherever the destination stands."""

    type: Literal["kafka"]
    """Kind of destination."""

    bootstrap_servers: Servers
    """`host:port` of one or more brokers of the other cluster, separated by commas."""

    properties: Properties = Field(default_factory=dict)
    """Connection properties of the other cluster under librdkafka's names; see `properties` of
    `source`."""

    offsets: Offsets = "preserve"
    """`preserve`: each record has the offset that it has at the source, in a topic that nobody else
    writes to. `translate`: only the records that a read_committed consumer sees, at new offsets,
    in a topic that may hold other data; offset syncs as MirrorMaker 2 writes them tell which offset
    became which."""

    holes: Holes = "markers"
    """What happens to offsets that the source does not show (transaction markers, aborted and
    compacted records, a log that begins above 0), with `offsets: preserve`. `markers`: they are
    taken by control records that no consumer sees. `fail`: the mirror stops before it writes."""

    topic_sync: TopicSync = "create"
    """`create`: a topic that is not there is made with the partitions of the source, and follows
    when partitions are added; one that is there is never changed otherwise. `validate`: it is only
    compared. `off`: nobody looks."""

    timestamp_mode: TimestampMode | None = None
    """`source`: records keep their timestamps. `destination`: the other cluster stamps them when it
    appends them. By default that of the mirror, and without one `source`."""

    replication_factor: Annotated[int, Field(ge=1, le=MAX_REPLICATION_FACTOR)] | None = None
    """Replicas of a topic that `topic-sync: create` makes; by default the other cluster's own."""

    max_batch_bytes: Annotated[int, Field(ge=0, le=MAX_BATCH_BYTES)] = 1_000_000
    """Small batches are merged into batches of up to so many bytes where the link would starve;
    records, offsets and timestamps stay what they are. 0 keeps every batch as it is."""

    affects_readiness: bool = True
    """Whether `/readyz` says no while this destination cannot be written to. A mirror that must not
    go on is told as long as any of its destinations says `true`."""


class KafkaModel(_KafkaCopyModel):
    """A topic of another Kafka cluster. Partitions keep their numbers."""

    name: Name | None = None
    """Name of the destination in logs, metrics and reports; by default the name of the mirror.
    Required where a mirror has several destinations."""

    topic: Topic | None = None
    """Name of the topic in the other cluster; by default the same."""


class SharedFilesystemModel(_ArchiveModel):
    """One folder for all mirrors, instead of `destinations` in each of them."""

    type: Literal["filesystem"]
    """Kind of destination."""

    root: Root
    """Folder that holds the archive, absolute or from the working directory. Objects are written to
    `<root>/<topic>/<partition>/`, or below `destination-name-override` of the mirror."""

    format: Format = "parquet"
    """Format of the objects; see `format` of a mirror."""

    compression: Compression = "zstd-1"
    """Compression of Parquet objects."""

    encoding: Encoding = "base64"
    """How `ndjson` writes keys and values; see `encoding` of a mirror."""

    compaction: Compaction | None = None
    """Whether an object holds all records or the latest of each key; see `compaction` of a
    mirror."""

    snapshots: Snapshots | None = None
    """How many objects of `compaction: log` are kept; see `snapshots` of a mirror."""

    flush: FlushModel
    """When an object ends."""


class SharedS3Model(_BucketModel):
    """One bucket for all mirrors, instead of `destinations` in each of them.

    Objects are written to `<prefix>/<topic>/<partition>/`, or below `destination-name-override` of
    the mirror.
    """

    format: Format = "parquet"
    """Format of the objects; see `format` of a mirror."""

    compression: Compression = "zstd-1"
    """Compression of Parquet objects."""

    encoding: Encoding = "base64"
    """How `ndjson` writes keys and values; see `encoding` of a mirror."""

    compaction: Compaction | None = None
    """Whether an object holds all records or the latest of each key; see `compaction` of a
    mirror."""

    snapshots: Snapshots | None = None
    """How many objects of `compaction: log` are kept; see `snapshots` of a mirror."""

    flush: FlushModel
    """When an object ends."""


class SharedKafkaModel(_KafkaCopyModel):
    """Another Kafka cluster for all mirrors, instead of `destinations` in each of them.

    The topic has the same name there, or that of `destination-name-override` of the mirror.
    """


OneDestination = Annotated[FilesystemModel | KafkaModel | S3Model, Field(discriminator="type")]
SharedDestination = Annotated[
    SharedFilesystemModel | SharedKafkaModel | SharedS3Model, Field(discriminator="type")
]


class MirrorModel(_Model):
    """One topic and where it is copied to."""

    name: Name
    """Name of the mirror, unique in the file: it stands in logs, metrics and reports."""

    enabled: bool = True
    """Whether `run` runs this mirror. It is checked in either case."""

    source: SourceModel
    """The Kafka cluster that is copied."""

    topic: Topic
    """The topic that is copied."""

    partition: PartitionNumber | None = None
    """The one partition that is copied. Either this or `partitions` is required."""

    partitions: Partitions | None = None
    """The partitions that are copied: `all`, those that are added later included, or a list of
    numbers and ranges such as `[0, 1, "4-7"]`."""

    destinations: Annotated[list[OneDestination], Field(min_length=1)] | None = None
    """Where the topic is copied to. Each has its own position and its own pace. Required unless
    the file has one `destination` for all mirrors."""

    destination_name_override: Name | None = None
    """Name of the folder below `root` of the shared `destination`, or of the topic if that is
    another cluster; by default the topic."""

    format: Format = "parquet"
    """Format of the objects. `parquet`: the columns of Spark's Kafka source. `native`: Kafka's
    record batches as the source served them. `ndjson`: one JSON object per record."""

    compression: Compression = "zstd-1"
    """Compression of Parquet objects. The other formats have none of their own; it may stand beside
    `ndjson`, as in mirror-v3, and has no meaning there."""

    encoding: Encoding = "base64"
    """How `ndjson` writes keys and values: `base64` keeps every byte; `utf8` is readable, and a
    record that is not UTF-8 stops the mirror."""

    compaction: Compaction | None = None
    """`log`: an object holds the latest record of each key, complete and sorted by key, instead of
    all records; a tombstone removes its key. Only for `format: parquet`."""

    snapshots: Snapshots | None = None
    """How many of the objects of `compaction: log` are kept: `keep-all`, the default, or the newest
    ones, such as `keep 3`."""

    keys: ColumnModel | None = None
    """What the keys are, at every destination. Without it they are bytes, and none is refused; a
    mapping without `type` says `utf8`."""

    values: ColumnModel | None = None
    """What the values are, at every destination; see `keys`."""

    flush: FlushModel | None = None
    """When an object ends. Required where a destination receives files."""

    timestamp_mode: TimestampMode | None = None
    """`timestamp-mode` of the destinations of type `kafka` that do not say."""

    chain_start: ChainStart | None = None
    """Where a new archive begins: `earliest`, the first offset that the source still has, or an
    offset. By default 0: a source that begins later has lost records, which is an error. Only for
    destinations that receive files: a copy in Kafka begins where the source begins."""


class SparkModel(_Model):
    """The Spark session that runs the work."""

    master: Master = "local[*]"
    """Spark's master URL: `local[N]` for N slots on this machine, `local[*]` for one per core."""

    properties: Properties = Field(default_factory=dict)
    """Properties of the Spark session, such as `spark.driver.memory`. No message, log line or
    report of logmirror shows their values."""


class ConfigModel(_Model):
    """Configuration of logmirror."""

    mirrors: Annotated[list[MirrorModel], Field(min_length=1)]
    """What is copied."""

    destination: SharedDestination | None = None
    """One destination for all mirrors, instead of `destinations` in each of them."""

    on_fatal: OnFatal = "exit"
    """What happens when a mirror must not go on (corruption, a position that makes no sense, wrong
    usage). `exit`: what is being written is finished, and the process ends with the error's exit
    code. `isolate`: that mirror stops and the others go on; the process ends with that exit code
    when it is stopped, or when no mirror is left."""

    metrics_prefix: MetricsPrefix = "logmirror"
    """`mirror_v3`: the metrics are there a second time, under the names and labels of mirror-v3,
    for dashboards and alerts that know these. Those that begin with `logmirror_` stay."""

    memory_budget: MemorySize | None = None
    """Memory for records on their way into files and buckets, for all slots together: bytes, or a
    text such as `512MiB`, at least 32MiB. Less memory means smaller pieces and fewer objects side
    by side, never other objects. By default 320 MiB for each slot."""

    spark: SparkModel = Field(default_factory=SparkModel)
    """The Spark session that runs the work."""
