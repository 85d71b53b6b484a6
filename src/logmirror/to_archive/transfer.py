"""Executor: one slice end to end, from fetched batches to published objects.

Safe to run twice, side by side, or after a pause of any length: where an object ends is a function
of the log (`cut`), and what becomes visible is decided by claims (`archive.claims`, I2). A claim
that is found, at the start or on the way, is carried out as its maker meant it.

A slice is fed: who reads the source (`shared_read`) hands every response to all slices that stand
where it begins. One that fails, ends, or must begin anew elsewhere disturbs no other.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from logmirror.archive.claims import Claim, ClaimTakenError, read_claim
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.errors import LogmirrorError
from logmirror.mirror.ports import GapSummary, Receipt, SliceResult
from logmirror.model import Gap, GapCause, OffsetRange, Trigger
from logmirror.source.column_types import Gate
from logmirror.source.gaps import GapLedger, batch_gaps, unexplained_gap
from logmirror.to_archive.cut import Cut
from logmirror.to_archive.publish import make_claim, publish
from logmirror.to_archive.sink import ObjectWriter
from logmirror.wire.scan import KIND_CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.mirror.ports import Work
    from logmirror.source.partition import Fetched
    from logmirror.stores.base import BlobStore
    from logmirror.wire.columns import Columns
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.gate import Refused


class Transfer:
    """One run of one slice. A LogmirrorError is never raised: it is part of the result.

    begin -> [join -> [take -> append... -> settle]... -> leave]... -> result

    Args:
        work: What is to be done.
        store: Where objects go.
        decoder: Shared with others; what it yields need not outlive a call of ours.
        row_group_bytes: Of Parquet objects; None: the format's own.
        clock: Time.

    Attributes:
        position: The next offset wanted.
        end: One past the last offset wanted.
        is_ended: Nothing is left to do but to ask for the result.
        is_reading: Takes part in the reading that it has joined.
        wants_rows: Whether responses must be decoded for it.
        types: What keys and values of those rows must be.
    """

    def __init__(
        self,
        work: Work,
        store: BlobStore,
        decoder: RecordDecoder,
        *,
        row_group_bytes: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._work, self._slice, self._spec = work, work.slice, work.archive
        self._store, self._decoder, self._clock = store, decoder, clock
        self._row_group_bytes = row_group_bytes
        self.end = self._slice.end
        self.is_ended = self.is_reading = False
        self.wants_rows = self._spec.format != "native"
        self.types = self._spec.types
        self._gate = Gate(decoder)
        self._receipts: list[Receipt] = []
        self._error: LogmirrorError | None = None
        self._source_bytes = self._rest_bytes = 0
        self._started_ms = clock.monotonic_ms()
        self._object: ObjectWriter | None = None
        self._begin(self._slice.first, None)

    def begin(self) -> None:
        """Look for what must be finished first; nothing is read before."""
        with self._guarded():
            self._begin(self._slice.first, self._standing_claim())

    def join(self) -> None:
        """Take part in a reading that begins at `position`."""
        self.is_reading = True

    def take(self, fetched: Fetched) -> None:
        """Take a response in: what is native is copied, of rows only the holes are noted."""
        with self._guarded():
            sizes = fetched.batches.sizes[fetched.start :]
            self._source_bytes += int(sizes.sum())
            if self.wants_rows:
                self._reached, _ = self._account(fetched, fetched.start)
            else:
                self._reached = self._copy_batches(fetched)

    def append(self, columns: Columns, refused: Refused | None = None) -> None:
        """Take rows of the response in, in order; those from `end` on must not be among them.

        The slice ends before the row that is `refused`, the first of them that is not of our types.
        """
        with self._guarded():
            row, end = 0, columns.rows if refused is None else refused.row
            while row < end and self.is_reading:
                stop, last, trigger = self._cut.rows(columns, row)
                if stop > end:
                    stop, last = end, None
                if stop > row:
                    self._writer().append_rows(columns, row, stop)
                if last is not None and trigger is not None:
                    self._close(last, trigger)
                row = stop
            if refused is not None and self.is_reading:
                self._refuse(refused, refused.offset)

    def settle(self) -> None:
        """The response was taken in whole."""
        if not self.is_reading:
            return
        with self._guarded():
            while self.is_reading and self._cut.limit <= self._reached:
                self._close(self._cut.limit - 1, self._cut.limit_trigger)
            if self.is_reading:
                self.position = self._reached

    def leave(self) -> None:
        """The reading is over; whoever has reached its end writes its tail, if that is due."""
        was_reading, self.is_reading = self.is_reading, False
        if not was_reading or self.position < self.end:
            return
        with self._guarded():
            if self._slice.tail and self.position > self._cut.first and not self._cut.forced:
                self._close(self.position - 1, self._slice.tail)
            self._finish()

    def fail(self, error: LogmirrorError) -> None:
        """End here: what was to be read cannot be had. The error is ours alone."""
        self._error = error.add_facts(
            mirror=self._slice.flow.mirror,
            destination=self._slice.flow.destination,
            topic=self._slice.flow.topic,
            partition=self._slice.flow.partition,
        )
        self._finish()

    def abandon(self) -> None:
        """Throw away what is under construction; harmless when nothing is."""
        if self._object:
            self._object.abort()
            self._object = None

    def result(self) -> SliceResult:
        """What came of it, as far as it went."""
        return SliceResult(
            slice=self._slice,
            receipts=tuple(self._receipts),
            rest_bytes=self._rest_bytes,
            next_offset=self.position,
            source_bytes=self._source_bytes,
            elapsed_ms=self._clock.monotonic_ms() - self._started_ms,
            error=self._error,
        )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep what goes wrong to ourselves."""
        try:
            yield
        except ClaimTakenError as taken:
            self.abandon()
            self.is_reading = False
            self._begin(taken.claim.covered.first, taken.claim)
        except LogmirrorError as error:
            self.fail(error)

    def _finish(self) -> None:
        self._rest_bytes = self._object.payload_bytes if self._object else 0
        self.abandon()
        self.is_ended, self.is_reading = True, False

    # -- one object after the other --------------------------------------------------------------

    def _standing_claim(self) -> Claim | None:
        if self._slice.staged:
            return None  # the driver, which publishes, meets it
        flow = self._slice.flow
        return read_claim(self._store, flow.destination, flow.partition, self._slice.first)

    def _begin(self, first: int, claim: Claim | None) -> None:
        self._cut = (
            Cut.claimed(first, claim.covered.last, claim.trigger)
            if claim
            else Cut.fresh(first, self._spec)
        )
        if claim:
            self.end = max(self.end, claim.covered.next_offset)
        self.position = self._reached = first
        self._object_started_ms = self._clock.monotonic_ms()
        self._gaps: list[Gap] = []

    def _copy_batches(self, fetched: Fetched) -> int:
        batches = fetched.batches
        start = fetched.start
        if self._slice.staged and self.position == self._slice.first:
            # A batch that reaches over the boundary belongs to the slice before this one.
            start = int(np.searchsorted(batches.base_offsets, self._slice.first))
            if start > fetched.start:
                self.position = int(batches.last_offsets[start - 1]) + 1
                self._cut = Cut.fresh(self.position, self._spec)
        reached, stop = self._account(fetched, start)
        refused = self._first_refused(fetched, start, stop)
        if refused is not None:
            stop = int(np.searchsorted(batches.last_offsets, refused.offset))
        while start < stop:
            part, last, trigger = self._cut.batches(batches, start, stop)
            if part > start:
                begin = int(batches.positions[start])
                end = int(batches.positions[part - 1] + batches.sizes[part - 1])
                count = self._count_records(fetched, start, part)
                self._writer().append_batches(fetched.buffer[begin:end], count)
            if last is not None and trigger is not None:
                self._close(last, trigger)
                if not self.is_reading:
                    return reached
            start = part
        if refused is not None:
            self._refuse(refused, int(batches.base_offsets[stop]))
        return reached

    def _first_refused(self, fetched: Fetched, start: int, stop: int) -> Refused | None:
        if start >= stop:
            return None
        end = int(fetched.batches.last_offsets[stop - 1]) + 1
        return self._gate.refused(self._work, fetched, self.position, end)

    def _count_records(self, fetched: Fetched, start: int, stop: int) -> int:
        """How many records of these batches are the object's: those from its first offset on."""
        batches, first = fetched.batches, self._cut.first
        is_counted = batches.kinds[start:stop] != KIND_CONTROL
        count = int(batches.record_counts[start:stop][is_counted].sum())
        if batches.base_offsets[start] < first and is_counted[0]:
            # The copy begins inside this batch (a trimmed log, a chain start): the batch is kept
            # whole, as the source serves it, and what lies before is not part of the object.
            whole, last = int(batches.record_counts[start]), int(batches.last_offsets[start])
            if whole == last - int(batches.base_offsets[start]) + 1:
                kept = last - first + 1
            else:
                rows = self._decoder.decode(fetched.buffer, batches, first=first, end=last + 1)
                kept = sum(columns.rows for columns in rows)
            count -= whole - kept
        return count

    def _account(self, fetched: Fetched, start: int) -> tuple[int, int]:
        """Note the holes of a response; returns the offset it reaches and its last batch + 1."""
        batches, compacted = fetched.batches, self._slice.compacted
        stop = int(np.searchsorted(batches.base_offsets, self.end))
        position = self.position
        if stop > start:
            gaps = batch_gaps(batches, start, stop, position, compacted=compacted)
            if self._spec.format == "native":
                # Aborted records are in the object, as they are in the log.
                gaps = [gap for gap in gaps if gap.cause is not GapCause.ABORTED]
            self._gaps += gaps
            position = int(batches.last_offsets[stop - 1]) + 1
        if stop < batches.count and position < self.end:
            if not compacted:
                raise unexplained_gap(position, int(batches.base_offsets[stop]))
            self._gaps.append(Gap(first=position, last=self.end - 1, cause=GapCause.COMPACTED))
            position = self.end
        if self._spec.format != "native":
            position = min(position, self.end)
        return position, stop

    def _writer(self) -> ObjectWriter:
        if self._object is None:
            self._object = ObjectWriter(
                self._store,
                self._spec,
                self._slice.flow,
                self._cut.first,
                row_group_bytes=self._row_group_bytes,
            )
        return self._object

    # -- the end of an object --------------------------------------------------------------------

    def _close(self, last: int, trigger: Trigger) -> None:
        covered = OffsetRange(first=self._cut.first, last=last)
        writer = self._writer()
        gaps = self._take_gaps(covered, writer.record_count)

        token, digest = writer.finish(
            covered, gaps, self._slice.topic_id, travels=self._slice.staged
        )
        self._object = None
        claim = make_claim(
            self._work,
            covered,
            trigger,
            gaps,
            record_count=writer.record_count,
            digest=digest,
            created_ms=self._clock.now_ms(),
        )
        existed, claimed_by = False, ""
        if not self._slice.staged:
            try:
                published = publish(self._work, self._store, token, claim)
                existed, claimed_by = published.existed, published.claimed_by
            except BaseException:
                self._store.discard(token)
                raise
        now_ms = self._clock.monotonic_ms()
        self._receipts.append(
            Receipt(
                covered=covered,
                record_count=writer.record_count,
                payload_bytes=writer.payload_bytes,
                object_bytes=writer.object_bytes,
                digest=digest,
                trigger=trigger,
                gaps=gaps,
                elapsed_ms=now_ms - self._object_started_ms,
                token=token if self._slice.staged else None,
                existed=existed,
                claimed_by=claimed_by,
            )
        )
        self._object_started_ms = now_ms
        self._cut = Cut.fresh(last + 1, self._spec)
        self.position = max(self.position, last + 1)
        if self._source_bytes >= self._slice.budget_bytes or last + 1 >= self._slice.end:
            self._finish()

    def _refuse(self, refused: Refused, end: int) -> None:
        """Close what ends before `end`, the rest too unless somebody has claimed more; stop."""
        while self.is_reading and self._cut.limit <= end:
            if not (self.wants_rows or self._cut.forced):
                break  # native objects end with the batch that reaches their limit
            self._close(self._cut.limit - 1, self._cut.limit_trigger)
        if not self.is_reading:
            return  # enough for one slice; the next one comes to the record
        if end > self._cut.first and not self._cut.forced:
            self._close(end - 1, Trigger.EXPLICIT)
        raise refused.error()

    def _take_gaps(self, covered: OffsetRange, record_count: int) -> GapSummary:
        ledger, later = GapLedger(), []
        for gap in self._gaps:
            ledger.add(max(gap.first, covered.first), min(gap.last, covered.last), gap.cause)
            if gap.last > covered.last:
                later.append(gap)
        self._gaps = later
        inside = covered.offset_count - record_count - ledger.summary().offset_count
        if inside and not self._slice.compacted:
            raise unexplained_gap(covered.first, covered.last).add_facts(missing=inside)
        ledger.count(GapCause.COMPACTED, inside)
        return ledger.summary()
