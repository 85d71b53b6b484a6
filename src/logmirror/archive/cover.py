"""The cover of a partition's offsets: its chain, resolved from merged objects and their parts.

Sans-IO. Objects are sorted by first offset, the longest range first. An object that lies wholly
inside the last one taken is *replaced* by it; every other one is taken. The objects taken must be a
chain. Compaction records decide whether an object may replace another: see `archive.compactions`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from logmirror.archive.chain import ArchiveObject, chain
from logmirror.archive.naming import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BITS: Final = 63
"""The largest cell holds all offsets: 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The objects that count, and the objects inside them."""

    objects: tuple[ArchiveObject, ...]
    """The chain, in ascending order; each object begins where the previous one ends."""

    replaced: Mapping[ArchiveObject, tuple[ArchiveObject, ...]]
    """The objects inside an object of the chain, ascending, by that object."""

    next_offset: int | None
    """The first source offset that is not archived. None: the chain is empty and has no declared
    start."""


def cover(names: Iterable[str], *, extension: str, start: int | None) -> Cover:
    """Resolve a listing; the arguments are those of `chain`.

    Raises:
        CorruptionError: As for `chain`, for the objects that are not inside another one.
    """
    named: list[ArchiveObject] = []
    others: list[str] = []
    for name in names:
        parts = split_name(name)
        if parts is None or parts[2] != extension:
            others.append(name)
        else:
            named.append(ArchiveObject(name, parts[0], parts[1]))
    named.sort(key=lambda obj: (obj.first, -obj.last))
    taken: list[str] = []
    replaced: dict[ArchiveObject, list[ArchiveObject]] = {}
    outer: ArchiveObject | None = None
    for obj in named:
        if outer is not None and obj.last <= outer.last:
            replaced.setdefault(outer, []).append(obj)
        else:
            taken.append(obj.name)
            outer = obj
    found = chain((*taken, *others), extension=extension, start=start)
    inside = {outer: tuple(objects) for outer, objects in replaced.items()}
    return Cover(objects=found.objects, replaced=inside, next_offset=found.next_offset)


def cells(
    objects: Sequence[ArchiveObject],
    sizes_bytes: Sequence[int],
    *,
    target_bytes: int,
    min_objects: int,
) -> list[tuple[ArchiveObject, ...]]:
    """Choose which objects of a chain are merged with each other.

    An object belongs to the cell of 2^k offsets in which it begins. The largest cells are chosen
    that are complete, so that no object can be added, and that hold enough small objects. Any two
    merged objects are therefore disjoint or nested, whichever process merged them, when, and with
    which limits (decision 0007).

    Args:
        objects: The chain.
        sizes_bytes: The size of each object.
        target_bytes: Size limit of a merged object. An object of at least half of it is not small.
        min_objects: Minimum number of objects in a cell; at least 2.
    """
    firsts = [obj.first for obj in objects]
    total = list(accumulate(sizes_bytes, initial=0))
    large = list(accumulate((size * 2 >= target_bytes for size in sizes_bytes), initial=0))
    chosen: list[tuple[ArchiveObject, ...]] = []
    waiting = [(0, _BITS, 0, len(objects))]
    while waiting:
        begin, bits, low, high = waiting.pop()
        if high - low < max(min_objects, 2):
            continue
        is_complete = begin + (1 << bits) <= firsts[-1]
        if is_complete and total[high] - total[low] <= target_bytes and large[high] == large[low]:
            chosen.append(tuple(objects[low:high]))
            continue
        middle = begin + (1 << (bits - 1))
        cut = bisect_left(firsts, middle, low, high)
        waiting += [(middle, bits - 1, cut, high), (begin, bits - 1, low, cut)]
    return chosen
