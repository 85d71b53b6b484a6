"""What `logmirror status` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.cli.screen import error_lines, print_lines, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from logmirror.app.status import StatusRow
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.ports import FlowId

_NAMES_MAX: Final = 8
"""Of what one error concerns; a cluster that is away concerns a thousand partitions."""


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


def print_status(out: Console, rows: Sequence[StatusRow]) -> None:
    """Print a table of all rows, then what is wrong: each message once, with all it concerns."""
    table = table_of("MIRROR", "DESTINATION", "TOPIC", "PARTITION")
    for title in ("SOURCE END", "POSITION", "LAG"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("REMARK", overflow="fold")
    concerned: dict[tuple[str, str], tuple[LogmirrorError, list[FlowId]]] = {}
    for row in rows:
        flow = row.flow
        numbers = ["-" if n is None else str(n) for n in (row.source_end, row.position, row.lag)]
        table.add_row(
            flow.mirror, flow.destination, flow.topic, _partition(flow), *numbers, _remark(row)
        )
        if row.error:
            found = (row.error.kind, row.error.message)
            concerned.setdefault(found, (row.error, []))[1].append(flow)
    out.print(table)
    for error, flows in concerned.values():
        out.print()
        print_lines(out, [*error_lines(error), f"  concerns {_names(flows)}"])


def _remark(row: StatusRow) -> str:
    if row.error:
        return row.error.kind
    return "degraded fencing" if row.is_fencing_degraded else ""


def _partition(flow: FlowId) -> str:
    return "all" if flow.partition < 0 else str(flow.partition)


def _names(flows: Sequence[FlowId]) -> str:
    names = [f"{flow.mirror}/{flow.destination}/{_partition(flow)}" for flow in flows]
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
