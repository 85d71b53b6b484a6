"""Group offsets in archives: what writes the snapshots, and plans that are made from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.specs import archive_link_specs
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.errors import CorruptionError
from logmirror.groups.archive_service import ArchiveService
from logmirror.mirror.ports import FlowId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config.settings import Settings
    from logmirror.groups.archive_link import ArchiveLink
    from logmirror.groups.archive_spec import ArchivedTopic, ArchiveLinkSpec
    from logmirror.monitoring.metrics import Recorder
    from logmirror.stores.base import BlobStore


def archive_service(settings: Settings, recorder: Recorder) -> ArchiveService | None:
    """Return what stores the offsets of groups beside archives; None if no mirror wants it."""
    specs = archive_link_specs(settings)
    return ArchiveService(specs, _open_link, SYSTEM_CLOCK, recorder) if specs else None


@contextlib.contextmanager
def _open_link(spec: ArchiveLinkSpec) -> Iterator[ArchiveLink]:
    # These load kernels, only if they are used.
    from logmirror.groups.archive_link import ArchiveLink  # noqa: PLC0415  # see above
    from logmirror.stores.opening import begin_writing  # noqa: PLC0415  # see above

    clients, writer = Clients(COMMAND_BUDGET_MS), new_writer_id()
    with contextlib.closing(clients), contextlib.ExitStack() as stack:
        store = begin_writing(spec.location, writer, stack)
        yield ArchiveLink(
            spec,
            clients(spec.source),
            store,
            _Positions(store, spec.destination),
            clock=SYSTEM_CLOCK,
            writer=writer,
        )


@dataclass(slots=True)
class _Positions:
    """The positions of an archive: after the first time, one listing behind the last object."""

    store: BlobStore
    destination: str
    _last: dict[tuple[str, int], str] = field(default_factory=dict)

    def __call__(self, topic: ArchivedTopic, partition: int) -> int | None:
        """Return the position in a partition; None if its chain is damaged."""
        from logmirror.to_archive.positions import read_chain  # noqa: PLC0415  # loads kernels

        key = topic.mirror, partition
        flow = FlowId(
            mirror=topic.mirror,
            destination=self.destination,
            topic=topic.topic,
            partition=partition,
        )
        try:
            found = read_chain(
                self.store,
                flow,
                topic.written,
                chain_start=topic.chain_start,
                since=self._last.get(key, ""),
            )
        except CorruptionError:
            self._last.pop(key, None)
            return None
        if not found.objects:
            self._last.pop(key, None)
            return found.next_offset
        self._last[key] = found.objects[-1].name
        return found.next_offset
