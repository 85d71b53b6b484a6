"""Driver: the status board, which `/readyz`, `/livez` and `/status.json` report.

The loop writes; other threads read at any time, without a lock, because values are replaced
atomically.
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
"""Longest time without progress of a live loop, while no slices run. Each of its requests has a far
shorter deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorHealth:
    """The health of one mirror."""

    mirror: str
    state: Literal["starting", "running", "waiting", "stopped"]
    """`starting`: not opened yet. `waiting`: a flow, a destination or the source backs off after a
    retriable error. `stopped`: by an error that is not retriable."""

    kind: str = ""
    """The error's kind, see `logmirror.errors`. Empty: no error."""

    message: str = ""
    """The error's message. Empty: no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The current error of a flow, of a destination or of a mirror."""

    kind: str
    message: str
    since_ms: int
    """Time of the first of the consecutive failures, in milliseconds since 1970."""


class StatusBoard:
    """The health of all mirrors and flows of this process.

    Args:
        mirrors: The names of the mirrors.
        clock: Time.
        silent: Pairs of mirror and destination that do not affect readiness. A mirror of which no
            destination affects readiness has a pair with an empty destination as well.
    """

    def __init__(
        self, mirrors: Sequence[str], clock: Clock, silent: Collection[tuple[str, str]] = ()
    ) -> None:
        self._clock, self._silent = clock, frozenset(silent)
        self._states: dict[str, dict[FlowId, FlowState]] = {name: {} for name in mirrors}
        self._opened: set[str] = set()
        self._unopened: dict[tuple[str, str], Trouble] = {}
        self._waiting: dict[FlowId, Trouble] = {}
        self._last: dict[FlowId, Trouble] = {}
        self._lagging_since_ms: dict[FlowId, int | None] = {}
        """Timestamp of the oldest record that is not copied. None: all are copied."""

        self._stopped: dict[str, Trouble] = {}
        self._progressed_ms: int | None = None
        self._is_ticking = False

    # -- written by the loop ---------------------------------------------------------------------

    def progressed(self) -> None:
        """Record that the loop makes progress."""
        self._progressed_ms = self._clock.monotonic_ms()

    def set_ticking(self, *, on: bool) -> None:
        """Record that slices run, or no longer. While they run, no progress is expected."""
        self._is_ticking = on
        self.progressed()

    def mirror_opened(self, mirror: str, unopened: Collection[str] = ()) -> None:
        """Record that a mirror's source responded and its flows are open.

        Args:
            mirror: The mirror's name.
            unopened: The destinations whose flows are not open yet.
        """
        self._opened.add(mirror)
        for each in list(self._unopened):
            if each[0] == mirror and each[1] not in unopened:
                del self._unopened[each]

    def opening_failed(self, mirror: str, destination: str, error: LogmirrorError) -> None:
        """Record that a destination could not be opened, or that the source (empty) failed."""
        before = self._unopened.get((mirror, destination))
        self._unopened[mirror, destination] = self._trouble(error, before)

    def flow_opened(self, state: FlowState) -> None:
        """Add a flow, which has a position now."""
        self._states.setdefault(state.flow.mirror, {})[state.flow] = state

    def set_lag(self, flow: FlowId, since_ms: int | None) -> None:
        """Set the timestamp of the oldest record that a flow has not copied. None: no lag."""
        self._lagging_since_ms[flow] = since_ms

    def flow_waits(self, flow: FlowId, error: LogmirrorError) -> int:
        """Record that a flow backs off.

        Returns:
            The time of the first of its consecutive failures, in milliseconds since 1970.
        """
        trouble = self._trouble(error, self._waiting.get(flow))
        self._waiting[flow] = self._last[flow] = trouble
        return trouble.since_ms

    def flow_resumed(self, flow: FlowId) -> None:
        """Record that a flow no longer backs off."""
        self._waiting.pop(flow, None)

    def mirror_stopped(
        self, mirror: str, error: LogmirrorError, flow: FlowId | None = None
    ) -> None:
        """Record that a mirror stopped, because of a flow if one is given."""
        self._stopped[mirror] = self._trouble(error, None)
        if flow is not None:
            self._last[flow] = self._stopped[mirror]

    def waiting_flows(self) -> Collection[FlowId]:
        """Return the flows that back off."""
        return list(self._waiting)

    def _trouble(self, error: LogmirrorError, before: Trouble | None) -> Trouble:
        since_ms = self._clock.now_ms() if before is None else before.since_ms
        return Trouble(kind=error.kind, message=error.message, since_ms=since_ms)

    # -- read by other threads -------------------------------------------------------------------

    def mirrors(self, ignored: Collection[tuple[str, str]] = ()) -> list[MirrorHealth]:
        """Return the current health of each mirror.

        Args:
            ignored: Pairs of mirror and destination to leave out; see `silent`.
        """
        waiting: dict[str, Trouble] = {}
        for flow, trouble in list(self._waiting.items()):
            if (flow.mirror, flow.destination) not in ignored:
                waiting.setdefault(flow.mirror, trouble)
        for (mirror, destination), trouble in list(self._unopened.items()):
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
        """Return why the process should be restarted. Empty: it is live."""
        turned_ms = self._progressed_ms
        if self._is_ticking or turned_ms is None:
            return []
        age_ms = self._clock.monotonic_ms() - turned_ms
        return [f"the loop has made no progress for {age_ms} ms"] if age_ms > LIVE_MS else []

    def not_ready(self) -> list[str]:
        """Return a line for each mirror that is not running and affects readiness. Empty: ready."""
        return [
            f"mirror={health.mirror} state={health.state}"
            + (f" kind={health.kind}: {health.message}" if health.kind else "")
            for health in self.mirrors(self._silent)
            if health.state != "running"
        ]

    def status(self) -> dict[str, object]:
        """Return the state of all mirrors and flows, for `/status.json`."""
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
        """Age of the oldest record that is not copied, in seconds. None: not known yet."""
        if flow not in self._lagging_since_ms:
            return None
        since_ms = self._lagging_since_ms[flow]
        return 0.0 if since_ms is None else max(self._clock.now_ms() - since_ms, 0) / 1000


def _error(kind: str, message: str) -> dict[str, str] | None:
    return {"kind": kind, "message": message} if kind else None
