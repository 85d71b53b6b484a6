"""Executor: one slice on its way into a cluster, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import PositionError
from logmirror.mirror.ports import PositionMovedError, Receipt, SliceResult
from logmirror.model import OffsetRange, Trigger
from logmirror.source.gaps import GapLedger
from logmirror.source.partition import STALL_MS

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import Work
    from logmirror.model import TopicPartition
    from logmirror.source.partition import KafkaSource
    from logmirror.to_kafka.partition_writer import PartitionWriter


@dataclass(slots=True, kw_only=True)
class SliceCopy:
    """One slice on its way, at whatever offsets."""

    work: Work
    source: KafkaSource
    started_ms: int
    known_end: int
    """How far the source is known to reach."""

    source_bytes: int = 0
    stalled_ms: int | None = None
    """Monotonic time since which the source has delivered nothing; None: it delivers."""

    gaps: GapLedger = field(default_factory=GapLedger)

    @property
    def limit(self) -> int:
        """One past the last offset that this slice may copy, as far as is known."""
        if self.work.window_ms:
            return self.known_end
        return min(self.known_end, self.work.slice.end)

    def note_stall(self, next_offset: int, now_ms: int) -> None:
        """The source delivers nothing although it is known to reach further.

        Raises:
            PositionError: It has not for too long.
        """
        if self.stalled_ms is None:
            self.stalled_ms = now_ms
        elif now_ms - self.stalled_ms > STALL_MS:
            raise PositionError(
                "the source delivers nothing below an offset that it had called stable",
                hint="the source's log was cut (unclean leader election, or a restored disk). What "
                "is copied is kept; compare it with the source before anything else.",
                expected=self.limit,
                found=next_offset,
            )

    def receipts(self, verified: int, written: Written, elapsed_ms: int) -> tuple[Receipt, ...]:
        """What is said of the offsets that were copied; nothing where there are none."""
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
        )
        return (one,)

    def told(self, error: LogmirrorError | None, where: TopicPartition) -> LogmirrorError | None:
        """An error with the facts of its flow."""
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
class Copy(SliceCopy):
    """One slice on its way to the source's own offsets."""

    writer: PartitionWriter
    proven: bool = False
    fenced: bool = False
    """See `Work.fenced`."""

    @property
    def is_done(self) -> bool:
        """Whether the slice must not go on."""
        budget = self.source_bytes >= self.work.slice.budget_bytes
        return self.writer.error is not None or budget

    @property
    def new_epoch(self) -> int | None:
        """Which a hole must begin, so that no older batch comes late and stands behind it.

        Only what a cleaner has removed can be a batch to one reader of the source and a hole to the
        next one. An epoch is begun once after each reading of the position, for there are few.
        """
        if self.fenced or self.work.fenced or not self.work.slice.compacted:
            return None
        return self.writer.next_epoch

    def result(self, now_ms: int) -> SliceResult:
        """What came of it, at a monotonic time; an error is given the facts of its flow."""
        writer, error = self.writer, self.told(self.writer.error, self.writer.partition)
        elapsed_ms = now_ms - self.started_ms
        written = Written(writer.record_count, writer.batch_count, writer.sent_bytes)
        has_moved = isinstance(error, PositionMovedError)
        return SliceResult(
            slice=self.work.slice,
            receipts=() if has_moved else self.receipts(writer.verified, written, elapsed_ms),
            next_offset=writer.verified,
            source_bytes=self.source_bytes,
            elapsed_ms=elapsed_ms,
            proven=self.proven,
            fenced=self.fenced,
            error=error,
        )
