"""`logmirror run`: the driver's loop, on Spark, with its metrics endpoint and its end.

Loads no kernels: they belong to the executors (`engine.executor`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.app.components import COMMAND_BUDGET_MS, Clients, destinations
from logmirror.app.specs import mirror_specs
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.errors import UnavailableError, UsageError
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.service import Service
from logmirror.mirror.source_views import check_partitions
from logmirror.monitoring.logs import reporting
from logmirror.monitoring.metrics import Recorder
from logmirror.stores.opening import begin_writing
from logmirror.to_archive.memory import SLOT_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.environment import ProcessEnvironment
    from logmirror.config.settings import Settings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.ports import Runner
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import OnFatal
    from logmirror.reports import Event
    from logmirror.stores.base import BlobStore

BRIEF_MS: Final = 3_000
"""Limit for requests that the loop can do without: one response, one connection, all attempts."""

_STOP_POLL_S: Final = 0.2
"""How often the end of a run is noticed by the thread that waits for the caller's stop event."""


def run(  # noqa: PLR0913  # one parameter for each thing a caller may set
    settings: Settings,
    *,
    until_now: bool,
    master: str | None = None,
    spark_log: Path | None = None,
    environment: ProcessEnvironment,
    stop: threading.Event | None = None,
    on_event: Callable[[Event], None] | None = None,
    handles_signals: bool = False,
) -> None:
    """Run the mirrors of a configuration; see `Service.run` and `logmirror.run`.

    With `handles_signals`, the first SIGTERM or SIGINT flushes what was seen and returns. The
    second ends the process at once. Nothing is lost by that: no acknowledged state is in memory.
    """
    from logmirror.engine.spark import SparkRunner  # noqa: PLC0415  # only this command needs Spark
    from logmirror.monitoring.http import Shown, serve  # noqa: PLC0415  # only this command serves

    specs = mirror_specs(settings)
    if not specs:
        raise UsageError(
            f"all {len(settings.mirrors)} mirror(s) are disabled",
            hint="set `enabled: true` on one of them",
        )
    if not until_now:
        specs = with_shared_budget(specs)
    if settings.on_fatal == "exit":
        _check_sources(specs)
    budget_bytes = settings.memory_budget_bytes
    recorder = Recorder()
    observer = make_observer(settings, recorder, heartbeat_ms=environment.heartbeat_ms)
    shown = Shown(
        partitions=environment.metrics_partitions,
        mirror_v3_names=settings.metrics_prefix == "mirror_v3",
    )
    with (
        _reporting_events(on_event),
        serve(environment.metrics_port, recorder, observer.board, shown),
        contextlib.ExitStack() as stack,
        SparkRunner(
            master=master or settings.spark.master,
            properties=settings.spark.properties,
            execute="logmirror.engine.executor:execute",
            warm_up="logmirror.engine.executor:warm_up",
            slots_max=budget_bytes // SLOT_BYTES_MIN if budget_bytes else None,
            log=spark_log,
        ) as runner,
    ):
        service = build_service(
            specs,
            runner,
            stack,
            on_fatal=settings.on_fatal,
            memory_bytes=budget_bytes,
            observer=observer,
        )
        with _stopping(service, stop), _stop_on_signal(service, is_wanted=handles_signals):
            service.run(until_now=until_now)


def with_shared_budget(specs: list[MirrorSpec]) -> list[MirrorSpec]:
    """Limit the retries of each cluster where mirrors use several.

    While the loop waits for one cluster, no flow of another proceeds; the loop itself retries with
    back-off. A single cluster keeps its own retry budget. One attempt is never cut short: a broker
    may take `socket.timeout.ms` to respond.
    """
    clusters = {spec.source for spec in specs}
    written = [written for spec in specs for _, written in spec.destinations]
    clusters |= {to.cluster for to in written if isinstance(to, KafkaSpec)}
    return specs if len(clusters) == 1 else [_with_budget(spec) for spec in specs]


def _with_budget(spec: MirrorSpec) -> MirrorSpec:
    def brief(cluster: ConnectionSettings) -> ConnectionSettings:
        return replace(cluster, retry_budget_ms=min(cluster.retry_budget_ms, COMMAND_BUDGET_MS))

    destinations = tuple(
        (name, replace(to, cluster=brief(to.cluster)) if isinstance(to, KafkaSpec) else to)
        for name, to in spec.destinations
    )
    return replace(spec, source=brief(spec.source), destinations=destinations)


def make_observer(settings: Settings, recorder: Recorder, *, heartbeat_ms: int = 0) -> Observer:
    """Return the observer of the enabled mirrors; see `Observer`."""
    silent: set[tuple[str, str]] = set()
    for mirror in settings.mirrors:
        without = {(mirror.name, d.name) for d in mirror.destinations if not d.affects_readiness}
        silent |= without
        if len(without) == len(mirror.destinations):
            silent.add((mirror.name, ""))
    names = [mirror.name for mirror in settings.mirrors if mirror.enabled]
    return Observer(names, recorder, SYSTEM_CLOCK, heartbeat_ms=heartbeat_ms, silent=silent)


def _check_sources(specs: list[MirrorSpec]) -> None:
    """Raise for a missing topic or partition before Spark starts, which takes seconds.

    A cluster that does not respond is not an error yet: the loop retries it.
    """
    clients = Clients(COMMAND_BUDGET_MS)
    try:
        for spec in specs:
            with contextlib.suppress(UnavailableError):
                check_partitions(spec, clients(spec.source).topic(spec.topic))
    finally:
        clients.close()


def build_service(  # noqa: PLR0913  # what of the configuration the loop itself must know
    specs: list[MirrorSpec],
    runner: Runner,
    stack: contextlib.ExitStack,
    *,
    on_fatal: OnFatal = "exit",
    memory_bytes: int | None = None,
    observer: Observer | None = None,
) -> Service:
    """Return the loop over these mirrors; `stack` closes what it opens."""
    writer_id = new_writer_id()
    clients, brief = Clients(), Clients(BRIEF_MS, limits_attempts=True)
    stack.callback(clients.close)
    stack.callback(brief.close)

    @functools.cache
    def open_store(location: StoreLocation) -> BlobStore:
        return begin_writing(location, writer_id, stack)

    return Service(
        specs,
        client=clients,
        brief_client=brief,
        destination=destinations(clients, open_store, writer_id, observer),
        runner=runner,
        writer_id=writer_id,
        clock=SYSTEM_CLOCK,
        on_fatal=on_fatal,
        memory_bytes=memory_bytes,
        observer=observer,
    )


@contextlib.contextmanager
def _reporting_events(on_event: Callable[[Event], None] | None) -> Iterator[None]:
    if on_event is None:
        yield
        return
    with reporting(on_event):
        yield


@contextlib.contextmanager
def _stopping(service: Service, stop: threading.Event | None) -> Iterator[None]:
    """Stop the service when the caller's event is set, as long as the service runs."""
    if stop is None:
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if stop.wait(_STOP_POLL_S):
                service.stop()
                return

    watcher = threading.Thread(target=watch, name="stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


@contextlib.contextmanager
def _stop_on_signal(service: Service, *, is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return

    def handle(number: int, _frame: object) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        service.stop()

    asked: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
