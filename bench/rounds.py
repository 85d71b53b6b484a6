"""Contestants copy the same topic, taking turns, and nobody's copy stays."""

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
    """Copies a topic whose copy does not exist, and says what it cost.

    Returns:
        `flow_s`, and CPU seconds: `flow_cpu_s` in the flow, `cpu_s` from its start to its end, or
        that of the flow; `source_cpu_s` and `target_cpu_s` of the brokers in the flow. And more.
    """

    def __call__(self, source: Cluster, target: Cluster, shape: Shape, folder: Path) -> Figures: ...


def one_run(
    contestant: Contestant, source: Cluster, target: Cluster, shape: Shape, base: Path
) -> Figures:
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
    """Let the contestants copy one topic, round by round, in another order each time.

    Args:
        contestants: By name.
        source: Holds the topic.
        target: Receives the copies.
        shape: Of the topic.
        base: For files of the contestants.
        rounds: How many.
        once: Who runs in the first round alone.

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
    """The median of every figure of each contestant."""
    return {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def ratio(
    found: Mapping[str, Sequence[Figures]], over: str, under: str, key: str
) -> dict[str, object]:
    """One contestant's figure divided by another's, round by round, and the median."""
    pairs = zip(found[over], found[under], strict=False)  # one of them may sit rounds out
    values = [a[key] / b[key] for a, b in pairs]
    return {"median": statistics.median(values), "rounds": values}
