"""A Java program of the tests that responds to requests: one line each, fields between tabs."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESPONSE_S: Final = 180


class JavaError(Exception):
    """The program threw an exception: its class and its message."""


class JavaProgram:
    """A running program; a context manager.

    Args:
        command: Its command line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        # The program ends with its input, and so with this process.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def request(self, *fields: str) -> Any:
        """Return the result of a request.

        Raises:
            JavaError: The program threw an exception.
            TimeoutError: There is no response in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(fields).encode() + b"\n")
        self._process.stdin.flush()
        poll = select.poll()  # `select` knows no descriptor from 1024 on
        poll.register(self._process.stdout, select.POLLIN)
        is_ready = poll.poll(_RESPONSE_S * 1000)
        line = self._process.stdout.readline() if is_ready else b""
        if not line:
            self._errors.seek(0)
            log = self._errors.read().decode(errors="replace")[-4000:]
            message = f"no response to {fields[0]} within {_RESPONSE_S} s: {log}"
            raise TimeoutError(message)
        response = json.loads(line)
        if "error" in response:
            raise JavaError(response["error"])
        return response["result"]
