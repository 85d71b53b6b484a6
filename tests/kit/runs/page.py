"""Pages as their readers use them: the code blocks, and the commands run in a directory."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from kit.runs.commands import QUIET
from kit.runs.inline_run import python_path
from kit.servers.machine import HOST, Process, free_ports, program
from kit.tiers import NIGHTLY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kit.servers.apache import ApacheTools


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Return the commands of a page, without comments."""
    return [
        line.partition("  #")[0].strip()
        for block in blocks(page, "sh")
        for line in block.splitlines()
        if line
    ]


class Reader:
    """Runs commands of a page, one after the other, in one directory.

    Args:
        folder: The directory.
        addresses: Of servers in the page; each gets a free port in place of its own.
        servers: Servers that run already, by their addresses in the page.
        with_spark: Whether `logmirror run` starts Spark; at night it always does.
    """

    def __init__(
        self,
        folder: Path,
        *addresses: str,
        servers: Mapping[str, str] | None = None,
        with_spark: bool = True,
    ) -> None:
        self.folder, self._with_spark = folder, with_spark or NIGHTLY
        ports = free_ports(len(addresses))
        self._addresses = {
            address: f"{HOST}:{port}" for address, port in zip(addresses, ports, strict=True)
        } | (dict(servers or {}))
        self._tools: ApacheTools | None = None
        self.running: list[Process] = []

    def use(self, tools: ApacheTools) -> None:
        """Run the scripts of Apache Kafka in the page with these tools."""
        self._tools = tools

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(self._moved(text), encoding="utf-8")

    def _moved(self, text: str) -> str:
        for address, free in self._addresses.items():
            text = text.replace(address, free)
        return text

    def end(self) -> None:
        """End what was left running."""
        for process in reversed(self.running):
            process.end(kill=True)

    def type(self, command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            ["sh", "-c", self._here(command)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def leave_running(self, command: str, *, until: Callable[[str], bool]) -> Process:
        """Run a command in the background and wait until its output shows that it is ready."""
        log = self.folder / f"{len(self.running)}.log"
        words = shlex.split(os.path.expandvars(self._here(command.removesuffix("&"))))
        process = Process(words, log=log, folder=self.folder, environment={**os.environ, **QUIET})
        self.running.append(process)
        self.wait(process, until)
        return process

    @staticmethod
    def wait(process: Process, until: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 200
        while not until(process.tail(10_000)):
            assert process.alive, process.tail()
            assert time.monotonic() < deadline, process.tail()
            time.sleep(0.05)

    def _here(self, command: str) -> str:
        python = shlex.quote(sys.executable)
        if not self._with_spark:
            command = command.replace("logmirror run ", f"{python} -m kit.runs.inline_run run ")
        if self._tools is not None:
            for name in set(re.findall(r"\b(kafka-[a-z-]+)\.sh ", command)):
                tool = shlex.join(self._tools.command(name))
                command = command.replace(f"{name}.sh ", f"{tool} ")
        command = re.sub(r"\blogmirror ", f"{python} -m logmirror ", command, count=1)
        command = re.sub(r"\bkcat ", f"{shlex.quote(program('kcat'))} ", command, count=1)
        return self._moved(command)
