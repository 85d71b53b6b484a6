"""The shape of the configuration file's section `broker`: the settings of `logmirror broker`.

Each key has the name of the command's option, which overrides it. To add a setting: a field here
and in `broker_settings`, an option in `cli/broker.py`, then `make schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
)

from logmirror.config.addresses import (
    parse_address,
    parse_advertised,
    parse_listener,
    parse_log_dir,
    parse_override,
    parse_topics,
)
from logmirror.config.base_model import Model
from logmirror.config.destination_model import ArchiveBucketModel
from logmirror.config.scalars import (
    Encoding,  # noqa: TC001  # pydantic evaluates the annotation
)

if TYPE_CHECKING:
    from collections.abc import Callable

_SEVERAL: Final = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_address(text: str) -> str:
    parse_address(text)
    return text


def _check_topics(texts: list[str], info: ValidationInfo) -> list[str]:
    parse_topics(texts, info.data.get("partitions", 1))
    return texts


def _each(parse: Callable[[str], object]) -> AfterValidator:
    """Check each text of a list."""

    def check(texts: list[str]) -> list[str]:
        for text in texts:
            parse(text)
        return texts

    return AfterValidator(check)


_Several = Annotated[
    list[str], BeforeValidator(_as_list), Field(min_length=1), WithJsonSchema(_SEVERAL)
]

_Mechanisms = Annotated[
    list[Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]],
    BeforeValidator(_as_list),
    Field(min_length=1),
    WithJsonSchema(_SEVERAL),
]
_File = Annotated[str, Field(min_length=1)] | None


ARCHIVE_TAGS: Final = ("location", "bucket")
"""What pydantic adds to the path of an archive: a text is a location."""


def _archives_schema(schema: dict[str, Any]) -> None:
    """Allow one archive in place of a list."""
    listed = {key: schema.pop(key) for key in ("type", "items", "minItems")}
    schema["anyOf"] = [*listed["items"].pop("oneOf"), listed]
    listed["items"]["anyOf"] = schema["anyOf"][:2]


_Archives = Annotated[
    list[
        Annotated[
            Annotated[str, Field(min_length=1), Tag("location")]
            | Annotated[ArchiveBucketModel, Tag("bucket")],
            Discriminator(lambda one: "bucket" if isinstance(one, dict) else "location"),
        ]
    ],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1, json_schema_extra=_archives_schema),
]


class BrokerModel(Model):
    """The embedded broker. Each key is an option of `logmirror broker`, which overrides it."""

    log_dir: Annotated[_Several, _each(parse_log_dir)]
    """Directory of the topics, or a list of them. A new partition goes to the directory with the
    fewest partitions. One of them may be `s3://BUCKET/PREFIX`, which gets none if others are on
    disks."""

    work_dir: _File = None
    """Directory for copies of what is in the bucket; by default a temporary one."""

    commit_interval_ms: Annotated[int, Field(ge=1, le=60_000)] = 100
    """Least time between two objects of acknowledged records in the bucket."""

    max_seals_per_second: Annotated[int, Field(ge=1, le=100_000)] = 20
    """In a bucket: limit for the segments that are sealed before they are full, so that a start
    has less to read. With more partitions than it allows for, a start reads more."""

    standby: bool = False
    """With a log directory in a bucket: whether to wait until its owner is gone, and take over
    then. Otherwise the broker takes it over at once."""

    standby_timeout_ms: Annotated[int, Field(ge=5_000, le=3_600_000)] = 9_000
    """How long the owner must show no sign of life until a standby takes over."""

    archive: _Archives = Field(default_factory=list)
    """A directory, `s3://BUCKET/PREFIX` or a mapping, or a list of them: archives of mirrors,
    served as read-only topics. A mapping has the settings of a bucket, as a mirror's destination:
    `bucket`, `prefix`, `region`, `endpoint`, `path-style`, `ca-file` and `credentials`. Without,
    a bucket is accessed with the defaults of the AWS SDK."""

    archive_cache_bytes: Annotated[int, Field(ge=1)] = 1024**3
    """Limit for the local copies of objects of archives, in bytes."""

    archive_encoding: Encoding | None = None
    """The `encoding` with which NDJSON was archived. NDJSON does not show it, and is not served
    without."""

    listen: Annotated[str, AfterValidator(_check_address)] = "127.0.0.1:9092"
    """`HOST:PORT`; port 0: any free port."""

    auto_create: bool = True
    """Whether a topic is created when a client asks for its metadata."""

    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Default number of partitions of a new topic."""

    flush_on_ack: bool = True
    """Whether a record is flushed before its response. Without, a power loss can take away the
    records of the last second."""

    topic: Annotated[_Several, AfterValidator(_check_topics)] = Field(default_factory=list)
    """`NAME` or `NAME:PARTITIONS`, or a list of them: topics that are created before the broker
    listens, if they do not exist."""

    override: Annotated[_Several, _each(parse_override)] = Field(default_factory=list)
    """`NAME=VALUE`, or a list of them: defaults of topic settings, by Kafka's name of the broker
    setting, such as `log.retention.ms=604800000`."""

    monitoring_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of `/metrics`, `/livez`, `/readyz` and `/status.json`; 0: none."""

    monitoring_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """IP address on which that port listens."""

    listener: Annotated[_Several, _each(parse_listener)] = Field(default_factory=list)
    """`[NAME=]PROTOCOL://HOST:PORT`, or a list of them, instead of `listen`. The protocol is
    `PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`."""

    advertise: Annotated[_Several, _each(parse_advertised)] = Field(default_factory=list)
    """`NAME=HOST:PORT`, or a list of them: the address at which clients of a listener reach it."""

    allow_anonymous: bool = False
    """Whether other hosts may connect to a listener that does not authenticate clients."""

    tls_certificate: _File = None
    """Certificate of the broker, a PEM file."""

    tls_key: _File = None
    """Its key, a PEM file, if it is in another one."""

    tls_client_ca: _File = None
    """Authorities of clients' certificates, a PEM file."""

    tls_client_auth: Literal["none", "requested", "required"] = "none"
    """Whether clients of `SSL` listeners show a certificate."""

    sasl_mechanism: _Mechanisms = Field(default_factory=list)
    """`PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`, or a list of them. By default all are offered,
    but `PLAIN` only with TLS or on loopback."""

    super_user: _Several = Field(default_factory=list)
    """`User:NAME`, or a list of them: may do everything, and all others need ACLs. By default there
    are no ACLs."""

    max_connections: Annotated[int, Field(ge=1)] = 1000
    """Connections; half the system's limit of open files is the most."""

    max_connections_per_address: Annotated[int, Field(ge=0)] = 0
    """Connections of one client address; 0: no limit."""

    max_session_ms: Annotated[int, Field(ge=0)] = 0
    """How long a login by SASL lasts, in ms. A connection whose client does not repeat it is closed
    at its next request. 0: logins have no end."""
