"""`logmirror status`: source end, position and lag of every partition."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import typer

import logmirror
from logmirror.cli.options import ConfigOption, FormatOption, MirrorOption
from logmirror.cli.output import error_lines, name_of, print_lines, stdout, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from logmirror import LogmirrorError, PartitionStatus

_NAMES_MAX: Final = 8
"""Partitions listed below one error; an unreachable cluster affects thousands."""


def status(
    config: ConfigOption, *, mirror: MirrorOption = None, output: FormatOption = "table"
) -> None:
    """Show source end, position and lag of every partition.

    Exit code 1 if a partition cannot be read, or if `run` would refuse to continue it.
    """
    rows = logmirror.status(logmirror.load(config, mirrors=mirror or ()))
    if output == "json":
        typer.echo(json.dumps([status_json(row) for row in rows], indent=2))
    else:
        print_status(stdout(), rows)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def status_json(row: PartitionStatus) -> dict[str, object]:
    """Return a row as JSON. Fields may be added; none is renamed."""
    found: dict[str, object] = {
        "mirror": row.mirror,
        "destination": row.destination,
        "topic": row.topic,
        "partition": row.partition,
        "source_end": row.source_end,
        "position": row.position,
        "lag": row.lag,
    }
    if row.is_fencing_degraded:
        found["fencing"] = "degraded"
    if row.error:
        name = name_of(row.error)
        found["error"] = {"kind": row.error.kind, "name": name, "message": str(row.error)}
    return found


def print_status(out: Console, rows: Sequence[PartitionStatus]) -> None:
    """Print a table of all rows, then each error once, with the partitions that it affects."""
    table = table_of("MIRROR", "DESTINATION", "TOPIC", "PARTITION")
    for title in ("SOURCE END", "POSITION", "LAG"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("REMARK", overflow="fold")
    concerned: dict[tuple[str, str], tuple[LogmirrorError, list[PartitionStatus]]] = {}
    for row in rows:
        numbers = ["-" if n is None else str(n) for n in (row.source_end, row.position, row.lag)]
        table.add_row(
            row.mirror, row.destination, row.topic, _partition(row), *numbers, _remark(row)
        )
        if row.error:
            found = (row.error.kind, row.error.message)
            concerned.setdefault(found, (row.error, []))[1].append(row)
    out.print(table)
    for error, affected in concerned.values():
        out.print()
        print_lines(out, [*error_lines(error), f"  affects {_names(affected)}"])


def _remark(row: PartitionStatus) -> str:
    if row.error:
        return name_of(row.error)
    return "degraded fencing" if row.is_fencing_degraded else ""


def _partition(row: PartitionStatus) -> str:
    return "all" if row.partition < 0 else str(row.partition)


def _names(rows: Sequence[PartitionStatus]) -> str:
    names = [f"{row.mirror}/{row.destination}/{_partition(row)}" for row in rows]
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
