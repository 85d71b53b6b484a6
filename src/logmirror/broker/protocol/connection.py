"""One client's connection: bytes in, requests in order, answers in the same order.

- C1 Answers leave in the order of their requests. Produce requests overlap: the next one is
  appended while the one before it waits for the disk, so one connection can share a flush with
  itself. Every other request waits until those before it are answered.
- C2 Whatever a client sends, it costs that client its connection at worst.
- C3 Memory per connection is bounded: by one request that is arriving, and about a megabyte of
  answer. Records go from file to socket in pieces, as fast as the client takes them; a client that
  does not read stops being read from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from logmirror.broker.apis import Api
from logmirror.broker.broker import Caller
from logmirror.broker.handlers.produce import ProduceResponse, produce
from logmirror.broker.log.segment import FileRange
from logmirror.broker.protocol.dispatch import check_responded, response
from logmirror.errors import CorruptionError
from logmirror.wire.frames import FrameBuffer, RemoteProtocolError, read_header

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from logmirror.broker.broker import Broker
    from logmirror.broker.handlers.fetch import Part
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
SEND_BYTES: Final = 1024 * 1024
"""Read from a file and handed to the transport at once; larger pieces only cost memory."""

MAX_OVERLAPPING: Final = 256
"""Produce requests of one connection that wait for the disk; clients send 5, some more."""

READ_WHILE_BUSY_BYTES: Final = 256 * 1024
STOP_MS: Final = 1000
"""How long a stopping broker waits for clients to take their last answers."""

RATE_BYTES_PER_MS: Final = 64
"""The least rate at which a request must arrive once it has begun."""


class Connections:
    """All connections of a broker, and what they share: the limits."""

    def __init__(self, broker: Broker, max_connections: int) -> None:
        self.broker = broker
        self.max_connections = max_connections
        self.open: set[Connection] = set()
        self.buffered_bytes = 0
        self.is_stopping = False
        self._all_closed = asyncio.Event()

    def closed(self, connection: Connection, buffered_bytes: int) -> None:
        """Forget a connection and the bytes that it held."""
        self.open.discard(connection)
        self.buffered_bytes -= buffered_bytes
        if self.is_stopping and not self.open:
            self._all_closed.set()

    async def stop(self) -> None:
        """Take no more requests, finish what is in hand as far as clients take it, and close."""
        self.is_stopping = True
        await self.broker.commits.drain()
        for connection in tuple(self.open):
            connection.finish()
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), STOP_MS / 1000)
        for connection in tuple(self.open):
            connection.close("the broker stops")

    def sweep(self, now_ms: float) -> None:
        """Close the connections that are out of time."""
        for connection in tuple(self.open):
            reason = connection.overdue(now_ms)
            if reason:
                connection.close(reason)


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one connection; all its methods run on the event loop."""

    def __init__(self, connections: Connections) -> None:
        self._all = connections
        self._options = connections.broker.options
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer(self._frame_limit)
        self._counted_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._caller = Caller("")
        self._peer = ""
        self._waiting: deque[ProduceResponse] = deque()
        self._task: asyncio.Task[bytes | list[Part]] | None = None
        self._outgoing: deque[Part] = deque()
        self._is_processing = False
        self._is_finishing = False
        self._is_writable = True
        self._is_reading = True
        self._last_request_ms = self._now_ms()
        self._frame_began_ms: float | None = None
        self._blocked_since_ms: float | None = None

    def _now_ms(self) -> float:
        return self._loop.time() * 1000

    def _frame_limit(self, api_key: int) -> int:
        options = self._options
        if api_key == Api.PRODUCE:
            return options.max_produce_frame_bytes
        return options.max_other_frame_bytes

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, unless there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._all.open.add(self)
        self._peer = str(transport.get_extra_info("peername"))
        if len(self._all.open) > self._all.max_connections:
            self.close("too many connections")
            return
        self._caller = Caller(transport.get_extra_info("sockname")[0])
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=SEND_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.closed(self, self._counted_bytes)
        self._counted_bytes = 0
        self._transport = None
        self._outgoing.clear()
        if self._task is not None:
            self._task.cancel()
        if exc is not None:
            _LOG.debug("%s: connection lost: %s", self._peer, exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the frame decides the size
        """Return where the next bytes go."""
        space = self._frames.free_space()
        grown = self._frames.capacity_bytes - self._counted_bytes
        self._counted_bytes += grown
        self._all.buffered_bytes += grown
        if grown > 0 and self._all.buffered_bytes > self._options.max_buffered_bytes:
            # Not here: closing within this callback ends the whole process in libuv.
            reason = "all connections together hold too many bytes of requests"
            self._loop.call_soon(self.close, reason)
        return space

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that arrived."""
        self._frames.received(nbytes)
        self._process()

    def pause_writing(self) -> None:
        """Stop sending: the client does not take what it asked for."""
        self._is_writable = False
        self._blocked_since_ms = self._now_ms()

    def resume_writing(self) -> None:
        """Go on sending."""
        self._is_writable = True
        self._blocked_since_ms = None
        self._send()
        self._process()

    # Requests

    @property
    def _is_busy(self) -> bool:
        """Whether the next request must wait."""
        return self._task is not None or bool(self._outgoing) or not self._is_writable

    def _process(self) -> None:
        """Handle the requests that are here, as far as they need not wait."""
        if self._is_processing:
            return
        self._is_processing = True
        try:
            while self._may_take():
                if not self._take_one():
                    break
        except RemoteProtocolError as error:
            self.close(str(error))
        except Exception:  # noqa: BLE001  # C2: a bug that one client can reach must not end all
            _LOG.exception("%s: a request could not be handled", self._peer)
            self.close("internal error")
        finally:
            self._is_processing = False
        self._mind_reading()

    def _may_take(self) -> bool:
        ready = self._transport is not None and not self._is_busy and not self._all.is_stopping
        return ready and len(self._waiting) < MAX_OVERLAPPING

    def _take_one(self) -> bool:
        """Handle the next request; False if it is not here or must wait."""
        frame = self._frames.next_frame()
        if frame is None:
            if self._frames.buffered_bytes == 0:
                self._frame_began_ms = None
            elif self._frame_began_ms is None:
                self._frame_began_ms = self._now_ms()
            return False
        header = read_header(frame)
        if header.api_key != Api.PRODUCE and self._waiting:
            self._frames.put_back(frame)
            return False
        self._last_request_ms = self._now_ms()
        self._frame_began_ms = None
        if header.api_key == Api.PRODUCE:
            check_responded(header)
            self._waiting.append(
                produce(self._all.broker, header, frame, self._send_responses_in_order)
            )
            self._send_responses_in_order()
            return True
        found = response(self._all.broker, header, frame, self._caller)
        if isinstance(found, bytes | list):
            self._queue(found)
        else:
            self._await(header, found)
        return True

    def _await(
        self,
        header: RequestHeader,
        found: Coroutine[None, None, bytes] | Coroutine[None, None, list[Part]],
    ) -> None:
        self._task = self._loop.create_task(found)
        self._task.add_done_callback(lambda task: self._awaited(header, task))

    def _awaited(self, header: RequestHeader, task: asyncio.Task[bytes | list[Part]]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _LOG.error("%s: request %d failed", self._peer, header.api_key, exc_info=error)
            self.close("internal error")
            return
        self._queue(task.result())
        self._process()

    def _mind_reading(self) -> None:
        """Read no further while the client's own requests wait."""
        if self._transport is None:
            return
        full = self._frames.buffered_bytes >= READ_WHILE_BUSY_BYTES
        must_wait = self._is_busy or len(self._waiting) >= MAX_OVERLAPPING
        wanted = not (full and must_wait)
        if wanted != self._is_reading:
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # Answers

    def _send_responses_in_order(self) -> None:
        """Send the Produce answers that are known, up to the first that is not (C1)."""
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
        """Hand to the transport what it takes, about `SEND_BYTES` at a time."""
        while self._transport is not None and self._outgoing and self._is_writable:
            pieces: list[bytes | bytearray] = []
            size = 0
            try:
                while self._outgoing and size < SEND_BYTES:
                    piece = self._next_piece(SEND_BYTES - size)
                    pieces.append(piece)
                    size += len(piece)
            except (OSError, CorruptionError) as error:
                # The frame's size was announced, so it cannot be ended in another way.
                _LOG.error("%s: records could not be read: %s", self._peer, error)
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

    def overdue(self, now_ms: float) -> str:
        """Return why the connection is out of time; empty if it is not."""
        options = self._options
        if self._blocked_since_ms is not None:
            if now_ms - self._blocked_since_ms > options.send_timeout_ms:
                return "client does not take its answers"
            return ""
        if self._is_busy or self._waiting:
            return ""
        if self._frame_began_ms is not None:
            allowed_ms = options.frame_timeout_ms + self._frames.needed_bytes / RATE_BYTES_PER_MS
            return (
                "request arrives too slowly" if now_ms - self._frame_began_ms > allowed_ms else ""
            )
        return "idle" if now_ms - self._last_request_ms > options.idle_timeout_ms else ""

    def finish(self) -> None:
        """Close the connection once its answers are sent."""
        self._is_finishing = True
        self._send()

    def close(self, reason: str) -> None:
        """Close the connection now; what is not sent yet is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            _LOG.info("%s: closed: %s", self._peer, reason)
            self._transport.abort()
