"""What `logmirror status` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from logmirror.commands.screen import table_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from logmirror.inspection import StatusRow


def status_json(row: StatusRow) -> dict[str, object]:
    """A row for programs."""
    found: dict[str, object] = {
        "mirror": row.flow.mirror,
        "destination": row.flow.destination,
        "topic": row.flow.topic,
        "partition": row.flow.partition,
        "source_end": row.source_end,
        "position": row.position,
        "lag": row.lag,
    }
    if row.is_fencing_degraded:
        found["fencing"] = "degraded"
    if row.error:
        found["error"] = {"kind": row.error.kind, "message": str(row.error)}
    return found


def status_table(rows: Iterable[StatusRow]) -> Table:
    """All rows for people."""
    table = table_of("MIRROR", "DESTINATION", "TOPIC", "PARTITION")
    for title in ("SOURCE END", "POSITION", "LAG"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("REMARK", overflow="fold")
    for row in rows:
        flow = row.flow
        partition = "all" if flow.partition < 0 else str(flow.partition)
        numbers = ["-" if n is None else str(n) for n in (row.source_end, row.position, row.lag)]
        table.add_row(
            flow.mirror,
            flow.destination,
            flow.topic,
            partition,
            *numbers,
            escape(str(row.error)) if row.error else _fencing(row),
        )
    return table


def _fencing(row: StatusRow) -> str:
    return "degraded fencing" if row.is_fencing_degraded else ""
