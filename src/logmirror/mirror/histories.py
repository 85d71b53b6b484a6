"""Whether a source still holds the records that were copied from it, by leader epochs (KIP-320).

A source that loses records (unclean leader election, restored disk) and receives others has a
second history at the same offsets. The copied records of the first must not be followed by records
of the second. A batch holds the epoch of the leader that wrote it, and a leader that begins below a
batch has lost it.

Leader epoch 0 proves nothing where no leader was ever elected again: a broker without leader epochs
looks the same. Then records are compared instead (`Work.tail_checked`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from logmirror.errors import PositionError, PositionMovedError
from logmirror.mirror.backoff import RETRIABLE
from logmirror.mirror.source_views import compared_views, flows_of

if TYPE_CHECKING:
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.ports import FlowId, SourceView
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import EpochEnd, TopicPartition


def diverged(
    partition: TopicPartition, position: int, epoch: int, end: EpochEnd, *, compacted: bool
) -> PositionError:
    """Return the error of a source that does not hold an epoch up to a position.

    Args:
        partition: The partition of the source.
        position: The end of the last copied batch.
        epoch: The leader epoch of that batch.
        end: The largest epoch of the source's log that is not above `epoch`, and its end.
        compacted: Whether the log cleaner may have removed all batches of `epoch`. A replica that
            was built since then does not know the epoch; so the records must be compared.
    """
    facts: dict[str, Any] = {
        "topic": partition.topic,
        "partition": partition.partition,
        "expected": position,
        "expected_epoch": epoch,
        "got": end.end_offset,
        "found_epoch": end.leader_epoch,
    }
    if compacted and end.end_offset >= position:
        return PositionMovedError("the source no longer knows the last leader epoch", **facts)
    return PositionError(
        "the source no longer holds the records that were copied: its history diverges",
        hint="the source's log was truncated and written again (unclean leader election, or a "
        "restored disk). The copy is kept, and nothing was written behind it; compare it with the "
        "source.",
        reason="SourceWentBackwards",
        diverges_at=min(end.end_offset, position),
        **facts,
    )


def compared(
    flow: FlowId, position: int, view: SourceView, epoch: int, *, compacted: bool
) -> tuple[int, bool]:
    """Compare the epoch of the last copied batch with the source.

    Returns:
        The epoch, or -1 if the source does not know it; and whether the source is proven to hold
        the batch.

    Raises:
        PositionError: It does not hold it.
    """
    end = view.epoch_end
    if epoch < 0 or end is None:
        return -1, False
    if end.leader_epoch != epoch or end.end_offset < position:
        error = diverged(flow.source, position, epoch, end, compacted=compacted)
        if isinstance(error, PositionMovedError):
            return -1, False
        raise error
    return epoch, view.leader_epoch > 0


class EpochChanges:
    """Compares open flows with their source when a leader was elected there.

    Args:
        context: Clients.
        table: The flows.
    """

    def __init__(self, context: LoopContext, table: FlowTable) -> None:
        self._context, self._table = context, table

    def compare(self, mirror: MirrorSpec, topic: TopicMetadata) -> None:
        """Compare the flows of a mirror whose partitions have another leader epoch than before.

        Args:
            mirror: The mirror.
            topic: The current metadata of its topic.
        """
        changed: dict[str, dict[TopicPartition, FlowState]] = defaultdict(dict)
        for flow, _ in flows_of(mirror, topic.partitions):
            state = self._table.states.get(flow)
            if state is None or state.position_stale or mirror.name in self._table.stopped:
                continue
            if topic.partitions[flow.partition].leader_epoch != state.source_epoch:
                changed[flow.destination][flow.source] = state
        client = self._context.client(mirror.source)
        for states in changed.values():
            epochs = {each: state.leader_epoch for each, state in states.items()}
            try:
                views = compared_views(client, topic, epochs)
            except RETRIABLE:
                continue  # the next discovery compares again
            for each, state in states.items():
                try:
                    self._compare(state, views[each])
                except PositionError as error:
                    self._table.fail(state, error)

    @staticmethod
    def _compare(state: FlowState, view: SourceView) -> None:
        epoch, is_proven = compared(
            state.flow, state.position, view, state.leader_epoch, compacted=state.compacted
        )
        state.compared(view.leader_epoch, epoch, is_proven=is_proven)
