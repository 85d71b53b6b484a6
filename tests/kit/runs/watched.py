"""The driver loop in a thread of this process, with its metrics, log and status."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kit.judges.scrape import samples
from kit.runs.inline_run import InlineRunner
from logmirror.app import run as app
from logmirror.app.specs import mirror_specs
from logmirror.config.settings import load
from logmirror.errors import LogmirrorError
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.mirror.ports import KafkaSpec
from logmirror.monitoring.http import serve
from logmirror.monitoring.metrics import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.mirror.ports import DestinationSpec
    from logmirror.mirror.source_views import MirrorSpec


@dataclass
class Watched:
    """The records of a run, and its result."""

    recorder: Recorder
    errors: list[LogmirrorError] = field(default_factory=list)
    """The one that it ended with, if it did."""

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of one metric by their labels."""
        return {labels: n for (of, labels), n in samples(self.recorder).items() if of == name}


@contextlib.contextmanager
def running(
    config: Path, *, heartbeat_ms: int = 0, port: int = 0, retry_budget_ms: int = 60_000
) -> Iterator[Watched]:
    """Run the mirrors of a configuration without Spark until the block ends, as SIGTERM ends it.

    Args:
        config: The configuration file.
        heartbeat_ms: See `LOGMIRROR_HEARTBEAT_SECS`.
        port: See `LOGMIRROR_METRICS_PORT`.
        retry_budget_ms: Time limit for a request to a cluster and its retries.
    """
    settings = load(config)
    specs = [_with_budget(spec, retry_budget_ms) for spec in mirror_specs(settings)]
    watched = Watched(Recorder())
    observer = app.make_observer(settings, watched.recorder, heartbeat_ms=heartbeat_ms)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serve(port, watched.recorder, observer.board))
        runner = stack.enter_context(
            InlineRunner(more_slots=seat_count(lanes_of(specs, shares_reads=False)) - 1)
        )
        service = app.build_service(specs, runner, stack, observer=observer)

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


def _with_budget(spec: MirrorSpec, budget_ms: int) -> MirrorSpec:
    def limited(destination: DestinationSpec) -> DestinationSpec:
        if not isinstance(destination, KafkaSpec):
            return destination
        cluster = replace(destination.cluster, retry_budget_ms=budget_ms)
        return replace(destination, cluster=cluster)

    destinations = tuple((name, limited(one)) for name, one in spec.destinations)
    source = replace(spec.source, retry_budget_ms=budget_ms)
    return replace(spec, source=source, destinations=destinations)
