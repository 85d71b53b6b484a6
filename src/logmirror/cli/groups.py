"""`logmirror groups`: consumer groups of the source, and where they continue in the replicas."""

from __future__ import annotations

import datetime as dt
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import logmirror
from logmirror.cli.group_progress import showing_groups
from logmirror.cli.options import ConfigOption, FormatOption, MirrorOption
from logmirror.cli.output import printable, stdout, table_of, utc_time
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror import GroupOutcome, GroupPlan, NextRecord

_GroupOption = Annotated[
    list[str] | None,
    typer.Option("--group", help="Only this group; repeatable.", show_default=False),
]
_OffsetsFromOption = Annotated[
    str | None,
    typer.Option(
        "--offsets-from",
        help="Take the source's offsets from the snapshots beside this archive, not from the "
        "source.",
        metavar="DESTINATION",
        show_default=False,
    ),
]
_AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        help="Take the newest snapshot at or before this time, as 2026-01-31T12:00:00Z.",
        metavar="TIME",
        show_default=False,
    ),
]
_PlanArgument = Annotated[
    Path, typer.Argument(help="The file from `logmirror groups plan`.", show_default=False)
]


def groups_list(  # noqa: PLR0913  # one for each option
    config: ConfigOption,
    *,
    mirror: MirrorOption = None,
    group: _GroupOption = None,
    offsets_from: _OffsetsFromOption = None,
    at: _AtOption = None,
    output: FormatOption = "table",
) -> None:
    """Show every consumer group of the source, and how far it can continue in each replica.

    Exit code 1 if a partition of a group cannot be translated.
    """
    plans = _plans(config, mirror, group or (), offsets_from, at)
    if output == "json":
        typer.echo(json.dumps([_summary(plan) for plan in plans], indent=2))
    else:
        _print_list(plans)
    _exit_if_unknown(plans)


def groups_describe(  # noqa: PLR0913  # one for each option
    group: Annotated[str, typer.Argument(help="The group.", show_default=False)],
    config: ConfigOption,
    *,
    mirror: MirrorOption = None,
    offsets_from: _OffsetsFromOption = None,
    at: _AtOption = None,
    output: FormatOption = "table",
) -> None:
    """Show each partition of a group: its offset at the source, and where it continues.

    Exit code 1 if a partition cannot be translated.
    """
    plans = _plans(config, mirror, [group], offsets_from, at)
    if output == "json":
        typer.echo(logmirror.plan_text(plans), nl=False)
    else:
        _print_steps(plans)
    _exit_if_unknown(plans)


def groups_plan(  # noqa: PLR0913  # one for each option
    config: ConfigOption,
    *,
    file: Annotated[
        Path, typer.Option("--output", help="The plan, a new file.", show_default=False)
    ],
    mirror: MirrorOption = None,
    group: _GroupOption = None,
    offsets_from: _OffsetsFromOption = None,
    at: _AtOption = None,
    output: FormatOption = "table",
) -> None:
    """Write a plan: the offsets to commit at the destinations. Nothing else is changed.

    Exit code 1 if a partition cannot be translated; the plan has the others.
    """
    if file.exists():
        raise UsageError("the file of the plan exists", hint="choose another name", path=str(file))
    plans = _plans(config, mirror, group or (), offsets_from, at)
    file.write_text(logmirror.plan_text(plans), encoding="utf-8")
    if output == "json":
        typer.echo(logmirror.plan_text(plans), nl=False)
        _exit_if_unknown(plans)
        return
    _print_steps(plans)
    typer.echo(f"plan written to {file}; apply it: logmirror groups apply {file} -c {config}")
    _exit_if_unknown(plans)


def groups_apply(
    plan: _PlanArgument, config: ConfigOption, *, output: FormatOption = "table"
) -> None:
    """Commit the offsets of a plan at the destinations, and read them back.

    Offsets only move forward. Exit code 1 if a partition does not have what the plan says.
    """
    settings, plans = logmirror.load(config), _read(plan)
    with showing_groups() as on_progress:
        outcomes = logmirror.apply_groups(settings, plans, on_progress=on_progress)
    _finish(outcomes, output)


def groups_rollback(
    plan: _PlanArgument, config: ConfigOption, *, output: FormatOption = "table"
) -> None:
    """Restore the offsets that groups had at the destinations before a plan was applied.

    Exit code 1 if a partition does not have them.
    """
    settings, plans = logmirror.load(config), _read(plan)
    with showing_groups() as on_progress:
        outcomes = logmirror.rollback_groups(settings, plans, on_progress=on_progress)
    _finish(outcomes, output)


def _plans(
    config: Path,
    mirror: list[str] | None,
    groups: Sequence[str],
    offsets_from: str | None,
    at: str | None,
) -> list[GroupPlan]:
    if at is not None and offsets_from is None:
        raise UsageError("--at is only for --offsets-from", at=at)
    settings = logmirror.load(config, mirrors=mirror or ())
    with showing_groups() as on_progress:
        return logmirror.plan_groups(
            settings,
            groups,
            offsets_from=offsets_from,
            at_ms=None if at is None else _milliseconds(at),
            on_progress=on_progress,
        )


def _milliseconds(text: str) -> int:
    """Return a time as milliseconds since 1970."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(
            "not a time with a time zone", hint="write it as 2026-01-31T12:00:00Z", at=text
        )
    return (found - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


def _read(path: Path) -> list[GroupPlan]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the plan", path=str(path), cause=str(error)) from error
    return logmirror.read_plan(text)


def _exit_if_unknown(plans: Sequence[GroupPlan]) -> None:
    if any(step.target_offset is None for plan in plans for step in plan.steps):
        raise typer.Exit(1)


def _summary(plan: GroupPlan) -> dict[str, object]:
    return {
        "group": plan.group,
        "destination": plan.destination,
        "source_state": plan.source_state,
        "target_state": plan.target_state,
        "as_of_ms": plan.as_of_ms,
        "partitions": len(plan.steps),
        "to_commit": sum(step.is_committed for step in plan.steps),
        "not_known": sum(step.target_offset is None for step in plan.steps),
        "read_again": _read_again(plan),
    }


def _read_again(plan: GroupPlan) -> int | None:
    counts = [step.read_again for step in plan.steps]
    return None if None in counts else sum(count or 0 for count in counts)


def _print_list(plans: Sequence[GroupPlan]) -> None:
    table = table_of("GROUP", "DESTINATION", "SOURCE STATE", "DESTINATION STATE")
    for title in ("PARTITIONS", "TO COMMIT", "NOT KNOWN", "READ AGAIN"):
        table.add_column(title, justify="right", no_wrap=True)
    for plan in plans:
        found = _summary(plan)
        states = (plan.source_state or "-", plan.target_state or "-")
        texts = (plan.group, plan.destination, *states)
        numbers = (found[name] for name in ("partitions", "to_commit", "not_known", "read_again"))
        table.add_row(*map(printable, texts), *map(_number, numbers))
    stdout().print(table)
    _print_time(plans)


def _print_steps(plans: Sequence[GroupPlan]) -> None:
    table = table_of("GROUP", "DESTINATION", "TOPIC", "PARTITION")
    for title in ("SOURCE OFFSET", "CONTINUES AT", "COMMITTED THERE", "READ AGAIN"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("NEXT RECORD", overflow="fold")
    table.add_column("REMARK", overflow="fold")
    for plan in plans:
        for step in plan.steps:
            numbers = (
                step.source_offset,
                step.target_offset,
                step.current_offset,
                step.read_again,
            )
            table.add_row(
                printable(plan.group),
                plan.destination,
                step.topic,
                str(step.partition),
                *map(_number, numbers),
                _next_text(step.next_record),
                step.reason,
            )
    stdout().print(table)
    _print_time(plans)


def _print_time(plans: Sequence[GroupPlan]) -> None:
    """Print of which time the offsets are, if they are from a snapshot."""
    times = [plan.as_of_ms for plan in plans if plan.as_of_ms is not None]
    if times:
        typer.echo(f"offsets of {utc_time(min(times))}, from an archive")


def _finish(outcomes: Sequence[GroupOutcome], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps([_outcome_json(outcome) for outcome in outcomes], indent=2))
    else:
        table = table_of("GROUP", "DESTINATION", "TOPIC", "PARTITION")
        table.add_column("OFFSET", justify="right", no_wrap=True)
        table.add_column("RESULT", overflow="fold")
        for one in outcomes:
            result = ("ok" if one.is_done else "not done") + (one.reason and f": {one.reason}")
            names = (printable(one.group), one.destination, one.target_topic, str(one.partition))
            table.add_row(*names, _number(one.offset), result)
        stdout().print(table)
    if not all(outcome.is_done for outcome in outcomes):
        raise typer.Exit(1)


def _outcome_json(outcome: GroupOutcome) -> dict[str, object]:
    return {
        "group": outcome.group,
        "destination": outcome.destination,
        "topic": outcome.target_topic,
        "partition": outcome.partition,
        "offset": outcome.offset,
        "is_done": outcome.is_done,
        "reason": outcome.reason,
    }


def _number(value: object) -> str:
    return "-" if value is None else str(value)


def _next_text(record: NextRecord | None) -> str:
    if record is None:
        return "-"
    if record.timestamp_ms is None:
        return "end of the replica"
    key = "without key" if record.key is None else f"key={printable(record.key)}"
    return f"{_time_text(record.timestamp_ms)} {key}"


def _time_text(ms: int) -> str:
    try:
        moment = dt.datetime.fromtimestamp(ms / 1000, dt.UTC)
    except (ValueError, OverflowError):  # any number is a legal timestamp of a record
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
