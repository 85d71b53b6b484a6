"""Memory and time of a mirror of one, many and very many partitions: two passes of `--until-now`.

The first pass creates the topic and copies a few records of each partition. The second pass checks
that each replica continues its source, and copies a few more.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measured  # after the path is set
from clusters import Cluster, Shape, fill, produce  # after the path is set
from ours import command, flow, write_config  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDS_EACH = 5
PASSES = ("first", "second")


def measure(base: Path, partitions: Iterable[int]) -> list[dict[str, float]]:
    """Return the figures of both passes for each number of partitions."""
    source, target = Cluster(base / "source"), Cluster(base / "target")
    try:
        source.start()
        target.start()
        return [_passes(source, target, base, count) for count in partitions]
    finally:
        source.remove()
        target.remove()


def _passes(source: Cluster, target: Cluster, base: Path, partitions: int) -> dict[str, float]:
    shape = Shape(100, partitions, RECORDS_EACH * partitions)
    fill(source, shape)
    config = write_config(base, source.bootstrap, target.bootstrap, shape.topic)
    figures: dict[str, float] = {"partitions": partitions}
    for name in PASSES:
        began = time.time()
        cost = measured.run(command(config, "--until-now"))
        first, last = flow(cost.stderr)
        figures[f"{name}_start_s"] = first - began
        figures[f"{name}_pass_s"] = last - first
        figures[f"{name}_pass_cpu_s"] = cost.cpu_between(first, last)
        for role, peak in cost.rss_by_role.items():
            key = f"{role.lower()}_mib"
            figures[key] = max(figures.get(key, 0.0), peak / 2**20)
        ends = target.ends(shape.topic, partitions)
        if ends != source.ends(shape.topic, partitions):
            message = f"the {name} pass left partitions behind"
            raise RuntimeError(message)
        if name == PASSES[0]:
            produce(source, shape, lambda index: index % partitions)
    print("memory", json.dumps(figures), file=sys.stderr, flush=True)
    return figures
