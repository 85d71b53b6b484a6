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
   which is longer than an owner may wait by rule 2. Each further owner makes the wait twice as
   long. So two running processes cannot take it from each other forever.
4. The lease is released when a slice ends, with nothing in flight. The next owner does not wait.
5. Nothing waits here. `acquire` returns a `Hold`: the slice ends, the driver makes the flow wait,
   reads the log end again, and hands the hold to the flow's next slice. Other flows do not wait.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.cluster.lease import Owner
from logmirror.errors import FencedError, LogmirrorError, PositionMovedError
from logmirror.mirror.ports import Hold
from logmirror.to_kafka.idempotence import QUIESCE_MS, SEND_DEADLINE_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.lease import Lease
    from logmirror.model import TopicPartition

LEASE_TIMEOUT_MS: Final = QUIESCE_MS + 2_500
_TIMEOUT_MS_MAX: Final = 8 * LEASE_TIMEOUT_MS
_CONFIRM_EVERY_MS: Final = SEND_DEADLINE_MS // 3


class GapLease(NamedTuple):
    """The period in which the owner may send markers; monotonic times."""

    since_ms: int
    """When the markers of other processes could no longer arrive."""
    until_ms: int | None
    """The deadline for sending markers. None: there is none."""


_UNOFFERED: Final = GapLease(sys.maxsize, None)


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

    def acquire(self, partition: TopicPartition, hold: Hold | None = None) -> GapLease | Hold:
        """Acquire the lease on a partition, or confirm it.

        Args:
            partition: A partition of the destination.
            hold: The hold with which the flow's previous slice ended, if the wait is over and the
                log has not moved since. None otherwise.

        Returns:
            The lease; or a hold if another process may still act on its lease. If the brokers do
            not support leases (before Apache Kafka 3.0), the lease has no deadline: then two
            running processes can fill the same gap.

        Raises:
            PositionMovedError: Another process continues the replica.
            UsageError: No permission to use the transactional ID.
            UnavailableError: No coordinator responded within the budget.
        """
        if self._is_offered is None:
            self._is_offered = self._client.has_leases()
        if not self._is_offered:
            return _UNOFFERED
        held = self._held.get(partition)
        if held is None:
            taken = self._take(partition, hold)
            if isinstance(taken, Hold):
                return taken
            held = self._held[partition] = taken
        now_ms = self._clock.monotonic_ms()
        if now_ms > held.confirmed_ms + _CONFIRM_EVERY_MS:
            try:
                held.lease.check()
            except FencedError as error:
                del self._held[partition]
                raise _moved(error) from error
            held.confirmed_ms = now_ms
        return GapLease(held.since_ms, held.confirmed_ms + SEND_DEADLINE_MS)

    def hold(self, partition: TopicPartition) -> Hold:
        """Keep the lease while a request of this process may still arrive: it is not released."""
        held = self._held.pop(partition, None)
        return Hold(wait_ms=QUIESCE_MS, owner=held.lease.own if held else None, is_own=True)

    def release(self) -> None:
        """Release all leases; one that cannot be released times out for its next owner."""
        held, self._held = self._held, {}
        for each in held.values():
            with contextlib.suppress(LogmirrorError):
                each.lease.release()

    def _take(self, partition: TopicPartition, hold: Hold | None) -> _Held | Hold:
        lease = self._client.lease(self._transactional_id(partition))
        asked_ms = self._clock.monotonic_ms()
        owner = lease.owner()
        seen = Owner(*hold.owner) if hold and hold.owner else None
        if owner is not None and owner == seen and hold and hold.is_own:
            lease.resume(owner)
            return _Held(lease, self._clock.monotonic_ms(), asked_ms)
        if owner is not None and owner.is_holding and owner != seen:
            wait_ms = min(2 * hold.wait_ms, _TIMEOUT_MS_MAX) if seen and hold else LEASE_TIMEOUT_MS
            return Hold(wait_ms=max(wait_ms, LEASE_TIMEOUT_MS), owner=owner, is_own=False)
        asked_ms = self._clock.monotonic_ms()
        if lease.acquire(owner):
            return _Held(lease, self._clock.monotonic_ms(), asked_ms)
        return Hold(wait_ms=QUIESCE_MS, owner=lease.own, is_own=True)


def _moved(error: FencedError | None = None, **facts: object) -> PositionMovedError:
    return PositionMovedError(
        "another process fills the offset gaps of this replica",
        hint="run one mirror per replica; the position is read again",
        **(error.facts if error else facts),
    )
