"""Compare replication to another cluster with its peers, on one machine.

    python bench/forward.py [--only PARTS] [--rounds N] [--records N] ...

Source and destination are Apache Kafka 4.3.1, one broker each, page cache warm. Records carry their
creation time; source batches have the default size of the Java producer. Each round runs every
contestant once, so that a change in the machine's speed affects all of them. Ratios are taken
within a round, and the median is reported. Prints one JSON object; the result of each run is
printed to stderr at once. A full run takes half an hour. In two minutes, without MirrorMaker:

    python bench/forward.py --rounds 1 --records 100000 --small-records 100000 --partitions 1 \\
        --seconds 5 --many-partitions 1,20 --contestants "logmirror;plain loop"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import forward_delay  # noqa: E402  # after the path is set
import forward_groups  # noqa: E402  # after the path is set
import forward_memory  # noqa: E402  # after the path is set
import forward_neighbours  # noqa: E402  # after the path is set
import forward_trip  # noqa: E402  # after the path is set
import measured  # noqa: E402  # after the path is set
from clusters import Cluster, Shape, fill  # noqa: E402  # after the path is set
from mirrormaker import mirrormaker  # noqa: E402  # after the path is set
from ours import logmirror  # noqa: E402  # after the path is set
from rounds import Contestant, Figures, compete, medians, one_run, ratio  # noqa: E402  # as above

OURS, LOOP = "logmirror", "plain loop"
TUNED, DEFAULTS = "MirrorMaker 2, tuned", "MirrorMaker 2, defaults"
PEERS = (LOOP, TUNED, DEFAULTS)


def plain_loop(source: Cluster, target: Cluster, shape: Shape, folder: Path) -> Figures:
    """Run `plain_loop.py`; see `rounds.Contestant`."""
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
        "peak_mib": cost.peak_bytes / 2**20,
    }


CONTESTANTS: dict[str, Contestant] = {
    OURS: logmirror,
    LOOP: plain_loop,
    TUNED: lambda s, t, shape, folder: mirrormaker(s, t, shape, folder, tuned=True),
    DEFAULTS: lambda s, t, shape, folder: mirrormaker(s, t, shape, folder, tuned=False),
}


def copy_part(base: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure throughput and CPU of each shape."""
    names = options.contestants.split(";")
    contestants = {name: CONTESTANTS[name] for name in names}
    source, target = Cluster(base / "source"), Cluster(base / "target")
    results: list[dict[str, object]] = []
    try:
        source.start()
        target.start()
        for size, records in ((1024, options.records), (100, options.small_records)):
            for partitions in map(int, options.partitions.split(",")):
                shape = Shape(size, partitions, records)
                fill(source, shape)
                # A warm-up for the brokers' JIT compiler; it counts for no contestant.
                one_run(plain_loop, source, target, shape, base)
                found = compete(
                    *(contestants, source, target, shape, base),
                    rounds=options.rounds,
                    once={DEFAULTS} if len(names) > 1 else (),
                )
                results.append(_copy_result(shape, found))
                source.delete_topic(shape.topic)
    finally:
        source.remove()
        target.remove()
    return results


def _copy_result(shape: Shape, found: dict[str, list[Figures]]) -> dict[str, object]:
    """Return medians, and the ratios of logmirror's rate and of each peer's CPU."""
    ratios = {}
    for peer in PEERS:
        if {peer, OURS} <= found.keys():
            ratios[peer] = {
                "rate": ratio(found, OURS, peer, "records_s"),
                "cpu": ratio(found, peer, OURS, "flow_cpu_s"),
                "life_cpu": ratio(found, peer, OURS, "cpu_s"),
            }
    return {
        "shape": str(shape),
        "records": shape.records,
        "medians": medians(found),
        "ratios": ratios,
    }


def trip_part(base: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure the cost of latency."""
    return forward_trip.measure(base, Shape(1024, 4, options.records), rounds=options.rounds)


def delay_part(base: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure the end-to-end latency."""
    partitions = map(int, options.partitions.split(","))
    return forward_delay.measure(base, partitions, seconds=options.seconds)


def neighbours_part(base: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the end-to-end latency beside a destination that halts or drips."""
    partitions = map(int, options.partitions.split(","))
    return forward_neighbours.measure(base, partitions, seconds=options.neighbour_seconds)


def groups_part(base: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure the end-to-end latency while consumer groups are translated."""
    return forward_groups.measure(
        base, options.group_partitions, rounds=options.rounds, seconds=options.group_seconds
    )


def calm_part(base: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure the highest latency of ten minutes."""
    return forward_delay.measure(base, [1], seconds=options.calm_seconds)


def memory_part(base: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure memory and time of a pass over many partitions."""
    return forward_memory.measure(base, map(int, options.many_partitions.split(",")))


PARTS = {
    "copy": copy_part,
    "trip": trip_part,
    "delay": delay_part,
    "calm": calm_part,
    "neighbours": neighbours_part,
    "groups": groups_part,
    "memory": memory_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=1_000_000, help="of 1 KiB")
    parser.add_argument("--small-records", type=int, default=3_000_000, help="of 100 B")
    parser.add_argument("--partitions", default="1,4")
    parser.add_argument("--contestants", default=";".join(CONTESTANTS), metavar="NAMES")
    parser.add_argument("--seconds", type=int, default=60, help="for which delays are measured")
    parser.add_argument("--neighbour-seconds", type=int, default=30, help="of each disturbance")
    parser.add_argument("--group-seconds", type=int, default=20, help="of each state")
    parser.add_argument("--group-partitions", type=int, default=10)
    parser.add_argument("--calm-seconds", type=int, default=600)
    parser.add_argument("--many-partitions", default="1,100,1000")
    options = parser.parse_args()
    results: dict[str, object] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as temporary:
        for name in options.only.split(","):
            folder = Path(temporary) / name
            folder.mkdir()
            results[name] = PARTS[name](folder, options)
    results["load_after"] = os.getloadavg()[0]
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
