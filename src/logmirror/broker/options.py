"""The settings of a broker process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from logmirror.stores.base import BlobStore


class SecurityProtocol(enum.StrEnum):
    """Kafka's security protocols: whether a listener encrypts, and how clients log in."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)

    @property
    def has_sasl(self) -> bool:
        """Whether clients log in with user name and password."""
        return self in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)


class ClientAuth(enum.StrEnum):
    """Kafka's `ssl.client.auth`: whether clients show a certificate."""

    NONE = "none"
    REQUESTED = "requested"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """An address that the broker listens on."""

    name: str
    """Of its own among the listeners, for example `OUTSIDE`."""

    host: str
    port: int
    """0 lets the system choose."""

    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT

    advertised_host: str = ""
    """The host in responses to its clients. Empty: the address that the client connected to."""

    advertised_port: int = 0
    """The port in responses to its clients. 0: the port that it listens on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive of mirrors, to be mounted as read-only topics."""

    root: str
    """Where it is, for messages."""

    store: BlobStore
    local: Callable[[str], Path] | None = None
    """Maps a name to its path, if the archive is a directory."""

    utf8: bool | None = None
    """Whether keys and values of NDJSON are text; None: not known, so NDJSON is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Settings of one embedded broker. Only `log_dir` has no default."""

    log_dir: Path
    """The folder of all topics: `<log_dir>/<topic>/<partition>/`. Created if it does not exist."""

    bucket: str = ""
    """Where the log dir is, if it is in a bucket: `s3://bucket/prefix`. Then `log_dir` is the
    working folder: copies, which no start reads."""

    commit_interval_ms: int = 100
    """In a bucket: least time between two commit objects. It bounds the requests per second."""

    commit_timeout_ms: int = 20_000
    """In a bucket: a producer that has waited for it for this long gets an error that clients
    retry."""

    commit_age_ms: int = 600_000
    """In a bucket: a partition whose oldest commit is older is sealed; a start reads few."""

    max_commits: int = 5_000
    """In a bucket: the same, if there are more commits than this."""

    max_seals_per_s: int = 20
    """In a bucket: limit for the segments that are sealed for that. With more partitions, a start
    reads more."""

    cache_bytes: int = 10 * 1024**3
    """In a bucket: limit for the files in the working folder that are in the bucket too."""

    standby: bool = False
    """In a bucket: wait until its owner is gone, instead of taking it over."""

    standby_timeout_ms: int = 9_000
    """How long an owner must show no sign of life until a standby takes over; Kafka's
    `broker.session.timeout.ms`."""

    more_log_dirs: tuple[Path, ...] = ()
    """Further folders of topics. A new partition goes to the folder with the fewest partitions.
    Beside a bucket, they are all folders on disks."""

    archives: tuple[Archive, ...] = ()
    """Archives that are mounted as read-only topics."""

    archive_cache_bytes: int = 1024**3
    """Limit for the local copies of archive objects."""

    host: str = "127.0.0.1"
    """The address of the only listener, if `listeners` is empty. Its clients are not
    authenticated, hence the loopback default."""

    port: int = 9092
    """Its port; 0 lets the system choose."""

    advertised_host: str = ""
    """Its advertised host. Empty: the address that the client connected to."""

    listeners: tuple[Listener, ...] = ()
    """All listeners. Empty: one of protocol PLAINTEXT, at `host` and `port`."""

    allow_anonymous: bool = False
    """Whether clients of other hosts may connect without authentication."""

    tls_certificate: Path | None = None
    """The broker's certificate and its chain, in PEM."""

    tls_key: Path | None = None
    """The certificate's private key, in PEM. None: it is in the certificate's file."""

    tls_client_ca: Path | None = None
    """The authorities that sign clients' certificates, in PEM."""

    tls_client_auth: ClientAuth = ClientAuth.NONE
    """Whether clients of listeners of protocol SSL show a certificate."""

    sasl_mechanisms: tuple[str, ...] = ()
    """The enabled mechanisms. Empty: SCRAM everywhere, and PLAIN where no other host can read the
    password: on listeners with TLS and on loopback."""

    super_users: tuple[str, ...] = ()
    """Principals that may do everything, as `User:name`. ACLs are enforced if there is one."""

    auto_create_topics: bool = True
    """Kafka's `auto.create.topics.enable`: a Metadata request for an unknown topic creates it."""

    default_partitions: int = 1
    """Kafka's `num.partitions`: partitions of a topic created without a partition count."""

    topics: tuple[tuple[str, int], ...] = ()
    """Topics that exist when the broker listens: name and partitions. Those that exist already are
    left as they are."""

    accept_data_loss: tuple[str, ...] = ()
    """Partitions, as `<topic>-<partition>`, that open although acknowledged records are damaged."""

    flush_on_ack: bool = True
    """Whether a record is flushed before its response. False: the default of `flush.messages` is
    Kafka's, so that records are flushed in the background."""

    flush_ms: int = 1000
    """Default of `flush.ms`: age of the oldest unflushed record at which it is flushed."""

    flush_bytes: int = 16 * 1024 * 1024
    """Unflushed bytes of a partition at which it is flushed."""

    max_unflushed_bytes: int = 256 * 1024 * 1024
    """Limit for the unflushed bytes of all partitions that are flushed in the background. At the
    limit, producers wait."""

    stop_with_stdin: bool = False
    """Whether the end of stdin stops the broker: it ends with the process that started it."""

    monitoring_port: int = 0
    """Port of `/metrics`, `/livez`, `/readyz` and `/status.json`. 0: none."""

    monitoring_host: str = "127.0.0.1"
    """IP address on which that port listens."""

    node_id: int = 1

    overrides: Mapping[str, str] = field(default_factory=dict)
    """Defaults of topic settings, by Kafka's name of the broker setting: `log.retention.ms`."""

    segment_bytes: int = 64 * 1024 * 1024
    """Default of `segment.bytes`. Recovery reads one segment of each partition."""

    max_message_bytes: int = 1_048_588
    """Default of `max.message.bytes`; Kafka's default."""

    max_partitions: int = 20_000
    """Limit for all topics together. It bounds memory, also under auto-creation."""

    max_producers: int = 100_000
    """Limit for the producer states of all partitions together; each takes about 1.5 KB."""

    max_transaction_timeout_ms: int = 900_000
    """Kafka's `transaction.max.timeout.ms`: limit for a client's `transaction.timeout.ms`."""

    transactional_id_expiration_ms: int = 7 * 24 * 3600 * 1000
    """Kafka's `transactional.id.expiration.ms`: an ID that is unused for this long is removed."""

    max_transactional_ids: int = 100_000
    """Limit for transactional IDs; each takes about 1 KB."""

    max_waiting_partitions: int = 200_000
    """Limit for the partitions of all Fetch requests that wait for records. Beyond it a Fetch does
    not wait."""

    group_initial_rebalance_delay_ms: int = 0
    """Kafka's `group.initial.rebalance.delay.ms`, there 3000: how long the first rebalance of a
    group waits for more members. 0: a test's or a developer's consumer gets its partitions at once;
    a group whose members start together rebalances once more."""

    group_min_session_timeout_ms: int = 6_000
    """Kafka's `group.min.session.timeout.ms`."""

    group_max_session_timeout_ms: int = 1_800_000
    """Kafka's `group.max.session.timeout.ms`."""

    group_max_size: int = 1_000
    """Kafka's `group.max.size`, which has no limit there: members of a group."""

    max_groups: int = 20_000
    """Limit for the groups, those included that only have committed offsets."""

    offsets_retention_minutes: int = 10_080
    """Kafka's `offsets.retention.minutes`: one week."""

    offsets_retention_check_interval_ms: int = 600_000
    """Kafka's `offsets.retention.check.interval.ms`: how often a group's offsets are checked."""

    max_connections: int = 1_000
    """Further connections are closed at once. The system's limit of open files may lower it."""

    max_produce_frame_bytes: int = 100 * 1024 * 1024
    """Limit for a Produce request; Kafka's `socket.request.max.bytes`."""

    max_other_frame_bytes: int = 2 * 1024 * 1024
    """Limit for every other request. A Fetch of 20,000 partitions takes 1.3 MB. The entries of a
    request have a limit of their own, `frames.MAX_ENTRIES`."""

    max_buffered_bytes: int = 1024 * 1024 * 1024
    """Limit for incomplete requests of all connections. Beyond it, the connection with the largest
    one is closed."""

    max_fetch_bytes: int = 55 * 1024 * 1024
    """Limit for the records in one Fetch response; Kafka's broker setting `fetch.max.bytes`."""

    max_fetch_wait_ms: int = 300_000
    """Limit for `max_wait_ms` of a Fetch request."""

    idle_timeout_ms: int = 600_000
    """A connection without a request for this long is closed; Kafka's `connections.max.idle.ms`."""

    frame_timeout_ms: int = 30_000
    """A request must be complete within this time, plus one second per MiB that arrived. A new
    connection must begin its first request within it."""

    send_timeout_ms: int = 60_000
    """A client that reads nothing of its response for this long is disconnected."""

    authentication_timeout_ms: int = 10_000
    """A connection must be encrypted and authenticated within this time."""

    max_unauthenticated_frame_bytes: int = 16 * 1024
    """Limit for a request before the client is authenticated."""

    failed_authentication_delay_ms: int = 100
    """The response to a failed authentication is delayed by this; Kafka's
    `connection.failed.authentication.delay.ms`. Each further failure of the same client address
    within a minute takes twice as long, up to `max_failed_authentication_delay_ms`."""

    max_failed_authentication_delay_ms: int = 5_000

    max_session_ms: int = 0
    """Kafka's `connections.max.reauth.ms`: a connection that has logged in by SASL and does not
    repeat its login within this time is closed at its next request. 0: never."""

    max_connections_per_address: int = 0
    """Kafka's `max.connections.per.ip`. 0: no limit other than `max_connections`."""

    @property
    def all_listeners(self) -> tuple[Listener, ...]:
        """The listeners, or the one that `host` and `port` describe."""
        return self.listeners or (
            Listener(
                name="PLAINTEXT",
                host=self.host,
                port=self.port,
                advertised_host=self.advertised_host,
            ),
        )

    @property
    def change_timeout_s(self) -> float | None:
        """How long a request waits for a change to be durable; None: without a limit."""
        return self.commit_timeout_ms / 1000 if self.bucket else None

    @property
    def log_dirs(self) -> tuple[Path, ...]:
        """All log directories, in the order in which they were given; a bucket's working folder."""
        return (self.log_dir, *self.more_log_dirs)

    @property
    def disk_dirs(self) -> tuple[Path, ...]:
        """Those that are not in a bucket."""
        return self.more_log_dirs if self.bucket else self.log_dirs
