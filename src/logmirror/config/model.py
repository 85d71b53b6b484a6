"""The shape of the configuration file: every key, its type, its default, its meaning.

A model mirrors one mapping of the YAML file, key by key; `logmirror.config.settings.Settings` is
what the rest of the program uses. The JSON Schema and the tables of `docs/configuration.md` are
generated from the models: the docstring below a field is user documentation.

Destinations are in `destination_model`, the layout of archives in `layout_model`. Single values
(names, servers, times) are in `scalars`. Rules that compare settings (duplicate names, overlapping
directories) are in `rules`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from logmirror.config.base_model import Model
from logmirror.config.broker_model import (
    BrokerModel,  # noqa: TC001  # pydantic evaluates the annotation
)
from logmirror.config.destination_model import (  # noqa: TC001  # pydantic evaluates them
    OneDestination,
    SharedDestination,
)
from logmirror.config.groups_model import (
    GroupsModel,  # noqa: TC001  # pydantic evaluates the annotation
)
from logmirror.config.layout_model import ArchiveLayoutModel, FlushModel
from logmirror.config.scalars import (  # noqa: TC001  # pydantic evaluates the annotations
    ChainStart,
    GroupId,
    Master,
    MemorySize,
    MetricsPrefix,
    Name,
    OnFatal,
    PartitionNumber,
    Partitions,
    Properties,
    Secrets,
    Servers,
    TimestampMode,
    Topic,
    UnpackedSize,
)
from logmirror.config.until_model import (
    UntilModel,  # noqa: TC001  # pydantic evaluates the annotation
)
from logmirror.model import ColumnType  # noqa: TC001  # pydantic evaluates the annotation


class ColumnModel(Model):
    """The type of all keys, or of all values, of a topic."""

    type: ColumnType = "utf8"
    """`bytes`: any bytes, a binary column in Parquet. `utf8`: UTF-8 text. `json`: UTF-8 text whose
    Parquet column is annotated as JSON. `json-parseable`: as `json`, and each is one JSON value.
    The last three are text columns in Parquet. A record that does not match its type stops the
    mirror."""


class SourceModel(Model):
    """The source cluster."""

    bootstrap_servers: Servers
    """`host:port` of one or more brokers, separated by commas."""

    group_id: GroupId | None = None
    """Accepted for compatibility with mirror-v3, and ignored: logmirror uses no consumer group.
    Positions are read from the destination."""

    properties: Properties = Field(default_factory=dict)
    """Connection properties under librdkafka's names, such as `security.protocol`. Values are used
    as written. They appear in no message, log line or report, except the user name."""


class MirrorModel(ArchiveLayoutModel):
    """One topic and its destinations."""

    name: Name
    """Name of the mirror in logs, metrics and reports; unique in the file."""

    enabled: bool = True
    """Whether `run` runs this mirror. A disabled mirror is validated too."""

    source: SourceModel
    """The source cluster."""

    topic: Topic
    """The source topic."""

    partition: PartitionNumber | None = None
    """The one partition to replicate. Either this or `partitions` is required."""

    partitions: Partitions | None = None
    """The partitions to replicate: `all`, which includes partitions that are added later, or a list
    of numbers and ranges such as `[0, 1, "4-7"]`."""

    destinations: Annotated[list[OneDestination], Field(min_length=1)] | None = None
    """The destinations of the topic. Each has its own position. Required unless the file has one
    `destination` for all mirrors."""

    destination_name_override: Name | None = None
    """Name of the directory below `root` of the shared `destination`, or of the topic if that is a
    Kafka cluster; by default the topic's name."""

    keys: ColumnModel | None = None
    """The type of the keys, at every destination. By default keys are bytes and none is refused; a
    mapping without `type` means `utf8`."""

    values: ColumnModel | None = None
    """The type of the values, at every destination; see `keys`."""

    flush: FlushModel | None = None
    """When an object ends. Required if a destination is of type `filesystem` or `s3`."""

    timestamp_mode: TimestampMode | None = None
    """Default of `timestamp-mode` for the destinations of type `kafka`."""

    groups: GroupsModel | None = None
    """Translates the source's consumer groups at destinations of type `kafka`, and stores their
    committed offsets beside archives. By default neither."""

    chain_start: ChainStart | None = None
    """First offset of a new archive: an offset, or `earliest` for the source's log start offset. By
    default 0: it is an error if the source's log starts later, because records are lost. Only for
    destinations of type `filesystem` and `s3`: a replica in Kafka starts where the source's log
    starts."""

    until: UntilModel | None = None
    """Where the copy ends, for example to restore a topic up to a point in time. By default it does
    not end."""


class LimitsModel(Model):
    """The largest record and batch that are unpacked in memory.

    Brokers limit batches as they were compressed, so a small batch may hold gigabytes. The limits
    apply where records are decoded: in `parquet` and `ndjson`, with `compaction: log`, with
    declared types, and in `verify --deep`. A `native` object holds batches as they are. A replica
    in Kafka unpacks small batches to merge them, and batches with offset gaps; there only
    `max-batch-unpacked-bytes` applies.
    """

    max_record_bytes: UnpackedSize = 256 << 20
    """Largest record: key, value, headers and their lengths, in bytes or as a size such as `64MiB`,
    from 1MiB to 2047MiB. A larger one stops the mirror, and the error has its offset."""

    max_batch_unpacked_bytes: UnpackedSize = 256 << 20
    """Largest compressed batch, decompressed, in the same form. A larger one stops the mirror, and
    the error has its first offset. A slot needs up to four times this memory for such a batch, in
    addition to `memory-budget`."""


class SparkModel(Model):
    """The Spark session that runs the work."""

    master: Master = "local[*]"
    """Spark's master URL: `local[N]` for N slots on this machine, `local[*]` for one per core.

    Destinations that do not wait for each other add slots to these.
    """

    properties: Properties = Field(default_factory=dict)
    """Properties of the Spark session, such as `spark.driver.memory`. Their values appear in no
    message, log line or report of logmirror."""

    allow_plain: bool = False
    """Consents to a cluster that receives tasks, with the credentials in them, without
    authentication or without encryption. By default `spark.authenticate` and
    `spark.network.crypto.enabled` (or `spark.ssl.rpc.enabled`) must be true on a cluster; a local
    master needs neither."""

    secrets: Secrets = "driver"
    """Who resolves references to secrets for executors. `driver`: tasks carry passwords, private
    keys and keys of buckets. `executors`: tasks carry `${NAME}` or `${file:PATH}` instead, and each
    executor resolves them in its own environment and files. Each secret must then be one reference,
    without a default or other text. The driver and all executors need it."""


class ConfigModel(Model):
    """Configuration of logmirror."""

    mirrors: Annotated[list[MirrorModel], Field(min_length=1)] = Field(default_factory=list)
    """The mirrors. Required in a file without `broker`."""

    destination: SharedDestination | None = None
    """One destination for all mirrors, instead of `destinations` in each mirror."""

    on_fatal: OnFatal = "exit"
    """What happens after a non-retriable error of a mirror (corruption, an invalid position, wrong
    usage). `exit`: work in progress is finished, and the process ends with the error's exit code.
    `isolate`: the mirror stops and the others continue; the process ends with that exit code when
    it is stopped, or when no mirror is left."""

    metrics_prefix: MetricsPrefix = "logmirror"
    """`mirror_v3`: the metrics are also exported under mirror-v3's names and labels, for existing
    dashboards and alerts. Metrics with the prefix `logmirror_` are exported in either case."""

    memory_budget: MemorySize | None = None
    """Memory for the records of archives that are being written, for all slots together: bytes, or
    a size such as `512MiB`, at least 32MiB. A smaller budget means smaller pieces and fewer objects
    written in parallel; it never changes which offsets an object covers. By default 320 MiB for
    each slot."""

    limits: LimitsModel = Field(default_factory=LimitsModel)
    """The largest record and batch that are unpacked in memory."""

    spark: SparkModel = Field(default_factory=SparkModel)
    """The Spark session that runs the work."""

    broker: BrokerModel | None = None
    """The embedded broker, which `logmirror broker -c FILE` runs. The mirrors do not need it."""
