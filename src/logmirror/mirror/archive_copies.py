"""Driver: flows into archives. Positions come from names, commits publish what was staged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.archive.claims import sweep_claims
from logmirror.errors import InternalError, LogmirrorError
from logmirror.mirror.ports import ArchiveSpec
from logmirror.mirror.positions import chain_position, checked_position
from logmirror.stores.locations import S3Location

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.commit import Committer
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import (
        ChainStart,
        DestinationSpec,
        FlowId,
        SliceResult,
        SourceView,
        Work,
    )
    from logmirror.stores.base import BlobStore
    from logmirror.stores.locations import StoreLocation


class ArchiveCopies:
    """A `Destination` whose copies are chains of objects in stores."""

    def __init__(
        self, open_store: Callable[[StoreLocation], BlobStore], committer: Committer, clock: Clock
    ) -> None:
        self._open_store, self._committer, self._clock = open_store, committer, clock

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> ArchiveSpec:
        """See `Destination.prepare`: folders are made when they are first written to."""
        del source, topic, partitions
        return _archive(spec)

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: one listing for each flow."""
        archive = _archive(spec)
        store = self._open_store(archive.location)
        found: dict[FlowId, int | LogmirrorError | None] = {}
        for flow in flows:
            try:
                found[flow] = chain_position(
                    store, flow, archive.extension, chain_start=chain_start
                )
            except LogmirrorError as error:
                found[flow] = error
        return found

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """See `Destination.check`."""
        return checked_position(self._open_store(_archive(spec).location), flow, found, view)

    def opened(self, state: FlowState) -> None:
        """See `Destination.opened`: claims that nothing can need any more are removed.

        That is those of Parquet objects, whose footers say the same. Without its claim nobody could
        tell whether a value in NDJSON was changed, or a batch taken out of a native object. In a
        bucket all stay: an archiver need not be allowed to delete there, and looking for old ones
        would be a listing of all of them (decision 0006).
        """
        archive = _archive(state.destination)
        location = archive.location
        if archive.format != "parquet" or isinstance(location, S3Location):
            return
        sweep_claims(
            self._open_store(location),
            state.flow.destination,
            state.flow.partition,
            position=state.position,
            now_ms=self._clock.now_ms(),
        )

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """See `Committer.commit`."""
        return self._committer.commit(state, works, results)


def _archive(spec: DestinationSpec) -> ArchiveSpec:
    if not isinstance(spec, ArchiveSpec):
        raise InternalError("not an archive", spec=type(spec).__name__)
    return spec
