"""Executor: offsets without a record at the source, made invisible at the destination.

A producer cannot skip an offset. But a control record takes one and no consumer ever sees it:

- where we may (ClusterAction), the leader appends markers on request, hundreds at once;
- elsewhere a transaction to which nothing was written ends with one marker, by public API alone.

Invariants:
1. Never more markers are asked for than the hole is long, and the log end is looked at after each
   step. Nothing else is written until the log ends where the hole does.
2. A log that ends beyond the hole is damaged: a broker has written a marker twice (seen where one
   was restarted in the middle of a hand-over), or someone else wrote. Nothing is at a wrong offset
   yet, and nothing more is written.
3. A transaction of a dead writer that had joined the partition leaves its marker when we take its
   id over, so ids are taken before the log end is looked at.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from logmirror import crashpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.admin import TxnMarker
from logmirror.errors import OutcomeUnknownError, PositionError, UnavailableError
from logmirror.mirror.kafka_guard import SETTLE_MS, marker_producer_id

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.transactions import TransactionalProducer
    from logmirror.model import TopicPartition

MARKERS_MAX: Final = 500
"""Markers in one request: half a second of a busy broker."""

TRANSACTION_IDS: Final = 3
"""Used in turn, because an id cannot begin anew while its last end is being carried out."""

TRANSACTION_TIMEOUT_MS: Final = 60_000
REACH_MS: Final = 60_000
"""How long a marker that was promised may take to appear."""

_PAUSES_MS: Final = (0, 1, 2, 5, 10, 20, 50)


class HoleWriter:
    """Takes offsets invisibly on one cluster. Not thread-safe."""

    def __init__(self, client: ClusterClient, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client, self._clock = client, clock
        self._may_write_markers: bool | None = None
        self._owned: dict[TopicPartition, list[TransactionalProducer]] = {}

    def fill(self, partition: TopicPartition, first: int, end: int) -> None:
        """Take the offsets first..end-1; returns when the log ends at `end`, and nowhere else.

        Raises:
            PositionError: The log ends beyond the hole, see invariant 2.
            UnavailableError: It could not be done for now; a part of it may have been.
            OutcomeUnknownError: An answer was lost; look.
            FencedError: Another mirror has taken our transactional ids.
        """
        if self._may_write_markers is None:
            self._may_write_markers = self._client.admin.may_write_markers()
        if self._may_write_markers:
            self._by_markers(partition, first, end)
        else:
            self._by_transactions(partition, first, end)

    # -- markers ---------------------------------------------------------------------------------

    def _by_markers(self, partition: TopicPartition, first: int, end: int) -> None:
        marker = TxnMarker(marker_producer_id(partition.topic, partition.partition), 0)
        while first < end:
            count = min(MARKERS_MAX, end - first)
            error = self._client.admin.write_txn_markers({partition: [marker] * count})[partition]
            crashpoints.reach("hole.marked")
            if isinstance(error, OutcomeUnknownError):
                # Not idempotent: the request may still be carried out. Wait it out, then look.
                self._clock.sleep_ms(SETTLE_MS)
            if error is not None:
                raise error
            first += count
            self._reach(partition, first, end)

    # -- empty transactions ----------------------------------------------------------------------

    def _by_transactions(self, partition: TopicPartition, first: int, end: int) -> None:
        owned = self._owned.get(partition)
        if owned is None:
            owned = [
                self._client.transactional_producer(
                    _transactional_id(partition, number), timeout_ms=TRANSACTION_TIMEOUT_MS
                )
                for number in range(TRANSACTION_IDS)
            ]
            for producer in owned:
                producer.init()
            self._owned[partition] = owned
            first = self._end_of(partition)
            if first > end:
                raise _damaged(partition, first, end)
        try:
            for number in range(end - first):
                producer = owned[number % len(owned)]
                producer.add_partitions([partition])
                crashpoints.reach("hole.joined")
                producer.end(commit=False)
                crashpoints.reach("hole.marked")
            self._reach(partition, end, end)
        except BaseException:
            del self._owned[partition]  # take the ids anew, which ends what was left open
            raise

    # -- looking ---------------------------------------------------------------------------------

    def _end_of(self, partition: TopicPartition) -> int:
        return self._client.log_ends([partition])[partition].end_offset

    def _reach(self, partition: TopicPartition, wanted: int, end: int) -> None:
        """Wait until the log ends at `wanted`: an end is answered before its marker is written."""
        give_up_ms = self._clock.monotonic_ms() + REACH_MS
        looks = 0
        while (found := self._end_of(partition)) < wanted:
            if self._clock.monotonic_ms() > give_up_ms:
                raise UnavailableError(
                    "a marker that the destination promised does not appear",
                    hint="the position is read anew, and the rest of the hole is taken again",
                    expected=wanted,
                    found=found,
                )
            self._clock.sleep_ms(_PAUSES_MS[min(looks, len(_PAUSES_MS) - 1)])
            looks += 1
        if found > wanted:
            # Within a longer hole one marker too many does no harm; it is not asked for again.
            if found <= end and wanted < end:
                raise UnavailableError("the hole is longer than was asked for; looking again")
            raise _damaged(partition, found, end)


def _transactional_id(partition: TopicPartition, number: int) -> str:
    name = hashlib.sha256(f"{partition.topic}/{partition.partition}".encode()).hexdigest()[:12]
    return f"logmirror-{partition.topic}-{partition.partition}-{name}-{number}"


def _damaged(partition: TopicPartition, found: int, end: int) -> PositionError:
    return PositionError(
        "the destination's log ends beyond a hole of the source",
        hint="the destination's broker wrote a marker twice (it happens when one is restarted), or "
        "someone else writes there. No record is at a wrong offset; the next one would be. Copy "
        "this partition anew into an empty one.",
        reason="HoleTooLong",
        topic=partition.topic,
        partition=partition.partition,
        expected=end,
        found=found,
    )
