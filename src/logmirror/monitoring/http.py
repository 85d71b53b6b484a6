"""The metrics endpoint: `/metrics`, `/livez`, `/readyz`, `/status.json`.

Responses are made from values that the loop has stored, so a request never blocks the loop. Each
connection serves one request and is closed after `DEADLINE_MS` at the latest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socketserver
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from logmirror.clock import SYSTEM_CLOCK
from logmirror.monitoring.metrics import AGGREGATES, CATALOGUE, MIRROR_V3_CATALOGUE, READY

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric as Family

    from logmirror.clock import Clock
    from logmirror.monitoring.metrics import Metric, Recorder

_LOG = logging.getLogger("logmirror.monitoring")

HOST: Final = "0.0.0.0"  # noqa: S104  # Prometheus and the kubelet are on other machines
DEADLINE_MS: Final = 10_000
"""Longest lifetime of a connection."""

CONNECTIONS_MAX: Final = 16
"""Limit for open connections. Further ones are closed at once."""

_POLL_S: Final = 0.25
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class Views(Protocol):
    """The source of probes and status. All methods are safe from any thread."""

    def not_live(self) -> list[str]:
        """Return why the process should be restarted. Empty: it is live."""
        ...

    def not_ready(self) -> list[str]:
        """Return why the process is not ready. Empty: it is ready."""
        ...

    def status(self) -> dict[str, object]:
        """Return the content of `/status.json`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Which metrics `/metrics` exports."""

    partitions: bool = True
    """Whether metrics of single partitions are exported, in addition to the aggregates."""

    mirror_v3_names: bool = False
    """Whether metrics under the names of mirror-v3 are exported."""


@contextlib.contextmanager
def serve(
    port: int, recorder: Recorder, views: Views, shown: Shown | None = None
) -> Iterator[int | None]:
    """Serve the metrics endpoint until the block ends.

    Args:
        port: TCP port, 1..65535. 0: the endpoint is disabled.
        recorder: The source of the metrics.
        views: The source of probes and status.
        shown: Which metrics are exported. None: the defaults of `Shown`.

    Yields:
        The port; None if the endpoint is disabled or another process uses the port.
    """
    server = _open(port, _pages(recorder, views, shown or Shown())) if port else None
    if server is None:
        yield None
        return
    _LOG.info("metrics endpoint enabled", extra={"facts": {"port": port}})
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="metrics-endpoint", daemon=True
    )
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _open(port: int, pages: dict[str, Callable[[], _Response]]) -> _Server | None:
    try:
        return _Server(port, pages)
    except OSError as error:
        facts = {"port": port, "error": error.strerror or str(error)}
        _LOG.warning("metrics endpoint disabled: the port is in use", extra={"facts": facts})
        return None


# -- responses -------------------------------------------------------------------------------------

_Response = tuple[int, str, bytes]
"""Status, content type, body."""


def _pages(recorder: Recorder, views: Views, shown: Shown) -> dict[str, Callable[[], _Response]]:
    registry = exposition(recorder, views, shown)
    return {
        "/metrics": lambda: (200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)),
        "/livez": lambda: _probe(views.not_live()),
        "/readyz": lambda: _probe(views.not_ready()),
        "/status.json": lambda: (200, _JSON, json.dumps(views.status(), indent=1).encode()),
    }


def _probe(reasons: list[str]) -> _Response:
    text = "".join(f"{reason}\n" for reason in reasons) or "ok\n"
    return (503 if reasons else 200), _TEXT, text.encode()


class _Collected(Collector):
    """Converts the recorder's values to Prometheus's types at each scrape."""

    def __init__(self, recorder: Recorder, views: Views | None, shown: Shown, clock: Clock) -> None:
        self._recorder, self._views, self._clock = recorder, views, clock
        wanted = (*CATALOGUE, *AGGREGATES, *(MIRROR_V3_CATALOGUE if shown.mirror_v3_names else ()))
        self._metrics = [
            metric for metric in wanted if shown.partitions or "partition" not in metric.labels
        ]

    def collect(self) -> Iterator[Family]:
        """See `Collector.collect`."""
        now_s = self._clock.now_ms() / 1000
        for metric in self._metrics:
            if metric is not READY:
                yield _family(metric, self._recorder, now_s)
            elif self._views is not None:
                is_ready = not self._views.not_ready()
                yield GaugeMetricFamily(metric.name, metric.meaning, value=float(is_ready))


def exposition(
    recorder: Recorder,
    views: Views | None = None,
    shown: Shown | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> CollectorRegistry:
    """Return the registry of all metrics of this process, for `generate_latest`.

    Args:
        recorder: The source of the metrics.
        views: The source of `logmirror_ready`. None: it is not exported.
        shown: Which metrics are exported. None: the defaults of `Shown`.
        clock: The current time, for ages.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(recorder, views, shown or Shown(), clock))
    ProcessCollector(registry=registry)
    return registry


def _family(metric: Metric, recorder: Recorder, now_s: float) -> Family:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        for labels, found in recorder.distributions(metric):
            below, sums = 0, []
            for count in found.counts:
                below += count
                sums.append(below)
            histogram.add_metric(labels, list(zip(bounds, sums, strict=True)), found.total)
        return histogram
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in recorder.numbers(metric, now_s):
        family.add_metric(labels, value)
    return family


# -- the server ------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    """One thread per connection, with a limit for their number and a deadline for each."""

    request_queue_size = CONNECTIONS_MAX
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, pages: dict[str, Callable[[], _Response]]) -> None:
        self.pages = pages
        self._ends_ms: dict[socket.socket, int] = {}
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the reverse DNS lookup of the base class, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401  # as inherited
        """Return whether the connection is within the limit."""
        del client_address
        if len(self._ends_ms) >= CONNECTIONS_MAX:
            return False
        self._ends_ms[request] = SYSTEM_CLOCK.monotonic_ms() + DEADLINE_MS
        return True

    def service_actions(self) -> None:
        """Close connections past their deadline. Called a few times per second."""
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        for connection, end_ms in list(self._ends_ms.items()):
            if now_ms >= end_ms:
                with contextlib.suppress(OSError):
                    connection.shutdown(2)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401  # as inherited
        """Close a connection."""
        self._ends_ms.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a failed request; most often the client has disconnected."""
        del request
        _LOG.debug(
            "a request failed",
            exc_info=True,
            extra={"facts": {"client": str(client_address)}},
        )


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = DEADLINE_MS / 1000
    server_version = "logmirror"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page of the path, or 404."""
        page = self.server.pages.get(self.path.partition("?")[0])
        status, kind, body = page() if page else (404, _TEXT, self._contents())
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # as inherited

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # as inherited
        """Log nothing: probes send a request every few seconds."""

    def _contents(self) -> bytes:
        return "".join(f"{path}\n" for path in self.server.pages).encode()
