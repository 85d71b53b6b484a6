"""The composition root of the driver: settings to components.

Loads no kernels: that is the business of executors, whose composition root is
`engine.executor`.
Commands that only look are put together in `app.status` and `app.preflight`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import NATIVE, NDJSON, PARQUET
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import FilesystemDestination, KafkaDestination
from logmirror.errors import InternalError, UnavailableError, UsageError
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.service import Service
from logmirror.mirror.source_views import MirrorSpec, check_partitions
from logmirror.monitoring.metrics import Recorder
from logmirror.stores.locations import FolderLocation, S3Identity, S3Location
from logmirror.stores.opening import begin_writing
from logmirror.stores.s3_policy import policies
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveCopies
from logmirror.to_archive.memory import SLOT_BYTES_MIN
from logmirror.to_kafka.preserve_destination import KafkaCopies
from logmirror.to_kafka.translate_destination import TranslateCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config.environment import ProcessEnvironment
    from logmirror.config.settings import MirrorSettings, S3Credentials, S3Destination, Settings
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.ports import DestinationSpec, Runner
    from logmirror.mirror.stopped import OnFatal
    from logmirror.stores.base import BlobStore
    from logmirror.stores.locations import StoreLocation

PATIENCE_MS: Final = 10_000
"""How long a cluster that does not answer is tried while somebody waits: people, other mirrors."""

HASTE_MS: Final = 3_000
"""How long the loop waits for what it can do without: an answer, a connection, all attempts."""

_EXTENSIONS: Final = {"native": NATIVE, "parquet": PARQUET, "ndjson": NDJSON}


def mirror_specs(settings: Settings) -> list[MirrorSpec]:
    """The enabled mirrors as the loop sees them.

    Raises:
        UsageError: A connection property is unknown or wrong.
    """
    return [_mirror_spec(mirror) for mirror in settings.mirrors if mirror.enabled]


def _mirror_spec(mirror: MirrorSettings) -> MirrorSpec:
    return MirrorSpec(
        name=mirror.name,
        source=connection_settings(mirror.source.bootstrap_servers, dict(mirror.source.properties)),
        topic=mirror.topic,
        partitions=mirror.partitions,
        destinations=tuple(
            (destination.name, _destination_spec(destination, mirror))
            for destination in mirror.destinations
        ),
        chain_start=mirror.chain_start,
    )


def _destination_spec(
    destination: FilesystemDestination | KafkaDestination | S3Destination, mirror: MirrorSettings
) -> DestinationSpec:
    if isinstance(destination, KafkaDestination):
        return KafkaSpec(
            cluster=connection_settings(
                destination.bootstrap_servers, dict(destination.properties)
            ),
            topic=destination.topic,
            name=destination.name,
            mirror=mirror.name,
            offsets=destination.offsets,
            gaps=destination.holes,
            topic_sync=destination.topic_sync,
            replication_factor=destination.replication_factor or -1,
            keeps_timestamps=destination.timestamp_mode == "source",
            max_batch_bytes=destination.max_batch_bytes,
            types=mirror.types,
        )
    if mirror.flush is None:
        raise InternalError("a mirror into files without `flush`", mirror=mirror.name)
    return ArchiveSpec(
        location=_location(destination),
        format=mirror.format,
        extension=_EXTENSIONS[mirror.format],
        compression=mirror.compression,
        encoding=mirror.encoding,
        max_bytes=mirror.flush.max_bytes,
        max_offsets=mirror.flush.max_offsets,
        max_time_ms=mirror.flush.max_time_ms,
        daily_at_utc_s=mirror.flush.daily_at_utc_s,
        compaction=mirror.compaction,
        keep_snapshots=mirror.keep_snapshots,
        drift_check_ms=destination.drift_check_ms,
        types=mirror.types,
    )


def _location(destination: FilesystemDestination | S3Destination) -> StoreLocation:
    if isinstance(destination, FilesystemDestination):
        return FolderLocation(str(destination.root))
    return S3Location(
        bucket=destination.bucket,
        prefix=destination.prefix,
        region=destination.region,
        endpoint=destination.endpoint,
        path_style=destination.path_style,
        ca_file=destination.ca_file,
        checksums=destination.checksums.replace("-", "_"),
        sse=destination.sse,
        kms_key_id=destination.kms_key_id,
        require_atomic_create=destination.require_atomic_create,
        write=_identity(destination.write),
        read=_identity(destination.read),
    )


def _identity(credentials: S3Credentials) -> S3Identity:
    return S3Identity(
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        session_token=credentials.session_token,
        profile=credentials.profile,
        role_arn=credentials.role_arn,
        sts_endpoint=credentials.sts_endpoint,
    )


def s3_policies(settings: Settings, *, compacts: bool = False) -> dict[str, dict[str, object]]:
    """The least that each identity of the configuration must be allowed; see `s3_policy`."""
    written = [
        (archive.location, name, archive.keep_snapshots is not None)
        for spec in mirror_specs(settings)
        for name, archive in spec.destinations
        if isinstance(archive, ArchiveSpec) and isinstance(archive.location, S3Location)
    ]
    pruned = [(location, name) for location, name, prunes in written if prunes]
    locations = [location for location, _, _ in written]
    return policies(locations, pruned, compacts=compacts)


class Clients:
    """The driver's open clients, one for each cluster.

    Args:
        patience_ms: How long one question may be tried again; None: as the settings say. People
            who wait at a terminal would rather know.
        is_hasty: No connection and no answer is waited for any longer either.
    """

    def __init__(self, patience_ms: int | None = None, *, is_hasty: bool = False) -> None:
        self._patience_ms, self._is_hasty = patience_ms, is_hasty
        self._open: dict[ConnectionSettings, ClusterClient] = {}

    def __call__(self, settings: ConnectionSettings) -> ClusterClient:
        """The client of a cluster."""
        if settings not in self._open:
            patience_ms = self._patience_ms or settings.retry_budget_ms
            budget_ms = min(patience_ms, settings.retry_budget_ms)
            used = replace(settings, retry_budget_ms=budget_ms)
            if self._is_hasty:
                used = replace(
                    used,
                    connect_timeout_ms=min(budget_ms, settings.connect_timeout_ms),
                    socket_timeout_ms=min(budget_ms, settings.socket_timeout_ms),
                )
            self._open[settings] = ClusterClient(used)
        return self._open[settings]

    def close(self) -> None:
        """Close them all."""
        for client in self._open.values():
            client.close()
        self._open.clear()


def run(
    settings: Settings,
    *,
    until_now: bool,
    master: str | None = None,
    spark_log: Path | None = None,
    environment: ProcessEnvironment,
) -> None:
    """Run the mirrors of a configuration; see `Service.run`.

    The first SIGTERM or SIGINT flushes what was seen and returns; the second ends the process at
    once, which loses nothing, because nothing that counts was held in memory.
    """
    from logmirror.engine.spark import SparkRunner  # noqa: PLC0415  # other commands do without Spark
    from logmirror.monitoring.http import Shown, serve  # noqa: PLC0415  # other commands do without it

    specs = mirror_specs(settings)
    if not specs:
        raise UsageError(
            f"all {len(settings.mirrors)} mirror(s) are disabled",
            hint="set `enabled: true` on one of them",
        )
    if not until_now:
        specs = considerate(specs)
    if settings.on_fatal == "exit":
        _look_at_sources(specs)
    budget_bytes = settings.memory_budget_bytes
    recorder = Recorder()
    observer = make_observer(settings, recorder, heartbeat_ms=environment.heartbeat_ms)
    shown = Shown(
        partitions=environment.metrics_partitions,
        mirror_v3_names=settings.metrics_prefix == "mirror_v3",
    )
    with (
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
        with _stop_on_signal(service):
            service.run(until_now=until_now)


def considerate(specs: list[MirrorSpec]) -> list[MirrorSpec]:
    """Mirrors of several clusters, with less patience for each of them.

    While the loop asks a cluster that does not answer, no flow of another moves; and the loop tries
    again by itself, less and less often. A single cluster is waited for as long as it may take. One
    attempt is never cut short: a broker may take `socket.timeout.ms` for an answer.
    """
    clusters = {spec.source for spec in specs}
    written = [written for spec in specs for _, written in spec.destinations]
    clusters |= {to.cluster for to in written if isinstance(to, KafkaSpec)}
    return specs if len(clusters) == 1 else [_considerate(spec) for spec in specs]


def _considerate(spec: MirrorSpec) -> MirrorSpec:
    def brief(cluster: ConnectionSettings) -> ConnectionSettings:
        return replace(cluster, retry_budget_ms=min(cluster.retry_budget_ms, PATIENCE_MS))

    destinations = tuple(
        (name, replace(to, cluster=brief(to.cluster)) if isinstance(to, KafkaSpec) else to)
        for name, to in spec.destinations
    )
    return replace(spec, source=brief(spec.source), destinations=destinations)


def make_observer(settings: Settings, recorder: Recorder, *, heartbeat_ms: int = 0) -> Observer:
    """Who is told of the enabled mirrors, and tells; see `Observer`."""
    silent: set[tuple[str, str]] = set()
    for mirror in settings.mirrors:
        without = {(mirror.name, d.name) for d in mirror.destinations if not d.affects_readiness}
        silent |= without
        if len(without) == len(mirror.destinations):
            silent.add((mirror.name, ""))
    names = [mirror.name for mirror in settings.mirrors if mirror.enabled]
    return Observer(names, recorder, SYSTEM_CLOCK, heartbeat_ms=heartbeat_ms, silent=silent)


def _look_at_sources(specs: list[MirrorSpec]) -> None:
    """Raise for a topic or partition that is not there, before Spark takes its time to start.

    A cluster that does not answer is no reason: it has until Spark is up, and then some.
    """
    clients = Clients(PATIENCE_MS)
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
    """The loop over these mirrors; what it opens is closed with `stack`."""
    writer_id = new_writer_id()
    clients, hasty = Clients(), Clients(HASTE_MS, is_hasty=True)
    stack.callback(clients.close)
    stack.callback(hasty.close)

    @functools.cache
    def open_store(location: StoreLocation) -> BlobStore:
        return begin_writing(location, writer_id, stack)

    return Service(
        specs,
        client=clients,
        hasty_client=hasty,
        destination=destinations(clients, open_store, writer_id, observer),
        runner=runner,
        writer_id=writer_id,
        clock=SYSTEM_CLOCK,
        on_fatal=on_fatal,
        memory_bytes=memory_bytes,
        observer=observer,
    )


def destinations(
    clients: Clients,
    open_store: Callable[[StoreLocation], BlobStore],
    writer_id: str,
    observer: Observer | None = None,
) -> Callable[[DestinationSpec], Destination]:
    """The driver's side of each kind of destination."""
    committer = Committer(open_store, clock=SYSTEM_CLOCK, observer=observer)
    archives = ArchiveCopies(open_store, committer, SYSTEM_CLOCK)
    clusters = KafkaCopies(clients, SYSTEM_CLOCK, observer)
    translated = TranslateCopies(clients, SYSTEM_CLOCK, writer_id, observer)

    def choose(spec: DestinationSpec) -> Destination:
        if isinstance(spec, ArchiveSpec):
            return archives
        return translated if spec.offsets == "translate" else clusters

    return choose


@contextlib.contextmanager
def _stop_on_signal(service: Service) -> Iterator[None]:
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
