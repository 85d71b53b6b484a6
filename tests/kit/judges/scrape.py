"""Requests to a run's HTTP port, as Prometheus and a kubelet send them.

Metrics are parsed by Prometheus's own library.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kit.servers.machine import HOST
from logmirror.clock import SYSTEM_CLOCK
from logmirror.monitoring.exposition import Exposition
from logmirror.monitoring.metrics import FLOW, Recorder

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.monitoring.exposition import Shown

_ORDER: Final = (*FLOW, "trigger", "cause", "kind", "state", "le")

Samples = dict[tuple[str, tuple[str, ...]], float]
"""Value by name (without `logmirror_`) and labels, these in the order of the catalogue."""


class Response(NamedTuple):
    """A response."""

    status: int
    kind: str
    text: str


def ask(port: int, path: str, *, method: str = "GET") -> Response:
    """Send a request and return its response, also one with an error status."""
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Response(
                response.status, response.headers["Content-Type"], response.read().decode()
            )
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, error.headers["Content-Type"], error.read().decode())


def status_of(port: int) -> Any:
    """`/status.json`."""
    return json.loads(ask(port, "/status.json").text)


def scrape(port: int) -> Samples:
    """`/metrics`."""
    return _samples(ask(port, "/metrics").text)


def samples(
    recorder: Recorder, *, clock: Clock = SYSTEM_CLOCK, shown: Shown | None = None
) -> Samples:
    """Return the samples of a scrape of a recorder; see `Exposition`."""
    chunks = Exposition(recorder, shown=shown, clock=clock).chunks()
    return _samples(b"".join(chunks).decode())


def _samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted(sample.labels, key=_ORDER.index)
            name = sample.name.removeprefix("logmirror_")
            found[name, tuple(sample.labels[label] for label in labels)] = sample.value
    return found
