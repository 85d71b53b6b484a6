"""The composition root of `status`, and what commands that only look have in common.

It creates nothing anywhere, and loads no kernels, which takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.errors import LogmirrorError
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.mirror.positions import check_incarnation
from logmirror.mirror.source_views import source_views
from logmirror.stores.opening import open_store
from logmirror.wiring import PATIENCE_MS, Clients, destinations, mirror_specs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config import Settings
    from logmirror.mirror.ports import DestinationSpec, SourceView
    from logmirror.mirror.source_views import MirrorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """One flow as `status` shows it."""

    flow: FlowId
    source_end: int | None = None
    position: int | None = None
    error: LogmirrorError | None = None
    is_fencing_degraded: bool = False
    """The store may replace what is there: two writers are kept apart as well as it goes."""

    @property
    def lag(self) -> int | None:
        """Offsets that may be copied and are not."""
        if self.source_end is None or self.position is None:
            return None
        return max(self.source_end - self.position, 0)


def status(settings: Settings) -> list[StatusRow]:
    """Where every flow of every enabled mirror stands. Creates nothing anywhere."""
    rows: list[StatusRow] = []
    clients = Clients(PATIENCE_MS)
    try:
        for spec in mirror_specs(settings):
            rows += _status_of(spec, clients)
    finally:
        clients.close()
    return rows


def _status_of(spec: MirrorSpec, clients: Clients) -> Iterator[StatusRow]:
    destination = destinations(clients, lambda location: open_store(location, "-"), "-")
    try:
        numbers, topic_id = look_at_topic(spec, clients)
    except LogmirrorError as error:
        for flow, _ in flows_of(spec, spec.partitions or (-1,)):
            yield StatusRow(flow=flow, error=error)
        return
    flows = dict(flows_of(spec, numbers))
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
        store = open_store(spec.location, "status")
        try:
            check_incarnation(store, flow, view.topic_id, position)
        except LogmirrorError as error:
            return StatusRow(flow=flow, source_end=view.stable_end, error=error)
    is_degraded = isinstance(spec, ArchiveSpec) and spec.location.is_fencing_degraded
    return StatusRow(
        flow=flow,
        source_end=view.stable_end,
        position=position,
        is_fencing_degraded=is_degraded,
    )


def look_at_topic(spec: MirrorSpec, clients: Clients) -> tuple[tuple[int, ...], bytes | None]:
    """The mirror's partitions and the topic's id."""
    topic = clients(spec.source).topic(spec.topic)
    return spec.partitions or tuple(sorted(topic.partitions)), topic.topic_id


def flows_of(spec: MirrorSpec, numbers: tuple[int, ...]) -> list[tuple[FlowId, DestinationSpec]]:
    """Each destination's flow of each partition."""
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), written)
        for name, written in spec.destinations
        for n in numbers
    ]
