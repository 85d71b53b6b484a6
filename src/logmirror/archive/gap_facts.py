"""The offset gaps of an object and their causes (I3).

Offsets are added in ascending order as they are read; the offsets between them are missing. Causes
come from witnesses: the batches (transaction markers), the footer, the claim. Missing offsets
without a cause are counted separately. Runs are arrays, so a compacted object with a gap next to
every record does not cost a Python step per gap.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import CorruptionError
from logmirror.model import Gap, GapCause, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]

RUNS_KEPT: Final = 1000
"""Maximum number of runs kept for one object; the counts are complete."""

_NONE: Final = np.empty(0, np.int64)


class Runs:
    """Disjoint runs of offsets, ascending."""

    def __init__(self, firsts: Int64s, lasts: Int64s) -> None:
        self.firsts, self.lasts = firsts, lasts
        self._before = np.concatenate([[0], np.cumsum(lasts - firsts + 1)])

    @classmethod
    def of(cls, gaps: Iterable[Gap]) -> Runs:
        """Return the runs of gaps, for all causes together."""
        found = list(gaps)
        return cls(
            np.array([gap.first for gap in found], np.int64),
            np.array([gap.last for gap in found], np.int64),
        )

    @property
    def offset_count(self) -> int:
        """Number of offsets in all runs."""
        return int(self._before[-1])

    def overlaps(self, firsts: Int64s, lasts: Int64s) -> Int64s:
        """Return how many offsets each of the runs first..last shares with these runs."""
        found: Int64s = self._below(lasts + 1) - self._below(firsts)
        return found

    def _below(self, offsets: Int64s) -> Int64s:
        """Return how many offsets of these runs are below each of `offsets`."""
        index = np.searchsorted(self.firsts, offsets)
        ends = np.concatenate([[0], self.lasts + 1])[index]  # end of the previous run, if any
        found: Int64s = self._before[index] - np.where(index > 0, np.maximum(ends - offsets, 0), 0)
        return found


Causes = dict[GapCause, Runs]


def by_cause(gaps: Iterable[Gap]) -> Causes:
    """Return gaps as runs, by cause; causes without gaps are left out."""
    found = list(gaps)
    return {
        cause: Runs.of(gap for gap in found if gap.cause is cause)
        for cause in {gap.cause for gap in found}
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GapFacts:
    """The offsets of one object that have no record."""

    counts: Mapping[GapCause, int] = field(default_factory=dict)
    """Number of offsets, by cause; complete."""

    runs: tuple[Gap, ...] = ()
    """The first `RUNS_KEPT` runs whose individual cause is known, ascending."""

    unexplained_count: int = 0
    """Number of missing offsets without a cause."""

    unexplained: tuple[OffsetRange, ...] = ()
    """The first runs of missing offsets without a cause."""

    def count(self, cause: GapCause) -> int:
        """Return the number of missing offsets with this cause."""
        return self.counts.get(cause, 0)

    @property
    def offset_count(self) -> int:
        """Number of missing offsets, with and without a cause."""
        return sum(self.counts.values()) + self.unexplained_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """The offset gaps of an object according to its footer or its claim."""

    runs: tuple[Gap, ...]
    """The first runs, ascending."""

    counts: Mapping[GapCause, int]
    """Number of offsets by cause; complete."""


class GapWalk:
    """Collects the missing offsets of one object, or of its source.

    Args:
        covered: The range to account for.
    """

    def __init__(self, covered: OffsetRange) -> None:
        self._covered = covered
        self._counts: dict[GapCause, int] = {}
        self._runs: list[Gap] = []
        self._rest: list[OffsetRange] = []
        self._rest_count = 0
        self._next = covered.first

    def step(self, offsets: Int64s, known: Causes, *, reached: int | None = None) -> None:
        """Add the next records.

        Args:
            offsets: Their offsets, ascending, above all offsets added before.
            known: Gaps with a known cause; there may be others between the records.
            reached: All records below this offset were added; None: one past the last record.
        """
        if reached is None:
            reached = int(offsets[-1]) + 1 if len(offsets) else self._next
        edges = np.concatenate([[self._next - 1], offsets, [max(reached, self._next)]])
        self._next = int(edges[-1])
        at = np.flatnonzero(np.diff(edges) > 1)
        if not len(at):
            return
        firsts, lasts = edges[at] + 1, edges[at + 1] - 1
        for cause, runs in known.items():
            common = runs.overlaps(firsts, lasts)
            if common.any():
                self._counts[cause] = self._counts.get(cause, 0) + int(common.sum())
                self._keep(cause, runs, int(firsts[0]), int(lasts[-1]))
                firsts, lasts = _without(firsts, lasts, common, runs)
        self._rest_count += int((lasts - firsts + 1).sum())
        for first, last in zip(firsts[:RUNS_KEPT], lasts[:RUNS_KEPT], strict=True):
            self._keep_rest(int(first), int(last))

    def finish(self, known: Causes | None = None) -> GapFacts:
        """Return the missing offsets of the whole range; `known` as in `step`."""
        self.step(_NONE, known or {}, reached=self._covered.next_offset)
        return GapFacts(
            counts=self._counts,
            runs=merged(self._runs),
            unexplained_count=self._rest_count,
            unexplained=tuple(self._rest),
        )

    def _keep(self, cause: GapCause, runs: Runs, first: int, last: int) -> None:
        is_near = (runs.lasts >= first) & (runs.firsts <= last)
        near = zip(runs.firsts[is_near], runs.lasts[is_near], strict=True)
        for a, b in itertools.islice(near, max(RUNS_KEPT - len(self._runs), 0)):
            self._runs.append(Gap(first=max(int(a), first), last=min(int(b), last), cause=cause))

    def _keep_rest(self, first: int, last: int) -> None:
        if self._rest and self._rest[-1].next_offset == first:
            self._rest[-1] = OffsetRange(first=self._rest[-1].first, last=last)
        elif len(self._rest) < RUNS_KEPT:
            self._rest.append(OffsetRange(first=first, last=last))


def explained(found: GapFacts, witness: Witness, *, name: str) -> GapFacts:
    """Return the gaps that were found, with the causes that the witness adds.

    Raises:
        CorruptionError: Object and witness contradict each other.
    """
    rests = {
        cause: rest
        for cause in GapCause
        if (rest := witness.counts.get(cause, 0) - found.count(cause))
    }
    if sum(rests.values()) != found.unexplained_count or min(rests.values(), default=0) < 0:
        raise CorruptionError(
            "the object's offset gaps differ from those in its footer or claim",
            name=name,
            expected=_text(witness.counts),
            found=f"{_text(found.counts)}; {found.unexplained_count} without a cause",
        )
    runs = list(found.runs)
    if len(rests) == 1:  # otherwise the cause of an individual run is unknown
        [cause] = rests
        runs += [Gap(first=r.first, last=r.last, cause=cause) for r in found.unexplained]
    counts = {cause: count for cause, count in witness.counts.items() if count}
    return GapFacts(counts=counts, runs=merged(runs))


def unrecorded(found: GapFacts) -> GapFacts:
    """Return the gaps of an object of mirror-v3, which records no causes, as `not-recorded`."""
    if not found.unexplained_count:
        return found
    cause = GapCause.UNRECORDED
    runs = [Gap(first=r.first, last=r.last, cause=cause) for r in found.unexplained]
    return GapFacts(counts={cause: found.unexplained_count}, runs=merged(runs))


def check_listed(listed: Causes, found: GapFacts, *, name: str) -> None:
    """Raise CorruptionError if the object has a record at an offset that is listed as a gap."""
    for cause, runs in listed.items():
        if found.count(cause) != runs.offset_count:
            raise CorruptionError(
                "the object has records at offsets that its footer or claim lists as gaps",
                name=name,
                cause=cause.value,
                expected=runs.offset_count,
                found=found.count(cause),
            )


def merged(runs: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return runs in ascending order, adjacent runs of one cause joined; at most `RUNS_KEPT`."""
    found: list[Gap] = []
    for run in sorted(runs):
        before = found[-1] if found else None
        if before and before.cause is run.cause and before.last + 1 == run.first:
            found[-1] = Gap(first=before.first, last=run.last, cause=run.cause)
        elif len(found) < RUNS_KEPT:
            found.append(run)
    return tuple(found)


def _without(firsts: Int64s, lasts: Int64s, common: Int64s, runs: Runs) -> tuple[Int64s, Int64s]:
    """Return the runs first..last without the offsets that are in `runs`."""
    is_touched = common > 0
    pieces: list[tuple[int, int]] = []
    # At most one piece more than there are runs.
    for first, last in zip(firsts[is_touched], lasts[is_touched], strict=True):
        begin = int(first)
        low, high = np.searchsorted(runs.lasts, first), np.searchsorted(runs.firsts, last, "right")
        for index in range(int(low), int(high)):
            pieces.append((begin, int(runs.firsts[index]) - 1))
            begin = int(runs.lasts[index]) + 1
        pieces.append((begin, int(last)))
    kept = np.array([piece for piece in pieces if piece[0] <= piece[1]], np.int64).reshape(-1, 2)
    firsts = np.concatenate([firsts[~is_touched], kept[:, 0]])
    lasts = np.concatenate([lasts[~is_touched], kept[:, 1]])
    order = np.argsort(firsts)
    return firsts[order], lasts[order]


def _text(counts: Mapping[GapCause, int]) -> str:
    found = ", ".join(f"{count} {cause}" for cause, count in counts.items() if count)
    return found or "none"
