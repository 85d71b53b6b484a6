"""The port of a kind of destination: archives and clusters implement it.

prepare -> positions -> (the source's offsets are read) -> check -> opened -> [slices] -> commit
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import (
        ChainStart,
        DestinationSpec,
        FlowId,
        SliceResult,
        SourceView,
        Work,
    )


class Destination(Protocol):
    """The driver's side of one kind of destination: reads positions, and commits results."""

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> DestinationSpec:
        """Prepare a destination for a topic. Called at the start and for new partitions.

        Args:
            spec: The destination.
            source: The client of the source's cluster.
            topic: The source's topic.
            partitions: The replicated partitions; None: all.

        Returns:
            The same destination, completed by what its cluster or store reports.

        Raises:
            UsageError: It cannot be prepared, or its configuration would change, reject or delete
                replicated records.
        """
        ...

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> Mapping[FlowId, int | LogmirrorError | None]:
        """Read the position of each flow from what is durable at the destination (I1).

        Returns:
            For each flow the next offset to copy; None if the destination has no data yet; or an
            error. A `PositionError` with the reason `DestinationDrift` means that objects which
            this process has seen are missing.
        """
        ...

    def leader_epochs(
        self, spec: DestinationSpec, found: Mapping[FlowId, int | LogmirrorError | None]
    ) -> Mapping[FlowId, int]:
        """Return the source's leader epoch of the last copied batch, as the destination stores it.

        Args:
            spec: The destination.
            found: The result of `positions`.

        Returns:
            An epoch for each flow whose last batch is known; the others are left out.
        """
        ...

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """Return the position of a flow, checked against the source.

        Args:
            spec: The destination.
            flow: The flow.
            found: The result of `positions`, which was read before `view`.
            view: The source's partition.

        Raises:
            PositionError: The source no longer has the next record, ends below the position, or
                its topic was recreated.
        """
        ...

    def opened(self, state: FlowState) -> None:
        """Prepare for the first write after a position was read: see to earlier writers.

        May make the flow wait and read its position again (`state.retry_at_ms`,
        `state.position_stale`).
        """
        ...

    def drifted(self, state: FlowState) -> bool:
        """Return whether a chain's end has changed, so that its position must be read again.

        Sends at most one inexpensive request. Always False for clusters: their brokers check each
        write.
        """
        ...

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """Commit the results of one flow's slices, and advance `state`.

        Args:
            state: The flow.
            works: The works of the tick for this flow.
            results: Their results, in any order.

        Returns:
            The first error, or None. Results before it are committed.
        """
        ...
