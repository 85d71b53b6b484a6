"""Executor: the state of one destination partition while batches are appended to it.

Tracks what is sent next, what is in flight, what was acknowledged, and why the writer must stop.
Decides when a batch may be sent; sends nothing itself.

Invariants:
1. `verified` is the log end that the destination has confirmed: read from it, or the response to a
   batch with the expected base offset (I5).
2. Without sequence check at most one batch is in flight, and it is sent no later than
   `idempotence.deadline_ms` after the log end was read. With it, the broker refuses a batch that
   does not continue the log, and all batches behind it. Old records end the check: nothing is sent
   behind them before they are acknowledged, because the broker may forget the producer then.
3. After the first error nothing more is prepared: `error` stays set.
4. The broker compares sequences, not offsets. So a record of another client, or a transaction
   marker that comes late, moves every batch that is in flight behind it. After a reading of the log
   end and after a filled gap one batch is in flight; only its response, with the expected base
   offset, opens the window: to 2, 4, ... `IN_FLIGHT_MAX` batches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import LogmirrorError, PositionError, PositionMovedError
from logmirror.to_kafka.idempotence import (
    PRODUCER_STATE_AGE_MS,
    SEND_DEADLINE_MS,
    SEQUENCE_MASK,
    deadline_ms,
    is_sequence_checked,
)
from logmirror.wire.rebatch import stamp

if TYPE_CHECKING:
    from logmirror.cluster.offsets import LogEnd, ProducerState
    from logmirror.cluster.produce_responses import ProduceResponse
    from logmirror.model import TopicPartition
    from logmirror.wire.rebatch import Piece

IN_FLIGHT_MAX: Final = 64
"""The most batches of one partition in flight, a power of two. A broker that refuses one also
refuses those behind it. A record of another client between two of them moves those behind it."""

_EPOCH_MAX: Final = 2**15 - 1

_REFUSED_CODES: Final = frozenset({45, 46, 47, 59})
"""Sequence or epoch refused or unknown: the log end has moved. Nothing was written."""


class _Sent(NamedTuple):
    base_offset: int
    records: int
    size: int
    max_timestamp_ms: int
    sent_ms: int


class PartitionWriter:
    """The state of one partition's writer. Not thread-safe.

    Args:
        partition: The partition of the destination.
        producer: The derived producer ID.
        producer_state_age_ms: After records older than this the broker may forget the producer.
    """

    def __init__(
        self,
        partition: TopicPartition,
        producer: int,
        producer_state_age_ms: int = PRODUCER_STATE_AGE_MS,
    ) -> None:
        self.partition, self.producer = partition, producer
        self._producer_state_age_ms = producer_state_age_ms
        self.verified = self.next_offset = 0
        self.error: LogmirrorError | None = None
        self.record_count = self.batch_count = self.sent_bytes = 0
        """Counts of the acknowledged batches."""

        self._sequence = self._epoch = 0
        self._sequence_checked = False
        self._verified_ms = 0
        self._window = 1
        """The most batches that may be in flight now, with sequence check."""

        self._in_flight: deque[_Sent] = deque()
        self._misplaced = 0
        """The number of batches that were appended at other offsets than the source's."""

    @property
    def in_flight(self) -> int:
        """The number of batches in flight."""
        return len(self._in_flight)

    @property
    def verified_ms(self) -> int:
        """Monotonic time at which the log was last known to end at `verified`."""
        return self._verified_ms

    @property
    def next_epoch(self) -> int | None:
        """The epoch for a marker that makes leaders refuse older batches; None if exhausted."""
        return None if self._epoch == _EPOCH_MAX else self._epoch + 1

    @property
    def send_until_ms(self) -> int:
        """Monotonic deadline for the last byte of the batch that was prepared last."""
        size = self._in_flight[-1].size if self._in_flight else 0
        return self._verified_ms + deadline_ms(size, sequence_checked=self._sequence_checked)

    def record_log_end(
        self, end: LogEnd, state: ProducerState | None, *, at_ms: int, now_ms: int
    ) -> None:
        """Continue from the log end and the producer state that were read.

        Args:
            end: The log end, read after `state`: if a dead writer's batch was appended in between,
                the log end includes it, and the next sequence is refused.
            state: None if the broker has no state of the producer.
            at_ms: Monotonic time before the first of the two was requested.
            now_ms: Wall-clock time.
        """
        self.verified = self.next_offset = end.end_offset
        self._sequence_checked = is_sequence_checked(state, now_ms, self._producer_state_age_ms)
        follows = end.end_offset if state is None else state.last_sequence + 1
        self._sequence = follows & SEQUENCE_MASK
        self._epoch = 0 if state is None else state.producer_epoch
        self._verified_ms = at_ms
        self._window = 1

    def resume(self, window: int) -> None:
        """Continue with the window of the slice before, which ended at this log end just now."""
        self._window = window

    def window(self, monotonic_ms: int) -> int:
        """The window for the slice that continues this one: 1..`IN_FLIGHT_MAX`."""
        return 1 if self.is_stale(monotonic_ms) else self._window

    def may_send(self) -> bool:
        """Whether one more batch may be in flight."""
        return len(self._in_flight) < (self._window if self._sequence_checked else 1)

    def is_stale(self, monotonic_ms: int) -> bool:
        """Whether the log end was read too long ago to begin sending."""
        return monotonic_ms > self._verified_ms + SEND_DEADLINE_MS

    def prepare(self, piece: Piece, *, at_ms: int, now_ms: int) -> None:
        """Stamp a batch with the producer's fields, and count it as in flight.

        Args:
            piece: The batch; it continues the one prepared before it.
            at_ms: Monotonic time.
            now_ms: Wall-clock time.
        """
        if piece.max_timestamp_ms <= now_ms - self._producer_state_age_ms:
            self._sequence_checked = False
        stamp(
            piece.data,
            producer_id=self.producer,
            producer_epoch=self._epoch,
            sequence=self._sequence,
        )
        self._in_flight.append(
            _Sent(piece.base_offset, piece.count, len(piece.data), piece.max_timestamp_ms, at_ms)
        )
        self.next_offset += piece.count
        self._sequence = (self._sequence + piece.count) & SEQUENCE_MASK

    def record_response(self, response: ProduceResponse, now_ms: int) -> None:
        """Record the response to the oldest batch in flight."""
        sent = self._in_flight.popleft()
        if self.error is not None:  # batches behind a failed one: the position is read again
            if self._misplaced and response.error is None:
                self._misplaced += 1
                self.error.facts["misplaced_batches"] = self._misplaced
        elif response.error is not None:
            self.error = _reclassified(response.error)
        elif response.base_offset != sent.base_offset:
            self.error = PositionError(
                "the destination appended a batch at another offset than the source's",
                hint="another client writes to the destination topic. Nothing more is written. "
                "Records from `expected` on are at wrong offsets: stop the other client, and copy "
                "the topic again (docs/recopy-a-partition.md).",
                reason="ForeignRecord",
                expected=sent.base_offset,
                found=response.base_offset,
                misplaced_batches=1,
            )
            self._misplaced = 1
        else:
            self.verified = sent.base_offset + sent.records
            self.record_count += sent.records
            self.batch_count += 1
            self.sent_bytes += sent.size
            self._verified_ms = max(self._verified_ms, sent.sent_ms)
            self._window = min(2 * self._window, IN_FLIGHT_MAX)
            if not self._in_flight:
                self._sequence_checked = (
                    sent.max_timestamp_ms > now_ms - self._producer_state_age_ms
                )

    def not_sent(self, error: LogmirrorError) -> None:
        """Withdraw the batch that was prepared last: it was not sent."""
        self._in_flight.pop()
        self.fail(error)

    def passed_gap(self, end: int, at_ms: int, *, fenced: bool = False) -> None:
        """Record that a gap was filled up to `end`; gaps do not advance the sequence.

        Args:
            end: The new log end offset.
            at_ms: Monotonic time before the gap was begun.
            fenced: Whether the gap started `next_epoch`, in which sequences begin at 0.
        """
        self.verified = self.next_offset = end
        self._verified_ms = at_ms
        self._window = 1
        if fenced:
            self._epoch, self._sequence, self._sequence_checked = self._epoch + 1, 0, True

    def fail(self, error: LogmirrorError) -> None:
        """Stop with an error; the first one counts."""
        self.error = self.error or error


def _reclassified(error: LogmirrorError) -> LogmirrorError:
    if error.facts.get("code") not in _REFUSED_CODES:
        return error
    return PositionMovedError(
        "the destination refused a batch that does not continue its log",
        hint="another writer appended records, or a response was lost; the position is read again",
        **error.facts,
    )
