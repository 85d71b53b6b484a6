"""`logmirror validate` and `logmirror schema`: the configuration file, checked and described."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import logmirror
from logmirror.cli.options import ConfigOption, FormatOption
from logmirror.cli.output import printable, stdout, table_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table

    from logmirror import CheckReport
    from logmirror.config.settings import Settings


def validate(
    config: ConfigOption,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Also check clusters, directories and buckets.")
    ] = False,
    output: FormatOption = "table",
) -> None:
    """Check a configuration offline: every problem, with line and suggestion.

    With --check also connections, permissions, topic settings, write access and positions. Leaves
    everything as it was.
    """
    settings = logmirror.load(config, needs_variables=check)
    if not check:
        if output == "json":
            typer.echo(json.dumps(settings_json(settings), indent=2))
        else:
            for line in summary(settings):
                typer.echo(line)
        return
    rows = logmirror.check(settings)
    if output == "json":
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        stdout().print(checks_table(rows))
    if any(row.severity == "error" for row in rows):
        raise typer.Exit(2)


def schema() -> None:
    """Print the JSON Schema of the configuration."""
    typer.echo(json.dumps(logmirror.json_schema(), indent=2))


def summary(settings: Settings) -> Iterator[str]:
    """Yield the lines that describe a valid configuration."""
    enabled = sum(mirror.enabled for mirror in settings.mirrors)
    disabled = len(settings.mirrors) - enabled
    counts = f" ({enabled} enabled, {disabled} disabled)" if disabled else ""
    destinations = sum(len(mirror.destinations) for mirror in settings.mirrors)
    yield f"OK: {len(settings.mirrors)} mirror(s){counts}, {destinations} destination(s) total"
    for mirror in settings.mirrors:
        names = ", ".join(f'"{d.name}"' for d in mirror.destinations)
        state = "" if mirror.enabled else " [DISABLED]"
        yield f'mirror "{mirror.name}"{state}: destinations = [{names}]'
    if settings.broker is not None:
        folders = ", ".join(settings.broker.log_dir)
        where = ", ".join(settings.broker.listener) or settings.broker.listen
        yield f"broker: listens on {where}, log directories: {folders}"
    for name in settings.unset_variables:
        yield f"note: the environment variable {name} is not set; `run` needs it"


def settings_json(settings: Settings) -> dict[str, object]:
    """Return the same as JSON."""
    mirrors = [
        {
            "mirror": mirror.name,
            "enabled": mirror.enabled,
            "destinations": [destination.name for destination in mirror.destinations],
        }
        for mirror in settings.mirrors
    ]
    broker = {} if settings.broker is None else {"broker": dataclasses.asdict(settings.broker)}
    return {"mirrors": mirrors, **broker, "unset_variables": list(settings.unset_variables)}


def checks_table(rows: Iterable[CheckReport]) -> Table:
    """Return all checks as a table."""
    table = table_of("MIRROR", "DESTINATION", "", "WHAT", "FOUND", "TO DO")
    for row in rows:
        cells = (row.mirror, row.destination or "(source)", row.severity, row.what)
        table.add_row(*cells, escape(printable(row.found)), escape(printable(row.advice)))
    return table
