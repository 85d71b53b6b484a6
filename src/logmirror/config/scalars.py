"""Single values of the configuration file: their types, checks and JSON Schema.

A check that fails raises `ValueError` with a message that continues the key: lower case, no full
stop, without the value.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from logmirror.config.source import SourceMap

MAX_PARTITION: Final = 2**31 - 1
"""Kafka numbers partitions with a signed 32-bit integer."""

MAX_LISTED_PARTITIONS: Final = 100_000
"""Most partitions that a list may name. A typing error such as "0-2000000000" names more."""

MAX_NAME_BYTES: Final = 200
"""Longest name, in bytes. It becomes a directory name, of which file systems allow 255 bytes."""

U64_MAX: Final = 2**64 - 1

MAX_REPLICATION_FACTOR: Final = 2**15 - 1
"""Kafka counts replicas with a signed 16-bit integer."""

MAX_DRIFT_CHECK_MS: Final = 86_400_000

MAX_BATCH_BYTES: Final = 2**31 - 1
"""Kafka stores the length of a record batch as a signed 32-bit integer."""

Format = Literal["parquet", "native", "ndjson"]
Compression = Literal["zstd-1", "zstd-3", "snappy", "lz4", "uncompressed"]
Encoding = Literal["base64", "utf8"]
Compaction = Literal["log"]
Offsets = Literal["preserve", "translate"]
Gaps = Literal["markers", "fail"]
TopicSync = Literal["create", "validate", "off"]
TimestampMode = Literal["source", "destination"]

OnFatal = Literal["exit", "isolate"]
Secrets = Literal["driver", "executors"]
MetricsPrefix = Literal["logmirror", "mirror_v3"]

MEMORY_BYTES_MIN: Final = 32 << 20
"""One slot needs this much to write one object."""

UNPACKED_BYTES_MIN: Final = 1 << 20
UNPACKED_BYTES_MAX: Final = 2047 << 20
"""Offsets in a column of records are 32-bit numbers."""

_MEMORY = re.compile(r"([0-9]{1,18}) ?(B|KiB|MiB|GiB|TiB)?")
_MEMORY_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ENDPOINT = re.compile(r"https?://(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?/?")
_SNAPSHOTS = re.compile(r"keep ([1-9][0-9]{0,8})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
        message = "must be printable, without leading or trailing spaces"
        raise ValueError(message)
    if text.startswith(".") or "/" in text or "\\" in text:
        message = "must not begin with a dot or contain a slash: it is a directory name"
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
    """Return the name if it is legal for a topic in Kafka.

    Raises:
        ValueError: It is not; the message lists what is legal.
    """
    if not _TOPIC.fullmatch(text) or text in {".", ".."}:
        message = "is not a legal topic name: 1 to 249 letters, digits, dots, dashes, underscores"
        raise ValueError(message)
    return text


def _check_root(text: str) -> str:
    if not text.isprintable():
        message = "must be the path of a directory"
        raise ValueError(message)
    if "://" in text:
        message = "must be the path of a directory on this machine, not a URL"
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
    """Return the seconds since midnight of HH:MM or HH:MM:SS.

    Raises:
        ValueError: The text has another form, or is not a time of day.
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
    """Return the partitions that `partitions` names, sorted; None for all partitions.

    Raises:
        ValueError: The value is not such a list.
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
            message = f"has a range that is not ascending within 0..{MAX_PARTITION}"
            raise ValueError(message)
        count += last - first + 1
        if count > MAX_LISTED_PARTITIONS:
            message = f"names more than {MAX_LISTED_PARTITIONS} partitions"
            raise ValueError(message)
        found.update(range(first, last + 1))
    if len(found) != count:
        message = "has a duplicate partition"
        raise ValueError(message)
    return tuple(sorted(found))


def _check_partitions(value: object) -> object:
    parse_partitions(value)
    return value


def _check_chain_start(value: object) -> object:
    if value == "earliest" or (type(value) is int and 0 <= value < 2**63):
        return value
    message = "must be earliest, or an offset of 0 or more"
    raise ValueError(message)


def parse_snapshots(text: str) -> int | None:
    """Return how many snapshots are kept; None for all of them.

    Raises:
        ValueError: The text is neither `keep-all` nor `keep N`.
    """
    if text == "keep-all":
        return None
    match = _SNAPSHOTS.fullmatch(text)
    if match is None:
        message = "must be keep-all or, for example, keep 3"
        raise ValueError(message)
    return int(match[1])


def _check_snapshots(text: str) -> str:
    parse_snapshots(text)
    return text


def parse_size(value: object) -> int:
    """Return the bytes of a size: a number of bytes, or a text such as 512MiB.

    Raises:
        ValueError: The value is neither.
    """
    match = _MEMORY.fullmatch(str(value)) if type(value) in (int, str) else None
    if not match:
        message = "must be a number of bytes, or a size such as 512MiB or 2GiB"
        raise ValueError(message)
    return int(match[1]) * _MEMORY_UNITS[match[2] or "B"]


def parse_memory_size(value: object) -> int:
    """Return the bytes of a memory budget, a size of at least `MEMORY_BYTES_MIN`.

    Raises:
        ValueError: The value is not a size, or too small.
    """
    size_bytes = parse_size(value)
    if size_bytes < MEMORY_BYTES_MIN:
        message = f"must be at least {MEMORY_BYTES_MIN >> 20}MiB, which one object needs"
        raise ValueError(message)
    return size_bytes


def parse_unpacked_size(value: object) -> int:
    """Return the bytes of a limit for what is unpacked in memory.

    Raises:
        ValueError: The value is not a size, or out of range.
    """
    size_bytes = parse_size(value)
    if not UNPACKED_BYTES_MIN <= size_bytes <= UNPACKED_BYTES_MAX:
        low, high = UNPACKED_BYTES_MIN >> 20, UNPACKED_BYTES_MAX >> 20
        message = f"must be between {low}MiB and {high}MiB"
        raise ValueError(message)
    return size_bytes


def _texts(value: object) -> object:
    """Return scalars as they were written: a password of digits is a text."""
    if not isinstance(value, SourceMap):
        return value
    return {
        key: value.texts.get(key, "") if isinstance(item, bool | int | float) else item
        for key, item in value.items()
    }


def _check_bucket(text: str) -> str:
    if not _BUCKET.fullmatch(text) or ".." in text:
        message = "is not a legal bucket name: 3 to 63 lower-case letters, digits, dots, dashes"
        raise ValueError(message)
    return text


def _check_prefix(text: str) -> str:
    parts = text.strip("/").split("/")
    if not text.isprintable() or any(part in {"", ".", ".."} for part in parts):
        message = "must be names separated by single slashes"
        raise ValueError(message)
    if any(part.startswith(".") for part in parts):
        message = "must not contain a name that begins with a dot"
        raise ValueError(message)
    return "/".join(parts)


def _check_endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        message = "must be http://host:port or https://host:port"
        raise ValueError(message)
    return text.rstrip("/")


def _check_variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        message = "must be the name of an environment variable"
        raise ValueError(message)
    return text


_Filled = Annotated[str, AfterValidator(_check_filled), Field(json_schema_extra={"minLength": 1})]
Name = Annotated[_Filled, AfterValidator(_check_name)]
GroupId = Annotated[_Filled, AfterValidator(_check_group_id)]
Topic = Annotated[
    str, AfterValidator(check_topic), Field(json_schema_extra={"pattern": f"^{_TOPIC.pattern}$"})
]
Root = Annotated[_Filled, AfterValidator(_check_root)]
Servers = Annotated[_Filled, AfterValidator(_check_servers)]
Bucket = Annotated[
    str, AfterValidator(_check_bucket), Field(json_schema_extra={"pattern": f"^{_BUCKET.pattern}$"})
]
Prefix = Annotated[_Filled, AfterValidator(_check_prefix)]
Endpoint = Annotated[
    str,
    AfterValidator(_check_endpoint),
    Field(json_schema_extra={"pattern": f"^{_ENDPOINT.pattern}$"}),
]
Snapshots = Annotated[
    str,
    AfterValidator(_check_snapshots),
    Field(json_schema_extra={"pattern": f"^(keep-all|{_SNAPSHOTS.pattern})$"}),
]
EnvironmentName = Annotated[
    str,
    AfterValidator(_check_variable),
    Field(json_schema_extra={"pattern": f"^{_VARIABLE.pattern}$"}),
]
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
MemorySize = Annotated[
    Any,
    PlainValidator(parse_memory_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": MEMORY_BYTES_MIN},
                {"type": "string", "pattern": f"^{_MEMORY.pattern}$"},
            ]
        }
    ),
]
UnpackedSize = Annotated[
    Any,
    PlainValidator(parse_unpacked_size),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "integer",
                    "minimum": UNPACKED_BYTES_MIN,
                    "maximum": UNPACKED_BYTES_MAX,
                },
                {"type": "string", "pattern": f"^{_MEMORY.pattern}$"},
            ]
        }
    ),
]
Properties = Annotated[
    dict[str, str],
    BeforeValidator(_texts),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
    ),
]
