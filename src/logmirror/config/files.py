"""Reads the configuration file and the files that `${file:PATH}` names."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from logmirror.config.problems import Problem, config_error

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 1024 * 1024
"""Largest configuration file, in bytes. A thousand mirrors of 500 bytes need half of it."""


class UnreadableError(Exception):
    """A file cannot be used; the message is the reason."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a file.

    Pipes and devices are refused: reading one could block forever.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, or is larger than `max_bytes`.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:  # needs an opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                message = "it is not a regular file"
                raise UnreadableError(message)
            data: bytes = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "bad name"
        message = f"the file cannot be read: {reason.lower()}"
        raise UnreadableError(message) from None
    if len(data) > max_bytes:
        message = f"the file is larger than {max_bytes} bytes"
        raise UnreadableError(message)
    return data


def _open_nonblocking(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def place_at(text: str, index: int) -> tuple[int, int]:
    """Return line and column, both from 1, of a character index."""
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def read_file(path: Path) -> str:
    """Return the text of a configuration file, without a byte order mark.

    Raises:
        ConfigError: It cannot be read, is larger than `MAX_BYTES` or is not UTF-8.
    """
    name = str(path)
    try:
        data = read_regular_file(path, MAX_BYTES)
    except UnreadableError as error:
        raise config_error(name, [Problem("", None, None, str(error))]) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        line, column = place_at(before, len(before))
        problem = Problem("", line, column, "the file is not UTF-8 text")
        raise config_error(name, [problem]) from None
