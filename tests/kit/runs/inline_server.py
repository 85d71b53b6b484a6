"""A process with `kit.runs.inline_run` loaded, which forks it on request within milliseconds.

    python -m kit.runs.inline_server        prints its port; ends when its input closes

Each connection is one process. The request is a line of JSON (`arguments`, `environment`, `stdout`
and `stderr` as paths to append to). The response is the process ID as a line, and at the end the
exit code as in `subprocess`. If the connection is closed before that, the process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"


class ForkedProcess:
    """A process that the server forks; the same interface as `kit.servers.machine.Process`.

    Args:
        arguments: Arguments of `logmirror`.
        stdout: File to which its output is appended.
        stderr: File to which its error output is appended.
        environment: All of its variables.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        environment: Mapping[str, str],
    ) -> None:
        for path in (stdout, stderr):
            path.touch()
        self._code: int | None = None
        self._connection = socket.create_connection((HOST, _port(os.getpid())))
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._received = b""
        while not self._received.endswith(b"\n"):
            self._received += self._connection.recv(1)
        self.pid, self._received = int(self._received), b""
        self._connection.setblocking(False)

    @property
    def alive(self) -> bool:
        if self._code is None:
            with contextlib.suppress(BlockingIOError):
                self._received += self._connection.recv(64)
            if self._received.endswith(b"\n"):
                self._code = int(self._received)
        return self._code is None

    def signal(self, number: int) -> None:
        """Send a signal; ignored if it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, *, kill: bool = False, timeout_s: float = 40) -> int:
        """Stop it (SIGTERM, or SIGKILL at once), wait for it, return its exit code."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL if kill else signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
            time.sleep(0.005)
        self._connection.close()
        assert self._code is not None
        return self._code


@functools.cache
def _port(_process: int) -> int:
    """Return the port of this process's server, which ends with this process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "kit.runs.inline_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    atexit.register(server.communicate)
    assert server.stdout is not None
    return int(server.stdout.readline())


class _Server:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, socket.socket] = {}
        self._listener = socket.create_server((HOST, 0))
        self._woken, waker = socket.socketpair()
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())
        self._waker = waker
        for source in (self._listener, self._woken, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        print(self._listener.getsockname()[1], flush=True)  # noqa: T201  # who started us reads it
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._leave()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):  # the client has closed the connection
                    self._abandon(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            for opened in (connection, self._listener, self._woken, *self._children.values()):
                opened.close()
            self._selector.close()
            _become(**request)
        self._children[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        connection.sendall(b"%d\n" % pid)

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                connection = self._children.pop(pid)
                self._forget(connection)
                with contextlib.suppress(OSError), connection:
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))

    def _abandon(self, connection: socket.socket) -> None:
        for pid, of_child in self._children.items():
            if of_child is connection:
                os.kill(pid, signal.SIGKILL)
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)

    def _leave(self) -> NoReturn:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        sys.exit()


def _become(
    arguments: list[str], environment: dict[str, str], stdout: str, stderr: str
) -> NoReturn:
    """Run the program."""
    from kit.runs import inline_run  # noqa: PLC0415  # which imports this module

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    opened = os.open(os.devnull, os.O_RDONLY)
    os.dup2(opened, 0)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = ["logmirror", *arguments]
    code: Any = 1
    try:
        inline_run.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    from kit.runs import inline_run  # noqa: F401  # what is loaded here is loaded in all of them
    from logmirror.engine import executor

    executor.warm_up()
    gc.collect()
    gc.freeze()
    _Server().run()
