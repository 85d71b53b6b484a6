"""`kit.runs.inline_run` that pauses itself with SIGSTOP at an exact point, like a hanging machine.

    LOGMIRROR_TEST_STOP_AT=produce.prepared#3 python -m kit.runs.stopping_run run -c CONFIG

A point is a failpoint, or `kernel`: after the last reading of the clock, before the next bytes of a
Produce request are passed to the kernel, where logmirror cannot check again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import psutil

from kit.runs.commands import wait_until
from kit.runs.inline_run import InlineRun, InlineRunner
from logmirror import failpoints
from logmirror.cli import main
from logmirror.cluster.transport import Transport
from logmirror.engine import spark

if TYPE_CHECKING:
    from pathlib import Path

_VARIABLE: Final = "LOGMIRROR_TEST_STOP_AT"
KERNEL: Final = "kernel"


class StoppingRun(InlineRun):
    """A run that pauses itself when it reaches a point for the nth time; SIGCONT resumes it."""

    program = (sys.executable, "-m", "kit.runs.stopping_run")

    def __init__(self, config: Path, moment: str, nth: int, *, folder: Path) -> None:
        super().__init__(config, folder=folder, environment={_VARIABLE: f"{moment}#{nth}"})

    def wait_until_stopped(self) -> None:
        """Wait until the run has paused itself."""
        process = psutil.Process(self.pid)
        wait_until(
            lambda: not self.alive or process.status() == psutil.STATUS_STOPPED,
            what=lambda: f"the stop of:\n{self.text}",
            timeout_s=60,
        )
        assert self.alive, self.text


class _Moment:
    """Counts how often the point was reached."""

    def __init__(self) -> None:
        self.name, _, nth = os.environ[_VARIABLE].partition("#")
        self._left = int(nth)

    def comes(self) -> None:
        self._left -= 1
        if self._left == 0:
            # To this thread: a signal to the process may stop another one first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _arm() -> None:
    moment, reach, send_some = _Moment(), failpoints.reach, Transport.send_some

    def reach_or_stop(point: str) -> None:
        if point == moment.name:
            moment.comes()
        reach(point)

    def send_or_stop(transport: Transport, pieces: Any) -> bool:
        if moment.name == KERNEL:
            moment.comes()
        return send_some(transport, pieces)

    failpoints.reach = reach_or_stop
    Transport.send_some = send_or_stop  # type: ignore[method-assign]  # it is what stops


if __name__ == "__main__":
    _arm()
    spark.SparkRunner = InlineRunner  # type: ignore[misc,assignment]  # see kit.runs.inline_run
    main.main()
