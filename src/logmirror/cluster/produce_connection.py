"""One connection for Produce requests, several in flight, with responses in order.

Invariants:
1. A request whose last byte was not handed to the kernel is never processed: the broker reads whole
   frames, and a connection that ends within one is aborted.
2. Nothing here waits: `push` hands over what the kernel accepts now, `pull` reads what has come.
The
   caller polls for both at once, so that broker and client cannot block each other, each waiting
   for the other to read.
3. Responses are matched in the order of the requests, by correlation ID, and must name exactly the
   partitions that were sent; otherwise the connection is aborted.
4. While a request is in flight, no other request is made on the connection. Reauthentication
   (KIP-368) happens when nothing is in flight.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.cluster.connection import THROTTLE_MS_MAX, Connection
from logmirror.errors import CorruptionError, InternalError, UsageError
from logmirror.wire.messages import PRODUCE
from logmirror.wire.produce import (
    PRODUCE_VERSION_MAX,
    PRODUCE_VERSION_MIN,
    ProduceRequest,
    ProduceResult,
    encode_produce,
    parse_produce,
)

if TYPE_CHECKING:
    from logmirror.model import TopicPartition

_SIZE: Final = struct.Struct(">i")
_RECEIVE_BYTES: Final = 65_536
_SLOWEST_BYTES_PER_MS: Final = 128
"""A transfer slower than 128 kB/s counts as broken."""


class InFlightRequest(NamedTuple):
    """A request without a response."""

    partitions: tuple[TopicPartition, ...]
    correlation_id: int


class ProduceConnection(Connection):
    """See `Connection`; `call` and `fetch` work while nothing is in flight."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # its base's own
        self.in_flight: deque[InFlightRequest] = deque()
        """Requests without a response, oldest first; the last may not be sent whole."""
        super().__init__(*arguments, **named)
        oldest, newest = self.versions.get(PRODUCE, (0, -1))
        self._version = min(newest, PRODUCE_VERSION_MAX)
        self._pieces: deque[memoryview] = deque()
        self._begun = False
        self._send_deadline_ms = 0
        self._response_deadline_ms = 0
        self._response_wait_ms = 0
        self._received = bytearray()
        self._view = memoryview(bytearray(_RECEIVE_BYTES))
        if self._version < max(oldest, PRODUCE_VERSION_MIN):
            self.close()
            raise UsageError(
                "the broker does not support the required version of Produce",
                hint="Apache Kafka 0.11 or later is required",
                host=self.host,
                port=self.port,
                broker_versions=(oldest, newest),
                our_versions=(PRODUCE_VERSION_MIN, PRODUCE_VERSION_MAX),
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.in_flight)} in flight"
        return f"ProduceConnection({self.host}:{self.port}, {state})"

    @property
    def is_sending(self) -> bool:
        """Whether bytes of the last request are still to be sent."""
        return bool(self._pieces)

    @property
    def has_begun(self) -> bool:
        """Whether the kernel has taken bytes of the request that is being sent."""
        return self._begun

    @property
    def session_ends_soon(self) -> bool:
        """Whether reauthentication is due: drain the connection, then call `prepare`."""
        at_ms = self._reauthenticate_at_ms
        return at_ms is not None and self._clock.monotonic_ms() >= at_ms

    @property
    def throttled_until_ms(self) -> int:
        """Monotonic time until which the broker throttles the connection; 0: it does not."""
        return self._throttled_until_ms

    @property
    def deadline_ms(self) -> int | None:
        """The deadline of the oldest response or of sending; None if nothing is in flight."""
        unsent = 1 if self._pieces else 0
        deadlines = [self._send_deadline_ms] * unsent
        if len(self.in_flight) > unsent:
            deadlines.append(self._response_deadline_ms)
        return min(deadlines, default=None)

    def prepare(self) -> None:
        """Wait out a throttle, and reauthenticate if due; only when nothing is in flight."""
        self._ready()

    def _ready(self) -> None:
        if self.in_flight:
            raise InternalError("a request was made while Produce requests are in flight")
        super()._ready()

    def fileno(self) -> int:
        """For poll."""
        return self._transport.fileno()

    def abort(self) -> None:
        """Close it; bytes that were not sent yet are dropped."""
        self.closed = True
        self._pieces.clear()
        self._transport.abort()

    def begin(self, request: ProduceRequest) -> None:
        """Queue a request for `push`. Its batches are read until it is sent whole."""
        if self._pieces:
            raise InternalError("a request was begun before the last one was sent")
        self._correlation_id = correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        buffers = encode_produce(
            request,
            version=self._version,
            correlation_id=correlation_id,
            client_id=self._client_id,
        )
        self._pieces = self._transport.pieces(buffers)
        self._begun = False
        partitions = tuple(partition for partition, _ in request.batches)
        self.in_flight.append(InFlightRequest(partitions, correlation_id))
        self._response_wait_ms = self._settings.socket_timeout_ms + request.timeout_ms
        self._send_deadline_ms = (
            self._clock.monotonic_ms()
            + self._response_wait_ms
            + sum(map(len, self._pieces)) // _SLOWEST_BYTES_PER_MS
        )

    def withdraw(self) -> InFlightRequest:
        """Withdraw a request of which no byte was sent."""
        if self._begun or not self._pieces:
            raise InternalError("a request was withdrawn after it was begun")
        self._pieces.clear()
        return self.in_flight.pop()

    def push(self, not_after_ms: int | None) -> bool:
        """Send what the kernel accepts now.

        Args:
            not_after_ms: Monotonic deadline after which no byte is handed over; checked immediately
                before each hand-over.

        Returns:
            False if the deadline has passed before the request was sent whole.

        Raises:
            UnavailableError: The connection has failed.
        """
        while self._pieces:
            if not_after_ms is not None and self._clock.monotonic_ms() >= not_after_ms:
                return False
            if not self._transport.send_some(self._pieces):
                break
            self._begun = True
        else:
            if len(self.in_flight) == 1:
                self._restart_response_deadline()
        return True

    def pull(self, into: list[ProduceResult]) -> None:
        """Read the responses that have come, in order.

        Args:
            into: Results are appended, also those before a failure.

        Raises:
            UnavailableError: The connection has failed.
            CorruptionError: The bytes are not a response to the oldest request.
        """
        while count := self._transport.receive_now(self._view):
            self._received += self._view[:count]
            self._take_frames(into)

    def _take_frames(self, into: list[ProduceResult]) -> None:
        at = 0
        with memoryview(self._received) as received:
            while len(received) - at >= _SIZE.size:
                size = _SIZE.unpack_from(received, at)[0]
                self._transport.check_frame(size, self._settings.receive_message_max_bytes)
                end = at + _SIZE.size + size
                if end > len(received):
                    break
                self._accept(received[at + _SIZE.size : end], into)
                at = end
        del self._received[:at]

    def _accept(self, frame: memoryview, into: list[ProduceResult]) -> None:
        unsent = 1 if self._pieces else 0
        if len(self.in_flight) <= unsent:
            raise CorruptionError("a response without a request")
        head = self.in_flight[0]
        results, throttle_ms = parse_produce(
            frame, version=self._version, correlation_id=head.correlation_id
        )
        responded = {result.partition for result in results}
        if len(results) != len(head.partitions) or responded != set(head.partitions):
            raise CorruptionError(
                "a Produce response does not match the partitions that were sent",
                expected=len(head.partitions),
                found=len(results),
            )
        self.in_flight.popleft()
        into += results
        self._proven = True
        self._throttle(throttle_ms)
        self._restart_response_deadline(min(throttle_ms, THROTTLE_MS_MAX))

    def _restart_response_deadline(self, throttle_ms: int = 0) -> None:
        self._response_deadline_ms = (
            self._clock.monotonic_ms() + self._response_wait_ms + throttle_ms
        )
