"""`logmirror status`: source end, position and lag of every flow, and what `run` would refuse.

    topics -> positions at the destinations -> the sources' offsets -> the check of `run`

Each source gets three requests, whatever the number of its mirrors and partitions, and one more for
each different leader epoch that a partition was copied with. Destinations are queried by several
threads: archives partition by partition, clusters destination by destination. Positions are read
before offsets of sources, else a running mirror would seem to be ahead of its source. No record is
read. Nothing is created anywhere.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from logmirror.app.components import COMMAND_BUDGET_MS, Clients, destinations
from logmirror.app.source_state import SourceState, read_states
from logmirror.app.specs import mirror_specs
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.mirror.opening import Opening
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.mirror.source_views import flows_of
from logmirror.reports import PartitionStatus
from logmirror.stores.opening import open_store

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

_K = TypeVar("_K")
_V = TypeVar("_V")


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


class _Job(NamedTuple):
    """Some flows of a mirror into one destination."""

    spec: MirrorSpec
    topic: TopicMetadata
    written: DestinationSpec
    flows: Sequence[FlowId]


class _Opened(NamedTuple):
    """The positions of a job's flows, or the error of all of them."""

    job: _Job
    opening: Opening | LogmirrorError
    resources: _ThreadResources
    """Of the thread that read the positions, which also checks them."""


_Flow = tuple[FlowId, "DestinationSpec"]
_Wanted = dict["TopicPartition", set[int]]
_States = dict["TopicPartition", SourceState]


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
        jobs = [job for spec in self._specs for job in _jobs(spec, topics[spec.name])]
        opened = list(self._pool.map(self._open, jobs))
        states = self._states(opened)
        by_thread: dict[int, list[_Opened]] = defaultdict(list)
        for each in opened:
            by_thread[id(each.resources)].append(each)
        rows = _joined(self._pool.map(lambda part: _checked(part, states), by_thread.values()))
        return [row for spec in self._specs for row in _rows_of(spec, topics[spec.name], rows)]

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

    def _states(self, opened: Sequence[_Opened]) -> dict[str, _States | LogmirrorError]:
        """Return the state of the replicated partitions at their sources, by mirror."""
        by_source: dict[ConnectionSettings, dict[str, _Wanted]] = defaultdict(dict)
        for job, opening, _ in opened:
            mirrors = by_source[job.spec.source]
            wanted = mirrors.setdefault(job.spec.name, defaultdict(set))
            epochs = {} if isinstance(opening, LogmirrorError) else opening.epochs
            for flow in job.flows:
                wanted[flow.source] |= {epochs.get(flow.source, -1)}
        states: dict[str, _States | LogmirrorError] = {}
        alone: list[tuple[ConnectionSettings, str, _Wanted]] = []
        read = self._pool.map(self._read, by_source, map(_merged, by_source.values()))
        for (source, mirrors), of_source in zip(by_source.items(), read, strict=True):
            if isinstance(of_source, LogmirrorError) and len(mirrors) > 1:
                alone += [(source, *each) for each in mirrors.items()]  # whose partition is it?
            else:
                states |= dict.fromkeys(mirrors, of_source)
        each_alone = self._pool.map(lambda one: self._read(one[0], one[2]), alone)
        return states | {name: own for (_, name, _), own in zip(alone, each_alone, strict=True)}

    def _read(self, source: ConnectionSettings, wanted: _Wanted) -> _States | LogmirrorError:
        try:
            return read_states(self._resources.clients(source), wanted)
        except LogmirrorError as error:
            return error

    # -- destinations ----------------------------------------------------------------------------

    def _open(self, job: _Job) -> _Opened:
        """Read the positions of some flows into one destination."""
        resources = self._resources
        try:
            destination = resources.destination(job.written)
            opening = Opening(destination, job.flows, job.spec.chain_start)
        except LogmirrorError as error:
            return _Opened(job, error, resources)
        return _Opened(job, opening, resources)


def _joined(parts: Iterable[Mapping[_K, _V]]) -> dict[_K, _V]:
    return dict(chain.from_iterable(part.items() for part in parts))


def _merged(mirrors: Mapping[str, _Wanted]) -> _Wanted:
    merged: _Wanted = defaultdict(set)
    for wanted in mirrors.values():
        for partition, epochs in wanted.items():
            merged[partition] |= epochs
    return merged


def _flows(spec: MirrorSpec, topic: TopicMetadata | LogmirrorError) -> list[_Flow]:
    if isinstance(topic, LogmirrorError):
        return flows_of(spec, spec.partitions or (-1,))
    return flows_of(spec, spec.partitions or tuple(sorted(topic.partitions)))


def _jobs(spec: MirrorSpec, topic: TopicMetadata | LogmirrorError) -> Iterator[_Job]:
    """Yield the jobs of one mirror."""
    if isinstance(topic, LogmirrorError):
        return
    flows = _flows(spec, topic)
    for _, written in spec.destinations:
        own = [flow for flow, of in flows if of is written]
        size = _FLOWS_AT_ONCE if isinstance(written, ArchiveSpec) else len(own)
        for at in range(0, len(own), size or 1):
            yield _Job(spec, topic, written, own[at : at + size])


def _checked(
    opened: Iterable[_Opened], states: Mapping[str, _States | LogmirrorError]
) -> dict[FlowId, PartitionStatus]:
    """Check positions as `run` does at its start."""
    rows: dict[FlowId, PartitionStatus] = {}
    for job, opening, _ in opened:
        of_mirror = states[job.spec.name]
        for flow in job.flows:
            if isinstance(of_mirror, LogmirrorError):
                rows[flow] = _row(flow, error=of_mirror)
            else:
                rows[flow] = _checked_row(job, flow, opening, of_mirror[flow.source])
    return rows


def _checked_row(
    job: _Job, flow: FlowId, opening: Opening | LogmirrorError, state: SourceState
) -> PartitionStatus:
    row = _row(flow, source_end=state.last_stable_offset)
    if isinstance(opening, LogmirrorError):
        return replace(row, error=opening)
    try:
        start = state.start(flow, opening, job.topic)
    except LogmirrorError as error:
        return replace(row, position=opening.position(flow), error=error)
    written = job.written
    is_degraded = isinstance(written, ArchiveSpec) and written.location.is_fencing_degraded
    return replace(row, position=start.position, is_fencing_degraded=is_degraded)


def _row(
    flow: FlowId, *, source_end: int | None = None, error: LogmirrorError | None = None
) -> PartitionStatus:
    return PartitionStatus(
        mirror=flow.mirror,
        destination=flow.destination,
        topic=flow.topic,
        partition=flow.partition,
        source_end=source_end,
        error=error,
    )


def _rows_of(
    spec: MirrorSpec,
    topic: TopicMetadata | LogmirrorError,
    rows: Mapping[FlowId, PartitionStatus],
) -> Iterator[PartitionStatus]:
    for flow, _ in _flows(spec, topic):
        yield _row(flow, error=topic) if isinstance(topic, LogmirrorError) else rows[flow]
