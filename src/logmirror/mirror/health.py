"""Driver: how the mirrors of this process are, for whoever asks from outside.

The loop writes, other threads read at any time, without a lock: each value is replaced in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from logmirror.clock import Clock
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import FlowId

LIVE_MS: Final = 300_000
"""The loop is heard of within this time, but for while slices run: each of its questions has a
deadline of its own, far below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorHealth:
    """How one mirror is."""

    mirror: str
    state: Literal["starting", "running", "waiting", "stopped"]
    """`starting`: not opened yet. `waiting`: something of it failed for now. `stopped`: for
    good."""

    kind: str = ""
    """Of the error; see `logmirror.errors`."""

    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An error that a flow, or a mirror as a whole, met."""

    kind: str
    message: str
    since_ms: int
    """Wall-clock time of the first failure in a row."""


class StatusBoard:
    """What is known of the mirrors.

    Args:
        mirrors: Their names.
        clock: Time.
        silent: Mirrors and destinations whose troubles `not_ready` leaves out. A mirror whose
            destinations are all left out is here without one, as an empty text.
    """

    def __init__(
        self, mirrors: Sequence[str], clock: Clock, silent: Collection[tuple[str, str]] = ()
    ) -> None:
        self._clock, self._silent = clock, frozenset(silent)
        self._states: dict[str, dict[FlowId, FlowState]] = {name: {} for name in mirrors}
        self._opened: set[str] = set()
        self._unreachable: dict[tuple[str, str], Trouble] = {}
        self._waiting: dict[FlowId, Trouble] = {}
        self._last: dict[FlowId, Trouble] = {}
        self._lagging_since_ms: dict[FlowId, int | None] = {}
        """Timestamp of the oldest record that is not copied; None: all are."""

        self._stopped: dict[str, Trouble] = {}
        self._turned_ms: int | None = None
        self._is_ticking = False

    # -- the loop says ---------------------------------------------------------------------------

    def turned(self) -> None:
        """The loop has come round, or on to the next flow."""
        self._turned_ms = self._clock.monotonic_ms()

    def ticking(self, *, on: bool) -> None:
        """Slices run, or no longer; that takes as long as it takes."""
        self._is_ticking = on
        self.turned()

    def opened(self, mirror: str, unopened: Collection[str] = ()) -> None:
        """A mirror's source answered, and its flows have positions but for these destinations'."""
        self._opened.add(mirror)
        for each in list(self._unreachable):
            if each[0] == mirror and each[1] not in unopened:
                del self._unreachable[each]

    def unreachable(self, mirror: str, destination: str, error: LogmirrorError) -> None:
        """A destination of a mirror could not be opened, or its source (empty) did not answer."""
        before = self._unreachable.get((mirror, destination))
        self._unreachable[mirror, destination] = self._trouble(error, before)

    def knows(self, state: FlowState) -> None:
        """A flow has a position."""
        self._states.setdefault(state.flow.mirror, {})[state.flow] = state

    def lags(self, flow: FlowId, since_ms: int | None) -> None:
        """The oldest record that a flow has not copied is of that time; None: it has them all."""
        self._lagging_since_ms[flow] = since_ms

    def waits(self, flow: FlowId, error: LogmirrorError) -> int:
        """A flow failed for now; returns since when it does, in milliseconds since 1970."""
        trouble = self._trouble(error, self._waiting.get(flow))
        self._waiting[flow] = self._last[flow] = trouble
        return trouble.since_ms

    def goes_on(self, flow: FlowId) -> None:
        """A flow has done what it failed at, or has nothing of it left to do."""
        self._waiting.pop(flow, None)

    def stopped(self, mirror: str, error: LogmirrorError, flow: FlowId | None = None) -> None:
        """A mirror must not go on; because of a flow, where one is given."""
        self._stopped[mirror] = self._trouble(error, None)
        if flow is not None:
            self._last[flow] = self._stopped[mirror]

    def waiting(self) -> Collection[FlowId]:
        """The flows that failed for now."""
        return list(self._waiting)

    def _trouble(self, error: LogmirrorError, before: Trouble | None) -> Trouble:
        since_ms = self._clock.now_ms() if before is None else before.since_ms
        return Trouble(kind=error.kind, message=error.message, since_ms=since_ms)

    # -- others ask ------------------------------------------------------------------------------

    def mirrors(self, ignored: Collection[tuple[str, str]] = ()) -> list[MirrorHealth]:
        """How each mirror is now, whatever happens to those that are ignored; see `silent`."""
        waiting: dict[str, Trouble] = {}
        for flow, trouble in list(self._waiting.items()):
            if (flow.mirror, flow.destination) not in ignored:
                waiting.setdefault(flow.mirror, trouble)
        for (mirror, destination), trouble in list(self._unreachable.items()):
            if (mirror, destination) not in ignored:
                waiting.setdefault(mirror, trouble)
        names = [name for name in list(self._states) if (name, "") not in ignored]
        return [self._mirror(name, waiting.get(name)) for name in names]

    def _mirror(self, name: str, waiting: Trouble | None) -> MirrorHealth:
        stopped = self._stopped.get(name)
        trouble = stopped or waiting
        if trouble is None:
            return MirrorHealth(
                mirror=name, state="running" if name in self._opened else "starting"
            )
        state: Literal["stopped", "waiting"] = "stopped" if stopped else "waiting"
        return MirrorHealth(mirror=name, state=state, kind=trouble.kind, message=trouble.message)

    def not_live(self) -> list[str]:
        """Why the process should be started anew; empty: it should not."""
        turned_ms = self._turned_ms
        if self._is_ticking or turned_ms is None:
            return []
        age_ms = self._clock.monotonic_ms() - turned_ms
        return [f"the loop has stood still for {age_ms} ms"] if age_ms > LIVE_MS else []

    def not_ready(self) -> list[str]:
        """Why not all that counts is being copied; empty: it is."""
        return [
            f"mirror={health.mirror} state={health.state}"
            + (f" kind={health.kind}: {health.message}" if health.kind else "")
            for health in self.mirrors(self._silent)
            if health.state != "running"
        ]

    def status(self) -> dict[str, object]:
        """All of it as JSON knows it."""
        states = [state for flows in list(self._states.values()) for state in list(flows.values())]
        return {
            "mirrors": [
                {"mirror": m.mirror, "state": m.state, "error": _error(m.kind, m.message)}
                for m in self.mirrors()
            ],
            "flows": [self._flow(state) for state in states],
        }

    def _flow(self, state: FlowState) -> dict[str, object]:
        flow, position, end = state.flow, state.position, state.source_end
        waiting, last = self._waiting.get(flow), self._last.get(flow)
        return {
            "mirror": flow.mirror,
            "destination": flow.destination,
            "topic": flow.topic,
            "partition": flow.partition,
            "position": position,
            "source_end": None if end < 0 else end,
            "lag": None if end < 0 else max(end - position, 0),
            "lag_seconds": self._lag_seconds(flow),
            "waiting_since_ms": None if waiting is None else waiting.since_ms,
            "last_error": None if last is None else _error(last.kind, last.message),
        }

    def _lag_seconds(self, flow: FlowId) -> float | None:
        """Age of the oldest record that is not copied; None: not known yet."""
        if flow not in self._lagging_since_ms:
            return None
        since_ms = self._lagging_since_ms[flow]
        return 0.0 if since_ms is None else max(self._clock.now_ms() - since_ms, 0) / 1000


def _error(kind: str, message: str) -> dict[str, str] | None:
    return {"kind": kind, "message": message} if kind else None
