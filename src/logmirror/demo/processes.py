"""The commands that the demo starts, none of which outlives it.

Each runs in a session of its own, so that Ctrl-C at the terminal reaches only the demo, which then
ends them; and so that a command is killed together with the Java machine that it started. Python
workers of Spark end by themselves when their Java machine is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.config.environment import METRICS_PORT
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_POLL_MS: Final = 25
_STOP_S: Final = 20
_SHOWN_LINES: Final = 8


class Command:
    """One running `logmirror` command; its output goes to a file.

    Args:
        arguments: What follows `logmirror`.
        log: Takes stderr; stdout too unless `output` is given.
        folder: Where it runs and puts its temporary files.
        output: Takes stdout.
    """

    def __init__(
        self, arguments: list[str], *, log: Path, folder: Path, output: Path | None = None
    ) -> None:
        self.name = f"logmirror {arguments[0]}"
        self.log = log
        self._has_ended = False
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("ab"))
            stdout = files.enter_context(output.open("wb")) if output else errors
            self._process = subprocess.Popen(  # noqa: S603  # our own command line
                # -P: a folder named `logmirror` where the user stands is not the program.
                [sys.executable, "-P", "-m", "logmirror", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=errors,
                cwd=folder,
                env={**os.environ, METRICS_PORT: "0", "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def wait_for(
        self, is_done: Callable[[], object], *, timeout_s: int, exits: tuple[int, ...] = ()
    ) -> None:
        """Wait until something is the case, or the command has ended as it may.

        Args:
            is_done: Asked often; also shows progress.
            timeout_s: How long at most.
            exits: The exit codes with which it may end.

        Raises:
            UnavailableError: It ended otherwise, or took too long.
        """
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000
        while not is_done():
            exit_code = self._process.poll()
            if exit_code is not None:
                self.kill()  # its Java machine may need a moment longer
            if exit_code in exits:
                return
            if exit_code is not None:
                raise self._failed("ended unexpectedly", exit_code=exit_code)
            if SYSTEM_CLOCK.monotonic_ms() > deadline_ms:
                raise self._failed("took too long", timeout_s=timeout_s)
            SYSTEM_CLOCK.sleep_ms(_POLL_MS)

    def find_in_log(self, pattern: str) -> re.Match[str] | None:
        """Look for a line in what it has written so far."""
        return re.search(pattern, self.log.read_text(errors="replace"), re.MULTILINE)

    def kill(self) -> None:
        """End it as a power cut would: `kill -9`, and the same for what it started."""
        if self._has_ended:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._has_ended = True

    def stop(self) -> None:
        """Ask it to end, and see to it that it has."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def _failed(self, what: str, **facts: object) -> UnavailableError:
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return UnavailableError(
            f"{self.name} {what}",
            hint="the end of its log is shown here",
            **facts,
            log=str(self.log),
            lines="".join(f"\n    {line}" for line in lines),
        )


class Commands:
    """Starts commands in one folder and ends what still runs at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self._logs, self._temporary = folder / "logs", folder / "tmp"
        self._started: list[Command] = []
        self._logs.mkdir()
        self._temporary.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for command in reversed(self._started):
            command.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def start(self, *arguments: str, log: str, output: Path | None = None) -> Command:
        """Start `logmirror` with these arguments; its log is `logs/<log>.log`."""
        command = Command(
            list(arguments),
            log=self._logs / f"{log}.log",
            folder=self._temporary,
            output=output,
        )
        self._started.append(command)
        return command
