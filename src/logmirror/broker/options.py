"""The settings of a broker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Settings of one embedded broker. Only `log_dir` has no default."""

    log_dir: Path
    """The folder of all topics: `<log_dir>/<topic>/<partition>/`. Created if it does not exist."""

    host: str = "127.0.0.1"
    """The address to listen on. Clients are not authenticated, hence the loopback default."""

    port: int = 9092
    """The port to listen on; 0 lets the system choose."""

    advertised_host: str = ""
    """The host in Metadata responses. Empty: the address that the client connected to."""

    auto_create_topics: bool = True
    """Kafka's `auto.create.topics.enable`: a Metadata request for an unknown topic creates it."""

    default_partitions: int = 1
    """Kafka's `num.partitions`: partitions of a topic created without a partition count."""

    accept_data_loss: tuple[str, ...] = ()
    """Partitions, as `<topic>-<partition>`, that open although acknowledged records are damaged."""

    node_id: int = 1

    segment_bytes: int = 64 * 1024 * 1024
    """Default of `segment.bytes`. Recovery reads one segment of each partition."""

    max_message_bytes: int = 1_048_588
    """Default of `max.message.bytes`; Kafka's default."""

    max_partitions: int = 20_000
    """Limit for all topics together. It bounds memory, also under auto-creation."""

    max_producers: int = 100_000
    """Limit for the producer states of all partitions together; each takes about 1.5 KB."""

    max_waiting_partitions: int = 200_000
    """Limit for the partitions of all Fetch requests that wait for records. Beyond it a Fetch does
    not wait."""

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
