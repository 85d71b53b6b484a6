"""Account for the offsets that carry no record (I3), without a Python step per record.

An offset is missing because a transaction marker took it, because its record was aborted, or
because the source's log no longer has it. The first two are seen in the batches. The third is
accepted only where the topic's cleanup.policy compacts; elsewhere it is a gap, and gaps stop the
flow: `SourceGapAboveExpected` in the words of statement R2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import PositionError
from logmirror.mirror.ports import GapSummary
from logmirror.model import Gap, GapCause

if TYPE_CHECKING:
    from logmirror.wire.scan import Batches

MAX_RUNS: Final = 1000
"""Runs kept by an object's ledger. A heavily compacted object would hold one per record; beyond
this the counts by cause still tell how many offsets are missing."""

_DATA: Final = 0
_CAUSES: Final = (GapCause.CONTROL, GapCause.ABORTED)  # kinds 1 and 2 of `Batches.kinds`


class GapLedger:
    """The holes of one object while it is written. Runs must be added in ascending order."""

    def __init__(self) -> None:
        self._runs: list[Gap] = []
        self._counts = dict.fromkeys(GapCause, 0)

    def add(self, first: int, last: int, cause: GapCause) -> None:
        """Add the run first..last, both included; nothing if it is empty."""
        if last < first:
            return
        self._counts[cause] += last - first + 1
        previous = self._runs[-1] if self._runs else None
        if previous and previous.last + 1 == first and previous.cause is cause:
            self._runs[-1] = Gap(first=previous.first, last=last, cause=cause)
        elif len(self._runs) < MAX_RUNS:
            self._runs.append(Gap(first=first, last=last, cause=cause))

    def count(self, cause: GapCause, offsets: int) -> None:
        """Add offsets whose places are not known (inside batches that are not decoded)."""
        self._counts[cause] += offsets

    def summary(self) -> GapSummary:
        """What the receipt and the object's metadata say."""
        return GapSummary(
            runs=tuple(self._runs),
            control=self._counts[GapCause.CONTROL],
            aborted=self._counts[GapCause.ABORTED],
            compacted=self._counts[GapCause.COMPACTED],
        )


def batch_gaps(
    batches: Batches, start: int, stop: int, position: int, *, compacted: bool
) -> list[Gap]:
    """The holes that batches start..stop show from outside, when `position` is expected next.

    Args:
        batches: A scanned fetch response.
        start: The first batch that counts.
        stop: One past the last.
        position: The offset that must come next; the first batch may begin before it.
        compacted: Whether a gap is explained by the topic's cleanup.policy.

    Returns:
        Runs in ascending order: control and aborted batches, and gaps between batches.

    Raises:
        PositionError: A gap that nothing explains. Facts: `expected`, `got`.
    """
    bases = batches.base_offsets[start:stop]
    lasts = batches.last_offsets[start:stop]
    kinds = batches.kinds[start:stop]
    expected = np.empty(len(bases), np.int64)
    if len(bases):
        expected[0] = position
        expected[1:] = lasts[:-1] + 1
    gaps = []
    for i in np.flatnonzero((bases > expected) | (kinds != 0)):
        base, last, kind = int(bases[i]), int(lasts[i]), int(kinds[i])
        if base > expected[i]:
            if not compacted:
                raise unexplained_gap(int(expected[i]), base)
            gaps.append(Gap(first=int(expected[i]), last=base - 1, cause=GapCause.COMPACTED))
        if kind:
            first = max(base, position)
            gaps.append(Gap(first=first, last=last, cause=_CAUSES[kind - 1]))
    return gaps


def check_dense(batches: Batches, start: int, stop: int) -> None:
    """Raise unless each data batch of start..stop has a record at each of its offsets.

    Raises:
        PositionError: One has not. Facts: `expected`, `got`, `records`.
    """
    spans = batches.last_offsets[start:stop] - batches.base_offsets[start:stop] + 1
    counts = batches.record_counts[start:stop]
    is_sparse = (batches.kinds[start:stop] == _DATA) & (counts != spans)
    if is_sparse.any():
        at = start + int(np.argmax(is_sparse))
        first, last = int(batches.base_offsets[at]), int(batches.last_offsets[at])
        raise unexplained_gap(first, last).add_facts(records=int(batches.record_counts[at]))


def unexplained_gap(expected: int, got: int) -> PositionError:
    """The error for offsets that the source skipped without a reason we know."""
    return PositionError(
        "the source skipped offsets without a cause",
        hint="the topic's cleanup.policy has no `compact`, so nothing explains the gap. Records "
        "may have been lost at the source (unclean leader election, log directory repaired by "
        "hand). Nothing was written past the gap.",
        reason="SourceGapAboveExpected",
        expected=expected,
        got=got,
    )
