"""`logmirror status`: source end, position and lag of every flow, queried in parallel.

    topics -> positions at the destinations -> ends of the sources

Each source gets three requests, whatever the number of its mirrors and partitions. Destinations are
queried by several threads: archives partition by partition, clusters destination by destination.
Positions are read before ends, else a running mirror would seem to be ahead of its source. Nothing
is created anywhere.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, Self, TypeVar

from logmirror.app.components import COMMAND_BUDGET_MS, Clients, destinations
from logmirror.app.specs import mirror_specs
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.mirror.source_views import flows_of
from logmirror.reports import PartitionStatus
from logmirror.stores.opening import open_store
from logmirror.to_archive.positions import check_incarnation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.config.settings import Settings
    from logmirror.mirror.ports import DestinationSpec
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import TopicPartition

WIDTH: Final = 16
"""Requests in flight at once."""

_FLOWS_AT_ONCE: Final = 8
"""Partitions of an archive that one job lists."""


def status(settings: Settings) -> list[PartitionStatus]:
    """Return the status of every flow of every enabled mirror, in the order of the file."""
    with StatusQuery(mirror_specs(settings)) as query:
        return query.rows()


class _ThreadResources:
    """Open clients and stores of one thread. They are not shared between threads."""

    def __init__(self) -> None:
        self.clients = Clients(COMMAND_BUDGET_MS)
        self.store = functools.cache(lambda location: open_store(location, "-"))
        self.destination = destinations(self.clients, self.store, "-")


@dataclass(frozen=True, slots=True)
class _Ends:
    """Offsets of one partition at its source."""

    log_start: int
    last_stable_offset: int


_Found = int | LogmirrorError | None
_K = TypeVar("_K")
_V = TypeVar("_V")


class StatusQuery:
    """The requests of one `status`; use it in a `with`."""

    def __init__(self, specs: Sequence[MirrorSpec]) -> None:
        self._specs = specs
        self._pool = ThreadPoolExecutor(WIDTH, thread_name_prefix="status")
        self._mine = threading.local()
        self._all_resources: list[_ThreadResources] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for resources in self._all_resources:
            resources.clients.close()

    def rows(self) -> list[PartitionStatus]:
        """Query everything; one row for each flow."""
        by_source: dict[ConnectionSettings, list[MirrorSpec]] = defaultdict(list)
        for spec in self._specs:
            by_source[spec.source].append(spec)
        topics = _joined(self._pool.map(self._topics, by_source, by_source.values()))
        asked = [spec for spec in self._specs if not isinstance(topics[spec.name], LogmirrorError)]
        flows = {spec.name: _flows(spec, topics[spec.name]) for spec in asked}
        jobs = [job for spec in asked for job in _jobs(spec, flows[spec.name], topics[spec.name])]
        positions = _joined(self._pool.map(lambda job: self._positions(*job), jobs))
        ends = self._all_ends(asked, flows)
        return [
            row
            for spec in self._specs
            for row in _rows(spec, topics[spec.name], flows.get(spec.name, []), positions, ends)
        ]

    @property
    def _resources(self) -> _ThreadResources:
        """The clients and stores of this thread."""
        resources: _ThreadResources | None = getattr(self._mine, "resources", None)
        if resources is None:
            resources = self._mine.resources = _ThreadResources()
            self._all_resources.append(resources)
        return resources

    # -- sources ---------------------------------------------------------------------------------

    def _topics(
        self, source: ConnectionSettings, specs: Sequence[MirrorSpec]
    ) -> dict[str, TopicMetadata | LogmirrorError]:
        """Return the topics of the mirrors of one source, or the errors, by mirror."""
        found: dict[str, TopicMetadata | LogmirrorError] = {}
        try:
            client = self._resources.clients(source)
            topics = client.describe_topics({spec.topic for spec in specs})
        except UnavailableError as error:
            return dict.fromkeys((spec.name for spec in specs), error)
        except LogmirrorError:
            for spec in specs:  # find out whose topic it is
                try:
                    found[spec.name] = self._resources.clients(source).topic(spec.topic)
                except LogmirrorError as error:
                    found[spec.name] = error
            return found
        return {spec.name: topics[spec.topic] for spec in specs}

    def _all_ends(
        self, specs: Iterable[MirrorSpec], flows: Mapping[str, Sequence[_Flow]]
    ) -> dict[str, dict[TopicPartition, _Ends] | LogmirrorError]:
        """Return the ends of the partitions of each mirror, by mirror."""
        by_source: dict[ConnectionSettings, list[MirrorSpec]] = defaultdict(list)
        for spec in specs:
            by_source[spec.source].append(spec)

        def of(specs: Iterable[MirrorSpec]) -> set[TopicPartition]:
            return {flow.source for spec in specs for flow, _ in flows[spec.name]}

        found: dict[str, dict[TopicPartition, _Ends] | LogmirrorError] = {}
        alone: list[MirrorSpec] = []
        wanted = [of(specs) for specs in by_source.values()]
        for ends_found, of_source in zip(
            self._pool.map(self._ends, by_source, wanted), by_source.values(), strict=True
        ):
            if isinstance(ends_found, LogmirrorError) and len(of_source) > 1:
                alone += of_source  # find out whose partition it is
            else:
                found |= dict.fromkeys((spec.name for spec in of_source), ends_found)
        each = self._pool.map(lambda spec: self._ends(spec.source, of([spec])), alone)
        found |= {spec.name: of_one for spec, of_one in zip(alone, each, strict=True)}
        return found

    def _ends(
        self, source: ConnectionSettings, partitions: set[TopicPartition]
    ) -> dict[TopicPartition, _Ends] | LogmirrorError:
        try:
            client = self._resources.clients(source)
            starts = client.list_offsets(partitions, EARLIEST)
            ends = client.list_offsets(partitions, LATEST)
        except LogmirrorError as error:
            return error
        return {where: _Ends(starts[where], ends[where]) for where in partitions}

    # -- destinations ----------------------------------------------------------------------------

    def _positions(
        self,
        spec: MirrorSpec,
        written: DestinationSpec,
        flows: Sequence[FlowId],
        topic_id: bytes | None,
    ) -> dict[FlowId, _Found]:
        """Return the positions of some flows into one destination, or the error for each."""
        try:
            side = self._resources.destination(written)
            found: dict[FlowId, _Found] = dict(side.positions(written, flows, spec.chain_start))
        except LogmirrorError as error:
            return dict.fromkeys(flows, error)
        if isinstance(written, ArchiveSpec):
            for flow, position in found.items():
                if not isinstance(position, LogmirrorError):
                    try:
                        store = self._resources.store(written.location)
                        check_incarnation(store, flow, topic_id, position or 0)
                    except LogmirrorError as error:
                        found[flow] = error
        return found


_Flow = tuple[FlowId, "DestinationSpec"]
_Job = tuple["MirrorSpec", "DestinationSpec", "Sequence[FlowId]", "bytes | None"]


def _joined(parts: Iterable[Mapping[_K, _V]]) -> dict[_K, _V]:
    return dict(chain.from_iterable(part.items() for part in parts))


def _flows(spec: MirrorSpec, topic: TopicMetadata | LogmirrorError) -> list[_Flow]:
    if isinstance(topic, LogmirrorError):
        return flows_of(spec, spec.partitions or (-1,))
    return flows_of(spec, spec.partitions or tuple(sorted(topic.partitions)))


def _jobs(
    spec: MirrorSpec, flows: Sequence[_Flow], topic: TopicMetadata | LogmirrorError
) -> Iterator[_Job]:
    """Yield the position queries of one mirror."""
    topic_id = None if isinstance(topic, LogmirrorError) else topic.topic_id
    for _, written in spec.destinations:
        own = [flow for flow, of in flows if of is written]
        size = _FLOWS_AT_ONCE if isinstance(written, ArchiveSpec) else len(own)
        for at in range(0, len(own), size or 1):
            yield spec, written, own[at : at + size], topic_id


def _row(
    flow: FlowId,
    *,
    source_end: int | None = None,
    position: int | None = None,
    error: LogmirrorError | None = None,
    is_fencing_degraded: bool = False,
) -> PartitionStatus:
    return PartitionStatus(
        mirror=flow.mirror,
        destination=flow.destination,
        topic=flow.topic,
        partition=flow.partition,
        source_end=source_end,
        position=position,
        error=error,
        is_fencing_degraded=is_fencing_degraded,
    )


def _rows(
    spec: MirrorSpec,
    topic: TopicMetadata | LogmirrorError,
    flows: Sequence[_Flow],
    positions: Mapping[FlowId, _Found],
    ends: Mapping[str, dict[TopicPartition, _Ends] | LogmirrorError],
) -> Iterator[PartitionStatus]:
    if isinstance(topic, LogmirrorError):
        yield from (_row(flow, error=topic) for flow, _ in _flows(spec, topic))
        return
    found_ends = ends[spec.name]
    for flow, written in flows:
        if isinstance(found_ends, LogmirrorError):
            yield _row(flow, error=found_ends)
            continue
        end, found = found_ends[flow.source], positions[flow]
        if isinstance(found, LogmirrorError):
            yield _row(flow, source_end=end.last_stable_offset, error=found)
            continue
        is_degraded = isinstance(written, ArchiveSpec) and written.location.is_fencing_degraded
        yield _row(
            flow,
            source_end=end.last_stable_offset,
            position=end.log_start if found is None else found,
            is_fencing_degraded=is_degraded,
        )
