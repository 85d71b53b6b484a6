"""What the driver asks of a destination, whatever its kind: archives and clusters answer it.

prepare -> positions -> (the source is asked) -> check -> opened -> [work] -> commit
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
    """The driver's side of one kind of destination: where flows stand, and what moves them."""

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> DestinationSpec:
        """Make ready what the flows of a topic need; called at the start and when it grows.

        Args:
            spec: Where the copy goes.
            source: The cluster that is copied.
            topic: Its topic.
            partitions: Those that are copied; None: all.

        Returns:
            The same destination, with what has been learnt about it.

        Raises:
            UsageError: It cannot be made ready, or its settings would break the copy.
        """
        ...

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> Mapping[FlowId, int | LogmirrorError | None]:
        """Where each flow stands, from what is durable (I1); None if nothing fixes it yet.

        A `PositionError` whose `reason` is `DestinationDrift` where that contradicts what the same
        process has seen there before.
        """
        ...

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """The position of a flow, checked against what the source said after `positions`.

        Raises:
            PositionError: The source no longer has what comes next, ends below the position, or is
                another incarnation of the topic.
        """
        ...

    def opened(self, state: FlowState) -> None:
        """A flow begins at its position, for the first time or anew: see to its predecessors.

        May make the flow wait and look again (`state.retry_at_ms`, `state.lost`).
        """
        ...

    def drifted(self, state: FlowState) -> bool:
        """Whether a copy no longer ends where we left it, so that its position is to be read anew.

        One cheap question at most. A cluster's copy is guarded at each write and asked nothing.
        """
        ...

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """Take in what the slices of one flow brought; returns the first error."""
        ...
