"""The processes of a torture: brokers and copiers, none of which outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.config.environment import METRICS_PORT
from logmirror.errors import UnavailableError
from logmirror.failpoints import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PARTITIONS: Final = 2
"""Of the topic that is copied."""

_POLL_MS: Final = 20
_START_MS: Final = 60_000
_END_MS: Final = 60_000


def wait(condition: Callable[[], bool], timeout_ms: int) -> bool:
    """Wait until something holds; whether it did in time."""
    until_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
    while not condition():
        if SYSTEM_CLOCK.monotonic_ms() > until_ms:
            return False
        SYSTEM_CLOCK.sleep_ms(_POLL_MS)
    return True


def free_port(host: str) -> int:
    """A port that nobody listens on just now."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class _Process:
    """A child in a session of its own, with its output in a file."""

    def __init__(self, module: str, arguments: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.child = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    METRICS_PORT: "0",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **environment,
                },
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    def kill(self) -> None:
        """End it as `kill -9` does, also when it stands still."""
        self.signal(signal.SIGKILL)
        self.child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Broker:
    """An embedded broker that can be killed and started again with its data.

    Args:
        folder: Of its own.
        host: Where it listens.
        advertised_host: What clients are told, where a proxy stands before it.
    """

    def __init__(self, folder: Path, host: str, advertised_host: str = "") -> None:
        folder.mkdir()
        self.host, self.port = host, free_port(host)
        self._folder, self._advertised_host = folder, advertised_host
        self._process: _Process | None = None
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        options = {
            "log_dir": str(self._folder / "data"),
            "host": self.host,
            "port": self.port,
            "advertised_host": self._advertised_host,
            "ready": str(ready),
        }
        log = self._folder / "broker.log"
        process = _Process("logmirror.torture.broker_process", [json.dumps(options)], log)
        self._process = process
        wait(lambda: ready.exists() or not process.is_alive, _START_MS)
        if not (ready.exists() and process.is_alive):
            self.kill()
            raise UnavailableError("a broker of the torture did not start", log=str(log))

    def kill(self) -> None:
        """End it as `kill -9` does."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Copier(_Process):
    """A process that runs the mirrors of a configuration.

    Args:
        config: The file.
        log: For its log, new.
        arguments: `--until-now`, or none.
        crash_at: A crash point, `name#nth`; empty: none.
    """

    def __init__(self, config: Path, log: Path, *arguments: str, crash_at: str = "") -> None:
        self.name = log.stem
        self.began_ms = SYSTEM_CLOCK.monotonic_ms()
        super().__init__(
            "logmirror.torture.copier",
            [str(config), *arguments],
            log,
            **({VARIABLE: crash_at} if crash_at else {}),
        )

    def told(self) -> Iterator[tuple[str, int, int]]:
        """What it has reported: mirror, partition, position."""
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                event = json.loads(line)
                if event["event"] in {"flushed", "copied"}:
                    yield event["mirror"], event["partition"], event["to"] + 1

    def has_told(self) -> bool:
        """Whether it has copied anything yet."""
        return any(True for _ in self.told())

    def await_progress(self, timeout_ms: int = _START_MS) -> bool:
        """Wait until it copies; False: it has ended, or takes too long."""
        wait(lambda: self.has_told() or not self.is_alive, timeout_ms)
        return self.is_alive and self.has_told()

    def limit_files(self, size_bytes: int) -> bool:
        """Let no file of it grow beyond a size, as a full disk does; whether the system can.

        Args:
            size_bytes: The size; negative: any.
        """
        if not hasattr(resource, "prlimit"):
            return False
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE)
            soft = hard if size_bytes < 0 else size_bytes
            resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE, (soft, hard))
        return True

    def end(self, timeout_ms: int = _END_MS) -> int | None:
        """Wait until it ends by itself; its exit code, or None if it does not."""
        wait(lambda: not self.is_alive, timeout_ms)
        return self.child.poll()
