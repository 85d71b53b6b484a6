"""Archives as Kafka: how fast they are served and restored, beside Apache Kafka and MirrorMaker 2.

    python bench/restore.py [--records N] [--partitions N] [--rounds N]

One topic on Apache Kafka 4.3.1 is archived in all formats, and `logmirror broker` mounts each
archive. kcat reads the topic from each, twice: a mounted broker is new in each round, so its first
read converts what is not served as it is. Then `logmirror run` and a tuned MirrorMaker 2 copy it
from the mounted archive into another Apache Kafka. The contestants take turns in each round. The
page cache is full of other files, as on a machine that has run for some time.
Prints one JSON object; the result of each run is printed to stderr at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import psutil  # noqa: E402  # after the path is set
from clusters import Cluster, Shape, fill  # noqa: E402  # as above
from forward import plain_loop  # noqa: E402  # as above
from mirrormaker import mirrormaker  # noqa: E402  # as above
from ours import command, logmirror  # noqa: E402  # as above
from reading import TO_THE_END, fill_page_cache  # noqa: E402  # as above
from rounds import compete, medians, one_run, ratio  # noqa: E402  # as above

from kit.judges.clients import kcat  # noqa: E402  # as above
from kit.servers.mounted import MountingBroker  # noqa: E402  # as above

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("native", "parquet", "ndjson")
KAFKA, MIRRORMAKER = "Apache Kafka", "MirrorMaker 2, tuned"
TIMEOUT_S = 600
NO_SYNC = {"sync.topic.configs.enabled": "false"}
"""A mounted topic has `cleanup.policy=compact`, which the restored one must not get."""


def archive(source: Cluster, shape: Shape, folder: Path) -> None:
    """Copy the topic to an archive of each format, `<folder>/<format>/<topic>`."""
    mirrors = [
        {
            "name": form,
            "source": {"bootstrap-servers": source.bootstrap},
            "topic": shape.topic,
            "partitions": "all",
            "format": form,
            "flush": {"max-time-ms": 60_000, "max-bytes": 64 << 20, "max-offsets": 1_000_000},
            "destinations": [
                {"type": "filesystem", "root": str(folder / form), "name": shape.topic}
            ],
        }
        for form in FORMATS
    ]
    config = folder / "archive.yaml"
    config.write_text(json.dumps({"spark": {"master": "local[2]"}, "mirrors": mirrors}))
    subprocess.run(command(config, "--until-now"), check=True, capture_output=True)


def read(bootstrap: str, pid: int, shape: Shape) -> dict[str, float]:
    """Read the topic with kcat; returns MB/s, and the broker's CPU seconds for each GB."""
    broker = psutil.Process(pid)
    before_s, began_s = sum(broker.cpu_times()[:2]), time.perf_counter()
    at = ("-C", "-b", bootstrap, "-t", shape.topic, "-o", "beginning", "-f", "%p\\n")
    found = kcat(*at, *TO_THE_END, timeout_s=TIMEOUT_S)
    elapsed_s = time.perf_counter() - began_s
    cpu_s = sum(broker.cpu_times()[:2]) - before_s
    if found.count(b"\n") != shape.records:
        message = f"{found.count(bytes([10]))} records instead of {shape.records}"
        raise RuntimeError(message)
    gigabytes = shape.total_bytes / 1e9
    return {"mb_s": shape.total_bytes / elapsed_s / 1e6, "cpu_s_per_gb": cpu_s / gigabytes}


def serve(source: Cluster, shape: Shape, folder: Path, rounds: int) -> dict[str, list[dict]]:
    """Read from Apache Kafka and from new mounted brokers, round by round."""
    found: dict[str, list[dict]] = {}

    def keep(name: str, figures: dict[str, float]) -> None:
        found.setdefault(name, []).append(figures)
        print(name, json.dumps(figures), file=sys.stderr, flush=True)

    def of_kafka(_: int) -> None:
        keep(KAFKA, read(source.bootstrap, source.pid, shape))

    def of_archive(form: str) -> Callable[[int], None]:
        def once(number: int) -> None:
            broker = MountingBroker(folder / f"serve-{form}-{number}", folder / form)
            with broker as bootstrap:
                keep(f"{form}, first", read(bootstrap, broker.pid, shape))
                keep(f"{form}, again", read(bootstrap, broker.pid, shape))

        return once

    turns = [of_kafka, *map(of_archive, FORMATS)]
    for number in range(rounds):
        turn = number % len(turns)
        for contestant in turns[turn:] + turns[:turn]:
            contestant(number)
    return found


def restore(source: Cluster, shape: Shape, folder: Path, rounds: int) -> dict[str, list[dict]]:
    """Copy from mounted archives into another cluster."""
    target = Cluster(folder / "target")
    brokers = {form: MountingBroker(folder / f"restore-{form}", folder / form) for form in FORMATS}
    try:
        target.start()
        for broker in brokers.values():
            broker.start()
        ours = {
            f"logmirror, {form}": lambda _, *rest, broker=broker: logmirror(broker, *rest)
            for form, broker in brokers.items()
        }
        peer = {
            MIRRORMAKER: lambda _, *rest: mirrormaker(
                brokers["native"], *rest, tuned=True, more=NO_SYNC
            )
        }
        # A warm-up for the brokers' JIT compiler; it counts for no contestant.
        one_run(plain_loop, source, target, shape, folder)
        return compete(ours | peer, source, target, shape, folder, rounds=rounds)
    finally:
        for broker in brokers.values():
            broker.kill()
        target.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape = Shape(1024, options.partitions, options.records)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="logmirror-bench-") as name:
        folder = Path(name)
        source = Cluster(folder / "source")
        try:
            source.start()
            fill(source, shape)
            archive(source, shape, folder)
            fill_page_cache(folder)
            served = serve(source, shape, folder, options.rounds)
            restored = restore(source, shape, folder, options.rounds)
        finally:
            source.remove()
    serving = {name: ratio(served, name, KAFKA, "mb_s") for name in served if name != KAFKA}
    restoring = {
        name: ratio(restored, name, MIRRORMAKER, "mb_s") for name in restored if name != MIRRORMAKER
    }
    found = {
        "shape": str(shape),
        "records": shape.records,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "served": medians(served),
        "serving_ratios": serving,
        "restored": medians(restored),
        "restoring_ratios": restoring,
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
