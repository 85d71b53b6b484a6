"""The segments of a log, oldest first, without a gap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logmirror.broker.log.segment import Segment


class SegmentList:
    """The segments, found by offset.

    Args:
        segments: In ascending order.
        tail: The last one, if it is open.

    Attributes:
        full_bytes: The size of all segments but the open one.
    """

    def __init__(self, segments: list[Segment], tail: Segment | None = None) -> None:
        self.all = segments
        self._firsts = [segment.first for segment in segments]
        self.full_bytes = sum(found.size_bytes for found in segments if found is not tail)

    def add(self, tail: Segment, full: Segment | None) -> None:
        """Add an open segment; the one before it is full."""
        if full is not None:
            self.full_bytes += full.size_bytes
        self.all.append(tail)
        self._firsts.append(tail.first)

    def take_before(self, offset: int) -> list[Segment]:
        """Remove the sealed segments before an offset, but never the last one; returns them."""
        count = 0
        for segment in self.all[:-1]:
            if not segment.is_sealed or segment.next_offset > offset:
                break
            count += 1
        taken, self.all = self.all[:count], self.all[count:]
        del self._firsts[:count]
        self.full_bytes -= sum(segment.size_bytes for segment in taken)
        return taken

    def place_of(self, old: Sequence[Segment]) -> slice | None:
        """Return where these segments are, one behind the other; None: not all are there."""
        start = bisect_left(self._firsts, old[0].first)
        place = slice(start, start + len(old))
        return place if self.all[place] == list(old) else None

    def replace(self, place: slice, new: Segment) -> None:
        """Put one segment in the place of others."""
        self.full_bytes += new.size_bytes - sum(old.size_bytes for old in self.all[place])
        self.all[place], self._firsts[place] = [new], [new.first]

    def number_of(self, offset: int) -> int:
        """Return the place of the segment that holds an offset; 0 if that is before the first."""
        return max(0, bisect_right(self._firsts, offset) - 1)

    def starting_at(self, offset: int) -> Iterator[Segment]:
        """Yield the segment that holds an offset, and those behind it."""
        return islice(self.all, self.number_of(offset), None)
