"""`logmirror run`: the driver's loop, on Spark, with its metrics endpoint and its end.

Loads no kernels: they belong to the executors (`engine.executor`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Literal

from logmirror.app.components import Clients, destinations
from logmirror.app.group_service import groups_beside, run_groups
from logmirror.app.specs import mirror_specs
from logmirror.archive.naming import is_object_of
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.cluster.exposures import exposures
from logmirror.errors import UnavailableError, UsageError
from logmirror.mirror.lane import lanes_of, seat_count
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.service import LanePorts, Service
from logmirror.mirror.source_views import check_partitions
from logmirror.monitoring.logs import reporting
from logmirror.monitoring.metrics import Recorder
from logmirror.stopping import StoppedError, StopRequest, handle_signals
from logmirror.stores.opening import Leftovers, begin_writing, open_store
from logmirror.to_archive.destination import START_LISTING_MS
from logmirror.to_archive.memory import SLOT_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.environment import ProcessEnvironment
    from logmirror.config.settings import Settings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.ports import Runner
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import OnFatal
    from logmirror.reports import Event, RunProgress
    from logmirror.stores.base import BlobStore

_LOG = logging.getLogger("logmirror.mirror")

FIRST_MS: Final = 1_500
"""How long the start waits for each source before Spark starts."""

BRIEF_MS: Final = 3_000
"""Limit for requests that the loop can do without: one response, one connection, all attempts."""


def run(  # noqa: PLR0913  # one parameter for each thing a caller may set
    settings: Settings,
    *,
    until_now: bool,
    only: Literal["groups"] | None = None,
    master: str | None = None,
    spark_log: Path | None = None,
    environment: ProcessEnvironment,
    stop: threading.Event | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
    handles_signals: bool = False,
) -> None:
    """Run the mirrors of a configuration; see `Service.run` and `logmirror.run`.

    With `handles_signals`, the first SIGTERM or SIGINT flushes what was seen and returns, before
    replication began at once. The second ends the process; see `stopping`.
    """
    request = StopRequest(stop)
    with handle_signals(request) if handles_signals else contextlib.nullcontext():
        if only == "groups":
            run_groups(settings, until_now=until_now, environment=environment, request=request)
            return
        try:
            _run(
                settings,
                until_now=until_now,
                master=master or settings.spark.master,
                spark_log=spark_log,
                environment=environment,
                on_event=on_event,
                on_progress=on_progress,
                request=request,
            )
        except StoppedError:
            _LOG.info("stopped before replication began")


def _run(  # noqa: PLR0913  # what `run` was given
    settings: Settings,
    *,
    until_now: bool,
    master: str,
    spark_log: Path | None,
    environment: ProcessEnvironment,
    on_event: Callable[[Event], None] | None,
    on_progress: Callable[[RunProgress], None] | None,
    request: StopRequest,
) -> None:
    from logmirror.engine.spark import SparkRunner  # noqa: PLC0415  # only this command needs Spark
    from logmirror.monitoring.exposition import Shown  # noqa: PLC0415  # only this command serves
    from logmirror.monitoring.http import serve  # noqa: PLC0415  # as above

    specs = mirror_specs(settings)
    if not settings.mirrors:
        raise UsageError("the configuration has no mirrors")
    if not specs:
        raise UsageError(
            f"all {len(settings.mirrors)} mirror(s) are disabled",
            hint="set `enabled: true` on one of them",
        )
    if settings.on_fatal == "exit":
        request.unless_stopped(lambda: _check_sources(specs))
    budget_bytes = settings.memory_budget_bytes
    recorder = Recorder()
    observer = make_observer(
        settings, recorder, heartbeat_ms=environment.heartbeat_ms, on_progress=on_progress
    )
    shown = Shown(
        partitions=environment.metrics_partitions,
        mirror_v3_names=settings.metrics_prefix == "mirror_v3",
    )
    with (
        _reporting_events(on_event),
        serve(
            environment.metrics_port,
            recorder,
            observer.board,
            shown,
            host=environment.metrics_host,
            is_required=environment.metrics_port_is_set,
        ),
        contextlib.ExitStack() as stack,
        SparkRunner(
            master=master,
            properties=settings.spark.properties,
            execute="logmirror.engine.executor:execute",
            warm_up="logmirror.engine.executor:warm_up",
            more_slots=seat_count(lanes_of(specs, shares_reads=until_now)) - 1,
            slots_max=budget_bytes // SLOT_BYTES_MIN if budget_bytes else None,
            log=spark_log,
            allow_plain=settings.spark.allow_plain,
            stop=request,
        ) as runner,
    ):
        log_exposures(specs)
        service = build_service(
            specs,
            runner,
            stack,
            on_fatal=settings.on_fatal,
            memory_bytes=budget_bytes,
            observer=observer,
        )
        groups = groups_beside(settings, recorder, request, once=until_now)
        with request.on_stop(service.stop), groups:
            service.run(until_now=until_now)


def log_exposures(specs: list[MirrorSpec]) -> None:
    """Log a WARNING for each setting of a cluster that exposes its connections."""
    clusters = {spec.source: None for spec in specs}
    written = [written for spec in specs for _, written in spec.destinations]
    clusters |= {to.cluster: None for to in written if isinstance(to, KafkaSpec)}
    for cluster in clusters:
        servers = ",".join(f"{host}:{port}" for host, port in cluster.bootstrap_servers)
        for name, message, suggestion in exposures(cluster):
            facts = {"servers": servers, "property": name, "reason": message, "hint": suggestion}
            _LOG.warning("insecure connection", extra={"facts": facts})


def make_observer(
    settings: Settings,
    recorder: Recorder,
    *,
    heartbeat_ms: int = 0,
    on_progress: Callable[[RunProgress], None] | None = None,
) -> Observer:
    """Return the observer of the enabled mirrors; see `Observer`."""
    silent: set[tuple[str, str]] = set()
    for mirror in settings.mirrors:
        without = {(mirror.name, d.name) for d in mirror.destinations if not d.affects_readiness}
        silent |= without
        if len(without) == len(mirror.destinations):
            silent.add((mirror.name, ""))
    names = [mirror.name for mirror in settings.mirrors if mirror.enabled]
    return Observer(
        names,
        recorder,
        SYSTEM_CLOCK,
        heartbeat_ms=heartbeat_ms,
        silent=silent,
        on_progress=on_progress,
    )


def _check_sources(specs: list[MirrorSpec]) -> None:
    """Raise for a missing topic or partition before Spark starts, which takes seconds.

    A cluster that does not respond within `FIRST_MS` is not an error yet: the lanes retry it.
    """
    by_source: dict[ConnectionSettings, list[MirrorSpec]] = {}
    for spec in specs:
        by_source.setdefault(spec.source, []).append(spec)
    with ThreadPoolExecutor(min(len(by_source), 32)) as pool:
        for _ in pool.map(_check_source, by_source, by_source.values()):
            pass


def _check_source(source: ConnectionSettings, specs: list[MirrorSpec]) -> None:
    clients = Clients(FIRST_MS, limits_attempts=True)
    try:
        for spec in specs:
            check_partitions(spec, clients(source).topic(spec.topic))
    except UnavailableError as error:
        facts = {**error.facts, "mirrors": [spec.name for spec in specs]}
        _LOG.warning("source: %s", error.message, extra={"facts": facts})
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
    stores = _Stores(specs, writer_id, stack)

    def ports() -> LanePorts:
        clients, brief = Clients(), Clients(BRIEF_MS, limits_attempts=True)
        stack.callback(clients.close)
        stack.callback(brief.close)
        return LanePorts(
            client=clients,
            brief_client=brief,
            destination=destinations(
                clients,
                functools.cache(stores.open),
                writer_id,
                observer,
                listing_ms=START_LISTING_MS,
            ),
        )

    return Service(
        specs,
        ports=ports,
        runner=runner,
        writer_id=writer_id,
        clock=SYSTEM_CLOCK,
        on_fatal=on_fatal,
        memory_bytes=memory_bytes,
        observer=observer,
    )


class _Stores:
    """The stores of a run, each checked and swept once. Threads wait only for their own store.

    Args:
        specs: The mirrors of the run.
        writer_id: The writer ID of the run.
        stack: Releases the writer's locks.
    """

    def __init__(
        self, specs: Sequence[MirrorSpec], writer_id: str, stack: contextlib.ExitStack
    ) -> None:
        self._specs, self._writer_id, self._stack = specs, writer_id, stack
        self._lock = threading.Lock()
        self._locks: dict[StoreLocation, threading.Lock] = {}
        self._begun: set[StoreLocation] = set()

    def open(self, location: StoreLocation) -> BlobStore:
        """Return a store for the calling thread alone; see `begin_writing`."""
        with self._lock:
            lock = self._locks.setdefault(location, threading.Lock())
        with lock:
            if location in self._begun:
                return open_store(location, self._writer_id)
            leftovers = _leftovers(self._specs, location)
            store = begin_writing(location, self._writer_id, self._stack, leftovers=leftovers)
            self._begun.add(location)
            return store


def _leftovers(specs: Sequence[MirrorSpec], location: StoreLocation) -> Leftovers:
    """Return which uploads an earlier run of these mirrors may have left in a bucket."""
    names = {
        name
        for spec in specs
        for name, to in spec.destinations
        if isinstance(to, ArchiveSpec) and to.location == location
    }
    return Leftovers(sorted(names), functools.partial(is_object_of, names))


@contextlib.contextmanager
def _reporting_events(on_event: Callable[[Event], None] | None) -> Iterator[None]:
    if on_event is None:
        yield
        return
    with reporting(on_event):
        yield
