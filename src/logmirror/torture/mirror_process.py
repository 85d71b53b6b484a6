"""`logmirror run` without Spark, as a process: slices run in the driver's own process.

    python -m logmirror.torture.mirror_process CONFIG [--until-now]

Configuration, loop, executor, stores, logs and exit codes are the product's. The process starts in
one to two seconds, so a trial can kill many of them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from logmirror.app import run
from logmirror.app.specs import mirror_specs
from logmirror.config.settings import load
from logmirror.engine import executor
from logmirror.errors import LogmirrorError
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.mirror.stop_channel import StopChannel
from logmirror.monitoring.logs import log_to_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.ports import Job, SliceResult, Work


class InlineRunner:
    """A `Runner` in the driver's process, whose slots are threads.

    Args:
        more_slots: How many slots it has in addition to one.
    """

    def __init__(self, more_slots: int = 0) -> None:
        self.slots = 1 + more_slots
        self._stop_channel = StopChannel()

    def run(self, works: Sequence[Work], slots: int, job: Job) -> list[SliceResult]:
        """See `Runner.run`."""
        del slots  # the calling thread is the slot
        with self._stop_channel.job(job) as address:
            return list(executor.execute(works, address))

    def end_follow_windows(self, job: Job | None = None) -> None:
        """See `Runner.end_follow_windows`."""
        self._stop_channel.end(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_channel.close()


def main() -> NoReturn:
    """Run, and exit with the codes of `logmirror run`."""
    log_to_stderr("info", "json")
    try:
        with contextlib.ExitStack() as stack:
            specs, until_now = mirror_specs(load(Path(sys.argv[1]))), "--until-now" in sys.argv
            seats = seat_count(lanes_of(specs, shares_reads=until_now))
            runner = stack.enter_context(InlineRunner(seats - 1))
            service = run.build_service(specs, runner, stack, on_fatal="isolate")
            signal.signal(signal.SIGTERM, lambda *_: service.stop())
            service.run(until_now=until_now)
    except LogmirrorError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the torture reads it from the log
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
