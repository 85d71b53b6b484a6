"""Where results and errors are printed: a terminal, a file, a pipe."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from logmirror.config import ConfigError
from logmirror.errors import PositionError

if TYPE_CHECKING:
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
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if isinstance(error, ConfigError):
        console.print(f"error: {error.message}: {error.facts.get('file')}", markup=False)
        for problem in error.problems:
            console.print(f"  {problem}", markup=False)
        return
    console.print(f"error ({error.kind}): {error.message}", markup=False)
    for name, value in error.facts.items():
        console.print(f"  {name}: {value}", markup=False)
    if error.hint:
        console.print(f"  hint: {error.hint}", markup=False)
    console.print(f"  see {place_in_docs(error)}", markup=False)


def place_in_docs(error: LogmirrorError) -> str:
    """The section of docs/errors.md that says what an error means and what to do."""
    of_kind = "kind" in vars(type(error)) or error.kind == "internal"
    name = error.kind if of_kind else type(error).__name__
    reason = error.facts.get("reason")
    if isinstance(error, PositionError) and isinstance(reason, str) and _NAME.fullmatch(reason):
        name = reason
    return f"docs/errors.md#{name.lower()}"
