"""Commands about copies that are there: `status`, `verify`, `compact`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from logmirror.cli.compaction_text import parse_bytes, row_json, rows_table
from logmirror.cli.options import ConfigOption, FormatOption, MirrorOption, settings_of
from logmirror.cli.proof_text import print_reports, report_json
from logmirror.cli.screen import stdout
from logmirror.cli.status_text import print_status, status_json


def status(
    config: ConfigOption, *, mirror: MirrorOption = None, output: FormatOption = "table"
) -> None:
    """Show source end, position and lag of every flow. Exit code 1 if one cannot be read."""
    from logmirror.app import status  # noqa: PLC0415  # only this command needs it

    rows = status.status(settings_of(config, mirror))
    if output == "json":
        typer.echo(json.dumps([status_json(row) for row in rows], indent=2))
    else:
        print_status(stdout(), rows)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def verify(
    config: ConfigOption,
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every object: checksums, order, counts.")
    ] = False,
    against_source: Annotated[
        bool, typer.Option("--against-source", help="Compare with what the source serves.")
    ] = False,
    mirror: MirrorOption = None,
    output: FormatOption = "table",
) -> None:
    """Prove the copies. Exit code 65 if anything is wrong with one."""
    from logmirror.app import verify  # noqa: PLC0415  # it loads kernels, which takes a second

    settings = settings_of(config, mirror)
    progress = Progress(
        TextColumn("reading objects"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("objects", total=None)
        reports = verify.verify(
            settings,
            deep=deep,
            against_source=against_source,
            on_object=lambda: progress.advance(task),
        )
    if output == "json":
        typer.echo(json.dumps([report_json(report) for report in reports], indent=2))
    else:
        print_reports(stdout(), reports, deep=deep or against_source, against_source=against_source)
    if any(report.problems for report in reports):
        raise typer.Exit(65)


def compact(  # noqa: PLR0913  # one parameter for each option
    config: ConfigOption,
    *,
    target_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Of a merged object, at most.")
    ] = "256MiB",  # type: ignore[assignment]  # the text that the parser reads
    min_objects: Annotated[
        int, typer.Option(min=2, help="Fewer small objects beside each other are left alone.")
    ] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be merged now.")
    ] = False,
    mirror: MirrorOption = None,
    output: FormatOption = "table",
) -> None:
    """Merge small objects of archives into large ones, while mirrors and readers go on.

    Finishes what an earlier one that was interrupted has begun. Exit code 65, and nothing deleted,
    if an object is damaged.
    """
    from logmirror.app import compact  # noqa: PLC0415  # only this command needs it

    rows = compact.compact_archives(
        settings_of(config, mirror),
        target_bytes=target_bytes,
        min_objects=min_objects,
        dry_run=dry_run,
    )
    if output == "json":
        typer.echo(json.dumps([row_json(row) for row in rows], indent=2))
    else:
        stdout().print(rows_table(rows))
    for row in rows:
        if row.error:
            raise typer.Exit(row.error.exit_code)
