"""The loop in a thread of this process, with all that it says of itself at hand."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kit.inline_run import InlineRunner
from kit.scrape import samples
from logmirror import wiring
from logmirror.clock import SYSTEM_CLOCK
from logmirror.config import load
from logmirror.errors import LogmirrorError
from logmirror.http_port import serve
from logmirror.metrics import Recorder
from logmirror.mirror.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Watched:
    """What a run records, and how it ended."""

    recorder: Recorder
    errors: list[LogmirrorError] = field(default_factory=list)
    """The one that it ended with, if it did."""

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of one metric by their labels."""
        return {labels: n for (of, labels), n in samples(self.recorder).items() if of == name}


@contextlib.contextmanager
def running(
    config: Path, *, heartbeat_ms: int = 0, port: int = 0, patience_ms: int = 60_000
) -> Iterator[Watched]:
    """Run the mirrors of a configuration without Spark until the block ends, as SIGTERM ends it.

    Args:
        config: The file.
        heartbeat_ms: See `LOGMIRROR_HEARTBEAT_SECS`.
        port: See `LOGMIRROR_METRICS_PORT`.
        patience_ms: How long a question to a source is tried again.
    """
    specs = [
        replace(spec, source=replace(spec.source, retry_budget_ms=patience_ms))
        for spec in wiring.mirror_specs(load(config))
    ]
    watched = Watched(Recorder())
    names = [spec.name for spec in specs]
    observer = Observer(names, watched.recorder, SYSTEM_CLOCK, heartbeat_ms=heartbeat_ms)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serve(port, watched.recorder, observer.outlook))
        runner = stack.enter_context(InlineRunner())
        service = wiring.build_service(specs, runner, stack, observer=observer)

        def run() -> None:
            try:
                service.run()
            except LogmirrorError as error:
                watched.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield watched
        finally:
            service.stop()
            thread.join()
