"""Executor: fills offset gaps at the destination, invisibly to consumers.

A producer cannot skip an offset. But a control record takes one, and no consumer sees it:

- With ClusterAction, the leader appends markers on request, hundreds at once.
- Without it, an empty transaction ends with one marker, by public API alone. If the leader changes
  while a marker is in flight, the coordinator sends it to the new leader too, even if that one has
  it: a rolling restart can duplicate markers this way, and cannot duplicate requested ones.

Invariants:
1. A gap is filled in steps. No more markers are requested than the gap is long, and the log end is
   read when all of a step are written. Nothing else is written until the log ends where the gap
   does. After each step the filling may end early; the next one continues at the log end.
2. A log that ends beyond the gap is damaged: a marker was duplicated, or another client wrote. No
   record is at a wrong offset yet, and nothing more is written.
3. A dead writer's transaction with the partition leaves a marker when its ID is acquired. So the
IDs
   are acquired before the log end is read. From then on that writer is fenced.
4. Markers are requested only with a lease on the partition's gaps (`gap_leases`). Each marker also
   has the time at which its writer read the log end as its coordinator epoch, and leaders refuse a
   smaller one than the last they wrote. So the markers of a zombie writer are refused once another
   has continued the gap, even after their deadline.
5. A marker of the data's own producer with the next epoch ends the current epoch, and leaders
refuse
   its batches that are still in flight. Where a reader of the source may have found a gap in place
   of such a batch, the gap begins with that marker (decision 0004).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.transactions import ProducerIdentity
from logmirror.errors import (
    FencedError,
    OutcomeUnknownError,
    PositionError,
    PositionMovedError,
    UnavailableError,
)
from logmirror.mirror.ports import Hold
from logmirror.to_kafka.gap_leases import GapLeases
from logmirror.to_kafka.idempotence import marker_producer_id
from logmirror.wire.messages import CLUSTER_AUTHORIZATION_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.transactions import TransactionalProducer
    from logmirror.model import TopicPartition
    from logmirror.to_kafka.gap_leases import GapLease

MARKERS_MAX: Final = 500
"""Markers in one request: they take a busy broker half a second."""

TRANSACTIONS_MAX: Final = 60
"""Empty transactions in one step: a quarter of a second with a broker nearby. A marker that was
duplicated in a step is progress as long as the gap has room."""

TRANSACTION_IDS: Final = 3
"""Used in turn: an ID cannot begin a transaction while its last one is being ended."""

TRANSACTION_TIMEOUT_MS: Final = 60_000
MARKER_TIMEOUT_MS: Final = 60_000
"""How long to wait for a marker that the coordinator has accepted."""

_EPOCH_BEGIN_MS: Final = 1_767_225_600_000
_EPOCH_UNIT_MS: Final = 500
_EPOCH_MAX: Final = 2**31 - 1
"""Coordinator epochs count half seconds since 2026; 31 bits last until 2060."""

_FRESH_MS: Final = 2
"""How old the last reading of the log end may be when markers are requested."""

_PAUSES_MS: Final = (0, 1, 2, 5, 10, 20, 50)


class Filled(NamedTuple):
    """The part of an offset gap that was filled."""

    end: int
    """The log end offset. Below the gap's end: the time was over."""

    fenced: bool
    """Whether the leader refuses all batches of the data's producer with an older epoch."""

    hold: Hold | None = None
    """The gap cannot be continued before this wait is over; see `gap_leases`."""


class GapWriter:
    """Fills offset gaps on one cluster. Not thread-safe."""

    def __init__(self, client: ClusterClient, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client, self._clock = client, clock
        self._may_write_markers: bool | None = None
        self._epochs: dict[TopicPartition, int] = {}
        """The least coordinator epoch to use: of the last marker, or above another writer's."""
        self._producers: dict[TopicPartition, list[TransactionalProducer]] = {}
        self._leases = GapLeases(client, clock, lambda partition: _transactional_id(partition, 0))

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
        """Fill the offsets first..end-1, or the first of them: at least one step without a hold.

        Args:
            partition: A partition of the destination, with nothing in flight.
            first: Its log end offset.
            end: The log end offset to reach.
            verified_ms: Monotonic time at which the log was known to end at `first`.
            producer: The producer ID of the data.
            new_epoch: The producer epoch of the data behind the gap; None for the current one.
            until_ms: Monotonic time at which no further step is begun; None: no limit.
            hold: The hold with which the last call for this `first` has ended, once its wait is
                over. None: there was none.

        Returns:
            The log end; a hold if other requests for markers may still arrive; and whether the new
            epoch has begun. It has not if markers come from empty transactions.

        Raises:
            PositionError: The log ends beyond the gap, see invariant 2.
            PositionMovedError: Another writer has continued the gap.
            UnavailableError: The gap could not be filled now; a part of it may be filled.
        """
        if self._may_write_markers is None:
            self._may_write_markers = self._client.admin.may_write_markers()
        if self._may_write_markers:
            identities = _identities(producer, new_epoch)
            filled = self._by_markers(
                partition, first, end, verified_ms, identities, until_ms, hold
            )
            has_begun = self._may_write_markers and new_epoch is not None and filled.end > first
            return filled._replace(fenced=has_begun)
        return Filled(self._by_transactions(partition, first, end, until_ms), fenced=False)

    def release(self) -> None:
        """Release all leases at the end of a slice; nothing is in flight."""
        self._leases.release()

    # -- markers ---------------------------------------------------------------------------------

    def _by_markers(  # noqa: PLR0913, PLR0917  # the parts of `fill`
        self,
        partition: TopicPartition,
        first: int,
        end: int,
        verified_ms: int,
        identities: tuple[ProducerIdentity, ProducerIdentity],
        until_ms: int | None,
        hold: Hold | None,
    ) -> Filled:
        while True:
            count = min(MARKERS_MAX, end - first)
            lease = self._leases.acquire(partition, hold)
            if isinstance(lease, Hold):
                return Filled(first, fenced=False, hold=lease)
            verified_ms = self._confirm_end(partition, first, verified_ms, lease)
            epoch = self._epochs[partition] = self._epoch(partition, verified_ms)
            made = [TxnMarker(*identity, coordinator_epoch=epoch) for identity in identities]
            markers = {partition: made[:1] + made[1:] * (count - 1)}
            responses = self._client.admin.write_txn_markers(markers, send_until_ms=lease.until_ms)
            error = responses[partition]
            failpoints.reach("hole.marked")
            if isinstance(error, OutcomeUnknownError):
                # Not idempotent, and the broker may still process it. Wait, then read the log end.
                return Filled(first, fenced=False, hold=self._leases.hold(partition))
            if isinstance(error, FencedError):
                raise self._overtaken(partition, identities, error)
            if error is not None and error.facts.get("code") == CLUSTER_AUTHORIZATION_FAILED:
                self._may_write_markers = False  # nothing was written
                return Filled(self._by_transactions(partition, first, end, until_ms), fenced=False)
            if error is not None:
                raise error
            first += count
            identities = (identities[1], identities[1])  # the epoch has begun
            verified_ms = self._reach(partition, first, end)
            if self._is_over(first, end, until_ms):
                return Filled(first, fenced=False)

    def _confirm_end(
        self, partition: TopicPartition, first: int, verified_ms: int, lease: GapLease
    ) -> int:
        """Make sure that the log still ends at `first`; return when that was.

        A response may be out of date, because a duplicate gets the response of the first batch. It
        counts only if no other process can have filled the gap since the batch was sent.
        """
        read_ms = self._clock.monotonic_ms()
        if lease.since_ms < verified_ms and read_ms - verified_ms <= _FRESH_MS:
            return verified_ms
        found = self._end_of(partition)
        if found != first:
            raise PositionMovedError(
                "another writer has filled offsets of the same gap",
                hint="run one mirror per replica; the position is read again",
                expected=first,
                found=found,
            )
        return read_ms

    def _epoch(self, partition: TopicPartition, verified_ms: int) -> int:
        now_ms = self._clock.now_ms()  # first: a pause in between makes the epoch smaller
        verified_at_ms = now_ms - (self._clock.monotonic_ms() - verified_ms)
        epoch = max((verified_at_ms - _EPOCH_BEGIN_MS) // _EPOCH_UNIT_MS, 0)
        return min(max(epoch, self._epochs.get(partition, 0)), _EPOCH_MAX)

    def _overtaken(
        self, partition: TopicPartition, identities: Iterable[ProducerIdentity], error: FencedError
    ) -> PositionMovedError:
        """The log has a later marker: this process was paused, or the other's clock is ahead."""
        for identity in identities:
            state = self._client.producer_states({partition: identity.producer_id})[partition]
            if state is not None:
                least = max(self._epochs.get(partition, 0), state.coordinator_epoch + 1)
                self._epochs[partition] = least
        return _moved(error)

    # -- empty transactions ----------------------------------------------------------------------

    def _by_transactions(
        self, partition: TopicPartition, first: int, end: int, until_ms: int | None
    ) -> int:
        try:
            while True:
                if partition not in self._producers:
                    first = self._acquire_ids(partition, end)
                count = min(TRANSACTIONS_MAX, end - first)
                if self._write_empty_transactions(partition, count):
                    first += count
                    self._reach(partition, first, end)
                    if self._is_over(first, end, until_ms):
                        return first
                else:
                    del self._producers[partition]
        except FencedError as error:
            # Another process of this mirror, or another mirror, continues this partition.
            self._producers.pop(partition, None)
            raise _moved(error) from error
        except BaseException:
            self._producers.pop(partition, None)  # acquiring them again ends what is open
            raise

    def _write_empty_transactions(self, partition: TopicPartition, count: int) -> bool:
        """Begin and end `count` transactions.

        Returns:
            False if not all of them. A stray request may then begin one more, and is refused only
            once the IDs are acquired again.
        """
        owned = self._producers[partition]
        for number in range(count):
            producer = owned[number % len(owned)]
            producer.add_partitions([partition])
            failpoints.reach("hole.joined")
            if not producer.has_stray:
                producer.end(commit=False)
                failpoints.reach("hole.marked")
            if producer.has_stray:
                return False
        for producer in owned[:count]:
            producer.await_markers()
        return True

    def _acquire_ids(self, partition: TopicPartition, end: int) -> int:
        """Acquire the transactional IDs; return the log end after that."""
        owned = [
            self._client.transactional_producer(
                _transactional_id(partition, number), timeout_ms=TRANSACTION_TIMEOUT_MS
            )
            for number in range(TRANSACTION_IDS)
        ]
        for producer in owned:
            producer.init()
        self._producers[partition] = owned
        found = self._end_of(partition)
        if found > end:
            # By one marker too many, or by another writer: the next reading shows which.
            raise PositionMovedError(
                "the destination's log moved while the transactional IDs were acquired",
                expected=end,
                found=found,
            )
        return found

    # -- the log end -----------------------------------------------------------------------------

    def _is_over(self, reached: int, end: int, until_ms: int | None) -> bool:
        is_late = until_ms is not None and self._clock.monotonic_ms() >= until_ms
        return is_late or reached >= end

    def _end_of(self, partition: TopicPartition) -> int:
        return self._client.log_ends([partition])[partition].end_offset

    def _reach(self, partition: TopicPartition, wanted: int, end: int) -> int:
        """Wait until the log ends at `wanted`: EndTxn returns before its marker is written.

        Returns:
            Monotonic time just before the log end was read.
        """
        read_ms = self._clock.monotonic_ms()
        deadline_ms = read_ms + MARKER_TIMEOUT_MS
        reads = 0
        while (found := self._end_of(partition)) < wanted:
            if read_ms > deadline_ms:
                raise UnavailableError(
                    "the destination accepted a marker and did not write it in time",
                    hint="the position is read again, and the rest of the gap is filled",
                    expected=wanted,
                    found=found,
                )
            self._clock.sleep_ms(_PAUSES_MS[min(reads, len(_PAUSES_MS) - 1)])
            reads += 1
            read_ms = self._clock.monotonic_ms()
        if found > wanted:
            # Within a longer gap one marker too many does no harm.
            if found <= end and wanted < end:
                raise UnavailableError("a gap has one control record too many; checking again")
            raise gap_too_long(partition, expected=end, found=found)
        return read_ms


def _identities(producer: int, new_epoch: int | None) -> tuple[ProducerIdentity, ProducerIdentity]:
    """The producers of the first marker of a gap, and of all others."""
    marker = ProducerIdentity(marker_producer_id(producer), 0)
    first = marker if new_epoch is None else ProducerIdentity(producer, new_epoch)
    return first, marker


def transactional_id_prefix(topic: str) -> str:
    """The prefix of the transactional IDs for the gaps of a topic."""
    return f"logmirror-{topic}-"


def _transactional_id(partition: TopicPartition, number: int) -> str:
    name = hashlib.sha256(f"{partition.topic}/{partition.partition}".encode()).hexdigest()[:12]
    return f"{transactional_id_prefix(partition.topic)}{partition.partition}-{name}-{number}"


def _moved(error: FencedError) -> PositionMovedError:
    return PositionMovedError(
        "another writer has filled offsets of the same gap",
        hint="a process that was paused or replaced, or another mirror of the same partition; the "
        "position is read again",
        **error.facts,
    )


def gap_too_long(partition: TopicPartition, *, expected: int, found: int) -> PositionError:
    """The error for a log that ends beyond a gap of the source.

    Args:
        partition: The partition of the destination.
        expected: The end of the gap at the source.
        found: The log end of the destination.
    """
    return PositionError(
        "the destination's log ends beyond an offset gap of the source",
        hint="a transaction marker was written twice, which can happen when a leader changes at "
        "the destination (never if the mirror writes markers itself), or another client writes "
        "there. No record is at a wrong offset; the next one would be. Copy the topic again "
        "(docs/recopy-a-partition.md).",
        reason="HoleTooLong",
        topic=partition.topic,
        partition=partition.partition,
        expected=expected,
        found=found,
    )
