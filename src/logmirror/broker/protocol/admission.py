"""What a client may do before it is authenticated: ask for the versions, and log in.

    SaslHandshake (17)     names the mechanism; version 0 is followed by tokens without headers
    SaslAuthenticate (36)  carries a token; SCRAM takes two, PLAIN one

Any other request ends the connection, as in Apache Kafka, and so does a second handshake. A login
that fails gets one error, whatever the reason; the response is delayed, and closes the connection.
The reason is logged. Tokens and passwords are in no log and no error.

With `max_session_ms` a login has an end (KIP-368). Before or after it, a client may log in again on
its connection: as the same user, by the same mechanism.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.protocol.dispatch import check_responded
from logmirror.broker.protocol.dispatch import response as dispatched
from logmirror.broker.security.authorization import ANONYMOUS
from logmirror.broker.security.sasl import Login
from logmirror.broker.security.scram import RefusedLoginError
from logmirror.broker.security.tls import subject_name
from logmirror.errors import LogmirrorError
from logmirror.wire.frames import RemoteProtocolError, RequestHeader, read_header
from logmirror.wire.serve_messages import read_request, response_kind

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.protocol.connection_limits import FailedLogins

_LOG: Final = logging.getLogger(__name__)
_MAX_REQUESTS: Final = 16
"""Requests before a client is authenticated; a login takes four."""

_LEAST_PAUSE_MS: Final = 1000
"""Between the beginnings of two logins of a connection, as in Apache Kafka."""

_FAILED: Final = "authentication failed"


class Endpoint(NamedTuple):
    """A listener that is bound."""

    name: str
    advertised: tuple[str, int]
    """Host and port in responses; an empty host stands for the one that the client reached."""

    tls: ssl.SSLContext | None
    mechanisms: tuple[str, ...]
    """The mechanisms that it offers; empty: clients do not log in."""

    @property
    def has_sasl(self) -> bool:
        """Whether clients must log in."""
        return bool(self.mechanisms)

    def principal(self, transport: asyncio.BaseTransport) -> str:
        """Return the principal of a new connection: that of the client's certificate, if any."""
        secured = transport.get_extra_info("ssl_object")
        certificate = None if secured is None else secured.getpeercert(binary_form=True)
        return f"User:{subject_name(certificate)}" if certificate else ANONYMOUS


class Admission:
    """One login of a connection: the state before its client is authenticated.

    Args:
        broker: The broker.
        caller: The client.
        endpoint: The listener.
        failed: The logins that have failed lately.
        began_ms: When it began, on the clock of the event loop.
        before: The login that it repeats, if any.

    Attributes:
        is_raw: Whether the next frame is a token without a header.
        has_failed: Whether the connection ends after the response.
        user: The user's name, once the client has proven it.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the connection, and what all connections share
        self,
        broker: Broker,
        caller: Caller,
        endpoint: Endpoint,
        failed: FailedLogins,
        began_ms: float,
        before: Admission | None = None,
    ) -> None:
        self._began_ms = began_ms
        self._before = before
        self._mechanism = ""
        self._ends_ms = math.inf
        self._broker = broker
        self._caller = caller
        self._endpoint = endpoint
        self._failed = failed
        self._login: Login | None = None
        self._requests = 0
        self.is_raw = False
        self.has_failed = False
        self.user: str | None = None

    def is_overdue(self, now_ms: float) -> bool:
        """Whether it should be complete."""
        return now_ms - self._began_ms > self._broker.options.authentication_timeout_ms

    def is_over(self, now_ms: float) -> bool:
        """Whether the session that it began has ended."""
        return now_ms > self._ends_ms

    def repeated(self, now_ms: float) -> Admission | None:
        """Return a new login of the connection; None if its session has no end, or is too young."""
        if self._ends_ms == math.inf or now_ms - self._began_ms < _LEAST_PAUSE_MS:
            return None
        parts = self._broker, self._caller, self._endpoint, self._failed
        return Admission(*parts, now_ms, self)

    def response(self, frame: memoryview) -> bytes | Coroutine[None, None, bytes | None]:
        """Handle one frame; returns the response, or a coroutine for it.

        The coroutine returns None if the connection ends without a response.

        Raises:
            RemoteProtocolError: The request is malformed, or not allowed now.
        """
        self._requests += 1
        if self._requests > _MAX_REQUESTS:
            raise RemoteProtocolError("too many requests before authentication")
        if self.is_raw and self._login is not None:
            return self._raw_token(self._login, bytes(frame))
        header = read_header(frame)
        if header.api_key == Api.API_VERSIONS:
            found = dispatched(self._broker, header, frame, self._caller)
            assert isinstance(found, bytes)  # noqa: S101  # this handler does not wait
            return found
        if header.api_key == Api.SASL_HANDSHAKE and self._login is None:
            return self._handshake(header, frame)
        if header.api_key == Api.SASL_AUTHENTICATE and self._login is not None:
            check_responded(header)
            token = read_request(frame, header.api_key, header.version).auth_bytes
            return self._token(header, self._login, token)
        raise RemoteProtocolError("request before authentication", api_key=header.api_key)

    def _handshake(self, header: RequestHeader, frame: memoryview) -> bytes:
        check_responded(header)
        mechanism = read_request(frame, header.api_key, header.version).mechanism
        code = ErrorCode.NONE
        is_changed = self._before is not None and mechanism != self._before._mechanism  # noqa: SLF001  # its own kind
        if mechanism in self._endpoint.mechanisms and not is_changed:
            self._mechanism = mechanism
            self._login = Login(mechanism, self._broker.security)
            self.is_raw = header.version == 0
        else:
            code = ErrorCode.UNSUPPORTED_SASL_MECHANISM
            self.has_failed = True
        return response_kind(Api.SASL_HANDSHAKE, header.version).frame(
            header.correlation_id, error_code=code, mechanisms=self._endpoint.mechanisms
        )

    async def _token(self, header: RequestHeader, login: Login, token: bytes) -> bytes:
        found = await self._step(login, token)
        return response_kind(Api.SASL_AUTHENTICATE, header.version).frame(
            header.correlation_id,
            error_code=ErrorCode.SASL_AUTHENTICATION_FAILED if found is None else ErrorCode.NONE,
            error_message=_FAILED if found is None else None,
            auth_bytes=found or b"",
            session_lifetime_ms=self._broker.options.max_session_ms if self.user else 0,
        )

    async def _raw_token(self, login: Login, token: bytes) -> bytes | None:
        found = await self._step(login, token)
        self.is_raw = self.user is None
        return None if found is None else len(found).to_bytes(4) + found

    async def _step(self, login: Login, token: bytes) -> bytes | None:
        """Return the next token; None, after a delay, if the login has failed."""
        loop = asyncio.get_running_loop()
        address = self._caller.client_host
        try:
            async with self._broker.load.logins:
                step = await loop.run_in_executor(self._broker.executor, login.step, token)
            if self._before is not None and step.user not in {None, self._before.user}:
                raise RefusedLoginError("another user than before")  # noqa: TRY301  # as other refusals
        except RefusedLoginError as refused:
            _LOG.warning(
                "%s, listener %s: authentication failed: %s",
                address,
                self._endpoint.name,
                refused.reason,
            )
        except LogmirrorError:
            _LOG.exception("%s: a login could not be checked", address)
        else:
            self.user = step.user
            if lifetime_ms := self._broker.options.max_session_ms:
                self._ends_ms = loop.time() * 1000 + lifetime_ms
            if self._before is not None and self.user is not None:
                _LOG.info("%s, listener %s: login repeated", address, self._endpoint.name)
            return step.token
        self.has_failed = True
        await asyncio.sleep(self._failed.delay_ms(address, loop.time() * 1000) / 1000)
        return None
