"""A proxy in front of an S3 server that injects faults: fault class F7, one kind at a time.

    with S3Proxy(server.endpoint, delete) as proxy:
        proxy.spoil(Fault("lose-response", method="PUT"))    the next PUT succeeds, its response is
        lost proxy.spoil(Fault("reset", method="UploadPart"))   by the name of the request

Faults:

    lose-response   the server executes the request, the connection ends without a response
    cut-response    the server executes the request, the response is cut in the middle
    cut-body        the server gets half of the body, then the connection ends
    reset           the connection ends, the server gets nothing
    silence         the server gets nothing, the client gets no response
    delay           the server executes the request `DELAY_S` later, the client gets its response
    late            the server executes the request, the client gets no response
    wrong-body      the server gets a body with one changed byte
    wrong-response  the server executes the request, the client gets a body with one changed byte
    wrong-etag      the server executes the request, the client gets another ETag
    200-error       the server gets nothing, the client gets status 200 with an error in the body
    denied, skewed, 500, 503, 429, 409
                    the server gets nothing, the client gets this error
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import parse_qs, urlsplit

from kit.servers.machine import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_REFUSALS: Final = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "409": (409, "ConditionalRequestConflict"),
    "409-folder": (409, "ExistingObjectIsDirectory"),
    "200-error": (200, "InternalError"),
    "denied": (403, "AccessDenied"),
    "skewed": (403, "RequestTimeTooSkewed"),
}
SILENCE_S: Final = 2
"""Longer than the timeouts of clients in tests that use it."""

DELAY_S: Final = 1
"""Many times what a request takes, and shorter than the timeouts of clients."""


_WRITES: Final = {"PutObject", "CompleteMultipartUpload"}
"""What makes an object visible."""

_OPERATIONS: Final = {
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", ""): "GetObject",
    ("PUT", "partNumber"): "UploadPart",
    ("PUT", ""): "PutObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("POST", ""): "AssumeRole",  # the only one of STS that is asked here
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("DELETE", ""): "DeleteObject",
    ("HEAD", ""): "HeadObject",
}


def operation_of(method: str, path: str) -> str:
    """The name of a request, as Amazon's documentation has it."""
    query = {"", *parse_qs(urlsplit(path).query, keep_blank_values=True)}
    return next(name for (of, key), name in _OPERATIONS.items() if of == method and key in query)


@dataclass(frozen=True)
class Fault:
    """A fault for requests of a method."""

    kind: str
    method: str
    """Or the name of a request; see `operation_of`. Empty: any."""

    times: int = 1
    part: str = ""
    """Of the paths of the requests."""


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
        self._next: Iterator[Fault | None] = iter(())
        self._lock = threading.Lock()
        self.spoiled = 0
        """How many requests were."""

        self.count = 0
        """Requests of all kinds."""

        self.asked: Counter[str] = Counter()
        """How often each kind of request came, by its name."""

        self.heads: list[tuple[str, dict[str, str]]] = []
        """The name of each request and its header, whose names are in lower case."""

        self.created: list[str] = []
        """Paths that were written with success, by whatever request makes an object visible."""

        self._may_write = threading.Event()
        self._may_write.set()
        self._held_part = b""
        self._held_operations: Collection[str] = _WRITES
        self.held = 0
        """How many requests were."""

        self._completed: set[str] = set()
        self.refuse_condition = False
        """Handle conditional writes as a server without support for them does."""

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
        self._may_write.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spoil(self, fault: Fault | None = None) -> None:
        """Inject a fault into the next requests of a method; None removes all faults."""
        with self._lock:
            self._fault, self._left = fault, fault.times if fault else 0

    def spoil_some(self, faults: Iterator[Fault | None]) -> None:
        """Queue faults, each for the next request that it fits; None forwards one unchanged."""
        with self._lock:
            self._next = faults

    @contextlib.contextmanager
    def holding(self, part: bytes = b"", operations: Collection[str] = _WRITES) -> Iterator[None]:
        """Hold requests back, before the server and all faults see them.

        Args:
            part: Of their paths or bodies.
            operations: Their names; without them, what makes an object visible.
        """
        self._held_part, self._held_operations = part, operations
        self._may_write.clear()
        try:
            yield
        finally:
            self._may_write.set()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Forward one request, or inject its fault."""
        size = int(handler.headers.get("Content-Length") or 0)
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.send_response_only(100)
            handler.end_headers()
        body = handler.rfile.read(size)
        self.count += 1
        operation = operation_of(handler.command, handler.path)
        self.asked[operation] += 1
        place = handler.path.encode()
        self.heads.append((operation, {k.lower(): v for k, v in handler.headers.items()}))
        if self.refuse_condition and "If-None-Match" in handler.headers:
            self._refuse(handler, 501, "NotImplemented")
            return
        if self.forget_condition and "If-None-Match" in handler.headers:
            self._replace(handler, body)
            return
        is_meant = operation in self._held_operations and self._held_part in place + body
        if is_meant and not self._may_write.is_set():
            self.held += 1
            self._may_write.wait()
        fault = self._fault_for(handler.command, operation, handler.path)
        if fault in _REFUSALS:
            self._refuse(handler, *_REFUSALS[fault])
        elif fault in {"reset", "cut-body", "silence"}:
            if fault == "silence":
                time.sleep(SILENCE_S)
            if fault == "cut-body":
                self._send(handler, body[: len(body) // 2])
            _hang_up(handler)
        else:
            if fault == "delay":
                time.sleep(DELAY_S)
            self._pass_on(handler, body, fault)

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes, fault: str) -> None:
        connection, response = self._ask(handler, _spoiled(body) if fault == "wrong-body" else body)
        with contextlib.closing(connection):
            data = response.read()
            self._note(handler, response.status)
            if fault in {"lose-response", "late"}:
                if fault == "late":
                    time.sleep(SILENCE_S)
                _hang_up(handler)
                return
            if fault == "wrong-response":
                data = _spoiled(data)
            handler.send_response_only(response.status, response.reason)
            for name, value in response.getheaders():
                if fault == "wrong-etag" and name.lower() == "etag":
                    handler.send_header(name, f'"{"0" * 32}"')
                elif name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                    handler.send_header(name, value)
            head = handler.command == "HEAD"
            length = response.getheader("Content-Length", "0") if head else str(len(data))
            handler.send_header("Content-Length", length)
            if fault != "cut-response":
                handler.end_headers()
                handler.wfile.write(data)
                return
            # Half of the body; a response without a body is cut in its header.
            if data:
                handler.end_headers()
                handler.wfile.write(data[: len(data) // 2])
                handler.wfile.flush()
            _hang_up(handler)

    def _replace(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Delete, then pass the write on: a condition that is signed cannot be left out."""
        self._delete(handler.path.partition("?")[0].lstrip("/"))
        connection, response = self._ask(handler, body)
        with contextlib.closing(connection):
            data = response.read()
        handler.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() in {"etag", "content-type"}:
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _note(self, handler: BaseHTTPRequestHandler, status: int) -> None:
        makes = operation_of(handler.command, handler.path)
        if status == HTTPStatus.OK and makes in _WRITES:
            with self._lock:
                # The server says yes again to who completes an upload again.
                if makes == "PutObject" or handler.path not in self._completed:
                    self.created.append(urlsplit(handler.path).path)
                self._completed.add(handler.path)

    def _fault_for(self, method: str, operation: str, path: str) -> str:
        with self._lock:
            if self._left == 0:
                self._fault = next(self._next, None)
                self._left = self._fault.times if self._fault else 0
            fault = self._fault
            if fault is None or fault.method not in {"", method, operation}:
                return ""
            if fault.part not in path:
                return ""
            self._left -= 1
            self.spoiled += 1
            return fault.kind

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
        error = f"<Error><Code>{code}</Code><Message>spoiled</Message></Error>"
        is_role = operation_of(handler.command, handler.path) == "AssumeRole"
        data = (f"<ErrorResponse>{error}</ErrorResponse>" if is_role else error).encode()
        handler.send_response_only(status)
        handler.send_header("Date", "Thu, 01 Jan 2026 00:00:00 GMT")
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def _spoiled(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


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
