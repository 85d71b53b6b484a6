"""Connections to an S3 API whose requests have a total deadline, with a floor rate.

Timeouts of sockets apply to one operation each: a server that sends a byte every nine seconds never
exceeds one of ten. An attempt therefore has a limit of its own. After a grace time, the bytes that
were sent and received since its beginning must have moved at `FLOOR_BYTES_S` or more:

    deadline = begin + grace + bytes / FLOOR_BYTES_S

The limit covers request and response, headers and bodies, error bodies, listings, and the requests
that assume roles. It does not cover name resolution and connecting, which have their own timeouts.
botocore and urllib3 keep their connections, and use them as before.
"""

from __future__ import annotations

import contextlib
import io
import socket
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from botocore.awsrequest import (  # type: ignore[import-untyped]  # ships no py.typed
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOOR_BYTES_S: Final = 64 << 10
"""The lowest rate at which a request is waited for, in bytes per second."""

_PIECE_BYTES: Final = 16 << 10
"""Bytes per write to a socket. A record of TLS holds as many, so one write is one system call."""


_UNSENT_LIMIT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 0)
_UNSENT_BYTES: Final = 128 << 10
"""Bytes that wait in the system's buffer. Else that takes megabytes at once, which says nothing of
the rate, and a slow link is still sending them when the response is due."""


class Limit:
    """The limit of one attempt.

    Args:
        grace_ms: Time that is allowed for no bytes at all.
        idle_ms: Time that one operation on a socket may take.
        bytes_max: How many bytes may be received.
    """

    def __init__(self, *, grace_ms: int, idle_ms: int, bytes_max: int) -> None:
        self._began_ms: int | None = None
        """When the first byte was to be sent. Loading botocore's models does not count."""

        self._grace_ms, self._idle_ms, self._bytes_max = grace_ms, idle_ms, bytes_max
        self._sent_bytes = self._received_bytes = 0
        self.reason = ""
        """Why the attempt has ended; empty while it is within the limit."""

    def wait_s(self) -> float:
        """Return the timeout of the next operation, in seconds.

        Raises:
            TimeoutError: The deadline has passed.
        """
        moved_bytes = self._sent_bytes + self._received_bytes
        allowed_ms = self._grace_ms + moved_bytes * 1000 // FLOOR_BYTES_S
        left_ms = allowed_ms - self._passed_ms()
        if left_ms <= 0:
            self.timed_out()
            raise TimeoutError(self.reason)
        return min(left_ms, self._idle_ms) / 1000

    def timed_out(self) -> None:
        """Record that an operation took as long as `wait_s` allows."""
        self.reason = (
            f"too slow: {self._sent_bytes} bytes sent and {self._received_bytes} received "
            f"in {self._passed_ms() / 1000:.1f} s"
        )

    def _passed_ms(self) -> int:
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        if self._began_ms is None:
            self._began_ms = now_ms
        return now_ms - self._began_ms

    def sent(self, size_bytes: int) -> None:
        """Count bytes of the request."""
        self._sent_bytes += size_bytes

    def received(self, size_bytes: int) -> None:
        """Count bytes of the response.

        Raises:
            OSError: There are more of them than allowed.
        """
        self._received_bytes += size_bytes
        if self._received_bytes > self._bytes_max:
            self.reason = f"a response of more than {self._bytes_max} bytes"
            raise OSError(self.reason)


_current: Final[ContextVar[Limit | None]] = ContextVar("limit of an attempt", default=None)


@contextlib.contextmanager
def limited(limit: Limit) -> Iterator[None]:
    """Apply a limit to all requests that this thread sends until the block ends."""
    token = _current.set(limit)
    try:
        yield
    finally:
        _current.reset(token)


def use_limits(client: Any) -> Any:  # noqa: ANN401  # boto3 makes its classes at run time
    """Make a client's connections obey `limited`; returns the client."""
    # botocore has no other place for this. All pools of a client share the dictionary.
    session = client._endpoint.http_session  # noqa: SLF001  # see above
    session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)  # noqa: SLF001  # see above
    return client


class _LimitedSocket:
    """A connected socket, whose operations obey the current limit."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever a socket has
        return getattr(self._socket, name)

    def recv_into(self, *arguments: Any) -> int:  # noqa: ANN401  # as `socket.recv_into`
        limit = _current.get()
        if limit is None:
            return self._socket.recv_into(*arguments)
        self._socket.settimeout(limit.wait_s())
        try:
            count = self._socket.recv_into(*arguments)
        except TimeoutError:
            limit.timed_out()
            raise
        limit.received(count)
        return count

    def sendall(self, data: bytes) -> None:
        limit = _current.get()
        if limit is None:
            self._socket.sendall(data)
            return
        with memoryview(data) as view, view.cast("B") as rest:
            for at in range(0, len(rest), _PIECE_BYTES):
                piece = rest[at : at + _PIECE_BYTES]
                self._socket.settimeout(limit.wait_s())
                try:
                    self._socket.sendall(piece)
                except TimeoutError:
                    limit.timed_out()
                    raise
                limit.sent(len(piece))

    def makefile(self, mode: str = "rb", buffering: int | None = None) -> io.IOBase:
        del mode  # http.client and botocore only read
        file = _File(self, self._socket.makefile("rb", buffering=0))
        return file if buffering == 0 else io.BufferedReader(file)


class _File(io.RawIOBase):
    """The received bytes of a socket. `held` keeps the socket open until the file is closed."""

    def __init__(self, limited_socket: _LimitedSocket, held: io.IOBase) -> None:
        self._socket, self._held = limited_socket, held

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  # any writable buffer
        return self._socket.recv_into(buffer)

    def fileno(self) -> int:
        return self._held.fileno()

    def close(self) -> None:
        super().close()
        self._held.close()


class _Limited:
    """Mixin for connections: limits their sockets, also while a proxy is asked for a tunnel."""

    sock: Any

    def _new_conn(self) -> Any:  # noqa: ANN401  # a socket, or what behaves like one
        connected = super()._new_conn()  # type: ignore[misc]  # of the other base
        if _UNSENT_LIMIT:
            connected.setsockopt(socket.IPPROTO_TCP, _UNSENT_LIMIT, _UNSENT_BYTES)
        return _LimitedSocket(connected)

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]  # the same
        if not isinstance(self.sock, _LimitedSocket):  # TLS has wrapped it
            self.sock = _LimitedSocket(self.sock)


class _Connection(_Limited, AWSHTTPConnection):  # type: ignore[misc]  # untyped
    pass


class _TlsConnection(_Limited, AWSHTTPSConnection):  # type: ignore[misc]  # untyped
    pass


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]  # untyped
    ConnectionCls = _Connection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]  # untyped
    ConnectionCls = _TlsConnection
