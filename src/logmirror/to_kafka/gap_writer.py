"""Executor: offsets without a record at the source, made invisible at the destination.

A producer cannot skip an offset. But a control record takes one and no consumer ever sees it:

- where we may (ClusterAction), the leader appends markers on request, hundreds at once;
- elsewhere a transaction to which nothing was written ends with one marker, by public API alone. A
  coordinator whose marker was on its way when the leader changed asks the new leader again, whether
  it has that marker or not: in a rolling restart this way doubles markers, the other never does.

Invariants:
1. Never more markers are asked for than the hole is long, and the log end is looked at when all of
   a step are written. Nothing else is written until the log ends where the hole does.
2. A log that ends beyond the hole is damaged: a marker was doubled, or someone else wrote. Nothing
   is at a wrong offset yet, and nothing more is written.
3. A transaction of a dead writer that had joined the partition leaves its marker when we take its
   id over, so ids are taken before the log end is looked at. From then on that writer is fenced.
4. Markers are asked for directly by the owner of the partition's holes alone (`hole_owners`). Each
   says in its coordinator epoch, too, when its writer last saw the log's end, and leaders refuse
   one below the last that they wrote: what a writer that was paused still had to send comes too
   late once another has gone on with the hole, whatever became of its deadline.
5. A marker in the name of the data's own producer, with the next epoch, ends the one before, and
   batches of it that are still on their way are refused. Where a reader of the source may have
   found a hole in the place of such a batch, the hole begins with it (decision 0004).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.transactions import ProducerIdentity
from logmirror.errors import FencedError, OutcomeUnknownError, PositionError, UnavailableError
from logmirror.mirror.ports import PositionMovedError
from logmirror.to_kafka.gap_leases import GapOwners
from logmirror.to_kafka.idempotence import QUIESCE_MS, marker_producer_id
from logmirror.wire.messages import CLUSTER_AUTHORIZATION_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.transactions import TransactionalProducer
    from logmirror.model import TopicPartition
    from logmirror.to_kafka.gap_leases import Right

MARKERS_MAX: Final = 500
"""Markers in one request: half a second of a busy broker."""

TRANSACTION_IDS: Final = 3
"""Used in turn, because an id cannot begin anew while its last end is being carried out."""

TRANSACTION_TIMEOUT_MS: Final = 60_000
REACH_MS: Final = 60_000
"""How long a marker that was promised may take to appear."""

_EPOCH_BEGIN_MS: Final = 1_767_225_600_000
_EPOCH_UNIT_MS: Final = 500
_EPOCH_MAX: Final = 2**31 - 1
"""Coordinator epochs count half seconds since 2026, which 31 bits do until 2060."""

_FRESH_MS: Final = 2
"""How old a look at the log's end may be when markers are asked for."""

_PAUSES_MS: Final = (0, 1, 2, 5, 10, 20, 50)


class GapWriter:
    """Takes offsets invisibly on one cluster. Not thread-safe."""

    def __init__(self, client: ClusterClient, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client, self._clock = client, clock
        self._may_write_markers: bool | None = None
        self._epochs: dict[TopicPartition, int] = {}
        """The least coordinator epoch that may be used: of our last marker, or beyond another's."""
        self._owned: dict[TopicPartition, list[TransactionalProducer]] = {}
        self._owners = GapOwners(client, clock, lambda partition: _transactional_id(partition, 0))

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

        Args:
            partition: At the destination; nothing of ours is on its way there.
            first: Where its log ends.
            end: Where it shall end.
            seen_ms: Monotonic time at which it was known to end at `first`.
            producer: Producer id of the data.
            new_epoch: In which it goes on behind the hole; None: as before.

        Returns:
            Whether that epoch has begun. It does not where markers come from empty transactions.

        Raises:
            PositionError: The log ends beyond the hole, see invariant 2.
            PositionMovedError: Another writer has gone on with the hole.
            UnavailableError: It could not be done for now; a part of it may have been.
            OutcomeUnknownError: An answer was lost; look.
        """
        if self._may_write_markers is None:
            self._may_write_markers = self._client.admin.may_write_markers()
        if self._may_write_markers:
            names = _names(producer, new_epoch)
            self._by_markers(partition, first, end, seen_ms, names)
            return self._may_write_markers and new_epoch is not None
        self._by_transactions(partition, first, end)
        return False

    def rest(self) -> None:
        """A slice is over, and nothing is on its way: others may fill holes without a wait."""
        self._owners.give_back()

    # -- markers ---------------------------------------------------------------------------------

    def _by_markers(
        self,
        partition: TopicPartition,
        first: int,
        end: int,
        seen_ms: int,
        names: tuple[ProducerIdentity, ProducerIdentity],
    ) -> None:
        while first < end:
            count = min(MARKERS_MAX, end - first)
            right = self._owners.own(partition, first)
            seen_ms = self._look_again(partition, first, seen_ms, right)
            epoch = self._epochs[partition] = self._epoch(partition, seen_ms)
            made = [TxnMarker(*name, coordinator_epoch=epoch) for name in names]
            markers = {partition: made[:1] + made[1:] * (count - 1)}
            until_ms = right.until_ms if right else None
            error = self._client.admin.write_txn_markers(markers, send_until_ms=until_ms)[partition]
            failpoints.reach("hole.marked")
            if isinstance(error, OutcomeUnknownError):
                # Not idempotent: the request may still be carried out. Wait it out, then look.
                self._clock.sleep_ms(QUIESCE_MS)
            if isinstance(error, FencedError):
                raise self._overtaken(partition, names, error)
            if error is not None and error.facts.get("code") == CLUSTER_AUTHORIZATION_FAILED:
                self._may_write_markers = False  # nothing was written
                return self._by_transactions(partition, first, end)
            if error is not None:
                raise error
            first += count
            names = (names[1], names[1])  # the epoch has begun
            seen_ms = self._reach(partition, first, end)
        return None

    def _look_again(
        self, partition: TopicPartition, first: int, seen_ms: int, right: Right | None
    ) -> int:
        """Make sure that the log still ends at `first`; returns when that was.

        What an answer says may be old, for a repetition is answered like the batch that it repeats:
        it counts where nobody else could have filled the hole since the batch was made.
        """
        looked_ms = self._clock.monotonic_ms()
        if right and right.since_ms < seen_ms and looked_ms - seen_ms <= _FRESH_MS:
            return seen_ms
        found = self._end_of(partition)
        if found != first:
            raise PositionMovedError(
                "another writer has taken offsets of the hole that was to be filled",
                hint="run one process for each copy; the position is read anew",
                expected=first,
                found=found,
            )
        return looked_ms

    def _epoch(self, partition: TopicPartition, seen_ms: int) -> int:
        now_ms = self._clock.now_ms()  # before the other: a pause in between makes us older
        seen_at_ms = now_ms - (self._clock.monotonic_ms() - seen_ms)
        epoch = max((seen_at_ms - _EPOCH_BEGIN_MS) // _EPOCH_UNIT_MS, 0)
        return min(max(epoch, self._epochs.get(partition, 0)), _EPOCH_MAX)

    def _overtaken(
        self, partition: TopicPartition, names: Iterable[ProducerIdentity], error: FencedError
    ) -> PositionMovedError:
        """A later marker than ours is there: we were paused, or its writer's clock is ahead."""
        for name in names:
            state = self._client.producer_states({partition: name.producer_id})[partition]
            if state is not None:
                least = max(self._epochs.get(partition, 0), state.coordinator_epoch + 1)
                self._epochs[partition] = least
        return _moved(error)

    # -- empty transactions ----------------------------------------------------------------------

    def _by_transactions(self, partition: TopicPartition, first: int, end: int) -> None:
        try:
            while first < end:
                if partition not in self._owned:
                    first = self._take_ids(partition, end)
                if self._has_emptied(partition, end - first):
                    first = end
                else:
                    del self._owned[partition]
            self._reach(partition, end, end)
        except FencedError as error:
            # Another process of ours went on with this partition, or another mirror does.
            self._owned.pop(partition, None)
            raise _moved(error) from error
        except BaseException:
            self._owned.pop(partition, None)  # taking them anew ends what was left open
            raise

    def _has_emptied(self, partition: TopicPartition, count: int) -> bool:
        """Begin and end so many transactions.

        Returns:
            False: not all of them. A request may still be on its way that would begin one more,
            and it is refused only once the ids are taken anew.
        """
        owned = self._owned[partition]
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

    def _take_ids(self, partition: TopicPartition, end: int) -> int:
        """Fence whoever had our transactional ids; returns where the log ends after that."""
        owned = [
            self._client.transactional_producer(
                _transactional_id(partition, number), timeout_ms=TRANSACTION_TIMEOUT_MS
            )
            for number in range(TRANSACTION_IDS)
        ]
        for producer in owned:
            producer.init()
        self._owned[partition] = owned
        found = self._end_of(partition)
        if found > end:
            # By a marker too many, or because somebody has gone on with the copy: a look will tell.
            raise PositionMovedError(
                "the destination's log moved while its transactional ids were taken",
                expected=end,
                found=found,
            )
        return found

    # -- looking ---------------------------------------------------------------------------------

    def _end_of(self, partition: TopicPartition) -> int:
        return self._client.log_ends([partition])[partition].end_offset

    def _reach(self, partition: TopicPartition, wanted: int, end: int) -> int:
        """Wait until the log ends at `wanted`: an end is answered before its marker is written.

        Returns:
            Monotonic time just before it was seen to end there.
        """
        looked_ms = self._clock.monotonic_ms()
        give_up_ms = looked_ms + REACH_MS
        looks = 0
        while (found := self._end_of(partition)) < wanted:
            if looked_ms > give_up_ms:
                raise UnavailableError(
                    "a marker that the destination promised does not appear",
                    hint="the position is read anew, and the rest of the hole is taken again",
                    expected=wanted,
                    found=found,
                )
            self._clock.sleep_ms(_PAUSES_MS[min(looks, len(_PAUSES_MS) - 1)])
            looks += 1
            looked_ms = self._clock.monotonic_ms()
        if found > wanted:
            # Within a longer hole one marker too many does no harm; it is not asked for again.
            if found <= end and wanted < end:
                raise UnavailableError("the hole is longer than was asked for; looking again")
            raise gap_too_long(partition, expected=end, found=found)
        return looked_ms


def _names(producer: int, new_epoch: int | None) -> tuple[ProducerIdentity, ProducerIdentity]:
    """In whose name the first marker of a hole is written, and all others."""
    own = ProducerIdentity(marker_producer_id(producer), 0)
    return own if new_epoch is None else ProducerIdentity(producer, new_epoch), own


def transactional_id_prefix(topic: str) -> str:
    """What all transactional ids begin with under which holes of a topic are filled."""
    return f"logmirror-{topic}-"


def _transactional_id(partition: TopicPartition, number: int) -> str:
    name = hashlib.sha256(f"{partition.topic}/{partition.partition}".encode()).hexdigest()[:12]
    return f"{transactional_id_prefix(partition.topic)}{partition.partition}-{name}-{number}"


def _moved(error: FencedError) -> PositionMovedError:
    return PositionMovedError(
        "another writer has taken offsets of the hole that was to be filled",
        hint="a process that was paused or replaced, or another mirror of the same partition; the "
        "position is read anew",
        **error.facts,
    )


def gap_too_long(partition: TopicPartition, *, expected: int, found: int) -> PositionError:
    """The error for a log that control records have carried beyond a hole of the source.

    Args:
        partition: At the destination.
        expected: Where the hole ends at the source.
        found: Where the destination's log ends.
    """
    return PositionError(
        "the destination's log ends beyond a hole of the source",
        hint="a marker of a transaction was written twice, which happens when a leader changes at "
        "the destination (never where the mirror has ClusterAction), or someone else writes there. "
        "No record is at a wrong offset; the next one would be. Copy this partition anew into an "
        "empty one.",
        reason="HoleTooLong",
        topic=partition.topic,
        partition=partition.partition,
        expected=expected,
        found=found,
    )
