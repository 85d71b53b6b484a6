"""A source whose partitions have transactions, offset gaps and records of every shape.

Everything is drawn by a seed. What each record is, and how each transaction ends, is kept apart
from the batches, which the mirror reads.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, NamedTuple

from kit.fakes.scripted import Log
from logmirror.model import TimestampType
from logmirror.testing.checker import Row
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, encode_marker, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRODUCERS: Final = (7, 8)
_START_MS: Final = 1_700_000_000_000
_EACH_MS: Final = 10
_KEYS: Final = (None, b"", b"a", b"b")
_HEADERS: Final = ((), ((b"h", None),), ((b"h", b""), (b"h", b"1")))


class Transaction(NamedTuple):
    """A transaction: its first offset, the offset of its marker, and its records."""

    first: int
    marker: int
    offsets: frozenset[int]


class Partition:
    """One partition of the source.

    Args:
        chooser: Draws what it holds.
        batches: How many batches it has, at least.
        first: Its first offset.
        has_gaps: Whether offsets are missing, as compaction leaves them.

    Attributes:
        log: What the mirror reads: as much as was released.
        rows: Its records, by offset, with those of aborted transactions.
        aborted: Offsets of these.
        transactions: Its transactions.
        markers: Timestamps of their markers, by offset.
    """

    def __init__(self, chooser: random.Random, batches: int, *, first: int, has_gaps: bool) -> None:
        self._chooser, self._has_gaps = chooser, has_gaps
        self.log = Log(log_start=first)
        self.rows: dict[int, Row] = {}
        self.aborted: set[int] = set()
        self.transactions: list[Transaction] = []
        self.markers: dict[int, int] = {}
        self.end = first
        self._whole: list[bytes] = []
        self._quiet: list[int] = []
        self._open: dict[int, list[int]] = {}
        while len(self._whole) < batches or self._open:
            self._extend(is_last=len(self._whole) >= batches)

    def _extend(self, *, is_last: bool) -> None:
        chooser = self._chooser
        if self._open and (is_last or chooser.random() < 0.4):
            self._end_transaction(chooser.choice(sorted(self._open)))
        elif chooser.random() < 0.4 and not is_last:
            self._write(chooser.choice(_PRODUCERS))
        else:
            self._write(-1)
        if not self._open:
            self._quiet.append(len(self._whole))

    def _write(self, producer: int) -> None:
        chooser = self._chooser
        begin, count = self.end, chooser.randint(1, 4)
        offsets = list(range(begin, begin + count))
        if self._has_gaps:  # also at the ends of batches, and between two of them
            offsets = [one for one in offsets if chooser.random() < 0.7] or offsets[-1:]
        records = [self._record(offset) for offset in offsets]
        self._append(
            encode_reference(
                records,
                base_offset=begin,
                last_offset=begin + count - 1,
                codec=chooser.choice((Codec.NONE, Codec.GZIP)),
                producer_id=producer,
                producer_epoch=0 if producer >= 0 else -1,
                transactional=producer >= 0,
            )
        )
        self.rows |= {record.offset: Row(*record) for record in records}
        if producer >= 0:
            self._open.setdefault(producer, [begin]).extend(offsets)
        self.end = begin + count
        if self._has_gaps and chooser.random() < 0.15:
            self.end += chooser.randint(1, 3)

    def _append(self, batch: bytes) -> None:
        """Append a batch; now and then there is a new leader."""
        self.log.leader_epoch += self._chooser.random() < 0.1
        self._whole.append(batch[:12] + self.log.leader_epoch.to_bytes(4) + batch[16:])

    def _record(self, offset: int) -> Record:
        chooser = self._chooser
        value = chooser.choice((b"%d" % offset, b"%d " % offset + b"x" * chooser.randrange(80)))
        return Record(
            offset,
            _START_MS + _EACH_MS * (offset - chooser.randrange(3)),
            TimestampType.CREATE_TIME,
            chooser.choice(_KEYS),
            None if chooser.random() < 0.1 else value,
            chooser.choice(_HEADERS),
        )

    def _end_transaction(self, producer: int) -> None:
        first, *offsets = self._open.pop(producer)
        is_committed = self._chooser.random() < 0.5
        marker = MarkerType.COMMIT if is_committed else MarkerType.ABORT
        now_ms = _START_MS + _EACH_MS * self.end
        self._append(
            encode_marker(marker, offset=self.end, producer_id=producer, timestamp_ms=now_ms)
        )
        self.transactions.append(Transaction(first, self.end, frozenset(offsets)))
        self.markers[self.end] = now_ms
        if not is_committed:
            self.aborted.update(offsets)
            self.log.aborted += ((producer, first, self.end),)
        self.end += 1

    def release(self, part: float, *, anywhere: bool = False) -> None:
        """Let the mirror see a part of the batches, up to where no transaction is open.

        Args:
            part: As much.
            anywhere: Up to any batch, as if a transaction that is older than all began there.
        """
        count = wanted = round(part * len(self._whole))
        if not anywhere:
            count = next(one for one in self._quiet if one >= wanted)
        self.log.batches = self._whole[: max(count, len(self.log.batches))]
        ends = [parse_header(one, 0).last_offset + 1 for one in self.log.batches]
        self.log.last_stable_offset = max(ends, default=self.log.log_start)

    def clean(self) -> int:
        """Remove markers behind what was released whose transactions are before; return how many.

        The log cleaner does that when they are older than `delete.retention.ms`.
        """
        end = self.log.last_stable_offset or 0
        gone = {one.marker for one in self.transactions if max(one.offsets) < end <= one.marker}
        starts = [parse_header(batch, 0).base_offset for batch in self._whole]
        removed = {number for number, start in enumerate(starts) if start in gone}
        self._whole = [one for number, one in enumerate(self._whole) if number not in removed]
        self._quiet = [one - sum(number < one for number in removed) for one in self._quiet]
        self.markers = {at: ms for at, ms in self.markers.items() if at not in gone}
        self.log.aborted = tuple(one for one in self.log.aborted if one[2] not in gone)
        return len(removed)

    def stable(self, end: int) -> int:
        """Return the last stable offset of a log that ends at an offset."""
        undecided = [one.first for one in self.transactions if one.first < end <= one.marker]
        return min(undecided, default=end)

    def undecided(self, end: int) -> set[int]:
        """Return the records of transactions without a marker before an offset."""
        return {at for one in self.transactions if one.marker >= end for at in one.offsets}

    def shown(self, first: int, end: int, *, with_aborted: bool) -> Iterator[Row]:
        """Yield the records in a range of offsets that a consumer gets."""
        for offset in range(first, end):
            if offset in self.rows and (with_aborted or offset not in self.aborted):
                yield self.rows[offset]


def partitions(seed: int, *, batches: int, compacted: bool = False) -> list[Partition]:
    """Return a source of two partitions; the second one is small, and may begin behind 0."""
    chooser = random.Random(f"source {seed}")
    has_gaps = chooser.random() < 0.5 or compacted
    return [
        Partition(chooser, batches, first=0, has_gaps=has_gaps),
        Partition(chooser, batches // 3, first=chooser.choice((0, 5)), has_gaps=has_gaps),
    ]
