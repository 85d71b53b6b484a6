"""Measure the copy into another cluster against its peers, on one machine, taking turns.

    python bench/forward.py [--only copy,trip,delay,memory] [--rounds N] [--records N] ...

Source and destination are Apache Kafka 4.3.1, one broker each, page cache warm. Records carry
timestamps of the time they were made at; source batches are as Java's producer makes them by
default. Each round runs every contestant once, so that a machine whose speed drifts is the same for
all; ratios are taken within a round and the median is told. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import measured  # noqa: E402  # after the path is set
from clusters import Cluster, Shape, fill  # noqa: E402  # after the path is set
from mirrormaker import mirrormaker  # noqa: E402  # after the path is set
from ours import logmirror  # noqa: E402  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS, LOOP = "logmirror", "plain loop"
TUNED, DEFAULTS = "MirrorMaker 2, tuned", "MirrorMaker 2, defaults"
PEERS = (LOOP, TUNED, DEFAULTS)
GOAL_RATE, GOAL_CPU = 5.0, 20.0


class Contestant(Protocol):
    """Copies a topic whose copy does not exist, and says what it cost.

    Returns:
        `flow_s`, and CPU seconds: `flow_cpu_s` in the flow, `cpu_s` from its start to its end, or
        that of the flow; `source_cpu_s` and `target_cpu_s` of the brokers in the flow. And more.
    """

    def __call__(
        self, source: Cluster, target: Cluster, shape: Shape, folder: Path
    ) -> dict[str, float]: ...


def plain_loop(source: Cluster, target: Cluster, shape: Shape, folder: Path) -> dict[str, float]:
    target.create_topic(shape.topic, shape.partitions)
    of_source, of_target = measured.Tree(), measured.Tree()
    out = folder / "loop.json"
    began = time.time()
    arguments = [source.bootstrap, target.bootstrap, shape.topic]
    cost = measured.run(
        [sys.executable, str(HERE / "plain_loop.py"), *arguments],
        stdout=out,
        beside={source.pid: of_source, target.pid: of_target},
    )
    said = json.loads(out.read_text())
    first, last = said["began"], said["ended"]
    return {
        "flow_s": last - first,
        "start_s": first - began,
        "cpu_s": cost.cpu_s,
        "flow_cpu_s": cost.cpu_between(first, last),
        "source_cpu_s": of_source.cpu_between(first, last),
        "target_cpu_s": of_target.cpu_between(first, last),
        "peak_mib": sum(cost.rss_by_role.values()) / 2**20,
    }


CONTESTANTS: dict[str, Contestant] = {
    OURS: logmirror,
    LOOP: plain_loop,
    TUNED: lambda s, t, shape, folder: mirrormaker(s, t, shape, folder, tuned=True),
    DEFAULTS: lambda s, t, shape, folder: mirrormaker(s, t, shape, folder, tuned=False),
}


def compete(
    source: Cluster, target: Cluster, shape: Shape, base: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Let the contestants copy one topic, round by round.

    The brokers compile what they do first: nobody's figures are taken until a topic was copied. The
    order changes from round to round. MirrorMaker with its defaults runs in the first alone.
    """
    one_run(plain_loop, source, target, shape, base)
    names = options.contestants.split(";")
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == DEFAULTS and number:
                continue
            figures = one_run(CONTESTANTS[name], source, target, shape, base)
            found.setdefault(name, []).append(figures)
            print(shape, "-", name, json.dumps(figures), file=sys.stderr, flush=True)
    return {
        "shape": str(shape),
        "records": shape.records,
        "medians": {name: _medians(rounds) for name, rounds in found.items()},
        "ratios": {name: _ratios(found, name) for name in PEERS if {name, OURS} <= found.keys()},
    }


def one_run(
    contestant: Contestant, source: Cluster, target: Cluster, shape: Shape, base: Path
) -> dict[str, float]:
    """One contestant's figures; its copy is counted, and removed."""
    folder = base / "run"
    folder.mkdir()
    figures = contestant(source, target, shape, folder)
    ends = target.ends(shape.topic, shape.partitions)
    if ends != source.ends(shape.topic, shape.partitions):
        message = f"the copy of {shape.topic} is not whole: {ends}"
        raise RuntimeError(message)
    gigabytes = shape.total_bytes / 1e9
    figures["mb_s"] = shape.total_bytes / figures["flow_s"] / 1e6
    figures["records_s"] = shape.records / figures["flow_s"]
    for key in ("cpu_s", "flow_cpu_s", "source_cpu_s", "target_cpu_s"):
        figures[f"{key}_per_gb"] = figures[key] / gigabytes
    target.delete_topic(shape.topic)
    shutil.rmtree(folder)
    time.sleep(2)  # until its segments are deleted
    return figures


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def _ratios(found: dict[str, list[dict[str, float]]], peer: str) -> dict[str, object]:
    """How many times faster we were, and how many times less CPU ours took, round by round."""
    pairs = list(zip(found[OURS], found[peer], strict=False))  # a peer may sit rounds out
    rates = [ours["records_s"] / theirs["records_s"] for ours, theirs in pairs]
    cpus = [theirs["flow_cpu_s"] / ours["flow_cpu_s"] for ours, theirs in pairs]
    lives = [theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in pairs]
    return {
        what: {"median": statistics.median(values), "rounds": values}
        for what, values in (("rate", rates), ("cpu", cpus), ("life_cpu", lives))
    }


def copy_part(base: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    """Throughput and CPU, shape by shape."""
    source, target = Cluster(base / "source"), Cluster(base / "target")
    try:
        source.start()
        target.start()
        results = []
        for size, records in ((1024, options.records), (100, options.small_records)):
            for partitions in map(int, options.partitions.split(",")):
                shape = Shape(size, partitions, records)
                fill(source, shape)
                results.append(compete(source, target, shape, base, options))
                source.delete_topic(shape.topic)
        return results
    finally:
        source.remove()
        target.remove()


PARTS = {"copy": copy_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=1_000_000, help="of 1 KiB")
    parser.add_argument("--small-records", type=int, default=3_000_000, help="of 100 B")
    parser.add_argument("--partitions", default="1,4")
    parser.add_argument("--contestants", default=";".join(CONTESTANTS), metavar="NAMES")
    options = parser.parse_args()
    results: dict[str, object] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as temporary:
        for name in options.only.split(","):
            folder = Path(temporary) / name
            folder.mkdir()
            results[name] = PARTS[name](folder, options)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
