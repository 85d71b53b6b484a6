"""Where results and errors are printed: a terminal, a file, a pipe."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

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
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=False)


def table_of(*titles: str) -> Table:
    """An empty table with columns of text; it has no lines, so that programs can split it."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


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
        if isinstance(value, Mapping) and value:
            yield f"  {name}:"
            yield from (f"    {key}: {each}" for key, each in value.items())
        else:
            yield f"  {name}: {value}"
    if error.hint:
        yield f"  hint: {error.hint}"
    yield f"  see {place_in_docs(error)}"


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print lines, at a terminal's end broken between words and indented; elsewhere unbroken."""
    for line in lines:
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


def place_in_docs(error: LogmirrorError) -> str:
    """The section of docs/errors.md that says what an error means and what to do."""
    of_kind = "kind" in vars(type(error)) or error.kind == "internal"
    name = error.kind if of_kind else type(error).__name__
    reason = error.facts.get("reason")
    if isinstance(error, PositionError) and isinstance(reason, str) and _NAME.fullmatch(reason):
        name = reason
    return f"docs/errors.md#{name.lower()}"
