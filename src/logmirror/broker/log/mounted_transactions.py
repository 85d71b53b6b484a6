"""The transactions of one mounted object, for readers of committed records.

A marker applies to all batches of its producer since the marker before, perhaps in an earlier
object. So an object knows three things: the aborted transactions that end in it, those that are
open at its end, and the first marker of each producer, which decides what was open before. The
claim of the object may say how the open ones ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logmirror.broker.log.partition_transactions import Aborted

if TYPE_CHECKING:
    from collections.abc import Collection


class TransactionEvents:
    """The transactions of one object. Add its batches in order."""

    __slots__ = ("aborted", "first_outcomes", "open")

    def __init__(self) -> None:
        self.aborted: list[Aborted] = []
        """Those whose marker is in the object, with their first offset in it."""

        self.open: dict[int, int] = {}
        """First offset in the object, by producer ID, of those whose marker is not in it."""

        self.first_outcomes: dict[int, bool] = {}
        """Whether the first marker of a producer commits, by producer ID."""

    def wrote(self, producer_id: int, base_offset: int) -> None:
        """Add a transactional batch."""
        self.open.setdefault(producer_id, base_offset)

    def ended(self, producer_id: int, offset: int, *, is_commit: bool) -> None:
        """Add a marker."""
        self.first_outcomes.setdefault(producer_id, is_commit)
        first = self.open.pop(producer_id, None)
        if first is not None and not is_commit:
            self.aborted.append(Aborted(producer_id, first, offset, offset + 1))

    def decide(self, aborted: Collection[tuple[int, int]], next_offset: int) -> None:
        """Give those that are open their outcome, which the source has reported.

        Args:
            aborted: Producer ID and first offset of each that was aborted, or of a part of it.
            next_offset: The offset behind the object.
        """
        last: dict[int, int] = {}
        for producer_id, first in aborted:
            last[producer_id] = max(first, last.get(producer_id, 0))
        for producer_id, first in self.open.items():
            is_commit = last.get(producer_id, -1) < first
            self.first_outcomes.setdefault(producer_id, is_commit)
            if not is_commit:
                self.aborted.append(Aborted(producer_id, first, next_offset - 1, next_offset))
        self.open = {}


class Outcome(NamedTuple):
    """The outcome of an object's transactions."""

    aborted: list[Aborted]
    undecided: int | None
    """The first offset of the oldest one without a marker; None: all have one."""
