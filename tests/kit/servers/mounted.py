"""`logmirror broker` with archives, as a process of its command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S: Final = 60


class MountingBroker:
    """A broker in a `with`, which returns its bootstrap servers.

    Args:
        folder: Its log directory; its log is beside it.
        archives: Directories and `s3://bucket/prefix`.
        encoding: `--archive-encoding`; empty: none.
        environment: Further variables.
    """

    def __init__(
        self, folder: Path, *archives: object, encoding: str = "base64", **environment: str
    ) -> None:
        self.log = folder.with_suffix(".log")
        command = [sys.executable, "-m", "logmirror", "broker", "--log-dir", str(folder)]
        command += ["--listen", "127.0.0.1:0"]
        for one in archives:
            command += ["--archive", str(one)]
        if encoding:
            command += ["--archive-encoding", encoding]
        self._command, self._environment = command, {**os.environ, **environment}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> str:
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

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(_TIMEOUT_S) == 0, self.log.read_text()
        self._process.stdout.close()
