"""Bytes to and from one broker: TCP, TLS, and a deadline for every wait.

Invariants:
1. Every wait ends at the caller's deadline on the monotonic clock, however slowly bytes arrive: the
   host name lookup, TCP, the TLS handshake, each request and each response.
2. Bytes are received straight into the caller's view.
3. Errors of the operating system and of TLS leave this module as `LogmirrorError`.
4. Bytes that the kernel has taken reach the broker's machine within `LINGER_MS_MAX`, or the
   connection fails. Unsent bytes of an aborted connection are never sent.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import ssl
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

from logmirror.cluster.dialing import LookupFailedError, dial, remaining_s
from logmirror.cluster.tls import tls_context, tls_error
from logmirror.errors import CorruptionError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

_SCRATCH_BYTES: Final = 65_536
LINGER_MS_MAX: Final = 4_000
"""How long bytes may stay in the kernel, not acknowledged by the broker's machine or unsent because
its window is full, before the kernel aborts the connection (TCP_USER_TIMEOUT, Linux). This does not
cover bytes that the broker's kernel has received: a paused broker reads them when it resumes."""

_RECEIVE_BYTES_MIN: Final = 262_144
"""A large response is received in pieces of at least this size. Without it, a reader on the same
machine receives some 60 kB at a time, and uses a tenth more CPU."""

_IOV_MAX: Final = 1024
"""How many buffers one `sendmsg` may have (limits.h of Linux)."""
_RECORD_BYTES: Final = 16_384
"""The largest TLS record; smaller buffers are joined into one."""

_FAMILIES: Final = {"any": socket.AF_UNSPEC, "v4": socket.AF_INET, "v6": socket.AF_INET6}
_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TLS_ALERT: Final = b"\x15\x03"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Transport:
    """One open socket.

    Args:
        host: Host name or address; the certificate is checked against it.
        port: The broker's port.
        settings: Security, buffer sizes, address family.
        clock: For deadlines.
        tls: The context to use; None creates one if the settings require TLS.
        deadline_ms: Monotonic deadline for the connection and the TLS handshake.

    Raises:
        UnavailableError: The broker was not reached in time.
        UsageError: TLS settings do not match.
    """

    def __init__(  # noqa: PLR0913  # the parameters of a socket; `Connection` alone calls it
        self,
        host: str,
        port: int,
        settings: ConnectionSettings,
        *,
        clock: Clock,
        tls: ssl.SSLContext | None,
        deadline_ms: int,
    ) -> None:
        self.host = host
        self.port = port
        self._clock = clock
        self._tls = tls_context(settings) if tls is None and settings.uses_tls else tls
        self._discarded = memoryview(bytearray(_SCRATCH_BYTES))
        self._socket = self._connect(settings, deadline_ms)

    def close(self) -> None:
        """Close the socket; may be called again."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def abort(self) -> None:
        """Close the socket with RST, so that unsent bytes are dropped."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close()

    def fileno(self) -> int:
        """For poll; -1 when closed."""
        return self._socket.fileno()

    def has_hung_up(self) -> bool:
        """Whether the broker has closed its side, or the connection has failed; never waits."""
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)  # POLLHUP and POLLERR are always reported
        return bool(poller.poll(0))

    def pieces(self, buffers: Iterable[bytes | memoryview]) -> deque[memoryview]:
        """Prepare the buffers of one message for `send_some`."""
        views = deque(memoryview(buffer).cast("B") for buffer in buffers)
        if not isinstance(self._socket, ssl.SSLSocket):
            return views
        joined: deque[memoryview] = deque()
        small = bytearray()
        for view in views:
            if len(small) + len(view) > _RECORD_BYTES and small:
                joined.append(memoryview(small))
                small = bytearray()
            if len(view) > _RECORD_BYTES:
                joined.append(view)
            else:
                small += view
        if small:
            joined.append(memoryview(small))
        return joined

    def send_some(self, pieces: deque[memoryview]) -> int:
        """Send what the kernel accepts now, and remove it from `pieces`; never waits.

        Returns:
            The number of bytes sent. 0 if the kernel accepts none: poll, and call again with the
            same pieces, as TLS requires.

        Raises:
            UnavailableError: The connection has failed.
        """
        try:
            if self._socket.gettimeout() != 0:
                self._socket.settimeout(0)
            if isinstance(self._socket, ssl.SSLSocket):
                # One TLS record at a time, so that one call is one write, as without TLS.
                count = self._socket.send(pieces[0][:_RECORD_BYTES])
            else:
                count = self._socket.sendmsg(itertools.islice(pieces, _IOV_MAX))
        except _NOT_NOW:
            return 0
        except OSError as error:
            self._fail("the request could not be sent", error)
        left = count
        while left and left >= len(pieces[0]):
            left -= len(pieces.popleft())
        if left:
            pieces[0] = pieces[0][left:]
        return count

    def receive_now(self, view: memoryview) -> int:
        """Receive available bytes, at most the view; never waits. Returns 0 if there are none.

        Raises:
            UnavailableError: The broker closed the connection, or it has failed.
        """
        try:
            if self._socket.gettimeout() != 0:
                self._socket.settimeout(0)
            count = self._socket.recv_into(view)
        except _NOT_NOW:
            return 0
        except OSError as error:
            self._fail("no response", error)
        if count == 0:
            self._fail("the broker closed the connection", None)
        return count

    def send(self, data: bytes, deadline_ms: int) -> None:
        """Send all bytes, or raise UnavailableError."""
        try:
            self._socket.settimeout(remaining_s(self._clock, deadline_ms))
            self._socket.sendall(data)
        except OSError as error:
            self._fail("the request could not be sent", error)

    def receive_some(self, view: memoryview, deadline_ms: int) -> int:
        """Receive at least one byte, at most the view."""
        try:
            self._socket.settimeout(remaining_s(self._clock, deadline_ms))
            count = self._socket.recv_into(view)
        except OSError as error:
            self._fail("no response", error)
        if count == 0:
            self._fail("the broker closed the connection", None)
        return count

    def receive(self, view: memoryview, filled: int, until: int, deadline_ms: int) -> int:
        """Fill `view` from `filled` to exactly `until`; return the new fill level."""
        if until - filled > _RECEIVE_BYTES_MIN and not isinstance(self._socket, ssl.SSLSocket):
            self._set(socket.SO_RCVLOWAT, _RECEIVE_BYTES_MIN)
            while until - filled > _RECEIVE_BYTES_MIN:
                filled += self.receive_some(view[filled:until], deadline_ms)
            self._set(socket.SO_RCVLOWAT, 1)
        while filled < until:
            filled += self.receive_some(view[filled:until], deadline_ms)
        return filled

    def discard(self, count: int, deadline_ms: int) -> None:
        """Receive `count` bytes and drop them."""
        while count > 0:
            count -= self.receive_some(self._discarded[:count], deadline_ms)

    def check_frame(self, size: int, cap: int) -> None:
        """Check the size of a frame, before memory is allocated for it.

        Args:
            size: The size field of the frame, in bytes.
            cap: The largest size to accept.

        Raises:
            UsageError: Not a size: the listener speaks TLS.
            CorruptionError: The size is out of range.
        """
        if 0 < size <= cap:
            return
        facts = {"host": self.host, "port": self.port, "frame_bytes": size, "max_bytes": cap}
        if size.to_bytes(4, "big", signed=True).startswith(_TLS_ALERT):
            raise UsageError(
                "the listener responds with TLS",
                hint="set security.protocol to SSL or SASL_SSL",
                **facts,
            )
        raise CorruptionError(
            "the size of a response is out of range",
            hint="raise receive.message.max.bytes if the topic's batches are that large; "
            "otherwise check that this is a Kafka listener",
            **facts,
        )

    def _set(self, option: int, value: int) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError as error:
            self._fail("the socket cannot be used", error)

    def _connect(self, settings: ConnectionSettings, deadline_ms: int) -> socket.socket:
        try:
            plain = dial(
                self.host,
                self.port,
                clock=self._clock,
                deadline_ms=deadline_ms,
                family=_FAMILIES[settings.address_family],
                prepare=lambda opened: _tune(opened, settings),
            )
        except LookupFailedError as error:
            self._fail("the host name could not be resolved", error)
        except OSError as error:
            self._fail("the broker could not be reached", error)
        return self._wrap(plain, deadline_ms)

    def _wrap(self, plain: socket.socket, deadline_ms: int) -> socket.socket:
        if self._tls is None:
            return plain
        try:
            plain.settimeout(remaining_s(self._clock, deadline_ms))
            return self._tls.wrap_socket(plain, server_hostname=self.host)
        except (OSError, ValueError) as error:  # ValueError: not a valid host name
            plain.close()
            raise tls_error(error, host=self.host, port=self.port) from error

    def _fail(self, message: str, error: Exception | None) -> NoReturn:
        if isinstance(error, ssl.SSLError):
            # With TLS 1.3 a refused client certificate shows in the first response.
            raise tls_error(error, host=self.host, port=self.port) from error
        if isinstance(error, TimeoutError):
            message, error = f"{message} in time", None
        failure = UnavailableError(message, host=self.host, port=self.port)
        if error is not None:
            failure.add_facts(reason=str(error))
        raise failure from error


def _tune(plain: socket.socket, settings: ConnectionSettings) -> None:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINGER_MS_MAX)
    if settings.socket_keepalive:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Before connect, where the window scale is negotiated. Not set by default: a fixed receive
    # buffer disables the system's autotuning, which grows further.
    if settings.socket_send_buffer_bytes:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_send_buffer_bytes)
    if settings.socket_receive_buffer_bytes:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_receive_buffer_bytes)
