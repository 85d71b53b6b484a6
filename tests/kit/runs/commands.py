"""The command line as users run it: `logmirror` in separate processes.

Every process of a run (Spark's JVM, the JVM's Python workers) inherits a mark in its environment,
so that a test can find all of them, also those whose parent has ended.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import psutil

from kit.fakes.disk import without_override
from kit.runs.inline_server import ForkedProcess
from kit.servers.class_archives import spark_classes
from kit.servers.kafka import create_topic, delete_topic
from kit.servers.machine import HOST, Process, free_ports, temporary_folder
from logmirror.config.environment import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORMATS: Final = ("native", "parquet", "ndjson")
EXTENSIONS: Final = {"native": "batches", "parquet": "parquet", "ndjson": "ndjson"}

_COMMAND: Final = (sys.executable, "-m", "logmirror")
_MARK: Final = "LOGMIRROR_TEST_MARK"
QUIET: Final = {METRICS_PORT: "0"}
"""Many run side by side, and none is asked for metrics unless a test says so."""

_LISTINGS_MAX: Final = (
    "acls",
    "compact",
    "groups",
    "moves",
    "policy",
    "schema",
    "status",
    "validate",
    "verify",
)
"""Commands that need nothing but Python: they are forked from a process that has it loaded."""


def logmirror(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    as_plain_user: bool = False,
    timeout_s: float = 240,
    program: Sequence[str] = _COMMAND,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; the caller checks its exit code.

    Args:
        arguments: Its arguments.
        environment: Variables in addition to those of this process.
        as_plain_user: Enforce file permissions, also when root runs the tests.
        timeout_s: Seconds until the test fails.
        program: A program with the command line of `logmirror`.
    """
    if arguments[0] in _LISTINGS_MAX and not environment and not as_plain_user:
        return run_forked(*map(str, arguments), timeout_s=timeout_s)
    command = [*program, *map(str, arguments)]
    return subprocess.run(
        without_override(command) if as_plain_user else command,
        env={
            **os.environ,
            "TMPDIR": str(temporary_folder()),
            **QUIET,
            **(environment or {}),
        },
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


def run_forked(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command without Spark, which starts within milliseconds; see `logmirror`."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        environment = {**os.environ, **QUIET}
        process = ForkedProcess(arguments, stdout=out, stderr=errors, environment=environment)
        wait_until(lambda: not process.alive, what=errors.read_text, timeout_s=timeout_s)
        return subprocess.CompletedProcess(
            arguments, process.end(), out.read_text(), errors.read_text()
        )


def logmirror_json(*arguments: str | Path) -> Any:
    """Run a command with `--format json`, which must succeed, and return what it printed."""
    result = logmirror(*arguments, "--format", "json")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout)


def mirror(  # noqa: PLR0913  # each test says only what it cares about
    topic: str,
    bootstrap: str,
    root: Path,
    *,
    form: str = "parquet",
    max_time_ms: int = 60_000,
    max_bytes: int = 1 << 20,
    max_offsets: int = 1_000_000,
    **more: object,
) -> dict[str, object]:
    """Return a mirror of all partitions of a topic, with objects in `<root>/<name>/<partition>`.

    Its name is its format, unless `name` is given. Other keys are passed on, with `_` for `-`;
    `partition` or `partitions` replaces `partitions: all`.
    """
    limits = {"max-time-ms": max_time_ms, "max-bytes": max_bytes, "max-offsets": max_offsets}
    base: dict[str, object] = {
        "name": form,
        "source": {"bootstrap-servers": bootstrap},
        "topic": topic,
        "destinations": [{"type": "filesystem", "root": str(root)}],
        "format": form,
        "flush": limits,
    }
    if not {"partition", "partitions"} & more.keys():
        base["partitions"] = "all"
    return base | {key.replace("_", "-"): value for key, value in more.items()}


def write_config(
    path: Path,
    *mirrors: Mapping[str, object],
    master: str = "local[2]",
    properties: Mapping[str, str] | None = None,
    **more: object,
) -> Path:
    """Write a configuration of these mirrors; JSON, which YAML contains.

    Other keys are written at the top level, with `_` for `-`.
    """
    java_options = f"-XX:SharedArchiveFile={spark_classes()}"
    used = {"spark.driver.extraJavaOptions": java_options, **(properties or {})}
    base = {"spark": {"master": master, "properties": used}, "mirrors": mirrors}
    base |= {key.replace("_", "-"): value for key, value in more.items()}
    path.write_text(json.dumps(base, indent=1))
    return path


class Run:
    """`logmirror run` in the background.

    Args:
        config: The configuration file.
        arguments: More arguments.
        folder: Directory of its log (`log`) and that of Spark's JVM (`spark_log`).
        environment: Variables in addition to those of this process.
    """

    program: ClassVar[tuple[str, ...]] = _COMMAND

    def __init__(
        self,
        config: Path,
        *arguments: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = secrets.token_hex(8)
        self.log = folder / f"run-{self._mark}.log"
        self.spark_log = folder / f"spark-{self._mark}.log"
        self._process = self._start(
            ["run", "-c", str(config), "--spark-log", str(self.spark_log), *arguments],
            {
                **os.environ,
                "TMPDIR": str(temporary_folder()),
                **QUIET,
                _MARK: self._mark,
                **(environment or {}),
            },
        )

    def _start(self, arguments: list[str], environment: dict[str, str]) -> Process | ForkedProcess:
        return Process([*self.program, *arguments], log=self.log, environment=environment)

    @property
    def pid(self) -> int:
        """PID of the driver."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the driver runs."""
        return self._process.alive

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    @property
    def spark_text(self) -> str:
        """The output of Spark's JVM so far."""
        return self.spark_log.read_text(errors="replace") if self.spark_log.exists() else ""

    def wait_for(self, pattern: str, *, timeout_s: float = 180) -> str:
        """Wait until a line of its log matches, and return the line."""
        found: list[str] = []

        def matches() -> bool:
            found[:] = [line for line in self.text.splitlines() if re.search(pattern, line)]
            return bool(found) or not self.alive

        wait_until(matches, what=lambda: f"{pattern!r} in:\n{self.text}", timeout_s=timeout_s)
        assert found, f"ended without {pattern!r}:\n{self.text}"
        return found[0]

    def wait(self, *, timeout_s: float = 240) -> int:
        """Wait until the driver ends, and return its exit code."""
        wait_until(
            lambda: not self.alive, what=lambda: f"the end of:\n{self.text}", timeout_s=timeout_s
        )
        return self._process.end()

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of this run: driver, JVM, workers."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(_MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended, or belongs to another user
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the driver only."""
        self._process.signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to driver, JVM and workers, until all have received it."""
        reached: set[int] = set()
        while new := [p for p in self.processes() if p.pid not in reached]:
            for process in new:
                reached.add(process.pid)
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue

    def kill(self) -> None:
        """End the driver like `kill -9`; its child processes must end by themselves."""
        self._process.end(kill=True)

    def wait_until_nothing_is_left(self, *, timeout_s: float = 60) -> None:
        """Wait until every process of this run is gone."""
        wait_until(
            lambda: not self.processes(),
            what=lambda: f"the end of {[p.cmdline()[:6] for p in self.processes()]}",
            timeout_s=timeout_s,
        )

    def remove(self) -> None:
        """End all remaining processes."""
        self.signal_all(signal.SIGKILL)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def wait_until(
    is_true: Callable[[], bool], *, what: Callable[[], str], timeout_s: float = 180
) -> None:
    """Wait for a condition; fails with a description of it."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            message = f"after {timeout_s} s still waiting for {what()}"
            raise TimeoutError(message)
        time.sleep(0.02)


def takes_stop_signals(pid: int) -> bool:
    """Whether a process holds back or handles SIGTERM, so that it no longer just ends."""
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    masks = int(fields["SigBlk"], 16) | int(fields["SigCgt"], 16)
    return bool(masks >> (signal.SIGTERM - 1) & 1)


class BrokerCommand:
    """`logmirror broker` with the methods of `ApacheKafka` that tests of sources use."""

    version: Final = "embedded"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_ports(1)[0]
        self._process: Process | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self._port}"

    def start(self) -> Self:
        """Start it and wait until it listens; a restart keeps port and data."""
        log = self._folder / "broker.log"
        start = log.stat().st_size if log.exists() else 0
        options = ["--log-dir", str(self._folder / "data"), "--listen", self.bootstrap]
        process = Process([*_COMMAND, "broker", "--no-auto-create", *options], log=log)
        self._process = process
        wait_until(
            lambda: b"listening on" in log.read_bytes()[start:] or not process.alive,
            what=lambda: f"the broker:\n{process.tail()}",
        )
        assert process.alive, process.tail()
        return self

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic and wait until each partition responds."""
        settings = {key: str(value) for key, value in (config or {}).items()}
        create_topic(self.bootstrap, name, partitions, settings)
        return name

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until the broker no longer lists it."""
        delete_topic(self.bootstrap, name)

    def kill(self) -> None:
        """End it like `kill -9`; `start` restarts it."""
        self.remove()

    def remove(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.end(kill=True)
            self._process = None
