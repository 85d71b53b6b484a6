"""`logmirror run` from one cluster to another, as users start it."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measured  # after the path is set

if TYPE_CHECKING:
    from clusters import Cluster, Shape

MASTER = "local[2]"
_STAMP = re.compile(r"^(\S+Z) INFO (mirror starts|copied)", re.MULTILINE)


def write_config(
    folder: Path, source: str, target: str, topic: str, *others: str, **options: object
) -> Path:
    """Write the configuration of one mirror of all partitions; JSON, which YAML contains.

    Args:
        folder: Where it is written.
        source: The source's bootstrap servers.
        target: The destination's.
        topic: The topic, at both.
        others: Further destinations, by their bootstrap servers.
        options: Further settings of each mirror.
    """
    mirrors = [
        {
            "name": f"bench-{number}" if number else "bench",
            "source": {"bootstrap-servers": source},
            "topic": topic,
            "partitions": "all",
            "destinations": [{"type": "kafka", "bootstrap-servers": each}],
            **options,
        }
        for number, each in enumerate((target, *others))
    ]
    path = folder / "bench.yaml"
    path.write_text(json.dumps({"spark": {"master": MASTER}, "mirrors": mirrors}))
    return path


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "logmirror", "run", "-c", str(config), *more]


def logmirror(  # noqa: PLR0913  # who calls it as a contestant names the first four
    source_cluster: Cluster,
    target_cluster: Cluster,
    shape: Shape,
    folder: Path,
    *,
    source: str = "",
    destination: str = "",
) -> dict[str, float]:
    """Copy a topic, with other addresses of the clusters if given; see `rounds.Contestant`.

    The flow is from the line that a mirror starts to the last one that something was copied. The
    topic at the destination is made before that, and Spark started.
    """
    config = write_config(
        folder,
        source or source_cluster.bootstrap,
        destination or target_cluster.bootstrap,
        shape.topic,
    )
    of_source, of_target = measured.Tree(), measured.Tree()
    began = time.time()
    cost = measured.run(
        command(config, "--until-now"),
        beside={source_cluster.pid: of_source, target_cluster.pid: of_target},
    )
    first, last = flow(cost.stderr)
    return {
        "flow_s": last - first,
        "start_s": first - began,
        "cpu_s": cost.cpu_s,
        "flow_cpu_s": cost.cpu_between(first, last),
        "source_cpu_s": of_source.cpu_between(first, last),
        "target_cpu_s": of_target.cpu_between(first, last),
        "peak_mib": cost.peak_bytes / 2**20,
        **{
            f"flow_cpu_s_{role.lower()}": cpu_s
            for role, cpu_s in cost.roles_between(first, last).items()
        },
        **{f"peak_{role.lower()}_mib": peak / 2**20 for role, peak in cost.rss_by_role.items()},
    }


def flow(log: str) -> tuple[float, float]:
    """Return the start and the end of a run's flow, in seconds since the epoch."""
    stamps = [datetime.fromisoformat(stamp).timestamp() for stamp, _ in _STAMP.findall(log)]
    return stamps[0], stamps[-1]
