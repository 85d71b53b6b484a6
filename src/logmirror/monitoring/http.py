"""The metrics endpoint: `/metrics`, `/livez`, `/readyz`, `/status.json`.

Responses are made from values that the loop has stored, so a request never blocks the loop.

Invariants:
1. No client can keep others from the probes: of too many connections, the one is dropped that has
   been open longest without a complete request.
2. A request has `REQUEST_MS` to arrive, and a connection ends after `DEADLINE_MS`.
3. `/metrics` and `/status.json` are each made at most once every `SHARED_MS`, however many clients
   ask; all get the same bytes. They are made by one thread of their own, in small steps, so that
   neither the probes nor the mirrors wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError, UsageError
from logmirror.monitoring.exposition import Exposition, Shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logmirror.monitoring.exposition import Values, Views
    from logmirror.monitoring.metrics import Metric

_LOG = logging.getLogger("logmirror.monitoring")

LOOPBACK: Final = "127.0.0.1"
REQUEST_MS: Final = 1_000
"""How long a request line and its headers may take together."""

DEADLINE_MS: Final = 10_000
"""Longest lifetime of a connection."""

CONNECTIONS_MAX: Final = 64
"""Limit for open connections."""

SHARED_MS: Final = 1_000
"""How long one `/metrics` or `/status.json` is sent to all who ask."""

PATHS: Final = ("/metrics", "/livez", "/readyz", "/status.json")

_QUEUE: Final = 512
"""Connections that the kernel holds until the loop accepts them."""
_ACCEPTED_MAX: Final = 16
"""Connections accepted in one turn of the loop. Far below `CONNECTIONS_MAX`, so that a connection
whose request has arrived is never the oldest one without a request."""
_HEAD_BYTES_MAX: Final = 16_384
_TURN_S: Final = 0.05
_PAUSE_MS: Final = 0.1
"""Between two chunks of `/metrics`: other threads get the interpreter."""

_HINT: Final = (
    "set LOGMIRROR_METRICS_PORT to a free port, or to 0 for none; LOGMIRROR_METRICS_HOST is an "
    "address of this machine"
)
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.contextmanager
def serve(  # noqa: PLR0913  # what the environment and the configuration say of the endpoint
    port: int,
    recorder: Values,
    views: Views,
    shown: Shown | None = None,
    *,
    host: str = LOOPBACK,
    is_required: bool = True,
    catalogue: Sequence[Metric] | None = None,
    hint: str = _HINT,
) -> Iterator[int | None]:
    """Serve the metrics endpoint until the block ends.

    Args:
        port: TCP port, 1..65535. 0: the endpoint is disabled.
        recorder: The source of the metrics.
        views: The source of probes and status.
        shown: Which metrics are exported. None: the defaults of `Shown`.
        host: The address to listen on.
        is_required: Whether a port that cannot be opened is an error; else it is logged.
        catalogue: The metrics. None: those of mirrors.
        hint: What to do about a port that cannot be opened.

    Yields:
        The port; None if the endpoint is disabled or cannot be opened.

    Raises:
        UnavailableError: Another process uses the port.
        UsageError: The address does not belong to this machine, or the port is not permitted.
    """
    listener = _open(host, port, hint, is_required=is_required) if port else None
    if listener is None:
        yield None
        return
    _LOG.info("metrics endpoint enabled", extra={"facts": {"host": host, "port": port}})
    server = _Server(listener, views, Exposition(recorder, views, shown, catalogue=catalogue))
    thread = threading.Thread(target=server.run, name="metrics-endpoint", daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.stop()
        thread.join()


def _open(host: str, port: int, hint: str, *, is_required: bool) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=_QUEUE, dualstack_ipv6=is_dual
        )
    except OSError as error:
        # those of name resolution are negative, and no numbers of the system
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error)
        facts: dict[str, object] = {"host": host, "port": port, "reason": reason}
        if is_required:
            is_taken = error.errno == errno.EADDRINUSE
            kind = UnavailableError if is_taken else UsageError
            raise kind(
                "the metrics endpoint cannot be opened",
                hint=hint,
                **facts,
            ) from error
        _LOG.warning("metrics endpoint disabled: it cannot be opened", extra={"facts": facts})
        return None


# -- pages -----------------------------------------------------------------------------------------


class _Page(NamedTuple):
    """The content of a response."""

    status: HTTPStatus
    kind: str
    chunks: list[bytes]


def _probe(reasons: list[str]) -> _Page:
    text = "".join(f"{reason}\n" for reason in reasons) or "ok\n"
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return _Page(status, _TEXT, [text.encode()])


def _metrics(exposition: Exposition) -> _Page:
    chunks = []
    for chunk in exposition.chunks():
        chunks.append(chunk)
        SYSTEM_CLOCK.sleep_ms(_PAUSE_MS)
    return _Page(HTTPStatus.OK, _PROMETHEUS, chunks)


def _status(views: Views) -> _Page:
    return _Page(HTTPStatus.OK, _JSON, [json.dumps(views.status(), indent=1).encode()])


class _Shared:
    """A page that is made in another thread, at most once every `SHARED_MS`."""

    def __init__(self, make: Callable[[], _Page], pool: ThreadPoolExecutor) -> None:
        self._make, self._pool = make, pool
        self._made: asyncio.Future[_Page] | None = None
        self._begun_s = 0.0

    async def get(self) -> _Page:
        """Return the page. Only in the loop's thread."""
        loop = asyncio.get_running_loop()
        is_old = loop.time() - self._begun_s >= SHARED_MS / 1000
        if self._made is None or (is_old and self._made.done()):
            self._begun_s = loop.time()
            self._made = loop.run_in_executor(self._pool, self._make)
        return await asyncio.shield(self._made)  # others wait for it, too


# -- the server ------------------------------------------------------------------------------------


class _Server:
    """An event loop in a thread of its own. Each connection serves one request."""

    def __init__(self, listener: socket.socket, views: Views, exposition: Exposition) -> None:
        self._listener, self._views = listener, views
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, bool] = {}
        """Open connections, oldest first, and whether the request is still to come."""

        self._tasks: set[asyncio.Task[None]] = set()
        """One for each connection."""

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="metrics-pages")
        self._shared = {
            "/metrics": _Shared(lambda: _metrics(exposition), self._pool),
            "/status.json": _Shared(lambda: _status(views), self._pool),
        }

    def run(self) -> None:
        """Serve until `stop`."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._pool.shutdown(cancel_futures=True)  # a page that is being made is finished
            self._loop.close()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        self._listen()
        await self._stopping.wait()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._tasks:
            for writer in self._open:
                writer.transport.abort()  # which ends its task
            await asyncio.wait(self._tasks, timeout=_TURN_S)
        await asyncio.sleep(0)  # the aborted are closed

    def _listen(self) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_MAX):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_TURN_S, self._listen)
                return
            task = self._loop.create_task(self._handle(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=_HEAD_BYTES_MAX)
        self._open[writer] = True
        if len(self._open) > CONNECTIONS_MAX:
            waiting = (one for one, is_waiting in self._open.items() if is_waiting)
            dropped = next(waiting, next(iter(self._open)))
            del self._open[dropped]
            dropped.transport.abort()
        try:
            async with asyncio.timeout(DEADLINE_MS / 1000):
                async with asyncio.timeout(REQUEST_MS / 1000):
                    method, path = await _read_request(reader)
                if writer in self._open:
                    self._open[writer] = False
                await self._respond(writer, method, path)
        except (OSError, ValueError):
            pass  # late, torn, too long, dropped, or at the end of the run
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _respond(self, writer: asyncio.StreamWriter, method: str, path: str) -> None:
        try:
            page = await self._page(method, path)
        except Exception:  # noqa: BLE001  # a page with an error must not end the endpoint
            _LOG.exception("a page of the metrics endpoint could not be made")
            page = _Page(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, [])
        head = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\n"
            f"Date: {formatdate(SYSTEM_CLOCK.now_ms() / 1000, usegmt=True)}\r\n"
            f"Content-Type: {page.kind}\r\n"
            f"Content-Length: {sum(map(len, page.chunks))}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode())
        for chunk in page.chunks if method != "HEAD" else ():
            writer.write(chunk)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _page(self, method: str, path: str) -> _Page:
        if method not in {"GET", "HEAD"}:
            return _Page(HTTPStatus.NOT_IMPLEMENTED, _TEXT, [])
        if path == "/livez":
            return _probe(self._views.not_live())
        if path == "/readyz":
            return _probe(self._views.not_ready())
        if path in self._shared:
            return await self._shared[path].get()
        return _Page(HTTPStatus.NOT_FOUND, _TEXT, [f"{known}\n".encode() for known in PATHS])


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Read the head of a request; return its method and its path, without the query.

    Raises:
        ValueError: It is too long, or not a request.
        ConnectionError: It ended early.
    """
    first = line = await reader.readline()
    received = len(first)
    while line not in {b"\r\n", b"\n"}:
        line = await reader.readline()
        received += len(line)
        if not line:
            raise ConnectionResetError
        if received > _HEAD_BYTES_MAX:
            message = "the request is too long"
            raise ValueError(message)
    method, target, _ = first.decode("latin-1").split(maxsplit=2)
    return method, target.partition("?")[0]
