"""Who coordinates a group or a transactional id, followed when it moves.

Invariants:
1. An answer that says that the coordinator has moved, is loading or is not there, and a connection
   that fails, make it looked up anew before the next attempt.
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
"""The first that knows transactions."""
_VERSION_MAX: Final = 3
"""The last that asks for one key; later ones ask for many."""

_T = TypeVar("_T")


class Coordinator:
    """The broker that coordinates one key. Not thread-safe.

    Args:
        router: Of the cluster.
        key: A group or a transactional id.
        kind: `GROUP` or `TRANSACTION`.
    """

    def __init__(self, router: Router, key: str, kind: int) -> None:
        self._router = router
        self._key = key
        self._kind = kind
        self._address: tuple[str, int] | None = None
        # Leaders are not what may be out of date here.
        self._retry = Retrier(router.settings, router.clock, lambda: None)

    def run(self, attempt: Callable[[Connection], _T], action: str, **facts: object) -> _T:
        """Call `attempt` with a connection to the coordinator until it succeeds.

        Args:
            attempt: Something that can be repeated without doing it twice.
            action: Fits before " within": "could not end the transaction".
            facts: Added to every error.

        Raises:
            UnavailableError: The budget is used up; facts tell the last cause.
            LogmirrorError: The first error that does not pass.
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
