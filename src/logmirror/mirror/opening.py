"""Driver: where a flow starts: its position at the destination, compared with the source.

    Opening(positions, leader epochs) -> the source's offsets are read -> start

`run` opens its flows so, at the start and whenever a position must be read again; `status` and
`validate --check` do the same, and so report what `run` would refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logmirror.errors import LogmirrorError, PositionError
from logmirror.mirror.histories import compared
from logmirror.mirror.ports import Start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.destination import Destination
    from logmirror.mirror.ports import ChainStart, FlowId, SourceView
    from logmirror.model import TopicPartition


class _Found(NamedTuple):
    """What a destination holds of one flow."""

    position: int | None
    epoch: int
    """The source's leader epoch of the last copied batch; -1: unknown."""


class Opening:
    """The positions of some flows into one destination.

    They are read here, before the source's offsets. The order matters because both advance while
    another writer is active: an older view of the source may end below the position.

    Args:
        destination: The destination. It is not changed.
        flows: The flows, one for each partition.
        chain_start: The declared first offset of new chains.

    Raises:
        LogmirrorError: No position could be read.
    """

    def __init__(
        self, destination: Destination, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> None:
        self._destination = destination
        self._found: dict[FlowId, _Found | LogmirrorError] = {}
        for flow, position in destination.positions(flows, chain_start).items():
            try:
                self._found[flow] = self._read(flow, position)
            except LogmirrorError as error:
                self._found[flow] = error

    def _read(self, flow: FlowId, position: int | LogmirrorError | None) -> _Found:
        if isinstance(position, LogmirrorError):
            raise position
        if position is None:
            return _Found(None, -1)
        return _Found(position, self._destination.leader_epoch(flow, position))

    @property
    def epochs(self) -> dict[TopicPartition, int]:
        """For each flow's partition the leader epoch of the last copied batch; -1: unknown."""
        return {flow.source: self.epoch(flow) for flow in self._found}

    def epoch(self, flow: FlowId) -> int:
        """Return the leader epoch of the last copied batch; -1: unknown."""
        found = self._found[flow]
        return -1 if isinstance(found, LogmirrorError) else found.epoch

    def remember(self, flow: FlowId, position: int, epoch: int) -> None:
        """Use this epoch if the flow is still at this position, and its destination stores none."""
        if self._found[flow] == (position, -1):
            self._found[flow] = _Found(position, epoch)

    def position(self, flow: FlowId) -> int | None:
        """Return the position as the destination has it; None: it has no data, or was not read."""
        found = self._found[flow]
        return None if isinstance(found, LogmirrorError) else found.position

    def start(self, flow: FlowId, view: SourceView, *, compacted: bool) -> Start:
        """Compare a position with the source, its offsets as well as its leader epochs.

        Args:
            flow: One of the flows.
            view: The source's partition. Its `epoch_end` is that of the flow's epoch in `epochs`.
            compacted: See `histories.diverged`.

        Raises:
            LogmirrorError: The position could not be read.
            PositionError: See `Destination.check`; or the source does not hold the last copied
                batch.
        """
        found = self._found[flow]
        if isinstance(found, LogmirrorError):
            raise found
        is_archive = not self._destination.spec.follows
        try:
            position = self._destination.check(flow, found.position, view)
        except PositionError as error:
            backwards = error.facts.get("reason") == "SourceWentBackwards"
            if found.position and view.epoch_end and backwards:
                error.add_facts(diverges_at=min(view.epoch_end.end_offset, found.position))
            raise
        if found.position is None:
            return Start(position=position, leader_epoch=-1, tail_checked=is_archive, view=view)
        known, is_proven = compared(flow, position, view, found.epoch, compacted=compacted)
        return Start(
            position=position,
            leader_epoch=known,
            tail_checked=is_archive and is_proven,
            view=view,
        )
