"""Executor: the progress and the result of one slice that is copied at new offsets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.cluster.offset_syncs import Run, SyncRule
from logmirror.errors import InternalError
from logmirror.mirror.ports import SliceResult
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.preserve_slice import NOTHING, KafkaSlice, Written
from logmirror.to_kafka.translate_progress import flow_key

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import Work
    from logmirror.model import TopicPartition
    from logmirror.source.partition import KafkaSource
    from logmirror.to_kafka.producer_sessions import ProducerSession
    from logmirror.to_kafka.translate_progress import FlowKey
    from logmirror.wire.rebatch import Piece


@dataclass(slots=True, kw_only=True)
class TranslateSlice(KafkaSlice):
    """The progress of one slice with new offsets. Offsets are the source's."""

    key: FlowKey
    where: TopicPartition
    next_offset: int
    """The first offset that is not in the transaction."""

    verified: int
    """The first offset that is not committed."""

    session: ProducerSession | None = None
    target_id: bytes | None = None
    sequence: int = 0
    progress_sequence: int = 0
    in_flight: deque[Piece] = field(default_factory=deque)
    """Pieces in flight to the destination topic, in order: its leader responds in that order. The
    response to the progress record, which has another leader, may come at any time."""

    written: list[Run] = field(default_factory=list)
    """The runs that the transaction has written."""

    sent_bytes: int = 0
    """Bytes that the transaction has sent."""

    began_ms: int = 0
    committed: Written = NOTHING
    rule: SyncRule = field(default_factory=SyncRule)
    failed: LogmirrorError | None = None
    """Why the transaction cannot be committed."""

    error: LogmirrorError | None = None
    """Why the slice ends."""

    def fail(self, error: LogmirrorError) -> None:
        """End the slice with an error; the first error counts."""
        self.error = self.error or error

    @property
    def is_done(self) -> bool:
        """Whether the slice must stop: an error, or its budget is used up."""
        return self.error is not None or self.source_bytes >= self.work.slice.budget_bytes

    @property
    def open_session(self) -> ProducerSession:
        """The session that writes the transaction."""
        if self.session is None:
            raise InternalError("a transaction without a producer")
        return self.session

    def commit(self) -> list[Run]:
        """Record the commit of the transaction; return what it has written."""
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
        """The result at a monotonic time; an error gets the facts of its flow."""
        elapsed_ms = now_ms - self.started_ms
        return SliceResult(
            slice=self.work.slice,
            receipts=self.receipts(self.verified, self.committed, elapsed_ms),
            next_offset=self.verified,
            source_bytes=self.source_bytes,
            elapsed_ms=elapsed_ms,
            tail_checked=True,
            error=self.with_flow_facts(self.error, self.where),
        )


def begun(work: Work, source: KafkaSource, now_ms: int) -> TranslateSlice:
    """A slice before its first fetch, at a monotonic time."""
    first, flow = work.slice.first, work.slice.flow
    return TranslateSlice(
        work=work,
        source=source,
        key=flow_key(work.kafka, flow),
        where=target(work.kafka, flow),
        started_ms=now_ms,
        known_end=work.slice.end,
        next_offset=first,
        verified=first,
    )
