"""`logmirror broker --log-dir s3://...` as a process that a test can kill and pause."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, Self

from kit.servers.machine import HOST, Process, free_ports
from kit.servers.s3 import LogBucket

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.s3 import S3Server

_START_TIMEOUT_S: Final = 180


class BucketBroker:
    """A broker on a prefix of a bucket; `start` it, or use it in a `with`.

    Args:
        folder: For its working folder and its log.
        server: The S3 server.
        bucket: The bucket.
        options: Further options of the command.
        endpoint: Another address of the server.
        advertised: The `host:port` that it gives to its clients; empty: the one it listens on.
        crash_at: A failpoint.
    """

    def __init__(  # noqa: PLR0913  # each test says only what it cares about
        self,
        folder: Path,
        server: S3Server,
        bucket: str,
        *options: str,
        endpoint: str = "",
        advertised: str = "",
        crash_at: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.work_dir, self.log = folder / "work", folder / "broker.log"
        self.port = free_ports(1)[0]
        self._options = ("--listen", self.bootstrap, *options)
        if advertised:
            listener = ("--listener", f"PLAINTEXT://{self.bootstrap}")
            self._options = (*listener, "--advertise", f"PLAINTEXT={advertised}", *options)
        self._place = LogBucket(server, bucket, endpoint)
        self.crash_at = crash_at
        self._environment = {**os.environ, **self._place.environment}
        self._process: Process | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    def start(self, *, waits: bool = True) -> Self:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "logmirror", "broker"]
        command += ["--log-dir", self._place.url, "--work-dir", str(self.work_dir)]
        command += self._options
        before = self.log.stat().st_size if self.log.exists() else 0
        environment = self._environment
        if self.crash_at:
            environment = {**environment, "LOGMIRROR_CRASH_AT": self.crash_at}
        self._process = Process(command, log=self.log, environment=environment)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while waits and not re.search(rb"(?m)^listening on ", self.log.read_bytes()[before:]):
            if not self._process.alive or time.monotonic() > deadline:
                self._process.end(kill=True)
                message = f"the broker did not start:\n{self.log.read_text()[-4000:]}"
                raise RuntimeError(message)
            time.sleep(0.01)
        return self

    def stop(self) -> int:
        """Stop it cleanly; returns its exit code."""
        assert self._process is not None
        return self._process.end()

    def kill(self, *, burns: bool = True) -> None:
        """End it like `kill -9`, and remove everything that it has on this machine."""
        assert self._process is not None
        self._process.end(kill=True)
        if burns:
            shutil.rmtree(self.work_dir)

    def wait(self, timeout_s: float = 30) -> int:
        """Wait until it has ended; returns its exit code."""
        assert self._process is not None
        code = self._process.popen.wait(timeout_s)
        self._process.end(kill=True)  # what watches it
        return code

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.alive

    def pause(self) -> None:
        """Pause it (SIGSTOP)."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.signal(number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end(kill=True)
