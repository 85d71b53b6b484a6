"""Machine services for the test kit: Java, Maven, ports, processes that end with this one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"

# Below the range from which Linux and macOS take ports for outgoing connections: while a broker is
# down for a restart, nothing else is given its port by accident.
_FIRST_PORT: Final = 20_000
_LAST_PORT: Final = 32_000

_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROCESSES: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_handed_out: set[int] = set()


def program(name: str, *, home_variable: str = "") -> str:
    """Return the path of an installed program; fails with a hint."""
    home = os.environ.get(home_variable)
    if home and (Path(home) / "bin" / name).exists():
        return str(Path(home) / "bin" / name)
    found = shutil.which(name)
    if found is None:
        message = f"the tests need the program {name!r}, which is not on the PATH: run `make test`"
        raise RuntimeError(message)
    return found


def java() -> str:
    """Return the java launcher; 17 or later is needed for brokers of Kafka 4.

    Raises:
        RuntimeError: Java is not on this machine, or `make check` runs, which starts no JVM.
    """
    if os.environ.get("LOGMIRROR_TEST_TIER") == "check":
        raise RuntimeError("a test of `make check` starts a JVM: mark it with `jvm`")
    return program("java", home_variable="JAVA_HOME")


def cache_folder() -> Path:
    """Return the directory of downloads for the tests."""
    configured = os.environ.get("LOGMIRROR_TEST_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "logmirror-tests"


@functools.cache
def temporary_folder() -> Path:
    """Return a directory for leftovers of killed programs, mostly JVMs.

    Its name is short, because Unix sockets in it may have about 100 characters. It is deleted when
    this process ends; a test worker, which may end in another way, deletes it itself.
    """
    folder = Path(tempfile.mkdtemp(prefix="lm-"))
    atexit.register(remove_temporary_folder)
    return folder


def remove_temporary_folder() -> None:
    """Delete it after all tests, or after a benchmark."""
    if temporary_folder.cache_info().currsize:
        shutil.rmtree(temporary_folder(), ignore_errors=True)
        temporary_folder.cache_clear()


def free_ports(count: int) -> list[int]:
    """Return unused ports on loopback that were not returned before.

    Processes of one run share no port: a client of a broker that has ended may still connect to its
    port, and would create its topics at the broker of another test.
    """
    ports: list[int] = []
    chooser = random.SystemRandom()
    own = range(_FIRST_PORT + _PROCESS, _LAST_PORT + 1, _PROCESSES)
    while len(ports) < count:
        port = chooser.choice(own)
        if port in _handed_out:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            ports.append(port)
            _handed_out.add(port)
    return ports


class Process:
    """A child that is killed when this process dies, however it dies.

    A helper shell reads a pipe that only this process holds open; when the pipe closes without the
    last line, it kills the child. (A parent-death signal exists only on Linux.)

    Args:
        command: The program and its arguments.
        log: File to which its output is appended.
        environment: Replaces the environment of this process, if given.
        folder: Its working directory.
    """

    def __init__(
        self,
        command: list[str],
        *,
        log: Path,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.command = command
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self._watchdog = subprocess.Popen(
            ["sh", "-c", f"read -r word || kill -9 {self.popen.pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal; ignored if the child has ended."""
        self.popen.send_signal(number)

    def end(self, *, kill: bool = False, timeout_s: float = 40) -> int:
        """Stop the child (SIGTERM, or SIGKILL at once), wait for it, return its exit code."""
        if self.alive:
            self.popen.send_signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
            self.popen.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self._watchdog.stdin and not self._watchdog.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.communicate(b"farewell\n")
        return self.popen.returncode

    def tail(self, limit_bytes: int = 4000) -> str:
        """Return the end of its output."""
        return self.log.read_bytes()[-limit_bytes:].decode(errors="replace")
