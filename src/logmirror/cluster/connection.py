"""One blocking connection to one broker: versions, TLS, SASL, cold messages and the hot fetch.

Invariants:
1. One request at a time: every answer is received whole before the next request leaves. Where
   several fetches are under way (`fetch_ahead`), their answers are, in the order of asking.
2. Every wait has a deadline, taken when the operation begins (`Transport`).
3. A connection that failed in the middle of anything is closed: a late answer can never be taken
   for the answer to another request.
4. A frame larger than the cap is refused before memory is set aside for it.
5. `fetch` receives the records straight into the caller's view: no copy, and no work in Python that
   grows with the number of batches or records.

Not thread-safe and not to be used across a fork. Cold messages are kafka-python's classes.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.metadata import ApiVersionsRequest  # type: ignore[import-untyped]  # no py.typed
from kafka.protocol.sasl import (  # type: ignore[import-untyped]  # ships no py.typed
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)

from logmirror.clock import SYSTEM_CLOCK, Clock
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
    FETCH_VERSION_MAX,
    FETCH_VERSION_MIN,
    Asked,
    Fetched,
    FetchHead,
    FetchRequest,
    encode_fetch,
    head_bytes_hint,
    parse_fetch_head,
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
"""Tried in this order. A broker that knows less answers in version 0, with its own range."""
_REAUTHENTICATE_AT: Final = 0.85
"""Share of a session's lifetime after which we authenticate again, as librdkafka and Java do."""
_SCRATCH_BYTES: Final = 65_536
_FRAME_SLACK_BYTES: Final = 1 << 20
"""What a fetch answer may hold besides the records asked for: the aborted transactions."""
_SLOWEST_BYTES_PER_MS: Final = 128
"""A transfer slower than 128 kB/s is taken for dead; above it a large answer may take its time."""
_THROTTLE_MS_MAX: Final = 60_000
_ANY_VERSION: Final = 32_767
_SIZE_BYTES: Final = 4
_UNPROVEN_HINT: Final = (
    "check security.protocol and sasl.mechanism: a broker closes a connection without a word when "
    "the listener expects others"
)
_UNSUPPORTED: Final = UNSUPPORTED_VERSION.to_bytes(2, "big")
_INT: Final = struct.Struct(">i")


class Connection:
    """One connection, ready for requests: negotiated and authenticated.

    Args:
        host: Name or address.
        port: Of the broker.
        settings: Security, limits, identity.
        clock: For deadlines.
        tls: The context to use, so that many connections load certificates once; None makes one
            when the settings ask for TLS.

    Raises:
        UnavailableError: It could not be reached in `connect_timeout_ms`.
        UsageError: TLS or SASL settings do not fit, credentials were refused, or the broker is too
            old.
        CorruptionError: What answers does not speak Kafka's protocol.
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
        """Whether the broker has answered a request other than those of opening."""
        self._settings = settings
        self._clock = clock
        self._client_id = settings.client_id.encode()
        self._correlation_id = 0
        self._throttled_until_ms = 0
        self._reauthenticate_at_ms: int | None = None
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self.versions: dict[int, tuple[int, int]] = {API_VERSIONS: (0, _API_VERSIONS_FIRST[0])}
        """API key to (lowest, highest version) that the broker speaks."""
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
        """Whether it can no longer be used: closed by us, by the broker, or broken; never waits."""
        return self.closed or self._transport.has_hung_up()

    def version_of(
        self,
        message: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = _ANY_VERSION,
    ) -> int:
        """The highest version of a kafka-python message class that both sides know.

        Raises:
            UsageError: There is none from `low` to `high`.
        """
        oldest, newest = self.versions.get(message.API_KEY, (0, -1))
        newest_of_ours = min(message.max_version, high)
        version = min(newest, newest_of_ours)
        if version < max(oldest, low):
            raise UsageError(
                f"the broker does not speak {message.name} in a version that we need",
                hint="Apache Kafka 0.11 or later is needed",
                host=self.host,
                port=self.port,
                broker_versions=(oldest, newest),
                our_versions=(low, newest_of_ours),
            )
        return int(version)

    def call(  # noqa: PLR0913  # how a request is sent; most callers pass one or two
        self,
        request: Any,  # noqa: ANN401  # untyped library
        *,
        low: int = 0,
        high: int = _ANY_VERSION,
        wait_ms: int = 0,
        writes: bool = False,
        send_until_ms: int | None = None,
    ) -> Any:  # noqa: ANN401  # untyped library
        """Send a kafka-python request and return its decoded response: the cold path.

        The response's error codes are left to the caller.

        Args:
            request: The message, without a version: the highest common one is chosen.
            low: The lowest version that will do.
            high: The highest version that will do.
            wait_ms: How long the request asks the broker to wait; added to the deadline.
            writes: Whether the request changes something, so that a lost answer leaves open
                whether it has.
            send_until_ms: Monotonic time after which no byte of it may be sent.

        Raises:
            UnavailableError: No answer in `socket_timeout_ms`, or the connection broke; for a
                request that writes: it was not sent. Or it was too late to send it.
            OutcomeUnknownError: A request that writes was sent, and its answer is lost.
            CorruptionError: The answer is not one to this request.
            UsageError: No common version.
        """
        version = self.version_of(type(request), low=low, high=high)
        if writes and self.has_hung_up():
            self.close()  # while it was idle: better seen before than after sending
        self._ready()
        deadline_ms = self._clock.monotonic_ms() + self._settings.socket_timeout_ms + wait_ms
        if send_until_ms is not None and self._clock.monotonic_ms() >= send_until_ms:
            raise UnavailableError("too late to send", host=self.host, port=self.port)
        try:
            response = self._exchange(request, version, deadline_ms, send_until_ms)
        except (UnavailableError, CorruptionError) as error:
            if not writes:
                raise
            raise OutcomeUnknownError(
                f"the answer to {request.name} is lost: {error.message}",
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
            UnavailableError: No answer in time, or the connection broke.
            CorruptionError: The answer is not one to this request.
            UsageError: No common version.
        """
        self._ready()
        return self._take(self._ask(request), view)

    def _ask(self, request: FetchRequest) -> Asked:
        """Send a fetch."""
        version = self._fetch_by_name if request.topic_id is None else self._fetch_by_id
        if version < FETCH_VERSION_MIN:
            raise UsageError(
                "the broker cannot be read: its fetch versions are too old",
                hint="Apache Kafka 0.11 or later is needed",
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

    def _take(self, asked: Asked, view: memoryview, *, others_follow: bool = False) -> Fetched:
        """Receive the answer to a fetch; `others_follow`: bytes behind it belong to another one."""
        try:
            fetched = self._receive_fetch(asked, view, others_follow=others_follow)
        except BaseException:
            self.close()  # invariant 3
            raise
        if fetched.head.throttle_ms:
            self._throttle(fetched.head.throttle_ms)
        return fetched

    def speaks_topic_ids(self) -> bool:
        """Whether a fetch can name the topic by its id."""
        return self._fetch_by_id >= FETCH_VERSION_BY_ID_MIN

    def _fetch_version(self, cap: int) -> int:
        oldest, newest = self.versions.get(FETCH, (0, -1))
        version = min(newest, cap)
        return version if version >= oldest else -1

    # Opening.

    def _negotiate(self, deadline_ms: int) -> None:
        for version in _API_VERSIONS_FIRST:
            request = ApiVersionsRequest(
                client_software_name=_SOFTWARE_NAME, client_software_version=_SOFTWARE_VERSION
            )
            frame = self._send_and_receive(request, version, deadline_ms)
            # The error leads in every version; what follows it here, not all brokers agree on.
            if frame[4:6] != _UNSUPPORTED:
                break
        response = self._decode(request, frame)
        if response.error_code:
            raise api_error(
                response.error_code,
                action="could not agree on versions",
                host=self.host,
                port=self.port,
            )
        self.versions = {
            entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys
        }

    def _authenticate(self, deadline_ms: int) -> None:
        """Authenticate, for the first time or again on a connection in use (KIP-368)."""
        mechanism = self._settings.sasl_mechanism
        facts = {"mechanism": mechanism, "host": self.host, "port": self.port}
        version = self.version_of(SaslHandshakeRequest, low=1)
        response = self._exchange(SaslHandshakeRequest(mechanism=mechanism), version, deadline_ms)
        if response.error_code:
            error = api_error(
                response.error_code, action="the broker refused the mechanism", **facts
            )
            if response.error_code == UNSUPPORTED_SASL_MECHANISM:
                error.add_facts(offered=tuple(response.mechanisms))
            raise error
        version = self.version_of(SaslAuthenticateRequest)
        lifetime_ms = 0

        def exchange(data: bytes) -> bytes:
            nonlocal lifetime_ms
            answer = self._exchange(SaslAuthenticateRequest(auth_bytes=data), version, deadline_ms)
            if answer.error_code:
                # The broker's text is for people: "Authentication failed during ...".
                raise api_error(
                    answer.error_code,
                    action="authentication failed",
                    reason=answer.error_message,
                    **facts,
                )
            lifetime_ms = answer.session_lifetime_ms
            return bytes(answer.auth_bytes)

        begun_ms = self._clock.monotonic_ms()
        authenticate(
            self._settings, self._clock, exchange, timeout_ms=max(deadline_ms - begun_ms, 1)
        )
        self._reauthenticate_at_ms = (
            begun_ms + int(lifetime_ms * _REAUTHENTICATE_AT) if lifetime_ms > 0 else None
        )

    def _ready(self) -> None:
        """Before each request: not closed, no longer throttled, session not about to end."""
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
        # Since Kafka 2.0 the answer comes at once and the broker stops reading from us instead, so
        # that a request sent now would only use up its deadline.
        if duration_ms > 0:
            self._throttled_until_ms = self._clock.monotonic_ms() + min(
                duration_ms, _THROTTLE_MS_MAX
            )

    # Requests.

    def _exchange(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        version: int,
        deadline_ms: int,
        send_until_ms: int | None = None,
    ) -> Any:  # noqa: ANN401  # untyped library
        frame = self._send_and_receive(request, version, deadline_ms, send_until_ms)
        return self._decode(request, frame)

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
                "the answer belongs to another request", host=self.host, port=self.port
            )
        response_class = request.header.get_response_class()
        try:
            header = io.BytesIO(frame)
            response_class.parse_header(header)
            return response_class.decode(memoryview(frame)[header.tell() :])
        except Exception as error:  # whatever the library meets in hostile bytes
            self.close()
            raise CorruptionError(
                f"the answer to {request.name} cannot be decoded",
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

    def _receive_fetch(self, asked: Asked, view: memoryview, *, others_follow: bool) -> Fetched:
        request, version, correlation_id, deadline_ms = asked
        head_view = self._scratch_view
        wanted = head_bytes_hint(request, version)
        if others_follow:
            self._transport.receive(head_view, 0, _SIZE_BYTES, deadline_ms)
            wanted = min(wanted, _SIZE_BYTES + max(_INT.unpack_from(head_view)[0], 0))
            filled = self._transport.receive(head_view, _SIZE_BYTES, wanted, deadline_ms)
        else:
            filled = self._transport.receive_some(head_view[:wanted], deadline_ms)
        while True:
            parsed = (
                parse_fetch_head(
                    request,
                    version=version,
                    correlation_id=correlation_id,
                    buffer=head_view,
                    filled=filled,
                )
                if filled >= _SIZE_BYTES
                else _SIZE_BYTES
            )
            if not isinstance(parsed, int):
                break
            if filled >= _SIZE_BYTES:
                cap = max(self._settings.receive_message_max_bytes, len(view) + _FRAME_SLACK_BYTES)
                self._transport.check_frame(_INT.unpack_from(head_view)[0], cap)
            if parsed > len(head_view):  # many aborted transactions
                larger = memoryview(bytearray(max(parsed, 2 * len(head_view))))
                larger[:filled] = head_view[:filled]
                head_view = larger
            filled = self._transport.receive(head_view, filled, parsed, deadline_ms)
        return self._receive_records(parsed, head_view, filled, view, deadline_ms)

    def _receive_records(
        self,
        head: FetchHead,
        head_view: memoryview,
        filled: int,
        view: memoryview,
        deadline_ms: int,
    ) -> Fetched:
        frame_bytes = _SIZE_BYTES + int(_INT.unpack_from(head_view)[0])
        cap = max(self._settings.receive_message_max_bytes, len(view) + _FRAME_SLACK_BYTES)
        self._transport.check_frame(frame_bytes - _SIZE_BYTES, cap)
        if filled > frame_bytes:
            raise CorruptionError(
                "bytes follow a fetch answer that nothing asked for", host=self.host, port=self.port
            )
        deadline_ms += head.record_bytes // _SLOWEST_BYTES_PER_MS
        size = head.record_bytes
        if head.error_code or size > len(view):
            self._transport.discard(frame_bytes - filled, deadline_ms)
            return Fetched(head, 0, 0 if head.error_code else size)
        early = min(filled - head.head_bytes, size)
        view[:early] = head_view[head.head_bytes : head.head_bytes + early]
        self._transport.receive(view, early, size, deadline_ms)
        rest = frame_bytes - max(head.head_bytes + size, filled)
        if rest:
            self._transport.discard(rest, deadline_ms)
        return Fetched(head, size, 0)
