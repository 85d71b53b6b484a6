"""Executor: one slice on its way into a cluster, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.mirror.holes import HoleLedger
from logmirror.mirror.ports import PositionMovedError, Receipt, SliceResult
from logmirror.model import OffsetRange, Trigger

if TYPE_CHECKING:
    from logmirror.mirror.kafka_sink import PartitionWriter
    from logmirror.mirror.kafka_source import KafkaSource
    from logmirror.mirror.ports import Work


@dataclass(slots=True)
class Copy:
    """One slice on its way."""

    work: Work
    source: KafkaSource
    writer: PartitionWriter
    started_ms: int
    known_end: int
    """How far the source is known to reach."""

    proven: bool = False
    fenced: bool = False
    """See `Work.fenced`."""

    source_bytes: int = 0
    stalled_ms: int | None = None
    holes: HoleLedger = field(default_factory=HoleLedger)

    @property
    def limit(self) -> int:
        """One past the last offset that this slice may copy, as far as is known."""
        if self.work.lease_ms:
            return self.known_end
        return min(self.known_end, self.work.slice.end)

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
        work, writer = self.work, self.writer
        flow, error = work.slice.flow, writer.error
        elapsed_ms = now_ms - self.started_ms
        if error is not None:
            error.add_facts(
                mirror=flow.mirror,
                destination=flow.destination,
                topic=flow.topic,
                partition=flow.partition,
                target_topic=writer.partition.topic,
            )
        receipts: tuple[Receipt, ...] = ()
        if writer.verified > work.slice.first and not isinstance(error, PositionMovedError):
            receipts = (
                Receipt(
                    covered=OffsetRange(first=work.slice.first, last=writer.verified - 1),
                    record_count=writer.record_count,
                    payload_bytes=writer.sent_bytes,
                    object_bytes=writer.sent_bytes,
                    digest="",
                    trigger=Trigger.EXPLICIT,
                    holes=self.holes.summary(),
                    elapsed_ms=elapsed_ms,
                    batch_count=writer.batch_count,
                ),
            )
        return SliceResult(
            slice=work.slice,
            receipts=receipts,
            next_offset=writer.verified,
            source_bytes=self.source_bytes,
            elapsed_ms=elapsed_ms,
            proven=self.proven,
            fenced=self.fenced,
            error=error,
        )
