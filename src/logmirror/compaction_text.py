"""`logmirror compact` as its users read and write it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Final

import typer
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.compaction import CompactRow

_SIZE: Final = re.compile(r"([0-9]+) *(|[KMG]iB)", re.ASCII)
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Read a size: a number of bytes, or 256MiB."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter("write a number of bytes, or 64KiB, 256MiB, 1GiB")
    return int(found[1]) * _UNITS[found[2]]


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
