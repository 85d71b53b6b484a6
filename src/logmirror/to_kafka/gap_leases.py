"""Executor: who may fill the holes of a partition; one process at a time, however many are awake.

A batch of data is refused where it does not continue the log. A marker is not: of two processes
that see the same hole and both ask for its markers, both get them. So markers need an owner, which
a transactional id of the destination tells.

Invariants:
1. No byte of a request for markers is sent later than `SEND_DEADLINE_MS` after the coordinator
   was asked and said that we are the owner.
2. Who takes the right from an owner that has not given it back waits for `QUIESCE_MS`, which is
   longer than that and the time that bytes may rest in a kernel, and looks at the log after it.
3. An owner that is alive is left alone: the right is taken from one under whom the log has not
   moved for `PATIENCE_MS`, longer than an owner may wait by rule 2. So two that are awake cannot
   take it from each other for ever.
4. The right is given back when a slice ends, and then nothing is on its way: what comes next need
   not wait.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import FencedError, LogmirrorError
from logmirror.mirror.ports import PositionMovedError
from logmirror.to_kafka.idempotence import QUIESCE_MS, SEND_DEADLINE_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.lease import Lease
    from logmirror.model import TopicPartition

PATIENCE_MS: Final = QUIESCE_MS + 2_500
_WATCH_MS: Final = 100
_CONFIRM_EVERY_MS: Final = SEND_DEADLINE_MS // 3


class Right(NamedTuple):
    """What an owner may do; monotonic times."""

    since_ms: int
    """When nobody else had a marker on its way any more."""
    until_ms: int
    """Until when markers may be sent."""


@dataclass(slots=True)
class _Held:
    lease: Lease
    since_ms: int
    confirmed_ms: int
    """Before the coordinator was asked."""


class GapOwners:
    """The partitions whose holes this process may fill. Not thread-safe.

    Args:
        client: Of the destination.
        clock: Time.
        transactional_id: The id that stands for a partition's holes.
    """

    def __init__(
        self,
        client: ClusterClient,
        clock: Clock,
        transactional_id: Callable[[TopicPartition], str],
    ) -> None:
        self._client, self._clock = client, clock
        self._transactional_id = transactional_id
        self._is_offered: bool | None = None
        self._held: dict[TopicPartition, _Held] = {}

    def own(self, partition: TopicPartition, first: int) -> Right | None:
        """Be the owner, at once or after others had their time.

        Args:
            partition: At the destination.
            first: Where its log ends and the hole begins.

        Returns:
            The right; None: the brokers know no owners, and nothing keeps two processes apart that
            are awake.

        Raises:
            PositionMovedError: Another process goes on with the copy.
            UsageError: We may not use the transactional id.
            UnavailableError: No coordinator answered within the budget.
        """
        if self._is_offered is None:
            self._is_offered = self._client.has_leases()
        if not self._is_offered:
            return None
        held = self._held.get(partition)
        if held is None:
            held = self._held[partition] = self._take(partition, first)
        now_ms = self._clock.monotonic_ms()
        if now_ms > held.confirmed_ms + _CONFIRM_EVERY_MS:
            try:
                held.lease.confirm()
            except FencedError as error:
                del self._held[partition]
                raise _moved(error) from error
            held.confirmed_ms = now_ms
        return Right(held.since_ms, held.confirmed_ms + SEND_DEADLINE_MS)

    def give_back(self) -> None:
        """Give all back; what cannot be given back is taken by the next one after its patience."""
        held, self._held = self._held, {}
        for each in held.values():
            with contextlib.suppress(LogmirrorError):
                each.lease.give_back()

    def _take(self, partition: TopicPartition, first: int) -> _Held:
        lease = self._client.lease(self._transactional_id(partition))
        seen = lease.owner()
        if seen is not None and seen.is_holding:
            until_ms = self._clock.monotonic_ms() + PATIENCE_MS
            while (again := lease.owner()) == seen and self._clock.monotonic_ms() < until_ms:
                self._check_end(partition, first)
                self._clock.sleep_ms(_WATCH_MS)
            if again != seen and again is not None and again.is_holding:
                raise _moved()
            seen = again
        asked_ms = self._clock.monotonic_ms()
        if not lease.take(seen):
            self._clock.sleep_ms(QUIESCE_MS)
        return _Held(lease, self._clock.monotonic_ms(), asked_ms)

    def _check_end(self, partition: TopicPartition, first: int) -> None:
        found = self._client.log_ends([partition])[partition].end_offset
        if found != first:
            raise _moved(expected=first, found=found)


def _moved(error: FencedError | None = None, **facts: object) -> PositionMovedError:
    return PositionMovedError(
        "another process fills the holes of this copy",
        hint="run one process for each copy; the position is read anew",
        **(error.facts if error else facts),
    )
