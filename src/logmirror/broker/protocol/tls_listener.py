"""Accepts the connections of a listener with TLS.

A connection counts from the moment it is accepted, so that those whose handshake is not complete
are limited like all others. The handshake has the deadline of authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.protocol.connection import Connection
from logmirror.broker.protocol.connection_limits import client_address

if TYPE_CHECKING:
    import socket

    from logmirror.broker.protocol.admission import Endpoint
    from logmirror.broker.protocol.connections import Connections

_LOG: Final = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S: Final = 1.0
_NO_FILES_PAUSE_S: Final = 0.1


class TlsListener:
    """One listener. It accepts from its creation until `close`.

    Args:
        listener: A socket that listens and does not block.
        endpoint: Its TLS context, and how clients log in.
        connections: The connections of the broker.
    """

    def __init__(
        self, listener: socket.socket, endpoint: Endpoint, connections: Connections
    ) -> None:
        self._listener = listener
        self._endpoint = endpoint
        self._all = connections
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and end those whose handshake is not complete."""
        self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _LOG.warning("listener %s: cannot accept: %s", self._endpoint.name, error)
                await asyncio.sleep(_NO_FILES_PAUSE_S)
                continue
            address = client_address(peer)
            reason = self._all.refusal(address, must_log_in=True)
            if reason:
                _LOG.info("%s: closed: %s", peer, reason)
                accepted.close()
                continue
            connection = Connection(self._all, self._endpoint)
            connection.count(address)
            task = self._loop.create_task(self._encrypt(accepted, connection, str(peer)))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _encrypt(self, accepted: socket.socket, connection: Connection, peer: str) -> None:
        timeout_s = self._all.broker.options.authentication_timeout_ms / 1000
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._endpoint.tls,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_CLOSE_TIMEOUT_S,
            )
        except (OSError, ValueError, EOFError) as error:  # ssl.SSLError is an OSError
            _LOG.info("%s, listener %s: no TLS: %s", peer, self._endpoint.name, error)
        finally:
            if not connection.is_made:
                self._all.closed(connection, 0)
                with contextlib.suppress(OSError):
                    accepted.close()
