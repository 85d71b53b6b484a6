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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logmirror.errors import PositionError, PositionMovedError
from logmirror.mirror.backoff import RETRIABLE
from logmirror.mirror.ports import ArchiveSpec
from logmirror.mirror.source_views import compared_views

if TYPE_CHECKING:
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import DestinationSpec, FlowId, SourceView
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


@dataclass(frozen=True, slots=True)
class Start:
    """Where a flow starts after its position was read."""

    position: int
    leader_epoch: int
    """See `FlowState.leader_epoch`."""

    tail_checked: bool
    """See `Work.tail_checked`."""


def checked_start(  # noqa: PLR0913  # what was found, and what it is compared with
    destination: Destination,
    spec: DestinationSpec,
    flow: FlowId,
    found: int | None,
    *,
    view: SourceView,
    epoch: int,
    compacted: bool,
) -> Start:
    """Check a position against the source, its offsets as well as its leader epochs.

    Args:
        destination: The destination.
        spec: Its settings.
        flow: The flow.
        found: The position, as the destination has it; None: it has no data.
        view: The source's partition. Its `epoch_end` is that of `epoch`.
        epoch: The leader epoch of the last copied batch; -1: unknown.
        compacted: See `diverged`.

    Raises:
        PositionError: See `Destination.check`; or the source does not hold the last copied batch.
    """
    is_archive = isinstance(spec, ArchiveSpec)
    try:
        position = destination.check(spec, flow, found, view)
    except PositionError as error:
        if found and view.epoch_end and error.facts.get("reason") == "SourceWentBackwards":
            error.add_facts(diverges_at=min(view.epoch_end.end_offset, found))
        raise
    if found is None:
        return Start(position, -1, is_archive)
    known, is_proven = compared(flow, position, view, epoch, compacted=compacted)
    return Start(position, known, is_archive and is_proven)


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
        for flow, state in self._table.states.items():
            partition = topic.partitions.get(flow.partition)
            is_read_again = state.position_stale or flow.mirror in self._table.stopped
            if flow.mirror != mirror.name or partition is None or is_read_again:
                continue
            if partition.leader_epoch != state.source_epoch:
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
        state.source_epoch = view.leader_epoch
        state.leader_epoch, is_proven = compared(
            state.flow, state.position, view, state.leader_epoch, compacted=state.compacted
        )
        if not (is_proven and isinstance(state.destination, ArchiveSpec)):
            state.tail_checked = False
