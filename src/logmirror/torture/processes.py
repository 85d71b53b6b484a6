"""The brokers and mirrors of a torture, as child processes that do not outlive it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, Self

from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.file_names import open_path
from logmirror.clock import SYSTEM_CLOCK
from logmirror.config.environment import METRICS_PORT
from logmirror.errors import UnavailableError
from logmirror.failpoints import VARIABLE
from logmirror.stopping import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PARTITIONS: Final = 2
"""Partitions of the source topic."""

MIRROR: Final = "logmirror.torture.mirror_process"
"""The module that runs the mirrors."""

_POLL_MS: Final = 20
_START_MS: Final = 60_000
_END_MS: Final = 60_000


def wait(condition: Callable[[], bool], timeout_ms: int) -> bool:
    """Wait until a condition holds; False if it did not in time."""
    until_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
    while not condition():
        if SYSTEM_CLOCK.monotonic_ms() > until_ms:
            return False
        SYSTEM_CLOCK.sleep_ms(_POLL_MS)
    return True


def free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


_children: list[_Process] = []
"""All that were started, also those that nothing else refers to after an interrupt."""


@contextlib.contextmanager
def ending_children() -> Iterator[None]:
    """Kill, at the end of the block, what was started within it and still runs."""
    try:
        yield
    finally:
        for child in _children:
            child.kill()
        _children.clear()


class _Process:
    """A child process in its own session, with its output in a file."""

    def __init__(self, module: str, arguments: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output, uninterrupted():
            self.child = subprocess.Popen(  # noqa: S603  # a module of logmirror
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
            _children.append(self)

    @property
    def is_alive(self) -> bool:
        return self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    def kill(self) -> None:
        """End the process with SIGKILL, which also ends a stopped one."""
        self.signal(signal.SIGKILL)
        self.child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Broker:
    """An embedded broker that can be killed and restarted with its data.

    Args:
        folder: Does not exist yet.
        host: The address that it listens on.
        advertised_host: The host that it returns to clients, if they go through a proxy.
    """

    def __init__(self, folder: Path, host: str, advertised_host: str = "") -> None:
        folder.mkdir()
        self.host, self.port = host, free_port(host)
        self._folder, self._advertised_host = folder, advertised_host
        self._process: _Process | None = None
        self.start()

    @property
    def address(self) -> str:
        """Its host and port, without a proxy."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start the broker and wait until it listens."""
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
            raise UnavailableError("an embedded broker did not start", log=str(log))

    def open_segment(self, topic: str, partition: int) -> Path:
        """Return the file of a partition's records; there is one below 64 MiB."""
        return open_path(self._folder / "data" / topic / str(partition), 0)

    def bytes_before(self, topic: str, partition: int, offset: int) -> int:
        """Return where the batches before `offset` end in that file."""
        path = self.open_segment(topic, partition)
        if not path.exists():
            return 0
        batches = scan(Disk().open_for_reading(path), 0, contiguous=True)
        return max((batch.end for batch in batches if batch.last_offset < offset), default=0)

    def save_data(self) -> None:
        """Keep a copy of its log directory, as a backup of the disk would; the broker is killed."""
        shutil.copytree(self._folder / "data", self._folder / "saved")

    def exchange_data(self) -> None:
        """Exchange the log directory and what `save_data` has kept; the broker is killed."""
        data, saved, between = (self._folder / name for name in ("data", "saved", "between"))
        data.rename(between)
        saved.rename(data)
        between.rename(saved)

    def drop_saved(self) -> None:
        """Delete what `save_data` has kept."""
        shutil.rmtree(self._folder / "saved", ignore_errors=True)

    def pause(self) -> None:
        """Stop its threads with SIGSTOP: connections stay open without responses."""
        if self._process is not None:
            self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it after `pause`."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the broker with SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class MirrorProcess(_Process):
    """A process that runs the mirrors of a configuration.

    Args:
        config: The configuration file.
        log: A new file for its log.
        arguments: `--until-now`, or none.
        crash_at: A failpoint, `name#nth`; empty: none.
    """

    def __init__(self, config: Path, log: Path, *arguments: str, crash_at: str = "") -> None:
        self.name = log.stem
        self.started_ms = SYSTEM_CLOCK.monotonic_ms()
        super().__init__(
            MIRROR,
            [str(config), *arguments],
            log,
            **({VARIABLE: crash_at} if crash_at else {}),
        )

    def reported(self) -> Iterator[tuple[str, int, int]]:
        """Yield mirror, partition and position of each progress line in its log."""
        for event in self._events():
            if event["event"] in {"flushed", "copied"}:
                yield event["mirror"], event["partition"], event["to"] + 1

    def refused(self) -> set[str]:
        """Return the names of the mirrors that stopped because source and replica contradict."""
        return {
            event["mirror"]
            for event in self._events()
            if event["event"].startswith("mirror stopped") and event["kind"] == "position"
        }

    def _events(self) -> Iterator[dict[str, Any]]:
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # not an event, or not complete yet
                yield json.loads(line)

    def has_progress(self) -> bool:
        """Whether it has reported a position."""
        return any(True for _ in self.reported())

    def await_progress(self, timeout_ms: int = _START_MS) -> bool:
        """Wait for the first reported position; False if it exited or took too long."""
        wait(lambda: self.has_progress() or not self.is_alive, timeout_ms)
        return self.is_alive and self.has_progress()

    def limit_files(self, size_bytes: int) -> bool:
        """Limit the size of each file that it writes, to simulate a full disk.

        Args:
            size_bytes: The limit; negative: no limit.

        Returns:
            False if this system cannot limit another process.
        """
        if not hasattr(resource, "prlimit"):
            return False
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE)
            soft = hard if size_bytes < 0 else size_bytes
            resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE, (soft, hard))
        return True

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return "".join(self.log.read_text(errors="replace").splitlines()[-1:])

    def end(self, timeout_ms: int = _END_MS) -> int | None:
        """Wait until it exits; returns its exit code, or None if it still runs."""
        wait(lambda: not self.is_alive, timeout_ms)
        return self.child.poll()
