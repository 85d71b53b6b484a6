"""Driver: results to verified positions; the commit point of the mirror.

A position advances only over receipts that continue it, in offset order (I5). Staged objects are
published here, after everything before them; what cannot be published is discarded and planned
again from the position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.archive.naming import format_name
from logmirror.errors import InternalError, LogmirrorError
from logmirror.mirror.observer import Observer
from logmirror.model import OffsetRange
from logmirror.monitoring.metrics import Recorder
from logmirror.to_archive.publish import make_claim, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.clock import Clock
    from logmirror.locations import StoreLocation
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import Receipt, SliceResult, Work
    from logmirror.stores.base import BlobStore


class Committer:
    """Accepts the results of one tick after the other."""

    def __init__(
        self,
        open_store: Callable[[StoreLocation], BlobStore],
        *,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self._open_store, self._clock = open_store, clock
        self._observer = observer or Observer([], Recorder(), clock)

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """Commit what the slices of one flow brought, in offset order.

        Returns:
            The first error; the position stands before it. Everything behind it is discarded.
        """
        error: LogmirrorError | None = None
        by_first = {work.slice.first: work for work in works}
        for result in sorted(results, key=lambda r: r.slice.first):
            work = by_first[result.slice.first]
            if error is None:
                error = self._commit_result(state, work, result)
            else:
                self._discard(work, result.receipts)
        return error

    def _commit_result(
        self, state: FlowState, work: Work, result: SliceResult
    ) -> LogmirrorError | None:
        failpoints.reach("commit.received")
        position = state.position
        error = result.error
        for number, receipt in enumerate(result.receipts):
            try:
                committed = self._accept(work, position, receipt)
            except LogmirrorError as refused:
                if receipt.token:
                    self._discard(work, result.receipts[number:])
                error = refused
                break
            position = committed.next_offset
            state.newest = format_name(committed, work.archive.extension)
            self._observer.flushed(state.flow, receipt, committed, state.newest)
            state.position_stale |= receipt.existed
            if receipt.claimed_by not in {"", work.writer_id}:
                self._observer.claimed_by_other(state.flow, receipt, committed, work.writer_id)
        if error is None and result.slice.staged and position < result.slice.end:
            error = InternalError("a staged slice ended early", position=position)
        state.advance(result, position, self._clock.monotonic_ms())
        failpoints.reach("commit.done")
        return error

    def _accept(self, work: Work, position: int, receipt: Receipt) -> OffsetRange:
        covered = receipt.covered
        if receipt.token:
            # A native slice begins with its first whole batch; the offsets before it, if any, were
            # covered by the object before, or are a hole that belongs to this one.
            covered = OffsetRange(first=position, last=covered.last)
            claim = make_claim(
                work,
                covered,
                receipt.trigger,
                receipt.gaps,
                record_count=receipt.record_count,
                digest=receipt.digest,
                created_ms=self._clock.now_ms(),
            )
            store = self._open_store(work.archive.location)
            published = publish(work, store, receipt.token, claim)
            if published.existed:
                self._observer.conflict(work.slice.flow)
            if published.claimed_by not in {"", work.writer_id}:
                told = replace(receipt, claimed_by=published.claimed_by)
                self._observer.claimed_by_other(work.slice.flow, told, covered, work.writer_id)
        elif covered.first != position:
            raise InternalError(
                "a receipt does not continue the position",
                position=position,
                first=covered.first,
                last=covered.last,
            )
        return covered

    def _discard(self, work: Work, receipts: Sequence[Receipt]) -> None:
        store = self._open_store(work.archive.location)
        for receipt in receipts:
            if receipt.token:
                store.discard(receipt.token)
