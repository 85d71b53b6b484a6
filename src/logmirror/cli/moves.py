"""`logmirror moves`: partitions move between the log directories of a Kafka broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from logmirror.api import open_moves
from logmirror.cli.moves_view import (
    following,
    move_json,
    moves_table,
    print_refused,
    replica_json,
    size_text,
)
from logmirror.cli.options import FormatOption
from logmirror.cli.output import printable, stdout, table_of
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from logmirror.api import Moves
    from logmirror.move_reports import MovedReplica, MoveOutcome, MovePlan, MoveStatus

_INTERRUPTED: Final = 130

_BootstrapOption = Annotated[
    str,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="A broker.", show_default=False),
]
_ClientConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="File with properties of the client by librdkafka's names, a NAME=VALUE in each line.",
        show_default=False,
    ),
]
_TimeoutOption = Annotated[
    int, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait for the moves.")
]
_DAY_S: Final = 86_400


def moves_list(
    *,
    bootstrap: _BootstrapOption,
    client_config: _ClientConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Until no partition moves.")] = False,
    timeout_s: _TimeoutOption = _DAY_S,
    output: FormatOption = "table",
) -> None:
    """Show the partitions that move, how much is copied, and how fast.

    A failed move is shown, too: its copy does not grow.
    """
    with _open(bootstrap, client_config) as moves:
        if watch:
            _follow(moves, None, timeout_s, output)
            return
        found = moves.sampled()
    _print_moves(found, output)


def moves_start(  # noqa: PLR0913  # one for each option
    plan: Annotated[
        Path, typer.Argument(help="The JSON file, as Kafka's tool takes it.", show_default=False)
    ],
    *,
    bootstrap: _BootstrapOption,
    client_config: _ClientConfigOption = None,
    rollback: Annotated[
        Path | None,
        typer.Option(
            help="File for the plan that undoes this one.",
            show_default="rollback-TIME.json beside the plan",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are complete.")] = False,
    timeout_s: _TimeoutOption = _DAY_S,
    output: FormatOption = "table",
) -> None:
    """Begin the moves of a plan. First write a plan that undoes them.

    Exit code 1 if a move was refused, or, with --wait, a partition is not in its target.
    """
    with _open(bootstrap, client_config) as moves:
        prepared = moves.prepare(_text_of(plan))
        outcomes, file = list(prepared.refused), None
        if prepared.targets:
            file = moves.write_rollback(prepared.rollback, path=rollback, beside=plan)
            typer.echo(f"rollback plan: {file}", err=output == "json")
            outcomes += moves.request(prepared.targets)
        begun = {one.replica: one.log_dir for one in outcomes if not one.error}
        if file is not None and not begun:  # it would undo nothing
            file.unlink(missing_ok=True)
            typer.echo("no move was begun: the rollback plan is removed", err=output == "json")
            file = None
        if output != "json":
            print_refused(outcomes)
            typer.echo(_begun_text(len(begun), len(outcomes)))
        ended = _follow(moves, begun, timeout_s, output) if wait and begun else {}
    if output == "json":
        listed = [_outcome_json(one, ended if wait else None) for one in outcomes]
        typer.echo(json.dumps({"rollback": file and str(file), "partitions": listed}, indent=2))
    elsewhere = [one for one, path in begun.items() if wait and ended.get(one) != path]
    for one in elsewhere:
        typer.echo(f"error: {printable(str(one))} is not in its target", err=True)
    if elsewhere or any(one.error for one in outcomes):
        raise typer.Exit(1)


def moves_cancel(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN.json|TOPIC[:PARTITION]",
            help="The moves of a plan, of a topic or of a partition.",
            show_default=False,
        ),
    ] = None,
    *,
    bootstrap: _BootstrapOption,
    client_config: _ClientConfigOption = None,
    every: Annotated[bool, typer.Option("--all", help="All moves.")] = False,
    output: FormatOption = "table",
) -> None:
    """Cancel moves: the partitions stay where they are, and the copies are removed.

    Exit code 1 if a request was refused.
    """
    if names and every:
        raise UsageError("give --all, or the names of partitions, not both", found=" ".join(names))
    with _open(bootstrap, client_config) as moves:
        found, still = moves.in_progress(_names(moves, names or []))
        if not names and not every and found:
            _print_moves(found, output)
            raise UsageError(
                "these moves would be cancelled", hint="name some of them, or add --all"
            )
        targets = {move.replica: move.source for move in found if move.source}
        outcomes = moves.request(targets)
    if output == "json":
        typer.echo(json.dumps([_outcome_json(one, None) for one in outcomes], indent=2))
    else:
        print_refused(outcomes)
        for name in still:
            typer.echo(f"{printable(name)} does not move")
        for one in outcomes:
            if not one.error:
                line = f"{one.replica}: the move is cancelled; it stays in {one.log_dir}"
                typer.echo(printable(line))
        if not found and not still:
            typer.echo("no partition moves")
    offline = [move for move in found if not move.source]
    for move in offline:
        typer.echo(f"error: {printable(str(move.replica))} is in no log directory", err=True)
    if offline or any(one.error for one in outcomes):
        raise typer.Exit(1)


def moves_plan(
    *,
    bootstrap: _BootstrapOption,
    client_config: _ClientConfigOption = None,
    file: Annotated[
        Path | None, typer.Option("--output", help="The plan, a new file.", show_default=False)
    ] = None,
    output: FormatOption = "table",
) -> None:
    """Propose moves after which the log directories of a broker hold about equal bytes.

    Moves nothing: `logmirror moves start` and kafka-reassign-partitions take the file.
    """
    with _open(bootstrap, client_config) as moves:
        plan = moves.plan()
        if file is not None and plan.moves:
            moves.write_plan(file, plan.text)
    if output == "json":
        typer.echo(json.dumps(_plan_json(plan), indent=2))
        return
    _print_plan(plan)
    if not plan.moves:
        typer.echo("no move is proposed: the log directories are balanced, as far as moves do it")
    elif file is not None:
        typer.echo(f"plan written to {file}; begin it: logmirror moves start {file}")
    else:
        typer.echo("write it to a file with --output FILE")


def _open(bootstrap: str, client_config: Path | None) -> Moves:
    properties: dict[str, str] = {}
    lines = [] if client_config is None else _text_of(client_config).splitlines()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            name, equals, value = text.partition("=")
            if not equals:
                raise UsageError(
                    "a line of the file is not NAME=VALUE", path=str(client_config), line=number
                )
            properties[name.strip()] = value.strip()
    return open_moves(bootstrap, properties)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the file", path=str(path), cause=str(error)) from error


def _names(moves: Moves, names: list[str]) -> list[str]:
    """Return the partitions of a plan, or the names."""
    if len(names) == 1 and (names[0].endswith(".json") or Path(names[0]).is_file()):
        return moves.names_in(_text_of(Path(names[0])))
    return names


def _follow(
    moves: Moves, wanted: Collection[MovedReplica] | None, timeout_s: int, output: str
) -> dict[MovedReplica, str]:
    """Show moves until they end; returns where each replica is then."""
    ended: dict[MovedReplica, str] = {}
    is_silent = wanted is not None and output == "json"
    try:
        with following(output) as show:
            for sample in moves.watch(wanted, timeout_s=timeout_s):
                ended |= dict(sample.ended)
                if not is_silent:
                    show(sample)
    except KeyboardInterrupt:
        typer.echo("stopped; the moves continue", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if output != "json":
        typer.echo("no partition moves" if wanted is None else "no move of the plan is in progress")
    return ended


def _print_moves(found: Sequence[MoveStatus], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps([move_json(move) for move in found], indent=2))
    elif found:
        out = stdout()
        out.print(moves_table(found, has_bars=out.is_terminal))
    else:
        typer.echo("no partition moves")


def _begun_text(begun: int, count: int) -> str:
    if not count:
        return "every partition of the plan is where it is to be"
    return f"{begun} of {count} moves begun"


def _outcome_json(one: MoveOutcome, ended: dict[MovedReplica, str] | None) -> dict[str, object]:
    found: dict[str, object] = {
        **replica_json(one.replica),
        "log_dir": one.log_dir,
        "error": one.error or None,
    }
    if one.error:
        found["hint"] = one.hint
    elif ended is not None:
        found["is_there"] = ended.get(one.replica) == one.log_dir
    return found


def _print_plan(plan: MovePlan) -> None:
    has_brokers = len({one.broker for one in plan.log_dirs}) > 1
    table = table_of(*(["BROKER"] if has_brokers else []), "LOG DIRECTORY")
    for title in ("BYTES BEFORE", "BYTES AFTER"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in plan.log_dirs:
        table.add_row(
            *([str(one.broker)] if has_brokers else []),
            printable(one.log_dir),
            size_text(one.before_bytes),
            size_text(one.after_bytes),
        )
    out = stdout()
    out.print(table)
    if plan.moves:
        moves = table_of("PARTITION", *(["BROKER"] if has_brokers else []), "FROM", "TO")
        moves.add_column("SIZE", justify="right", no_wrap=True)
        for move in plan.moves:
            moves.add_row(
                printable(str(move.replica)),
                *([str(move.replica.broker)] if has_brokers else []),
                printable(move.source),
                printable(move.target),
                size_text(move.size_bytes),
            )
        out.print()
        out.print(moves)


def _plan_json(plan: MovePlan) -> dict[str, object]:
    return {
        "moves": [
            {
                **replica_json(move.replica),
                "from": move.source,
                "to": move.target,
                "size_bytes": move.size_bytes,
            }
            for move in plan.moves
        ],
        "log_dirs": [
            {
                "broker": one.broker,
                "log_dir": one.log_dir,
                "before_bytes": one.before_bytes,
                "after_bytes": one.after_bytes,
            }
            for one in plan.log_dirs
        ],
    }
