"""The port of a destination: archives and clusters implement it.

prepare -> positions -> (the source's offsets are read) -> check -> begin -> [slices] -> commit

`mirror.opening` calls `positions`, `leader_epoch` and `check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import (
        Begun,
        ChainStart,
        DestinationSpec,
        FlowId,
        SliceResult,
        SourceView,
        Start,
        Work,
    )


class Destination(Protocol):
    """The driver's side of one destination of a mirror: reads positions, and commits results."""

    @property
    def spec(self) -> DestinationSpec:
        """Its settings; after `prepare`, completed by what its cluster or store reports."""
        ...

    def prepare(
        self, source: ClusterClient, topic: TopicMetadata, partitions: Collection[int] | None
    ) -> None:
        """Prepare the destination for a topic. Called at the start and for new partitions.

        Args:
            source: The client of the source's cluster.
            topic: The source's topic.
            partitions: The replicated partitions; None: all.

        Raises:
            UsageError: It cannot be prepared, or its configuration would change, reject or delete
                replicated records.
        """
        ...

    def positions(
        self, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> Mapping[FlowId, int | LogmirrorError | None]:
        """Read the position of each flow from what is durable at the destination (I1).

        Returns:
            For each flow the next offset to copy; None if the destination has no data yet; or an
            error. A `PositionError` with the reason `DestinationDrift` means that objects which
            this process has seen are missing.
        """
        ...

    def leader_epoch(self, flow: FlowId, position: int) -> int:
        """Return the source's leader epoch of the last copied batch, as the destination stores it.

        Args:
            flow: The flow.
            position: The result of `positions`.

        Returns:
            The epoch; -1 if the destination does not store it.
        """
        ...

    def check(self, flow: FlowId, found: int | None, view: SourceView) -> int:
        """Return the position of a flow, checked against the source.

        Args:
            flow: The flow.
            found: The result of `positions`, which was read before `view`.
            view: The source's partition.

        Raises:
            PositionError: The source no longer has the next record, ends below the position, or
                its topic was recreated.
        """
        ...

    def begin(self, flow: FlowId, start: Start) -> Begun:
        """Prepare for the first write after a position was read: see to earlier writers."""
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
