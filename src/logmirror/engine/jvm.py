"""Spark's JVM: a child process that can be ended at any moment of its start.

PySpark's own `launch_gateway` waits for the JVM without a limit, and knows the process only
afterwards. Here it only connects: a JVM with a file name in `_PYSPARK_DRIVER_CONN_INFO_PATH` writes
its port and its secret there, and `PYSPARK_GATEWAY_PORT` and `PYSPARK_GATEWAY_SECRET` name
them to PySpark, as `spark-submit` does for the programs that it starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway

from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UsageError
from logmirror.stopping import StoppedError

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT: Final = "PYSPARK_GATEWAY_PORT"
"""Environment variable with the port of a JVM that runs already; `spark-submit` sets it."""

_SECRET: Final = "PYSPARK_GATEWAY_SECRET"  # noqa: S105  # the name of a variable
_IGNORING_STOP_SIGNALS: Final = ("sh", "-c", 'trap "" INT TERM; exec "$@"', "sh")
"""Prefix of a command that survives Ctrl-C, and systemd, which signals all processes of a service:
the last flush needs the JVM."""

_START_MS: Final = 180_000
"""Limit for the JVM to listen. It takes 2-4 s, and several times that on a busy machine."""

_POLL_MS: Final = 50
_JAVA_HOMES: Final = (
    "usr/lib/jvm/*",
    "opt/java/*",
    "opt/homebrew/opt/openjdk*",
    "Library/Java/JavaVirtualMachines/*/Contents/Home",
)


class Jvm:
    """A JVM that ends with this process, because its standard input closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def start(self, properties: Mapping[str, str], folder: Path, log: Path) -> Any:  # noqa: ANN401  # py4j has no types
        """Start it and connect to it.

        Args:
            properties: Spark properties that go into its command line.
            folder: Private directory, for the file with its secret.
            log: File to which its output is appended.

        Returns:
            The gateway.

        Raises:
            StoppedError: `end` was called.
            OSError: It did not start, or ended, or did not respond within `_START_MS`.
        """
        connection = folder / "gateway"
        options = [f"--conf={name}={value}" for name, value in properties.items()]
        submit = Path(_find_spark_home()) / "bin" / "spark-submit"
        more = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        with log.open("ab") as output, self._lock:
            if self._is_ended:
                raise StoppedError
            process = self._process = subprocess.Popen(  # noqa: S603  # Spark's own launcher
                [*_IGNORING_STOP_SIGNALS, submit, *options, *more],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "SPARK_CONNECT_MODE": "0",
                    "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection),
                },
            )
        _wait_for(connection, process)
        gateway = _connect(connection.read_bytes())
        connection.unlink()
        gateway.proc = process
        return gateway

    def end(self, grace_s: float) -> None:
        """End it, or prevent its start. Safe from any thread; may be called again.

        Args:
            grace_s: How long it may take to end in order, in seconds. 0: it is killed.
        """
        with self._lock:
            self._is_ended, process = True, self._process
        logging.getLogger().addFilter(_is_no_lost_jvm)
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        process.kill()
        process.wait()


def _is_no_lost_jvm(record: logging.LogRecord) -> bool:
    """Leave out what py4j logs on the root logger about a call in progress when the JVM ends."""
    is_of_py4j = Path(record.pathname).parent.name == "py4j"
    return not (is_of_py4j and record.getMessage() == "Exception while sending command.")


def _wait_for(connection: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_ms = SYSTEM_CLOCK.monotonic_ms() + _START_MS
    while not connection.exists():
        if process.poll() is not None:
            raise ChildProcessError(f"the JVM ended with code {process.returncode}")
        if SYSTEM_CLOCK.monotonic_ms() > deadline_ms:
            raise TimeoutError(f"the JVM did not listen within {_START_MS // 1000} s")
        SYSTEM_CLOCK.sleep_ms(_POLL_MS)


def _connect(connection: bytes) -> Any:  # noqa: ANN401  # py4j has no types
    """Connect to the JVM that has written this: its port, then its secret, with their lengths."""
    port, length = struct.unpack_from(">ii", connection)
    secret = connection[8 : 8 + length].decode()
    given = {PORT: str(port), _SECRET: secret}
    os.environ.update(given)
    try:
        return launch_gateway()  # type: ignore[no-untyped-call]  # py4j has no types
    finally:
        for name in given:
            del os.environ[name]


def find_java() -> None:
    """Set JAVA_HOME unless Spark's launcher finds Java in JAVA_HOME or on the PATH.

    Raises:
        UsageError: Java is not in the usual directories either.
    """
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return
    for pattern in _JAVA_HOMES:
        for home in sorted(Path("/").glob(pattern), reverse=True):
            if (home / "bin" / "java").exists():
                os.environ["JAVA_HOME"] = str(home)
                return
    raise UsageError(
        "no Java found: Spark needs a runtime of version 17 or later",
        hint="install one (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install "
        "openjdk@21) or name it in JAVA_HOME",
    )
