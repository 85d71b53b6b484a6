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
    from logmirror.clock import Clock
    from logmirror.mirror.ports import FlowId
    from logmirror.stores.base import BlobStore

STEP: Final = 1000
"""Names in one step: one request to a bucket."""

_PASSES_MAX: Final = 5
"""Passes over a chain of which each has found another fault; see `compactions.confirmed`."""

_STEPS_MS: Final = 1_000
_STEPS_SHARE: Final = 10
"""Limits for one drift check that continues: a second, and in an interval a tenth of it."""

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


class LongChains:
    """The checks of all names, of chains longer than one listing. The archives of a lane share it.

    Args:
        clock: Measures the time limits.
        listing_ms: How long reading positions may check the older names of long chains; the rest
            is left to drift checks. None: without limit.
    """

    def __init__(self, clock: Clock, listing_ms: int | None = None) -> None:
        self._clock = clock
        self._left_ms = listing_ms
        self._passes: dict[FlowId, WholeChain] = {}

    def check(self, flow: FlowId, begin: Callable[[], WholeChain]) -> WholeChain | None:
        """Check the names of a flow, within the time limit of all flows.

        Args:
            flow: The flow.
            begin: Returns a new check; called once for each flow.

        Returns:
            The check if it is new, and not complete yet.

        Raises:
            CorruptionError: The chain is broken.
        """
        is_new = flow not in self._passes
        if is_new:
            self._passes[flow] = begin()
        names = self._passes[flow]
        began_ms = self._clock.monotonic_ms()
        self._continue(names, self._left_ms)
        if self._left_ms is not None:
            self._left_ms = max(0, self._left_ms - (self._clock.monotonic_ms() - began_ms))
        return names if is_new and not names.is_checked else None

    def step(self, flow: FlowId, interval_ms: int) -> None:
        """Check further names of a flow, if there are any: a share of what is done in an interval.

        Raises:
            CorruptionError: The chain is broken.
        """
        waiting = sum(not names.is_checked for names in self._passes.values())
        if flow in self._passes and waiting:
            share_ms = interval_ms / _STEPS_SHARE / waiting
            self._continue(self._passes[flow], max(1, min(_STEPS_MS, share_ms)))

    def _continue(self, names: WholeChain, limit_ms: float | None) -> None:
        """Check names until the last one, or until the limit is over."""
        began_ms = self._clock.monotonic_ms()
        while not names.is_checked:
            if limit_ms is not None and self._clock.monotonic_ms() - began_ms >= limit_ms:
                return
            names.step()
