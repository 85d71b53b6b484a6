"""What a broker process spends while something runs: CPU time, memory, and without a pause.

All times are CPU times, so that a busy machine does not change them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from kit.judges.raw_client import RawClient
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker

_PAUSE_S: Final = 0.005


@dataclass
class Burden:
    """What was spent; complete when the `measured` block ends."""

    cpu_s: float = 0.0
    grown_bytes: int = 0
    """By how much the largest resident size so far has grown."""
    longest_turn_s: float = 0.0
    """The longest CPU time of the event loop while another client waited for one response."""


@contextlib.contextmanager
def measured(broker: EmbeddedBroker) -> Iterator[Burden]:
    """Measure a broker process while the block runs; a second client asks all the time."""
    burden, stop = Burden(), threading.Event()
    process = psutil.Process(broker.pid)

    def ask() -> None:
        with RawClient(broker.port, timeout_s=60) as client:
            while not stop.is_set():
                before_s = loop_s(process)
                client.ask(Api.API_VERSIONS, 0)
                burden.longest_turn_s = max(burden.longest_turn_s, loop_s(process) - before_s)
                stop.wait(_PAUSE_S)

    asker = threading.Thread(target=ask)
    before_bytes, times = peak_bytes(broker.pid), process.cpu_times()
    asker.start()
    try:
        yield burden
    finally:
        stop.set()
        asker.join()
        after = process.cpu_times()
        burden.cpu_s = after.user + after.system - times.user - times.system
        burden.grown_bytes = peak_bytes(broker.pid) - before_bytes


def loop_s(process: psutil.Process) -> float:
    """CPU time of the main thread, which runs the event loop."""
    return sum(
        thread.user_time + thread.system_time
        for thread in process.threads()
        if thread.id == process.pid
    )


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)
