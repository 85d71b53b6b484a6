"""One partition's log, as a leader keeps it: batches, transactions, producers, what was removed.

It follows what Apache Kafka does at these seams: who is shown what, which sequence is refused,
which repetition is answered with the first offset. Both sides of a simulation have one: the source,
which a made-up application writes to, and the cluster that receives a copy.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logmirror.wire.records import MarkerType, Record, encode_marker, encode_reference, parse_header

SEQUENCE_MASK: Final = 0x7FFFFFFF
OUT_OF_ORDER: Final = 45
"""OUT_OF_ORDER_SEQUENCE_NUMBER."""
OLD_EPOCH: Final = 47
"""INVALID_PRODUCER_EPOCH."""

_REMEMBERED: Final = 5
"""Batches of each producer that a leader answers as repetitions."""


class Entry(NamedTuple):
    """One batch in the log."""

    base: int
    last: int
    data: bytes
    records: tuple[Record, ...] = ()
    """What it was made of, where the log itself made it; without its aborted state."""

    producer_id: int = -1
    is_control: bool = False


class Appended(NamedTuple):
    """What a leader answers to a batch."""

    code: int
    base: int


@dataclass
class Memory:
    """What a leader remembers of a producer."""

    epoch: int = 0
    last_sequence: int = -1
    last_timestamp_ms: int = 0
    coordinator_epoch: int = -1
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """First and last sequence, base offset."""

    def begin(self, epoch: int) -> None:
        """Forget the epoch before: sequences begin at 0."""
        self.epoch, self.last_sequence = epoch, -1
        self.recent.clear()


class Log:
    """A partition's log.

    Attributes:
        end: The offset that the next record gets.
        start: The first offset that is still there.
        epoch: Of the leader.
        aborted: Producer id, first offset and marker's offset of each aborted transaction.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.end = self.start = self.epoch = 0
        self.aborted: list[tuple[int, int, int]] = []
        self.producers: dict[int, Memory] = {}
        self._open: dict[int, int] = {}

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset."""
        return min([self.end, *self._open.values()])

    def write(self, records: list[Record], *, producer_id: int = -1, **fields: int) -> Entry:
        """Append records of the log's own application; their offsets are those that they get.

        Args:
            records: They begin at `end`.
            producer_id: Of a transaction that goes on; -1: none.
            fields: Of `encode_reference`.
        """
        is_transactional = producer_id >= 0
        data = encode_reference(
            records,
            producer_id=producer_id,
            producer_epoch=0 if is_transactional else -1,
            base_sequence=records[0].offset if is_transactional else -1,
            transactional=is_transactional,
            leader_epoch=self.epoch,
            **fields,  # type: ignore[arg-type]  # each is a number
        )
        if is_transactional:
            self._open.setdefault(producer_id, self.end)
        return self._add(data, tuple(records), producer_id)

    def end_transaction(self, producer_id: int, marker: MarkerType, timestamp_ms: int) -> int:
        """Write a transaction's marker; returns the first offset of the transaction."""
        first = self._open.pop(producer_id)
        if marker is MarkerType.ABORT:
            self.aborted.append((producer_id, first, self.end))
        data = encode_marker(
            marker, offset=self.end, producer_id=producer_id, timestamp_ms=timestamp_ms
        )
        self._add(data, (), producer_id, is_control=True)
        return first

    def _add(
        self,
        data: bytes,
        records: tuple[Record, ...],
        producer_id: int,
        *,
        is_control: bool = False,
    ) -> Entry:
        header = parse_header(data, 0)
        entry = Entry(self.end, header.last_offset, data, records, producer_id, is_control)
        self.entries.append(entry)
        self.end = entry.last + 1
        return entry

    # -- what others write -----------------------------------------------------------------------

    def append(self, data: bytes) -> Appended:
        """Append a batch that a producer sent, if its sequence is the one that must follow."""
        header = parse_header(data, 0)
        if header.producer_id < 0:
            return Appended(0, self._add(self._placed(data), (), -1).base)
        count = header.last_offset_delta + 1
        memory = self.producers.get(header.producer_id)
        first = header.base_sequence
        last = (first + count - 1) & SEQUENCE_MASK
        if memory is not None and header.producer_epoch < memory.epoch:
            return Appended(OLD_EPOCH, -1)
        if memory is not None and header.producer_epoch > memory.epoch:
            memory.begin(header.producer_epoch)
        if memory is not None:
            for known_first, known_last, base in memory.recent:
                if (known_first, known_last) == (first, last):
                    return Appended(0, base)
            if first != (memory.last_sequence + 1) & SEQUENCE_MASK:
                return Appended(OUT_OF_ORDER, -1)
        memory = self.producers.setdefault(header.producer_id, Memory(header.producer_epoch))
        memory.last_sequence, memory.last_timestamp_ms = last, header.max_timestamp_ms
        memory.recent.append((first, last, self.end))
        base = self.end
        if header.is_transactional:
            self._open.setdefault(header.producer_id, base)
        self._add(self._placed(data), (), header.producer_id)
        return Appended(0, base)

    def append_marker(
        self,
        producer_id: int,
        epoch: int,
        coordinator_epoch: int,
        timestamp_ms: int,
        marker: MarkerType = MarkerType.ABORT,
    ) -> bool:
        """Append a marker that somebody else asked for; False: an epoch is too low."""
        memory = self.producers.setdefault(producer_id, Memory(epoch))
        if epoch < memory.epoch or coordinator_epoch < memory.coordinator_epoch:
            return False
        if epoch > memory.epoch:
            memory.begin(epoch)
        memory.coordinator_epoch, memory.last_timestamp_ms = coordinator_epoch, timestamp_ms
        first = self._open.pop(producer_id, None)
        if first is not None and marker is MarkerType.ABORT:
            self.aborted.append((producer_id, first, self.end))
        data = encode_marker(
            marker, offset=self.end, producer_id=producer_id, timestamp_ms=timestamp_ms
        )
        self._add(data, (), producer_id, is_control=True)
        return True

    def _placed(self, data: bytes) -> bytes:
        """A batch as a leader stores it: at its offset, with its epoch, which no CRC covers."""
        placed = bytearray(data)
        struct.pack_into(">q", placed, 0, self.end)
        struct.pack_into(">i", placed, 12, self.epoch)
        return bytes(placed)

    # -- what is read and removed ----------------------------------------------------------------

    def is_open(self, producer_id: int) -> bool:
        """Whether a producer has written here what nobody has decided on."""
        return producer_id in self._open

    def read(self, offset: int, end: int, *, count: int) -> list[bytes]:
        """The batches from the one that holds `offset` on, as far as they begin below `end`."""
        found = [e.data for e in self.entries if e.last >= offset and e.base < end]
        return found[:count]

    def aborted_from(self, offset: int) -> tuple[tuple[int, int], ...]:
        """Aborted transactions that may overlap what is read from `offset` on."""
        return tuple((who, first) for who, first, end in self.aborted if end >= offset)

    def delete_before(self, offset: int) -> None:
        """As DeleteRecords does: the log start moves, and whole batches below it are gone."""
        self.start = max(self.start, min(offset, self.end))
        self.entries = [entry for entry in self.entries if entry.last >= self.start]

    def compact(self, dirty_from: int) -> set[int]:
        """As the cleaner does: of each key below an offset the latest record stays.

        Batches keep their bounds; one that has lost all its records is gone. What transactions
        wrote stays as it is, which a cleaner may do.

        Returns:
            Offsets of the records that are gone.
        """
        latest: dict[bytes, int] = {}
        for entry in self.entries:
            for record in entry.records:
                if record.key is not None and entry.producer_id < 0:
                    latest[record.key] = record.offset
        gone: set[int] = set()
        kept: list[Entry] = []
        for entry in self.entries:
            if entry.producer_id >= 0 or not entry.records or entry.last >= dirty_from:
                kept.append(entry)
                continue
            left = [r for r in entry.records if r.key is None or latest[r.key] == r.offset]
            gone |= {r.offset for r in entry.records} - {r.offset for r in left}
            if len(left) == len(entry.records):
                kept.append(entry)
            elif left:
                data = encode_reference(
                    left,
                    base_offset=entry.base,
                    last_offset=entry.last,
                    timestamp_type=left[0].timestamp_type,
                    leader_epoch=self.epoch,
                )
                kept.append(entry._replace(data=data, records=tuple(left)))
        self.entries = kept
        return gone
