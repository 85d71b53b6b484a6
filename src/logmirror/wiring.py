"""The composition root of the driver: settings to components.

Loads no kernels unless a proof asks for them: that is the business of executors, whose composition
root is `logmirror.executor`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import NATIVE, NDJSON, PARQUET
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.cluster.client import EARLIEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.config import KafkaDestination
from logmirror.errors import InternalError, LogmirrorError, UsageError
from logmirror.mirror.archive_copies import ArchiveCopies
from logmirror.mirror.commit import Committer
from logmirror.mirror.kafka_copies import KafkaCopies
from logmirror.mirror.kafka_guard import target
from logmirror.mirror.ports import ArchiveSpec, FlowId, KafkaSpec
from logmirror.mirror.positions import check_incarnation
from logmirror.mirror.service import MirrorSpec, Service, source_views
from logmirror.spark import SparkRunner
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config import FilesystemDestination, MirrorSettings, Settings
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.kafka_source import KafkaSource
    from logmirror.mirror.ports import DestinationSpec, Runner, SourceView
    from logmirror.mirror.verify import FlowReport
    from logmirror.model import TopicPartition
    from logmirror.stores.base import BlobStore

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
    destination: FilesystemDestination | KafkaDestination, mirror: MirrorSettings
) -> DestinationSpec:
    if isinstance(destination, KafkaDestination):
        return KafkaSpec(
            cluster=connection_settings(
                destination.bootstrap_servers, dict(destination.properties)
            ),
            topic=destination.topic,
            holes=destination.holes,
            topic_sync=destination.topic_sync,
            replication_factor=destination.replication_factor or -1,
            keeps_timestamps=destination.timestamp_mode == "source",
            max_batch_bytes=destination.max_batch_bytes,
        )
    if mirror.flush is None:
        raise InternalError("a mirror into files without `flush`", mirror=mirror.name)
    return ArchiveSpec(
        root=str(destination.root),
        format=mirror.format,
        extension=_EXTENSIONS[mirror.format],
        compression=mirror.compression,
        encoding=mirror.encoding,
        max_bytes=mirror.flush.max_bytes,
        max_offsets=mirror.flush.max_offsets,
        max_time_ms=mirror.flush.max_time_ms,
        daily_at_utc_s=mirror.flush.daily_at_utc_s,
    )


class Clients:
    """The driver's open clients, one for each source."""

    def __init__(self) -> None:
        self._open: dict[ConnectionSettings, ClusterClient] = {}

    def __call__(self, settings: ConnectionSettings) -> ClusterClient:
        """The client of a source."""
        if settings not in self._open:
            self._open[settings] = ClusterClient(settings)
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
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Run the mirrors of a configuration; see `Service.run`.

    The first SIGTERM or SIGINT flushes what was seen and returns; the second ends the process at
    once, which loses nothing, because nothing that counts was held in memory.
    """
    specs = mirror_specs(settings)
    if not specs:
        raise UsageError(
            f"all {len(settings.mirrors)} mirror(s) are disabled",
            hint="set `enabled: true` on one of them",
        )
    with (
        contextlib.ExitStack() as stack,
        SparkRunner(
            master=master or settings.spark.master,
            properties=settings.spark.properties,
            execute="logmirror.executor:execute",
            warm_up="logmirror.executor:warm_up",
            log=spark_log,
        ) as runner,
    ):
        on_started()
        service = build_service(specs, runner, stack)
        with _stop_on_signal(service):
            service.run(until_now=until_now)


def build_service(specs: list[MirrorSpec], runner: Runner, stack: contextlib.ExitStack) -> Service:
    """The loop over these mirrors; what it opens is closed with `stack`."""
    writer_id = new_writer_id()
    clients = Clients()
    stack.callback(clients.close)

    @functools.cache
    def open_store(root: str) -> BlobStore:
        store = FilesystemStore(Path(root), writer_id=writer_id)
        stack.enter_context(store.hold_writer_lock())
        store.sweep()
        return store

    return Service(
        specs,
        client=clients,
        destination=_destinations(clients, open_store),
        runner=runner,
        writer_id=writer_id,
        clock=SYSTEM_CLOCK,
    )


def _destinations(
    clients: Clients, open_store: Callable[[str], BlobStore]
) -> Callable[[DestinationSpec], Destination]:
    """The driver's side of each kind of destination."""
    archives = ArchiveCopies(open_store, Committer(open_store, clock=SYSTEM_CLOCK), SYSTEM_CLOCK)
    clusters = KafkaCopies(clients, SYSTEM_CLOCK)
    return lambda spec: clusters if isinstance(spec, KafkaSpec) else archives


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """One flow as `status` shows it."""

    flow: FlowId
    source_end: int | None = None
    position: int | None = None
    error: LogmirrorError | None = None

    @property
    def lag(self) -> int | None:
        """Offsets that may be copied and are not."""
        if self.source_end is None or self.position is None:
            return None
        return max(self.source_end - self.position, 0)


def status(settings: Settings) -> list[StatusRow]:
    """Where every flow of every enabled mirror stands. Creates nothing anywhere."""
    rows: list[StatusRow] = []
    clients = Clients()
    try:
        for spec in mirror_specs(settings):
            rows += _status_of(spec, clients)
    finally:
        clients.close()
    return rows


def _status_of(spec: MirrorSpec, clients: Clients) -> Iterator[StatusRow]:
    destination = _destinations(clients, lambda root: FilesystemStore(Path(root), writer_id="-"))
    try:
        numbers, topic_id = _look_at_topic(spec, clients)
    except LogmirrorError as error:
        for flow, _ in _flows(spec, spec.partitions or (-1,)):
            yield StatusRow(flow=flow, error=error)
        return
    flows = dict(_flows(spec, numbers))
    found: dict[FlowId, int | LogmirrorError | None] = {}
    for _, archive in spec.destinations:
        of_destination = [flow for flow, written in flows.items() if written is archive]
        try:
            found |= destination(archive).positions(archive, of_destination, spec.chain_start)
        except LogmirrorError as error:
            found |= dict.fromkeys(of_destination, error)
    try:
        # After the positions: a service that runs meanwhile would seem to be ahead of its source.
        views = source_views(clients(spec.source), {flow.source for flow in flows}, topic_id)
    except LogmirrorError as error:
        yield from (StatusRow(flow=flow, error=error) for flow in flows)
        return
    for flow, archive in flows.items():
        yield _status_row(flow, archive, found[flow], views[flow.source])


def _status_row(
    flow: FlowId, spec: DestinationSpec, found: int | LogmirrorError | None, view: SourceView
) -> StatusRow:
    if isinstance(found, LogmirrorError):
        return StatusRow(flow=flow, source_end=view.stable_end, error=found)
    position = view.log_start if found is None else found
    if isinstance(spec, ArchiveSpec):
        store = FilesystemStore(Path(spec.root), writer_id="status")
        try:
            check_incarnation(store, flow, view.topic_id, position)
        except LogmirrorError as error:
            return StatusRow(flow=flow, source_end=view.stable_end, error=error)
    return StatusRow(flow=flow, source_end=view.stable_end, position=position)


def _look_at_topic(spec: MirrorSpec, clients: Clients) -> tuple[tuple[int, ...], bytes | None]:
    """The mirror's partitions and the topic's id."""
    topic = clients(spec.source).topic(spec.topic)
    return spec.partitions or tuple(sorted(topic.partitions)), topic.topic_id


def _flows(spec: MirrorSpec, numbers: tuple[int, ...]) -> list[tuple[FlowId, DestinationSpec]]:
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), written)
        for name, written in spec.destinations
        for n in numbers
    ]


def verify(
    settings: Settings,
    *,
    deep: bool = False,
    against_source: bool = False,
    on_object: Callable[[], None] = lambda: None,
) -> list[FlowReport]:
    """Prove the copies of every enabled mirror, as far as asked; see `mirror.verify`.

    Partitions are those of the configuration, or with `partitions: all` those that the destination
    holds; only `against_source` asks the source.
    """
    reports: list[FlowReport] = []
    clients = Clients()
    try:
        for spec in mirror_specs(settings):
            reports += _verify_mirror(
                spec, clients, deep=deep, against_source=against_source, on_object=on_object
            )
    finally:
        clients.close()
    return reports


@dataclass(frozen=True, slots=True)
class _Proof:
    """What `verify` was asked, and what it has learnt of a mirror's source."""

    spec: MirrorSpec
    clients: Clients
    deep: bool
    against_source: bool
    on_object: Callable[[], None]
    topic_id: bytes | None = None
    compacted: bool = False

    def source(self, partition: TopicPartition) -> KafkaSource:
        """The source's side of a comparison."""
        from logmirror.mirror.kafka_source import KafkaSource  # noqa: PLC0415  # loads kernels

        return KafkaSource(self.clients(self.spec.source), partition, topic_id=self.topic_id)

    def views(self, partitions: set[TopicPartition]) -> dict[TopicPartition, SourceView]:
        """What the source says, asked after the copies' ends: a service may run meanwhile."""
        if not self.against_source:
            return {}
        return source_views(self.clients(self.spec.source), partitions, self.topic_id)


def _verify_mirror(
    spec: MirrorSpec,
    clients: Clients,
    *,
    deep: bool,
    against_source: bool,
    on_object: Callable[[], None],
) -> Iterator[FlowReport]:
    topic_id, compacted, numbers = None, False, spec.partitions
    if against_source:
        numbers, topic_id = _look_at_topic(spec, clients)
        configs = clients(spec.source).describe_topic_configs(spec.topic)
        compacted = "compact" in (configs.get("cleanup.policy") or "")
    proof = _Proof(
        spec, clients, deep or against_source, against_source, on_object, topic_id, compacted
    )
    for name, written in spec.destinations:
        if isinstance(written, KafkaSpec):
            held = numbers or tuple(clients(written.cluster).topic(written.topic).partitions)
            flows = [flow for flow, of in _flows(spec, held) if of is written]
            yield from _verify_cluster(proof, written, flows)
        else:
            held = numbers or tuple(_held_partitions(Path(written.root) / name))
            flows = [flow for flow, of in _flows(spec, held) if of is written]
            yield from _verify_archive(proof, written, flows)


def _verify_archive(
    proof: _Proof, archive: ArchiveSpec, flows: list[FlowId]
) -> Iterator[FlowReport]:
    # A proof decodes; nothing else here does, and the kernels take a second to load.
    from logmirror.mirror import verify as archives  # noqa: PLC0415  # see above
    from logmirror.wire.decode import RecordDecoder  # noqa: PLC0415  # see above

    store = FilesystemStore(Path(archive.root), writer_id="verify")
    named = [
        archives.verify_names(store, flow, archive.extension, chain_start=proof.spec.chain_start)
        for flow in flows
    ]
    views = proof.views({flow.source for flow in flows})
    for report, links in named:
        if proof.deep:
            decoder, partition = RecordDecoder(), report.flow.source
            found = archives.verify_content(
                report, links, store, archive, proof.on_object, compacted=proof.compacted
            )
            for link, digest in found:
                if proof.against_source:
                    archives.compare_with_source(
                        report,
                        link,
                        digest,
                        archive=archive,
                        view=views[partition],
                        source=proof.source(partition),
                        decoder=decoder,
                    )
        yield report


def _verify_cluster(proof: _Proof, written: KafkaSpec, flows: list[FlowId]) -> Iterator[FlowReport]:
    from logmirror.mirror import verify_copy as copies  # noqa: PLC0415  # loads kernels
    from logmirror.mirror.kafka_source import KafkaSource  # noqa: PLC0415  # loads kernels
    from logmirror.mirror.verify import FlowReport  # noqa: PLC0415  # loads kernels
    from logmirror.wire.decode import RecordDecoder  # noqa: PLC0415  # loads kernels

    client = proof.clients(written.cluster)
    of = {flow: target(written, flow) for flow in flows}
    starts = client.list_offsets(of.values(), EARLIEST)
    ends = client.log_ends(of.values())
    views, decoder = proof.views({flow.source for flow in flows}), RecordDecoder()
    for flow, where in of.items():
        first, end = starts[where], ends[where].end_offset
        report = FlowReport(flow=flow, first=first, next_offset=end)
        log = KafkaSource(client, where, topic_id=None)
        if proof.deep:
            copies.verify_deep(report, log, decoder, first, end)
        if proof.against_source:
            copies.verify_against_source(
                report,
                spec=written,
                log=log,
                first=first,
                source=proof.source(flow.source),
                view=views[flow.source],
                decoder=decoder,
                compacted=proof.compacted,
            )
        proof.on_object()
        yield report


def _held_partitions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
