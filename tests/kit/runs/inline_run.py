"""`logmirror` with its slices executed in its own process: no Spark, no Java, no workers.

Everything else is the product: command line, loop, executor, exit codes, signals. It starts within
milliseconds (`kit.runs.inline_server`), so a test can kill many of them.

    python -m kit.runs.inline_run run --until-now -c CONFIG      as a program
    InlineRun(config), run_now(config)                      the same, forked
    copy_now(settings)                                      in the process of the test
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import psutil

from kit.runs.commands import Run, logmirror, run_forked
from kit.runs.inline_server import ForkedProcess
from logmirror.app.run import build_service
from logmirror.app.specs import mirror_specs
from logmirror.cli import commands
from logmirror.cli import main as cli
from logmirror.engine import spark
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.torture import mirror_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from kit.servers.machine import Process
    from logmirror.config.settings import Settings

commands.build()  # loaded here, all commands are loaded in the forks
_KIT_PARENT: Final = str(Path(__file__).parents[2])


def mirror_to_cluster(
    topic: str, source: str, destination: str, /, *, name: str = "copy", **more: object
) -> dict[str, object]:
    """One mirror of all partitions of a topic into the same topic of another cluster.

    Args:
        topic: The topic at both, unless `more` has another one.
        source: Its bootstrap servers.
        destination: Its bootstrap servers.
        name: The name of the mirror and of the destination.
        more: Keys of the destination, with `_` for `-`.
    """
    written = {"name": name, "type": "kafka", "bootstrap-servers": destination}
    return {
        "name": name,
        "source": {"bootstrap-servers": source},
        "topic": topic,
        "partitions": "all",
        "destinations": [written | {key.replace("_", "-"): v for key, v in more.items()}],
    }


def config_text(*mirrors: Mapping[str, object]) -> str:
    """A configuration of these mirrors; JSON, which YAML contains."""
    return json.dumps({"mirrors": mirrors}, indent=1)


class InlineRunner(mirror_process.InlineRunner):
    """The product's runner without Spark, in place of the one with Spark."""

    def __init__(self, *, more_slots: int = 0, **_: object) -> None:
        """Accept the arguments of Spark's runner and ignore the others."""
        super().__init__(more_slots)


def copy_now(settings: Settings) -> None:
    """Copy up to the current end of the source, in this process; see `logmirror run --until-now`.

    Raises:
        LogmirrorError: A flow must not continue.
    """
    with contextlib.ExitStack() as stack:
        specs = mirror_specs(settings)
        seats = seat_count(lanes_of(specs, shares_reads=True))
        runner = stack.enter_context(InlineRunner(more_slots=seats - 1))
        build_service(specs, runner, stack).run(until_now=True)


_PROGRAM: Final = (sys.executable, "-m", "kit.runs.inline_run")


def run_now(
    config: Path, *, environment: Mapping[str, str] | None = None, as_plain_user: bool = False
) -> subprocess.CompletedProcess[str]:
    """`logmirror run --until-now` to its end; see `kit.runs.commands.logmirror`."""
    arguments = ("run", "--until-now", "-c", str(config))
    if environment or as_plain_user:  # which only a new program takes over
        return logmirror(
            *arguments,
            environment={"PYTHONPATH": python_path(), **(environment or {})},
            as_plain_user=as_plain_user,
            program=_PROGRAM,
        )
    return run_forked(*arguments, timeout_s=240)


def python_path() -> str:
    """PYTHONPATH of programs that load the kit."""
    return os.pathsep.join(filter(None, (_KIT_PARENT, os.environ.get("PYTHONPATH"))))


class InlineRun(Run):
    """`logmirror run` in the background, as one process."""

    program = _PROGRAM

    def __init__(
        self,
        config: Path,
        *arguments: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = {"PYTHONPATH": python_path(), **(environment or {})}
        super().__init__(config, *arguments, folder=folder, environment=environment)

    def _start(self, arguments: list[str], environment: dict[str, str]) -> Process | ForkedProcess:
        if self.program is not _PROGRAM:
            return super()._start(arguments, environment)
        return ForkedProcess(arguments, stdout=self.log, stderr=self.log, environment=environment)

    def processes(self) -> list[psutil.Process]:
        """The one process, if it is alive."""
        if not self.alive:
            return []
        try:
            return [psutil.Process(self.pid)]
        except psutil.NoSuchProcess:  # it has just ended
            return []


def main() -> NoReturn:
    """Run `logmirror` without Spark."""
    spark.SparkRunner = InlineRunner  # type: ignore[misc,assignment]  # the one thing replaced
    cli.main()


if __name__ == "__main__":
    main()
