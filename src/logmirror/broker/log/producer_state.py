"""The producer state of a partition: the idempotent-producer check.

The rules are Kafka's:

- P1 The last five batches of a producer are kept. A duplicate of one of them is not stored; its
  response has the first one's base offset.
- P2 Any other batch must begin with the sequence after the last one; sequences wrap at 2^31. A
  producer with only a marker must begin at 0.
- P3 A lower epoch is refused; a higher one begins at sequence 0.
- P4 A producer without state may begin with any sequence, so that a dropped state does not stop it.
  A transaction of version 2 must begin with 0; `handlers.produce` checks it.
- P5 A transaction marker counts like a batch for the epoch, and does not change the sequences of
  its epoch. A marker from a replaced coordinator is refused.

Deviation from Kafka: state does not expire by age. Kafka drops a producer whose *records* have
timestamps older than `producer.id.expiration.ms` (one day), at the next sweep, so a replication of
old records loses the check. Here a producer is dropped only when `MAX_PRODUCERS` others of the
partition, or the broker's `max_producers` others of all partitions, have written since.

The state is a function of the log. A snapshot beside the sealed segments saves recovery from
reading them, and keeps producers whose records were deleted:

    magic "LMP3" | uint32 CRC-32 of what follows | int64 next offset | int32 producers
    producer: int64 id | int16 epoch | int32 coordinator epoch | int64 last timestamp ms
              | int8 batches | batches, oldest first
    batch: int32 first sequence | int32 last sequence | int64 base offset | int64 last offset
           | int64 timestamp ms
    after the producers: int32 ongoing transactions | int32 aborted ones
    ongoing: int64 producer id | int64 first offset
    aborted: four columns of int64, see `partition_transactions.Aborted`

"LMP2" has no transactions: the versions that wrote it refused transactional records.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.partition_transactions import PartitionTransactions
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.broker.log.producer_limit import ProducerLimit

REMEMBERED_BATCHES: Final = 5
"""As in Kafka. For that reason clients keep at most five requests in flight."""

MAX_PRODUCERS: Final = 10_000
"""Limit per partition; the producer with the oldest write is dropped. Bounds memory, because a
client can invent producer IDs."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
NO_SEQUENCE: Final = -1
NO_COORDINATOR: Final = -1
_MAGIC: Final = b"LMP3"
_OLDER_MAGIC: Final = b"LMP2"
_HEAD: Final = Struct(">4sI")
_COUNTS: Final = Struct(">qi")
_PRODUCER: Final = Struct(">qhiqb")
_BATCH: Final = Struct(">iiqqq")
MAX_SNAPSHOT_BYTES: Final = _PRODUCER.size + REMEMBERED_BATCHES * _BATCH.size
"""What a producer takes in a snapshot at most."""


class SequencedBatch(NamedTuple):
    """A stored batch: its sequences and its offsets."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int
    """The largest timestamp of its records."""


class Producer(NamedTuple):
    """The state of one producer.

    Attributes:
        epoch: The producer epoch.
        coordinator_epoch: The coordinator epoch of its last marker; -1 without a marker.
        last_timestamp_ms: The timestamp of its last batch or marker.
        batches: The last batches of this epoch, oldest first, at most `REMEMBERED_BATCHES`.
    """

    epoch: int
    coordinator_epoch: int
    last_timestamp_ms: int
    batches: tuple[SequencedBatch, ...]

    @property
    def last_sequence(self) -> int:
        """The last sequence in its epoch; -1 if it wrote none."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class RefusedSequenceError(Exception):
    """The batch or marker must not be stored. `code` is Kafka's error code for it."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def last_sequence(first_sequence: int, record_count: int) -> int:
    """Return the sequence of a batch's last record; sequences wrap at 2^31."""
    return (first_sequence + record_count - 1) & SEQUENCE_MASK


class ProducerState:
    """The producers of one partition.

    Attributes:
        transactions: The transactions of the partition.
    """

    __slots__ = ("_limit", "_producers", "transactions")

    def __init__(self) -> None:
        self.transactions = PartitionTransactions()
        self._producers: OrderedDict[int, Producer] = OrderedDict()
        self._limit: ProducerLimit | None = None

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def max_snapshot_bytes(self) -> int:
        """What a snapshot takes at most."""
        return len(self._producers) * MAX_SNAPSHOT_BYTES + self.transactions.snapshot_bytes

    def get(self, producer_id: int) -> Producer | None:
        """Return the state of one producer."""
        return self._producers.get(producer_id)

    def items(self) -> Iterator[tuple[int, Producer]]:
        """Yield ID and state of each producer, oldest write first."""
        yield from self._producers.items()

    def share(self, limit: ProducerLimit) -> None:
        """Count these producers against a limit of several partitions."""
        self._limit = limit
        for producer_id in tuple(self._producers):
            limit.wrote(self, producer_id)

    def drop(self, producer_id: int) -> None:
        """Drop a producer, as its limit demands."""
        del self._producers[producer_id]

    def clear(self) -> None:
        """Drop all producers: the topic was deleted."""
        if self._limit is not None:
            for producer_id in self._producers:
                self._limit.dropped(self, producer_id)
        self._producers.clear()

    def find_duplicate(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_count: int,
        *,
        is_transactional: bool = False,
    ) -> SequencedBatch | None:
        """Check a batch before it is stored.

        Returns:
            The stored batch, if this one is a duplicate; None if it is to be stored.

        Raises:
            RefusedSequenceError: The sequence is out of order, the epoch is old, or the batch is
                not transactional while the producer has a transaction.
        """
        if not is_transactional and self.transactions.start_of(producer_id) is not None:
            raise RefusedSequenceError(ErrorCode.INVALID_TXN_STATE)
        known = self._producers.get(producer_id)
        if known is None:
            return None
        if epoch < known.epoch:
            raise RefusedSequenceError(ErrorCode.INVALID_PRODUCER_EPOCH)
        if epoch > known.epoch:
            if first_sequence != 0:
                raise RefusedSequenceError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
            return None
        last = last_sequence(first_sequence, record_count)
        for batch in known.batches:
            if batch.first_sequence == first_sequence and batch.last_sequence == last:
                return batch
        if first_sequence != (known.last_sequence + 1) & SEQUENCE_MASK:
            raise RefusedSequenceError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
        return None

    def stored(
        self,
        producer_id: int,
        epoch: int,
        batch: SequencedBatch,
        *,
        is_transactional: bool = False,
    ) -> None:
        """Record a batch that was appended."""
        if is_transactional:
            self.transactions.wrote(producer_id, batch.base_offset)
        known = self._producers.get(producer_id)
        before = known.batches if known is not None and known.epoch == epoch else ()
        batches = (*before[1 - REMEMBERED_BATCHES :], batch)
        coordinator_epoch = NO_COORDINATOR if known is None else known.coordinator_epoch
        self._remember(producer_id, Producer(epoch, coordinator_epoch, batch.timestamp_ms, batches))

    def check_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        """Check a transaction marker before it is stored.

        Raises:
            RefusedSequenceError: The producer epoch or the coordinator epoch is old.
        """
        known = self._producers.get(producer_id)
        if known is None:
            return
        if epoch < known.epoch:
            raise RefusedSequenceError(ErrorCode.INVALID_PRODUCER_EPOCH)
        if coordinator_epoch < known.coordinator_epoch:
            raise RefusedSequenceError(ErrorCode.TRANSACTION_COORDINATOR_FENCED)

    def marked(
        self, producer_id: int, epoch: int, coordinator_epoch: int, timestamp_ms: int
    ) -> None:
        """Record a transaction marker that was appended."""
        known = self._producers.get(producer_id)
        batches = known.batches if known is not None and known.epoch == epoch else ()
        self._remember(producer_id, Producer(epoch, coordinator_epoch, timestamp_ms, batches))

    def _remember(self, producer_id: int, producer: Producer) -> None:
        self._producers[producer_id] = producer
        self._producers.move_to_end(producer_id)
        if len(self._producers) > MAX_PRODUCERS:
            oldest_id, _ = self._producers.popitem(last=False)
            if self._limit is not None:
                self._limit.dropped(self, oldest_id)
        if self._limit is not None:
            self._limit.wrote(self, producer_id)

    def to_bytes(self, next_offset: int) -> bytes:
        """Return the snapshot of the state at `next_offset`."""
        out = bytearray(_COUNTS.pack(next_offset, len(self._producers)))
        for producer_id, (epoch, coordinator_epoch, last_ms, batches) in self._producers.items():
            out += _PRODUCER.pack(producer_id, epoch, coordinator_epoch, last_ms, len(batches))
            for batch in batches:
                out += _BATCH.pack(*batch)
        out += self.transactions.to_bytes()
        return _HEAD.pack(_MAGIC, zlib.crc32(out)) + out

    @classmethod
    def from_bytes(cls, data: bytes, next_offset: int) -> ProducerState:
        """Return the state in a snapshot.

        Raises:
            CorruptionError: The bytes are not a snapshot, are damaged, or are of another offset.
        """
        if len(data) < _HEAD.size + _COUNTS.size:
            raise CorruptionError("producer snapshot is truncated", size=len(data))
        magic, checksum = _HEAD.unpack_from(data, 0)
        known = magic in {_MAGIC, _OLDER_MAGIC}
        if not known or zlib.crc32(data[_HEAD.size :]) != checksum:
            raise CorruptionError("producer snapshot is damaged", size=len(data))
        found_offset, count = _COUNTS.unpack_from(data, _HEAD.size)
        if found_offset != next_offset:
            raise CorruptionError(
                "producer snapshot has an unexpected offset",
                expected=next_offset,
                found=found_offset,
            )
        state = cls()
        position = _HEAD.size + _COUNTS.size
        for _ in range(count):
            producer_id, epoch, coordinator_epoch, last_ms, batch_count = _PRODUCER.unpack_from(
                data, position
            )
            position += _PRODUCER.size
            batches = tuple(
                SequencedBatch(*_BATCH.unpack_from(data, position + number * _BATCH.size))
                for number in range(batch_count)
            )
            position += batch_count * _BATCH.size
            state._remember(producer_id, Producer(epoch, coordinator_epoch, last_ms, batches))
        if magic == _MAGIC:
            state.transactions = PartitionTransactions.from_bytes(memoryview(data)[position:])
        return state
