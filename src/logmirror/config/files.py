"""Reads the configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.config.problems import Problem, config_error
from logmirror.references import UnreadableError, read_regular_file

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 1024 * 1024
"""Largest configuration file, in bytes. A thousand mirrors of 500 bytes need half of it."""


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
