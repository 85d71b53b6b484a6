"""One blocking connection to one broker: versions, TLS, SASL, decoded requests and fetches.

Invariants:
1. One request at a time: every response is received whole before the next request is sent. Where
   several fetches are in flight (`fetch_ahead`), their responses come in the order of the requests.
2. Every wait has a deadline, set when the operation begins (`Transport`).
3. A connection that failed during an operation is closed: a late response can never be taken for
   the response to another request.
4. A frame larger than the cap is refused before memory is allocated for it.
5. `fetch` receives the records straight into the caller's view (`fetch_receiver`).

Not thread-safe, and not usable across a fork. Decoded requests are kafka-python's classes.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.metadata import ApiVersionsRequest  # type: ignore[import-untyped]  # no py.typed
from kafka.protocol.sasl import (  # type: ignore[import-untyped]  # ships no py.typed
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)

from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.fetch_receiver import FetchReceiver
from logmirror.cluster.sasl import authenticate
from logmirror.cluster.transport import Transport
from logmirror.errors import (
    CorruptionError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.wire.fetch import (
    FETCH_VERSION_BY_ID_MIN,
    FETCH_VERSION_BY_NAME_MAX,
    FETCH_VERSION_EPOCHS_MIN,
    FETCH_VERSION_MAX,
    FETCH_VERSION_MIN,
    Asked,
    Fetched,
    FetchRequest,
    encode_fetch,
)
from logmirror.wire.messages import (
    API_VERSIONS,
    FETCH,
    UNSUPPORTED_SASL_MECHANISM,
    UNSUPPORTED_VERSION,
    api_error,
)

if TYPE_CHECKING:
    import ssl

    from logmirror.cluster.properties import ConnectionSettings

_SOFTWARE_NAME: Final = "logmirror"
_SOFTWARE_VERSION: Final = "0.1.0"
_API_VERSIONS_FIRST: Final = (4, 3, 0)
"""Tried in this order. An older broker responds in version 0, with the range it supports."""
_REAUTHENTICATE_AT: Final = 0.85
"""Fraction of the session lifetime before reauthentication, as in librdkafka and Java."""
_SCRATCH_BYTES: Final = 65_536
THROTTLE_MS_MAX: Final = 60_000
"""Longest throttle of a broker that is honoured."""
_ANY_VERSION: Final = 32_767
_SIZE_BYTES: Final = 4
_UNPROVEN_HINT: Final = (
    "check security.protocol and sasl.mechanism: a broker closes the connection without an error "
    "if they do not match the listener"
)
_UNSUPPORTED: Final = UNSUPPORTED_VERSION.to_bytes(2, "big")
_INT: Final = struct.Struct(">i")


@dataclass(slots=True)
class ResponseMemo:
    """The last response to one request that is sent again and again; see `Connection.call`."""

    body: bytearray | None = None
    response: Any = None


class Connection:
    """One connection, ready for requests: versions negotiated, authenticated.

    Args:
        host: Host name or address.
        port: The broker's port.
        settings: Security, limits, client ID.
        clock: For deadlines.
        tls: The context to use, so that many connections load certificates once; None creates one
            if the settings require TLS.

    Raises:
        UnavailableError: The broker was not reached within `connect_timeout_ms`.
        UsageError: TLS or SASL settings do not match, credentials were refused, or the broker is
            too old.
        CorruptionError: The server does not speak Kafka's protocol.
    """

    def __init__(
        self,
        host: str,
        port: int,
        settings: ConnectionSettings,
        clock: Clock = SYSTEM_CLOCK,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.closed = False
        self._proven = False
        """Whether the broker has responded to a request after the handshake."""
        self._settings = settings
        self._clock = clock
        self._client_id = settings.client_id.encode()
        self._correlation_id = 0
        self._throttled_until_ms = 0
        self._reauthenticate_at_ms: int | None = None
        self._scratch_view = memoryview(bytearray(_SCRATCH_BYTES))
        self.versions: dict[int, tuple[int, int]] = {API_VERSIONS: (0, _API_VERSIONS_FIRST[0])}
        """API key to the broker's (lowest, highest) version."""
        deadline_ms = clock.monotonic_ms() + settings.connect_timeout_ms
        self._transport = Transport(
            host, port, settings, clock=clock, tls=tls, deadline_ms=deadline_ms
        )
        try:
            self._negotiate(deadline_ms)
            if settings.uses_sasl:
                self._authenticate(deadline_ms)
        except BaseException:
            self.close()
            raise
        self._fetches = FetchReceiver(
            self._transport, self._scratch_view, settings.receive_message_max_bytes
        )
        self._fetch_by_name = self._fetch_version(FETCH_VERSION_BY_NAME_MAX)
        self._fetch_by_id = self._fetch_version(FETCH_VERSION_MAX)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Connection({self.host}:{self.port}, {state})"

    def close(self) -> None:
        """Close the socket; may be called again."""
        self.closed = True
        self._transport.close()

    def has_hung_up(self) -> bool:
        """Whether the connection is closed by either side, or broken; never waits."""
        return self.closed or self._transport.has_hung_up()

    def version_of(
        self,
        message: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = _ANY_VERSION,
    ) -> int:
        """The highest version of a kafka-python message class that both sides support.

        Raises:
            UsageError: There is none from `low` to `high`.
        """
        oldest, newest = self.versions.get(message.API_KEY, (0, -1))
        newest_here = min(message.max_version, high)
        version = min(newest, newest_here)
        if version < max(oldest, low):
            raise UsageError(
                f"the broker does not support the required version of {message.name}",
                hint="Apache Kafka 0.11 or later is required",
                host=self.host,
                port=self.port,
                broker_versions=(oldest, newest),
                our_versions=(low, newest_here),
            )
        return int(version)

    def call(  # noqa: PLR0913  # options of a request; most callers pass one or two
        self,
        request: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = _ANY_VERSION,
        wait_ms: int = 0,
        writes: bool = False,
        send_until_ms: int | None = None,
        memo: ResponseMemo | None = None,
    ) -> Any:  # noqa: ANN401  # untyped library
        """Send a kafka-python request and return its decoded response.

        The response's error codes are left to the caller.

        Args:
            request: The message, without a version: the highest common one is chosen.
            low: The lowest acceptable version.
            high: The highest acceptable version.
            wait_ms: How long the broker may wait before it responds; added to the deadline.
            writes: Whether the request changes something, so that its outcome is unknown after a
                lost response.
            send_until_ms: Monotonic deadline for the last byte of the request.
            memo: The last response to the same request. If the broker sends the same bytes, this
                returns the same object, without decoding it again.

        Raises:
            UnavailableError: No response within `socket_timeout_ms`, or the connection broke; with
                `writes`: the request was not sent. Or the send deadline had passed.
            OutcomeUnknownError: With `writes`: the request was sent and its response is lost.
            CorruptionError: The bytes are not a response to this request.
            UsageError: No common version.
        """
        version = self.version_of(type(request), low=low, high=high)
        if writes and self.has_hung_up():
            self.close()  # closed while idle: better detected before sending
        self._ready()
        deadline_ms = self._clock.monotonic_ms() + self._settings.socket_timeout_ms + wait_ms
        if send_until_ms is not None and self._clock.monotonic_ms() >= send_until_ms:
            raise UnavailableError(
                "not sent: the send deadline has passed", host=self.host, port=self.port
            )
        try:
            response = self._exchange(request, version, deadline_ms, send_until_ms, memo)
        except (UnavailableError, CorruptionError) as error:
            if not writes:
                raise
            raise OutcomeUnknownError(
                f"the response to {request.name} is lost: {error.message}",
                hint=error.hint,
                **{"host": self.host, "port": self.port, **error.facts},
            ) from error
        self._proven = True
        self._throttle(getattr(response, "throttle_time_ms", 0) or 0)
        return response

    def fetch(self, request: FetchRequest, view: memoryview) -> Fetched:
        """Fetch into `view` (bytes, writable, contiguous); `request.max_bytes` is `len(view)`.

        Error codes are left to the caller: `head.error_code`.

        Raises:
            UnavailableError: No response in time, or the connection broke.
            CorruptionError: The bytes are not a response to this request.
            UsageError: No common version.
        """
        self._ready()
        return self._receive_fetch(self._send_fetch(request), view)

    def _send_fetch(self, request: FetchRequest) -> Asked:
        version = self._fetch_by_name if request.topic_id is None else self._fetch_by_id
        if version < FETCH_VERSION_MIN:
            raise UsageError(
                "the broker's Fetch versions are too old",
                hint="Apache Kafka 0.11 or later is required",
                host=self.host,
                port=self.port,
            )
        wait_ms = self._settings.socket_timeout_ms + request.max_wait_ms
        deadline_ms = self._clock.monotonic_ms() + wait_ms
        self._correlation_id = correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        frame = encode_fetch(
            request, version=version, correlation_id=correlation_id, client_id=self._client_id
        )
        try:
            self._transport.send(frame, deadline_ms)
        except BaseException:
            self.close()  # invariant 3
            raise
        return Asked(request, version, correlation_id, deadline_ms)

    def _receive_fetch(
        self, asked: Asked, view: memoryview, *, others_follow: bool = False
    ) -> Fetched:
        try:
            fetched = self._fetches.receive(asked, view, others_follow=others_follow)
        except BaseException:
            self.close()  # invariant 3
            raise
        if fetched.head.throttle_ms:
            self._throttle(fetched.head.throttle_ms)
        return fetched

    def speaks_topic_ids(self) -> bool:
        """Whether a fetch can identify the topic by topic ID."""
        return self._fetch_by_id >= FETCH_VERSION_BY_ID_MIN

    def checks_fetched_epochs(self, *, by_id: bool) -> bool:
        """Whether the broker compares a fetch's `last_fetched_epoch` with its log."""
        return (self._fetch_by_id if by_id else self._fetch_by_name) >= FETCH_VERSION_EPOCHS_MIN

    def _fetch_version(self, cap: int) -> int:
        oldest, newest = self.versions.get(FETCH, (0, -1))
        version = min(newest, cap)
        return version if version >= oldest else -1

    # Handshake.

    def _negotiate(self, deadline_ms: int) -> None:
        for version in _API_VERSIONS_FIRST:
            request = ApiVersionsRequest(
                client_software_name=_SOFTWARE_NAME, client_software_version=_SOFTWARE_VERSION
            )
            frame = self._send_and_receive(request, version, deadline_ms)
            # The error code comes first in every version; brokers differ in what follows it here.
            if frame[4:6] != _UNSUPPORTED:
                break
        response = self._decode(request, frame)
        if response.error_code:
            raise api_error(
                response.error_code,
                action="could not negotiate versions",
                host=self.host,
                port=self.port,
            )
        self.versions = {
            entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys
        }

    def _authenticate(self, deadline_ms: int) -> None:
        """Authenticate, or reauthenticate on a connection in use (KIP-368)."""
        mechanism = self._settings.sasl_mechanism
        facts = {"mechanism": mechanism, "host": self.host, "port": self.port}
        version = self.version_of(SaslHandshakeRequest, low=1)
        response = self._exchange(SaslHandshakeRequest(mechanism=mechanism), version, deadline_ms)
        if response.error_code:
            error = api_error(
                response.error_code, action="the broker refused the SASL mechanism", **facts
            )
            if response.error_code == UNSUPPORTED_SASL_MECHANISM:
                error.add_facts(offered=tuple(response.mechanisms))
            raise error
        version = self.version_of(SaslAuthenticateRequest)
        lifetime_ms = 0

        def exchange(data: bytes) -> bytes:
            nonlocal lifetime_ms
            request = SaslAuthenticateRequest(auth_bytes=data)
            response = self._exchange(request, version, deadline_ms)
            if response.error_code:
                # The broker's text is for people: "Authentication failed during ...".
                raise api_error(
                    response.error_code,
                    action="authentication failed",
                    reason=response.error_message,
                    **facts,
                )
            lifetime_ms = response.session_lifetime_ms
            return bytes(response.auth_bytes)

        begun_ms = self._clock.monotonic_ms()
        authenticate(self._settings, self._clock, exchange, deadline_ms=deadline_ms)
        self._reauthenticate_at_ms = (
            begun_ms + int(lifetime_ms * _REAUTHENTICATE_AT) if lifetime_ms > 0 else None
        )

    def _ready(self) -> None:
        """Prepare for a request: wait out a throttle, reauthenticate if due."""
        if self.closed:
            raise UnavailableError("the connection is closed", host=self.host, port=self.port)
        if self._throttled_until_ms:
            self._clock.sleep_ms(self._throttled_until_ms - self._clock.monotonic_ms())
            self._throttled_until_ms = 0
        at_ms = self._reauthenticate_at_ms
        if at_ms is not None and self._clock.monotonic_ms() >= at_ms:
            try:
                self._authenticate(self._clock.monotonic_ms() + self._settings.connect_timeout_ms)
            except BaseException:
                self.close()
                raise

    def _throttle(self, duration_ms: int) -> None:
        # Since Kafka 2.0 the response comes at once, and the broker stops reading the connection
        # instead: a request sent now would only use up its deadline.
        if duration_ms > 0:
            self._throttled_until_ms = self._clock.monotonic_ms() + min(
                duration_ms, THROTTLE_MS_MAX
            )

    # Requests.

    def _exchange(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        version: int,
        deadline_ms: int,
        send_until_ms: int | None = None,
        memo: ResponseMemo | None = None,
    ) -> Any:  # noqa: ANN401  # untyped library
        frame = self._send_and_receive(request, version, deadline_ms, send_until_ms)
        if memo is None:
            return self._decode(request, frame)
        body = frame[_SIZE_BYTES:]  # behind the correlation ID
        if memo.body != body or _INT.unpack_from(frame)[0] != self._correlation_id:
            memo.response, memo.body = self._decode(request, frame), body
        return memo.response

    def _send_and_receive(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        version: int,
        deadline_ms: int,
        send_until_ms: int | None = None,
    ) -> bytearray:
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        request.API_VERSION = version
        request.with_header(correlation_id=self._correlation_id, client_id=self._settings.client_id)
        try:
            frame = request.encode(header=True, framed=True)
            self._transport.send(frame, min(deadline_ms, send_until_ms or deadline_ms))
            return self._receive_frame(deadline_ms)
        except BaseException as error:
            self.close()  # invariant 3
            if isinstance(error, UnavailableError) and not self._proven:
                error.hint = _UNPROVEN_HINT
            raise

    def _decode(self, request: Any, frame: bytearray) -> Any:  # noqa: ANN401  # untyped library
        if len(frame) < _SIZE_BYTES or _INT.unpack_from(frame)[0] != self._correlation_id:
            self.close()  # invariant 3
            raise CorruptionError(
                "the response belongs to another request", host=self.host, port=self.port
            )
        response_class = request.header.get_response_class()
        try:
            header = io.BytesIO(frame)
            response_class.parse_header(header)
            return response_class.decode(memoryview(frame)[header.seek(0, io.SEEK_CUR) :])
        except Exception as error:  # any error that hostile bytes cause in the library
            self.close()
            raise CorruptionError(
                f"the response to {request.name} cannot be decoded",
                host=self.host,
                port=self.port,
                reason=f"{type(error).__name__}: {error}"[:200],
            ) from error

    def _receive_frame(self, deadline_ms: int) -> bytearray:
        head = self._scratch_view
        self._transport.receive(head, 0, _SIZE_BYTES, deadline_ms)
        (size,) = _INT.unpack_from(head)
        self._transport.check_frame(size, self._settings.receive_message_max_bytes)
        frame = bytearray(size)
        self._transport.receive(memoryview(frame), 0, size, deadline_ms)
        return frame
