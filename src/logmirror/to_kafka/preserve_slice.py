"""Executor: the progress and the result of one slice that is copied into a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import PositionError, PositionMovedError, UnavailableError
from logmirror.mirror.ports import Receipt, SliceResult
from logmirror.model import OffsetRange, Trigger
from logmirror.source.gaps import GapLedger
from logmirror.source.partition import STALL_MS

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import Hold, Work
    from logmirror.model import TopicPartition
    from logmirror.source.partition import KafkaSource
    from logmirror.to_kafka.partition_writer import PartitionWriter
    from logmirror.wire.scan import Batches


@dataclass(slots=True, kw_only=True)
class KafkaSlice:
    """The progress of one slice, for either kind of offsets."""

    work: Work
    source: KafkaSource
    started_ms: int
    known_end: int
    """The last stable offset of the source, as far as known."""

    source_bytes: int = 0
    stalled_ms: int | None = None
    """Monotonic time since which the source has delivered nothing; None while it delivers."""

    gaps: GapLedger = field(default_factory=GapLedger)
    epoch_at: tuple[int, int] = (-1, -1)
    """Where the last batch of the last response was copied to, and its leader epoch."""

    def note_epoch(self, batches: Batches, next_offset: int) -> None:
        """Remember the leader epoch of the batch before the next offset to fetch."""
        self.epoch_at = (next_offset, batches.leader_epoch_at(next_offset - 1))

    def epoch_before(self, offset: int) -> int:
        """The leader epoch of the batch before an offset; -1: unknown."""
        return self.epoch_at[1] if offset == self.epoch_at[0] else -1

    @property
    def limit(self) -> int:
        """One past the last offset that this slice may copy, as far as known."""
        if self.work.window_ms:
            return self.known_end
        return min(self.known_end, self.work.slice.end)

    def note_stall(self, next_offset: int, now_ms: int) -> None:
        """Record that the source delivers nothing below its last stable offset.

        Raises:
            PositionError: It has delivered nothing for `STALL_MS`.
        """
        if self.stalled_ms is None:
            self.stalled_ms = now_ms
        elif now_ms - self.stalled_ms > STALL_MS:
            raise PositionError(
                "the source delivers no records below its last stable offset",
                hint="the source's log was truncated (unclean leader election, or a restored "
                "disk). The copied records are kept; compare them with the source first.",
                expected=self.limit,
                found=next_offset,
            )

    def receipts(self, verified: int, written: Written, elapsed_ms: int) -> tuple[Receipt, ...]:
        """The receipt for the copied offsets; none if nothing was copied."""
        first = self.work.slice.first
        if verified <= first:
            return ()
        one = Receipt(
            covered=OffsetRange(first=first, last=verified - 1),
            record_count=written.record_count,
            payload_bytes=written.size_bytes,
            object_bytes=written.size_bytes,
            digest="",
            trigger=Trigger.EXPLICIT,
            gaps=self.gaps.summary(),
            elapsed_ms=elapsed_ms,
            batch_count=written.batch_count,
            leader_epoch=self.epoch_before(verified),
        )
        return (one,)

    def with_flow_facts(
        self, error: LogmirrorError | None, where: TopicPartition
    ) -> LogmirrorError | None:
        """Add the facts of the flow to an error."""
        flow = self.work.slice.flow
        if error is not None:
            error.add_facts(
                mirror=flow.mirror,
                destination=flow.destination,
                topic=flow.topic,
                partition=flow.partition,
                target_topic=where.topic,
            )
        return error


class Written(NamedTuple):
    """How much the destination has acknowledged."""

    record_count: int
    batch_count: int
    size_bytes: int


NOTHING: Final = Written(0, 0, 0)


@dataclass(slots=True, kw_only=True)
class PreserveSlice(KafkaSlice):
    """The progress of one slice that keeps the source's offsets."""

    writer: PartitionWriter
    tail_checked: bool = False
    returning: tuple[int, ...] = ()
    """The producer IDs of batches that a mirror has copied from the destination to the source."""

    fenced: bool = False
    """See `Work.fenced`."""

    hold: Hold | None = None
    """See `SliceResult.hold`."""

    @property
    def next_offset(self) -> int:
        """The next offset to fetch."""
        return self.writer.next_offset

    @property
    def error(self) -> LogmirrorError | None:
        """Why the slice ends; None while it does not."""
        return self.writer.error

    def fail(self, error: LogmirrorError) -> None:
        """End the slice with an error; the first error counts."""
        self.writer.fail(error)

    def hold_up(self, hold: Hold) -> None:
        """End the slice before an offset gap that an earlier process may still fill."""
        self.hold = hold
        self.fail(
            UnavailableError(
                "an earlier process may still write into the next offset gap of this replica",
                hint="it was killed in the middle of gaps, or it runs; the flow continues when "
                "nothing that it sent can arrive any more",
                wait_ms=hold.wait_ms,
            )
        )

    @property
    def is_done(self) -> bool:
        """Whether the slice must stop: an error, or its budget is used up."""
        budget = self.source_bytes >= self.work.slice.budget_bytes
        return self.writer.error is not None or budget

    @property
    def new_epoch(self) -> int | None:
        """The epoch that the next gap must start, so that leaders refuse late older batches.

        Needed for compacted sources alone: what the cleaner removes is a batch to one reader of the
        source and a gap to the next. None where no new epoch is needed, or one was started since
        the position was read: there are only 32,767.
        """
        if self.fenced or self.work.fenced or not self.work.slice.compacted:
            return None
        return self.writer.next_epoch

    def result(self, now_ms: int) -> SliceResult:
        """The result at a monotonic time; an error gets the facts of its flow."""
        writer = self.writer
        error = self.with_flow_facts(writer.error, writer.partition)
        elapsed_ms = now_ms - self.started_ms
        written = Written(writer.record_count, writer.batch_count, writer.sent_bytes)
        has_moved = isinstance(error, PositionMovedError)
        return SliceResult(
            slice=self.work.slice,
            receipts=() if has_moved else self.receipts(writer.verified, written, elapsed_ms),
            next_offset=writer.verified,
            source_bytes=self.source_bytes,
            elapsed_ms=elapsed_ms,
            tail_checked=self.tail_checked,
            fenced=self.fenced,
            in_flight_max=writer.window(now_ms),
            hold=self.hold,
            error=error,
        )
