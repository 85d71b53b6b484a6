"""`logmirror demo`: the main job on this machine, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep all files in this folder, instead of a new temporary one."
        ),
    ] = None,
) -> None:
    """Run the main job here in about a minute: real records, kill -9, verified replicas.

    Starts a broker, a producer and Spark on this machine, and stops them at the end. Exit code 0
    only if every replica is exact.
    """
    from logmirror.demo.scenario import run_demo  # noqa: PLC0415  # its packages are optional

    try:
        run_demo(keep)
    except KeyboardInterrupt:
        typer.echo("interrupted; all processes of the demo were stopped", err=True)
        raise typer.Exit(130) from None
