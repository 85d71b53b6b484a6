"""The commands that the demo starts. None of them outlives it.

Each runs in its own session. Ctrl-C in the terminal therefore reaches only the demo, which then
stops the commands, and a command is killed together with the JVM that it started. Spark's Python
workers exit when their JVM is gone.
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
from logmirror.stopping import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_POLL_MS: Final = 25
_STOP_S: Final = 20
_SHOWN_LINES: Final = 8


class Command:
    """One running `logmirror` command; its output goes to a file.

    Args:
        arguments: The arguments of `logmirror`.
        log: File for stderr, and for stdout unless `output` is given.
        folder: Working directory and temporary directory.
        output: File for stdout.
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
            self._process = subprocess.Popen(  # noqa: S603  # a fixed command
                # -P: ignore a folder named `logmirror` in the working directory.
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
        """Wait until a condition holds, or the command exits with one of these codes.

        Args:
            is_done: The condition, called every 25 ms; can also show progress.
            timeout_s: The timeout.
            exits: The permitted exit codes.

        Raises:
            UnavailableError: The command exited with another code, or timed out.
        """
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000
        while not is_done():
            exit_code = self._process.poll()
            if exit_code is not None:
                self.kill()  # its JVM can still be running
            if exit_code in exits:
                return
            if exit_code is not None:
                raise self._failed("exited unexpectedly", exit_code=exit_code)
            if SYSTEM_CLOCK.monotonic_ms() > deadline_ms:
                raise self._failed("timed out", timeout_s=timeout_s)
            SYSTEM_CLOCK.sleep_ms(_POLL_MS)

    def find_in_log(self, pattern: str) -> re.Match[str] | None:
        """Search the log so far for a line."""
        return re.search(pattern, self.log.read_text(errors="replace"), re.MULTILINE)

    def kill(self) -> None:
        """Kill the command and the processes that it started with SIGKILL."""
        if self._has_ended:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have exited
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._has_ended = True

    def stop(self) -> None:
        """Terminate the command with SIGTERM; after 20 s with SIGKILL."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def _failed(self, what: str, **facts: object) -> UnavailableError:
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return UnavailableError(
            f"{self.name} {what}",
            hint="see the last lines of its log",
            **facts,
            log=str(self.log),
            lines="".join(f"\n    {line}" for line in lines),
        )


class Commands:
    """Starts commands in one folder, and kills those that still run at the end of the block."""

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
        with uninterrupted():
            command = Command(
                list(arguments),
                log=self._logs / f"{log}.log",
                folder=self._temporary,
                output=output,
            )
            self._started.append(command)
        return command
