"""Contestants copy the same topic in turns; each replica is deleted after its run."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from clusters import Cluster, Shape

Figures = dict[str, float]


class Contestant(Protocol):
    """Copies a topic to a cluster without it, and returns the cost.

    Returns:
        `flow_s`, and CPU seconds: `flow_cpu_s` in the flow, `cpu_s` from its start to its end, or
        that of the flow; `source_cpu_s` and `target_cpu_s` of the brokers in the flow. And more.
    """

    def __call__(self, source: Cluster, target: Cluster, shape: Shape, folder: Path) -> Figures: ...


def one_run(
    contestant: Contestant, source: Cluster, target: Cluster, shape: Shape, base: Path
) -> Figures:
    """Return one contestant's figures; counts and deletes its replica."""
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


def compete(  # noqa: PLR0913  # two clusters, what is copied between them, by whom
    contestants: Mapping[str, Contestant],
    source: Cluster,
    target: Cluster,
    shape: Shape,
    base: Path,
    *,
    rounds: int,
    once: Collection[str] = (),
) -> dict[str, list[Figures]]:
    """Run all contestants on one topic, round by round, in a different order each time.

    Args:
        contestants: The contestants, by name.
        source: The cluster with the topic.
        target: The cluster of the replicas.
        shape: The topic of the run.
        base: A directory for files of the contestants.
        rounds: Number of rounds.
        once: Contestants that run in the first round only.

    Returns:
        The figures of each, round by round.
    """
    names = list(contestants)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in once and number:
                continue
            figures = one_run(contestants[name], source, target, shape, base)
            found[name].append(figures)
            print(shape, "-", name, json.dumps(figures), file=sys.stderr, flush=True)
    return found


def medians(found: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Return the median of every figure of each contestant."""
    return {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def ratio(
    found: Mapping[str, Sequence[Figures]], over: str, under: str, key: str
) -> dict[str, object]:
    """Return one contestant's figure divided by another's, per round, and the median."""
    pairs = zip(found[over], found[under], strict=False)  # one may run only in round 1
    values = [a[key] / b[key] for a, b in pairs]
    return {"median": statistics.median(values), "rounds": values}
