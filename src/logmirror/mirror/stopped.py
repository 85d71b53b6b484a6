"""Driver: mirrors that wait to be opened or have stopped, and what one's end means for others.

A fatal error is one that waiting does not mend: corruption, a position that makes no sense, wrong
usage. It stops its mirror, with all flows of it. What becomes of the others is the configuration's
to say (`on-fatal`); nothing of theirs is cut short, since mirrors stop between two ticks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from logmirror.clock import jittered_ms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.errors import LogmirrorError

BACKOFF_MS: Final = (1_000, 60_000)
"""First and longest wait of what failed for now."""

OnFatal = Literal["exit", "isolate"]


@dataclass(slots=True)
class Unopened:
    """A destination of a mirror, or its source, that could not be opened so far."""

    error: LogmirrorError
    retry_at_ms: int
    failures: int = 1


class StoppedMirrors:
    """The mirrors that must not go on, and why.

    Args:
        on_fatal: `exit`: the first of them ends the process. `isolate`: the last one does.
        names: Of all mirrors.
    """

    def __init__(self, on_fatal: OnFatal, names: Iterable[str]) -> None:
        self._exits = on_fatal == "exit"
        self._names = set(names)
        self._errors: dict[str, LogmirrorError] = {}

    def __contains__(self, mirror: object) -> bool:
        return mirror in self._errors

    def add(self, mirror: str, error: LogmirrorError) -> None:
        """Stop a mirror at the next commit boundary; only its first error counts."""
        if mirror in self._errors:
            return
        self._errors[mirror] = error

    def raise_if_over(self) -> None:
        """Raise the first error if the process must end for what has stopped."""
        if self._exits or len(self._errors) == len(self._names):
            self.raise_first()

    def raise_first(self) -> None:
        """Raise the first error, if there is any."""
        for error in self._errors.values():
            raise error


def backoff_ms(failures: int) -> int:
    """How long to wait after so many failures in a row."""
    first_ms, longest_ms = BACKOFF_MS
    return int(jittered_ms(min(first_ms * 2 ** (failures - 1), longest_ms)))
