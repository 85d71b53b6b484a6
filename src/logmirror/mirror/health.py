"""Driver: which mirrors run, wait or have stopped, and what one's fatal error means for others.

A fatal error is one that waiting does not mend: corruption, a position that makes no sense, wrong
usage. It stops its mirror, with all flows of it. What becomes of the others is the configuration's
to say (`on-fatal`); nothing of theirs is cut short, since mirrors stop between two ticks only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from logmirror.clock import jittered_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.errors import LogmirrorError
    from logmirror.mirror.plan import FlowState

_LOG = logging.getLogger("logmirror.mirror")

BACKOFF_MS: Final = (1_000, 60_000)
"""First and longest wait of what failed for now."""

OnFatal = Literal["exit", "isolate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorHealth:
    """How one mirror is."""

    state: Literal["running", "waiting", "stopped"]
    """`waiting`: something of it failed for now and is tried again, or nothing of it was opened so
    far. `stopped`: for good."""

    error_kind: str = ""
    """Of the error that it waits or has stopped for, as in `logmirror.errors`; else empty."""

    error_message: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """How all enabled mirrors of a process are, by name; they never change in number."""

    mirrors: Mapping[str, MirrorHealth] = field(default_factory=dict)

    @property
    def has_stopped(self) -> bool:
        """Whether a mirror has stopped for good."""
        return any(mirror.state == "stopped" for mirror in self.mirrors.values())


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
        facts = {"mirror": mirror, "kind": error.kind, **error.facts}
        _LOG.error("mirror stopped: %s", error.message, extra={"facts": facts})

    def raise_if_over(self) -> None:
        """Raise the first error if the process must end for what has stopped."""
        if self._exits or len(self._errors) == len(self._names):
            self.raise_first()

    def raise_first(self) -> None:
        """Raise the first error, if there is any."""
        for error in self._errors.values():
            raise error

    def health(
        self, states: Iterable[FlowState], unopened: Mapping[tuple[str, str], Unopened]
    ) -> Health:
        """How all mirrors are now."""
        waits = {mirror: entry.error for (mirror, _), entry in unopened.items()}
        opened = set()
        for state in states:
            opened.add(state.flow.mirror)
            if state.failure:
                waits.setdefault(state.flow.mirror, state.failure)
        found = {name: MirrorHealth(state="waiting") for name in sorted(self._names)}
        found |= {name: MirrorHealth(state="running") for name in opened}
        found |= {name: _health("waiting", error) for name, error in waits.items()}
        found |= {name: _health("stopped", error) for name, error in self._errors.items()}
        return Health(found)


def backoff_ms(failures: int) -> int:
    """How long to wait after so many failures in a row."""
    first_ms, longest_ms = BACKOFF_MS
    return int(jittered_ms(min(first_ms * 2 ** (failures - 1), longest_ms)))


def _health(state: Literal["waiting", "stopped"], error: LogmirrorError) -> MirrorHealth:
    return MirrorHealth(state=state, error_kind=error.kind, error_message=error.message)
