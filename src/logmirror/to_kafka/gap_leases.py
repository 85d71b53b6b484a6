"""Executor: leases on the offset gaps of a partition. One process at a time fills them.

A broker refuses a data batch that does not continue the log. It does not refuse a marker: if two
processes request markers for the same gap, both get them. So markers need a lease, which is a
transactional ID at the destination.

Invariants:
1. No byte of a request for markers is sent later than `SEND_DEADLINE_MS` after the coordinator was
   asked and confirmed the lease.
2. A process that takes the lease from an owner that has not released it waits for `QUIESCE_MS`, and
   reads the log end after that. `QUIESCE_MS` is longer than the deadline of rule 1 and the time
   that bytes may stay in a kernel together.
3. A live owner keeps its lease. It is taken only if the log has not moved for `LEASE_TIMEOUT_MS`,
   which is longer than an owner may wait by rule 2. So two running processes cannot take it from
   each other forever.
4. The lease is released when a slice ends, with nothing in flight. The next owner does not wait.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import FencedError, LogmirrorError, PositionMovedError
from logmirror.to_kafka.idempotence import QUIESCE_MS, SEND_DEADLINE_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.lease import Lease
    from logmirror.model import TopicPartition

LEASE_TIMEOUT_MS: Final = QUIESCE_MS + 2_500
_POLL_MS: Final = 100
_CONFIRM_EVERY_MS: Final = SEND_DEADLINE_MS // 3


class GapLease(NamedTuple):
    """The period in which the owner may send markers; monotonic times."""

    since_ms: int
    """When the markers of other processes could no longer arrive."""
    until_ms: int
    """The deadline for sending markers."""


@dataclass(slots=True)
class _Held:
    lease: Lease
    since_ms: int
    confirmed_ms: int
    """Monotonic time before the coordinator was asked."""


class GapLeases:
    """The leases that this process holds. Not thread-safe.

    Args:
        client: The destination cluster.
        clock: Time.
        transactional_id: Returns the transactional ID of a partition's lease.
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

    def acquire(self, partition: TopicPartition, first: int) -> GapLease | None:
        """Acquire the lease on a partition, or confirm it; waits if another process holds it.

        Args:
            partition: A partition of the destination.
            first: Its log end offset, where the gap begins.

        Returns:
            The lease. None if the brokers do not support leases (before Apache Kafka 3.0): then two
            running processes can fill the same gap.

        Raises:
            PositionMovedError: Another process continues the replica.
            UsageError: No permission to use the transactional ID.
            UnavailableError: No coordinator responded within the budget.
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
                held.lease.check()
            except FencedError as error:
                del self._held[partition]
                raise _moved(error) from error
            held.confirmed_ms = now_ms
        return GapLease(held.since_ms, held.confirmed_ms + SEND_DEADLINE_MS)

    def release(self) -> None:
        """Release all leases; one that cannot be released times out for its next owner."""
        held, self._held = self._held, {}
        for each in held.values():
            with contextlib.suppress(LogmirrorError):
                each.lease.release()

    def _take(self, partition: TopicPartition, first: int) -> _Held:
        lease = self._client.lease(self._transactional_id(partition))
        owner = lease.owner()
        if owner is not None and owner.is_holding:
            until_ms = self._clock.monotonic_ms() + LEASE_TIMEOUT_MS
            while (now := lease.owner()) == owner and self._clock.monotonic_ms() < until_ms:
                self._check_end(partition, first)
                self._clock.sleep_ms(_POLL_MS)
            if now != owner and now is not None and now.is_holding:
                raise _moved()
            owner = now
        asked_ms = self._clock.monotonic_ms()
        if not lease.acquire(owner):
            self._clock.sleep_ms(QUIESCE_MS)
        return _Held(lease, self._clock.monotonic_ms(), asked_ms)

    def _check_end(self, partition: TopicPartition, first: int) -> None:
        found = self._client.log_ends([partition])[partition].end_offset
        if found != first:
            raise _moved(expected=first, found=found)


def _moved(error: FencedError | None = None, **facts: object) -> PositionMovedError:
    return PositionMovedError(
        "another process fills the offset gaps of this replica",
        hint="run one mirror per replica; the position is read again",
        **(error.facts if error else facts),
    )
