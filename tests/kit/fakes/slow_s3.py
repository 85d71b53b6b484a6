"""A server that speaks as much of S3 as a test of waiting needs, at the rate that the test wants.

    with SlowS3(Pace(response_bytes_s=10)) as server:
        server.location()               for `S3Store`

Every GET and POST gets the same response, whatever it asks for: a listing, or `body`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final, Self

from kit.servers.machine import HOST
from logmirror.locations import S3Identity, S3Location

_END_S: Final = 60
"""A connection ends after this time at the latest, so that a test that fails ends too."""

_HEAD_END: Final = b"\r\n\r\n"
_LISTING: Final = (
    b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'
)


@dataclass(frozen=True)
class Pace:
    """How fast the server is."""

    response_bytes_s: float = 1e9
    request_bytes_s: float = 1e9
    """Of the body. 0: it stops reading at once."""

    head_bytes_s: float = 1e9
    """Of the response's head."""

    early_bytes_s: float = 1e9
    """Of the response `100 Continue`."""

    piece_bytes: int = 1
    """Bytes that it writes or reads at a time."""


class SlowS3:
    """The server; use it in a `with`."""

    def __init__(self, pace: Pace, body: bytes = _LISTING, status: str = "200 OK") -> None:
        self.pace, self._body, self._status = pace, body, status
        self.connections = 0
        """How many were opened."""

        self.requests = 0
        self._is_over = threading.Event()
        self._listener = socket.create_server((HOST, 0))

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()

    def location(self) -> S3Location:
        """Return a location that this server serves."""
        identity = S3Identity(access_key_id="k", secret_access_key="s")
        return S3Location(
            bucket="bucket",
            region="us-east-1",
            endpoint=self.endpoint,
            path_style=True,
            checksums="when_required",
            read=identity,
            write=identity,
        )

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://{HOST}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _END_S
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            left = b""
            while (found := self._read_head(connection, left)) is not None:
                head, rest = found
                self.requests += 1
                if b"100-continue" in head:
                    early = b"HTTP/1.1 100 Continue\r\n\r\n"
                    self._write(connection, early, self.pace.early_bytes_s, deadline)
                size = _content_length(head)
                self._skip(connection, size - len(rest[:size]), deadline)
                left = rest[size:]
                body = b"" if head.startswith((b"PUT", b"DELETE")) else self._body
                status = f"HTTP/1.1 {self._status}\r\nContent-Length: {len(body)}\r\n\r\n"
                self._write(connection, status.encode(), self.pace.head_bytes_s, deadline)
                if not head.startswith(b"HEAD"):
                    self._write(connection, body, self.pace.response_bytes_s, deadline)

    def _read_head(self, connection: socket.socket, found: bytes) -> tuple[bytes, bytes] | None:
        while _HEAD_END not in found:
            data = connection.recv(65536)
            if not data:
                return None
            found += data
        head, _, rest = found.partition(_HEAD_END)
        return head, rest

    def _write(
        self, connection: socket.socket, data: bytes, bytes_s: float, deadline: float
    ) -> None:
        size = self.pace.piece_bytes if bytes_s < 1e9 else len(data)
        for at in range(0, len(data), size or 1):
            connection.sendall(data[at : at + size])
            self._pause(size / bytes_s, deadline)

    def _skip(self, connection: socket.socket, size: int, deadline: float) -> None:
        rate = self.pace.request_bytes_s
        while size > 0:
            if not rate:
                self._pause(_END_S, deadline)
            data = connection.recv(min(size, self.pace.piece_bytes if rate < 1e9 else 65536))
            if not data:
                raise ConnectionAbortedError
            size -= len(data)
            self._pause(len(data) / rate, deadline)

    def _pause(self, seconds: float, deadline: float) -> None:
        left = deadline - time.monotonic()
        if seconds > 1e-6 and self._is_over.wait(min(seconds, max(left, 0))):
            raise ConnectionAbortedError
        if left <= 0:
            raise ConnectionAbortedError


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
