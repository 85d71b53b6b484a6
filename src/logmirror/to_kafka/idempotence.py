"""Both sides: who may write into a copied partition, and for how long after a look.

Three things keep a writer out that was paused and wakes up late (decision 0004):

1. The broker's sequence guard: everybody who copies a topic into a partition uses the same derived
   producer id, so a stale batch has a sequence that the broker has seen or does not expect, and is
   refused.
2. Where the broker forgets producers (old records), a deadline: no byte is sent later than
   `deadline_ms` after the log end was last seen.
3. The successor's patience: without a guard it waits `quiesce_ms` at its start and looks again.

Holes, whose markers no guard refuses, have an owner: `hole_owners`.
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
"""Sending begins only so long after the log end was last seen; later the writer looks again."""

_SLOWEST_LINK_BYTES_PER_MS: Final = 1_000
"""A link of 1 MB/s can take whatever a topic allows; a slower one takes smaller batches."""

GUARDED_MS: Final = 60_000
"""What is added where the broker's guard is alive: it refuses what is late, and many batches that
wait on a slow link need their time."""


def deadline_ms(size_bytes: int, *, sequence_checked: bool) -> int:
    """How long after the log end was last seen the last byte of a batch may be sent."""
    own_ms = SEND_DEADLINE_MS + size_bytes // _SLOWEST_LINK_BYTES_PER_MS
    return own_ms + (GUARDED_MS if sequence_checked else 0)


_MARGIN_MS: Final = 500


def quiesce_ms(max_message_bytes: int) -> int:
    """What a flow without a guard waits at its start, before it looks and writes.

    Longer than the deadline of a predecessor's largest batch and the time that bytes may rest in
    the sender's kernel afterwards together.

    Args:
        max_message_bytes: The largest batch that the topic takes.
    """
    return deadline_ms(max_message_bytes, sequence_checked=False) + LINGER_MS_MAX + _MARGIN_MS


QUIESCE_MS: Final = quiesce_ms(0)
"""The same for requests of a few bytes."""

PRODUCER_STATE_AGE_MS: Final = 12 * 3_600_000
"""A broker forgets a producer whose last record is older than `producer.id.expiration.ms`; we stop
counting on its memory at half of that. This is half of Kafka's own default, a day."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
"""Sequences wrap from 2^31 - 1 to 0."""

_DATA_PREFIX: Final = 0x6C6D << 48
_MARKER_PREFIX: Final = 0x6C6E << 48
_FILLER_PREFIX: Final = 0x6C6F << 48
_HASH_MASK: Final = (1 << 48) - 1


def producer_id(topic: str, partition: int, source_id: bytes | None) -> int:
    """The producer id of whoever copies a topic into this partition of the destination.

    Derived, so that nothing is stored, and the same for every mirror that copies that topic there,
    so that the broker's guard stands between them. It also says which topic a copy is of, in every
    batch. Positive, and far from the ids that brokers hand out.

    Args:
        topic: At the destination.
        partition: At both.
        source_id: Topic id of the source; None: it has none.
    """
    name = f"{topic}/{partition}/{source_id.hex() if source_id else ''}"
    return _DATA_PREFIX | int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def marker_producer_id(producer: int) -> int:
    """The producer id of markers: another one, so that they leave the sequences alone."""
    return _MARKER_PREFIX | producer & _HASH_MASK


def filler_producer_id(producer: int) -> int:
    """The producer id of filler at the head of a log, by which it is known again."""
    return _FILLER_PREFIX | producer & _HASH_MASK


def is_of_another_source(found: int, producer: int) -> bool:
    """Whether a mirror wrote a batch that copies another topic than ours, or from elsewhere.

    Args:
        found: The batch's producer id.
        producer: Ours.
    """
    is_mirrors = found & ~_HASH_MASK in (_DATA_PREFIX, _MARKER_PREFIX, _FILLER_PREFIX)
    return is_mirrors and (found ^ producer) & _HASH_MASK != 0


def target(spec: KafkaSpec, flow: FlowId) -> TopicPartition:
    """The partition that a flow writes."""
    return TopicPartition(spec.topic, flow.partition)


def is_sequence_checked(
    state: ProducerState | None, now_ms: int, age_ms: int = PRODUCER_STATE_AGE_MS
) -> bool:
    """Whether the broker will go on remembering this producer while we write.

    Brokers age a producer by the timestamps of its records, not by when it wrote.

    Args:
        state: What the broker remembers; None: nothing.
        now_ms: Wall-clock time.
        age_ms: How old records may be.
    """
    return state is not None and state.last_timestamp_ms > now_ms - age_ms
