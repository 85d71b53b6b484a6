"""Executor: one slice end to end, from fetched batches to published objects.

Safe to run twice, concurrently, or after a pause of any length: the end of an object is a function
of the log (`cut`), and claims decide which object becomes visible (`archive.claims`, I2). If the
slice finds a claim, at its start or later, it writes exactly the claimed range.

The source is read by `shared_read`, which passes every response to all slices at its position. A
slice that fails, ends or restarts elsewhere does not affect the others.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.archive.claims import Claim, ClaimTakenError, read_claim
from logmirror.archive.transactions import OpenTransactions
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.errors import LogmirrorError
from logmirror.mirror.ports import GapSummary, Receipt, SliceResult
from logmirror.model import Decided, Gap, GapCause, OffsetRange, Trigger
from logmirror.source.column_types import Gate
from logmirror.source.gaps import GapLedger, batch_gaps, unexplained_gap
from logmirror.to_archive.cut import Cut
from logmirror.to_archive.publish import make_claim, publish
from logmirror.to_archive.sink import ObjectWriter
from logmirror.to_archive.tail_check import check_tail
from logmirror.wire.scan import KIND_CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.mirror.ports import Work
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.stores.base import BlobStore
    from logmirror.wire.columns import Columns
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.gate import Late, Refused
    from logmirror.wire.scan import Batches

_DECIDED_MAX: Final = 1000
"""Limit for the open transactions of a claim; with more, their outcomes are left out."""


class Transfer:
    """One run of one slice. A LogmirrorError is never raised: it is part of the result.

    begin -> check_tail -> [join -> [take -> append... -> end_response]... -> leave]... -> result

    Args:
        work: The slice.
        store: The destination's store.
        decoder: Shared with other slices; its rows are valid during one call only.
        row_group_bytes: Size of row groups in Parquet objects; None: the default of the format.
        clock: Time.

    Attributes:
        position: The next offset to read.
        end: One past the last offset to read.
        is_ended: The slice is finished; only `result` may be called.
        is_reading: The slice takes part in the current read.
        wants_rows: Responses must be decoded for this slice.
        types: Required types of keys and values.
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
        self.until_ms = work.until_ms
        self.types = self._spec.types
        self._gate = Gate(decoder)
        self._receipts: list[Receipt] = []
        self._error: LogmirrorError | None = None
        self._source_bytes = self._rest_bytes = 0
        self._started_ms = clock.monotonic_ms()
        self._object: ObjectWriter | None = None
        self.is_tail_checked = False
        self._batches: Batches | None = None
        """The batches of the response that is processed."""

        self._begin(self._slice.first, None)

    def begin(self) -> None:
        """Check for a claim at the start of the slice; must be called before reading."""
        with self._capture_errors():
            self._begin(self._slice.first, self._claim_at_start())

    def check_tail(self, source: KafkaSource) -> None:
        """Compare the last archived record with the source, unless that is proven already.

        A staged slice does not: its objects follow those of a slice that does.
        """
        if self._work.tail_checked or self._slice.staged or self.is_ended:
            return
        with self._capture_errors():
            check_tail(self._work, self._store, source, self._decoder)
            self.is_tail_checked = True

    def join(self) -> None:
        """Take part in a read that begins at `position`."""
        self.is_reading = True

    def take(self, fetched: Fetched) -> None:
        """Process a response: copy native batches; for other formats, collect the offset gaps."""
        with self._capture_errors():
            self._batches = fetched.batches
            sizes = fetched.batches.sizes[fetched.start :]
            self._source_bytes += int(sizes.sum())
            if self.wants_rows:
                self._reached, _ = self._account(fetched, fetched.start)
            else:
                self._reached = self._copy_batches(fetched)

    def append(self, columns: Columns, refused: Refused | Late | None = None) -> None:
        """Append decoded rows of the response, in order, with offsets below `end`.

        Args:
            columns: The rows.
            refused: The first row that must not be copied, if any; the slice ends before it.
        """
        with self._capture_errors():
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

    def end_response(self) -> None:
        """End the processing of a response: close a claimed object whose range was read."""
        if not self.is_reading:
            return
        with self._capture_errors():
            if self._cut.forced and self._cut.limit <= self._reached:
                self._close(self._cut.limit - 1, self._cut.limit_trigger)
            if self.is_reading:
                self.position = self._reached
                self._epoch = self._epoch_of(self.position - 1)
            self._batches = None

    def leave(self) -> None:
        """Leave the read; at the end of the slice, write its tail if the slice has one."""
        was_reading, self.is_reading = self.is_reading, False
        if not was_reading or self.position < self.end:
            return
        with self._capture_errors():
            if self._slice.tail and self.position > self._cut.first and not self._cut.forced:
                self._close(self.position - 1, self._slice.tail)
            self._finish()

    def fail(self, error: LogmirrorError) -> None:
        """End the slice with an error; it becomes part of this slice's result only."""
        self._error = error.add_facts(
            mirror=self._slice.flow.mirror,
            destination=self._slice.flow.destination,
            topic=self._slice.flow.topic,
            partition=self._slice.flow.partition,
        )
        self._finish()

    def abandon(self) -> None:
        """Discard the object under construction, if any."""
        if self._object:
            self._object.abort()
            self._object = None

    def result(self) -> SliceResult:
        """Return the result: receipts, position reached, error."""
        return SliceResult(
            slice=self._slice,
            receipts=tuple(self._receipts),
            rest_bytes=self._rest_bytes,
            next_offset=self.position,
            source_bytes=self._source_bytes,
            elapsed_ms=self._clock.monotonic_ms() - self._started_ms,
            tail_checked=self.is_tail_checked,
            error=self._error,
        )

    @contextlib.contextmanager
    def _capture_errors(self) -> Iterator[None]:
        """Turn errors into results: restart at a claim, or fail this slice."""
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

    def _claim_at_start(self) -> Claim | None:
        if self._slice.staged:
            return None  # the driver publishes and handles the claim
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
        self._batches = None
        self._epoch = -1  # leader epoch of the batch before `position`
        self._object_started_ms = self._clock.monotonic_ms()
        self._gaps: list[Gap] = []
        self._open = OpenTransactions()

    def _copy_batches(self, fetched: Fetched) -> int:
        batches = fetched.batches
        start = fetched.start
        if self._slice.staged and self.position == self._slice.first:
            # A batch that spans the boundary belongs to the previous slice.
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
                self._open.add(fetched.buffer, batches, start, part)
            if last is not None and trigger is not None:
                self._close(last, trigger)
                if not self.is_reading:
                    return reached
            start = part
        if refused is not None:
            self._refuse(refused, int(batches.base_offsets[stop]))
        return reached

    def _first_refused(self, fetched: Fetched, start: int, stop: int) -> Refused | Late | None:
        if start >= stop:
            return None
        end = int(fetched.batches.last_offsets[stop - 1]) + 1
        return self._gate.refused(self._work, fetched, self.position, end)

    def _count_records(self, fetched: Fetched, start: int, stop: int) -> int:
        """Return the number of records in these batches from the object's first offset on."""
        batches, first = fetched.batches, self._cut.first
        is_counted = batches.kinds[start:stop] != KIND_CONTROL
        count = int(batches.record_counts[start:stop][is_counted].sum())
        if batches.base_offsets[start] < first and is_counted[0]:
            # The copy begins inside this batch (a trimmed log, a chain start): the batch is kept
            # whole, as the source serves it, and earlier records are not part of the object.
            whole, last = int(batches.record_counts[start]), int(batches.last_offsets[start])
            if whole == last - int(batches.base_offsets[start]) + 1:
                kept = last - first + 1
            else:
                rows = self._decoder.decode(fetched.buffer, batches, first=first, end=last + 1)
                kept = sum(columns.rows for columns in rows)
            count -= whole - kept
        return count

    def _account(self, fetched: Fetched, start: int) -> tuple[int, int]:
        """Collect the gaps of a response; returns the offset reached and its last batch + 1."""
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

    def _epoch_of(self, offset: int) -> int:
        """Return the leader epoch of the batch that covers an offset; -1: unknown."""
        if self._batches is not None:
            return self._batches.leader_epoch_at(offset)
        return self._epoch if offset == self.position - 1 else -1

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
        gaps, epoch = self._take_gaps(covered, writer.record_count), self._epoch_of(last)

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
            leader_epoch=epoch,
            decided=self._take_decided(last),
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
                leader_epoch=epoch,
                decided=claim.decided,
            )
        )
        self._object_started_ms = now_ms
        self._cut = Cut.fresh(last + 1, self._spec)
        self.position = max(self.position, last + 1)
        if self._source_bytes >= self._slice.budget_bytes or last + 1 >= self._slice.end:
            self._finish()

    def _refuse(self, refused: Refused | Late, end: int) -> None:
        """Close the objects that end before `end`, and stop with the error of the rejected record.

        The last object ends before `end` too, unless a claim has fixed a longer range.
        """
        if self._cut.forced and self._cut.limit <= end:
            self._close(self._cut.limit - 1, self._cut.limit_trigger)
        if not self.is_reading:
            return  # the slice has reached its budget; the next one stops at the record
        if end > self._cut.first and not self._cut.forced:
            is_whole = self.wants_rows and self._cut.limit <= end  # the rejected record ends a gap
            self._close(end - 1, self._cut.limit_trigger if is_whole else Trigger.EXPLICIT)
        raise refused.error()

    def _take_decided(self, last: int) -> tuple[Decided, ...]:
        found, self._open = self._open.is_aborted, OpenTransactions()
        if self._spec.format != "native" or not 0 < len(found) <= _DECIDED_MAX:
            return ()
        aborted = sorted(producer_id for producer_id, is_aborted in found.items() if is_aborted)
        return (Decided(last, tuple(aborted), tuple(sorted(found.keys() - aborted))),)

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
