"""The transactions of a partition: which are ongoing, which were aborted, the last stable offset.

- X1 A transaction begins with its first transactional batch and ends with a marker of its producer,
  from the coordinator or from WriteTxnMarkers. A marker without a transaction ends nothing.
- X2 The last stable offset is the first offset of the oldest transaction that is not decided, at
  most the high watermark. A transaction is decided when its marker is below the high watermark.
- X3 An aborted transaction is kept until its marker is below the log start offset, and takes 32
  bytes. A reader of committed records skips the producer's records from the first offset on to the
  marker.

The state is a function of the log, like the rest of the producer state, and is stored with it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.wire.serve_markers import pack_marker

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNTS: Final = Struct(">ii")
_ONGOING: Final = Struct(">qq")
ABORTED_BYTES: Final = 32
"""Size of an aborted transaction in a snapshot."""


class Marker(NamedTuple):
    """A transaction marker: the outcome of a producer's transaction, from its coordinator."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int

    def packed(self, timestamp_ms: int) -> bytearray:
        """Return the control batch, at offset 0."""
        return pack_marker(
            self.producer_id,
            self.producer_epoch,
            commit=self.is_commit,
            coordinator_epoch=self.coordinator_epoch,
            timestamp_ms=timestamp_ms,
        )


class Aborted(NamedTuple):
    """An aborted transaction."""

    producer_id: int
    first_offset: int
    last_offset: int
    """The offset of its marker."""
    last_stable_offset: int
    """The last stable offset after its end: later transactions end behind it."""


class PartitionTransactions:
    """The transactions of one partition."""

    __slots__ = ("_aborted", "_begun", "_ends", "_ongoing")

    def __init__(self) -> None:
        self._ongoing: dict[int, int] = {}
        self._begun: dict[int, int | None] = {}
        """Marker by first offset, of all transactions that are not decided, in offset order."""
        self._ends: dict[int, int] = {}
        """First offset by marker, of those that have ended, in offset order."""
        self._aborted = _AbortedList()

    @property
    def snapshot_bytes(self) -> int:
        """What the transactions take in a snapshot."""
        return (
            _COUNTS.size + len(self._ongoing) * _ONGOING.size + len(self._aborted) * ABORTED_BYTES
        )

    def ongoing(self) -> Iterator[tuple[int, int]]:
        """Yield producer ID and first offset of each ongoing transaction."""
        yield from self._ongoing.items()

    def start_of(self, producer_id: int) -> int | None:
        """Return the first offset of a producer's ongoing transaction; None if it has none."""
        return self._ongoing.get(producer_id)

    def wrote(self, producer_id: int, base_offset: int) -> None:
        """Record a transactional batch."""
        if producer_id not in self._ongoing:
            self._ongoing[producer_id] = base_offset
            self._begun[base_offset] = None

    def ended(self, producer_id: int, offset: int, high_watermark: int, *, is_commit: bool) -> None:
        """Record a marker."""
        self._decide(high_watermark)
        first = self._ongoing.pop(producer_id, None)
        if first is None:
            return
        self._begun[first] = offset
        self._ends[offset] = first
        if not is_commit:
            stable = next(iter(self._ongoing.values()), offset + 1)
            self._aborted.add(Aborted(producer_id, first, offset, stable))

    def stable_end(self, high_watermark: int, log_start: int) -> int:
        """Return the last stable offset (X2)."""
        self._decide(high_watermark)
        first = next(iter(self._begun), high_watermark)
        return min(high_watermark, max(first, log_start))

    def _decide(self, high_watermark: int) -> None:
        while self._ends and (marker := next(iter(self._ends))) < high_watermark:
            del self._begun[self._ends.pop(marker)]

    def aborted_between(self, start: int, end: int) -> list[Aborted]:
        """Return the aborted transactions that overlap `start` to `end`, in order of the markers.

        `start` must not be behind `end`. Their number is bounded by the batches and markers in
        between and the transactions that are ongoing at `start`.
        """
        found = []
        for number in range(self._aborted.first_reaching(start), len(self._aborted)):
            one = self._aborted[number]
            if one.first_offset < end:
                found.append(one)
            if one.last_stable_offset >= end:
                break
        return found

    def drop_before(self, log_start: int) -> None:
        """Forget the aborted transactions whose records are all deleted (X3)."""
        self._aborted.drop(self._aborted.first_reaching(log_start))

    def drop_ongoing(self) -> int:
        """Forget the ongoing transactions; returns how many there were.

        For the end of segments that came from an archive: it may end between the records of a
        transaction and its marker, and the transaction will not be continued here.
        """
        count = len(self._ongoing)
        self._ongoing.clear()
        self._begun.clear()
        self._ends.clear()
        return count

    def to_bytes(self) -> bytes:
        """Return the part of the producer snapshot (`producer_state`)."""
        out = bytearray(_COUNTS.pack(len(self._ongoing), len(self._aborted)))
        for producer_id, first in self._ongoing.items():
            out += _ONGOING.pack(producer_id, first)
        return bytes(out + self._aborted.to_bytes())

    @classmethod
    def from_bytes(cls, data: memoryview) -> PartitionTransactions:
        """Return the transactions in that part of a snapshot, which ends with them.

        Raises:
            CorruptionError: The size does not match.
        """
        ongoing, aborted = _COUNTS.unpack_from(data)
        start = _COUNTS.size + ongoing * _ONGOING.size
        if min(ongoing, aborted) < 0 or len(data) != start + aborted * ABORTED_BYTES:
            raise CorruptionError("transactions of a snapshot have another size", size=len(data))
        found = cls()
        for position in range(_COUNTS.size, start, _ONGOING.size):
            found.wrote(*_ONGOING.unpack_from(data, position))
        found._aborted.load(data[start:])
        return found


class _AbortedList:
    """Aborted transactions in the order of their markers, without an object for each."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns = tuple(array("q") for _ in Aborted._fields)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Aborted:
        return Aborted._make(column[number] for column in self._columns)

    def add(self, one: Aborted) -> None:
        for column, value in zip(self._columns, one, strict=True):
            column.append(value)

    def first_reaching(self, offset: int) -> int:
        """Return the number of the first one whose marker is at `offset` or behind it."""
        return bisect_left(self._columns[2], offset)

    def drop(self, count: int) -> None:
        for column in self._columns if count else ():
            del column[:count]

    def to_bytes(self) -> bytes:
        return b"".join(Struct(f">{len(column)}q").pack(*column) for column in self._columns)

    def load(self, data: memoryview) -> None:
        count = len(data) // ABORTED_BYTES
        for number, column in enumerate(self._columns):
            column.extend(Struct(f">{count}q").unpack_from(data, number * count * 8))
