"""Executor: copies slices into one cluster at new offsets, in transactions with their progress.

    wait for records -> take over the flow -> [fetch -> pieces -> send] -> progress -> commit

Invariants:
1. The position is read after `init` has fenced the previous writer and ended its transaction, and
   must be where the slice begins. So nothing that was committed is copied again (I2, I4).
2. Records and their progress are in one transaction: both are committed, or neither is.
3. What lies below `verified` is committed, as the coordinator has confirmed (I5).
4. A batch is never sent twice. After a lost response this process does not commit the transaction;
   the next process to take over the flow reads the outcome (I7).
5. An error of the source in the middle of a transaction does not abort it: the records before the
   error are committed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST
from logmirror.cluster.offset_syncs import OffsetSyncWriter, Run, thinned
from logmirror.errors import (
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    PositionMovedError,
    UnavailableError,
)
from logmirror.mirror.follow import SLICE_MS
from logmirror.source.gaps import batch_gaps, check_dense, unexplained_gap
from logmirror.to_kafka.following import Following, attempt
from logmirror.to_kafka.idempotence import SEQUENCE_MASK
from logmirror.to_kafka.translate_progress import (
    PROGRESS,
    Progress,
    current,
    encode_progress,
    reclassified,
    taken_over,
)
from logmirror.to_kafka.translate_slice import begun
from logmirror.wire.rebatch import stamp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import SliceResult, Work
    from logmirror.model import TopicPartition
    from logmirror.source.column_types import Gate
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.to_kafka.producer_sessions import ProducerSessions
    from logmirror.to_kafka.translate_progress import ProgressReader
    from logmirror.to_kafka.translate_slice import TranslateSlice
    from logmirror.wire.rebatch import Piece, Rebatcher

TRANSACTION_BYTES: Final = 16 << 20
"""The largest transaction. To end one takes some milliseconds, to write a MiB about one."""
TRANSACTION_MS: Final = 500
"""The longest transaction. Consumers with `read_committed` see its records only after its end."""

IN_FLIGHT_MAX: Final = 64

_RETRIED: Final = (PositionMovedError, UnavailableError, OutcomeUnknownError)
"""After these the flow is retried, and the take-over aborts the open transaction."""


class TranslateTransfer:
    """Copies slices from one source cluster to one destination cluster.

    Args:
        works: One per flow.
        source_client: The source cluster, for the log ends of many partitions at once.
        source: The reader of each source partition; they may share one buffer.
        client: The destination cluster.
        sessions: The transactional producers of the destination.
        progress: The progress topic of the destination.
        rebatcher: Cuts fetched batches into pieces that a broker accepts.
        gate: Checks keys and values against their column types.
        sync_writer: Writes offset syncs to the source.
        window: How long to follow new records.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each part once
        self,
        works: Sequence[Work],
        *,
        source_client: ClusterClient,
        source: dict[TopicPartition, KafkaSource],
        client: ClusterClient,
        sessions: ProducerSessions,
        progress: ProgressReader,
        rebatcher: Rebatcher,
        gate: Gate,
        sync_writer: OffsetSyncWriter,
        window: FollowWindow,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._source_client, self._client = source_client, client
        self._sessions, self._progress = sessions, progress
        self._rebatcher, self._gate, self._sync_writer = rebatcher, gate, sync_writer
        self._window, self._clock = window, clock
        now_ms = clock.monotonic_ms()
        self._following = Following(source_client, window, clock, self._transact)
        self._copies = [begun(work, source[work.slice.flow.source], now_ms) for work in works]

    def run(self) -> list[SliceResult]:
        """Copy all slices; a LogmirrorError becomes part of its slice's result."""
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        while copies := [copy for copy in self._copies if not copy.is_done]:
            if len(copies) < len(self._copies):
                self._window.end()  # the driver must handle the finished one
            moved = False
            for copy in copies:
                if copy.next_offset < copy.limit:
                    moved |= attempt(copy, self._following.step)
            if moved:
                if self._clock.monotonic_ms() >= until_ms and not self._window.left_ms:
                    break
            elif not self._following.wait(copies):
                break
        for copy in self._copies:
            attempt(copy, self._leave)
        self._sync_writer.finish()
        now_ms = self._clock.monotonic_ms()
        return [copy.result(now_ms) for copy in self._copies]

    # -- one transaction -------------------------------------------------------------------------

    def _transact(self, copy: TranslateSlice, fetched: Fetched, limit: int) -> None:
        """Copy one transaction, beginning with what was fetched."""
        if copy.session is None:
            self._take_over(copy)
        copy.began_ms = self._clock.monotonic_ms()
        try:
            while copy.next_offset < limit:
                self._send_fetched(copy, fetched, limit)
                if copy.failed is not None or self._is_full(copy):
                    break
                polled = copy.source.poll(copy.next_offset, max_wait_ms=0, limit=copy.limit)
                copy.known_end = max(copy.known_end, polled.last_stable_offset)
                if polled.fetched is None:
                    break
                fetched, limit = polled.fetched, min(copy.limit, polled.last_stable_offset)
        except LogmirrorError as error:
            copy.error = error  # of the source: the records before it are valid
        if copy.failed is None and copy.next_offset > copy.verified:
            self._commit(copy)
        if copy.failed is not None:
            raise copy.failed

    def _is_full(self, copy: TranslateSlice) -> bool:
        age_ms = self._clock.monotonic_ms() - copy.began_ms
        return copy.sent_bytes >= TRANSACTION_BYTES or age_ms >= TRANSACTION_MS or copy.is_done

    def _take_over(self, copy: TranslateSlice) -> None:
        """Fence the previous writer of the flow, even this process, then read the position."""
        work, flow = copy.work, copy.work.slice.flow
        # Also before `init`, so that a run that is no longer the owner does not fence the new one.
        for step in ("before", "after"):
            owner = self._progress.refresh().owner(copy.key)
            if owner != work.writer_id:
                self._sessions.discard(copy.key.transactional_id)
                raise taken_over(flow, owner)
            if step == "before":
                try:
                    copy.session = self._sessions.open(copy.key.transactional_id)
                except FencedError as error:
                    raise reclassified(error) from error
        copy.sequence = copy.progress_sequence = 0
        copy.target_id = self._client.topic(copy.where.topic).topic_id
        found = current(self._progress, work.kafka, flow, copy.target_id)
        if work.kafka.takeover is not None and self._progress.progress(copy.key) is None:
            raise PositionMovedError("the progress is gone with which the take-over had ended")
        if found is not None:
            position = found.next_offset
        else:  # no progress, or of a deleted topic: begin at the source's log start offset
            position = self._source_client.list_offsets([flow.source], EARLIEST)[flow.source]
        if position != copy.verified:
            raise PositionMovedError(
                "the copy's progress is not where the slice begins",
                expected=copy.verified,
                found=position,
            )
        failpoints.reach("translate.taken")

    def _send_fetched(self, copy: TranslateSlice, fetched: Fetched, limit: int) -> None:
        """Send the pieces of one response up to `limit`; its gaps are skipped."""
        limit, refusal = self._gate.limit(copy.work, fetched, copy.next_offset, limit)
        batches, start = fetched.batches, fetched.start
        stop = int(np.searchsorted(batches.base_offsets, limit))
        compacted, first = copy.work.slice.compacted, copy.next_offset
        if stop > start:
            gaps = batch_gaps(batches, start, stop, first, compacted=compacted)
            copy.source_bytes += int(batches.sizes[start:stop].sum())
            if not compacted:
                check_dense(batches, start, stop)
            for piece in self._rebatcher.pieces(
                fetched.buffer, batches, start, stop, first=first, end=limit
            ):
                if not self._send(copy, piece):
                    return
            copy.next_offset = min(int(batches.last_offsets[stop - 1]) + 1, limit)
            for gap in gaps:
                copy.gaps.add(gap.first, min(gap.last, limit - 1), gap.cause)
        if stop < batches.count and copy.next_offset < limit:
            if not compacted:
                raise unexplained_gap(copy.next_offset, int(batches.base_offsets[stop]))
            copy.next_offset = limit
        copy.note_epoch(batches, copy.next_offset)
        if refusal is not None and copy.failed is None:
            raise refusal

    def _send(self, copy: TranslateSlice, piece: Piece) -> bool:
        """Send one piece as part of the transaction; False if the transaction failed."""
        if not copy.in_flight and not copy.written:
            self._join(copy, copy.where)
        while len(copy.in_flight) >= IN_FLIGHT_MAX:
            self._collect(copy, block=True)
        if copy.failed is None:
            self._transmit(copy, copy.where, piece.data, copy.sequence)
            copy.in_flight.append(piece)
            copy.sequence = (copy.sequence + piece.count) & SEQUENCE_MASK
            copy.sent_bytes += len(piece.data)
            copy.next_offset = piece.base_offset + piece.count
            failpoints.reach("translate.sent")
            self._collect(copy, block=False)
        return copy.failed is None

    def _commit(self, copy: TranslateSlice) -> None:
        """Add the progress, wait for all responses, and commit the transaction."""
        work = copy.work
        progress = Progress(
            next_offset=copy.next_offset,
            source_topic_id=work.slice.topic_id,
            target_topic_id=copy.target_id,
            writer=work.writer_id,
            leader_epoch=copy.epoch_before(copy.next_offset),
        )
        self._join(copy, PROGRESS)
        batch = memoryview(encode_progress(copy.key, progress, self._clock.now_ms()))
        if copy.failed is None:
            self._transmit(copy, PROGRESS, batch, copy.progress_sequence)
            copy.progress_sequence += 1
        while copy.open_session.pipeline.in_flight():
            self._collect(copy, block=True)
        if copy.failed is not None:
            return
        failpoints.reach("translate.noted")
        try:
            copy.open_session.producer.end(commit=True)
        except LogmirrorError as error:
            self._fail(copy, error)
            return
        failpoints.reach("translate.committed")
        pairs = thinned(copy.rule.due(copy.commit()))
        if copy.open_session.producer.has_stray:
            # It must not end the next transaction, which therefore gets a newer epoch.
            copy.session = None
        self._sync_writer.write(work.slice.flow.source, pairs, copy.target_id)

    # -- the destination -------------------------------------------------------------------------

    def _join(self, copy: TranslateSlice, where: TopicPartition) -> None:
        """Add a partition to the transaction, and the progress topic with the first one."""
        try:
            copy.open_session.producer.add_partitions(dict.fromkeys((where, PROGRESS)))
        except LogmirrorError as error:
            self._fail(copy, error)
        else:
            failpoints.reach("translate.joined")

    def _transmit(
        self, copy: TranslateSlice, where: TopicPartition, batch: memoryview, sequence: int
    ) -> None:
        session = copy.open_session
        producer = session.producer.identity._asdict()
        stamp(batch, **producer, sequence=sequence, transactional=True)
        session.pipeline.send([(where, batch)])

    def _collect(self, copy: TranslateSlice, *, block: bool) -> None:
        for response in copy.open_session.pipeline.collect(block=block):
            piece = copy.in_flight.popleft() if response.partition == copy.where else None
            if response.error is not None:
                self._fail(copy, response.error)
            elif piece is not None:
                copy.written.append(Run(piece.base_offset, response.base_offset, piece.count))

    def _fail(self, copy: TranslateSlice, error: LogmirrorError) -> None:
        """Mark the transaction as failed; the first error counts."""
        if copy.failed is None:
            copy.failed = reclassified(error)

    # -- the end ---------------------------------------------------------------------------------

    def _leave(self, copy: TranslateSlice) -> bool:
        """Write the newest offset sync; abort a transaction that no retry would abort."""
        self._sync_writer.write(copy.work.slice.flow.source, copy.rule.flush(), copy.target_id)
        if copy.failed is None or copy.session is None:
            return True
        self._sessions.discard(copy.key.transactional_id)
        if not isinstance(copy.failed, _RETRIED):
            # By `init`, not EndTxn: a late request must find a newer epoch.
            with contextlib.suppress(LogmirrorError):
                copy.session.producer.init()
        return True
