"""What `logmirror groups` shows on a terminal while it works: a bar, counts and a rate."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Task


@contextlib.contextmanager
def showing_groups() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while the block runs, only on a terminal; it is removed at the end.

    Yields what receives the steps done and their number.
    """
    progress = Progress(
        TextColumn("groups"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("groups", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Steps in a second."""
        return Text(f"{task.speed or 0:,.0f}/s")
