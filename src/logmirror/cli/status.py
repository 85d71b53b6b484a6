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

    from logmirror import GroupLinkStatus, LogmirrorError, PartitionStatus

_NAMES_MAX: Final = 8
"""Partitions listed below one error; an unreachable cluster affects thousands."""


def status(
    config: ConfigOption, *, mirror: MirrorOption = None, output: FormatOption = "table"
) -> None:
    """Show source end, position and lag of every partition, and the consumer groups of `groups`.

    Exit code 1 if a partition or the groups cannot be read, or if `run` would refuse to continue.
    """
    settings = logmirror.load(config, mirrors=mirror or ())
    rows, links = logmirror.status(settings), logmirror.group_status(settings)
    if output == "json":
        found = [*map(status_json, rows), *map(link_json, links)]
        typer.echo(json.dumps(found, indent=2))
    else:
        print_status(stdout(), rows)
        if links:
            print_links(stdout(), links)
    if any(row.error for row in rows) or any(link.error for link in links):
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
        found["error"] = _error_json(row.error)
    return found


def link_json(row: GroupLinkStatus) -> dict[str, object]:
    """Return a row of groups as JSON. It has `groups`, and no `partition`."""
    found: dict[str, object] = {
        "source": row.source,
        "destination": row.destination,
        "groups": row.groups,
        "exact": row.exact,
        "inexact": row.inexact,
        "not_translated": row.not_translated,
        "reason": row.reason,
        "heartbeat_age_s": row.heartbeat_age_s,
    }
    if row.error:
        found["error"] = _error_json(row.error)
    return found


def _error_json(error: LogmirrorError) -> dict[str, str]:
    return {"kind": error.kind, "name": name_of(error), "message": str(error)}


def print_links(out: Console, rows: Sequence[GroupLinkStatus]) -> None:
    """Print a table of the groups, then each error."""
    table = table_of("SOURCE", "DESTINATION")
    for title in ("GROUPS", "EXACT", "INEXACT", "NOT TRANSLATED", "LAST HEARTBEAT"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("REMARK", overflow="fold")
    for row in rows:
        counts = (row.groups, row.exact, row.inexact, row.not_translated)
        numbers = ["-" if row.error else str(count) for count in counts]
        remark = name_of(row.error) if row.error else row.reason
        age = "-" if row.heartbeat_age_s is None else f"{row.heartbeat_age_s} s ago"
        table.add_row(row.source, row.destination, *numbers, age, remark)
    out.print()
    out.print(table)
    for row in rows:
        if row.error:
            affected = f"  affects the groups of {row.source} for {row.destination}"
            out.print()
            print_lines(out, [*error_lines(row.error), affected])


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
