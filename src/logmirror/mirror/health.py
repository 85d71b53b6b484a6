"""Driver: the status board, which `/readyz`, `/livez` and `/status.json` report.

Lanes write; other threads read at any time, without a lock, because values are replaced atomically.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import FlowId

LIVE_MS: Final = 300_000
"""The process is not live if no lane has made progress for this long. Each request of a lane has a
far shorter deadline."""

STUCK_MS: Final = 1_800_000
"""The process is not live if one lane has made no progress for this long. Only a restart can help
it, and a restart interrupts the other lanes."""

STALLED_MS: Final = 30_000
"""The mirrors of a lane are not ready if it has made no progress for this long."""


class LaneProgress:
    """Whether a lane makes progress. The lane writes; other threads read, and report beats.

    Args:
        mirrors: The mirrors of the lane, and the names of their destinations that it serves.
        clock: Time.
        addresses: Returns the addresses of source and destination, for log lines.
    """

    def __init__(
        self,
        mirrors: Sequence[tuple[str, Collection[str]]],
        clock: Clock,
        addresses: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.mirrors, self.addresses = tuple(mirrors), addresses
        self._clock = clock
        self._made_ms = clock.monotonic_ms()
        self._doing = ""
        self._running: tuple[FlowId, ...] = ()
        self._has_beats = False
        self.is_over = False
        """The lane has ended."""

    def made(self) -> None:
        """Record progress of the lane."""
        self._made_ms = self._clock.monotonic_ms()

    def beat(self) -> None:
        """Record progress of a running slice. Safe from any thread."""
        self._has_beats = True
        self.made()

    @contextlib.contextmanager
    def doing(self, step: str) -> Iterator[None]:
        """Context of a step in the driver, such as `open` or `poll`."""
        self._doing = step
        self.made()
        try:
            yield
        finally:
            self._doing = ""
            self.made()

    @contextlib.contextmanager
    def running(self, flows: Sequence[FlowId]) -> Iterator[None]:
        """Context in which slices of these flows run."""
        self._running, self._has_beats = tuple(flows), False
        self.made()
        try:
            yield
        finally:
            self._running, self._has_beats = (), False
            self.made()

    @property
    def silent_ms(self) -> int:
        """Time since the last progress, in milliseconds. 0: the lane has ended."""
        return 0 if self.is_over else max(self._clock.monotonic_ms() - self._made_ms, 0)

    @property
    def quiet_ms(self) -> int:
        """Like `silent_ms`, for log lines: 0 while slices run that cannot report progress."""
        return 0 if self._running and not self._has_beats else self.silent_ms

    @property
    def runs_slices(self) -> bool:
        """Whether slices run."""
        return bool(self._running)

    @property
    def waits_for(self) -> str:
        """What the lane waits for: a step of the driver or slices. Empty: nothing."""
        if not self._running:
            return self._doing
        flows = ", ".join(str(flow) for flow in self._running[:3])
        more = len(self._running) - 3
        return f"slices of {flows}" + (f" and {more} more" if more > 0 else "")

    @property
    def stalled_ms(self) -> int:
        """Time for which the lane has made no progress although it should. 0: it is not stalled.

        Slices on executors that cannot reach the driver report none until they end.
        """
        silent_ms = self.silent_ms
        allowed_ms = LIVE_MS if self._running and not self._has_beats else STALLED_MS
        return silent_ms if silent_ms > allowed_ms else 0


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
        self._opened: set[tuple[str, str]] = set()
        """Pairs of mirror and destination."""

        self._unopened: dict[tuple[str, str], Trouble] = {}
        self._waiting: dict[FlowId, Trouble] = {}
        self._last: dict[FlowId, Trouble] = {}
        self._lagging_since_ms: dict[FlowId, int | None] = {}
        """Timestamp of the oldest record that is not copied. None: all are copied."""

        self._stopped: dict[str, Trouble] = {}
        self._lanes: tuple[LaneProgress, ...] = ()

    # -- written by the lanes --------------------------------------------------------------------

    def lanes_begin(self, lanes: Collection[LaneProgress]) -> None:
        """Record that these lanes run from now on."""
        self._lanes = tuple(lanes)

    def mirror_opened(
        self,
        mirror: str,
        unopened: Collection[str] = (),
        *,
        destinations: Collection[str] | None = None,
    ) -> None:
        """Record that a mirror's source responded and its flows are open.

        Args:
            mirror: The mirror's name.
            unopened: The destinations whose flows are not open yet.
            destinations: The names of its destinations in the lane. None: all.
        """
        if destinations is None:
            destinations = {name for of, name in list(self._unopened) if of == mirror}
        self._opened |= {(mirror, name) for name in destinations or ("",)}
        for name in ("", *destinations):
            if name not in unopened:
                self._unopened.pop((mirror, name), None)

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

    def _is_open(self, mirror: str) -> bool:
        """Whether each lane of a mirror has opened its flows."""
        if not self._lanes:
            return any(each[0] == mirror for each in self._opened)
        names = {
            name
            for lane in self._lanes
            for of, some in lane.mirrors
            for name in some
            if of == mirror
        }
        return all((mirror, name) in self._opened for name in names)

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
        for mirror, destination, trouble in self._stalled():
            if (mirror, destination) not in ignored:
                waiting.setdefault(mirror, trouble)
        names = [name for name in list(self._states) if (name, "") not in ignored]
        return [self._mirror(name, waiting.get(name)) for name in names]

    def _stalled(self) -> Iterator[tuple[str, str, Trouble]]:
        """Yield the mirrors and destinations of lanes that make no progress."""
        for lane in self._lanes:
            silent_ms = lane.stalled_ms
            if silent_ms:
                message = f"no progress for {silent_ms // 1000} s: {lane.waits_for or 'the driver'}"
                since_ms = self._clock.now_ms() - silent_ms
                trouble = Trouble(kind="unavailable", message=message, since_ms=since_ms)
                for mirror, destinations in lane.mirrors:
                    for destination in destinations:
                        yield mirror, destination, trouble

    def _mirror(self, name: str, waiting: Trouble | None) -> MirrorHealth:
        stopped = self._stopped.get(name)
        trouble = stopped or waiting
        if trouble is None:
            return MirrorHealth(mirror=name, state="running" if self._is_open(name) else "starting")
        state: Literal["stopped", "waiting"] = "stopped" if stopped else "waiting"
        return MirrorHealth(mirror=name, state=state, kind=trouble.kind, message=trouble.message)

    def not_live(self) -> list[str]:
        """Return why the process should be restarted. Empty: it is live."""
        silent_ms = [lane.silent_ms for lane in self._lanes if not lane.is_over]
        if silent_ms and min(silent_ms) > LIVE_MS:
            return [f"the process has made no progress for {min(silent_ms)} ms"]
        return [
            f"{lane.waits_for or 'the driver'}: no progress for {lane.silent_ms} ms"
            for lane in self._lanes
            if lane.silent_ms > STUCK_MS
        ]

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
