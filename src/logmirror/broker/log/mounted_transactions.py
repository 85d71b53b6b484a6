"""The transactions of one mounted object, for readers of committed records.

A marker applies to all batches of its producer since the marker before, perhaps in an earlier
object. So an object knows three things: the aborted transactions that end in it, those that are
open at its end, and the first marker of each producer, which decides what was open before. The
claim of the object may say how the open ones ended, at its end or at those of merged parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logmirror.broker.log.partition_transactions import Aborted
from logmirror.model import OFFSET_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.model import Decided


class TransactionEvents:
    """The transactions of one object. Add its batches in order."""

    __slots__ = ("_decided", "aborted", "breaks", "first_outcomes", "open")

    def __init__(self, decided: Sequence[Decided] = ()) -> None:
        self.aborted: list[Aborted] = []
        """Those whose end is known, with their first offset in the object."""

        self.open: dict[int, int] = {}
        """First offset in the object, by producer ID, of those whose end is not known."""

        self.first_outcomes: dict[int, bool] = {}
        """Whether the first end of a transaction is a commit, by producer ID."""

        self.breaks: list[int] = []
        """Where a response must end: a transaction was aborted there, without a marker."""

        self._decided = list(reversed(decided))

    def wrote(self, producer_id: int, base_offset: int) -> None:
        """Add a transactional batch."""
        self._pass(base_offset)
        self.open.setdefault(producer_id, base_offset)

    def ended(self, producer_id: int, offset: int, *, is_commit: bool) -> None:
        """Add a marker."""
        self._pass(offset)
        self._end(producer_id, offset, is_commit=is_commit)

    def finish(self) -> None:
        """Take what is known of the end of the object."""
        self._pass(OFFSET_MAX)

    def _pass(self, offset: int) -> None:
        """Add the outcomes that are known of the ends of parts before an offset."""
        while self._decided and offset > self._decided[-1].last:
            last, aborted, committed = self._decided.pop()
            for producer_id in aborted:
                self._end(producer_id, last, is_commit=False)
            for producer_id in committed:
                self._end(producer_id, last, is_commit=True)
            if aborted:
                self.breaks.append(last + 1)

    def _end(self, producer_id: int, last: int, *, is_commit: bool) -> None:
        self.first_outcomes.setdefault(producer_id, is_commit)
        first = self.open.pop(producer_id, None)
        if first is not None and not is_commit:
            self.aborted.append(Aborted(producer_id, first, last, last + 1))


class Outcome(NamedTuple):
    """The outcome of an object's transactions."""

    aborted: list[Aborted]
    undecided: int | None
    """The first offset of the oldest one without an outcome; None: all have one."""

    breaks: Sequence[int] = ()
    """See `TransactionEvents`."""
