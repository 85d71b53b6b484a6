"""A client connection: requests are handled, and responses sent, in order.

- C1 Responses are sent in the order of the requests. Produce requests overlap: the next one is
  appended while the previous one waits for the disk, so requests of one connection can share a
  flush. Every other request waits for the responses of those before it.
- C2 Malformed input ends the client's own connection and affects no other. A request that takes
  long is processed in turns of the event loop or in worker threads.
- C3 Before a client is authenticated, it may only log in (`admission`).
- C4 Memory per connection is bounded by one request and its response. Records are copied from file
  to socket in pieces of about 1 MiB, as fast as the client reads. Everything else of a response is
  bounded by the entries of its request and the limits in `BrokerOptions`. Nothing is read from a
  client that does not read its responses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from logmirror.broker.apis import Api
from logmirror.broker.broker import Caller
from logmirror.broker.handlers.produce import ProduceResponse, produce
from logmirror.broker.log.segment import FileRange
from logmirror.broker.protocol.admission import Admission, Endpoint
from logmirror.broker.protocol.connection_limits import client_address
from logmirror.broker.protocol.dispatch import check_responded, response
from logmirror.broker.protocol.throttling import Charge
from logmirror.errors import CorruptionError
from logmirror.wire.frames import (
    FIRST_BUFFER_BYTES,
    FrameBuffer,
    RemoteProtocolError,
    RequestHeader,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from logmirror.broker.handlers.fetch import Part
    from logmirror.broker.protocol.connections import Connections

_LOG: Final = logging.getLogger(__name__)
SEND_BYTES: Final = 512 * 1024
"""Bytes read from a file and written to the transport at once. Measured in CPU-s per GB: 0.32 for
a mirror's fetches and 0.24 for kcat's; with 1 MiB 0.46 and 0.22, with 256 KiB 0.31 and 0.26."""

MAX_OVERLAPPING: Final = 256
"""Limit for Produce requests of one connection in flight; most clients send up to 5."""

READ_WHILE_BUSY_BYTES: Final = 256 * 1024
_REFUSED_S: Final = 0.5
_LOGIN: Final = RequestHeader(Api.SASL_AUTHENTICATE, 0, 0)
RATE_BYTES_PER_MS: Final = 1024
"""The minimum rate at which a request must arrive after `frame_timeout_ms`."""


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one connection. All methods run on the event loop.

    Attributes:
        address: The client's IP address; empty until it is known.
        user: The name of the user that has logged in. None without SASL.
        is_made: Whether it ever had a transport.
    """

    def __init__(self, connections: Connections, endpoint: Endpoint) -> None:
        self._all = connections
        self._endpoint = endpoint
        self._admission: Admission | None = None
        self._login: Admission | None = None
        self.address = ""
        self.user: str | None = None
        self.is_made = False
        self._options = connections.broker.options
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer(self._frame_limit)
        self.counted_bytes = 0
        self._held_bytes = 0
        self._has_asked = False
        self._transport: asyncio.Transport | None = None
        self._caller = Caller("")
        self._peer = ""
        self._waiting: deque[ProduceResponse] = deque()
        self._task: asyncio.Future[bytes | list[Part] | None] | None = None
        self._muted: asyncio.TimerHandle | None = None
        self._outgoing: deque[Part] = deque()
        self._is_processing = False
        self._is_finishing = False
        self._is_writable = True
        self._is_reading = True
        self._began_ms = self._last_request_ms = self._now_ms()
        self._frame_began_ms: float | None = None
        self._blocked_since_ms: float | None = None

    def _now_ms(self) -> float:
        return self._loop.time() * 1000

    @property
    def must_log_in(self) -> bool:
        """Whether the client is not authenticated yet, and must be."""
        return self._admission is not None or self._transport is None

    def _frame_limit(self, api_key: int) -> int:
        options = self._options
        if self._admission is not None:
            return options.max_unauthenticated_frame_bytes
        if api_key == Api.PRODUCE:
            return options.max_produce_frame_bytes
        return options.max_other_frame_bytes

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, unless a limit is reached. With TLS, the handshake is over."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_made = True
        peername = transport.get_extra_info("peername")
        self._peer, endpoint = str(peername), self._endpoint
        if not self.address:
            address = client_address(peername)
            reason = self._all.refusal(address, must_log_in=endpoint.has_sasl)
            if reason:
                self.close(reason)
                return
            self.count(address)
        try:
            principal = endpoint.principal(transport)
        except ValueError:
            self.close("certificate of the client has no readable subject")
            return
        self._caller = Caller(
            transport.get_extra_info("sockname")[0],
            advertised=endpoint.advertised,
            principal=principal,
            client_host=self.address,
        )
        if endpoint.has_sasl:
            parts = self._all.broker, self._caller, endpoint, self._all.failed_logins
            self._admission = Admission(*parts, self._began_ms)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=SEND_BYTES)

    def count(self, address: str) -> None:
        """Count the connection as one of this address."""
        self.address = address
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's resources."""
        self._all.closed(self, self.counted_bytes)
        self.counted_bytes = 0
        self._transport = None
        self._outgoing.clear()
        if self._task is not None:
            self._task.cancel()
        if self._muted is not None:
            self._muted.cancel()
        if exc is not None:
            _LOG.debug("%s: connection lost: %s", self._peer, exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the frame decides the size
        """Return the buffer for the next bytes."""
        space = self._frames.free_space()
        if self._count_bytes() > 0 and self._all.buffered_bytes > self._options.max_buffered_bytes:
            # Deferred: closing within this callback aborts the process in libuv.
            self._loop.call_soon(self._all.close_largest)
        return space

    def _count_bytes(self) -> int:
        """Count the buffers in the total of all connections; returns by how much they grew."""
        grown = self._frames.capacity_bytes + self._held_bytes - self.counted_bytes
        self.counted_bytes += grown
        self._all.buffered_bytes += grown
        return grown

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that arrived."""
        self._frames.received(nbytes)
        self._process()

    def pause_writing(self) -> None:
        """Stop sending: the client does not read its responses."""
        self._is_writable = False
        self._blocked_since_ms = self._now_ms()

    def resume_writing(self) -> None:
        """Resume sending."""
        self._is_writable = True
        self._blocked_since_ms = None
        self._send()
        self._process()

    # Requests

    @property
    def _is_refused(self) -> bool:
        """Whether the client has failed to log in; nothing more is read from it."""
        return self._admission is not None and self._admission.has_failed

    @property
    def _is_busy(self) -> bool:
        """Whether the next request must wait."""
        is_waiting = self._task is not None or self._muted is not None
        return is_waiting or bool(self._outgoing) or not self._is_writable

    def _process(self) -> None:
        """Handle the complete requests that need not wait."""
        if self._is_processing:
            return
        self._is_processing = True
        try:
            while self._may_take():
                if not self._take_one():
                    break
        except RemoteProtocolError as error:
            self.close(str(error))
        except Exception:  # noqa: BLE001  # C2: a bug must only end the client's own connection
            _LOG.exception("%s: request failed", self._peer)
            self.close("internal error")
        finally:
            self._is_processing = False
        self._mind_reading()

    def _may_take(self) -> bool:
        is_ending = self._all.is_stopping or self._is_refused
        ready = self._transport is not None and not self._is_busy and not is_ending
        return ready and len(self._waiting) < MAX_OVERLAPPING

    def _take_one(self) -> bool:
        """Handle the next request; False if it is incomplete or must wait."""
        frame = self._frames.next_frame()
        if frame is None:
            if self._frames.buffered_bytes == 0:
                self._frame_began_ms = None
            elif self._frame_began_ms is None:
                self._frame_began_ms = self._now_ms()
            return False
        if self._admission is not None:
            self._last_request_ms = self._now_ms()
            self._has_asked = True
            self._frame_began_ms = None
            self._take_login(self._admission, frame)
            return True
        header = read_header(frame)
        if header.api_key != Api.PRODUCE and self._waiting:
            self._frames.put_back(frame)
            return False
        self._last_request_ms = self._now_ms()
        self._has_asked = True
        self._frame_began_ms = None
        if self._login is not None and self._is_repeated(self._login, header):
            self._take_login(cast("Admission", self._admission), frame)
        else:
            self._handle(header, frame)
        return True

    def _is_repeated(self, login: Admission, header: RequestHeader) -> bool:
        """Whether a request begins another login, which it then may.

        Raises:
            RemoteProtocolError: The session has ended, and the request does not.
        """
        now_ms = self._now_ms()
        if header.api_key == Api.SASL_HANDSHAKE:
            self._admission = login.repeated(now_ms)
        if self._admission is None and login.is_over(now_ms):
            raise RemoteProtocolError("session has ended")
        return self._admission is not None

    def _handle(self, header: RequestHeader, frame: memoryview) -> None:
        broker = self._all.broker
        charge = None
        if broker.quotas.has_requests:
            charge = Charge(broker, header, frame, self._caller, self._mute)
        if header.api_key == Api.PRODUCE:
            check_responded(header)
            pending = produce(broker, header, frame, self._caller, self._send_responses_in_order)
            if charge is not None:
                charge.produced(pending)
            self._waiting.append(pending)
            if pending.rest is not None:
                self._held_bytes = self._frames.detach()
                self._count_bytes()
                self._await(header, pending.rest)
            self._send_responses_in_order()
            return
        traffic = broker.traffic
        began_s = traffic.now_s()
        found = response(broker, header, frame, self._caller)
        if charge is not None:
            found = charge.responded(found)
        if isinstance(found, bytes | list):
            traffic.responded(header.api_key, began_s)
            self._queue(found)
        else:
            self._await(header, found, began_s)

    def _mute(self, delay_ms: int) -> None:
        """Take no request for this time. Responses are sent meanwhile."""
        if self._muted is not None:
            self._muted.cancel()
        self._muted = self._loop.call_later(delay_ms / 1000, self._unmute)

    def _unmute(self) -> None:
        self._muted = None
        self._last_request_ms = self._now_ms()  # it was not idle
        self._process()

    def _take_login(self, admission: Admission, frame: memoryview) -> None:
        found = admission.response(frame)
        if isinstance(found, bytes):
            self._after_login(admission)
            self._queue(found)
        else:
            self._await(_LOGIN, self._logging_in(admission, found))

    async def _logging_in(
        self, admission: Admission, found: Coroutine[None, None, bytes | None]
    ) -> bytes | None:
        frame = await found
        self._after_login(admission)
        if frame is None:
            self.finish()
        return frame

    def _after_login(self, admission: Admission) -> None:
        """Let the client in, or close the connection a moment after the response."""
        self._frames.is_raw = admission.is_raw
        if admission.has_failed:  # not at once: some clients lose a response before the end
            self._loop.call_later(_REFUSED_S, self.close, "authentication failed")
        if admission.user is not None:
            self.user = admission.user
            self._caller.principal = f"User:{admission.user}"
            self._admission, self._login = None, admission

    def _await(
        self,
        header: RequestHeader,
        found: Coroutine[None, None, bytes | list[Part] | None] | asyncio.Future[bytes],
        began_s: float | None = None,
    ) -> None:
        self._task = asyncio.ensure_future(found, loop=self._loop)
        self._task.add_done_callback(lambda task: self._awaited(header, task, began_s))

    def _awaited(
        self,
        header: RequestHeader,
        task: asyncio.Future[bytes | list[Part] | None],
        began_s: float | None,
    ) -> None:
        self._task = None
        if task.cancelled():
            return
        self._held_bytes = 0
        if self._transport is not None:
            self._count_bytes()
        error = task.exception()
        if isinstance(error, RemoteProtocolError):
            self.close(str(error))
            return
        if error is not None:
            _LOG.error("%s: request %d failed", self._peer, header.api_key, exc_info=error)
            self.close("internal error")
            return
        if began_s is not None:
            self._all.broker.traffic.responded(header.api_key, began_s)
        result = task.result()
        if result is not None:
            self._queue(result)
        self._send_responses_in_order()

    def _mind_reading(self) -> None:
        """Pause reading while enough requests of this client wait."""
        if self._transport is None:
            return
        may_read = FIRST_BUFFER_BYTES if self._admission is not None else READ_WHILE_BUSY_BYTES
        full = self._frames.buffered_bytes >= may_read
        must_wait = self._is_busy or len(self._waiting) >= MAX_OVERLAPPING
        wanted = not (full and must_wait) and not self._is_refused
        if wanted != self._is_reading:
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # Responses

    def _send_responses_in_order(self) -> None:
        """Send complete Produce responses, up to the first incomplete one (C1)."""
        while self._waiting and (frame := self._waiting[0].frame) is not None:
            self._waiting.popleft()
            if frame:
                self._queue(frame)
        self._process()

    def _queue(self, found: bytes | bytearray | list[Part]) -> None:
        if isinstance(found, list):
            self._outgoing += found
        else:
            self._outgoing.append(found)
        self._send()

    def _send(self) -> None:
        """Write to the transport as long as it accepts, about `SEND_BYTES` at a time."""
        while self._transport is not None and self._outgoing and self._is_writable:
            pieces: list[bytes | bytearray] = []
            size = 0
            try:
                while self._outgoing and size < SEND_BYTES:
                    piece = self._next_piece(SEND_BYTES - size)
                    pieces.append(piece)
                    size += len(piece)
            except (OSError, CorruptionError) as error:
                # The frame's size is sent already, so only closing the connection ends it.
                _LOG.error("%s: records could not be read: %s", self._peer, error)
                self._all.broker.topics.disk_failed(error)
                self.close("records could not be read")
                return
            self._transport.writelines(pieces)
        if self._is_finishing and self._transport is not None and not self._outgoing:
            self._transport.close()

    def _next_piece(self, limit: int) -> bytes | bytearray:
        part = self._outgoing.popleft()
        if not isinstance(part, FileRange):
            return part
        file, position, size_bytes = part
        wanted = min(size_bytes, limit)
        piece = os.pread(file.fd, wanted, position)
        if not piece:
            raise CorruptionError("file is shorter than its log", position=position)
        if len(piece) < size_bytes:
            rest = FileRange(file, position + len(piece), size_bytes - len(piece))
            self._outgoing.appendleft(rest)
        return piece

    # The end

    def stop_appending(self) -> None:
        """Cancel a Produce request of which not all batches are appended."""
        if self._task is not None and self._held_bytes:
            self._task.cancel()

    def overdue(self, now_ms: float) -> str:  # noqa: PLR0911  # one for each timeout
        """Return the reason for closing a connection that exceeded a timeout; else empty."""
        options = self._options
        if self._blocked_since_ms is not None:
            if now_ms - self._blocked_since_ms > options.send_timeout_ms:
                return "client does not read its responses"
            return ""
        if self._admission is not None and self._admission.is_overdue(now_ms):
            return "not authenticated in time"
        if self._is_busy or self._waiting:
            return ""
        if self._frame_began_ms is not None:
            allowed_ms = options.frame_timeout_ms + self._frames.buffered_bytes / RATE_BYTES_PER_MS
            return (
                "request arrives too slowly" if now_ms - self._frame_began_ms > allowed_ms else ""
            )
        if not self._has_asked and now_ms - self._last_request_ms > options.frame_timeout_ms:
            return "no request"
        return "idle" if now_ms - self._last_request_ms > options.idle_timeout_ms else ""

    def finish(self) -> None:
        """Close the connection once its responses are sent."""
        self._is_finishing = True
        self._send()

    def close(self, reason: str) -> None:
        """Close the connection now; unsent responses are dropped."""
        if self._transport is not None and not self._transport.is_closing():
            _LOG.info("%s: closed: %s", self._peer, reason)
            self._transport.abort()
