"""End-to-end latency while the same process translates consumer groups, and while it does not.

The groups commit in both states, from a process of their own, so that only the translation differs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measured  # after the path is set
from clusters import Cluster  # after the path is set
from forward_delay import WARM_UP_S, Reader, produce, wait_until_it_copies  # as above
from forward_neighbours import latencies  # as above
from ours import command, write_config  # as above
from rounds import medians, ratio  # as above

from kit.servers.machine import Process  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rounds import Figures

GROUPS = 1_000
INTERVAL_S = 5
"""From one round of translations to the next, and from one commit of a group to its next."""

WITHOUT, WITH = "not translated", "translated"
COMPARED = ("p50_ms", "p99_ms")
_ALIAS = "primary"
_CHECKPOINTS = f"{_ALIAS}.checkpoints.internal"


def measure(base: Path, partitions: int, *, rounds: int, seconds: int) -> dict[str, object]:
    """Return the latencies of each state: all rounds, their medians, and ratios within a round."""
    source, target = Cluster(base / "source"), Cluster(base / "target")
    topic = "groups"
    found: dict[str, list[Figures]] = {WITHOUT: [], WITH: []}
    try:
        source.start()
        target.start()
        source.create_topic(topic, partitions)
        with _committing(source, topic, partitions) as commits:
            for number in range(rounds):
                for state, results in found.items():
                    folder = base / f"{number}-{state}".replace(" ", "-")
                    folder.mkdir()
                    results.append(
                        _latencies(folder, source, target, topic, partitions, state, seconds)
                    )
                    print(state, json.dumps(results[-1]), file=sys.stderr, flush=True)
    finally:
        source.remove()
        target.remove()
    return {
        "groups": GROUPS,
        "partitions": partitions,
        "seconds": seconds,
        "commits_s": commits["commits_s"],
        "rounds": found,
        "medians": medians(found),
        "ratios": {key: ratio(found, WITH, WITHOUT, key) for key in COMPARED},
    }


@contextlib.contextmanager
def _committing(source: Cluster, topic: str, partitions: int) -> Iterator[Figures]:
    """Yield once all groups have committed; a third of them commits until the block ends.

    They commit fewer records than are produced in the meantime, so each offset has its record.

    Yields:
        `commits_s`, after the block.
    """
    script = str(Path(__file__).resolve().parent / "group_commits.py")
    options = map(str, (partitions, GROUPS, INTERVAL_S))
    arguments = [sys.executable, script, source.bootstrap, topic, *options]
    figures: Figures = {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(arguments, **pipes) as process:
        try:
            if process.stdout.readline() != b"committed\n":
                message = "the groups could not commit"
                raise RuntimeError(message)
            yield figures
        finally:
            process.stdin.close()
        commits, seconds = map(float, process.stdout.readline().split())
        figures["commits_s"] = commits / seconds


def _latencies(  # noqa: PLR0913, PLR0917  # one call, from `measure`
    folder: Path,
    source: Cluster,
    target: Cluster,
    topic: str,
    partitions: int,
    state: str,
    seconds: int,
) -> Figures:
    groups = {
        "source-alias": _ALIAS,
        "include": ["group-.*"],
        "interval-ms": INTERVAL_S * 1_000,
        "sync-group-offsets": True,
    }
    options = {"groups": groups} if state == WITH else {}
    config = write_config(folder, source.bootstrap, target.bootstrap, topic, **options)
    cost = measured.Tree()
    service = Process(command(config), log=folder / "service.log")
    readers: list[Reader] = []
    try:
        wait_until_it_copies(service)
        readers = [Reader(each.bootstrap, topic, partitions) for each in (source, target)]
        produce(source, topic, partitions, WARM_UP_S)
        with measured.Watch({service.pid: cost}):
            written, began = _checkpoints(target, state), time.time()
            figures = latencies(source, topic, partitions, seconds, readers)
            written, ended = _checkpoints(target, state) - written, time.time()
    finally:
        for reader in readers:
            reader.end()
        service.end()
    if state == WITH and not written:
        raise RuntimeError(service.tail())
    return {
        **figures,
        "checkpoints_s": written / (ended - began),
        "cpu_s_per_s": cost.cpu_between(began, ended) / (ended - began),
    }


def _checkpoints(target: Cluster, state: str) -> int:
    """Return the log end offset of the checkpoints topic, which the first translation creates."""
    return target.ends(_CHECKPOINTS, 1)[0] if state == WITH else 0
