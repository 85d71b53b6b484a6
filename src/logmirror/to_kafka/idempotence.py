"""Driver and executor: who may write to a replicated partition, and until when.

Three rules keep out a zombie writer (decision 0004):

1. The idempotent-producer check of the brokers. All mirrors of a topic write to a partition under
   one derived producer ID, so a stale batch has a sequence that the broker has seen or does not
   expect, and is refused.
2. A send deadline, where the broker forgets producers (old records): no byte is sent later than
   `deadline_ms` after the log end was read.
3. The quiesce time of the successor: without the idempotent-producer check it waits for
   `quiesce_ms` at its start, and reads the log end again.

Offset gaps, whose markers no broker checks, need a lease: see `gap_leases`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from logmirror.cluster.transport import LINGER_MS_MAX
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from logmirror.cluster.offsets import ProducerState
    from logmirror.mirror.ports import FlowId, KafkaSpec

SEND_DEADLINE_MS: Final = 3_000
"""How old the last reading of the log end may be when sending begins. An older one is repeated."""

_SLOWEST_LINK_BYTES_PER_MS: Final = 1_000
"""1 MB/s: a batch of any permitted size is sent in time. Slower links need smaller batches."""

SEQUENCE_CHECKED_MS: Final = 60_000
"""Added to the deadline where the broker checks sequences: it refuses late batches, and a full
window of batches takes time on a slow link."""


def deadline_ms(size_bytes: int, *, sequence_checked: bool) -> int:
    """How long after the log end was read the last byte of a batch may be sent."""
    own_ms = SEND_DEADLINE_MS + size_bytes // _SLOWEST_LINK_BYTES_PER_MS
    return own_ms + (SEQUENCE_CHECKED_MS if sequence_checked else 0)


_MARGIN_MS: Final = 500


def quiesce_ms(max_message_bytes: int) -> int:
    """How long a flow without sequence check waits at its start, before it reads the log end.

    Longer than the deadline of a predecessor's largest batch and the time that bytes may stay in
    the sender's kernel afterwards together.

    Args:
        max_message_bytes: The topic's `max.message.bytes`.
    """
    return deadline_ms(max_message_bytes, sequence_checked=False) + LINGER_MS_MAX + _MARGIN_MS


QUIESCE_MS: Final = quiesce_ms(0)
"""The quiesce time for requests of a few bytes."""

PRODUCER_STATE_AGE_MS: Final = 12 * 3_600_000
"""A broker forgets a producer whose last record is older than `producer.id.expiration.ms`. A writer
relies on the producer state up to half of that; this is half of Kafka's default of one day."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
"""Sequences wrap from 2^31 - 1 to 0."""

_DATA_PREFIX: Final = 0x6C6D << 48
_MARKER_PREFIX: Final = 0x6C6E << 48
_PADDING_PREFIX: Final = 0x6C6F << 48
_HASH_MASK: Final = (1 << 48) - 1


def producer_id(topic: str, partition: int, source_id: bytes | None) -> int:
    """The producer ID of all mirrors of one source topic into this partition.

    Derived, so that nothing is stored. It is the same for every mirror of that topic, so that the
    brokers check sequences across mirrors, and it identifies the source topic in every batch. It is
    positive, and far from the IDs that brokers assign.

    Args:
        topic: The destination topic.
        partition: The partition number, on both clusters.
        source_id: The topic ID of the source; None if it has none.
    """
    name = f"{topic}/{partition}/{source_id.hex() if source_id else ''}"
    return _DATA_PREFIX | int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def marker_producer_id(producer: int) -> int:
    """The producer ID of markers: a separate one, so that they do not affect the sequences."""
    return _MARKER_PREFIX | producer & _HASH_MASK


def padding_producer_id(producer: int) -> int:
    """The producer ID of padding at the start of a log, which identifies it later."""
    return _PADDING_PREFIX | producer & _HASH_MASK


def is_of_another_source(found: int, producer: int) -> bool:
    """Whether a mirror of another source topic wrote a batch.

    Args:
        found: The batch's producer ID.
        producer: The producer ID of this mirror.
    """
    is_mirrors = found & ~_HASH_MASK in (_DATA_PREFIX, _MARKER_PREFIX, _PADDING_PREFIX)
    return is_mirrors and (found ^ producer) & _HASH_MASK != 0


def target(spec: KafkaSpec, flow: FlowId) -> TopicPartition:
    """The destination partition of a flow."""
    return TopicPartition(spec.topic, flow.partition)


def is_sequence_checked(
    state: ProducerState | None, now_ms: int, age_ms: int = PRODUCER_STATE_AGE_MS
) -> bool:
    """Whether the broker keeps the state of this producer while it writes.

    Brokers expire producer state by record timestamps, not by the time of the write.

    Args:
        state: The broker's producer state; None if it has none.
        now_ms: Wall-clock time.
        age_ms: The greatest age of the last record.
    """
    return state is not None and state.last_timestamp_ms > now_ms - age_ms
