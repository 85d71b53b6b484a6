"""`logmirror compact` as its users read and write it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from logmirror.config.settings import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.app.compact import CompactRow


def parse_bytes(text: str) -> int:
    """Read a size: a number of bytes, or 256MiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; for instance 256MiB") from error


def row_json(row: CompactRow) -> dict[str, object]:
    """A row for programs."""
    found: dict[str, object] = {
        "mirror": row.flow.mirror,
        "destination": row.flow.destination,
        "topic": row.flow.topic,
        "partition": row.flow.partition,
    }
    if row.error:
        return found | {"error": {"kind": row.error.kind, "message": str(row.error)}}
    return found | dataclasses.asdict(row.outcome)


def rows_table(rows: Iterable[CompactRow]) -> Table:
    """All rows for people."""
    table = Table(box=None, pad_edge=False)
    for title in ("MIRROR", "DESTINATION", "PARTITION"):
        table.add_column(title, overflow="fold")
    for title in ("OBJECTS", "AFTER", "MERGED", "INTO", "CLEARED", "BYTES", "AFTER"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ERROR", overflow="fold")
    for row in rows:
        flow, done = row.flow, row.outcome
        numbers = (done.objects_before, done.objects_after, done.merged, done.into, done.finished)
        cells = [str(n) for n in (*numbers, done.bytes_before, done.bytes_after)]
        if row.error:
            cells = ["-"] * len(cells)
        error = escape(f"{row.error}: {row.error.hint}") if row.error else ""
        table.add_row(flow.mirror, flow.destination, str(flow.partition), *cells, error)
    return table
