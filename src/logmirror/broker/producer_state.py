"""What idempotent producers wrote last, so that a batch sent twice is stored once.

The rules are Kafka's:

- P1 The five batches a producer wrote last are remembered; one of them sent again is answered with
  its first offset and not stored.
- P2 Any other batch must begin with the sequence after the last one; sequences wrap at 2^31.
- P3 A lower epoch is refused; a higher one begins again at sequence 0.
- P4 A producer that is not known may begin with any sequence: what was forgotten must not stop it.

The state is a function of the log. A snapshot stands beside the sealed segments so that recovery
reads only what follows them:

    magic "LMPS" | uint32 CRC-32 of what follows | int64 next offset | int32 producers
    producer: int64 id | int16 epoch | int8 batches | batches, oldest first
    batch: int32 first sequence | int32 last sequence | int64 base offset | int64 last offset
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from struct import Struct
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from logmirror.errors import CorruptionError

REMEMBERED_BATCHES: Final = 5
"""As Kafka, whose clients keep at most five requests in flight for that reason."""

MAX_PRODUCERS: Final = 10_000
"""Per partition, the ones that wrote last. A stranger can make up ids; he cannot make us grow."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
_MAGIC: Final = b"LMPS"
_HEAD: Final = Struct(">4sI")
_COUNTS: Final = Struct(">qi")
_PRODUCER: Final = Struct(">qhb")
_BATCH: Final = Struct(">iiqq")


class SequencedBatch(NamedTuple):
    """A batch as its producer numbered it and as it was stored."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int


class RefusedSequenceError(Exception):
    """A batch that must not be stored; `code` is what Kafka answers."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def last_sequence(first_sequence: int, record_count: int) -> int:
    """Return the sequence of a batch's last record; sequences wrap at 2^31."""
    return (first_sequence + record_count - 1) & SEQUENCE_MASK


class ProducerState:
    """The producers of one partition."""

    __slots__ = ("_producers",)

    def __init__(self) -> None:
        self._producers: OrderedDict[int, tuple[int, tuple[SequencedBatch, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._producers)

    def find_duplicate(
        self, producer_id: int, epoch: int, first_sequence: int, record_count: int
    ) -> SequencedBatch | None:
        """Check a batch that is about to be stored.

        Returns:
            What was stored the first time, if this is a repetition; None: store it.

        Raises:
            RefusedSequenceError: Out of order, or from an epoch that ended.
        """
        known = self._producers.get(producer_id)
        if known is None:
            return None
        known_epoch, batches = known
        if epoch < known_epoch:
            raise RefusedSequenceError(ErrorCode.invalid_producer_epoch)
        if epoch > known_epoch:
            if first_sequence != 0:
                raise RefusedSequenceError(ErrorCode.out_of_order_sequence_number)
            return None
        last = last_sequence(first_sequence, record_count)
        for batch in batches:
            if batch.first_sequence == first_sequence and batch.last_sequence == last:
                return batch
        if first_sequence != (batches[-1].last_sequence + 1) & SEQUENCE_MASK:
            raise RefusedSequenceError(ErrorCode.out_of_order_sequence_number)
        return None

    def stored(self, producer_id: int, epoch: int, batch: SequencedBatch) -> None:
        """Remember a batch that is in the log now."""
        known = self._producers.pop(producer_id, None)
        before = known[1] if known is not None and known[0] == epoch else ()
        self._producers[producer_id] = epoch, (*before[1 - REMEMBERED_BATCHES :], batch)
        if len(self._producers) > MAX_PRODUCERS:
            self._producers.popitem(last=False)

    def to_bytes(self, next_offset: int) -> bytes:
        """Return the snapshot of the state at `next_offset`."""
        out = bytearray(_COUNTS.pack(next_offset, len(self._producers)))
        for producer_id, (epoch, batches) in self._producers.items():
            out += _PRODUCER.pack(producer_id, epoch, len(batches))
            for batch in batches:
                out += _BATCH.pack(*batch)
        return _HEAD.pack(_MAGIC, zlib.crc32(out)) + out

    @classmethod
    def from_bytes(cls, data: bytes, next_offset: int) -> ProducerState:
        """Return the state that a snapshot holds.

        Raises:
            CorruptionError: Not a snapshot, damaged, or one of another offset.
        """
        if len(data) < _HEAD.size + _COUNTS.size:
            raise CorruptionError("producer snapshot is cut off", size=len(data))
        magic, checksum = _HEAD.unpack_from(data, 0)
        if magic != _MAGIC or zlib.crc32(data[_HEAD.size :]) != checksum:
            raise CorruptionError("producer snapshot is damaged", size=len(data))
        found_offset, count = _COUNTS.unpack_from(data, _HEAD.size)
        if found_offset != next_offset:
            raise CorruptionError(
                "producer snapshot is of another offset", expected=next_offset, found=found_offset
            )
        state = cls()
        position = _HEAD.size + _COUNTS.size
        for _ in range(count):
            producer_id, epoch, batch_count = _PRODUCER.unpack_from(data, position)
            position += _PRODUCER.size
            for _ in range(batch_count):
                state.stored(
                    producer_id, epoch, SequencedBatch(*_BATCH.unpack_from(data, position))
                )
                position += _BATCH.size
        return state
