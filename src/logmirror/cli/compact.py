"""`logmirror compact`: merges small objects of archives into larger ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

import logmirror
from logmirror.cli.options import ConfigOption, FormatOption, MirrorOption, parse_bytes
from logmirror.cli.output import printable, stdout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror import CompactReport


def compact(  # noqa: PLR0913  # one parameter for each option
    config: ConfigOption,
    *,
    target_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Size limit of merged objects.")
    ] = "256MiB",  # type: ignore[assignment]  # the text that the parser reads
    min_objects: Annotated[
        int, typer.Option(min=2, help="Fewer adjacent small objects are left alone.")
    ] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be merged.")
    ] = False,
    mirror: MirrorOption = None,
    output: FormatOption = "table",
) -> None:
    """Merge small objects of archives into larger ones, while mirrors and readers continue.

    Also finishes what an interrupted `compact` has begun. If an object is damaged, nothing of its
    partition is deleted, and the exit code is 65.
    """
    rows = logmirror.compact(
        logmirror.load(config, mirrors=mirror or ()),
        target_bytes=target_bytes,
        min_objects=min_objects,
        dry_run=dry_run,
    )
    if output == "json":
        typer.echo(json.dumps([row_json(row) for row in rows], indent=2))
    else:
        stdout().print(rows_table(rows))
    for row in rows:
        if row.error:
            raise typer.Exit(row.error.exit_code)


_OUTCOME = (
    "objects_before",
    "objects_after",
    "bytes_before",
    "bytes_after",
    "merged",
    "into",
    "finished",
)


def row_json(row: CompactReport) -> dict[str, object]:
    """Return a report as JSON. Fields may be added; none is renamed."""
    found: dict[str, object] = {
        "mirror": row.mirror,
        "destination": row.destination,
        "topic": row.topic,
        "partition": row.partition,
    }
    if row.error:
        return found | {"error": {"kind": row.error.kind, "message": str(row.error)}}
    return found | {name: getattr(row, name) for name in _OUTCOME}


def rows_table(rows: Iterable[CompactReport]) -> Table:
    """Return all reports as a table."""
    table = Table(box=None, pad_edge=False)
    for title in ("MIRROR", "DESTINATION", "PARTITION"):
        table.add_column(title, overflow="fold")
    for title in ("OBJECTS", "AFTER", "MERGED", "INTO", "CLEARED", "BYTES", "AFTER"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ERROR", overflow="fold")
    for row in rows:
        numbers = (row.objects_before, row.objects_after, row.merged, row.into, row.finished)
        cells = [str(n) for n in (*numbers, row.bytes_before, row.bytes_after)]
        if row.error:
            cells = ["-"] * len(cells)
        error = escape(printable(f"{row.error}: {row.error.hint}")) if row.error else ""
        table.add_row(row.mirror, row.destination, str(row.partition), *cells, error)
    return table
