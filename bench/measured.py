"""Run a command and say what it cost: wall time, CPU of its whole process tree, peak memory.

CPU is sampled, because Spark's JVM and workers are no children that the command waits for: every
process of the tree is looked at every 50 ms, and the last look counts. What a process does in its
last 50 ms is missed, so figures are a lower bound, by some percent for a command of one second.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SAMPLE_S = 0.05


@dataclass
class Cost:
    """What one command cost."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: dict[str, int] = field(default_factory=dict)
    """Highest resident memory of any one process, by program name."""

    timeline: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the epoch, CPU seconds until then), one for each look."""

    stderr: str = ""

    def cpu_since(self, epoch_s: float) -> float:
        """CPU seconds from a moment to the end."""
        before = [cpu for at, cpu in self.timeline if at <= epoch_s]
        return self.cpu_s - (before[-1] if before else 0.0)


def run(command: list[str], *, stdout: Path | None = None) -> Cost:
    """Run to the end; raises CalledProcessError if it fails."""
    cost, seen = Cost(), {}
    began = time.monotonic()
    with (
        Path(stdout or os.devnull).open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE) as process,
    ):
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(process.pid, seen, cost, stop))
        sampler.start()
        cost.stderr = process.stderr.read().decode(errors="replace")
        process.wait()
        stop.set()
        sampler.join()
    cost.wall_s = time.monotonic() - began
    cost.cpu_s = sum(seen.values())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=cost.stderr)
    return cost


def _sample(pid: int, seen: dict, cost: Cost, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            root = psutil.Process(pid)
            for one in [root, *root.children(recursive=True)]:
                try:
                    times, memory = one.cpu_times(), one.memory_info().rss
                    key = (one.pid, one.create_time())
                    seen[key] = max(seen.get(key, 0.0), times.user + times.system)
                    name = one.name()
                except psutil.Error:
                    continue
                cost.rss_bytes[name] = max(cost.rss_bytes.get(name, 0), memory)
        except psutil.Error:
            pass
        cost.timeline.append((time.time(), sum(seen.values())))
        stop.wait(_SAMPLE_S)
