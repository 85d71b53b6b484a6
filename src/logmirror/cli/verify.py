"""`logmirror verify`: names, content, and comparison with the source."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import logmirror
from logmirror.cli.options import ConfigOption, FormatOption, MirrorOption
from logmirror.cli.output import print_error, print_lines, stdout, utc_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror import VerifyReport

_RUNS_SHOWN: Final = 8
"""Offset gaps of one partition that the table lists."""

EXIT_PROBLEMS: Final = 65

_NOT_READ: Final = {
    error.kind: error.exit_code
    for error in (
        logmirror.UsageError,
        logmirror.InternalError,
        logmirror.UnavailableError,
        logmirror.OutcomeUnknownError,
    )
}
"""Exit codes of problems that say nothing about the replica: a part of it could not be read."""


def verify(
    config: ConfigOption,
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every object: checksums, order, counts.")
    ] = False,
    against_source: Annotated[
        bool, typer.Option("--against-source", help="Compare with what the source serves now.")
    ] = False,
    mirror: MirrorOption = None,
    output: FormatOption = "table",
) -> None:
    """Verify the replicas.

    Exit code 65 if one is damaged; 2 or 75 if none is, but a part could not be read.
    """
    settings = logmirror.load(config, mirrors=mirror or ())
    progress = Progress(
        TextColumn("reading objects"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    reports: list[VerifyReport] = []
    failed: logmirror.LogmirrorError | None = None
    with progress:
        task = progress.add_task("objects", total=None)
        try:
            logmirror.verify(
                settings,
                deep=deep,
                against_source=against_source,
                on_object=lambda: progress.advance(task),
                on_report=reports.append,
            )
        except logmirror.LogmirrorError as error:
            failed = error
    if failed is not None and all(report.ok for report in reports):
        raise failed
    if output == "json":
        typer.echo(json.dumps([report_json(report) for report in reports], indent=2))
    else:
        print_reports(stdout(), reports, deep=deep or against_source, against_source=against_source)
    if failed is not None:
        print_error(failed)
    kinds = {problem.kind for report in reports for problem in report.problems}
    if kinds - _NOT_READ.keys():
        raise typer.Exit(EXIT_PROBLEMS)
    if kinds:
        raise typer.Exit(min(_NOT_READ[kind] for kind in kinds))


def report_json(report: VerifyReport) -> dict[str, object]:
    """Return a report as JSON. Fields may be added; none is renamed."""
    return {
        "mirror": report.mirror,
        "destination": report.destination,
        "topic": report.topic,
        "partition": report.partition,
        "objects": report.objects,
        "first": report.first,
        "next_offset": report.next_offset,
        "records": report.records,
        "hole_offsets": report.gap_offsets,
        "holes": {cause.value: n for cause, n in report.gaps_by_cause.items()},
        "hole_runs": [[run.first, run.last, run.cause.value] for run in report.gaps],
        "bytes": report.bytes,
        "unwitnessed": report.without_digest,
        "compared_with_source": report.compared,
        "gone_at_source": report.gone_at_source,
        "compacted_since": report.compacted_since,
        "claimed": [report.claimed.first, report.claimed.last] if report.claimed else None,
        "unfinished_compactions": [
            [covered.first, covered.last] for covered in report.unfinished_compactions
        ],
        "group_snapshots": report.group_snapshots,
        "groups_as_of_ms": report.groups_as_of_ms,
        "problems": [
            {"kind": p.kind, "message": p.message, "hint": p.hint, "facts": dict(p.facts)}
            for p in report.problems
        ],
    }


def print_reports(
    out: Console, reports: list[VerifyReport], *, deep: bool, against_source: bool
) -> None:
    """Print a table of all reports, then the notes and problems of each."""
    if not reports:
        out.print("nothing is verified: the destinations hold no partition; check their places")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("MIRROR", "DESTINATION", "PARTITION"):
        table.add_column(title, overflow="fold")
    titles = ["OBJECTS", "FROM", "NEXT"]
    titles += ["RECORDS", "GAPS", "BYTES"] if deep else []
    titles += ["= SOURCE", "GONE", "COMPACTED SINCE"] if against_source else []
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("VERDICT", no_wrap=True)
    for r in reports:
        numbers: list[object] = [r.objects, r.first, r.next_offset]
        numbers += [r.records, r.gap_offsets, r.bytes] if deep else []
        numbers += [r.compared, r.gone_at_source, r.compacted_since] if against_source else []
        verdict = f"{len(r.problems)} PROBLEM(S)" if r.problems else "ok"
        cells = ["-" if n is None else str(n) for n in numbers]
        table.add_row(r.mirror, r.destination, str(r.partition), *cells, verdict)
    out.print(table)
    for report in reports:
        print_lines(out, _findings(report))


def _findings(report: VerifyReport) -> Iterator[str]:
    """Yield the lines below the table."""
    for line in _notes(report):
        yield f"{_where(report)}: {line}"
    for covered in report.unfinished_compactions:
        what = f"compaction of {covered.first}..{covered.last} unfinished"
        yield f"{_where(report)}: {what}: run `logmirror compact`"
    for problem in report.problems:
        yield f"{_where(report)}: {problem.kind}: {problem.message}"
        yield f"  {dict(problem.facts)}"
        if problem.hint:
            yield f"  hint: {problem.hint}"


def _where(report: VerifyReport) -> str:
    return f"{report.mirror}/{report.destination}/{report.topic}-{report.partition}"


def _notes(report: VerifyReport) -> Iterator[str]:
    """Yield findings that are not problems: offset gaps, and a claim without its object."""
    counts = [f"{count} {cause}" for cause, count in report.gaps_by_cause.items()]
    if counts:
        yield f"offsets without a record: {', '.join(counts)}"
        runs = report.gaps
        shown = [
            f"{run.first}{f'-{run.last}' if run.last > run.first else ''} {run.cause}"
            for run in runs[:_RUNS_SHOWN]
        ]
        left = len(runs) - len(shown)
        more = f", and {left} more runs (--format json has them)" if left else ""
        if shown:
            yield f"  at {', '.join(shown)}{more}"
    if report.without_digest:
        yield (
            f"{report.without_digest} objects have neither claim nor footer (mirror-v3 writes "
            "none): their digest is not recorded, so only --against-source finds a changed byte "
            "that still parses"
        )
    if report.group_snapshots is not None:
        count, newest = report.group_snapshots, "none is intact"
        if report.groups_as_of_ms is not None:
            newest = f"the newest of {utc_time(report.groups_as_of_ms)}"
        yield f"{count} snapshot{'' if count == 1 else 's'} of group offsets, {newest}"
    if report.claimed:
        yield (
            f"{report.claimed.first}-{report.claimed.last} is claimed but has no object: a writer "
            "is at work, or the next run writes it"
        )
