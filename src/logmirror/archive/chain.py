"""The chain of a partition's objects, from a listing of their names.

There is no offset file. At every start the partition is listed, the names must form one unbroken
chain, and the mirror continues at its end. This function decides whether a restart is exactly-once,
so every name that it cannot explain is a `CorruptionError`:

- Invariant A: all names are object names with the same extension.
- Invariant B: each object begins where the previous one ends (no gap, no overlap).

mirror-v3 leaves an object name followed by `.tmp.` and a suffix when it dies while writing. Such a
file never was an object and is ignored.
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


class ArchiveObject(NamedTuple):
    """One object of a chain, by its name."""

    name: str
    """Without the folder."""

    first: int
    """First offset covered."""

    last: int
    """Last offset covered, inclusive."""

    @property
    def covered(self) -> OffsetRange:
        """The offsets that the object covers."""
        return OffsetRange(first=self.first, last=self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The verified objects of one partition."""

    objects: tuple[ArchiveObject, ...]
    """In ascending order; each begins where the previous one ends."""

    next_offset: int | None
    """The first source offset that is not archived. None: the chain is empty and has no declared
    start."""


def chain(
    names: Iterable[str], *, extension: str, start: int | None, snapshots: bool = False
) -> Chain:
    """Verify a listing and return the chain with its position.

    Args:
        names: Object names of one partition, without the folder, in any order.
        extension: The extension that this destination is configured to write.
        start: The first offset of the chain, also the position of an empty chain. None: the first
            object defines it.
        snapshots: The objects are snapshots, each complete. Gaps are allowed: older snapshots may
            have been pruned.

    Returns:
        The objects in ascending order and the position.

    Raises:
        CorruptionError: A name is not an object name or has another extension, or the chain has a
            gap or an overlap. Facts: `name`, and `expected` and `found` if they apply.
    """
    objects: list[ArchiveObject] = []
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
            raise _break(name, expected=expected, found=first, is_head=not objects)
        expected = last + 1
        objects.append(ArchiveObject(name, first, last))
    return Chain(objects=tuple(objects), next_offset=expected)


def _is_leftover(name: str) -> bool:
    head, found, _ = name.partition(".tmp.")
    return bool(found) and split_name(head) is not None


def _break(name: str, *, expected: int, found: int, is_head: bool) -> CorruptionError:
    if is_head:
        problem = "the chain does not begin at its declared start"
        hint = "set chain-start to the first offset in the folder, or use an empty folder"
        return CorruptionError(problem, hint=hint, name=name, expected=expected, found=found)
    # Sorted by first offset, so an object that starts early overlaps its predecessor and one that
    # starts late leaves a gap. The caller handles both alike; the operator does not.
    problem = "overlap in the chain" if found < expected else "gap in the chain"
    return CorruptionError(problem, hint=_HINT, name=name, expected=expected, found=found)
