"""How a broker is run. Every limit names what it guards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Settings of one embedded broker. Only `log_dir` has no default."""

    log_dir: Path
    """Where topics live: `<log_dir>/<topic>/<partition>/`. Made if it is not there."""

    host: str = "127.0.0.1"
    """Where to listen. Nobody has to prove who they are, so by default only this machine may."""

    port: int = 9092
    """Where to listen; 0 lets the system choose."""

    advertised_host: str = ""
    """What clients are told to connect to; empty: the address they connected to."""

    auto_create_topics: bool = True
    """Whether a producer's or consumer's question about an unknown topic creates it."""

    default_partitions: int = 1
    """Partitions of a topic whose creator does not say how many."""

    node_id: int = 1

    segment_bytes: int = 64 * 1024 * 1024
    """`segment.bytes` of a topic that does not say. Recovery reads one such file a partition."""

    max_message_bytes: int = 1_048_588
    """`max.message.bytes` of a topic that does not say; Kafka's default."""

    max_partitions: int = 20_000
    """Of all topics together. Each takes memory, so auto-creation must end somewhere."""

    max_connections: int = 1_000
    """A connection beyond that is closed at once. The system's limit of open files lowers it."""

    max_produce_frame_bytes: int = 100 * 1024 * 1024
    """Kafka's `socket.request.max.bytes`; a Produce request carries many partitions."""

    max_other_frame_bytes: int = 2 * 1024 * 1024
    """Of every other request; a Fetch of 20,000 partitions has 1.3 MB."""

    max_buffered_bytes: int = 1024 * 1024 * 1024
    """Of requests that are arriving, all connections together. Who needs more is closed."""

    max_fetch_bytes: int = 55 * 1024 * 1024
    """Of records in one answer; Kafka's `fetch.max.bytes` of a broker."""

    max_fetch_wait_ms: int = 300_000
    """A long poll waits no longer, whatever it asks for."""

    idle_timeout_ms: int = 600_000
    """A connection that asks nothing for this long is closed; Kafka's `connections.max.idle.ms`."""

    frame_timeout_ms: int = 30_000
    """A request that has begun must be here after this, and a second for every 64 KiB of it."""

    send_timeout_ms: int = 60_000
    """A client that takes nothing of its answer for this long is closed."""
