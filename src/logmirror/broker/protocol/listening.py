"""The broker's listeners: checks them, binds them, and accepts connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from logmirror.broker.options import BrokerOptions, ClientAuth, Listener, SecurityProtocol
from logmirror.broker.protocol.admission import Endpoint
from logmirror.broker.protocol.connection import Connection
from logmirror.broker.protocol.tls_listener import TlsListener
from logmirror.broker.security.sasl import MECHANISMS, PLAIN
from logmirror.broker.security.tls import server_context
from logmirror.errors import LogmirrorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.broker.protocol.connections import Connections

_LOG: Final = logging.getLogger(__name__)
_BACKLOG: Final = 512
_PRINCIPAL: Final = "User:"


class Bound(NamedTuple):
    """A listener with its socket."""

    host: str
    port: int
    socket: socket.socket
    endpoint: Endpoint


class Accepting(Protocol):
    """A listener that accepts connections."""

    def close(self) -> None:
        """Accept no more connections."""


@contextlib.contextmanager
def bound_listeners(options: BrokerOptions) -> Iterator[list[Bound]]:
    """Check and bind all listeners. None of them accepts connections yet.

    Raises:
        UsageError: A setting contradicts another, an address cannot be bound, or clients of other
            hosts would not be authenticated.
    """
    _check(options)
    with contextlib.ExitStack() as sockets:
        found = []
        for listener in options.all_listeners:
            bound = sockets.enter_context(_bound_socket(listener))
            host, port = bound.getsockname()[:2]
            _check_anonymous(options, listener, host, port)
            endpoint = _endpoint(options, listener, host, port)
            found.append(Bound(host, port, bound, endpoint))
        yield found


async def accept(bound: Bound, connections: Connections) -> Accepting:
    """Accept the connections of one listener."""
    if bound.endpoint.tls is not None:
        bound.socket.setblocking(False)
        bound.socket.listen(_BACKLOG)
        return TlsListener(bound.socket, bound.endpoint, connections)
    return await asyncio.get_running_loop().create_server(
        lambda: Connection(connections, bound.endpoint), sock=bound.socket, backlog=_BACKLOG
    )


async def close_removed(connections: Connections) -> None:
    """Close the connections of users that were removed."""
    broker = connections.broker
    if all(connection.user is None for connection in connections.open):
        return
    loop = asyncio.get_running_loop()
    try:
        users = await loop.run_in_executor(broker.executor, broker.security.users_if_changed)
    except LogmirrorError:
        _LOG.exception("users could not be read")
        return
    if users is None:
        return
    for connection in tuple(connections.open):
        if connection.user is not None and connection.user not in users:
            connection.close("user was removed")


def _check(options: BrokerOptions) -> None:
    names = [listener.name for listener in options.all_listeners]
    if len(set(names)) < len(names):
        raise UsageError(
            "two listeners have the same name",
            hint="write --listener NAME=PROTOCOL://HOST:PORT with a name for each",
            names=names,
        )
    if unknown := set(options.sasl_mechanisms) - set(MECHANISMS):
        raise UsageError(
            "SASL mechanism not supported", unknown=sorted(unknown), supported=MECHANISMS
        )
    if wrong := [user for user in options.super_users if not user.removeprefix(_PRINCIPAL)]:
        raise UsageError("a super user without a name", hint="write User:NAME", names=wrong)
    if wrong := [user for user in options.super_users if not user.startswith(_PRINCIPAL)]:
        raise UsageError("not a principal", hint="write User:NAME", names=wrong)


@contextlib.contextmanager
def _bound_socket(listener: Listener) -> Iterator[socket.socket]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise UsageError(
            "cannot listen on this address",
            hint="give another address with --listen; port 0 lets the system choose",
            host=listener.host,
            port=listener.port,
            cause=str(error),
        ) from error
    with bound:
        yield bound


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _check_anonymous(options: BrokerOptions, listener: Listener, host: str, port: int) -> None:
    """Refuse, or warn of, a listener that any host can use."""
    shows_certificate = options.tls_client_auth == ClientAuth.REQUIRED
    is_authenticated = listener.protocol.has_sasl or (
        listener.protocol == SecurityProtocol.SSL and shows_certificate
    )
    if is_authenticated or _is_loopback(host):
        return
    if not options.allow_anonymous:
        raise UsageError(
            "clients of this listener would not be authenticated, and other hosts can reach it",
            hint="listen on 127.0.0.1, authenticate clients (--listener SASL_SSL://HOST:PORT, or "
            "SSL with --tls-client-auth required), or accept it with --allow-anonymous",
            listener=listener.name,
            protocol=str(listener.protocol),
            host=host,
            port=port,
        )
    what = (
        "is subject to the ACLs of User:ANONYMOUS"
        if options.super_users
        else ("can read, write and delete all topics")
    )
    _LOG.warning(
        "clients are not authenticated: every host that reaches %s:%d %s", host, port, what
    )


def _endpoint(options: BrokerOptions, listener: Listener, host: str, port: int) -> Endpoint:
    protocol = listener.protocol
    mechanisms: tuple[str, ...] = ()
    if protocol.has_sasl:
        shows_password = not (protocol.has_tls or _is_loopback(host))
        mechanisms = options.sasl_mechanisms or tuple(
            name for name in MECHANISMS if name != PLAIN or not shows_password
        )
        if shows_password and PLAIN in mechanisms:
            _LOG.warning("listener %s: passwords of PLAIN are sent unencrypted", listener.name)
    client_auth = ClientAuth.NONE
    if protocol == SecurityProtocol.SSL:
        client_auth = options.tls_client_auth
    return Endpoint(
        name=listener.name,
        advertised=(listener.advertised_host, listener.advertised_port or port),
        tls=server_context(options, client_auth) if protocol.has_tls else None,
        mechanisms=mechanisms,
    )
