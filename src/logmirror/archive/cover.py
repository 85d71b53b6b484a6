"""The cover of a partition's offsets: its chain, where merged objects stand beside their parts.

Sans-IO. Sorted by first offset, the longest first, an object that lies wholly inside the last one
taken is *replaced* by it; every other one is taken, and what is taken must be a chain. Whether an
object may replace another is not for names to say: see `archive.compactions`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from logmirror.archive.chain import Link, chain
from logmirror.archive.naming import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BITS: Final = 63
"""All offsets are one cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The objects that count, and those that lie inside them."""

    links: tuple[Link, ...]
    """The chain: in ascending order, each beginning where the one before it ended."""

    replaced: Mapping[Link, tuple[Link, ...]]
    """Objects inside an object of the chain, ascending, by that object."""

    next_offset: int | None
    """The first source offset that is not archived; None: empty, and no start was declared."""


def cover(names: Iterable[str], *, extension: str, start: int | None) -> Cover:
    """Resolve a listing; arguments as those of `chain`.

    Raises:
        CorruptionError: As `chain`, for what is left when objects inside others are set aside.
    """
    ours: list[Link] = []
    others: list[str] = []
    for name in names:
        parts = split_name(name)
        if parts is None or parts[2] != extension:
            others.append(name)
        else:
            ours.append(Link(name, parts[0], parts[1]))
    ours.sort(key=lambda link: (link.first, -link.last))
    taken: list[str] = []
    replaced: dict[Link, list[Link]] = {}
    around: Link | None = None
    for link in ours:
        if around is not None and link.last <= around.last:
            replaced.setdefault(around, []).append(link)
        else:
            taken.append(link.name)
            around = link
    found = chain((*taken, *others), extension=extension, start=start)
    inside = {outer: tuple(links) for outer, links in replaced.items()}
    return Cover(links=found.links, replaced=inside, next_offset=found.next_offset)


def cells(
    links: Sequence[Link], sizes_bytes: Sequence[int], *, target_bytes: int, min_objects: int
) -> list[tuple[Link, ...]]:
    """Choose which objects of a chain are merged with each other.

    An object belongs to the cell of 2^k offsets in which it begins. Taken are the largest cells
    that no more objects can come to and that hold enough small ones: so whatever is merged, by
    whom, when and with which limits, two merged objects are disjoint or one holds the other.

    Args:
        links: The chain.
        sizes_bytes: Of each.
        target_bytes: What a merged object may hold. An object of half of it is not small.
        min_objects: In a cell, at least 2.
    """
    firsts = [link.first for link in links]
    total = list(accumulate(sizes_bytes, initial=0))
    large = list(accumulate((size * 2 >= target_bytes for size in sizes_bytes), initial=0))
    chosen: list[tuple[Link, ...]] = []
    waiting = [(0, _BITS, 0, len(links))]
    while waiting:
        begin, bits, low, high = waiting.pop()
        if high - low < max(min_objects, 2):
            continue
        is_complete = begin + (1 << bits) <= firsts[-1]
        if is_complete and total[high] - total[low] <= target_bytes and large[high] == large[low]:
            chosen.append(tuple(links[low:high]))
            continue
        middle = begin + (1 << (bits - 1))
        cut = bisect_left(firsts, middle, low, high)
        waiting += [(middle, bits - 1, cut, high), (begin, bits - 1, low, cut)]
    return chosen
