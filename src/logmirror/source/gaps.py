"""Offset gaps: offsets without a record (I3) and their causes, without a Python step per record.

An offset has no record because it is a transaction marker, because its record was aborted, or
because the source's log no longer has it. The batches show the first two causes. The third is
accepted only if the topic's `cleanup.policy` contains `compact`; otherwise the gap has no cause and
stops the flow with `SourceGapAboveExpected` (R2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import CorruptionError, PositionError
from logmirror.mirror.ports import GapSummary
from logmirror.model import Gap, GapCause

if TYPE_CHECKING:
    from logmirror.wire.scan import Batches

MAX_RUNS: Final = 1000
"""Limit for the runs that an object's metadata lists. A heavily compacted object would have one run
per record. The counts by cause include the offsets of all runs."""

_DATA: Final = 0
_CAUSES: Final = (GapCause.CONTROL, GapCause.ABORTED)  # kinds 1 and 2 of `Batches.kinds`


class GapLedger:
    """The offset gaps of one object while it is written. Runs must be added in ascending order."""

    def __init__(self) -> None:
        self._runs: list[Gap] = []
        self._counts = dict.fromkeys(GapCause, 0)

    def add(self, first: int, last: int, cause: GapCause) -> None:
        """Add the run first..last, both included. Does nothing if it is empty."""
        if last < first:
            return
        self._counts[cause] += last - first + 1
        previous = self._runs[-1] if self._runs else None
        if previous and previous.last + 1 == first and previous.cause is cause:
            self._runs[-1] = Gap(first=previous.first, last=last, cause=cause)
        elif len(self._runs) < MAX_RUNS:
            self._runs.append(Gap(first=first, last=last, cause=cause))

    def count(self, cause: GapCause, offsets: int) -> None:
        """Count offsets whose exact values are unknown (inside batches that are not decoded)."""
        self._counts[cause] += offsets

    def summary(self) -> GapSummary:
        """Return the summary for the receipt and the object's metadata."""
        return GapSummary(
            runs=tuple(self._runs),
            control=self._counts[GapCause.CONTROL],
            aborted=self._counts[GapCause.ABORTED],
            compacted=self._counts[GapCause.COMPACTED],
        )


def batch_gaps(
    batches: Batches, start: int, stop: int, position: int, *, compacted: bool
) -> list[Gap]:
    """Return the offset gaps that the headers of batches start..stop-1 show.

    Args:
        batches: A scanned fetch response.
        start: Index of the first batch.
        stop: One past the index of the last batch.
        position: The next expected offset. The first batch may begin before it.
        compacted: Whether the topic's `cleanup.policy` contains `compact`.

    Returns:
        Runs in ascending order: control batches, aborted batches, and gaps between batches.

    Raises:
        PositionError: A gap without a cause. Facts: `expected`, `got`.
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
    """Check that each data batch of start..stop-1 has a record at each of its offsets.

    Raises:
        PositionError: A batch has fewer records. Facts: `expected`, `got`, `records`.
    """
    spans = batches.last_offsets[start:stop] - batches.base_offsets[start:stop] + 1
    counts = batches.record_counts[start:stop]
    is_sparse = (batches.kinds[start:stop] == _DATA) & (counts != spans)
    if is_sparse.any():
        at = start + int(np.argmax(is_sparse))
        first, last = int(batches.base_offsets[at]), int(batches.last_offsets[at])
        raise unexplained_gap(first, last).add_facts(records=int(batches.record_counts[at]))


def beyond_the_end(batches: Batches, high_watermark: int) -> CorruptionError:
    """Return the error for a response whose last batch ends beyond the high watermark."""
    return CorruptionError(
        "the source served a batch beyond its high watermark",
        hint="a batch's checksum does not cover its base offset: the offset was changed on the "
        "source's disk or in transit. Nothing of the response was written. Read the offset from "
        "another replica: move the partition's leadership, then restart the mirror.",
        offset=int(batches.base_offsets[-1]),
        batch_last=int(batches.last_offsets[-1]),
        high_watermark=high_watermark,
    )


def unexplained_gap(expected: int, got: int) -> PositionError:
    """Return the error for an offset gap without a cause."""
    return PositionError(
        "offset gap without a cause at the source",
        hint="the topic's cleanup.policy does not contain `compact`, which would explain the gap. "
        "Records may have been lost at the source (unclean leader election, manual repair of a log "
        "directory). Nothing was written past the gap.",
        reason="SourceGapAboveExpected",
        expected=expected,
        got=got,
    )
