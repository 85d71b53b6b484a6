"""Driver: an archive as a `Destination`: positions come from names, commits publish objects."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.archive.claims import last_claims, latest_claim, sweep_claims
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.locations import S3Location
from logmirror.mirror.ports import Begun
from logmirror.to_archive.positions import (
    check_drift,
    checked_position,
    read_chain,
    read_end,
    whole_chain,
)
from logmirror.to_archive.snapshots import check_is_snapshot, newest_snapshot, prune
from logmirror.to_archive.whole_chain import LongChains

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from logmirror.archive.claims import Claim
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.locations import StoreLocation
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import (
        ArchiveSpec,
        ChainStart,
        FlowId,
        SliceResult,
        SourceView,
        Start,
        Work,
    )
    from logmirror.stores.base import BlobStore
    from logmirror.to_archive.commit import Committer

_LOG = logging.getLogger("logmirror.mirror")


START_LISTING_MS: Final = 20_000
"""How long the start of a lane checks the older names of long chains, all of them together, before
it copies. Drift checks continue. At 50 ms per request this is 400,000
names. A start that takes 30 s would count as a stalled one."""


class ArchiveDestination:
    """A `Destination` that writes chains of objects to a store.

    Args:
        spec: Where and how objects are written.
        open_store: Returns the store of a location. Not called before the store is needed.
        committer: Publishes objects.
        clock: Measures ages.
        long_chains: Checks the older names of long chains. None: without limit, when positions are
            read.
    """

    def __init__(
        self,
        spec: ArchiveSpec,
        open_store: Callable[[StoreLocation], BlobStore],
        committer: Committer,
        clock: Clock,
        *,
        long_chains: LongChains | None = None,
    ) -> None:
        self.spec: Final = spec
        self._open_store, self._committer, self._clock = open_store, committer, clock
        self._long_chains = long_chains or LongChains(clock)
        self._newest: dict[FlowId, str] = {}
        """The last object of each flow that this process has seen, by name."""

        self._newest_claims: dict[FlowId, Claim | None] = {}
        """The newest claim of each flow, between `leader_epoch` and `check`."""

        self._checked: dict[FlowId, str] = {}
        """The newest object of each flow at the last drift check, by name."""

        self._left: set[str] = set()
        """Objects that `prune` does not delete, by path."""

    @property
    def _store(self) -> BlobStore:
        return self._open_store(self.spec.location)

    def prepare(
        self, source: ClusterClient, topic: TopicMetadata, partitions: Collection[int] | None
    ) -> None:
        """See `Destination.prepare`: the first write creates the folders."""
        del source, topic, partitions

    def positions(
        self, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: one listing for each flow with up to 1,000 objects.

        Of a longer chain, the end is listed, and once in a process all names.
        """
        store = self._store
        found: dict[FlowId, int | LogmirrorError | None] = {}
        for flow in flows:
            try:
                found[flow] = self._position(store, flow, chain_start)
            except LogmirrorError as error:
                found[flow] = error
        return found

    def _position(self, store: BlobStore, flow: FlowId, chain_start: ChainStart) -> int | None:
        read, is_whole = read_end(store, flow, self.spec, chain_start=chain_start)
        known, newest = self._newest.get(flow, ""), read.objects[-1].name if read.objects else ""
        if known:
            check_drift(flow, known=known, newest=newest)
        self._newest[flow] = newest
        if not is_whole:
            self._check_all_names(store, flow, chain_start)
        return read.next_offset

    def _check_all_names(self, store: BlobStore, flow: FlowId, chain_start: ChainStart) -> None:
        """Check the names before the last listing, within the time limit.

        Raises:
            CorruptionError: The chain is broken.
        """
        left = self._long_chains.check(
            flow, lambda: whole_chain(store, flow, self.spec, chain_start)
        )
        if left is not None:
            _LOG.info(
                "a long chain is checked while the mirror runs",
                extra={
                    "facts": {
                        **_facts(flow),
                        "checked": left.checked_name or "nothing",
                        "end": self._newest[flow],
                    }
                },
            )

    def leader_epoch(self, flow: FlowId, position: int) -> int:
        """See `Destination.leader_epoch`: the claims hold them."""
        newest, last = last_claims(self._store, flow.destination, flow.partition, position)
        self._newest_claims[flow] = newest
        return -1 if last is None or last.leader_epoch is None else last.leader_epoch

    def check(self, flow: FlowId, found: int | None, view: SourceView) -> int:
        """See `Destination.check`."""
        if flow in self._newest_claims:
            newest = self._newest_claims.pop(flow)
        else:
            newest = latest_claim(self._store, flow.destination, flow.partition)
        return checked_position(newest, self.spec, flow, found, view)

    def begin(self, flow: FlowId, start: Start) -> Begun:
        """See `Destination.begin`: removes snapshots and claims that are no longer needed.

        The claims are old ones of Parquet objects in folders; the footers hold the same facts.
        Claims of other formats are kept: without them, a changed value in NDJSON or a batch removed
        from a native object could not be detected. In a bucket all claims are kept: the mirror may
        lack the permission to delete, and finding old ones would list all of them (decision 0006).

        Raises:
            CorruptionError: With `compaction: log`, the newest object is not a snapshot, or is
                damaged. Nothing was deleted.
        """
        archive, begun = self.spec, Begun(newest=self._newest.get(flow, ""))
        if archive.compaction:
            if begun.newest:
                check_is_snapshot(self._store, flow, begun.newest)
            snapshot_ms, rebuild = newest_snapshot(flow, start, self._store)
            begun = replace(begun, snapshot_ms=snapshot_ms, rebuild=rebuild)
            # An earlier run may have died after writing a snapshot, and there may be no new one.
            # A failure is ignored: the next snapshot prunes again.
            with contextlib.suppress(UnavailableError, OutcomeUnknownError):
                prune(self._store, flow, archive, self._left)
        if archive.format != "parquet" or isinstance(archive.location, S3Location):
            return begun
        sweep_claims(
            self._store,
            flow.destination,
            flow.partition,
            position=start.position,
            now_ms=self._clock.now_ms(),
        )
        return begun

    def drifted(self, state: FlowState) -> bool:
        """See `Destination.drifted`: lists the chain from the newest object of the last check on.

        Also continues the check of all names, if the start has left some.

        Raises:
            CorruptionError: The chain is broken among the names that were read.
        """
        archive, flow = self.spec, state.flow
        self._long_chains.step(flow, archive.drift_check_ms)
        since = self._checked.get(flow, "") or state.newest
        if archive.compaction:  # older snapshots may be deleted at any time
            since = state.newest
        self._checked[flow] = state.newest
        objects = read_chain(self._store, flow, archive, since=since).objects
        ends = [objects[0].name, objects[-1].name] if objects else ["", ""]
        if ends == [since, state.newest]:
            return False
        self._checked[flow] = ""
        _LOG.info(
            "the chain does not end at the last known object",
            extra={
                "facts": {
                    **_facts(flow),
                    "expected": state.newest or "nothing",
                    "found": ends[1] or "nothing",
                }
            },
        )
        return True

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """See `Committer.commit`."""
        error = self._committer.commit(state, works, results)
        self._newest[state.flow] = state.newest
        if self.spec.compaction and any(result.receipts for result in results):
            state.snapshot_written(works[0].slice.seen_ms)
            try:
                prune(self._store, state.flow, self.spec, self._left)
            except LogmirrorError as failed:  # the next snapshot prunes again
                error = error or failed
        return error


def _facts(flow: FlowId) -> dict[str, object]:
    return {
        "mirror": flow.mirror,
        "destination": flow.destination,
        "topic": flow.topic,
        "partition": flow.partition,
    }
