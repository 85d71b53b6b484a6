"""Compares what owners of a bucket acknowledged and removed with what a last one finds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kit.runs.bucket_owners import Owner, World

REMOVED: Final = b"-" * 8
"""What is in the place of a record that a compaction removed."""


class Judge:
    """Judges one run.

    Args:
        world: The run.
        last: The last owner, which has opened the bucket.
    """

    def __init__(self, world: World, last: Owner) -> None:
        self._world, self._last = world, last
        self._found: list[str] = []

    def problems(self) -> list[str]:
        """Return what is wrong."""
        values: list[bytes] = []
        for number in range(len(self._last.parts)):
            found = dict(self._last.parts[number])
            start = self._last.starts[number]
            if len(found) != len(self._last.parts[number]):
                self._found.append(f"partition {number} has an offset twice")
            offsets = sorted(offset for offset in found if offset >= start)
            if offsets != list(range(start, start + len(offsets))):
                self._found.append(f"partition {number} has a gap: {offsets}")
            values += [value for value in found.values() if value != REMOVED]
            for (partition, offset), value in self._world.acked.items():
                if partition == number and offset >= start:
                    self._judge_record((number, offset), value, found.get(offset))
            if start < self._world.starts[number]:
                self._found.append(f"partition {number}: deleted records are back")
        if len(values) != len(set(values)):
            self._found.append("a record is stored twice")
        self._judge_objects()
        self._judge_changes()
        return self._found

    def _judge_record(self, at: tuple[int, int], value: bytes, found: bytes | None) -> None:
        if found == REMOVED and at in self._world.removing:
            return
        if found != value:
            self._found.append(f"acknowledged {at} is {found!r}")
        elif at in self._world.removed:
            self._found.append(f"a record that was removed is back: {at}")

    def _judge_objects(self) -> None:
        """Segments are the same for all owners (K6); merged ones are disjoint or nested (M3)."""
        for one, other in itertools.combinations(sorted(self._world.cut), 2):
            if one[0] == other[0] and other[1] < one[2]:
                self._found.append(f"segments that overlap: {one} and {other}")
        for one, other in itertools.combinations(sorted(self._world.joined), 2):
            if one[0] == other[0] and one[1] < other[1] < one[2] < other[2]:
                self._found.append(f"merged objects that cross: {one} and {other}")

    def _judge_changes(self) -> None:
        changes = [text for _, text in sorted(self._world.changes)]
        missing = [one for one in changes if one not in self._last.changes]
        if missing:
            self._found.append(f"changes are missing: {missing}")
        if [one for one in self._last.changes if one in changes] != changes:
            self._found.append("changes are in another order")
