"""Driver: commits the results of slices and advances positions.

A position advances only over receipts that continue it, in offset order (I5). Staged objects are
published here in offset order. Objects that cannot be published are discarded, and their range is
planned again from the position.
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
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import Receipt, SliceResult, Work
    from logmirror.stores.base import BlobStore


class Committer:
    """Commits the results of each tick."""

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
        """Commit the results of one flow's slices, in offset order.

        Returns:
            The first error, or None. The position is before the failed range; all results after it
            are discarded.
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
        position, newest, existed = state.position, state.newest, False
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
            newest = format_name(committed, work.archive.extension)
            self._observer.flushed(state.flow, receipt, committed, newest)
            existed |= receipt.existed
            if receipt.claimed_by not in {"", work.writer_id}:
                self._observer.claimed_by_other(state.flow, receipt, committed, work.writer_id)
        if error is None and result.slice.staged and position < result.slice.end:
            error = InternalError("a staged slice ended early", position=position)
        state.advance(result, position, self._clock.monotonic_ms(), newest=newest)
        if existed:
            state.outdated()
        failpoints.reach("commit.done")
        return error

    def _accept(self, work: Work, position: int, receipt: Receipt) -> OffsetRange:
        covered = receipt.covered
        if receipt.token:
            # A native slice begins with its first whole batch. Offsets before it are covered by the
            # previous object, or are an offset gap that this object covers.
            covered = OffsetRange(first=position, last=covered.last)
            claim = make_claim(
                work,
                covered,
                receipt.trigger,
                receipt.gaps,
                record_count=receipt.record_count,
                digest=receipt.digest,
                created_ms=self._clock.now_ms(),
                leader_epoch=receipt.leader_epoch,
                decided=receipt.decided,
            )
            store = self._open_store(work.archive.location)
            published = publish(work, store, receipt.token, claim)
            if published.existed:
                self._observer.conflict(work.slice.flow)
            if published.claimed_by not in {"", work.writer_id}:
                overtaken = replace(receipt, claimed_by=published.claimed_by)
                self._observer.claimed_by_other(work.slice.flow, overtaken, covered, work.writer_id)
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
