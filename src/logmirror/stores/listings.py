"""Lists many small folders with few requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAMES_PER_REQUEST: Final = 1000
_SHARE: Final = 16
"""Separate listings run at the same time, about as many; those of one listing do not."""


class Listing(NamedTuple):
    """Folders in a folder.

    Attributes:
        folders: Names and sizes in bytes of the objects in those that were listed to their ends, as
            `BlobStore.sizes` returns them. Not those that have folders themselves.
        is_whole: Whether the listing came to its end.
        others: Folders of which something is not listed here.
    """

    folders: dict[str, dict[str, int]]
    is_whole: bool
    others: set[str]

    def sizes(self, folder: str) -> dict[str, int] | None:
        """Return those of a folder, which may be empty; None: it has to be listed."""
        found = self.folders.get(folder)
        return {} if found is None and self.is_whole and folder not in self.others else found


def listed_below(
    below: Callable[[str], Iterator[tuple[str, int]]], folder: str, count: int
) -> Listing:
    """List the folders in a folder, with at most a 16th of the requests that single ones take.

    Args:
        below: That of the store.
        folder: The folder.
        count: How many folders are expected in it.
    """
    found: dict[str, dict[str, int]] = {}
    others: set[str] = set()
    limit = _NAMES_PER_REQUEST * max(1, count // _SHARE)
    for seen, (path, size_bytes) in enumerate(below(folder), start=1):
        inner, _, rest = path.partition("/")
        if "/" in rest:
            others.add(inner)  # its own listing reports what is wrong
        elif rest and not rest.startswith("."):
            found.setdefault(inner, {})[rest] = size_bytes
        if seen == limit:
            others.add(inner)  # the rest of it is not known
            return Listing(_without(found, others), False, others)
    return Listing(_without(found, others), True, others)


def _without(found: dict[str, dict[str, int]], others: set[str]) -> dict[str, dict[str, int]]:
    return {inner: sizes for inner, sizes in found.items() if inner not in others}
