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
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import LogmirrorError, UsageError
from logmirror.mirror.commit import Committer
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.mirror.positions import chain_position, check_incarnation
from logmirror.mirror.service import MirrorSpec, Service, source_views
from logmirror.spark import SparkRunner
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.config import MirrorSettings, Settings
    from logmirror.mirror.ports import Runner
    from logmirror.mirror.positions import SourceView
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
            (
                destination.name,
                ArchiveSpec(
                    root=str(destination.root),
                    format=mirror.format,
                    extension=_EXTENSIONS[mirror.format],
                    compression=mirror.compression,
                    encoding=mirror.encoding,
                    max_bytes=mirror.flush.max_bytes,
                    max_offsets=mirror.flush.max_offsets,
                ),
            )
            for destination in mirror.destinations
        ),
        flush=mirror.flush,
        chain_start=mirror.chain_start,
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
        open_store=open_store,
        runner=runner,
        committer=Committer(open_store, clock=SYSTEM_CLOCK),
        writer_id=writer_id,
        clock=SYSTEM_CLOCK,
    )


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


def _status_of(spec: MirrorSpec, clients: Clients) -> list[StatusRow]:
    found: dict[FlowId, int | LogmirrorError | None] = {}
    try:
        numbers, topic_id = _look_at_topic(spec, clients)
        flows = _flows(spec, numbers)
        for flow, archive in flows:
            found[flow] = _position_of(flow, archive, spec)
        # After the positions: a service that runs meanwhile would seem to be ahead of its source.
        sources = {flow.source for flow, _ in flows}
        views = source_views(clients(spec.source), sources, topic_id)
    except LogmirrorError as error:
        return [
            StatusRow(flow=flow, error=error) for flow, _ in _flows(spec, spec.partitions or (-1,))
        ]
    return [_status_row(flow, archive, found[flow], views[flow.source]) for flow, archive in flows]


def _position_of(
    flow: FlowId, archive: ArchiveSpec, spec: MirrorSpec
) -> int | LogmirrorError | None:
    store = FilesystemStore(Path(archive.root), writer_id="status")
    try:
        return chain_position(store, flow, archive.extension, chain_start=spec.chain_start)
    except LogmirrorError as error:
        return error


def _status_row(
    flow: FlowId, archive: ArchiveSpec, found: int | LogmirrorError | None, view: SourceView
) -> StatusRow:
    if isinstance(found, LogmirrorError):
        return StatusRow(flow=flow, source_end=view.stable_end, error=found)
    position = view.log_start if found is None else found
    store = FilesystemStore(Path(archive.root), writer_id="status")
    try:
        check_incarnation(store, flow, view.topic_id, position)
    except LogmirrorError as error:
        return StatusRow(flow=flow, source_end=view.stable_end, error=error)
    return StatusRow(flow=flow, source_end=view.stable_end, position=position)


def _look_at_topic(spec: MirrorSpec, clients: Clients) -> tuple[tuple[int, ...], bytes | None]:
    """The mirror's partitions and the topic's id."""
    topic = clients(spec.source).topic(spec.topic)
    return spec.partitions or tuple(sorted(topic.partitions)), topic.topic_id


def _flows(spec: MirrorSpec, numbers: tuple[int, ...]) -> list[tuple[FlowId, ArchiveSpec]]:
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), archive)
        for name, archive in spec.destinations
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


def _verify_mirror(
    spec: MirrorSpec,
    clients: Clients,
    *,
    deep: bool,
    against_source: bool,
    on_object: Callable[[], None],
) -> Iterator[FlowReport]:
    # A proof decodes; nothing else here does, and the kernels take a second to load.
    from logmirror.mirror import verify as proof  # noqa: PLC0415  # see above
    from logmirror.mirror.kafka_source import KafkaSource  # noqa: PLC0415  # see above
    from logmirror.wire.decode import RecordDecoder  # noqa: PLC0415  # see above

    topic_id, compacted = None, False
    numbers = spec.partitions
    if against_source:
        numbers, topic_id = _look_at_topic(spec, clients)
        configs = clients(spec.source).describe_topic_configs(spec.topic)
        compacted = "compact" in (configs.get("cleanup.policy") or "")
    named = []
    for name, archive in spec.destinations:
        store = FilesystemStore(Path(archive.root), writer_id="verify")
        for n in numbers if numbers is not None else _held_partitions(Path(archive.root) / name):
            flow = FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n)
            report, links = proof.verify_names(
                store, flow, archive.extension, chain_start=spec.chain_start
            )
            named.append((flow, archive, store, report, links))
    views: dict[TopicPartition, SourceView] = {}
    if against_source:
        # After the names: objects that a running service adds now may lie beyond older ends.
        views = source_views(clients(spec.source), {flow.source for flow, *_ in named}, topic_id)
    for flow, archive, store, report, links in named:
        if deep or against_source:
            source = KafkaSource(clients(spec.source), flow.source, topic_id=topic_id)
            decoder = RecordDecoder()
            found = proof.verify_content(
                report, links, store, archive, on_object, compacted=compacted
            )
            for link, digest in found:
                if against_source:
                    proof.compare_with_source(
                        report,
                        link,
                        digest,
                        archive=archive,
                        view=views[flow.source],
                        source=source,
                        decoder=decoder,
                    )
        yield report


def _held_partitions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
