"""Cost of latency to one cluster: direct connections, a proxy, and the proxy with a delay."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from clusters import Cluster, Listener, Shape, fill  # after the path is set
from ours import logmirror  # after the path is set
from rounds import Contestant, compete, medians, one_run, ratio  # as above

from kit.servers.machine import HOST, free_ports  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIP_MS = 50
DIRECT = "direct"
ENDS = ("destination", "source")


def proxied(trip_ms: int, end: str) -> str:
    """Return the name of a connection."""
    return f"{trip_ms} ms to the {end}"


def measure(base: Path, shape: Shape, *, rounds: int) -> dict[str, object]:
    """Measure logmirror's rate over each connection, and the ratios of each round."""
    with _clusters(base, shape) as (source, target, ways):

        def by(way: str) -> Contestant:
            return lambda s, t, of, folder: logmirror(s, t, of, folder, **ways[way])

        one_run(by(DIRECT), source, target, shape, base)  # the brokers compile what they do
        contestants = {way: by(way) for way in ways}
        found = compete(contestants, source, target, shape, base, rounds=rounds)
    ratios = {
        f"{proxied(TRIP_MS, end)} : {other}": ratio(
            found, proxied(TRIP_MS, end), other, "records_s"
        )
        for end in ENDS
        for other in (DIRECT, proxied(0, end))
    }
    return {
        "shape": str(shape),
        "records": shape.records,
        "medians": medians(found),
        "ratios": ratios,
    }


@contextlib.contextmanager
def _clusters(
    base: Path, shape: Shape
) -> Iterator[tuple[Cluster, Cluster, dict[str, dict[str, str]]]]:
    """Yield a filled source, a destination, and the addresses of each connection."""
    ports = dict(zip(((t, e) for e in ENDS for t in (0, TRIP_MS)), free_ports(4), strict=True))
    with contextlib.ExitStack() as stack:
        clusters = {
            end: Cluster(
                base / end,
                listeners=tuple(
                    Listener(name=f"WAY{trip}", protocol="PLAINTEXT", advertised=f"{HOST}:{port}")
                    for (trip, of), port in ports.items()
                    if of == end
                ),
            )
            for end in ENDS
        }
        ways: dict[str, dict[str, str]] = {DIRECT: {}}
        for cluster in clusters.values():
            stack.callback(cluster.remove)
            cluster.start()
        for (trip, end), port in ports.items():
            near, far = f"{HOST}:{port}", clusters[end].address(f"WAY{trip}")
            stack.enter_context(_proxy(trip / 2, near, far))
            ways[proxied(trip, end)] = {end: near}
        fill(clusters["source"], shape)
        yield clusters["source"], clusters["destination"], ways


@contextlib.contextmanager
def _proxy(delay_ms: float, listen: str, target: str) -> Iterator[None]:
    script = Path(__file__).resolve().parent / "delaying_proxy.py"
    command = [sys.executable, str(script), str(delay_ms), listen, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"listening\n"
        yield
        process.stdin.close()
