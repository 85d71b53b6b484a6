"""Driver: archives as a `Destination`: positions come from names, commits publish objects."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from logmirror.archive.claims import last_claims, latest_claim, sweep_claims
from logmirror.errors import (
    InternalError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.locations import S3Location
from logmirror.mirror.ports import ArchiveSpec
from logmirror.to_archive.positions import (
    check_drift,
    checked_position,
    read_chain,
    read_end,
    whole_chain,
)
from logmirror.to_archive.snapshots import begin_snapshots, prune

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from logmirror.archive.claims import Claim
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.locations import StoreLocation
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
    from logmirror.to_archive.commit import Committer
    from logmirror.to_archive.whole_chain import WholeChain

_LOG = logging.getLogger("logmirror.mirror")


START_LISTING_MS: Final = 20_000
"""How long the start of a lane checks the older names of long chains, all of them together, before
it copies. Drift checks continue. At 50 ms per request this is 400,000
names. A start that takes 30 s would count as a stalled one."""

_STEPS_MS: Final = 1_000
_STEPS_SHARE: Final = 10
"""Limits for one drift check that continues: a second, and in an interval a tenth of it."""


class ArchiveDestination:
    """A `Destination` that writes chains of objects to stores.

    Args:
        open_store: Returns the store of a location.
        committer: Publishes objects.
        clock: Measures ages and budgets.
        listing_ms: How long reading positions may check the older names of long chains; the rest
            is left to drift checks. None: without limit.
    """

    def __init__(
        self,
        open_store: Callable[[StoreLocation], BlobStore],
        committer: Committer,
        clock: Clock,
        *,
        listing_ms: int | None = None,
    ) -> None:
        self._open_store, self._committer, self._clock = open_store, committer, clock
        self._listing_ms = listing_ms
        """What is left of it."""

        self._passes: dict[FlowId, WholeChain] = {}
        """Checks of all names, of chains longer than one listing."""

        self._newest: dict[FlowId, str] = {}
        """The last object of each flow that this process has seen, by name."""

        self._newest_claims: dict[FlowId, Claim | None] = {}
        """The newest claim of each flow, between `leader_epochs` and `check`."""

        self._checked: dict[FlowId, str] = {}
        """The newest object of each flow at the last drift check, by name."""

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> ArchiveSpec:
        """See `Destination.prepare`: the first write creates the folders."""
        del source, topic, partitions
        return _archive(spec)

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: one listing for each flow with up to 1,000 objects.

        Of a longer chain, the end is listed, and once in a process all names.
        """
        archive = _archive(spec)
        store = self._open_store(archive.location)
        found: dict[FlowId, int | LogmirrorError | None] = {}
        for flow in flows:
            try:
                found[flow] = self._position(store, flow, archive, chain_start)
            except LogmirrorError as error:
                found[flow] = error
        return found

    def _position(
        self, store: BlobStore, flow: FlowId, archive: ArchiveSpec, chain_start: ChainStart
    ) -> int | None:
        read, is_whole = read_end(store, flow, archive, chain_start=chain_start)
        known, newest = self._newest.get(flow, ""), read.objects[-1].name if read.objects else ""
        if known:
            check_drift(flow, known=known, newest=newest)
        self._newest[flow] = newest
        if not is_whole:
            self._check_all_names(store, flow, archive, chain_start)
        return read.next_offset

    def _check_all_names(
        self, store: BlobStore, flow: FlowId, archive: ArchiveSpec, chain_start: ChainStart
    ) -> None:
        """Check the names before the last listing, within the time limit.

        Raises:
            CorruptionError: The chain is broken.
        """
        is_new = flow not in self._passes
        if is_new:
            self._passes[flow] = whole_chain(store, flow, archive, chain_start)
        began_ms = self._clock.monotonic_ms()
        self._continue_check(flow, self._listing_ms)
        if self._listing_ms is None:
            return
        self._listing_ms = max(0, self._listing_ms - (self._clock.monotonic_ms() - began_ms))
        if is_new and not self._passes[flow].is_checked:
            _LOG.info(
                "a long chain is checked while the mirror runs",
                extra={
                    "facts": {
                        **_facts(flow),
                        "checked": self._passes[flow].checked_name or "nothing",
                        "end": self._newest[flow],
                    }
                },
            )

    def _continue_check(self, flow: FlowId, limit_ms: float | None) -> None:
        """Check names until the last one, or until the limit is over."""
        began_ms = self._clock.monotonic_ms()
        names = self._passes[flow]
        while not names.is_checked:
            if limit_ms is not None and self._clock.monotonic_ms() - began_ms >= limit_ms:
                return
            names.step()

    def leader_epochs(
        self, spec: DestinationSpec, found: Mapping[FlowId, int | LogmirrorError | None]
    ) -> dict[FlowId, int]:
        """See `Destination.leader_epochs`: the claims hold them."""
        store, epochs = self._open_store(_archive(spec).location), {}
        for flow, position in found.items():
            if isinstance(position, int):
                newest, last = last_claims(store, flow.destination, flow.partition, position)
                self._newest_claims[flow] = newest
                if last is not None and last.leader_epoch is not None:
                    epochs[flow] = last.leader_epoch
        return epochs

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """See `Destination.check`."""
        archive = _archive(spec)
        if flow in self._newest_claims:
            newest = self._newest_claims.pop(flow)
        else:
            store = self._open_store(archive.location)
            newest = latest_claim(store, flow.destination, flow.partition)
        return checked_position(newest, archive, flow, found, view)

    def opened(self, state: FlowState) -> None:
        """See `Destination.opened`: removes claims that are no longer needed.

        These are old claims of Parquet objects in folders; the footers hold the same facts. Claims
        of other formats are kept: without them, a changed value in NDJSON or a batch removed from a
        native object could not be detected. In a bucket all claims are kept: the mirror may lack
        the permission to delete, and finding old ones would list all of them (decision 0006).
        """
        state.newest = self._newest.get(state.flow, "")
        archive = _archive(state.destination)
        if archive.compaction:
            begin_snapshots(state, self._open_store(archive.location))
            # An earlier run may have died after writing a snapshot, and there may be no new one.
            # A failure is ignored: the next snapshot prunes again.
            with contextlib.suppress(UnavailableError, OutcomeUnknownError):
                prune(self._open_store(archive.location), state.flow, archive)
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

    def drifted(self, state: FlowState) -> bool:
        """See `Destination.drifted`: lists the chain from the newest object of the last check on.

        Also continues the check of all names, if the start has left some.

        Raises:
            CorruptionError: The chain is broken among the names that were read.
        """
        archive, flow = _archive(state.destination), state.flow
        waiting = sum(not names.is_checked for names in list(self._passes.values()))
        if flow in self._passes and waiting:
            share_ms = archive.drift_check_ms / _STEPS_SHARE / waiting
            self._continue_check(flow, max(1, min(_STEPS_MS, share_ms)))
        since = self._checked.get(flow, "") or state.newest
        if archive.compaction:  # older snapshots may be deleted at any time
            since = state.newest
        self._checked[flow] = state.newest
        store = self._open_store(archive.location)
        objects = read_chain(store, flow, archive, since=since).objects
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
        state.tail_checked |= any(result.tail_checked for result in results)
        self._newest[state.flow] = state.newest
        archive = _archive(state.destination)
        if archive.compaction and any(result.receipts for result in results):
            state.rebuild = False
            state.current_ms = works[0].slice.seen_ms
            try:
                prune(self._open_store(archive.location), state.flow, archive)
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


def _archive(spec: DestinationSpec) -> ArchiveSpec:
    if not isinstance(spec, ArchiveSpec):
        raise InternalError("not an archive", spec=type(spec).__name__)
    return spec
