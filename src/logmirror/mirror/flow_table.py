"""Driver: the flows of this process, and what an error does to them.

A retriable error makes its flow back off; the other flows continue. Any other error stops the
flow's mirror at the next commit boundary, which is the end of the tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.mirror.backoff import RETRIABLE, backoff_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.ports import FlowId, Hold
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import StoppedMirrors

ATTEMPTS_UNTIL_NOW: Final = 5
"""Consecutive failures after which `--until-now` gives up: about 30 s of back-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """What each stage of the loop uses."""

    client: Callable[[ConnectionSettings], ClusterClient]
    """Opens, or returns the open, client of a source. Driver only."""

    brief_client: Callable[[ConnectionSettings], ClusterClient]
    """Like `client`, for requests that the loop can do without: each ends within seconds."""

    destinations: Mapping[tuple[str, str], Destination]
    """The driver's side of each destination, by names of mirror and destination."""

    observer: Observer
    clock: Clock

    def destination(self, flow: FlowId) -> Destination:
        """Return the driver's side of a flow's destination."""
        return self.destinations[flow.mirror, flow.destination]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unopened:
    """A destination of a mirror, or its source, that could not be opened yet."""

    error: LogmirrorError
    """The last attempt's error."""

    retry_at_ms: int
    """Monotonic time of the next attempt."""

    failures: int
    """Consecutive failures, at least 1."""


class FlowTable:
    """The open flows, the destinations that are not open yet, and the mirrors that stopped.

    Args:
        mirrors: The mirrors of the lane.
        context: Clock and observer.
        stopped: The stopped mirrors of the process.
    """

    def __init__(
        self, mirrors: Sequence[MirrorSpec], context: LoopContext, stopped: StoppedMirrors
    ) -> None:
        self._topics = {mirror.name: mirror.topic for mirror in mirrors}
        self._observer, self._clock = context.observer, context.clock
        self.states: dict[FlowId, FlowState] = {}
        """All open flows."""

        self.mirror_of: dict[FlowId, MirrorSpec] = {}
        """The mirror of each open flow."""

        self.unopened: dict[tuple[str, str], Unopened] = {}
        """By names of mirror and destination. An empty destination: the source failed."""

        self.stopped = stopped

        self.ends = False
        """Whether all flows end: those without a target, too, as soon as their source responds."""

    @property
    def all_reached(self) -> bool:
        """Whether each flow has reached its target."""
        return all(state.reached for state in self.states.values())

    @property
    def all_back_off(self) -> bool:
        """Whether each flow that has not reached its target backs off after a failure."""
        now_ms = self._clock.monotonic_ms()
        return all(s.backs_off(now_ms) for s in self.states.values() if not s.reached)

    def add(self, mirror: MirrorSpec, state: FlowState) -> None:
        """Add a flow that was opened."""
        self.mirror_of[state.flow], self.states[state.flow] = mirror, state

    def set_targets(self) -> None:
        """End each polled flow that has no target yet at the last known end of its source."""
        for state in self.states.values():
            if state.target is None and state.source_end >= 0:
                state.target = max(state.source_end, state.position)

    def gives_up_next(self, state: FlowState) -> bool:
        """Whether a flow gives up at its next failure."""
        return self._ends(state) and state.failures + 1 >= ATTEMPTS_UNTIL_NOW

    def _ends(self, state: FlowState) -> bool:
        return self.ends or state.target is not None

    def fail(self, state: FlowState, error: LogmirrorError, hold: Hold | None = None) -> None:
        """Make a flow back off, or stop its mirror if the error is not retriable.

        A hold lengthens the back-off. A flow that ends gives up after `ATTEMPTS_UNTIL_NOW`
        consecutive failures.
        """
        if not isinstance(error, RETRIABLE):
            self.stop_mirror(state.flow.mirror, error, state.flow)
            return
        wait_ms = state.failed(self._clock.monotonic_ms(), hold)
        if self._ends(state) and state.failures >= ATTEMPTS_UNTIL_NOW:
            self.stop_mirror(state.flow.mirror, error, state.flow)
            return
        self._observer.flow_waits(state, error, wait_ms)

    def fail_opening(self, mirror: MirrorSpec, destination: str, error: LogmirrorError) -> None:
        """Make a destination, or the source of a mirror, back off after a failure to open it.

        Args:
            mirror: The mirror.
            destination: The destination's name; empty: the source failed.
            error: A retriable error.
        """
        before = self.unopened.get((mirror.name, destination))
        failures = before.failures + 1 if before else 1
        wait_ms = backoff_ms(failures)
        self.unopened[mirror.name, destination] = Unopened(
            error=error, retry_at_ms=self._clock.monotonic_ms() + wait_ms, failures=failures
        )
        facts: dict[str, object] = {"mirror": mirror.name, "topic": mirror.topic}
        facts["destination"] = destination
        facts |= {"failures": failures, "retry_in_ms": wait_ms}
        self._observer.opening_failed(facts, error)

    def opening_backs_off(self, mirror: str, destination: str) -> bool:
        """Whether a destination, or the source (empty), must not be opened again yet."""
        unopened = self.unopened.get((mirror, destination))
        return unopened is not None and unopened.retry_at_ms > self._clock.monotonic_ms()

    def stop_mirror(self, mirror: str, error: LogmirrorError, flow: FlowId | None = None) -> None:
        """Stop a mirror at the next commit boundary. Only its first error counts.

        Args:
            mirror: The mirror's name.
            error: The reason.
            flow: The flow that failed; None: the mirror as a whole.
        """
        if self.stopped.add(mirror, error):
            self._observer.mirror_stopped(mirror, self._topics[mirror], error, flow)

    def drop_stopped(self) -> None:
        """Drop the flows of stopped mirrors. Called at commit boundaries only.

        Raises:
            LogmirrorError: The first stopped mirror's error, if the process must end.
        """
        for flow in [flow for flow in self.states if flow.mirror in self.stopped]:
            del self.states[flow], self.mirror_of[flow]
        for opening in [opening for opening in self.unopened if opening[0] in self.stopped]:
            del self.unopened[opening]
        self.stopped.raise_if_over()
