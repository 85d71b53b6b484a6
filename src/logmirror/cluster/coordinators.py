"""The coordinator of a group or a transactional ID, looked up again when it moves.

Invariants:
1. A response that the coordinator has moved, is loading or is unavailable, and a connection
failure,
   cause a new lookup before the next attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kafka.protocol.metadata import (  # type: ignore[import-untyped]  # ships no py.typed
    FindCoordinatorRequest,
)

from logmirror.cluster.retry import Retrier
from logmirror.errors import LogmirrorError
from logmirror.wire.messages import (
    COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR,
    api_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router

GROUP: Final = 0
TRANSACTION: Final = 1

_VERSION_MIN: Final = 1
"""The first version with transactions."""
_VERSION_MAX: Final = 3
"""The last version for one key; later ones are for many."""

_T = TypeVar("_T")


class Coordinator:
    """The broker that coordinates one key. Not thread-safe.

    Args:
        router: The router of the cluster.
        key: A group or a transactional ID.
        kind: `GROUP` or `TRANSACTION`.
    """

    def __init__(self, router: Router, key: str, kind: int) -> None:
        self._router = router
        self._key = key
        self._kind = kind
        self._address: tuple[str, int] | None = None
        # Leader metadata is not what may be out of date here.
        self._retry = Retrier(router.settings, router.clock, lambda: None)

    def run(self, attempt: Callable[[Connection], _T], action: str, **facts: object) -> _T:
        """Call `attempt` with a connection to the coordinator until it succeeds.

        Args:
            attempt: An idempotent operation.
            action: The start of error messages, such as "could not end the transaction".
            facts: Added to every error.

        Raises:
            UnavailableError: The budget is used up; its facts are those of the last error.
            LogmirrorError: The first error that is not retriable.
        """

        def once() -> _T:
            try:
                return attempt(self._connection())
            except LogmirrorError as error:
                if error.facts.get("code") in (None, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR):
                    self._address = None
                raise

        return self._retry.run(once, action, missing_grace_ms=0, writes=False, **facts)

    def _connection(self) -> Connection:
        topology = self._router.topology
        if self._address is None:
            request = FindCoordinatorRequest(key=self._key, key_type=self._kind)
            response = topology.any_connection().call(request, low=_VERSION_MIN, high=_VERSION_MAX)
            if response.error_code:
                raise api_error(response.error_code, action="could not find the coordinator")
            self._address = (response.host, response.port)
        return topology.connection_at(*self._address)
