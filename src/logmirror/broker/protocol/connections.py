"""The connections of a broker and their common limits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol

from logmirror.broker.protocol.connection_limits import FailedLogins, Place, Places

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker

STOP_MS: Final = 1000
"""How long a stopping broker waits for clients to read their last responses."""


class Open(Place, Protocol):
    """A connection that counts."""

    address: str
    """The client's IP address."""

    counted_bytes: int
    """What it has of `Connections.buffered_bytes`."""

    user: str | None
    """The name of the user that has logged in. None without SASL."""

    def stop_appending(self) -> None:
        """Cancel a Produce request of which not all batches are appended."""

    def overdue(self, now_ms: float) -> str:
        """Return the reason for closing a connection that exceeded a timeout; else empty."""

    def finish(self) -> None:
        """Close the connection once its responses are sent."""

    def close(self, reason: str) -> None:
        """Close the connection now; unsent responses are dropped."""


class Connections:
    """The connections, and what they have in common."""

    def __init__(self, broker: Broker, max_connections: int) -> None:
        self.broker = broker
        self.open: set[Open] = set()
        self.buffered_bytes = 0
        self.swept_ms = broker.clock.monotonic_ms()
        self.is_stopping = False
        options = broker.options
        self.failed_logins = FailedLogins(
            options.failed_authentication_delay_ms, options.max_failed_authentication_delay_ms
        )
        self._all_closed = asyncio.Event()
        self._places = Places(max_connections, options.max_connections_per_address)

    def refusal(self, address: str, *, must_log_in: bool) -> str:
        """Return the reason why one more connection of an address is refused; else empty.

        Called once for each connection.
        """
        reason = self._places.refusal(address, self.open, must_log_in=must_log_in)
        quotas = self.broker.quotas
        if not reason and quotas.has_connections:
            now_ms = asyncio.get_running_loop().time() * 1000
            if not quotas.may_connect(address, now_ms):
                return "too many new connections of this address"
        return reason

    def opened(self, connection: Open) -> None:
        """Count a connection."""
        self.open.add(connection)
        self._places.take(connection.address)

    def closed(self, connection: Open, buffered_bytes: int) -> None:
        """Remove a connection and its buffered bytes from the totals."""
        self.buffered_bytes -= buffered_bytes
        if connection in self.open:
            self.open.remove(connection)
            self._places.free(connection.address)
        if self.is_stopping and not self.open:
            self._all_closed.set()

    async def stop(self) -> None:
        """Accept no more requests, send pending responses for up to `STOP_MS`, and close."""
        self.is_stopping = True
        for connection in tuple(self.open):
            connection.stop_appending()
        await self.broker.commits.drain()
        for connection in tuple(self.open):
            connection.finish()
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), STOP_MS / 1000)
        for connection in tuple(self.open):
            connection.close("broker is stopping")

    def close_largest(self) -> None:
        """Close the connection with the largest incomplete request."""
        if self.buffered_bytes > self.broker.options.max_buffered_bytes and self.open:
            largest = max(self.open, key=lambda connection: connection.counted_bytes)
            largest.close("incomplete requests of all connections exceed the limit")

    def sweep(self, now_ms: float) -> None:
        """Close the connections that exceeded a timeout."""
        self.swept_ms = self.broker.clock.monotonic_ms()
        for connection in tuple(self.open):
            reason = connection.overdue(now_ms)
            if reason:
                connection.close(reason)
