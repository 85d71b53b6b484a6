"""The shape of the configuration file: every key, its type, its default, its meaning.

The classes here are what one YAML file says, key by key; what it means for the product is
`logmirror.config.Settings`. The JSON Schema and the reference page are generated from here, so a
docstring below a field is documentation that people read in their editor.

Rules that need more than one setting (names that clash, folders that overlap) are in
`logmirror.config_file.rules`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from logmirror.config_file.source import SourceMap

MAX_PARTITION: Final = 2**31 - 1
"""Kafka numbers partitions with a signed 32-bit integer."""

MAX_LISTED_PARTITIONS: Final = 100_000
"""A list names at most so many partitions; a typing error such as "0-2000000000" names more."""

MAX_NAME_BYTES: Final = 200
"""A name becomes a folder name; common file systems end at 255 bytes and we add to it."""

U64_MAX: Final = 2**64 - 1

MAX_REPLICATION_FACTOR: Final = 2**15 - 1
"""Kafka counts replicas with a signed 16-bit integer."""

MAX_BATCH_BYTES: Final = 2**31 - 1
"""A record batch says its length with a signed 32-bit integer."""

Format = Literal["parquet", "native", "ndjson"]
Compression = Literal["zstd-1", "zstd-3", "snappy", "lz4", "uncompressed"]
Encoding = Literal["base64", "utf8"]
Offsets = Literal["preserve", "translate"]
Holes = Literal["markers", "fail"]
TopicSync = Literal["create", "validate", "off"]
TimestampMode = Literal["source", "destination"]

DESTINATION_TYPES: Final = ("filesystem", "kafka")
"""The values of `type`, which decides what else a destination says."""

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_SERVER = re.compile(r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_MASTER = re.compile(
    r"local(\[(\*|[1-9][0-9]*)(\s*,\s*[1-9][0-9]*)?\])?"
    r"|local-cluster\[[0-9]+\s*,\s*[0-9]+\s*,\s*[0-9]+\]"
    r"|yarn|(spark|k8s)://\S+"
)
_TIME_OF_DAY = re.compile(r"([0-9]{1,2}):([0-9]{1,2})(?::([0-9]{1,2}))?")


def _check_filled(text: str) -> str:
    if not text:
        message = "must not be empty"
        raise ValueError(message)
    return text


def _check_name(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        message = "must be printable, without spaces around it"
        raise ValueError(message)
    if text.startswith(".") or "/" in text or "\\" in text:
        message = "must not begin with a dot or contain a slash: it is the name of a folder"
        raise ValueError(message)
    if len(text.encode()) > MAX_NAME_BYTES:
        message = f"must not be longer than {MAX_NAME_BYTES} bytes"
        raise ValueError(message)
    return text


def _check_group_id(text: str) -> str:
    if not text.isprintable() or len(text.encode()) > MAX_NAME_BYTES:
        message = f"must be 1 to {MAX_NAME_BYTES} bytes of printable text"
        raise ValueError(message)
    return text


def check_topic(text: str) -> str:
    """Return the name if Kafka allows it for a topic.

    Raises:
        ValueError: It does not; the message says what it allows.
    """
    if not _TOPIC.fullmatch(text) or text in {".", ".."}:
        message = "is no legal topic name: 1 to 249 letters, digits, dots, dashes, underscores"
        raise ValueError(message)
    return text


def _check_root(text: str) -> str:
    if not text.isprintable():
        message = "must be the path of a folder"
        raise ValueError(message)
    if "://" in text:
        message = "must be the path of a folder on this machine, not a URL"
        raise ValueError(message)
    if text.startswith("~"):
        message = "`~` is not expanded; write ${HOME} instead"
        raise ValueError(message)
    return text


def _check_servers(text: str) -> str:
    servers = [server.strip() for server in text.split(",") if server.strip()]
    for server in servers or [""]:
        match = _SERVER.fullmatch(server)
        if not match:
            message = "must be host:port, or several separated by commas"
            raise ValueError(message)
        if match[1] is not None and not 1 <= int(match[1]) <= 65535:  # noqa: PLR2004  # TCP's range
            message = "has a port outside 1..65535"
            raise ValueError(message)
    return ",".join(servers)


def _check_master(text: str) -> str:
    if not _MASTER.fullmatch(text):
        message = "must be local, local[N], local[*], spark://host:port, yarn or k8s://..."
        raise ValueError(message)
    return text


def parse_time_of_day(text: str) -> int:
    """Seconds since midnight of HH:MM or HH:MM:SS.

    Raises:
        ValueError: Another form, or no such time; the message says which.
    """
    match = _TIME_OF_DAY.fullmatch(text)
    if not match:
        message = "must be HH:MM or HH:MM:SS"
        raise ValueError(message)
    hour, minute, second = (int(part or 0) for part in match.groups())
    if hour >= 24 or minute >= 60 or second >= 60:  # noqa: PLR2004  # the clock's own limits
        message = "must be between 00:00:00 and 23:59:59"
        raise ValueError(message)
    return hour * 3600 + minute * 60 + second


def _check_time_of_day(text: str) -> str:
    parse_time_of_day(text)
    return text


def parse_partitions(value: object) -> tuple[int, ...] | None:
    """The partitions that `partitions` names, sorted; None for all of them.

    Raises:
        ValueError: Not such a list; the message says why.
    """
    if value == "all":
        return None
    if not isinstance(value, list) or not value:
        message = 'must be all, or a list of numbers and ranges such as [0, 1, "4-7"]'
        raise ValueError(message)
    found: set[int] = set()
    count = 0
    for item in value:
        match = _RANGE.fullmatch(str(item)) if type(item) in (int, str) else None
        if not match:
            message = 'must hold only numbers and ranges such as 3 and "4-7"'
            raise ValueError(message)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > MAX_PARTITION:
            message = f"has a range that is not within 0..{MAX_PARTITION} in ascending order"
            raise ValueError(message)
        count += last - first + 1
        if count > MAX_LISTED_PARTITIONS:
            message = f"names more than {MAX_LISTED_PARTITIONS} partitions"
            raise ValueError(message)
        found.update(range(first, last + 1))
    if len(found) != count:
        message = "names a partition twice"
        raise ValueError(message)
    return tuple(sorted(found))


def _check_partitions(value: object) -> object:
    parse_partitions(value)
    return value


def _check_chain_start(value: object) -> object:
    if value == "earliest" or (type(value) is int and 0 <= value < 2**63):
        return value
    message = "must be earliest or an offset, which is 0 or more"
    raise ValueError(message)


def _texts(value: object) -> object:
    """Take scalars as they were written: a password of digits is a text."""
    if not isinstance(value, SourceMap):
        return value
    return {
        key: value.texts.get(key, "") if isinstance(item, bool | int | float) else item
        for key, item in value.items()
    }


_Filled = Annotated[str, AfterValidator(_check_filled), Field(json_schema_extra={"minLength": 1})]
Name = Annotated[_Filled, AfterValidator(_check_name)]
GroupId = Annotated[_Filled, AfterValidator(_check_group_id)]
Topic = Annotated[
    str, AfterValidator(check_topic), Field(json_schema_extra={"pattern": f"^{_TOPIC.pattern}$"})
]
Root = Annotated[_Filled, AfterValidator(_check_root)]
Servers = Annotated[_Filled, AfterValidator(_check_servers)]
Master = Annotated[str, AfterValidator(_check_master)]
TimeOfDay = Annotated[
    str,
    AfterValidator(_check_time_of_day),
    Field(json_schema_extra={"pattern": f"^{_TIME_OF_DAY.pattern}$"}),
]
Limit = Annotated[int, Field(ge=1, le=U64_MAX)]
PartitionNumber = Annotated[int, Field(ge=0, le=MAX_PARTITION)]
Partitions = Annotated[
    Any,
    PlainValidator(_check_partitions),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "all"},
                {
                    "type": "array",
                    "minItems": 1,
                    "uniqueItems": True,
                    "items": {
                        "anyOf": [
                            {"type": "integer", "minimum": 0, "maximum": MAX_PARTITION},
                            {"type": "string", "pattern": f"^{_RANGE.pattern}$"},
                        ]
                    },
                },
            ]
        }
    ),
]
ChainStart = Annotated[
    Any,
    PlainValidator(_check_chain_start),
    WithJsonSchema({"anyOf": [{"const": "earliest"}, {"type": "integer", "minimum": 0}]}),
]
Properties = Annotated[
    dict[str, str],
    BeforeValidator(_texts),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
    ),
]


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


class SourceModel(_Model):
    """The Kafka cluster that is copied."""

    bootstrap_servers: Servers
    """`host:port` of one or more brokers, separated by commas."""

    group_id: GroupId | None = None
    """Name of the consumer group that stands for this mirror; by default `logmirror-` and the name
    of the mirror. A position never comes from a group, and this version commits nothing to it."""

    properties: Properties = Field(default_factory=dict)
    """Connection properties under librdkafka's names, such as `security.protocol`. Values are taken
    as they are written; no message, log line or report shows them."""


class FilesystemModel(_Model):
    """A folder on this machine, or on a file system that it mounts."""

    name: Name | None = None
    """Name of the folder below `root`; by default the name of the mirror. Required where a mirror
    has several destinations."""

    type: Literal["filesystem"]
    """Kind of destination."""

    root: Root
    """Folder that holds the archive, absolute or from the working directory. Objects are written to
    `<root>/<name>/<partition>/`."""


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


class KafkaModel(_KafkaCopyModel):
    """A topic of another Kafka cluster. Partitions keep their numbers."""

    name: Name | None = None
    """Name of the destination in logs, metrics and reports; by default the name of the mirror.
    Required where a mirror has several destinations."""

    topic: Topic | None = None
    """Name of the topic in the other cluster; by default the same."""


class SharedFilesystemModel(_Model):
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

    flush: FlushModel
    """When an object ends."""


class SharedKafkaModel(_KafkaCopyModel):
    """Another Kafka cluster for all mirrors, instead of `destinations` in each of them.

    The topic has the same name there, or that of `destination-name-override` of the mirror.
    """


OneDestination = Annotated[FilesystemModel | KafkaModel, Field(discriminator="type")]
SharedDestination = Annotated[SharedFilesystemModel | SharedKafkaModel, Field(discriminator="type")]


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
    """Compression of Parquet objects. The other formats have none of their own."""

    encoding: Encoding = "base64"
    """How `ndjson` writes keys and values: `base64` keeps every byte; `utf8` is readable, and a
    record that is not UTF-8 stops the mirror."""

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

    spark: SparkModel = Field(default_factory=SparkModel)
    """The Spark session that runs the work."""
