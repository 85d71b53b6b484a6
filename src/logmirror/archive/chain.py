"""Chain verification: the listing of a partition is the destination's memory.

No offset file is kept. At every start the partition is listed, the names must form one unbroken
chain, and copying continues at its end. So this function decides whether a restart is
exactly-once, and anything it cannot explain is a `CorruptionError`, never a guess:

- Invariant A: names are ours, all with one extension.
- Invariant B: each link begins where the one before it ended (no gap, no overlap).

A name that is one of ours followed by `.tmp.` and anything is what mirror-v3 leaves behind when it
dies while writing. It was never an object, so it is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.archive.naming import split_name
from logmirror.errors import CorruptionError
from logmirror.model import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable

_HINT: Final = "delete nothing; run `logmirror verify` and compare with the source"


class Link(NamedTuple):
    """One object's place in its chain."""

    name: str
    """Without folder."""

    first: int
    """First offset covered."""

    last: int
    """Last offset covered, included."""

    @property
    def covered(self) -> OffsetRange:
        """The offsets the object accounts for."""
        return OffsetRange(first=self.first, last=self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The verified objects of one partition."""

    links: tuple[Link, ...]
    """In ascending order, each beginning where the one before it ended."""

    next_offset: int | None
    """The first source offset that is not archived; None: empty, and no start was declared."""


def chain(
    names: Iterable[str], *, extension: str, start: int | None, snapshots: bool = False
) -> Chain:
    """Verify a listing and tell where writing must continue.

    Args:
        names: Object names of one partition, without folder, in any order.
        extension: The one extension this destination is configured to write.
        start: Where the chain must begin, which is also the position of an empty one. None: the
            first object declares it.
        snapshots: The objects are snapshots, each complete: gaps are where old ones were pruned.

    Returns:
        The links in ascending order and the position.

    Raises:
        CorruptionError: A name is not ours, has another extension, or the chain has a gap or an
            overlap. The facts carry `name`, and `expected` and `found` where they apply.
    """
    links: list[Link] = []
    expected = start
    for name in sorted(names):
        parts = split_name(name)
        if parts is None:
            if _is_leftover(name):
                continue
            raise CorruptionError("unknown object in the chain", hint=_HINT, name=name)
        first, last, found_extension = parts
        if found_extension != extension:
            if _is_leftover(name):
                continue
            raise CorruptionError(
                "mixed formats in one chain",
                hint="one destination holds one format; give the other format its own destination",
                name=name,
                expected=extension,
                found=found_extension,
            )
        is_pruned = snapshots and expected is not None and first > expected
        if expected is not None and first != expected and not is_pruned:
            raise _break(name, expected=expected, found=first, is_head=not links)
        expected = last + 1
        links.append(Link(name, first, last))
    return Chain(links=tuple(links), next_offset=expected)


def _is_leftover(name: str) -> bool:
    head, found, _ = name.partition(".tmp.")
    return bool(found) and split_name(head) is not None


def _break(name: str, *, expected: int, found: int, is_head: bool) -> CorruptionError:
    if is_head:
        problem = "the chain does not begin where it was declared to"
        hint = "set chain-start to the first offset in the folder, or use an empty folder"
        return CorruptionError(problem, hint=hint, name=name, expected=expected, found=found)
    # Sorted by first offset, so a link that starts early overlaps its predecessor and one that
    # starts late leaves a gap. The caller acts alike on both; the operator does not.
    problem = "overlap in the chain" if found < expected else "gap in the chain"
    return CorruptionError(problem, hint=_HINT, name=name, expected=expected, found=found)
