"""The embedded broker in a separate process, so that a test can kill it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kit.servers.machine import HOST, Process, free_ports
from logmirror.failpoints import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.servers.s3 import LogBucket

_SCRIPT: Final = Path(__file__).parent / "run_broker.py"
_START_TIMEOUT_S: Final = 180
_INTERVAL_MS: Final = 5
"""Between the commits into a bucket."""


class EmbeddedBroker:
    """A broker; `start` it, or use it in a `with`. A restart keeps port and data.

    Args:
        folder: Directory of its data and logs.
        protocols: Security protocols; a listener for each, in place of the plain one.
        bucket: Its log dir, if that is in a bucket. `kill` removes then all that it has on this
            machine.
        environment: Variables beside those of this process.
        options: Fields of `BrokerOptions`, except its address and its log directory.

    Attributes:
        log_dir: The folder of its topics.
        crash_at: A failpoint, for the next start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        protocols: tuple[str, ...] = (),
        bucket: LogBucket | None = None,
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        self.folder = folder
        self.log_dir = folder / "data"
        self.bucket = bucket
        if bucket is not None:
            self._work_dir = self.log_dir
            self.log_dir /= "logmirror-work"
            options = {"commit_interval_ms": _INTERVAL_MS, **options, "bucket": bucket.url}
        self._environment = dict(environment or {}) | (bucket.environment if bucket else {})
        self.log = folder / "broker.log"
        self._ports = dict(
            zip(protocols or ("PLAINTEXT",), free_ports(len(protocols) or 1), strict=True)
        )
        self.port = next(iter(self._ports.values()))
        self._ready = folder / "ready"
        self._options = options
        if protocols:
            self._options["listeners"] = [
                {"name": protocol, "host": HOST, "port": port, "protocol": protocol}
                for protocol, port in self._ports.items()
            ]
        self.crash_at = ""
        self._process: Process | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    def port_of(self, protocol: str) -> int:
        """The port of the listener of a security protocol."""
        return self._ports[protocol]

    @property
    def pid(self) -> int:
        """PID of the running broker."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.alive

    def start(self) -> Self:
        """Start it and wait until it listens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ready.unlink(missing_ok=True)
        options = {
            **self._options,
            "log_dir": str(self.log_dir if self.bucket is None else self._work_dir),
            "host": HOST,
            "port": self.port,
            "ready": str(self._ready),
        }
        # -P: the script's folder has a `kafka.py`, which would hide kafka-python.
        command = [sys.executable, "-P", str(_SCRIPT), json.dumps(options)]
        environment = {**os.environ, **self._environment}
        if self.crash_at:
            environment |= {VARIABLE: self.crash_at}
            self.crash_at = ""
        self._process = Process(command, log=self.log, environment=environment)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._ready.exists():
            if not self._process.alive or time.monotonic() > deadline:
                self._process.end(kill=True)
                message = f"the embedded broker did not start:\n{self._process.tail()}"
                raise RuntimeError(message)
            time.sleep(0.01)
        return self

    def stop(self) -> int:
        """Stop it cleanly; returns its exit code."""
        assert self._process is not None
        return self._process.end()

    def kill(self) -> None:
        """End it like `kill -9`."""
        assert self._process is not None
        self._process.end(kill=True)
        if self.bucket is not None:
            shutil.rmtree(self._work_dir)

    def pause(self) -> None:
        """Pause its threads (SIGSTOP): connections stay open without responses."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
