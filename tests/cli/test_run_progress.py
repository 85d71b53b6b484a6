"""What `run` shows on a terminal while it runs."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from logmirror.cli.run_progress import Bars, Lines, showing_progress
from logmirror.reports import MirrorProgress, RunProgress


def progress(elapsed_s, *, records=0, written=0, remaining=0, waiting=0):
    mirror = MirrorProgress(
        mirror="orders",
        records=records,
        written_bytes=written,
        remaining=remaining,
        waiting=waiting,
    )
    return RunProgress(elapsed_s=elapsed_s, mirrors=(mirror,))


def test_lines_show_the_rate_since_the_previous_line():
    printed = []
    lines = Lines(30_000, printed.append)

    for moment in (
        progress(10, records=1),
        progress(30, records=1000, written=60_000_000, remaining=5),
        progress(45, records=1500),
        progress(61, records=3000, written=122_000_000, waiting=1),
    ):
        lines.show(moment)

    assert printed == [
        "orders: 1,000 records, 2.0 MB/s, 5 remaining",
        "orders: 3,000 records, 2.0 MB/s, 0 remaining, 1 waiting",
    ]


def test_an_interval_of_0_prints_no_lines():
    printed = []
    Lines(0, printed.append).show(progress(100))
    assert printed == []


def test_bars_show_what_remains_of_the_largest_backlog_seen():
    bars = Progress(TextColumn("{task.fields[text]}"), console=Console(file=io.StringIO()))
    shown = Bars(bars)

    shown.show(progress(0, remaining=100))
    shown.show(progress(2, records=75, written=3_000_000, remaining=25))

    (task,) = bars.tasks
    assert (task.description, task.total, task.completed) == ("orders", 100, 75)
    assert task.fields["text"] == "75 records, 1.5 MB/s, 25 remaining"


@pytest.mark.parametrize("until_now", [True, False])
def test_without_a_terminal_nothing_is_shown(until_now):
    with showing_progress(until_now=until_now, heartbeat_ms=1000) as on_progress:
        assert on_progress is None
