"""Which of a partition's objects count: large ones replace the small ones that they were made of.

Every object of a name has the same bytes, also of different owners (K6 in `chain`), so any objects
that lie end to end are the log. Which ones are chosen decides only which can be deleted. Takes
values, does no I/O.

- M1 A merged object exists before its sources are deleted, and a commit is written in between
  (`Kind.MERGED`). So a former owner whose commit was before the fence created its object before the
  listings of the next owner, and one that was paused deletes nothing.
- M2 From each boundary on the largest object is chosen. So no source of a merged object is, and a
  former owner that deletes them late does no harm.
- M3 The objects that are merged begin in one cell of 2^k offsets, and an object begins behind it
  (`archive.cover`). So two merged objects are disjoint, or one contains the other, except for
  what the log start has cut off.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.archive.cover import cells

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from logmirror.archive.chain import ArchiveObject

MIN_OBJECTS: Final = 8
"""Fewer small objects in a cell are not merged."""

INDEXED_BYTES: Final = 4 * 1024 * 1024
"""Smaller objects have no index (`parts`): they are fetched whole."""

SPAN_MS: Final = 24 * 3600 * 1000
"""Records of a merged segment are not further apart: retention deletes whole segments."""


def tiled(objects: Collection[ArchiveObject], log_start: int) -> list[ArchiveObject] | None:
    """Return the objects that lie end to end from the log start to the last offset.

    None: there are none; objects are missing.
    """
    by_first: dict[int, list[ArchiveObject]] = defaultdict(list)
    for one in objects:
        if one.last >= log_start:
            by_first[one.first].append(one)
    if not by_first:
        return []
    end = max(one.last for found in by_first.values() for one in found) + 1
    for found in by_first.values():
        found.sort(key=lambda one: one.last)
    starts = sorted(
        (one for found in by_first.values() for one in found if one.first <= log_start),
        key=lambda one: (one.last, -one.first),
    )
    dead = set[int]()
    path: list[ArchiveObject] = []
    choices = [starts]
    while choices:
        if not choices[-1]:
            choices.pop()
            if path:
                dead.add(path.pop().last + 1)
            continue
        one = choices[-1].pop()
        if one.last + 1 == end:
            return [*path, one]
        if one.last + 1 not in dead:
            path.append(one)
            choices.append(list(by_first.get(one.last + 1, ())))
    return None


def groups(
    objects: Sequence[ArchiveObject], sizes_bytes: Sequence[int], target_bytes: int
) -> list[tuple[ArchiveObject, ...]]:
    """Return which objects of a log become one (M3), oldest first."""
    if len(objects) < MIN_OBJECTS:
        return []
    found = cells(objects, sizes_bytes, target_bytes=target_bytes, min_objects=MIN_OBJECTS)
    return sorted(found)
