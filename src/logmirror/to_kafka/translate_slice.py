"""Executor: one slice on its way into a cluster at new offsets, and what came of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.errors import InternalError
from logmirror.mirror.ports import SliceResult
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.offset_syncs import Run, SyncRule
from logmirror.to_kafka.preserve_slice import NOTHING, SliceCopy, Written
from logmirror.to_kafka.translate_progress import flow_key

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import Work
    from logmirror.model import TopicPartition
    from logmirror.source.partition import KafkaSource
    from logmirror.to_kafka.translate_progress import FlowKey, Link
    from logmirror.wire.rebatch import Piece


@dataclass(slots=True, kw_only=True)
class TranslatedCopy(SliceCopy):
    """One slice on its way to new offsets."""

    key: FlowKey
    where: TopicPartition
    next_offset: int
    """Of the source: the first that is not in the transaction."""

    verified: int
    """Of the source: the first that is not committed."""

    link: Link | None = None
    target_id: bytes | None = None
    sequence: int = 0
    progress_sequence: int = 0
    in_flight: deque[Piece] = field(default_factory=deque)
    """What is on its way into the copy, in order: its leader answers in that order. Progress, which
    has another leader, is answered at any time."""

    written: list[Run] = field(default_factory=list)
    """What the transaction has written."""

    sent_bytes: int = 0
    """Of the transaction."""

    began_ms: int = 0
    committed: Written = NOTHING
    rule: SyncRule = field(default_factory=SyncRule)
    failed: LogmirrorError | None = None
    """Why the transaction cannot be committed."""

    error: LogmirrorError | None = None
    """Why the slice ends."""

    @property
    def is_done(self) -> bool:
        """Whether the slice must not go on."""
        return self.error is not None or self.source_bytes >= self.work.slice.budget_bytes

    @property
    def open_link(self) -> Link:
        """What writes the transaction."""
        if self.link is None:
            raise InternalError("a transaction without a producer")
        return self.link

    def commit(self) -> list[Run]:
        """The transaction is committed; returns what it has written."""
        written, size_bytes = self.written, self.sent_bytes
        self.written, self.sent_bytes = [], 0
        self.verified = self.next_offset
        before = self.committed
        self.committed = Written(
            before.record_count + sum(run.count for run in written),
            before.batch_count + len(written),
            before.size_bytes + size_bytes,
        )
        return written

    def result(self, now_ms: int) -> SliceResult:
        """What came of it, at a monotonic time; an error is given the facts of its flow."""
        elapsed_ms = now_ms - self.started_ms
        return SliceResult(
            slice=self.work.slice,
            receipts=self.receipts(self.verified, self.committed, elapsed_ms),
            next_offset=self.verified,
            source_bytes=self.source_bytes,
            elapsed_ms=elapsed_ms,
            proven=True,
            error=self.told(self.error, self.where),
        )


def begun(work: Work, source: KafkaSource, now_ms: int) -> TranslatedCopy:
    """A slice before its first step, at a monotonic time."""
    first, flow = work.slice.first, work.slice.flow
    return TranslatedCopy(
        work=work,
        source=source,
        key=flow_key(work.kafka, flow),
        where=target(work.kafka, flow),
        started_ms=now_ms,
        known_end=work.slice.end,
        next_offset=first,
        verified=first,
    )
