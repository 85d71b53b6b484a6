"""A right that one process has at a time, known to the cluster by a transactional id.

No transaction is ever begun. InitProducerId takes the id from whoever had it; DescribeTransactions
tells whether it is still ours. That somebody gave it back is said by the transaction timeout that
the id then has, for nothing else is kept with an id.

Invariants:
1. `take` takes it from the owner, alive or not. That owner learns so at its next `confirm`, and not
   before: what it does until then on the strength of its last one must have a deadline, and who
   took the right from somebody waits as long.
2. `give_back` changes nothing for somebody who took it in between: a broker compares the epoch.
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
_GIVEN_BACK_MS: Final = 1
"""Transaction timeouts by which the two states of an id are told apart."""

_COMPARING_VERSION: Final = 3
"""The first InitProducerId that compares the epoch (KIP-360, Apache Kafka 2.5)."""


class Owner(NamedTuple):
    """Who has a right, or had it last."""

    producer_id: int
    producer_epoch: int
    is_holding: bool
    """False: it was given back."""


class Lease:
    """One right. Not thread-safe.

    Args:
        router: Of the cluster; see `ClusterClient.fence`.
        transactional_id: Used for nothing else.
    """

    def __init__(self, router: Router, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self._coordinator = Coordinator(router, transactional_id, TRANSACTION)
        self._own: Owner | None = None

    @staticmethod
    def is_offered(versions: dict[int, tuple[int, int]]) -> bool:
        """Whether a broker with these API versions knows all that is needed (Kafka 3.0)."""
        return (
            DESCRIBE_TRANSACTIONS in versions
            and versions.get(InitProducerIdRequest.API_KEY, (0, -1))[1] >= _COMPARING_VERSION
        )

    def owner(self) -> Owner | None:
        """Who has it; None: nobody ever had, or so long ago that the cluster has forgotten.

        Raises:
            UsageError: Not allowed.
            UnavailableError: No coordinator answered within the budget.
        """

        def attempt(connection: Connection) -> Owner | None:
            request = DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
            (found,) = connection.call(request).transaction_states
            if found.error_code == TRANSACTIONAL_ID_NOT_FOUND:
                return None
            _check(found, "could not look up an owner")
            is_holding = int(found.transaction_timeout_ms) != _GIVEN_BACK_MS
            return Owner(int(found.producer_id), int(found.producer_epoch), is_holding)

        found: Owner | None = self._run(attempt, "could not look up an owner")
        return found

    def take(self, seen: Owner | None) -> bool:
        """Take it from whoever has it.

        Args:
            seen: What `owner` said last.

        Returns:
            Whether it was free until we took it. False: somebody may still act on a `confirm` from
            before, or on another `take`.

        Raises:
            UsageError: Not allowed.
            UnavailableError: No coordinator did it within the budget; it may have been done.
        """
        own = self._own = self._init(_HELD_MS, (-1, -1))
        if seen is None:
            return own.producer_epoch == 0
        follows = (seen.producer_id, seen.producer_epoch + 1)
        return not seen.is_holding and (own.producer_id, own.producer_epoch) == follows

    def confirm(self) -> None:
        """Make sure that it is still ours.

        Raises:
            FencedError: Somebody else has taken it.
            UnavailableError: No coordinator answered within the budget.
        """
        if self._own is None:
            raise InternalError("a right was confirmed before it was taken")
        if self.owner() != self._own:
            raise FencedError(
                "another process has taken the right to write",
                transactional_id=self.transactional_id,
            )

    def give_back(self) -> None:
        """Let the next one have it at once; nothing that needs it may be on its way.

        Raises:
            FencedError: Somebody else has taken it.
            UnavailableError: No coordinator did it within the budget; it may have been done.
        """
        own, self._own = self._own, None
        if own is not None:
            self._init(_GIVEN_BACK_MS, (own.producer_id, own.producer_epoch))

    def _init(self, timeout_ms: int, expected: tuple[int, int]) -> Owner:
        def attempt(connection: Connection) -> Owner:
            request = InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=expected[0],
                producer_epoch=expected[1],
            )
            response = connection.call(request, low=_COMPARING_VERSION)
            _check(response, "could not take the right to write")
            is_holding = timeout_ms != _GIVEN_BACK_MS
            return Owner(int(response.producer_id), int(response.producer_epoch), is_holding)

        taken: Owner = self._run(attempt, "could not take the right to write")
        return taken

    def _run(self, attempt: Any, action: str) -> Any:  # noqa: ANN401  # whatever the attempt returns
        return self._coordinator.run(attempt, action, transactional_id=self.transactional_id)


def _check(answer: Any, action: str) -> None:  # noqa: ANN401  # untyped library
    if answer.error_code:
        raise api_error(answer.error_code, action=action)
