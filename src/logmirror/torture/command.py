"""`logmirror torture`: the command. Exit code 1 if an anomaly was found."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from logmirror.clock import SYSTEM_CLOCK, new_nonce
from logmirror.errors import UsageError
from logmirror.stopping import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.simulation.faults import Format
    from logmirror.torture.testbed import Flow
    from logmirror.torture.verdict import Verdict

_SEEDS: Final = 300
_TRIALS: Final = 10
_MAX_TIME_MS: Final = 500
"""Upper bound for `flush.max-time-ms` of a configuration, so that trials stay short."""


def torture(  # noqa: PLR0913  # one parameter for each option
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            help="Use the formats, destination types and flush limits of this file. Brokers and "
            "buckets are local; nothing that the file names is contacted.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        str,
        typer.Option(help="`all`, or a list such as `kill,power`. Any other name lists them."),
    ] = "all",
    kills: Annotated[
        int, typer.Option(min=0, help="Trials with real processes. 0: simulation only.")
    ] = _TRIALS,
    seeds: Annotated[
        int, typer.Option(min=0, help="Simulated runs. 0: real processes only.")
    ] = _SEEDS,
    seed: Annotated[
        int | None, typer.Option(help="First seed. Default: random.", show_default=False)
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Output format.")
    ] = "text",
) -> None:
    """Inject faults on this machine and check that no record is lost.

    The first part simulates logmirror's code with virtual time, one run per seed. The second part
    starts brokers and mirrors as processes on loopback, without Spark, and kills, pauses and
    disconnects them. Your clusters and folders are not touched. Exit code 1 if a record was lost,
    duplicated, reordered or changed.
    """
    from logmirror.torture.verdict import Verdict  # noqa: PLC0415  # other commands do not need it

    first = int(new_nonce()[:6], 16) if seed is None else seed
    command = f"logmirror torture --faults {faults}" + (f" -c {config}" if config else "")

    def report(text: str) -> None:
        if output == "text":
            typer.echo(text, err=True)

    request = _Request(first, _selected(faults), _flows(config), command, report)
    verdict = Verdict(seed=first)
    try:
        with interrupts():
            if seeds:
                _simulate(verdict, request, seeds)
            if kills and verdict.is_clean:
                _run_trials(verdict, request, kills)
    except KeyboardInterrupt:
        typer.echo("interrupted; all processes of the torture were stopped", err=True)
        raise typer.Exit(130) from None
    if not verdict.seeds and verdict.real is None:
        raise UsageError(
            "nothing to run",
            hint="the faults and flows that --faults and -c select need the part that --seeds 0 or "
            "--kills 0 disables",
        )
    if output == "json":
        typer.echo(json.dumps(verdict.to_json(), indent=2))
    else:
        for line in verdict.lines():
            typer.echo(line)
    if not verdict.is_clean:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Request:
    """The options of the command."""

    seed: int
    faults: list[str] | None
    """Names of faults; None: all."""

    flows: Sequence[Flow]
    command: str
    """The command that repeats the run, without its seed and counts."""

    report: Callable[[str], None]
    """Prints one line of progress."""


def _selected(text: str) -> list[str] | None:
    """Return the names in `--faults`; None: all."""
    from logmirror.simulation.faults import FAULTS  # noqa: PLC0415  # see `torture`
    from logmirror.torture.trials import TRIALS  # noqa: PLC0415  # see `torture`

    if text == "all":
        return None
    known = {fault.name: fault.meaning for fault in FAULTS}
    for name, trial in TRIALS.items():
        known.setdefault(name, trial.meaning)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            "unknown fault",
            hint="; ".join(f"{name}: {meaning}" for name, meaning in known.items()),
            faults=unknown,
        )
    return names


def _flows(config: Path | None) -> Sequence[Flow]:
    """Return the flows of a configuration, or one flow per format and destination type."""
    from logmirror.torture.real import FLOWS  # noqa: PLC0415  # see `torture`
    from logmirror.torture.testbed import Flow  # noqa: PLC0415  # see `torture`

    if config is None:
        return FLOWS
    from logmirror.config.settings import KafkaDestination, S3Destination, load  # noqa: PLC0415  # the same

    found: dict[str, Flow] = {}
    for mirror in load(config, needs_variables=False).mirrors:
        for destination in mirror.destinations if mirror.enabled else ():
            if isinstance(destination, KafkaDestination):
                is_translated = destination.offsets == "translate"
                flow = Flow("Kafka", "translate" if is_translated else "-")
            elif mirror.flush is not None:
                limits = (
                    ("max-time-ms", min(mirror.flush.max_time_ms, _MAX_TIME_MS)),
                    ("max-bytes", mirror.flush.max_bytes),
                    ("max-offsets", mirror.flush.max_offsets),
                )
                kind: Literal["S3", "files"] = "files"
                if isinstance(destination, S3Destination):
                    kind = "S3"
                form = "snapshots" if mirror.compaction else _form(mirror.format)
                flow = Flow(kind, form, limits)
            found[flow.name] = flow
    return list(found.values())


def _form(written: str) -> Format:
    forms: dict[str, Format] = {
        "native": "native",
        "parquet": "parquet",
        "ndjson": "ndjson",
    }
    return forms[written]


def _simulate(verdict: Verdict, request: _Request, seeds: int) -> None:
    from logmirror.simulation.faults import BY_NAME  # noqa: PLC0415  # see `torture`
    from logmirror.simulation.matrix import random_plan  # noqa: PLC0415  # see `torture`
    from logmirror.simulation.simulate import simulate  # noqa: PLC0415  # see `torture`

    names = None if request.faults is None else [name for name in request.faults if name in BY_NAME]
    if names == []:
        request.report("simulation: none of these faults can be simulated")
        return
    kinds = [(flow.destination, flow.form) for flow in request.flows]
    request.report(f"simulation: {seeds} seeds, first seed {request.seed}")
    started_ms = SYSTEM_CLOCK.monotonic_ms()
    for number in range(request.seed, request.seed + seeds):
        result = simulate(random_plan(number, names, kinds))
        verdict.simulated(result, f"{request.command} --seed {number} --seeds 1 --kills 0")
        if not verdict.is_clean:
            break
    verdict.seconds = (SYSTEM_CLOCK.monotonic_ms() - started_ms) / 1000


def _run_trials(verdict: Verdict, request: _Request, trials: int) -> None:
    from logmirror.torture.real import SIMULATED_ONLY, run_trials  # noqa: PLC0415  # see `torture`
    from logmirror.torture.trials import TRIALS  # noqa: PLC0415  # see `torture`

    names = [name for name in TRIALS if request.faults is None or name in request.faults]
    if not names:
        request.report("real processes: these faults are simulated only")
        return
    flows = [flow for flow in request.flows if flow.form not in SIMULATED_ONLY]
    for form in sorted({flow.form for flow in request.flows} & SIMULATED_ONLY.keys()):
        request.report(SIMULATED_ONLY[form])
    if not flows:
        return
    request.report(
        "real processes: brokers, an S3 server and mirrors on loopback. Slices run in the mirror's "
        "process, without Spark. Power loss is simulated only."
    )
    with tempfile.TemporaryDirectory(prefix="logmirror-torture-") as folder:
        result = run_trials(
            Path(folder),
            flows=flows,
            faults=names,
            trials=trials,
            seed=request.seed,
            report=request.report,
        )
    verdict.tortured(result, f"{request.command} --seed {request.seed} --seeds 0 --kills {trials}")
