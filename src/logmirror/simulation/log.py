"""The simulated log of one partition: batches, transactions, producer states, deletions.

It behaves as Apache Kafka does: isolation levels, the idempotent-producer check, and the offset of
the first append for a duplicate. The source has one, which a simulated application writes to, and
so has the destination cluster.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logmirror.model import EpochEnd
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import Record, encode_marker, encode_reference

SEQUENCE_MASK: Final = 0x7FFFFFFF
OUT_OF_ORDER: Final = 45
"""OUT_OF_ORDER_SEQUENCE_NUMBER."""
OLD_EPOCH: Final = 47
"""INVALID_PRODUCER_EPOCH."""

_REMEMBERED: Final = 5
"""Number of last batches of each producer that are recognized as duplicates."""


class Entry(NamedTuple):
    """One batch in the log."""

    base: int
    last: int
    data: bytes
    records: tuple[Record, ...] = ()
    """Its records, if the log encoded the batch; whether they were aborted is not included."""

    producer_id: int = -1
    is_control: bool = False


class Appended(NamedTuple):
    """The response to a batch: error code and base offset."""

    code: int
    base: int


@dataclass
class Memory:
    """The producer state of one producer ID."""

    epoch: int = 0
    last_sequence: int = -1
    last_timestamp_ms: int = 0
    coordinator_epoch: int = -1
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """First sequence, last sequence and base offset of the last batches."""

    def begin(self, epoch: int) -> None:
        """Start an epoch: sequences start at 0."""
        self.epoch, self.last_sequence = epoch, -1
        self.recent.clear()


class Log:
    """A partition's log.

    Attributes:
        end: The log end offset.
        start: The log start offset.
        epoch: The leader epoch.
        epochs: Each leader epoch and its first offset, ascending.
        aborted: Producer ID, first offset and marker offset of each aborted transaction.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.end = self.start = self.epoch = 0
        self.epochs: list[tuple[int, int]] = [(0, 0)]
        self.aborted: list[tuple[int, int, int]] = []
        self.producers: dict[int, Memory] = {}
        self._open: dict[int, int] = {}

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset."""
        return min([self.end, *self._open.values()])

    def write(self, records: list[Record], *, producer_id: int = -1, **fields: int) -> Entry:
        """Append records of the simulated application.

        Args:
            records: Their offsets begin at `end`.
            producer_id: Producer ID of an open transaction; -1: not transactional.
            fields: Further arguments of `encode_reference`.
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
        self._add(self._placed(data), (), producer_id, is_control=True)
        return first

    def elect(self) -> None:
        """Begin the next leader epoch."""
        self.epoch += 1
        self.epochs.append((self.epoch, self.end))

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

    # -- writes by producers ---------------------------------------------------------------------

    def append(self, data: bytes) -> Appended:
        """Append a producer's batch, subject to the idempotent-producer check."""
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
        """Append a marker for WriteTxnMarkers; False if an epoch is too low."""
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
        self._add(self._placed(data), (), producer_id, is_control=True)
        return True

    def _placed(self, data: bytes) -> bytes:
        """Return the batch with its base offset and leader epoch, which the CRC does not cover."""
        placed = bytearray(data)
        struct.pack_into(">q", placed, 0, self.end)
        struct.pack_into(">i", placed, 12, self.epoch)
        return bytes(placed)

    # -- reads and deletions ---------------------------------------------------------------------

    def is_open(self, producer_id: int) -> bool:
        """Return whether a producer has an open transaction in this log."""
        return producer_id in self._open

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """Return the largest leader epoch up to this one, and its end; None: the log has none."""
        if epoch > self.epoch:
            return None
        later = [start for known, start in self.epochs if known > epoch]
        known = [known for known, _ in self.epochs if known <= epoch]
        return EpochEnd(max(known, default=epoch), min(later, default=self.end))

    def read(self, offset: int, end: int, *, count: int) -> list[bytes]:
        """Return up to `count` batches: from the one with `offset`, and only those below `end`."""
        found = [e.data for e in self.entries if e.last >= offset and e.base < end]
        return found[:count]

    def aborted_from(self, offset: int) -> tuple[tuple[int, int], ...]:
        """Return the aborted transactions (producer ID, first offset) for a fetch at `offset`."""
        return tuple((who, first) for who, first, end in self.aborted if end >= offset)

    def delete_before(self, offset: int) -> None:
        """Advance the log start offset, as DeleteRecords does; delete the batches below it."""
        self.start = max(self.start, min(offset, self.end))
        self.entries = [entry for entry in self.entries if entry.last >= self.start]

    def quiet_offsets(self) -> list[int]:
        """Return the starts of batches at which no transaction is open, ascending."""
        found: list[int] = []
        is_open: set[int] = set()
        for entry in self.entries:
            if not is_open and entry.base >= self.start:
                found.append(entry.base)
            if entry.is_control:
                is_open.discard(entry.producer_id)
            elif entry.producer_id >= 0:
                is_open.add(entry.producer_id)
        return found

    def truncate(self, end: int) -> None:
        """Lose all records from an offset of `quiet_offsets` on, as an unclean election does."""
        self.entries = [entry for entry in self.entries if entry.last < end]
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < end]
        self.aborted = [one for one in self.aborted if one[2] < end]
        self._open.clear()
        self.end = end

    def compact(self, dirty_from: int) -> set[int]:
        """Keep the latest record of each key below an offset, as the log cleaner does.

        Batches keep their bounds; empty ones are deleted. Transactional batches are left unchanged,
        which a cleaner is free to do.

        Returns:
            Offsets of the removed records.
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
                    leader_epoch=parse_header(entry.data, 0).leader_epoch,
                )
                kept.append(entry._replace(data=data, records=tuple(left)))
        self.entries = kept
        return gone
