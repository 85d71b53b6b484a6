"""The destinations in the configuration file: directories, buckets and other Kafka clusters.

Each kind has two shapes: an item of a mirror's `destinations`, and the file's one `destination` for
all mirrors.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from logmirror.config.base_model import Model
from logmirror.config.layout_model import ArchiveLayoutModel, FlushModel
from logmirror.config.scalars import (
    MAX_BATCH_BYTES,
    MAX_DRIFT_CHECK_MS,
    MAX_REPLICATION_FACTOR,
    Bucket,
    Endpoint,
    EnvironmentName,
    Gaps,
    Name,
    Offsets,
    Prefix,
    Properties,
    Root,
    Servers,
    TimestampMode,
    Topic,
    TopicSync,
)

DESTINATION_TYPES: Final = ("filesystem", "kafka", "s3")
"""The values of `type`, which determines the other keys of a destination."""


class _DestinationModel(Model):
    """Settings of every kind of destination."""

    affects_readiness: bool = True
    """Whether `/readyz` reports not ready while this destination cannot be written to. A stopped
    mirror fails readiness unless all of its destinations set `false`."""


class _ArchiveModel(_DestinationModel):
    """Settings of archives in directories and in buckets."""

    drift_check_ms: Annotated[int, Field(ge=100, le=MAX_DRIFT_CHECK_MS)] = 60_000
    """Interval, in milliseconds, at which the newest objects of each partition are listed, to
    detect objects that another program added or removed. Each check is one listing per partition,
    also while no new records arrive."""


class _FilesystemModel(_ArchiveModel):
    type: Literal["filesystem"]
    """Kind of destination."""


class FilesystemModel(_FilesystemModel):
    """A directory on this machine, or on a mounted file system."""

    name: Name | None = None
    """Name of the directory below `root`; by default the name of the mirror. Required if the
    mirror has several destinations."""

    root: Root
    """Directory of the archive, absolute or relative to the working directory. Objects are written
    to `<root>/<name>/<partition>/`."""


class SharedFilesystemModel(ArchiveLayoutModel, _FilesystemModel):
    """One directory for all mirrors, instead of `destinations` in each mirror."""

    root: Root
    """Directory of the archive, absolute or relative to the working directory. Objects are written
    to `<root>/<topic>/<partition>/`; `destination-name-override` of the mirror replaces the
    topic."""

    flush: FlushModel
    """When an object ends."""


class IdentityModel(Model):
    """Credentials for an S3 store.

    Without keys and profile, the standard AWS sources apply: the environment, the shared
    configuration files, or the role of the machine or the pod.
    """

    access_key_id: str | None = None
    """Access key."""

    secret_access_key: str | None = None
    """Secret of the access key; preferably `${file:PATH}`. It appears in no message, log line or
    report."""

    session_token: str | None = None
    """Session token of temporary credentials."""

    access_key_id_env: EnvironmentName | None = None
    """Name of the environment variable that holds the access key, instead of the key itself."""

    secret_access_key_env: EnvironmentName | None = None
    """Name of the environment variable that holds the secret."""

    profile: str | None = None
    """A profile of the AWS configuration files. It must also exist on the machines that run Spark's
    executors."""

    role_arn: str | None = None
    """A role to assume with these credentials. It is renewed before it expires."""

    sts_endpoint: Endpoint | None = None
    """URL of the STS that grants the role, if it is not Amazon's; by default from the standard AWS
    sources, for instance `AWS_ENDPOINT_URL_STS`. `endpoint` is not used for it."""


class CredentialsModel(IdentityModel):
    """Credentials for an S3 store, for all requests or separately for `write` and `read`."""

    write: IdentityModel | None = None
    """Identity for creating objects, instead of the keys at this level."""

    read: IdentityModel | None = None
    """Identity for listing and reading objects, instead of the keys at this level."""


class ArchiveBucketModel(Model):
    """An archive in a bucket of any S3-compatible store, with its own access."""

    bucket: Bucket
    """Name of the bucket."""

    prefix: Prefix | None = None
    """`prefix` of the mirror's destination, without leading and trailing slashes."""

    region: str | None = None
    """Region of the bucket; by default from the standard AWS sources."""

    endpoint: Endpoint | None = None
    """URL of a store other than Amazon S3, such as `https://minio.example:9000`."""

    path_style: bool | None = None
    """Whether the bucket's name is in the path instead of the host name. By default true if
    `endpoint` is set."""

    ca_file: str | None = None
    """PEM file with the CA certificate that signed the store's certificate."""

    credentials: IdentityModel = Field(default_factory=IdentityModel)
    """Credentials for listing and reading objects."""


class _BucketModel(_ArchiveModel):
    """Settings of a bucket, in both shapes."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, value: object) -> object:
        """Give `prefix: "${PREFIX:-}"` the same meaning with and without quotes."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v or k not in ("endpoint", "prefix", "region")}

    type: Literal["s3"]
    """Kind of destination."""

    bucket: Bucket
    """Name of the bucket, which must exist."""

    prefix: Prefix | None = None
    """Prefix of all object names, without leading and trailing slashes. Objects are written to
    `<prefix>/<name>/<partition>/`."""

    region: str | None = None
    """Region of the bucket; by default from the standard AWS sources."""

    endpoint: Endpoint | None = None
    """URL of a store other than Amazon S3, such as `https://minio.example:9000`."""

    path_style: bool | None = None
    """Whether the bucket's name is in the path instead of the host name. By default true if
    `endpoint` is set."""

    ca_file: str | None = None
    """PEM file with the CA certificate that signed the store's certificate."""

    credentials: CredentialsModel = Field(default_factory=CredentialsModel)
    """Credentials for the store."""

    sse: Literal["AES256", "aws:kms"] | None = None
    """Server-side encryption; by default the bucket's configuration applies."""

    kms_key_id: str | None = None
    """Key for `sse: aws:kms`; by default the account's."""

    checksums: Literal["when-supported", "when-required"] = "when-supported"
    """Whether request bodies carry a checksum that the store verifies. `when-required` is for
    stores that do not support checksums."""

    require_atomic_create: bool = True
    """Whether to refuse a store that ignores `If-None-Match` and replaces existing objects. With
    `false` such a store is used: claims are read back after a delay, a writer that is paused, or
    whose write takes longer than 500 ms, may replace another writer's claim, and `status` reports
    "degraded fencing". Use it only if one mirror at a time writes to the prefix."""

    encryption: Literal["none"] | None = None
    """Client-side encryption, which this version does not support. `none` is accepted."""


class S3Model(_BucketModel):
    """A bucket of any S3-compatible store."""

    name: Name | None = None
    """Name of the directory below `prefix`; by default the name of the mirror. Required if the
    mirror has several destinations."""


class SharedS3Model(ArchiveLayoutModel, _BucketModel):
    """One bucket for all mirrors, instead of `destinations` in each mirror.

    Objects are written to `<prefix>/<topic>/<partition>/`; `destination-name-override` of the
    mirror replaces the topic.
    """

    flush: FlushModel
    """When an object ends."""


class _KafkaModel(_DestinationModel):
    """Settings of a replica in another cluster, in both shapes."""

    type: Literal["kafka"]
    """Kind of destination."""

    bootstrap_servers: Servers
    """`host:port` of one or more brokers of the destination cluster, separated by commas."""

    properties: Properties = Field(default_factory=dict)
    """Connection properties of the destination cluster under librdkafka's names; see `properties`
    of `source`."""

    offsets: Offsets = "preserve"
    """`preserve`: each record keeps its offset; no other client may write to the topic.
    `translate`: only the records that a read_committed consumer sees are written, at new offsets,
    to a topic that may hold other data; offset syncs in MirrorMaker 2's format map source offsets
    to new ones."""

    gaps: Gaps = Field(default="markers", alias="holes")
    """How offset gaps of the source (transaction markers, aborted and compacted records, a log
    start offset above 0) are replicated with `offsets: preserve`. `markers`: control records, which
    no consumer sees, take these offsets. `fail`: the mirror stops before it writes."""

    topic_sync: TopicSync = "create"
    """`create`: a missing topic is created with as many partitions as the source topic; partitions
    added to the source topic are added to it; an existing topic is not changed otherwise.
    `validate`: the topics are only compared. `off`: no check."""

    timestamp_mode: TimestampMode | None = None
    """`source`: records keep their timestamps. `destination`: the destination cluster sets the
    timestamps when it appends the records. By default the mirror's `timestamp-mode`, or else
    `source`."""

    replication_factor: Annotated[int, Field(ge=1, le=MAX_REPLICATION_FACTOR)] | None = None
    """Replication factor of topics that `topic-sync: create` creates; by default the destination
    cluster's."""

    max_batch_bytes: Annotated[int, Field(ge=0, le=MAX_BATCH_BYTES)] = 1_000_000
    """Small batches are merged into batches of up to this size, in bytes, where single batches
    would leave the connection idle. Records, offsets and timestamps are unchanged. 0 keeps every
    batch as it is."""


class KafkaModel(_KafkaModel):
    """A topic of another Kafka cluster. Partitions keep their numbers."""

    name: Name | None = None
    """Name of the destination in logs, metrics and reports; by default the name of the mirror.
    Required if the mirror has several destinations."""

    topic: Topic | None = None
    """Name of the topic in the destination cluster; by default the source topic's name. With
    `takeover: mm2` by default the name that MirrorMaker's DefaultReplicationPolicy gives it:
    `<source-alias>.<topic>`."""

    takeover: Literal["mm2"] | None = None
    """`mm2`: a replica that MirrorMaker 2 has written is continued at the next record; see
    [Take over from MirrorMaker](take-over-mirrormaker.md). Needs `offsets: translate` and `groups`
    of the mirror, whose `source-alias` is MirrorMaker's alias of the source. The name of the
    destination is MirrorMaker's alias of the target. By default a new replica is begun."""


class SharedKafkaModel(_KafkaModel):
    """Another Kafka cluster for all mirrors, instead of `destinations` in each mirror.

    Topics keep their names; `destination-name-override` of a mirror replaces the name.
    """


OneDestination = Annotated[FilesystemModel | KafkaModel | S3Model, Field(discriminator="type")]
"""An item of a mirror's `destinations`."""

SharedDestination = Annotated[
    SharedFilesystemModel | SharedKafkaModel | SharedS3Model, Field(discriminator="type")
]
"""The file's one `destination` for all mirrors."""
