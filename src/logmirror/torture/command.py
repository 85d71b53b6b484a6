"""`logmirror torture`: arguments in, a verdict out; exit code 1 if anything was found."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from logmirror.clock import SYSTEM_CLOCK, new_nonce
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.simulation.faults import Format
    from logmirror.torture.real import Flow
    from logmirror.torture.verdict import Verdict

_SEEDS: Final = 300
_TRIALS: Final = 10
_MAX_TIME_MS: Final = 500
"""Of objects, whatever a configuration says: a torture does not wait for a minute."""


def torture(  # noqa: PLR0913  # one parameter for each option
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            help="Take formats, kinds of destinations and limits from this file. What it names is "
            "never touched.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        str, typer.Option(help="`all`, or some: `kill,power`. An unknown one lists them.")
    ] = "all",
    kills: Annotated[
        int, typer.Option(min=0, help="Trials with real processes; 0: simulate only.")
    ] = _TRIALS,
    seeds: Annotated[
        int, typer.Option(min=0, help="Simulated runs; 0: real processes only.")
    ] = _SEEDS,
    seed: Annotated[
        int | None, typer.Option(help="The first seed, to do it again.", show_default=False)
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="For people, or for programs.")
    ] = "text",
) -> None:
    """Torture the product on this machine, and see that faults lose nothing.

    First the product's own code in a simulated world, many seeds; then real processes on loopback,
    without Spark, killed, paused and cut off. Clusters and folders of yours are not touched. Exit
    code 1 if a record was lost, doubled, moved or changed.
    """
    from logmirror.torture.verdict import Verdict  # noqa: PLC0415  # other commands do without it

    first = int(new_nonce()[:6], 16) if seed is None else seed
    again = f"logmirror torture --faults {faults}" + (f" -c {config}" if config else "")

    def say(text: str) -> None:
        if output == "text":
            typer.echo(text, err=True)

    asked = _Asked(first, _chosen(faults), _flows(config), again, say)
    verdict = Verdict(seed=first)
    if seeds:
        _simulate(verdict, asked, seeds)
    if kills and verdict.is_clean:
        _torture(verdict, asked, kills)
    if not verdict.seeds and verdict.real is None:
        raise UsageError(
            "nothing was tried",
            hint="what --faults and -c leave is for the part that --seeds or --kills turned off",
        )
    if output == "json":
        typer.echo(json.dumps(verdict.to_json(), indent=2))
    else:
        for line in verdict.lines():
            typer.echo(line)
    if not verdict.is_clean:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Asked:
    """What the command was given."""

    seed: int
    faults: list[str] | None
    """None: all."""

    flows: Sequence[Flow]
    again: str
    """The command that does it again, without its numbers."""

    say: Callable[[str], None]


def _chosen(text: str) -> list[str] | None:
    """The names of `--faults`; None: all."""
    from logmirror.simulation.faults import FAULTS  # noqa: PLC0415  # see `torture`
    from logmirror.torture.real import REAL_FAULTS  # noqa: PLC0415  # see `torture`

    if text == "all":
        return None
    known = {fault.name: fault.meaning for fault in FAULTS}
    for name, meaning in REAL_FAULTS.items():
        known.setdefault(name, meaning)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            "there is no such fault",
            hint="; ".join(f"{name}: {meaning}" for name, meaning in known.items()),
            faults=unknown,
        )
    return names


def _flows(config: Path | None) -> Sequence[Flow]:
    """What is copied: as a configuration says, or a choice of everything."""
    from logmirror.torture.real import FLOWS, Flow  # noqa: PLC0415  # see `torture`

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


def _simulate(verdict: Verdict, asked: _Asked, seeds: int) -> None:
    from logmirror.simulation.faults import BY_NAME  # noqa: PLC0415  # see `torture`
    from logmirror.simulation.matrix import random_plan  # noqa: PLC0415  # see `torture`
    from logmirror.simulation.simulate import simulate  # noqa: PLC0415  # see `torture`

    names = None if asked.faults is None else [name for name in asked.faults if name in BY_NAME]
    if names == []:
        asked.say("simulation: none of these faults can be simulated")
        return
    kinds = [(flow.destination, flow.form) for flow in asked.flows]
    asked.say(f"simulation: {seeds} seeds from {asked.seed} on")
    began_ms = SYSTEM_CLOCK.monotonic_ms()
    for number in range(asked.seed, asked.seed + seeds):
        result = simulate(random_plan(number, names, kinds))
        verdict.simulated(result, f"{asked.again} --seed {number} --seeds 1 --kills 0")
        if not verdict.is_clean:
            break
    verdict.seconds = (SYSTEM_CLOCK.monotonic_ms() - began_ms) / 1000


def _torture(verdict: Verdict, asked: _Asked, trials: int) -> None:
    from logmirror.torture.real import (  # noqa: PLC0415  # see `torture`
        REAL_FAULTS,
        SIMULATED_ONLY,
        RealTorture,
    )

    names = [name for name in REAL_FAULTS if asked.faults is None or name in asked.faults]
    if not names:
        asked.say("real processes: these faults are simulated only")
        return
    flows = [flow for flow in asked.flows if flow.form not in SIMULATED_ONLY]
    for form in sorted({flow.form for flow in asked.flows} & SIMULATED_ONLY.keys()):
        asked.say(SIMULATED_ONLY[form])
    if not flows:
        return
    asked.say(
        "real processes: brokers, a bucket and copiers on loopback; slices are carried out in the "
        "copier's process, without Spark. A loss of power is simulated only."
    )
    with tempfile.TemporaryDirectory(prefix="logmirror-torture-") as folder:
        result = RealTorture(
            Path(folder),
            flows=flows,
            faults=names,
            trials=trials,
            seed=asked.seed,
            say=asked.say,
        ).run()
    verdict.tortured(result, f"{asked.again} --seed {asked.seed} --seeds 0 --kills {trials}")
