"""Measure programs: wall time, CPU of whole process trees, peak memory of each process.

CPU is sampled, because Spark's JVM and workers are not children that the command waits for. Each
process of a tree is sampled every 50 ms, and the last sample counts. The last 50 ms of a process
are missed, so figures are a lower bound, by some percent for a command of one second. New processes
are searched for every 400 ms, because that search is the most expensive part.
"""

from __future__ import annotations

import bisect
import os
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

os.environ["LOGMIRROR_METRICS_PORT"] = "0"  # no scraper runs beside a benchmark

_SAMPLE_S = 0.05
_SAMPLES_BETWEEN_SCANS = 8


@dataclass
class Tree:
    """The cost of one process and its descendants."""

    cpu_s: float = 0.0
    rss_bytes: dict[str, int] = field(default_factory=dict)
    """Highest resident memory of a single process, by program name."""

    rss_by_role: dict[str, int] = field(default_factory=dict)
    """Highest resident memory of a single process, by role; see `_role`."""

    peak_bytes: int = 0
    """Highest resident memory of all processes together; shared pages count once for each."""

    timeline: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the epoch, CPU seconds until then) for each sample."""

    by_role: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """The timeline of each role."""

    def cpu_at(self, epoch_s: float) -> float:
        """Return the CPU seconds until a time, interpolated between two samples."""
        at = bisect.bisect_left(self.timeline, (epoch_s, 0.0))
        if at == 0:
            return 0.0
        if at == len(self.timeline):
            return self.cpu_s
        (before_s, before), (after_s, after) = self.timeline[at - 1 : at + 1]
        return before + (after - before) * (epoch_s - before_s) / (after_s - before_s)

    def cpu_between(self, first_s: float, last_s: float) -> float:
        """Return the CPU seconds between two times."""
        return self.cpu_at(last_s) - self.cpu_at(first_s)

    def roles_between(self, first_s: float, last_s: float) -> dict[str, float]:
        """Return the CPU seconds between two times, by role."""
        return {
            role: Tree(timeline=line, cpu_s=line[-1][1]).cpu_between(first_s, last_s)
            for role, line in self.by_role.items()
        }

    def cpu_since(self, epoch_s: float) -> float:
        """Return the CPU seconds from a time to the end."""
        return self.cpu_s - self.cpu_at(epoch_s)


@dataclass
class Cost(Tree):
    """The cost of one command."""

    wall_s: float = 0.0
    stderr: str = ""


class Watch:
    """Samples process trees while its `with` block runs.

    Args:
        roots: PID of the top process of each tree, and where its figures go.
    """

    def __init__(self, roots: dict[int, Tree]) -> None:
        self._trees = [_Sampled(pid, tree) for pid, tree in roots.items()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        for tree in self._trees:
            tree.look(scan=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for tree in self._trees:
            tree.look(scan=True)

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(_SAMPLE_S):
            looks += 1
            for tree in self._trees:
                tree.look(scan=looks % _SAMPLES_BETWEEN_SCANS == 0)


class _Sampled:
    def __init__(self, pid: int, tree: Tree) -> None:
        self._pid, self.tree = pid, tree
        self._known: dict[psutil.Process, tuple[str, str]] = {}
        self._cpu_s: dict[psutil.Process, float] = {}
        self._role_of: dict[psutil.Process, str] = {}

    def look(self, *, scan: bool) -> None:
        if scan:
            self._scan()
        resident = 0
        for process, (name, role) in list(self._known.items()):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                del self._known[process]  # its CPU until the last sample still counts
                continue
            self._cpu_s[process] = max(self._cpu_s.get(process, 0.0), times.user + times.system)
            self._role_of[process] = role
            resident += memory
            for peaks, key in ((self.tree.rss_bytes, name), (self.tree.rss_by_role, role)):
                peaks[key] = max(peaks.get(key, 0), memory)
        self.tree.peak_bytes = max(self.tree.peak_bytes, resident)
        self.tree.cpu_s = sum(self._cpu_s.values())
        now = time.time()
        self.tree.timeline.append((now, self.tree.cpu_s))
        sums: defaultdict[str, float] = defaultdict(float)
        for process, cpu_s in self._cpu_s.items():
            sums[self._role_of[process]] += cpu_s
        for role, cpu_s in sums.items():
            self.tree.by_role.setdefault(role, []).append((now, cpu_s))

    def _scan(self) -> None:
        try:
            root = psutil.Process(self._pid)
            for process in [root, *root.children(recursive=True)]:
                # Looked up each time: a shell that starts Java becomes Java.
                self._known[process] = (process.name(), _role(process, root))
        except psutil.Error:
            pass  # the process or one of its children has just ended


def _role(process: psutil.Process, root: psutil.Process) -> str:
    """Return `driver`, `JVM`, `daemon` (Spark forks workers from it) or `worker`."""
    if process == root:
        return "driver"
    if process.name() == "java":
        return "JVM"
    parent = process.parent()
    return "daemon" if parent is not None and parent.name() == "java" else "worker"


def run(
    command: list[str], *, stdout: Path | None = None, beside: dict[int, Tree] | None = None
) -> Cost:
    """Run a command to its end; raises CalledProcessError if it fails.

    Args:
        command: What to run.
        stdout: Where its output goes.
        beside: Other processes to look at meanwhile, brokers for instance, and where their figures
            go.
    """
    cost = Cost()
    began = time.monotonic()
    with (
        Path(stdout or os.devnull).open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE) as process,
    ):
        with Watch({process.pid: cost, **(beside or {})}):
            cost.stderr = process.stderr.read().decode(errors="replace")
            process.wait()
        cost.wall_s = time.monotonic() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=cost.stderr)
    return cost
