"""Driver: mirrors that stopped, and when that ends the process.

An error that is not retriable stops its mirror with all of the mirror's flows: corruption,
contradicting positions, wrong usage. The configuration (`on-fatal`) decides whether the others
continue. Mirrors stop between two ticks of a lane only, so no slice of another mirror is
interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.errors import LogmirrorError

OnFatal = Literal["exit", "isolate"]


class StoppedMirrors:
    """The mirrors that stopped, each with its first error. Safe from any thread.

    Args:
        on_fatal: `exit`: the first stopped mirror ends the process. `isolate`: the last one does.
        names: The names of all mirrors of the process.
    """

    def __init__(self, on_fatal: OnFatal, names: Iterable[str]) -> None:
        self._exits = on_fatal == "exit"
        self._names = set(names)
        self._errors: dict[str, LogmirrorError] = {}

    def __contains__(self, mirror: object) -> bool:
        return mirror in self._errors

    def add(self, mirror: str, error: LogmirrorError) -> bool:
        """Stop a mirror at the next commit boundary; return whether it had not stopped yet.

        Only its first error is kept.
        """
        return self._errors.setdefault(mirror, error) is error

    def raise_if_over(self) -> None:
        """Raise the first error if the stopped mirrors end the process."""
        if self._exits or len(self._errors) == len(self._names):
            self.raise_first()

    def raise_first(self) -> None:
        """Raise the error of the first stopped mirror. Does nothing if none stopped."""
        for error in list(self._errors.values()):
            raise error
