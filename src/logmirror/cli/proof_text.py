"""What `logmirror verify` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from logmirror.verify.archive import FlowReport

_RUNS_SHOWN: Final = 8
"""Holes of one flow in a table of `verify`."""


def report_json(report: FlowReport) -> dict[str, object]:
    """A report for programs."""
    return {
        "mirror": report.flow.mirror,
        "destination": report.flow.destination,
        "topic": report.flow.topic,
        "partition": report.flow.partition,
        "objects": report.objects,
        "first": report.first,
        "next_offset": report.next_offset,
        "records": report.record_count,
        "hole_offsets": report.gap_offsets,
        "holes": {cause.value: n for cause, n in sorted(report.gap_counts.items()) if n},
        "hole_runs": [[run.first, run.last, run.cause.value] for run in report.gap_runs],
        "bytes": report.object_bytes,
        "unwitnessed": report.unwitnessed,
        "compared_with_source": report.compared,
        "gone_at_source": report.gone,
        "compacted_since": report.compacted_since,
        "claimed": [report.claimed.first, report.claimed.last] if report.claimed else None,
        "unfinished_compactions": [[covered.first, covered.last] for covered in report.unfinished],
        "problems": report.problems,
    }


def print_reports(
    out: Console, reports: list[FlowReport], *, deep: bool, against_source: bool
) -> None:
    """Print a table of reports, then what is to be said of each."""
    table = Table(box=None, pad_edge=False)
    for title in ("MIRROR", "DESTINATION", "PARTITION"):
        table.add_column(title, overflow="fold")
    titles = ["OBJECTS", "FROM", "NEXT"]
    titles += ["RECORDS", "HOLES", "BYTES"] if deep else []
    titles += ["= SOURCE", "GONE", "COMPACTED SINCE"] if against_source else []
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("VERDICT", no_wrap=True)
    for r in reports:
        numbers: list[object] = [r.objects, r.first, r.next_offset]
        numbers += [r.record_count, r.gap_offsets, r.object_bytes] if deep else []
        numbers += [r.compared, r.gone, r.compacted_since] if against_source else []
        verdict = f"{len(r.problems)} PROBLEM(S)" if r.problems else "ok"
        cells = ["-" if n is None else str(n) for n in numbers]
        table.add_row(r.flow.mirror, r.flow.destination, str(r.flow.partition), *cells, verdict)
    out.print(table)
    for report in reports:
        for line in _notes(report):
            out.print(f"{report.flow}: {line}", markup=False)
        for covered in report.unfinished:
            what = f"compaction of {covered.first}..{covered.last} unfinished"
            out.print(f"{report.flow}: {what}: run `logmirror compact`", markup=False)
        for problem in report.problems:
            out.print(f"{report.flow}: {problem['kind']}: {problem['message']}", markup=False)
            out.print(f"  {problem['facts']}", markup=False)
            if problem["hint"]:
                out.print(f"  hint: {problem['hint']}", markup=False)


def _notes(report: FlowReport) -> Iterator[str]:
    """What a proof found that is no problem: holes, and a claim that waits for its object."""
    counts = [f"{count} {cause}" for cause, count in sorted(report.gap_counts.items()) if count]
    if counts:
        yield f"offsets without a record: {', '.join(counts)}"
        runs = report.gap_runs
        shown = [
            f"{run.first}{f'-{run.last}' if run.last > run.first else ''} {run.cause}"
            for run in runs[:_RUNS_SHOWN]
        ]
        left = len(runs) - len(shown)
        more = f", and {left} more runs (--format json has them)" if left else ""
        if shown:
            yield f"  at {', '.join(shown)}{more}"
    if report.unwitnessed:
        yield (
            f"{report.unwitnessed} objects have neither claim nor footer of ours (mirror-v3 writes "
            "none): what digest they must have is not recorded, and a changed byte that still "
            "makes sense is seen only with --against-source"
        )
    if report.claimed:
        yield (
            f"{report.claimed.first}-{report.claimed.last} is claimed and has no object yet: a "
            "writer is at it, or the next run writes it"
        )
