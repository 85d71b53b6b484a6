"""Executor: one partition of the destination while batches are appended to it.

Keeps the books of one writer: what it will send next, what is on its way, what has been
acknowledged, and why it must stop. Says when something may be sent; sends nothing itself.

Invariants:
1. `verified` is the log end that the destination itself has told: by a look, or by an answer to a
   batch whose base offset was the expected one (I5).
2. Without a guard at most one batch is on its way, and it leaves no later than
   `kafka_guard.deadline_ms` after the log end was seen. With one, the broker itself refuses what
   does not continue the log, and everything behind it. Old records end the guard: nothing is sent
   behind them before they are acknowledged, for the broker may forget us as soon as it has them.
3. After the first thing that went wrong nothing more is prepared: `error` stays.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import LogmirrorError, PositionError
from logmirror.mirror.ports import PositionMovedError
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
    from logmirror.cluster.produce import ProduceResponse
    from logmirror.model import TopicPartition
    from logmirror.wire.rebatch import Piece

IN_FLIGHT_MAX: Final = 64
"""Batches of one partition on their way at once. What a broker refuses takes all behind it along,
so the number is for memory in the broker and for the time that a stop takes."""

_EPOCH_MAX: Final = 2**15 - 1

_LOOK_CODES: Final = frozenset({45, 46, 47, 59})
"""Sequence or epoch refused or forgotten: the log is not where we thought. Nothing was written."""


class _Sent(NamedTuple):
    base_offset: int
    records: int
    size: int
    max_timestamp_ms: int
    sent_ms: int


class PartitionWriter:
    """The books of one partition's writer. Not thread-safe.

    Args:
        partition: At the destination.
        producer: The derived producer id.
        guard_age_ms: Records older than this leave the broker without a memory of us.
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
        """Of batches that were acknowledged."""

        self._sequence = self._epoch = 0
        self._sequence_checked = False
        self._seen_ms = 0
        self._in_flight: deque[_Sent] = deque()

    @property
    def in_flight(self) -> int:
        """How many batches are on their way."""
        return len(self._in_flight)

    @property
    def seen_ms(self) -> int:
        """Monotonic time at which the destination's log was last known to end at `verified`."""
        return self._seen_ms

    @property
    def next_epoch(self) -> int | None:
        """With which a marker makes the leader refuse our older batches; None: none is left."""
        return None if self._epoch == _EPOCH_MAX else self._epoch + 1

    @property
    def send_until_ms(self) -> int:
        """Monotonic time after which no byte of the batch prepared last may be sent."""
        size = self._in_flight[-1].size if self._in_flight else 0
        return self._seen_ms + deadline_ms(size, sequence_checked=self._sequence_checked)

    def looked(self, end: LogEnd, state: ProducerState | None, *, at_ms: int, now_ms: int) -> None:
        """Take a look in: where the log ends, and what the broker remembers of our producer.

        Args:
            end: The real log end, asked for after `state`: what a dead writer appended in between
                is then in the end, and our next sequence is refused.
            state: None where the broker remembers nothing.
            at_ms: Monotonic time before the first of the two was asked for.
            now_ms: Wall-clock time.
        """
        self.verified = self.next_offset = end.end_offset
        self._sequence_checked = is_sequence_checked(state, now_ms, self._producer_state_age_ms)
        follows = end.end_offset if state is None else state.last_sequence + 1
        self._sequence = follows & SEQUENCE_MASK
        self._epoch = 0 if state is None else state.producer_epoch
        self._seen_ms = at_ms

    def may_send(self) -> bool:
        """Whether a batch may be on its way beside those that are."""
        return len(self._in_flight) < (IN_FLIGHT_MAX if self._sequence_checked else 1)

    def is_stale(self, monotonic_ms: int) -> bool:
        """Whether the last look is too old to begin to send on."""
        return monotonic_ms > self._seen_ms + SEND_DEADLINE_MS

    def prepare(self, piece: Piece, *, at_ms: int, now_ms: int) -> None:
        """Make a batch ours and count it as sent.

        Args:
            piece: It continues what was prepared before it.
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

    def responded(self, response: ProduceResponse, now_ms: int) -> None:
        """Take the answer to the oldest batch that is on its way."""
        sent = self._in_flight.popleft()
        if self.error is not None:
            return  # what was sent behind a batch that failed is looked into as a whole
        if response.error is not None:
            self.error = _looked_into(response.error)
        elif response.base_offset != sent.base_offset:
            self.error = PositionError(
                "the destination appended a batch at another offset than the source's",
                hint="someone else writes to the destination's topic. Nothing more is written; "
                "offsets from there on differ from the source's: stop the other writer and copy "
                "this partition anew into an empty one.",
                reason="ForeignRecord",
                expected=sent.base_offset,
                found=response.base_offset,
            )
        else:
            self.verified = sent.base_offset + sent.records
            self.record_count += sent.records
            self.batch_count += 1
            self.sent_bytes += sent.size
            self._seen_ms = max(self._seen_ms, sent.sent_ms)
            if not self._in_flight:
                self._sequence_checked = (
                    sent.max_timestamp_ms > now_ms - self._producer_state_age_ms
                )

    def not_sent(self, error: LogmirrorError) -> None:
        """The batch that was prepared last did not leave."""
        self._in_flight.pop()
        self.fail(error)

    def passed_gap(self, end: int, at_ms: int, *, fenced: bool = False) -> None:
        """A hole was written, and the log now ends at `end`; sequences do not count it.

        Args:
            end: Offset.
            at_ms: Monotonic time before the hole was begun.
            fenced: Whether it began `next_epoch`, in which sequences begin at 0.
        """
        self.verified = self.next_offset = end
        self._seen_ms = at_ms
        if fenced:
            self._epoch, self._sequence, self._sequence_checked = self._epoch + 1, 0, True

    def fail(self, error: LogmirrorError) -> None:
        """Stop for a reason from outside; the first one counts."""
        self.error = self.error or error


def _looked_into(error: LogmirrorError) -> LogmirrorError:
    if error.facts.get("code") not in _LOOK_CODES:
        return error
    return PositionMovedError(
        "the destination refused a batch that does not continue its log",
        hint="another writer was there, or an answer of ours was lost; the position is read anew",
        **error.facts,
    )
