"""Driver: check all names of a chain that is longer than one listing, in steps.

A bucket returns up to 1,000 names per request, so `read_chain` reads only the end of a longer
chain. The rest is read once by each process, in the order of the names. What is kept between two
steps is the last name, so memory does not depend on the length of the chain.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from logmirror.archive.naming import split_name
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.archive.chain import Chain
    from logmirror.archive.cover import Cover
    from logmirror.stores.base import BlobStore

STEP: Final = 1000
"""Names in one step: one request to a bucket."""

_PASSES_MAX: Final = 5
"""Passes over a chain of which each has found another fault; see `compactions.confirmed`."""

_HEAD: Final = 20
"""Digits of the first offset, at the start of a name."""


class WholeChain:
    """A pass over all names of one folder.

    Args:
        store: The store.
        folder: The chain's folder.
        check: Verifies names, which begin with an object that starts at the given offset.
        start: The declared first offset of the chain; None: the first object defines it.
    """

    def __init__(
        self,
        store: BlobStore,
        folder: str,
        check: Callable[[Iterable[str], int | None], Chain | Cover],
        start: int | None,
    ) -> None:
        self._store, self._folder, self._check, self._start = store, folder, check, start
        self._faults: list[tuple[str, str]] = []
        self._restart()

    def _restart(self) -> None:
        self._after = self._last = ""
        self.is_checked = False

    @property
    def checked_name(self) -> str:
        """The last object up to which the chain is known to be unbroken."""
        return self._last

    def step(self) -> None:
        """Check the next `STEP` names; sets `is_checked` after the last one.

        A fault is believed if two passes find the same one. A listing is not atomic: the pass may
        have missed a merged object that appeared behind it, and find that its parts are gone.

        Raises:
            CorruptionError: The names are not one unbroken chain.
        """
        names = list(islice(self._store.names(self._folder, self._after), STEP))
        self.is_checked = len(names) < STEP
        if not self.is_checked:
            # Names with one first offset are resolved together: the longest range counts.
            names = [n for n in names if n[:_HEAD] != names[-1][:_HEAD]] or names
        if not names:
            return
        try:
            self._resolve(names)
        except CorruptionError as error:
            fault = (error.message, repr(sorted(error.facts.items())))
            if fault in self._faults[-1:] or len(self._faults) == _PASSES_MAX:
                raise
            self._faults.append(fault)
            self._restart()

    def _resolve(self, names: list[str]) -> None:
        before = split_name(self._last)
        found = self._check(
            [self._last, *names] if before else names, before[0] if before else self._start
        )
        self._after = names[-1]
        if found.objects:
            self._last = found.objects[-1].name
