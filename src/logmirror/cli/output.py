"""Where results and errors are printed: a terminal, a file, a pipe."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

from rich.console import Console
from rich.table import Table

from logmirror.config.settings import ConfigError
from logmirror.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.errors import LogmirrorError

_UNBROKEN: Final = 1000
"""Columns of a table that goes to a file or a pipe: no cell is cut."""

_NAME: Final = re.compile(r"([A-Z][a-z]+){2,}")
"""Of a reason that has a section of its own, such as SourceTrimmed; others are text."""


def stdout() -> Console:
    """A console that breaks lines only where a person's terminal ends, never for a program."""
    width = None if sys.stdout.isatty() else _UNBROKEN
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table_of(*titles: str) -> Table:
    """An empty table with columns of text; it has no lines, so that programs can split it."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def utc_time(time_ms: int) -> str:
    """Return a time, ms since 1970, as `--at` takes it."""
    found = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def printable(text: str) -> str:
    """Return one line of text, in which what is not printable is escaped as in JSON.

    Texts of brokers, stores and records are shown. An ESC in one would control the terminal, and a
    line break would look like a line of logmirror.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def print_error(error: LogmirrorError) -> None:
    """Print what went wrong, the facts, and what to do next, to stderr."""
    print_lines(Console(stderr=True, highlight=False), error_lines(error))


def error_lines(error: LogmirrorError) -> Iterator[str]:
    """An error as people read it: a line of what, then indented the facts and what to do."""
    if isinstance(error, ConfigError):
        yield f"error: {error.message}: {error.facts.get('file')}"
        yield from (f"  {problem}" for problem in error.problems)
        return
    yield f"error ({error.kind}): {error.message}"
    for name, value in error.facts.items():
        if name == "problems":  # properties of a client, each with its correction
            for key, message, correction in cast("Iterable[tuple[str, str, str]]", value):
                yield f"  {key}: {message}{f' ({correction})' if correction else ''}"
        elif isinstance(value, Mapping) and value:
            yield f"  {name}:"
            yield from (f"    {key}: {each}" for key, each in value.items())
        else:
            yield f"  {name}: {value}"
    if error.hint:
        yield f"  hint: {error.hint}"
    yield f"  see {place_in_docs(error)}"


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print lines, at a terminal's end broken between words and indented; elsewhere unbroken.

    What is not printable is escaped.
    """
    for line in map(printable, lines):
        if out.is_terminal:
            inner = line[: len(line) - len(line.lstrip())] + "    "
            line = textwrap.fill(  # noqa: PLW2901  # the same line, for a screen
                line,
                out.width,
                subsequent_indent=inner,
                break_long_words=False,
                break_on_hyphens=False,
            )
        out.print(line, markup=False, soft_wrap=True)


def name_of(error: LogmirrorError) -> str:
    """The name of an error in docs/errors.md, such as `unavailable` or `SourceTrimmed`."""
    reason = error.facts.get("reason")
    if isinstance(error, PositionError) and isinstance(reason, str) and _NAME.fullmatch(reason):
        return reason
    of_kind = "kind" in vars(type(error)) or error.kind == "internal"
    return error.kind if of_kind else type(error).__name__


def place_in_docs(error: LogmirrorError) -> str:
    """The section of docs/errors.md that says what an error means and what to do."""
    return f"docs/errors.md#{name_of(error).lower()}"
