"""Lost responses, and requests that a broker reads long after they were sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logmirror.cluster.connection import Connection
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    import pytest


class Dropping:
    """Sends the next request of a kind and drops its response.

    Attributes:
        names: Kinds whose responses are dropped, once per entry.
        seen: Kinds of all requests, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.seen: list[str] = []
        self._lost: list[tuple[str, int, Any]] = []
        call = Connection.call

        def lossy(connection: Connection, request: Any, **options: Any) -> Any:
            response = call(connection, request, **options)
            self.seen.append(request.name)
            if request.name in self.names:
                self.names.remove(request.name)
                self._lost.append((connection.host, connection.port, request))
                connection.close()
                raise UnavailableError("the response was dropped")
            return response

        monkeypatch.setattr(Connection, "call", lossy)

    def arrives_late(self, *, high: int) -> Any:
        """Send the dropped request again, by another connection.

        Args:
            high: The highest version.

        Returns:
            Its response.
        """
        ((host, port, request),) = self._lost
        connection = Connection(host, port, connection_settings(f"{host}:{port}"))
        response = connection.call(request, high=high)
        connection.close()
        return response
