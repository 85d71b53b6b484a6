"""What of a partition the chain holds, behind its sealed objects. Takes values, does no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from pathlib import Path


class Piece(NamedTuple):
    """Record batches of a partition, at a place of a local copy of a commit object."""

    first: int
    next: int
    file: Path
    position: int
    size_bytes: int


class Stretch(NamedTuple):
    """A segment to rebuild."""

    first: int
    next: int | None
    """Its end, if its cut is in the chain; None: it is the open segment."""

    pieces: tuple[Piece, ...]

    def is_before(self, log_start: int) -> bool:
        """Whether all its records were deleted."""
        return self.next is not None and self.next <= log_start


@dataclass(slots=True)
class Tail:
    """The pieces and cuts of one partition, in the order of the chain."""

    pieces: list[Piece] = field(default_factory=list)
    cuts: dict[int, int] = field(default_factory=dict)
    """The end of each complete segment, by its first offset."""

    def stretches(self, sealed_end: int | None, log_start: int) -> list[Stretch]:
        """Return the segments behind the sealed objects, also those before the log start.

        Args:
            sealed_end: The end of the sealed objects; None: there are none.
            log_start: The log start offset.

        Raises:
            CorruptionError: Records between the sealed objects and a piece are missing.
        """
        found: list[Stretch] = []
        pieces = [p for p in self.pieces if sealed_end is None or p.next > sealed_end]
        if not pieces:
            return found
        start = pieces[0].first
        expected = start if sealed_end is None and start <= log_start else sealed_end or 0
        waiting: list[Piece] = []
        ends = set(self.cuts.values())  # the begin of a deleted segment may not be here any more
        for piece in pieces:
            if piece.next <= expected:
                continue
            if piece.first != expected:
                raise CorruptionError(
                    "acknowledged records are missing in the bucket",
                    hint="restore the missing objects, for example from an earlier version of the "
                    "bucket",
                    expected=expected,
                    found=piece.first,
                )
            waiting.append(piece)
            expected = piece.next
            if expected in ends:
                found.append(Stretch(waiting[0].first, expected, tuple(waiting)))
                waiting = []
        if waiting:
            found.append(Stretch(waiting[0].first, None, tuple(waiting)))
        return found
