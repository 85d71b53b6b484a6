"""`logmirror broker` with archives, as a process of its command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from kit.servers.machine import HOST, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kit.servers.s3 import LogBucket

_TIMEOUT_S: Final = 180


class MountingBroker:
    """A broker in a `with`, which returns its bootstrap servers. A restart keeps port and data.

    Args:
        folder: Its log directory; its log is beside it.
        archives: Directories and `s3://bucket/prefix`.
        encoding: `--archive-encoding`; empty: none.
        options: Further options of the command line.
        environment: Further variables.
    """

    def __init__(
        self,
        folder: Path,
        *archives: object,
        encoding: str = "base64",
        options: Iterable[str] = (),
        **environment: str,
    ) -> None:
        self.log = folder.with_suffix(".log")
        (port,) = free_ports(1)
        self.bootstrap = f"{HOST}:{port}"
        command = [sys.executable, "-m", "logmirror", "broker", "--log-dir", str(folder)]
        command += ["--listen", self.bootstrap, *options]
        for one in archives:
            command += ["--archive", str(one)]
        if encoding:
            command += ["--archive-encoding", encoding]
        self._command, self._environment = command, {**os.environ, **environment}
        self._process: subprocess.Popen[str]

    def start(self) -> str:
        """Start it; returns its bootstrap servers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on"), self.log.read_text()
        return line.split()[-1]

    @property
    def pid(self) -> int:
        """PID of the running broker."""
        return self._process.pid

    def kill(self) -> None:
        """End it like `kill -9`."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(_TIMEOUT_S)
        self._process.stdout.close()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(_TIMEOUT_S) == 0, self.log.read_text()
        self._process.stdout.close()


def kept_in(
    folder: Path, log_bucket: LogBucket | None, copied: dict[str, object]
) -> tuple[str, Path, Mapping[str, str]]:
    """Where a mirror makes its archive: below a folder, or in a bucket.

    Args:
        folder: A directory.
        log_bucket: The bucket; None: in the directory.
        copied: The mirror into `folder / "kept"`; gets another destination if it is a bucket.

    Returns:
        The value of `--archive`, where the files of its objects are, and variables for the broker.
    """
    if log_bucket is None:
        return str(folder / "kept"), folder / "kept", {}
    server, bucket = log_bucket.server, log_bucket.bucket
    copied["destinations"] = [server.destination(bucket, prefix="kept")]
    return f"s3://{bucket}/kept", server.files(bucket) / "kept", log_bucket.environment
