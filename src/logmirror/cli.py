"""The command `logmirror`: arguments in, results on stdout, logs on stderr, a meaningful exit code.

0 ok    1 a status row failed    2 usage    65 corruption
69 position or fenced    70 internal    75 unavailable, try again later
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from logmirror.cluster.properties import property_problems
from logmirror.compaction_text import parse_bytes, row_json, rows_table
from logmirror.config import ConfigError, Settings, json_schema, load
from logmirror.errors import LogmirrorError, UsageError
from logmirror.knobs import read_knobs
from logmirror.log_lines import log_to_stderr
from logmirror.proof_text import print_reports, report_json
from logmirror.torture import command as torture_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.inspection import CheckRow, StatusRow

_UNBROKEN: Final = 1000
"""Columns of a table that goes to a file or a pipe: no cell is cut."""

app = typer.Typer(
    name="logmirror",
    help="Exact copies of Kafka partitions, each of which can be proven.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

torture_command.register(app)

ConfigOption = Annotated[
    Path, typer.Option("-c", "--config", help="The YAML file.", show_default=False)
]
FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="For people, or for programs.")
]
MirrorOption = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="Only this mirror; may be given again.", show_default=False),
]
MasterOption = Annotated[
    str | None,
    typer.Option(help="Spark master instead of the configured one, such as local[2]."),
]


LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="What stderr shows.")
]
LogFormatOption = Annotated[
    Literal["text", "json"], typer.Option(help="How stderr shows it: for people, or for programs.")
]


def main() -> NoReturn:
    """Run the command line and exit."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        app()
    except LogmirrorError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)  # the reader of our output has seen enough
    sys.exit(0)


@app.command()
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
    settings = _load(config)
    if check:
        from logmirror import inspection  # noqa: PLC0415  # only such commands need it

        rows = inspection.check(settings)
        if output == "json":
            typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        else:
            _print_checks(rows)
        if any(row.severity == "error" for row in rows):
            raise typer.Exit(2)
        return
    enabled = sum(mirror.enabled for mirror in settings.mirrors)
    disabled = len(settings.mirrors) - enabled
    counts = f" ({enabled} enabled, {disabled} disabled)" if disabled else ""
    destinations = sum(len(mirror.destinations) for mirror in settings.mirrors)
    typer.echo(
        f"OK: {len(settings.mirrors)} mirror(s){counts}, {destinations} destination(s) total"
    )
    for mirror in settings.mirrors:
        names = ", ".join(f'"{d.name}"' for d in mirror.destinations)
        state = "" if mirror.enabled else " [DISABLED]"
        typer.echo(f'mirror "{mirror.name}"{state}: destinations = [{names}]')


@app.command()
def run(  # noqa: PLR0913  # one parameter for each option
    config: ConfigOption,
    *,
    until_now: Annotated[
        bool, typer.Option("--until-now", help="Copy what is there now, then end.")
    ] = False,
    master: MasterOption = None,
    spark_log: Annotated[
        Path | None, typer.Option(help="Keep the output of Spark's JVM in this file.")
    ] = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
) -> None:
    """Keep the copies up to date until SIGTERM or Ctrl-C.

    The first signal flushes what was seen and ends with 0; a second one ends at once and loses
    nothing.

    LOGMIRROR_METRICS_PORT (9090; 0: none) answers /metrics, /livez, /readyz and /status.json.
    LOGMIRROR_HEARTBEAT_SECS (30; 0: none) is between two heartbeats, which the level debug shows.
    """
    from logmirror import wiring  # noqa: PLC0415  # loads Spark, which `validate` can do without

    log_to_stderr(log_level, log_format)
    knobs = read_knobs(os.environ)
    settings = _load(config)
    wiring.run(settings, until_now=until_now, master=master, spark_log=spark_log, knobs=knobs)


@app.command()
def status(
    config: ConfigOption, *, mirror: MirrorOption = None, output: FormatOption = "table"
) -> None:
    """Show source end, position and lag of every flow. Exit code 1 if one cannot be read."""
    from logmirror import inspection  # noqa: PLC0415  # only such commands need it

    rows = inspection.status(_load(config, mirror))
    if output == "json":
        typer.echo(json.dumps([_status_json(row) for row in rows], indent=2))
    else:
        _print_status(rows)
    if any(row.error for row in rows):
        raise typer.Exit(1)


@app.command()
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
    from logmirror import proof  # noqa: PLC0415  # it loads kernels, which takes a second

    settings = _load(config, mirror)
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
        reports = proof.verify(
            settings,
            deep=deep,
            against_source=against_source,
            on_object=lambda: progress.advance(task),
        )
    if output == "json":
        typer.echo(json.dumps([report_json(report) for report in reports], indent=2))
    else:
        print_reports(
            _stdout(), reports, deep=deep or against_source, against_source=against_source
        )
    if any(report.problems for report in reports):
        raise typer.Exit(65)


@app.command()
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
    from logmirror import compaction  # noqa: PLC0415  # only this command needs it

    rows = compaction.compact_archives(
        _load(config, mirror),
        target_bytes=target_bytes,
        min_objects=min_objects,
        dry_run=dry_run,
    )
    if output == "json":
        typer.echo(json.dumps([row_json(row) for row in rows], indent=2))
    else:
        _stdout().print(rows_table(rows))
    for row in rows:
        if row.error:
            raise typer.Exit(row.error.exit_code)


@app.command()
def broker(  # one parameter for each option
    *,
    log_dir: Annotated[
        Path, typer.Option(help="Where topics live; made if it is not there.", show_default=False)
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 lets the system choose.")
    ] = "127.0.0.1:9092",
    auto_create: Annotated[
        bool, typer.Option(help="Whether a question about an unknown topic creates it.")
    ] = True,
    partitions: Annotated[
        int, typer.Option(min=1, help="Of topics whose creator does not say how many.")
    ] = 1,
    log_level: LogLevelOption = "info",
) -> None:
    """Run the embedded Kafka-compatible broker until SIGTERM or Ctrl-C.

    An acknowledged record is on disk. Prints the address once it listens.
    """
    from logmirror.broker.options import BrokerOptions  # noqa: PLC0415  # only this command needs it
    from logmirror.broker.server import serve  # noqa: PLC0415  # only this command needs it

    log_to_stderr(log_level)
    host, port = _host_and_port(listen)
    options = BrokerOptions(
        log_dir=log_dir,
        host=host,
        port=port,
        auto_create_topics=auto_create,
        default_partitions=partitions,
    )
    serve(options, on_ready=lambda host, port: typer.echo(f"listening on {host}:{port}"))


@app.command()
def demo(
    *,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to leave everything, instead of a new temporary folder."
        ),
    ] = None,
) -> None:
    """Watch the main job here in about a minute: real records, kill -9, a verdict.

    A broker, a producer and Spark run on this machine until the demo ends. Exit code 0 only if each
    copy is exact.
    """
    from logmirror.demo.story import run_demo  # noqa: PLC0415  # its packages are optional

    try:
        run_demo(keep)
    except KeyboardInterrupt:
        typer.echo("interrupted; all that the demo started has been stopped", err=True)
        raise typer.Exit(130) from None


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # TCP's range
        raise UsageError("not an address to listen on", hint="write HOST:PORT", listen=text)
    return host.strip("[]"), int(port)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration."""
    typer.echo(json.dumps(json_schema(), indent=2))


policy = typer.Typer(no_args_is_help=True, help="What a configuration must be allowed.")
app.add_typer(policy, name="policy")


@policy.command("print")
def policy_print(
    config: ConfigOption,
    *,
    compact: Annotated[
        bool, typer.Option("--compact", help="For `logmirror compact`, which deletes objects.")
    ] = False,
) -> None:
    """Print the least IAM policies for the buckets of a configuration."""
    from logmirror import wiring  # noqa: PLC0415  # only such commands need it

    found = wiring.s3_policies(_load(config), compacts=compact)
    if not found:
        raise UsageError("the configuration has no destination of type s3")
    typer.echo(json.dumps(found, indent=2))


def _load(path: Path, only: list[str] | None = None) -> Settings:
    settings = load(path, check_properties=_property_problems)
    if not only:
        return settings
    known = [mirror.name for mirror in settings.mirrors]
    for name in only:
        if name not in known:
            raise UsageError("there is no such mirror in the file", mirror=name, mirrors=known)
    chosen = tuple(mirror for mirror in settings.mirrors if mirror.name in only)
    return dataclasses.replace(settings, mirrors=chosen)


def _property_problems(properties: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = property_problems("localhost:9092", properties)
    return [(problem.name, problem.message, problem.suggestion) for problem in found]


# -- what people and programs see ------------------------------------------------------------------


def _print_error(error: LogmirrorError) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if isinstance(error, ConfigError):
        console.print(f"error: {error.message}: {error.facts.get('file')}", markup=False)
        for problem in error.problems:
            console.print(f"  {problem}", markup=False)
        return
    console.print(f"error ({error.kind}): {error.message}", markup=False)
    for name, value in error.facts.items():
        console.print(f"  {name}: {value}", markup=False)
    if error.hint:
        console.print(f"  hint: {error.hint}", markup=False)


def _status_json(row: StatusRow) -> dict[str, object]:
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


def _print_checks(rows: list[CheckRow]) -> None:
    table = _table("MIRROR", "DESTINATION", "", "WHAT", "FOUND", "TO DO")
    for row in rows:
        cells = (row.mirror, row.destination or "(source)", row.severity, row.what)
        table.add_row(*cells, escape(row.found), escape(row.advice))
    _stdout().print(table)


def _print_status(rows: list[StatusRow]) -> None:
    table = _table("MIRROR", "DESTINATION", "TOPIC", "PARTITION")
    for title in ("SOURCE END", "POSITION", "LAG"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("REMARK", overflow="fold")
    for row in rows:
        flow = row.flow
        partition = "all" if flow.partition < 0 else str(flow.partition)
        numbers = ["-" if n is None else str(n) for n in (row.source_end, row.position, row.lag)]
        table.add_row(
            flow.mirror,
            flow.destination,
            flow.topic,
            partition,
            *numbers,
            escape(str(row.error)) if row.error else _fencing(row),
        )
    _stdout().print(table)


def _fencing(row: StatusRow) -> str:
    return "degraded fencing" if row.is_fencing_degraded else ""


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _stdout() -> Console:
    """A console that breaks lines only where a person's terminal ends, never for a program."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=False)
