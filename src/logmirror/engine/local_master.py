"""Local master URLs of Spark: how many slots, and retries of lost workers."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from logmirror.errors import UsageError


def with_slots(master: str, more: int) -> str:
    """Return a local master URL with `more` slots in addition to its own; others as they are."""
    inside, retries = _local_slots(master)
    if not more or inside is None:
        return master
    own = cpu_count() if inside == "*" else int(inside)
    return f"local[{own + more}{retries}]"


def _local_slots(master: str) -> tuple[str | None, str]:
    """Return the number of slots of a local master as written, and what follows it."""
    found = re.fullmatch(r"local(?:\[(\*|\d+)(,\d+)?\])?", master)
    return (found[1] or "1", found[2] or "") if found else (None, "")


def cpu_count() -> int:
    """Return the number of cores that this process may use, as a JVM counts them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return max(min(-(-int(quota) // int(period)), allowed or 1), 1)
    return allowed or 1


def with_retries(master: str) -> tuple[str, bool]:
    """Return `local[N]` as `local[N,4]`, where Spark ignores `spark.task.maxFailures`.

    The second value is whether the master is local.
    """
    if not master.startswith("local"):
        return master, False
    if master.startswith("local-cluster"):
        return master, True
    inside = master.removeprefix("local").strip("[]") or "1"
    if "," in inside:
        return master, True
    if inside != "*" and not inside.isdecimal():
        raise UsageError(
            "not a valid Spark master",
            hint="use local[2], local[*], spark://host:port or another master URL of Spark",
            master=master,
        )
    return f"local[{inside},4]", True
