"""A proxy before an S3 server that spoils requests: fault class F7, one kind at a time.

    with S3Proxy(server.endpoint, delete) as proxy:
        proxy.spoil(Fault("lose-answer", method="PUT"))    the next PUT is done, unheard of

Faults:

    lose-answer     the server does it, the connection ends without an answer
    cut-answer      the server does it, the answer ends in its middle
    cut-body        the server gets half of the body, then the connection ends
    reset           the connection ends before the server hears of anything
    500, 503, 429, 409    the server hears of nothing, the client gets this status
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from kit.machine import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

_CODES: Final = {
    "500": "InternalError",
    "503": "SlowDown",
    "429": "TooManyRequests",
    "409": "ConditionalRequestConflict",
}


@dataclass(frozen=True)
class Fault:
    """What happens to requests of a method."""

    kind: str
    method: str
    times: int = 1


class S3Proxy:
    """The proxy; use it in a `with`.

    Args:
        upstream: URL of the server.
        delete: Removes an object, by its bucket and key; for `forget_condition`.
    """

    def __init__(self, upstream: str, delete: Callable[[str], None]) -> None:
        self._delete = delete
        self._upstream = urlsplit(upstream).netloc
        self._fault: Fault | None = None
        self._left = 0
        self._lock = threading.Lock()
        self.spoiled = 0
        """How many requests were."""

        self.count = 0
        """Requests of all kinds."""

        self.refuse_condition = False
        """Answer what would make a write create-only as a server that does not know it."""

        self.forget_condition = False
        """Leave out what makes a write create-only, as if the server did not know it."""

        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def __getattr__(self, name: str) -> object:
                if name.startswith("do_"):
                    return lambda: proxy.handle(self)
                raise AttributeError(name)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spoil(self, fault: Fault | None = None) -> None:
        """Spoil the next requests of a method; None: let everything through."""
        with self._lock:
            self._fault, self._left = fault, fault.times if fault else 0

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass one request on, unless it is to be spoiled."""
        size = int(handler.headers.get("Content-Length") or 0)
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.send_response_only(100)
            handler.end_headers()
        body = handler.rfile.read(size)
        self.count += 1
        if self.refuse_condition and "If-None-Match" in handler.headers:
            self._refuse(handler, 501, "NotImplemented")
            return
        if self.forget_condition and "If-None-Match" in handler.headers:
            self._replace(handler, body)
            return
        fault = self._fault_for(handler.command)
        if fault in _CODES:
            self._refuse(handler, int(fault), _CODES[fault])
        elif fault in {"reset", "cut-body"}:
            if fault == "cut-body":
                self._send(handler, body[: len(body) // 2])
            _hang_up(handler)
        else:
            self._pass_on(handler, body, fault)

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes, fault: str) -> None:
        connection, answer = self._ask(handler, body)
        with contextlib.closing(connection):
            data = answer.read()
            if fault == "lose-answer":
                _hang_up(handler)
                return
            handler.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                    handler.send_header(name, value)
            head = handler.command == "HEAD"
            length = answer.getheader("Content-Length", "0") if head else str(len(data))
            handler.send_header("Content-Length", length)
            if fault != "cut-answer":
                handler.end_headers()
                handler.wfile.write(data)
                return
            # Half of the body; an answer without one ends in its header.
            if data:
                handler.end_headers()
                handler.wfile.write(data[: len(data) // 2])
                handler.wfile.flush()
            _hang_up(handler)

    def _replace(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Delete, then pass the write on: a condition that is signed cannot be left out."""
        self._delete(handler.path.partition("?")[0].lstrip("/"))
        connection, answer = self._ask(handler, body)
        with contextlib.closing(connection):
            data = answer.read()
        handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() in {"etag", "content-type"}:
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _fault_for(self, method: str) -> str:
        with self._lock:
            if self._fault is None or self._left == 0 or self._fault.method != method:
                return ""
            self._left -= 1
            self.spoiled += 1
            return self._fault.kind

    def _ask(
        self, handler: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        _put_head(connection, handler)
        connection.send(body)
        return connection, connection.getresponse()

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        _put_head(connection, handler)
        connection.send(body)
        connection.close()

    @staticmethod
    def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        data = f"<Error><Code>{code}</Code><Message>spoiled</Message></Error>".encode()
        handler.send_response_only(status)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def _put_head(connection: http.client.HTTPConnection, handler: BaseHTTPRequestHandler) -> None:
    connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
    for name, value in handler.headers.items():
        if name.lower() != "expect":
            connection.putheader(name, value)
    connection.endheaders()


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)
