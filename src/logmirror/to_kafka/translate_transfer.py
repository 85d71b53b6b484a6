"""Executor: slices of flows into one cluster at new offsets, by transactions that say how far.

    wait for records -> take the flow over -> [fetch -> pieces -> send] -> progress -> commit

Invariants:
1. The position is read after `init` has fenced whoever copied before and decided what he left open,
   and must be where the slice begins. So nothing that was committed is copied again (I2, I4).
2. Records and the progress behind them are in one transaction: both are seen, or neither is.
3. What is behind `verified` is committed, and the coordinator has said so (I5).
4. A batch is never sent twice. When an answer is lost, the transaction is not committed by us, and
   whoever takes the flow over next reads what became of it (I7).
5. A source that fails in the middle of a transaction does not undo it: what came before is
   committed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import (
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.mirror.follow import LISTEN_MS, SLICE_MS
from logmirror.mirror.ports import PositionMovedError, SliceResult
from logmirror.source.gaps import batch_gaps, check_dense, unexplained_gap
from logmirror.to_kafka.idempotence import SEQUENCE_MASK
from logmirror.to_kafka.offset_syncs import OffsetSyncWriter, Run, thinned
from logmirror.to_kafka.translate_progress import (
    PROGRESS,
    Progress,
    current,
    encode_progress,
    looked_into,
    taken_over,
)
from logmirror.to_kafka.translate_slice import begun
from logmirror.wire.rebatch import stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import Work
    from logmirror.model import TopicPartition
    from logmirror.source.column_types import Gate
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.to_kafka.translate_progress import Links, ProgressReader
    from logmirror.to_kafka.translate_slice import TranslatedCopy
    from logmirror.wire.rebatch import Piece, Rebatcher

TRANSACTION_BYTES: Final = 16 << 20
"""A transaction ends after so many bytes: an end takes some milliseconds, a MiB about one."""
TRANSACTION_MS: Final = 500
"""And after this time: nobody who reads committed records sees any of them before."""

IN_FLIGHT_MAX: Final = 64
_WATCH_MS: Final = 10

_TAKEN_OVER_SOON: Final = (PositionMovedError, UnavailableError, OutcomeUnknownError)
"""After these the flow goes on, and whoever takes it over aborts what was left open."""


class TranslateTransfer:
    """Carries out slices from one source cluster into one destination cluster.

    Args:
        works: Each of another flow.
        source_client: Of the source, for the ends of many partitions at once.
        source: Opens the batches of one flow's source; they may share one buffer.
        client: Of the destination.
        links: Into the destination.
        progress: Of the destination.
        rebatcher: Makes pieces that a broker accepts.
        gate: Says up to where keys and values are of their types.
        teller: Of offset syncs.
        lease: How long to go on with what arrives.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each part once
        self,
        works: Sequence[Work],
        *,
        source_client: ClusterClient,
        source: dict[TopicPartition, KafkaSource],
        client: ClusterClient,
        links: Links,
        progress: ProgressReader,
        rebatcher: Rebatcher,
        gate: Gate,
        sync_writer: OffsetSyncWriter,
        window: FollowWindow,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._source_client, self._client = source_client, client
        self._links, self._progress = links, progress
        self._rebatcher, self._gate, self._sync_writer = rebatcher, gate, sync_writer
        self._window, self._clock = window, clock
        now_ms = clock.monotonic_ms()
        self._copies = [begun(work, source[work.slice.flow.source], now_ms) for work in works]

    def run(self) -> list[SliceResult]:
        """Carry all slices out as far as they go; a LogmirrorError becomes part of a result."""
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        while copies := [copy for copy in self._copies if not copy.is_done]:
            if len(copies) < len(self._copies):
                self._window.end()  # one that is done waits for the driver to look at it
            moved = False
            for copy in copies:
                if copy.next_offset < copy.limit:
                    moved |= self._guard(copy, self._step)
            if moved:
                if self._clock.monotonic_ms() >= until_ms and not self._window.left_ms:
                    break
            elif not self._wait_for_more(copies):
                break
        for copy in self._copies:
            self._guard(copy, self._leave)
        self._sync_writer.finish()
        now_ms = self._clock.monotonic_ms()
        return [copy.result(now_ms) for copy in self._copies]

    def _guard(self, copy: TranslatedCopy, action: Callable[[TranslatedCopy], bool]) -> bool:
        """Do something for one flow; what goes wrong stops that flow alone."""
        try:
            return action(copy)
        except LogmirrorError as error:
            copy.error = copy.error or error
            return False

    # -- one transaction -------------------------------------------------------------------------

    def _step(self, copy: TranslatedCopy) -> bool:
        """Copy one transaction's worth; whether anything was there."""
        polled = copy.source.poll(copy.next_offset, max_wait_ms=0, limit=copy.limit)
        copy.known_end = max(copy.known_end, polled.last_stable_offset)
        if polled.fetched is None:
            copy.note_stall(copy.next_offset, self._clock.monotonic_ms())
            return False
        copy.stalled_ms = None
        self._transact(copy, polled.fetched, min(copy.limit, polled.last_stable_offset))
        return True

    def _transact(self, copy: TranslatedCopy, fetched: Fetched, limit: int) -> None:
        if copy.link is None:
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
            copy.error = error  # of the source: what came before it is good
        if copy.failed is None and copy.next_offset > copy.verified:
            self._commit(copy)
        if copy.failed is not None:
            raise copy.failed

    def _is_full(self, copy: TranslatedCopy) -> bool:
        age_ms = self._clock.monotonic_ms() - copy.began_ms
        return copy.sent_bytes >= TRANSACTION_BYTES or age_ms >= TRANSACTION_MS or copy.is_done

    def _take_over(self, copy: TranslatedCopy) -> None:
        """Fence whoever copied before, be it ourselves, then see where the flow stands."""
        work, flow = copy.work, copy.work.slice.flow
        # Looked at before, too, so that a run that is no longer the owner fences nobody.
        for step in ("before", "after"):
            owner = self._progress.refresh().owner(copy.key)
            if owner != work.writer_id:
                self._links.drop(copy.key.transactional_id)
                raise taken_over(flow, owner)
            if step == "before":
                try:
                    copy.link = self._links.take(copy.key.transactional_id)
                except FencedError as error:
                    raise looked_into(error) from error
        copy.sequence = copy.progress_sequence = 0
        copy.target_id = self._client.topic(copy.where.topic).topic_id
        found = current(self._progress, work.kafka, flow, copy.target_id)
        if found is not None:
            position = found.next_offset
        else:  # nothing is there, or no longer: then it begins where the source does
            position = self._source_client.list_offsets([flow.source], EARLIEST)[flow.source]
        if position != copy.verified:
            raise PositionMovedError(
                "the copy does not stand where the slice begins, or has come to",
                expected=copy.verified,
                found=position,
            )
        failpoints.reach("translate.taken")

    def _send_fetched(self, copy: TranslatedCopy, fetched: Fetched, limit: int) -> None:
        """Send the pieces of one response up to `limit`; its holes are passed over."""
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
        if refusal is not None and copy.failed is None:
            raise refusal

    def _send(self, copy: TranslatedCopy, piece: Piece) -> bool:
        """Send one piece as part of the transaction; False: something failed."""
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

    def _commit(self, copy: TranslatedCopy) -> None:
        """Add the progress, wait for every answer, and end the transaction."""
        work = copy.work
        progress = Progress(
            next_offset=copy.next_offset,
            source_topic_id=work.slice.topic_id,
            target_topic_id=copy.target_id,
            writer=work.writer_id,
        )
        self._join(copy, PROGRESS)
        batch = memoryview(encode_progress(copy.key, progress, self._clock.now_ms()))
        if copy.failed is None:
            self._transmit(copy, PROGRESS, batch, copy.progress_sequence)
            copy.progress_sequence += 1
        while copy.open_link.pipeline.in_flight():
            self._collect(copy, block=True)
        if copy.failed is not None:
            return
        failpoints.reach("translate.noted")
        try:
            copy.open_link.producer.end(commit=True)
        except LogmirrorError as error:
            self._fail(copy, error)
            return
        failpoints.reach("translate.committed")
        pairs = thinned(copy.rule.due(copy.commit()))
        if copy.open_link.producer.has_stray:
            copy.link = None  # it must not end the next transaction: that gets a newer epoch
        self._sync_writer.tell(work.slice.flow.source, pairs)

    # -- the destination -------------------------------------------------------------------------

    def _join(self, copy: TranslatedCopy, where: TopicPartition) -> None:
        """Let a partition take part in the transaction, and progress with the first of them."""
        try:
            copy.open_link.producer.add_partitions(dict.fromkeys((where, PROGRESS)))
        except LogmirrorError as error:
            self._fail(copy, error)
        else:
            failpoints.reach("translate.joined")

    def _transmit(
        self, copy: TranslatedCopy, where: TopicPartition, batch: memoryview, sequence: int
    ) -> None:
        link = copy.open_link
        producer = link.producer.identity._asdict()
        stamp(batch, **producer, sequence=sequence, transactional=True)
        link.pipeline.send([(where, batch)])

    def _collect(self, copy: TranslatedCopy, *, block: bool) -> None:
        for response in copy.open_link.pipeline.collect(block=block):
            piece = copy.in_flight.popleft() if response.partition == copy.where else None
            if response.error is not None:
                self._fail(copy, response.error)
            elif piece is not None:
                copy.written.append(Run(piece.base_offset, response.base_offset, piece.count))

    def _fail(self, copy: TranslatedCopy, error: LogmirrorError) -> None:
        """The transaction cannot be committed; the first reason counts."""
        if copy.failed is None:
            copy.failed = looked_into(error)

    # -- waiting ---------------------------------------------------------------------------------

    def _wait_for_more(self, copies: Sequence[TranslatedCopy]) -> bool:
        """Wait until something has come at the source, or the lease is over."""
        behind = [copy for copy in copies if copy.next_offset < copy.limit and copy.error is None]
        if behind:  # the source called it stable and does not deliver it yet
            self._clock.sleep_ms(_WATCH_MS)
            return True
        watched = [copy for copy in copies if copy.work.window_ms and copy.error is None]
        while watched and self._window.left_ms:
            if len(watched) == 1:
                return self._guard(watched[0], self._follow)
            if self._watch(watched):
                return True
        return False

    def _follow(self, copy: TranslatedCopy) -> bool:
        """Let the source itself wait for what comes to the one partition that we watch."""
        wait_ms = min(self._window.left_ms, LISTEN_MS)
        polled = copy.source.poll(copy.next_offset, max_wait_ms=wait_ms)
        copy.known_end = max(copy.known_end, polled.last_stable_offset)
        if polled.fetched is not None and copy.next_offset < polled.last_stable_offset:
            self._transact(copy, polled.fetched, polled.last_stable_offset)
        return True

    def _watch(self, watched: Sequence[TranslatedCopy]) -> bool:
        begun_ms = self._clock.monotonic_ms()
        try:
            asked = {copy.work.slice.flow.source for copy in watched}
            ends = self._source_client.list_offsets(asked, LATEST)
        except LogmirrorError as error:
            for copy in watched:
                copy.error = type(error)(error.message, hint=error.hint, **error.facts)
            return True
        for copy in watched:
            copy.known_end = max(copy.known_end, ends[copy.work.slice.flow.source])
        if any(copy.next_offset < copy.known_end for copy in watched):
            return True
        took_ms = self._clock.monotonic_ms() - begun_ms
        self._clock.sleep_ms(max(_WATCH_MS, 10 * took_ms))
        return False

    # -- the end ---------------------------------------------------------------------------------

    def _leave(self, copy: TranslatedCopy) -> bool:
        """Tell the newest pair; leave no transaction open that nobody will end."""
        self._sync_writer.tell(copy.work.slice.flow.source, copy.rule.rest())
        if copy.failed is None or copy.link is None:
            return True
        self._links.drop(copy.key.transactional_id)
        if not isinstance(copy.failed, _TAKEN_OVER_SOON):
            # Not by its end: what may still be on its way must find a newer epoch.
            with contextlib.suppress(LogmirrorError):
                copy.link.producer.init()
        return True
