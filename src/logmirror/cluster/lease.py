"""A lease: a right that one process has at a time, by a transactional ID of the cluster.

No transaction is begun. InitProducerId acquires the ID from its owner; DescribeTransactions reports
whether it still belongs to this process. A released lease is marked by the transaction timeout of
the ID, because a cluster stores nothing else with an ID.

Invariants:
1. `acquire` takes the lease from its owner, dead or alive. That owner finds out at its next
`check`,
   and not before. So what it does after a `check` must have a deadline, and the new owner waits for
   as long.
2. `release` has no effect if another process has acquired the lease: a broker compares the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeTransactionsRequest,
)
from kafka.protocol.producer import (  # type: ignore[import-untyped]  # ships no py.typed
    InitProducerIdRequest,
)

from logmirror.cluster.coordinators import TRANSACTION, Coordinator
from logmirror.errors import FencedError, InternalError
from logmirror.wire.messages import (
    DESCRIBE_TRANSACTIONS,
    TRANSACTIONAL_ID_NOT_FOUND,
    api_error,
)

if TYPE_CHECKING:
    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router

_HELD_MS: Final = 60_000
_RELEASED_MS: Final = 1
"""Transaction timeouts that mark the two states of a lease."""

_COMPARING_VERSION: Final = 3
"""The first InitProducerId that compares the epoch (KIP-360, Apache Kafka 2.5)."""


class Owner(NamedTuple):
    """The owner of a lease, or the last one."""

    producer_id: int
    producer_epoch: int
    is_holding: bool
    """False if it has released the lease."""


class Lease:
    """One lease. Not thread-safe.

    Args:
        router: The cluster; see `ClusterClient.lease`.
        transactional_id: An ID that is used for nothing else.
    """

    def __init__(self, router: Router, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self._coordinator = Coordinator(router, transactional_id, TRANSACTION)
        self._own: Owner | None = None

    @property
    def own(self) -> Owner | None:
        """This process as the owner; None: the lease was not acquired, or is released."""
        return self._own

    def resume(self, own: Owner) -> None:
        """Continue a lease that another object of the same flow has acquired; sends no request.

        Args:
            own: Its `own`; `check` compares it with the cluster's owner.
        """
        self._own = own

    @staticmethod
    def is_offered(versions: dict[int, tuple[int, int]]) -> bool:
        """Whether a broker with these API versions supports leases (Apache Kafka 3.0)."""
        return (
            DESCRIBE_TRANSACTIONS in versions
            and versions.get(InitProducerIdRequest.API_KEY, (0, -1))[1] >= _COMPARING_VERSION
        )

    def owner(self) -> Owner | None:
        """The owner; None if there was none, or the cluster has expired the ID.

        Raises:
            UsageError: Not allowed.
            UnavailableError: No coordinator responded within the budget.
        """

        def attempt(connection: Connection) -> Owner | None:
            request = DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
            (found,) = connection.call(request).transaction_states
            if found.error_code == TRANSACTIONAL_ID_NOT_FOUND:
                return None
            _check(found, "could not look up the owner of a lease")
            is_holding = int(found.transaction_timeout_ms) != _RELEASED_MS
            return Owner(int(found.producer_id), int(found.producer_epoch), is_holding)

        found: Owner | None = self._run(attempt, "could not look up the owner of a lease")
        return found

    def acquire(self, last: Owner | None) -> bool:
        """Acquire the lease, also from a live owner.

        Args:
            last: The last result of `owner`.

        Returns:
            Whether the lease was free. If False, another process may still act on its last `check`
            or `acquire`.

        Raises:
            UsageError: Not allowed.
            UnavailableError: No coordinator responded within the budget; it may have been acquired.
        """
        own = self._own = self._init(_HELD_MS, (-1, -1))
        if last is None:
            return own.producer_epoch == 0
        follows = (last.producer_id, last.producer_epoch + 1)
        return not last.is_holding and (own.producer_id, own.producer_epoch) == follows

    def check(self) -> None:
        """Make sure that this process still holds the lease.

        Raises:
            FencedError: Another process has acquired it.
            UnavailableError: No coordinator responded within the budget.
        """
        if self._own is None:
            raise InternalError("a lease was checked before it was acquired")
        if self.owner() != self._own:
            raise FencedError(
                "another process has acquired the lease",
                transactional_id=self.transactional_id,
            )

    def release(self) -> None:
        """Release the lease, so that the next owner need not wait.

        Nothing that needs the lease may be in flight.

        Raises:
            FencedError: Another process has acquired it.
            UnavailableError: No coordinator responded within the budget; it may have been released.
        """
        own, self._own = self._own, None
        if own is not None:
            self._init(_RELEASED_MS, (own.producer_id, own.producer_epoch))

    def _init(self, timeout_ms: int, expected: tuple[int, int]) -> Owner:
        def attempt(connection: Connection) -> Owner:
            request = InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=expected[0],
                producer_epoch=expected[1],
            )
            response = connection.call(request, low=_COMPARING_VERSION)
            _check(response, "could not acquire the lease")
            is_holding = timeout_ms != _RELEASED_MS
            return Owner(int(response.producer_id), int(response.producer_epoch), is_holding)

        owner: Owner = self._run(attempt, "could not acquire the lease")
        return owner

    def _run(self, attempt: Any, action: str) -> Any:  # noqa: ANN401  # whatever the attempt returns
        return self._coordinator.run(attempt, action, transactional_id=self.transactional_id)


def _check(response: Any, action: str) -> None:  # noqa: ANN401  # untyped library
    if response.error_code:
        raise api_error(response.error_code, action=action)
