"""What a long way to the destination costs the copy: once direct, once each through a proxy."""

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

from kit.machine import HOST, free_ports  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUND_TRIPS_MS = (0, 50)
DIRECT = "direct"


def measure(base: Path, shape: Shape, *, rounds: int) -> dict[str, object]:
    """Our rate over each of the ways, and ratios round by round."""

    def by(way: str) -> Contestant:
        return lambda s, t, of, folder: logmirror(s, t, of, folder, address=t.ways[way])

    ways = [DIRECT, *(f"{trip} ms" for trip in ROUND_TRIPS_MS)]
    with _clusters(base, shape) as (source, target):
        one_run(by(DIRECT), source, target, shape, base)  # the brokers compile what they do
        contestants = {way: by(way) for way in ways}
        found = compete(contestants, source, target, shape, base, rounds=rounds)
    long = ways[-1]
    return {
        "shape": str(shape),
        "records": shape.records,
        "medians": medians(found),
        "ratios": {way: ratio(found, long, way, "records_s") for way in ways[:-1]},
    }


@contextlib.contextmanager
def _clusters(base: Path, shape: Shape) -> Iterator[tuple[Cluster, Cluster]]:
    """A filled source, and a destination that is reached directly or by each of the ways."""
    with contextlib.ExitStack() as stack:
        ports = dict(zip(ROUND_TRIPS_MS, free_ports(len(ROUND_TRIPS_MS)), strict=True))
        source = Cluster(base / "source")
        target = Cluster(
            base / "target",
            listeners=tuple(
                Listener(name=f"WAY{trip}", protocol="PLAINTEXT", advertised=f"{HOST}:{port}")
                for trip, port in ports.items()
            ),
        )
        for cluster in (source, target):
            stack.callback(cluster.remove)
            cluster.start()
        target.ways[DIRECT] = target.bootstrap
        for trip, port in ports.items():
            near, far = f"{HOST}:{port}", target.address(f"WAY{trip}")
            stack.enter_context(_proxy(trip / 2, near, far))
            target.ways[f"{trip} ms"] = near
        fill(source, shape)
        yield source, target


@contextlib.contextmanager
def _proxy(delay_ms: float, listen: str, target: str) -> Iterator[None]:
    script = Path(__file__).resolve().parent / "delaying_proxy.py"
    command = [sys.executable, str(script), str(delay_ms), listen, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"listening\n"
        yield
        process.stdin.close()
