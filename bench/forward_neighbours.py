"""End-to-end latency to one destination while another destination of the process is disturbed."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from clusters import Cluster, Listener  # after the path is set
from forward_delay import (  # after the path is set
    WARM_UP_S,
    Reader,
    p99,
    produce,
    since,
    wait_until_it_copies,
)
from ours import command, write_config  # after the path is set

from kit.servers.machine import HOST, Process, free_ports  # after the path is set
from kit.servers.toxiproxy import Toxiproxy  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_DRIP = {"average_size": 1, "delay": 1_000_000}
_ARRIVAL_S = 60


def measure(base: Path, partitions: Iterable[int], *, seconds: int) -> list[dict[str, object]]:
    """Return the latencies for each number of partitions and each state of the other one."""
    port = free_ports(1)[0]
    proxied = Listener(name="PROXIED", protocol="PLAINTEXT", advertised=f"{HOST}:{port}")
    source, target = Cluster(base / "source"), Cluster(base / "target")
    other = Cluster(base / "other", listeners=(proxied,))
    try:
        for cluster in (source, target, other):
            cluster.start()
        with Toxiproxy(base) as toxiproxy:
            link = toxiproxy.link("other", listen=port, upstream=other.address("PROXIED"))
            states: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
                "calm": contextlib.nullcontext,
                "halted": lambda: _halted(other),
                "after": contextlib.nullcontext,
                "dripping": lambda: link.spoiled("slicer", stream="downstream", **_DRIP),
            }
            return [
                _latencies(base, source, target, link.address, states, count, seconds)
                for count in partitions
            ]
    finally:
        for cluster in (source, target, other):
            cluster.remove()


@contextlib.contextmanager
def _halted(cluster: Cluster) -> Iterator[None]:
    cluster.pause()
    try:
        yield
    finally:
        cluster.resume()


def _latencies(  # noqa: PLR0913, PLR0917  # one call, from `measure`
    base: Path,
    source: Cluster,
    target: Cluster,
    other: str,
    states: dict[str, Callable[[], contextlib.AbstractContextManager[None]]],
    partitions: int,
    seconds: int,
) -> dict[str, object]:
    topic = source.create_topic(f"neighbours-{partitions}", partitions)
    found: dict[str, object] = {"partitions": partitions, "seconds": seconds}
    readers = [Reader(c.bootstrap, topic, partitions) for c in (source, target)]
    try:
        with _running(base, source, target, topic):
            produce(source, topic, partitions, WARM_UP_S)
            found["alone"] = latencies(source, topic, partitions, seconds, readers)
        with _running(base, source, target, topic, other):
            produce(source, topic, partitions, WARM_UP_S)
            for state, disturb in states.items():
                with disturb():
                    found[state] = latencies(source, topic, partitions, seconds, readers)
    finally:
        for reader in readers:
            reader.end()
    return found


@contextlib.contextmanager
def _running(
    base: Path, source: Cluster, target: Cluster, topic: str, *others: str
) -> Iterator[None]:
    config = write_config(base, source.bootstrap, target.bootstrap, topic, *others)
    service = Process(command(config), log=base / f"{topic}-{len(others)}.log")
    try:
        wait_until_it_copies(service)
        yield
    finally:
        service.end()


def latencies(
    source: Cluster, topic: str, partitions: int, seconds: int, readers: list[Reader]
) -> dict[str, float]:
    """Produce for so many seconds; return the latencies at the source and at the destination.

    Args:
        source: Where records are produced.
        topic: The topic, at both clusters.
        partitions: Its partitions.
        seconds: How long records are produced.
        readers: The consumer of the source, and that of the destination.
    """
    began_ns = time.monotonic_ns()
    made = produce(source, topic, partitions, seconds)
    until = time.monotonic() + _ARRIVAL_S
    while len(since(readers[1], began_ns)) < made and time.monotonic() < until:
        time.sleep(0.05)
    at_source, at_target = (sorted(since(reader, began_ns)) for reader in readers)
    if len(at_target) != made:
        message = f"{len(at_target)} of {made} records arrived"
        raise RuntimeError(message)
    return {
        "p50_ms": statistics.median(at_target),
        "p99_ms": p99(at_target),
        "max_ms": at_target[-1],
        "source_p99_ms": p99(at_source),
    }
