"""Commands about the file: `validate`, `schema`, and what it must be allowed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Literal

import typer

from logmirror.cli.check_text import checks_table, settings_json, summary
from logmirror.cli.options import ConfigOption, FormatOption, settings_of
from logmirror.cli.screen import stdout
from logmirror.config.settings import json_schema
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

    With --check also whether clusters answer and allow what is needed, folders and buckets can be
    written to, and the copies could be made. It leaves everything as it was.
    """
    settings = settings_of(config, needs_variables=check)
    if not check:
        if output == "json":
            typer.echo(json.dumps(settings_json(settings), indent=2))
        else:
            for line in summary(settings):
                typer.echo(line)
        return
    from logmirror.app import preflight  # noqa: PLC0415  # only such commands need it

    rows = preflight.check(settings)
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
    from logmirror.app import run  # noqa: PLC0415  # only such commands need it

    found = run.s3_policies(settings_of(config), compacts=compact)
    if not found:
        raise UsageError("the configuration has no destination of type s3")
    typer.echo(json.dumps(found, indent=2))


def acls_print(
    config: ConfigOption,
    *,
    principal: Annotated[
        str | None,
        typer.Option(
            help="Who is to be allowed, such as User:mirror; by default the users of the file.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="For people, or for programs.")
    ] = "text",
) -> None:
    """Print the Kafka ACLs that a configuration needs, as commands of kafka-acls.sh.

    Connects to nothing.
    """
    from logmirror.app.acls import acls_json, acls_text, needed_acls  # noqa: PLC0415  # only it needs it

    clusters = needed_acls(settings_of(config, needs_variables=False), principal)
    if output == "json":
        typer.echo(json.dumps(acls_json(clusters), indent=2))
    else:
        typer.echo(acls_text(clusters), nl=False)
