"""A broker for people's own tests: `logmirror broker` in a child process, with a folder of its own.

    with broker(topics={"orders": 3}) as kafka:
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})

What it acknowledges is on disk, so a test may kill it and start it again.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

_HOST: Final = "127.0.0.1"
_LISTENING: Final = "listening on "
_STOP_S: Final = 10
_LOG_TAIL_BYTES: Final = 64 * 1024


class LocalBroker:
    """A broker process on the loopback interface. Made by `broker`; not thread-safe.

    Attributes:
        log_dir: The folder of its topics.
    """

    def __init__(
        self,
        log_dir: Path,
        command: Sequence[str],
        *,
        port: int,
        timeout_s: float,
        is_temporary: bool,
    ) -> None:
        self.log_dir = log_dir
        self._is_temporary = is_temporary
        self._command = tuple(command)
        self._port = port
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the object

    @property
    def bootstrap_servers(self) -> str:
        """`127.0.0.1:PORT`. The port stays the same when the broker is restarted."""
        return f"{_HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process ID; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the broker and wait until it listens.

        Raises:
            UnavailableError: It ended, or did not listen within its timeout. The message has the
                end of its log.
        """
        if self._process is not None:
            raise InternalError("the broker runs already", pid=self._process.pid)
        self._process = subprocess.Popen(  # noqa: S603  # this package, with the caller's arguments
            [*self._command, "--listen", self.bootstrap_servers],
            stdin=subprocess.PIPE,  # its end stops the broker, also if this process is killed
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
        )
        line = self._first_line(self._process)
        if not line.startswith(_LISTENING):
            self.kill()
            raise UnavailableError(f"the broker did not start:\n{self.log()}")
        self._port = int(line.rpartition(":")[2])

    def _first_line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._timeout_s * 1000
        found = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in found:
                left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
                if left_ms <= 0 or not selector.select(left_ms / 1000):
                    break
                more = os.read(process.stdout.fileno(), 1024)
                if not more:
                    break
                found += more
        return found.decode().partition("\n")[0]

    def stop(self) -> None:
        """Stop the broker cleanly. No effect if it does not run."""
        self._end(kill=False)

    def kill(self) -> None:
        """End the broker as `kill -9` does: a crash. No effect if it does not run."""
        self._end(kill=True)

    def restart(self) -> None:
        """Stop the broker if it runs, and start it with the same port and the same records."""
        self.stop()
        self.start()

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        (process.kill if kill else process.terminate)()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def log(self) -> str:
        """Return the last 64 KiB of the log of all its runs."""
        fd = self._log.fileno()
        size = os.fstat(fd).st_size
        start = max(0, size - _LOG_TAIL_BYTES)
        return os.pread(fd, size - start, start).decode(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
            if error is not None:
                print(f"log of the broker:\n{self.log()}", file=sys.stderr)  # noqa: T201  # beside the failure
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        self._log.close()
        if self._is_temporary:
            shutil.rmtree(self.log_dir, ignore_errors=True)


def broker(  # noqa: PLR0913  # one parameter for each thing a test may set
    *,
    topics: Iterable[str] | Mapping[str, int] = (),
    log_dir: str | os.PathLike[str] | None = None,
    port: int = 0,
    partitions: int = 1,
    auto_create: bool = True,
    arguments: Sequence[str] = (),
    timeout_s: float = 30,
) -> LocalBroker:
    """Return a broker to be used in a `with` statement, which starts and stops it.

    Args:
        topics: Topics that exist when the block begins: names, or names with partition counts.
        log_dir: The folder of its topics; created if missing, and kept. None: a temporary one,
            which is removed at the end.
        port: The port to listen on. 0: any free one.
        partitions: Default number of partitions of a new topic.
        auto_create: Whether a topic is created when a client asks for its metadata.
        arguments: Further arguments of `logmirror broker`.
        timeout_s: How long it may take to listen, in seconds.
    """
    counts = topics if isinstance(topics, Mapping) else dict.fromkeys(topics, partitions)
    folder = Path(tempfile.mkdtemp(prefix="logmirror-")) if log_dir is None else Path(log_dir)
    command = [sys.executable, "-m", "logmirror", "broker", "--log-dir", str(folder)]
    command += ["--partitions", str(partitions), "--stop-with-stdin"]
    command += [] if auto_create else ["--no-auto-create"]
    command += [f"--topic={name}:{count}" for name, count in counts.items()]
    command += arguments
    return LocalBroker(
        folder, command, port=port, timeout_s=timeout_s, is_temporary=log_dir is None
    )


def _environment() -> dict[str, str]:
    """Return an environment in which the child finds this package, however it was found here."""
    package = str(Path(__file__).resolve().parents[2])
    path = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
