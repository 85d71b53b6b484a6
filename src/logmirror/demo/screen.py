"""The demo's output: one line per step, with its duration, and a progress bar on a terminal.

    5.2 s  Loaded 336,776 flights

Without a terminal there is no progress bar. Colours obey NO_COLOR.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from logmirror.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Task, TaskID

_UNBROKEN: Final = 1000
"""Width without a terminal: lines are not wrapped."""

_LABEL_WIDTH: Final = 9
"""Width of the duration before each line, `123.4 s`, and of the space after it."""


class Step:
    """One step while it runs."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self.line = ""

    def show(self, completed: int) -> None:
        """Set the progress bar."""
        self._progress.update(self._task, completed=completed)

    def next_phase(self, doing: str, total: int) -> None:
        """Change the label and the total of the progress bar."""
        self._progress.update(self._task, description=doing, total=total)

    def done(self, line: str) -> None:
        """Set the line that remains after the step."""
        self.line = line


class Screen:
    """The demo's output, on stdout."""

    def __init__(self) -> None:
        self._console = Console(
            width=None if sys.stdout.isatty() else _UNBROKEN, highlight=False, markup=False
        )
        self._started_ms = SYSTEM_CLOCK.monotonic_ms()

    @contextlib.contextmanager
    def step(self, doing: str, total: int | None = None) -> Iterator[Step]:
        """Show a progress bar during a step, and print its line when it has succeeded."""
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        with self._progress() as progress:
            step = Step(progress, progress.add_task(doing, total=total))
            yield step
        seconds = f"{(SYSTEM_CLOCK.monotonic_ms() - started_ms) / 1000:.1f} s"
        self._print_labelled(seconds, step.line)

    def print(self, text: str = "") -> None:
        """Print text without wrapping, so that it can be copied."""
        self._console.print(text, soft_wrap=True)

    def head(self, text: str) -> None:
        """Print a heading."""
        self._console.print(Text(text, style="bold"))
        self._console.print()

    def table(self, titles: list[str], rows: list[list[str]]) -> None:
        """Print a table; the first and last columns hold words, the others numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for title in titles:
            is_word = title in {titles[0], titles[-1]}
            table.add_column(title, justify="left" if is_word else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(table)
        self._console.print()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the demo."""
        return (SYSTEM_CLOCK.monotonic_ms() - self._started_ms) / 1000

    def _print_labelled(self, label: str, line: str) -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(justify="right", width=_LABEL_WIDTH - 2, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(label, style="dim"), line)
        self._console.print(grid)

    def _progress(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _CountColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )


class _CountColumn(ProgressColumn):
    """Progress as `123,456 of 336,776`; the seconds so far if there is no total."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.elapsed or 0:.0f} s")
        return Text(f"{int(task.completed):,} of {int(task.total):,}")
