"""Executor: one slice end to end, from fetched batches to published objects.

Safe to run twice, side by side, or after a pause of any length: where an object ends is a function
of the log (`cut`), and what becomes visible is decided by claims (`archive.claims`, I2). A claim
that is found, at the start or on the way, is carried out as its maker meant it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logmirror.archive.claims import Claim, ClaimTakenError, read_claim
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.errors import LogmirrorError
from logmirror.mirror.archive_sink import ObjectWriter
from logmirror.mirror.cut import Cut
from logmirror.mirror.holes import HoleLedger, batch_holes, unexplained_gap
from logmirror.mirror.ports import HoleSummary, Receipt, SliceResult
from logmirror.mirror.publish import make_claim, publish
from logmirror.model import Hole, HoleCause, OffsetRange, Trigger
from logmirror.wire.scan import KIND_CONTROL

if TYPE_CHECKING:
    from logmirror.mirror.kafka_source import Fetched, KafkaSource
    from logmirror.mirror.ports import Work
    from logmirror.stores.base import BlobStore
    from logmirror.wire.decode import RecordDecoder


class Transfer:
    """One run of one slice. `run` never raises a LogmirrorError: it is part of the result."""

    def __init__(
        self,
        work: Work,
        source: KafkaSource,
        store: BlobStore,
        decoder: RecordDecoder,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._work, self._slice, self._spec = work, work.slice, work.archive
        self._source, self._store, self._decoder, self._clock = source, store, decoder, clock
        self._end = self._slice.end
        self._receipts: list[Receipt] = []
        self._source_bytes = 0
        self._started_ms = clock.monotonic_ms()
        self._done = False
        self._begin(self._slice.first, None)

    def run(self) -> SliceResult:
        """Carry the slice out as far as it goes."""
        error: LogmirrorError | None = None
        try:
            self._begin(self._slice.first, self._standing_claim())
            while not self._done:
                try:
                    self._copy()
                    break
                except ClaimTakenError as taken:
                    self._drop_object()
                    self._begin(taken.claim.covered.first, taken.claim)
        except LogmirrorError as caught:
            error = caught.add_facts(
                mirror=self._slice.flow.mirror,
                destination=self._slice.flow.destination,
                topic=self._slice.flow.topic,
                partition=self._slice.flow.partition,
            )
        finally:
            rest_bytes = self._object.payload_bytes if self._object else 0
            self._drop_object()
        return SliceResult(
            slice=self._slice,
            receipts=tuple(self._receipts),
            rest_bytes=rest_bytes,
            next_offset=self._position,
            source_bytes=self._source_bytes,
            elapsed_ms=self._clock.monotonic_ms() - self._started_ms,
            error=error,
        )

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
            self._end = max(self._end, claim.covered.next_offset)
        self._position = first
        self._object: ObjectWriter | None = None
        self._object_started_ms = self._clock.monotonic_ms()
        self._holes: list[Hole] = []

    def _copy(self) -> None:
        copy = self._copy_batches if self._spec.format == "native" else self._copy_rows
        for fetched in self._source.read(self._position, self._end):
            sizes = fetched.batches.sizes[fetched.start :]
            self._source_bytes += int(sizes.sum())
            reached = copy(fetched)
            while not self._done and self._cut.limit <= reached:
                self._close(self._cut.limit - 1, self._cut.limit_trigger)
            if self._done:
                return
            self._position = reached
        if self._slice.tail and self._position > self._cut.first and not self._cut.forced:
            self._close(self._position - 1, self._slice.tail)

    def _copy_rows(self, fetched: Fetched) -> int:
        reached, _ = self._account(fetched, fetched.start)
        for columns in self._decoder.decode(
            fetched.buffer, fetched.batches, first=self._position, end=self._end
        ):
            row = 0
            while row < columns.rows:
                stop, last, trigger = self._cut.rows(columns, row)
                if stop > row:
                    self._writer().append_rows(columns, row, stop)
                if last is None or trigger is None:
                    break
                self._close(last, trigger)
                if self._done:
                    return reached
                row = stop
        return reached

    def _copy_batches(self, fetched: Fetched) -> int:
        batches = fetched.batches
        start = fetched.start
        if self._slice.staged and self._position == self._slice.first:
            # A batch that reaches over the boundary belongs to the slice before this one.
            start = int(np.searchsorted(batches.base_offsets, self._slice.first))
            if start > fetched.start:
                self._position = int(batches.last_offsets[start - 1]) + 1
                self._cut = Cut.fresh(self._position, self._spec)
        reached, stop = self._account(fetched, start)
        while start < stop:
            part, last, trigger = self._cut.batches(batches, start, stop)
            begin = int(batches.positions[start])
            end = int(batches.positions[part - 1] + batches.sizes[part - 1])
            count = self._count_records(fetched, start, part)
            self._writer().append_batches(fetched.buffer[begin:end], count)
            if last is not None and trigger is not None:
                self._close(last, trigger)
                if self._done:
                    return reached
            start = part
        return reached

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
        stop = int(np.searchsorted(batches.base_offsets, self._end))
        position = self._position
        if stop > start:
            holes = batch_holes(batches, start, stop, position, compacted=compacted)
            if self._spec.format == "native":
                # Aborted records are in the object, as they are in the log.
                holes = [hole for hole in holes if hole.cause is not HoleCause.ABORTED]
            self._holes += holes
            position = int(batches.last_offsets[stop - 1]) + 1
        if stop < batches.count and position < self._end:
            if not compacted:
                raise unexplained_gap(position, int(batches.base_offsets[stop]))
            self._holes.append(Hole(first=position, last=self._end - 1, cause=HoleCause.COMPACTED))
            position = self._end
        if self._spec.format != "native":
            position = min(position, self._end)
        return position, stop

    def _writer(self) -> ObjectWriter:
        if self._object is None:
            self._object = ObjectWriter(self._store, self._spec, self._slice.flow, self._cut.first)
        return self._object

    def _drop_object(self) -> None:
        if self._object:
            self._object.abort()
            self._object = None

    # -- the end of an object --------------------------------------------------------------------

    def _close(self, last: int, trigger: Trigger) -> None:
        covered = OffsetRange(first=self._cut.first, last=last)
        writer = self._writer()
        holes = self._take_holes(covered, writer.record_count)

        token, digest = writer.finish(
            covered, holes, self._slice.topic_id, travels=self._slice.staged
        )
        self._object = None
        claim = make_claim(
            self._work,
            covered,
            trigger,
            holes,
            record_count=writer.record_count,
            digest=digest,
            created_ms=self._clock.now_ms(),
        )
        peer, claimed_by = False, ""
        if not self._slice.staged:
            try:
                published = publish(self._work, self._store, token, claim)
                peer, claimed_by = published.peer, published.claimed_by
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
                holes=holes,
                elapsed_ms=now_ms - self._object_started_ms,
                token=token if self._slice.staged else None,
                peer=peer,
                claimed_by=claimed_by,
            )
        )
        self._object_started_ms = now_ms
        self._cut = Cut.fresh(last + 1, self._spec)
        self._position = max(self._position, last + 1)
        self._done = self._source_bytes >= self._slice.budget_bytes or last + 1 >= self._slice.end

    def _take_holes(self, covered: OffsetRange, record_count: int) -> HoleSummary:
        ledger, later = HoleLedger(), []
        for hole in self._holes:
            ledger.add(max(hole.first, covered.first), min(hole.last, covered.last), hole.cause)
            if hole.last > covered.last:
                later.append(hole)
        self._holes = later
        inside = covered.offset_count - record_count - ledger.summary().offset_count
        if inside and not self._slice.compacted:
            raise unexplained_gap(covered.first, covered.last).add_facts(missing=inside)
        ledger.count(HoleCause.COMPACTED, inside)
        return ledger.summary()
