"""Commands about the file: `validate`, `schema`, and what it must be allowed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from logmirror.commands.check_text import checks_table, summary
from logmirror.commands.options import ConfigOption, FormatOption, settings_of
from logmirror.commands.screen import stdout
from logmirror.config import json_schema
from logmirror.errors import UsageError


def validate(
    config: ConfigOption,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Then look at the clusters and folders it names.")
    ] = False,
    output: FormatOption = "table",
) -> None:
    """Check a configuration offline: every problem, with line and suggestion.

    With --check also whether the clusters answer and the copies could be made; changes nothing.
    """
    settings = settings_of(config)
    if not check:
        for line in summary(settings):
            typer.echo(line)
        return
    from logmirror import inspection  # noqa: PLC0415  # only such commands need it

    rows = inspection.check(settings)
    if output == "json":
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        stdout().print(checks_table(rows))
    if any(row.severity == "error" for row in rows):
        raise typer.Exit(2)


def schema() -> None:
    """Print the JSON Schema of the configuration."""
    typer.echo(json.dumps(json_schema(), indent=2))


def policy_print(
    config: ConfigOption,
    *,
    compact: Annotated[
        bool, typer.Option("--compact", help="For `logmirror compact`, which deletes objects.")
    ] = False,
) -> None:
    """Print the least IAM policies for the buckets of a configuration."""
    from logmirror import wiring  # noqa: PLC0415  # only such commands need it

    found = wiring.s3_policies(settings_of(config), compacts=compact)
    if not found:
        raise UsageError("the configuration has no destination of type s3")
    typer.echo(json.dumps(found, indent=2))
