"""What `logmirror run` shows on a terminal: bars until now, a line each heartbeat otherwise."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID

    from logmirror.reports import MirrorProgress, RunProgress


@contextlib.contextmanager
def showing_progress(
    *, until_now: bool, heartbeat_ms: int
) -> Iterator[Callable[[RunProgress], None] | None]:
    """Show the progress of a run on stderr while the block runs. Yields what receives it.

    Yields None if stderr is not a terminal: programs read the log, metrics or `/status.json`.

    Args:
        until_now: Show a bar for each mirror. Otherwise, print a line for each.
        heartbeat_ms: Interval of the lines, in milliseconds. 0: none.
    """
    if not sys.stderr.isatty():
        yield None
    elif until_now:
        # Entered before the log handler is made, so that log lines go above the bars.
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
        ) as bars:
            yield Bars(bars).show
    else:
        yield Lines(heartbeat_ms, Console(stderr=True, highlight=False).print).show


class Bars:
    """A bar for each mirror."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, int] = {}

    def show(self, run: RunProgress) -> None:
        """Update the bars."""
        for mirror in run.mirrors:
            name = mirror.mirror
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None, text="")
            total = max(self._totals.get(name, 0), mirror.remaining)
            self._totals[name] = total
            self._progress.update(
                self._tasks[name],
                total=total or None,
                completed=total - mirror.remaining,
                text=text_of(mirror, run.elapsed_s),
            )


class Lines:
    """A line for each mirror, at each interval."""

    def __init__(self, interval_ms: int, print_line: Callable[[str], None]) -> None:
        self._interval_s, self._print = interval_ms / 1000, print_line
        self._next_s = self._interval_s
        self._before: RunProgress | None = None

    def show(self, run: RunProgress) -> None:
        """Print the lines if they are due."""
        if not self._interval_s or run.elapsed_s < self._next_s:
            return
        self._next_s = run.elapsed_s + self._interval_s
        before = {m.mirror: m for m in self._before.mirrors} if self._before else {}
        seconds = run.elapsed_s - (self._before.elapsed_s if self._before else 0)
        for mirror in run.mirrors:
            self._print(f"{mirror.mirror}: {text_of(mirror, seconds, before.get(mirror.mirror))}")
        self._before = run


def text_of(mirror: MirrorProgress, seconds: float, before: MirrorProgress | None = None) -> str:
    """Return one mirror's progress as text: records, MB/s since `before`, and what remains."""
    written_bytes = mirror.written_bytes - (before.written_bytes if before else 0)
    rate = written_bytes / 1e6 / seconds if seconds > 0 else 0.0
    text = f"{mirror.records:,} records, {rate:.1f} MB/s, {mirror.remaining:,} remaining"
    return f"{text}, {mirror.waiting} waiting" if mirror.waiting else text
