"""Executor: copies slices into one cluster at the source's offsets.

    read the log ends -> [check the tail | fetch -> pieces and gaps -> send -> collect]

The slices of one source and destination run together, in turns, so that they share requests. Every
slice begins by reading the destination's log end (I1), and ends with nothing in flight. An error
ends the slice of its flow with what was acknowledged until then; the driver reads the position
again (I7). A gap or a head that takes longer than a turn is filled in several, and in several
slices: each continues at the log end that the one before has reached.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST
from logmirror.errors import LogmirrorError, PositionError, PositionMovedError, UnavailableError
from logmirror.mirror.follow import SLICE_MS
from logmirror.model import Gap, GapCause, TopicPartition
from logmirror.source.gaps import batch_gaps, check_dense, unexplained_gap
from logmirror.to_kafka.following import Following, attempt
from logmirror.to_kafka.idempotence import marker_producer_id, producer_id, target
from logmirror.to_kafka.partition_writer import PartitionWriter
from logmirror.to_kafka.preserve_slice import PreserveSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import Hold, SliceResult, Work
    from logmirror.source.column_types import Gate
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.to_kafka.gap_writer import Filled
    from logmirror.wire.rebatch import Piece, Rebatcher

_COPIED_BYTES_MAX: Final = 64 << 10
"""Batches up to this size are copied, and wait for those of other partitions to share a request."""

_REQUEST_BYTES: Final = 1 << 20
"""Waiting batches are sent when they reach this size together."""


TURN_MS: Final = 250
"""How long the gaps or the head of one partition are filled at a time, at most. Then the other
partitions of the slot have their turn, or the slice ends."""


class GapWriter(Protocol):
    """Fills offset gaps at the destination."""

    def fill(  # noqa: PLR0913  # the gap, and the producer that writes behind it
        self,
        partition: TopicPartition,
        first: int,
        end: int,
        *,
        verified_ms: int,
        producer: int,
        new_epoch: int | None = None,
        until_ms: int | None = None,
        hold: Hold | None = None,
    ) -> Filled:
        """Fill the offsets first..end-1; at the monotonic time `until_ms` begin no further step.

        At the monotonic time `verified_ms` the log ended at `first`. From now on the leader refuses
        batches of `producer` with an older epoch than `new_epoch`, if the result says so.
        """
        ...

    def release(self) -> None:
        """Release the leases on gaps; nothing is in flight."""
        ...


class TailCheck(Protocol):
    """Compares the last batch of a replica with the source."""

    def check(self, item: PreserveSlice, *, source_start: int, until_ms: int) -> int:
        """Compare the replica's last batch; return its log end, which padding may have moved.

        A log end below `source_start`: the time was over, and nothing was compared.
        """
        ...


class PreserveTransfer:
    """Copies slices from one source cluster to one destination cluster.

    Args:
        works: One per flow.
        source_client: The source cluster, for the log ends of many partitions at once.
        source: The reader of each source partition; they may share one buffer.
        client: The destination cluster.
        pipeline: To the destination's leaders.
        rebatcher: Cuts fetched batches into pieces that a broker accepts.
        gate: Checks keys and values against their column types.
        gap_writer: Fills offset gaps.
        tail_check: Compares the destination with the source.
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
        pipeline: ProducePipeline,
        rebatcher: Rebatcher,
        gate: Gate,
        gap_writer: GapWriter,
        tail_check: TailCheck,
        window: FollowWindow,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._source_client, self._client = source_client, client
        self._pipeline, self._rebatcher, self._gate = pipeline, rebatcher, gate
        self._gap_writer, self._tail_check = gap_writer, tail_check
        self._window, self._clock = window, clock
        now_ms = clock.monotonic_ms()
        self._turn_ms = min(TURN_MS, SLICE_MS // len(works))
        self._source_starts: dict[TopicPartition, int] = {}
        self._copies = [
            PreserveSlice(
                work=work,
                source=source[work.slice.flow.source],
                writer=_writer(work),
                started_ms=now_ms,
                known_end=work.slice.end,
                tail_checked=work.tail_checked,
                returning=_returning(work),
            )
            for work in works
        ]
        self._by_partition = {copy.writer.partition: copy for copy in self._copies}
        self._following = Following(source_client, window, clock, self._send_fetched)
        self._outbox: dict[TopicPartition, memoryview] = {}
        self._outbox_bytes = 0

    def run(self) -> list[SliceResult]:
        """Copy all slices; a LogmirrorError becomes part of its slice's result."""
        self._begin()
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        while copies := [copy for copy in self._copies if not copy.is_done]:
            if len(copies) < len(self._copies):
                self._window.end()  # the driver must handle the finished one
            moved = False
            for copy in copies:
                if not copy.tail_checked:
                    moved |= attempt(copy, self._check_tail)
                elif copy.writer.next_offset < copy.limit:
                    moved |= attempt(copy, self._step)
            if moved:
                if self._clock.monotonic_ms() >= until_ms and not self._window.left_ms:
                    break
                continue
            drained = [attempt(copy, self._drain) for copy in copies]
            if all(drained) and not self._following.wait(copies):
                break
        for copy in self._copies:
            attempt(copy, self._drain)
        self._gap_writer.release()
        now_ms = self._clock.monotonic_ms()
        return [copy.result(now_ms) for copy in self._copies]

    # -- positions -------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._read_positions(self._copies)
            unchecked = [copy for copy in self._copies if not copy.tail_checked]
            sources = {copy.work.slice.flow.source for copy in unchecked}
            if sources:
                self._source_starts = self._source_client.list_offsets(sources, EARLIEST)
        except LogmirrorError as error:
            for copy in self._copies:
                copy.writer.fail(error.copy())
            return
        for copy in self._copies:
            attempt(copy, self._check_position)

    def _read_positions(self, copies: Sequence[PreserveSlice]) -> None:
        """Read the producer states, then the log ends.

        The order matters: if a dead writer's batch is appended in between, the log end includes it,
        and the broker refuses the sequence that we derive from the state.
        """
        at_ms = self._clock.monotonic_ms()
        producers = {copy.writer.partition: copy.writer.producer for copy in copies}
        states = self._client.producer_states(producers)
        ends = self._client.log_ends(producers)
        now_ms = self._clock.now_ms()
        for copy in copies:
            where = copy.writer.partition
            copy.writer.record_log_end(ends[where], states[where], at_ms=at_ms, now_ms=now_ms)

    def _check_position(self, copy: PreserveSlice) -> bool:
        if copy.writer.verified != copy.work.slice.first:
            raise PositionMovedError(
                "the destination's log does not end where the slice begins",
                expected=copy.work.slice.first,
                found=copy.writer.verified,
            )
        copy.writer.resume(copy.work.in_flight_max)
        return True

    def _check_tail(self, copy: PreserveSlice) -> bool:
        before, start = copy.writer.verified, self._source_starts[copy.work.slice.flow.source]
        end = self._tail_check.check(copy, source_start=start, until_ms=self._turn_end_ms())
        copy.tail_checked = end >= start
        if end != before:
            copy.gaps.add(before, end - 1, GapCause.COMPACTED)
            self._read_positions([copy])
        return True

    def _turn_end_ms(self) -> int:
        return self._clock.monotonic_ms() + self._turn_ms

    # -- copying ---------------------------------------------------------------------------------

    def _step(self, copy: PreserveSlice) -> bool:
        """Fetch once; what the last fetch brought is sent first, as this one may not respond."""
        if copy.writer.partition in self._outbox:
            self._flush()
        return self._following.step(copy)

    def _send_fetched(self, copy: PreserveSlice, fetched: Fetched, limit: int) -> None:
        """Send one response up to `limit`, and note the leader epoch that it ends with."""
        try:
            self._send_batches(copy, fetched, limit)
        finally:
            copy.note_epoch(fetched.batches, copy.writer.next_offset)

    def _send_batches(self, copy: PreserveSlice, fetched: Fetched, limit: int) -> None:
        """Send the pieces of one response up to `limit`, and fill its gaps."""
        limit, refusal = self._gate.limit(copy.work, fetched, copy.writer.next_offset, limit)
        batches, start = fetched.batches, fetched.start
        stop = int(np.searchsorted(batches.base_offsets, limit))
        self._check_origin(copy, batches.producer_ids[start:stop])
        compacted = copy.work.slice.compacted
        if stop > start:
            known = batch_gaps(batches, start, stop, copy.writer.next_offset, compacted=compacted)
            copy.source_bytes += int(batches.sizes[start:stop].sum())
            if not compacted:
                check_dense(batches, start, stop)
            end = min(int(batches.last_offsets[stop - 1]) + 1, limit)
            for piece in self._rebatcher.pieces(
                fetched.buffer, batches, start, stop, first=copy.writer.next_offset, end=limit
            ):
                if not self._fill(copy, piece.base_offset, known):
                    return
                self._send(copy, piece)
            self._collect(block=False)  # once for all pieces: it costs as much as a small request
            if not self._fill(copy, end, known):
                return
        if stop < batches.count and copy.writer.next_offset < limit:
            if not compacted:
                raise unexplained_gap(copy.writer.next_offset, int(batches.base_offsets[stop]))
            if not self._fill(copy, limit, []):
                return
        if refusal is not None:
            self._drain(copy)  # the records before it are valid
            raise refusal

    def _check_origin(self, copy: PreserveSlice, producers: NDArray[np.int64]) -> None:
        """Refuse batches that a mirror has copied from the destination, if it still has them.

        They have the destination's offsets, so its log ends behind them. If it does not, it has
        lost them, and they are copied back.

        Raises:
            PositionError: The destination has them. Nothing of this response was written.
        """
        if not any(bool((producers == one).any()) for one in copy.returning):
            return
        self._drain(copy)
        where, expected = copy.writer.partition, copy.writer.next_offset
        found = self._client.log_ends([where])[where].end_offset
        if found > expected:
            raise PositionError(
                "the source's records came from the destination: they would return to it",
                hint="a mirror copies the destination's topic to the source; stop one of the two. "
                "Nothing was written (docs/fail-over.md#fail-back).",
                reason="RecordsReturn",
                expected=expected,
                found=found,
            )

    def _fill(self, copy: PreserveSlice, end: int, known: list[Gap]) -> bool:
        """Fill the offsets up to `end`, which have no record at the source.

        Returns:
            False if the turn was over before; fetch again from the offset that was reached.
        """
        first = copy.writer.next_offset
        if first >= end:
            return True
        if copy.work.kafka.gaps == "fail":
            cause = next((h.cause for h in known if h.first <= first <= h.last), None)
            raise PositionError(
                "the source has an offset without a record, and `holes: fail` allows none",
                hint="set `holes: markers` to fill such offsets with control records, "
                "or `offsets: translate` to copy the records without them",
                reason="HoleAtSource",
                offset=first,
                cause=(cause or GapCause.COMPACTED).value,
            )
        self._drain(copy)
        failpoints.reach("hole.begin")
        at_ms = self._clock.monotonic_ms()
        filled = self._gap_writer.fill(
            copy.writer.partition,
            first,
            end,
            verified_ms=copy.writer.verified_ms,
            producer=copy.writer.producer,
            new_epoch=copy.new_epoch,
            until_ms=self._turn_end_ms(),
            hold=copy.work.hold if first == copy.work.slice.first else None,
        )
        copy.fenced |= filled.fenced
        copy.writer.passed_gap(filled.end, at_ms, fenced=filled.fenced)
        failpoints.reach("hole.filled")
        _count_gaps(copy, known, first, filled.end)
        if filled.hold is not None:
            copy.hold_up(filled.hold)
        return filled.end == end

    def _send(self, copy: PreserveSlice, piece: Piece) -> None:
        writer = copy.writer
        if writer.partition in self._outbox:
            self._flush()
        while not writer.may_send():
            self._collect(block=True)
        if writer.is_stale(self._clock.monotonic_ms()):
            self._collect(block=False)  # a response also confirms the log end
        self._raise_failure(copy)
        if writer.is_stale(self._clock.monotonic_ms()):
            self._reread_position(copy)
        writer.prepare(piece, at_ms=self._clock.monotonic_ms(), now_ms=self._clock.now_ms())
        if len(piece.data) <= _COPIED_BYTES_MAX:
            self._outbox[writer.partition] = memoryview(bytearray(piece.data))
            self._outbox_bytes += len(piece.data)
            if self._outbox_bytes >= _REQUEST_BYTES:
                self._flush()
        else:
            self._transmit({writer.partition: piece.data})

    def _reread_position(self, copy: PreserveSlice) -> None:
        """Read the log end again: it was read too long ago, after a pause or with a slow source."""
        self._drain(copy)
        expected = copy.writer.next_offset
        self._read_positions([copy])
        if copy.writer.next_offset != expected:
            raise PositionMovedError(
                "the destination's log moved while nothing was sent",
                expected=expected,
                found=copy.writer.next_offset,
            )

    # -- requests --------------------------------------------------------------------------------

    def _flush(self) -> None:
        batches, self._outbox, self._outbox_bytes = self._outbox, {}, 0
        if batches:
            self._transmit(batches)

    def _transmit(self, batches: dict[TopicPartition, memoryview]) -> None:
        failpoints.reach("produce.prepared")
        until_ms = min(self._by_partition[where].writer.send_until_ms for where in batches)
        try:
            self._pipeline.send(list(batches.items()), not_after_ms=until_ms)
        except UnavailableError as error:
            for where in batches:
                self._by_partition[where].writer.not_sent(
                    PositionMovedError(error.message, hint=error.hint, **error.facts)
                )
            return
        failpoints.reach("produce.sent")

    def _collect(self, *, block: bool) -> None:
        if block:
            self._flush()
        now_ms = self._clock.now_ms()
        for response in self._pipeline.collect(block=block):
            failpoints.reach("produce.answered")
            self._by_partition[response.partition].writer.record_response(response, now_ms)

    def _drain(self, copy: PreserveSlice) -> bool:
        """Wait until nothing of a flow is in flight.

        Raises:
            LogmirrorError: A batch failed.
        """
        while copy.writer.in_flight:
            self._collect(block=True)
        self._raise_failure(copy)
        return True

    @staticmethod
    def _raise_failure(copy: PreserveSlice) -> None:
        if copy.writer.error is not None:
            raise copy.writer.error


def _writer(work: Work) -> PartitionWriter:
    where = target(work.kafka, work.slice.flow)
    producer = producer_id(where.topic, where.partition, work.slice.topic_id)
    return PartitionWriter(where, producer, work.kafka.producer_state_age_ms)


def _returning(work: Work) -> tuple[int, ...]:
    """Return the producers by which a mirror writes the destination's records to the source."""
    if work.kafka.topic_id is None:
        return ()
    source = work.slice.flow.source
    data = producer_id(source.topic, source.partition, work.kafka.topic_id)
    return data, marker_producer_id(data)


def _count_gaps(copy: PreserveSlice, known: list[Gap], first: int, end: int) -> None:
    """Count the gaps in first..end-1: what is not among `known` was compacted away."""
    position = first
    for gap in known[bisect.bisect_left(known, first, key=lambda gap: gap.last) :]:
        if gap.first >= end:
            break
        copy.gaps.add(position, gap.first - 1, GapCause.COMPACTED)
        copy.gaps.add(max(gap.first, first), min(gap.last, end - 1), gap.cause)
        position = gap.last + 1
    copy.gaps.add(position, end - 1, GapCause.COMPACTED)
