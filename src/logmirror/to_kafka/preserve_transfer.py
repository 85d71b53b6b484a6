"""Executor: slices of flows into one cluster, carried out together, so that they share requests.

    look at the log ends -> prove what is there -> [fetch -> pieces and holes -> send -> collect]

Every slice begins with a look (I1) and ends with nothing on its way. Whatever goes wrong with one
flow ends its slice with what was acknowledged until then; the driver looks anew (I7).
"""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import LogmirrorError, PositionError, UnavailableError
from logmirror.mirror.follow import LISTEN_MS, SLICE_MS
from logmirror.mirror.ports import PositionMovedError
from logmirror.model import Gap, GapCause, TopicPartition
from logmirror.source.gaps import batch_gaps, check_dense, unexplained_gap
from logmirror.to_kafka.idempotence import producer_id, target
from logmirror.to_kafka.partition_writer import PartitionWriter
from logmirror.to_kafka.preserve_slice import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import SliceResult, Work
    from logmirror.source.column_types import Gate
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.wire.rebatch import Piece, Rebatcher

_COPIED_BYTES_MAX: Final = 64 << 10
"""Batches up to this size wait in a copy for those of other partitions, to share a request."""

_REQUEST_BYTES: Final = 1 << 20
"""Batches that wait together are sent when they are this large."""

_WATCH_MS: Final = 10
"""Between two questions whether anything has come, where one process watches several partitions;
ten times as long as the answer took, where that is longer."""


class GapFiller(Protocol):
    """Makes offsets without a record at the destination."""

    def fill(  # noqa: PLR0913  # what the hole is, and who writes on behind it
        self,
        partition: TopicPartition,
        first: int,
        end: int,
        *,
        seen_ms: int,
        producer: int,
        new_epoch: int | None = None,
    ) -> bool:
        """Take the offsets first..end-1; returns when the log ends at `end`, and nowhere else.

        At the monotonic time `seen_ms` it ended at `first`. Returns whether the leader refuses all
        batches of `producer` with older epochs than `new_epoch` from now on.
        """
        ...

    def rest(self) -> None:
        """Let other processes fill holes; nothing is on its way."""
        ...


class TailCheck(Protocol):
    """Compares what the destination holds with the source."""

    def prove(self, item: Copy, *, source_start: int) -> int:
        """Compare the end of the copy; returns its log end, which a missing head may have moved."""
        ...


class KafkaTransfer:
    """Carries out slices from one source cluster into one destination cluster.

    Args:
        works: Each of another flow.
        source_client: Of the source, for the ends of many partitions at once.
        source: Opens the batches of one flow's source; they may share one buffer.
        client: Of the destination.
        pipeline: To the destination's leaders.
        rebatcher: Makes pieces that a broker accepts.
        gate: Says up to where keys and values are of their types.
        filler: Makes holes.
        prover: Compares the destination with the source.
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
        pipeline: ProducePipeline,
        rebatcher: Rebatcher,
        gate: Gate,
        filler: GapFiller,
        tail_check: TailCheck,
        window: FollowWindow,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._source_client, self._client = source_client, client
        self._pipeline, self._rebatcher, self._gate = pipeline, rebatcher, gate
        self._filler, self._tail_check = filler, tail_check
        self._window, self._clock = window, clock
        now_ms = clock.monotonic_ms()
        self._copies = [
            Copy(
                work=work,
                source=source[work.slice.flow.source],
                writer=_writer(work),
                started_ms=now_ms,
                known_end=work.slice.end,
            )
            for work in works
        ]
        self._by_partition = {copy.writer.partition: copy for copy in self._copies}
        self._outbox: dict[TopicPartition, memoryview] = {}
        self._outbox_bytes = 0

    def run(self) -> list[SliceResult]:
        """Carry all slices out as far as they go; a LogmirrorError becomes part of a result."""
        self._begin()
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        while copies := [copy for copy in self._copies if not copy.is_done]:
            if len(copies) < len(self._copies):
                self._window.end()  # one that is done waits for the driver to look at it
            moved = False
            for copy in copies:
                if copy.writer.next_offset < copy.limit:
                    moved |= self._guard(copy, self._step)
            if moved:
                if self._clock.monotonic_ms() >= until_ms and not self._window.left_ms:
                    break
                continue
            drained = [self._guard(copy, self._drain) for copy in copies]
            if all(drained) and not self._wait_for_more(copies):
                break
        for copy in self._copies:
            self._guard(copy, self._drain)
        self._filler.rest()
        now_ms = self._clock.monotonic_ms()
        return [copy.result(now_ms) for copy in self._copies]

    def _guard(self, copy: Copy, action: Callable[[Copy], bool]) -> bool:
        """Do something for one flow; what goes wrong stops that flow alone."""
        try:
            return action(copy)
        except LogmirrorError as error:
            copy.writer.fail(error)
            return False

    # -- looking ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._look(self._copies)
            unproven = [copy for copy in self._copies if not copy.work.proven]
            sources = {copy.work.slice.flow.source for copy in unproven}
            starts = self._source_client.list_offsets(sources, EARLIEST) if sources else {}
        except LogmirrorError as error:
            for copy in self._copies:
                copy.writer.fail(_copy_of(error))
            return
        for copy in self._copies:
            self._guard(copy, self._check_position)
        for copy in unproven:
            start = starts[copy.work.slice.flow.source]
            self._guard(copy, functools.partial(self._prove, source_start=start))

    def _look(self, copies: Sequence[Copy]) -> None:
        """Ask for the broker's memory, then for the log ends.

        In this order: what a dead writer appends in between is in the end, and the sequence that we
        take from the memory is refused.
        """
        at_ms = self._clock.monotonic_ms()
        producers = {copy.writer.partition: copy.writer.producer for copy in copies}
        states = self._client.producer_states(producers)
        ends = self._client.log_ends(producers)
        now_ms = self._clock.now_ms()
        for copy in copies:
            where = copy.writer.partition
            copy.writer.looked(ends[where], states[where], at_ms=at_ms, now_ms=now_ms)

    def _check_position(self, copy: Copy) -> bool:
        if copy.writer.verified != copy.work.slice.first:
            raise PositionMovedError(
                "the destination's log does not end where the slice begins",
                expected=copy.work.slice.first,
                found=copy.writer.verified,
            )
        return True

    def _prove(self, copy: Copy, *, source_start: int) -> bool:
        if copy.writer.error is None:
            before = copy.writer.verified
            end = self._tail_check.prove(copy, source_start=source_start)
            copy.proven = True
            if end != before:
                copy.gaps.add(before, end - 1, GapCause.COMPACTED)
                self._look([copy])
        return True

    # -- copying ---------------------------------------------------------------------------------

    def _step(self, copy: Copy) -> bool:
        """Fetch once and send what came; whether anything did."""
        writer = copy.writer
        polled = copy.source.poll(writer.next_offset, max_wait_ms=0, limit=copy.limit)
        copy.known_end = max(copy.known_end, polled.last_stable_offset)
        if polled.fetched is None:
            copy.note_stall(writer.next_offset, self._clock.monotonic_ms())
            return False
        copy.stalled_ms = None
        self._send_fetched(copy, polled.fetched, min(copy.limit, polled.last_stable_offset))
        return True

    def _send_fetched(self, copy: Copy, fetched: Fetched, limit: int) -> None:
        """Send the pieces of one response up to `limit`, and take its holes."""
        limit, refusal = self._gate.limit(copy.work, fetched, copy.writer.next_offset, limit)
        batches, start = fetched.batches, fetched.start
        stop = int(np.searchsorted(batches.base_offsets, limit))
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
                if piece.base_offset > copy.writer.next_offset:
                    self._fill(copy, piece.base_offset, known)
                self._send(copy, piece)
            self._collect(block=False)  # once for all: it takes as long as a small request
            if copy.writer.next_offset < end:
                self._fill(copy, end, known)
        if stop < batches.count and copy.writer.next_offset < limit:
            if not compacted:
                raise unexplained_gap(copy.writer.next_offset, int(batches.base_offsets[stop]))
            self._fill(copy, limit, [])
        if refusal is not None:
            self._drain(copy)  # what comes before it is good
            raise refusal

    def _fill(self, copy: Copy, end: int, known: list[Gap]) -> None:
        """Take the offsets up to `end`, which carry no record at the source."""
        first = copy.writer.next_offset
        if copy.work.kafka.gaps == "fail":
            cause = next((h.cause for h in known if h.first <= first <= h.last), None)
            raise PositionError(
                "the source has an offset without a record, and `holes: fail` allows none",
                hint="set `holes: markers` to keep the place of such offsets at the destination, "
                "or `offsets: translate` to copy the records alone",
                reason="HoleAtSource",
                offset=first,
                cause=(cause or GapCause.COMPACTED).value,
            )
        self._drain(copy)
        failpoints.reach("hole.begin")
        at_ms = self._clock.monotonic_ms()
        fenced = self._filler.fill(
            copy.writer.partition,
            first,
            end,
            seen_ms=copy.writer.seen_ms,
            producer=copy.writer.producer,
            new_epoch=copy.new_epoch,
        )
        copy.fenced |= fenced
        copy.writer.passed_gap(end, at_ms, fenced=fenced)
        failpoints.reach("hole.filled")
        position = first
        for gap in known[bisect.bisect_left(known, first, key=lambda gap: gap.last) :]:
            if gap.first >= end:
                break
            copy.gaps.add(position, gap.first - 1, GapCause.COMPACTED)
            copy.gaps.add(max(gap.first, first), min(gap.last, end - 1), gap.cause)
            position = gap.last + 1
        copy.gaps.add(position, end - 1, GapCause.COMPACTED)

    def _send(self, copy: Copy, piece: Piece) -> None:
        writer = copy.writer
        if writer.partition in self._outbox:
            self._flush()
        while not writer.may_send():
            self._collect(block=True)
        if writer.is_stale(self._clock.monotonic_ms()):
            self._collect(block=False)  # an answer that has come is a look, too
        self._raise_failure(copy)
        if writer.is_stale(self._clock.monotonic_ms()):
            self._look_again(copy)
        writer.prepare(piece, at_ms=self._clock.monotonic_ms(), now_ms=self._clock.now_ms())
        if len(piece.data) <= _COPIED_BYTES_MAX:
            self._outbox[writer.partition] = memoryview(bytearray(piece.data))
            self._outbox_bytes += len(piece.data)
            if self._outbox_bytes >= _REQUEST_BYTES:
                self._flush()
        else:
            self._transmit({writer.partition: piece.data})

    def _look_again(self, copy: Copy) -> None:
        """The last look is too old to send on: a pause, a slow source."""
        self._drain(copy)
        expected = copy.writer.next_offset
        self._look([copy])
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
            self._by_partition[response.partition].writer.responded(response, now_ms)

    def _drain(self, copy: Copy) -> bool:
        """Wait until nothing of a flow is on its way.

        Raises:
            LogmirrorError: Something that was on its way failed.
        """
        while copy.writer.in_flight:
            self._collect(block=True)
        self._raise_failure(copy)
        return True

    @staticmethod
    def _raise_failure(copy: Copy) -> None:
        if copy.writer.error is not None:
            raise copy.writer.error

    # -- waiting ---------------------------------------------------------------------------------

    def _wait_for_more(self, copies: Sequence[Copy]) -> bool:
        """Wait until something has come at the source, or the lease is over."""
        behind = [copy for copy in copies if copy.writer.next_offset < copy.limit]
        if behind:  # the source called it stable and does not deliver it yet
            self._clock.sleep_ms(_WATCH_MS)
            return any(copy.writer.error is None for copy in behind)
        watched = [copy for copy in copies if copy.work.window_ms and copy.writer.error is None]
        while watched and self._window.left_ms:
            if len(watched) == 1:
                return self._guard(watched[0], self._follow)
            if self._watch(watched):
                return True
        return False

    def _follow(self, copy: Copy) -> bool:
        """Let the source itself wait for what comes to the one partition that we watch."""
        wait_ms = min(self._window.left_ms, LISTEN_MS)
        polled = copy.source.poll(copy.writer.next_offset, max_wait_ms=wait_ms)
        copy.known_end = max(copy.known_end, polled.last_stable_offset)
        if polled.fetched is not None:
            self._send_fetched(copy, polled.fetched, polled.last_stable_offset)
        return True

    def _watch(self, watched: Sequence[Copy]) -> bool:
        begun_ms = self._clock.monotonic_ms()
        try:
            ends = self._source_client.list_offsets(
                {copy.work.slice.flow.source for copy in watched}, LATEST
            )
        except LogmirrorError as error:
            for copy in watched:
                copy.writer.fail(_copy_of(error))
            return True
        for copy in watched:
            copy.known_end = max(copy.known_end, ends[copy.work.slice.flow.source])
        if any(copy.writer.next_offset < copy.known_end for copy in watched):
            return True
        took_ms = self._clock.monotonic_ms() - begun_ms
        self._clock.sleep_ms(max(_WATCH_MS, 10 * took_ms))
        return False


def _writer(work: Work) -> PartitionWriter:
    where = target(work.kafka, work.slice.flow)
    producer = producer_id(where.topic, where.partition, work.slice.topic_id)
    return PartitionWriter(where, producer, work.kafka.producer_state_age_ms)


def _copy_of(error: LogmirrorError) -> LogmirrorError:
    """The same error for another flow, so that each can add its own facts."""
    return type(error)(error.message, hint=error.hint, **error.facts)
