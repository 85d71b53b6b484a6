"""Executor: one slice of a flow with `compaction: log`, from fetched batches to a snapshot.

A snapshot is named by the offsets it adds, `from` = the position, `to` = the last offset of the
slice. It holds the latest record of each key as of `to`, for every `from`: the newest snapshot
alone rebuilds the state, and the next one is merged with it. A claim fixes `to`, not the content:
the source may be compacted between two attempts at one range, and both results are correct.

Every missing offset that is not a marker or an aborted record counts as compacted, whatever the
topic's cleanup policy. "No gap without a cause" does not hold here; it holds for `Transfer`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from logmirror.archive.chain import chain
from logmirror.archive.claims import ClaimTakenError, read_claim
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.parquet import is_mirror_v3, open_parquet, read_parquet
from logmirror.archive.snapshots import RUN_BYTES, LatestByKey, check_sorted
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.errors import CorruptionError, LogmirrorError, PositionMovedError, UnavailableError
from logmirror.mirror.ports import Receipt, SliceResult
from logmirror.model import GapCause, OffsetRange, Trigger
from logmirror.source.gaps import GapLedger, batch_gaps
from logmirror.to_archive.publish import make_claim, publish
from logmirror.to_archive.sink import ObjectWriter
from logmirror.to_archive.snapshots import not_a_snapshot
from logmirror.to_archive.tail_check import check_tail
from logmirror.wire.columns import ContentDigest
from logmirror.wire.gate import first_not_copied, first_refused_arrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.archive.chain import ArchiveObject
    from logmirror.mirror.ports import GapSummary, Work
    from logmirror.source.partition import KafkaSource
    from logmirror.stores.base import BlobStore
    from logmirror.wire.decode import RecordDecoder
    from logmirror.wire.gate import Late, Refused


class SnapshotTransfer:
    """One run of one slice. `run` never raises a LogmirrorError: it is part of the result.

    Args:
        work: The slice; it becomes one snapshot.
        source: The partition.
        store: The destination's store.
        decoder: Decodes the source's batches.
        folder: Folder of temporary files for records that do not fit in memory; None: the machine's
            temporary folder.
        run_bytes: Size of the records kept in memory.
        row_group_bytes: See `ParquetEncoder`.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913  # the arguments of `Transfer`, and the temporary folder
        self,
        work: Work,
        source: KafkaSource,
        store: BlobStore,
        decoder: RecordDecoder,
        *,
        folder: Path | None = None,
        run_bytes: int = RUN_BYTES,
        row_group_bytes: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._work, self._slice, self._spec = work, work.slice, work.archive
        self._source, self._store, self._decoder = source, store, decoder
        self._folder, self._clock = folder, clock
        self._run_bytes, self._row_group_bytes = run_bytes, row_group_bytes
        self._source_bytes = 0
        self._payload_bytes = 0
        self._epoch = -1
        """Leader epoch of the batch that holds the last offset of the snapshot; -1: unknown."""

    def run(self) -> SliceResult:
        """Write the snapshot."""
        started_ms = self._clock.monotonic_ms()
        receipt, error = None, None
        tail_checked = False
        try:
            if not self._work.tail_checked:
                check_tail(self._work, self._store, self._source, self._decoder)
                tail_checked = True
            receipt = self._write_snapshot()
        except LogmirrorError as caught:
            error = caught.add_facts(
                mirror=self._slice.flow.mirror,
                destination=self._slice.flow.destination,
                topic=self._slice.flow.topic,
                partition=self._slice.flow.partition,
            )
        return SliceResult(
            slice=self._slice,
            receipts=(receipt,) if receipt else (),
            next_offset=receipt.covered.next_offset if receipt else self._slice.first,
            source_bytes=self._source_bytes,
            elapsed_ms=self._clock.monotonic_ms() - started_ms,
            tail_checked=tail_checked,
            error=error,
        )

    def _write_snapshot(self) -> Receipt:
        first, flow = self._slice.first, self._slice.flow
        claim = read_claim(self._store, flow.destination, flow.partition, first)
        while True:
            last = claim.covered.last if claim else self._slice.end - 1
            trigger = claim.trigger if claim else self._slice.tail or Trigger.EXPLICIT
            try:
                return self._attempt(OffsetRange(first=first, last=last), trigger)
            except ClaimTakenError as taken:
                claim = taken.claim

    def _attempt(self, covered: OffsetRange, trigger: Trigger) -> Receipt:
        started_ms, self._payload_bytes = self._clock.monotonic_ms(), 0
        writer = ObjectWriter(
            self._store,
            self._spec,
            self._slice.flow,
            covered.first,
            row_group_bytes=self._row_group_bytes,
        )
        try:
            with contextlib.ExitStack() as stack:
                view, gaps, before = self._read(stack, covered)
                for batch in view.merged(before):
                    # The snapshot before this one may have been written under other types.
                    _pass_gate(first_refused_arrow(batch, self._spec.types))
                    writer.append_arrow(batch)
            token, digest = writer.finish(covered, gaps, self._slice.topic_id, travels=False)
        except OSError as error:
            writer.abort()
            raise UnavailableError(
                "could not write records of a snapshot to a temporary file",
                hint="free space in the temporary folder of the executors (spark.local.dir)",
                reason=error.strerror or str(error),
            ) from error
        except BaseException:
            writer.abort()
            raise
        claim = make_claim(
            self._work,
            covered,
            trigger,
            gaps,
            record_count=writer.record_count,
            digest=digest,
            created_ms=self._slice.seen_ms or self._clock.now_ms(),
            leader_epoch=self._epoch,
        )
        try:
            published = publish(self._work, self._store, token, claim)
        except BaseException:
            self._store.discard(token)
            raise
        return Receipt(
            covered=covered,
            record_count=writer.record_count,
            payload_bytes=self._payload_bytes,
            object_bytes=writer.object_bytes,
            digest=digest,
            trigger=trigger,
            gaps=gaps,
            elapsed_ms=self._clock.monotonic_ms() - started_ms,
            existed=published.existed,
            claimed_by=published.claimed_by,
            leader_epoch=self._epoch,
        )

    def _read(
        self, stack: contextlib.ExitStack, covered: OffsetRange
    ) -> tuple[LatestByKey, GapSummary, Iterator[Any]]:
        """Collect records; returns them, the gaps of the range, and the previous snapshot's rows.

        The age of a snapshot of mirror-v3 is unknown, so the next one is normally rebuilt. It is
        continued if the source still shows every offset since: then no tombstone is missing.
        """
        is_untrimmed = self._slice.rebuild and self._source.log_start() <= covered.first
        if is_untrimmed and self._newest_is_mirror_v3():
            view, gaps = self._collect(stack, covered, rebuild=False)
            if not gaps.compacted:
                return view, gaps, self._before()
        view, gaps = self._collect(stack, covered, rebuild=self._slice.rebuild)
        return view, gaps, iter(()) if self._slice.rebuild else self._before()

    def _collect(
        self, stack: contextlib.ExitStack, covered: OffsetRange, *, rebuild: bool
    ) -> tuple[LatestByKey, GapSummary]:
        view = stack.enter_context(LatestByKey(self._folder, run_bytes=self._run_bytes))
        return view, self._read_source(view, covered, rebuild=rebuild)

    def _read_source(self, view: LatestByKey, covered: OffsetRange, *, rebuild: bool) -> GapSummary:
        """Collect the records up to the end of the range; returns the gaps of the range."""
        flow, end = self._slice.flow, covered.next_offset
        position = self._source.log_start() if rebuild else covered.first
        ledger, records, self._payload_bytes, self._epoch = GapLedger(), 0, 0, -1
        ledger.add(covered.first, min(position, end) - 1, GapCause.COMPACTED)
        for fetched in self._source.read(position, end):
            batches = fetched.batches
            stop = int(np.searchsorted(batches.base_offsets, end))
            for gap in batch_gaps(batches, fetched.start, stop, position, compacted=True):
                first, last = max(gap.first, covered.first), min(gap.last, covered.last)
                ledger.add(first, last, gap.cause)
            for columns in self._decoder.decode(fetched.buffer, batches, first=position, end=end):
                _pass_gate(first_not_copied(columns, self._spec.types, self._work.until_ms))
                view.add(columns.to_arrow(flow.topic, flow.partition))
                begin = int(np.searchsorted(columns.offsets, covered.first))
                records += columns.rows - begin
                self._payload_bytes += int(columns.payload_bytes[begin:].sum())
            self._source_bytes += int(batches.sizes[fetched.start : stop].sum())
            position = int(batches.last_offsets[-1]) + 1
            self._epoch = batches.leader_epoch_at(covered.last)
        inside = covered.offset_count - records - ledger.summary().offset_count
        ledger.count(GapCause.COMPACTED, inside)  # within batches, or after the last one
        return ledger.summary()

    def _newest(self) -> ArchiveObject | None:
        names = self._store.tail(self._slice.flow.folder).names
        objects = chain(names, extension=self._spec.extension, start=None, snapshots=True).objects
        return objects[-1] if objects else None

    def _newest_is_mirror_v3(self) -> bool:
        newest = self._newest()
        if newest is None or newest.last + 1 != self._slice.first:
            return False
        with (
            contextlib.suppress(KeyError),
            self._store.open(f"{self._slice.flow.folder}/{newest.name}") as file,
        ):
            return is_mirror_v3(open_parquet(file, newest.name))
        return False

    def _before(self) -> Iterator[Any]:
        """Yield the rows of the snapshot that this one continues, verified while they are read."""
        newest = self._newest()
        if newest is None or newest.last + 1 != self._slice.first:
            raise PositionMovedError(
                "the newest snapshot does not end where the slice begins",
                position=self._slice.first,
                found=newest.last + 1 if newest else None,
            )
        name = newest.name
        try:
            with self._store.open(f"{self._slice.flow.folder}/{name}") as file:
                yield from _verified_rows(file, name)
        except KeyError:  # when it is opened, or between two ranges of a bucket's object
            raise PositionMovedError("the snapshot was just pruned", name=name) from None


def _pass_gate(refused: Refused | Late | None) -> None:
    if refused is not None:
        raise refused.error()


def _verified_rows(file: BinaryIO, name: str) -> Iterator[Any]:
    """Yield a snapshot's rows; CorruptionError at their end if they differ from the footer.

    A snapshot of mirror-v3 has no metadata: only the order of its rows is checked.
    """
    digest, last_key, rows = ContentDigest(), None, 0
    parquet = open_parquet(file, name)
    metadata = ObjectMetadata.from_key_values(parquet.metadata.metadata, name=name)
    if not (metadata.is_snapshot if metadata else is_mirror_v3(parquet)):
        raise not_a_snapshot(name)
    for batch in read_parquet(parquet, name):
        last_key = check_sorted(batch, last_key, name=name)
        digest.update_arrow(batch)
        rows += len(batch)
        yield batch
    if metadata and (rows, digest.hexdigest()) != (metadata.record_count, metadata.digest):
        raise CorruptionError(
            "the newest snapshot was changed after it was written",
            hint="delete nothing; `logmirror verify --deep` shows which snapshots are undamaged",
            name=name,
            expected=metadata.digest,
            found=digest.hexdigest(),
        )
