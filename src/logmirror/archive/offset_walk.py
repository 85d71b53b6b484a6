"""The offsets of an object as they are read: ascending, and within the range of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logmirror.archive.gap_facts import GapWalk
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from logmirror.archive.gap_facts import Causes
    from logmirror.model import OffsetRange


def check_offsets(offsets: Any, previous: int, covered: OffsetRange, name: str) -> int:  # noqa: ANN401  # an int64 array
    """Check that the next offsets of an object ascend within its range.

    Args:
        offsets: The offsets of the next records.
        previous: The last offset before them; negative: none.
        covered: The range in the object's name.
        name: The object's name, for errors.

    Returns:
        The last of the offsets.

    Raises:
        CorruptionError: They do not. Facts: `name`, and the offsets in question.
    """
    if not len(offsets):
        return previous
    first, last = int(offsets[0]), int(offsets[-1])
    jumps = np.flatnonzero(np.diff(offsets) <= 0)
    if first <= previous or len(jumps):
        at = 0 if first <= previous else int(jumps[0]) + 1
        raise CorruptionError(
            "offsets in the object do not ascend",
            name=name,
            offset=int(offsets[at]),
            after=previous if at == 0 else int(offsets[at - 1]),
        )
    if first < covered.first or last > covered.last:
        raise CorruptionError(
            "the object holds offsets outside the range of its name",
            name=name,
            first=first,
            last=last,
        )
    return last


class OffsetWalk:
    """Checks the offsets of an object and collects its gaps, chunk by chunk."""

    def __init__(self, name: str, covered: OffsetRange) -> None:
        self._name = name
        self._covered = covered
        self._previous = -1
        self.record_count = 0
        self.gaps = GapWalk(covered)

    @property
    def last(self) -> int:
        """The offset of the last record; -1: none."""
        return self._previous

    def step(self, offsets: Any, known: Causes) -> None:  # noqa: ANN401  # an int64 array
        """Check the offsets of the next records; `known` are gaps that may lie between them."""
        if not len(offsets):
            return
        self._previous = check_offsets(offsets, self._previous, self._covered, self._name)
        self.record_count += len(offsets)
        self.gaps.step(offsets, known)
