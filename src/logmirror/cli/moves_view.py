"""How `logmirror moves` shows moves: as a table, as lines, as JSON; once, and while they last."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Final

import typer
from rich.live import Live

from logmirror.cli.output import printable, stdout, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from logmirror.move_reports import MovedReplica, MoveOutcome, MoveSample, MoveStatus

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_UNIT: Final = 1024
_BAR: Final = 20
_LINES_EACH: Final = 10
"""Samples between two lines of a move, where the output is not a terminal."""


def size_text(size_bytes: float) -> str:
    """Return a size as people read it: 12.3 MiB."""
    if size_bytes < _UNIT:
        return f"{size_bytes:.0f} B"
    for unit in _UNITS:
        size_bytes /= _UNIT
        if size_bytes < _UNIT:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes:.1f} {_UNITS[-1]}"


def time_text(seconds: float | None) -> str:
    """Return a duration as people read it: 3 min 20 s."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moves_table(moves: Sequence[MoveStatus], *, has_bars: bool) -> Table:
    """Return a table with a line for each move."""
    has_brokers = len({move.replica.broker for move in moves}) > 1
    table = table_of("PARTITION", *(["BROKER"] if has_brokers else []), "FROM", "TO")
    for title in ("COPIED", "OF", "%"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_bars:
        table.add_column("", no_wrap=True)
    for title in ("RATE", "TIME LEFT", "OFFSETS BEHIND"):
        table.add_column(title, justify="right", no_wrap=True)
    for move in moves:
        filled = int(move.fraction * _BAR)
        table.add_row(
            printable(str(move.replica)),
            *([str(move.replica.broker)] if has_brokers else []),
            printable(move.source or "-"),
            printable(move.target),
            size_text(move.copied_bytes),
            size_text(move.total_bytes),
            _percent(move),
            *(["[" + "#" * filled + "-" * (_BAR - filled) + "]"] if has_bars else []),
            _rate(move),
            time_text(move.eta_s),
            str(move.offset_lag),
        )
    return table


def move_line(move: MoveStatus) -> str:
    """Return a move as a line of text."""
    return printable(
        f"{move.replica}: {move.source or '-'} -> {move.target}: {size_text(move.copied_bytes)} of "
        f"{size_text(move.total_bytes)}, {_percent(move)} %, {_rate(move)}, "
        f"{time_text(move.eta_s)} left, {move.offset_lag} offsets behind"
    )


def _percent(move: MoveStatus) -> str:
    return str(int(move.fraction * 100))


def _rate(move: MoveStatus) -> str:
    rate = move.bytes_per_second
    return "-" if rate is None else f"{size_text(rate)}/s"


def move_json(move: MoveStatus) -> dict[str, object]:
    """Return a move as JSON. Fields may be added; none is renamed."""
    rate, eta_s = move.bytes_per_second, move.eta_s
    return {
        **replica_json(move.replica),
        "from": move.source or None,
        "to": move.target,
        "copied_bytes": move.copied_bytes,
        "total_bytes": move.total_bytes,
        "bytes_per_second": None if rate is None else round(rate),
        "eta_seconds": None if eta_s is None else round(eta_s, 1),
        "offset_lag": move.offset_lag,
    }


def replica_json(replica: MovedReplica) -> dict[str, object]:
    """Return a replica as JSON."""
    return {"topic": replica.topic, "partition": replica.partition, "broker": replica.broker}


def print_refused(outcomes: Sequence[MoveOutcome]) -> None:
    """Print a line to stderr for each move that was refused."""
    for one in outcomes:
        if one.error:
            line = (
                f"error: {one.replica} on broker {one.replica.broker} to {one.log_dir}: "
                f"{one.error}; {one.hint}"
            )
            typer.echo(printable(line), err=True)


@contextlib.contextmanager
def following(output: str) -> Iterator[Callable[[MoveSample], None]]:
    """Show moves while the block runs. Yields what receives each sample.

    Args:
        output: `json`: a line for each sample. Otherwise a table on a terminal, which is updated,
            and lines elsewhere.
    """
    if output == "json":
        yield lambda sample: typer.echo(json.dumps([move_json(move) for move in sample.moves]))
    elif sys.stdout.isatty():
        with Live(console=stdout(), auto_refresh=False, transient=True) as live:

            def show(sample: MoveSample) -> None:
                for line in _ended(sample):
                    live.console.print(line)
                live.update(moves_table(sample.moves, has_bars=True), refresh=True)

            yield show
    else:
        yield _Lines().show


class _Lines:
    """A line for each move, from time to time, and one when it ends."""

    def __init__(self) -> None:
        self._count = 0

    def show(self, sample: MoveSample) -> None:
        """Print the lines that are due."""
        for line in _ended(sample):
            typer.echo(line)
        if self._count % _LINES_EACH == 0:
            for move in sample.moves:
                typer.echo(move_line(move))
        self._count += 1
        sys.stdout.flush()


def _ended(sample: MoveSample) -> list[str]:
    return [
        printable(f"{replica}: moves no longer; it is in {place or 'no log directory'}")
        for replica, place in sample.ended
    ]
