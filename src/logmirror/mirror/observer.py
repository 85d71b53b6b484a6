"""Driver: reports the work of lanes: metrics, log events, the status board, heartbeats.

Only lanes call it, after data has become durable, so no metric runs ahead of the destination (I5).
Their calls are processed one at a time.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Concatenate, Final, Literal, ParamSpec, TypeVar

from logmirror.mirror.health import StatusBoard
from logmirror.mirror.heartbeat import Heartbeat
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.progress_reports import ProgressReports
from logmirror.mirror.repeated import Repeated
from logmirror.model import GapCause
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import DestinationSpec, FlowId, GapSummary, Receipt, SliceResult
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import OffsetRange
    from logmirror.monitoring.metrics import Labels, Recorder
    from logmirror.reports import RunProgress

_LOG = logging.getLogger("logmirror.mirror")

_Stage = Literal["running", "waiting", "stopped"]
_STAGES: Final[tuple[_Stage, ...]] = ("running", "waiting", "stopped")

_COUNTERS: Final = (
    metrics.RECORDS,
    metrics.BYTES,
    metrics.COMMITS,
    metrics.RESTARTS,
    metrics.CONFLICTS,
    metrics.RETRY,
)
"""Metrics of a flow that are exported as 0 from its opening on."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_at_a_time(
    method: Callable[Concatenate[Observer, _P], _R],
) -> Callable[Concatenate[Observer, _P], _R]:
    @functools.wraps(method)
    def locked(self: Observer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Observer:
    """Turns events of lanes into metrics, log events and the status board.

    Args:
        mirrors: The names of all mirrors.
        recorder: Receives the metrics.
        clock: Time.
        heartbeat_ms: Time between two heartbeats, in milliseconds. 0: none.
        silent: What does not affect readiness; see `StatusBoard`.
        on_progress: Called with the progress of all mirrors; see `ProgressReports`.
    """

    def __init__(  # noqa: PLR0913  # one parameter for each kind of report
        self,
        mirrors: Sequence[str],
        recorder: Recorder,
        clock: Clock,
        *,
        heartbeat_ms: int = 0,
        silent: Collection[tuple[str, str]] = (),
        on_progress: Callable[[RunProgress], None] | None = None,
    ) -> None:
        self.recorder, self._clock = recorder, clock
        self.lock = threading.RLock()
        self.board = StatusBoard(mirrors, clock, silent)
        self._heartbeat = Heartbeat(heartbeat_ms, clock)
        self._progress = on_progress and ProgressReports(mirrors, recorder, clock, on_progress)
        self._flushed_ms: dict[FlowId, int] = {}
        """Monotonic time of the last flush of a flow, or of its opening."""

        self._stages: dict[FlowId, _Stage] = {}
        self._snapshots: set[FlowId] = set()
        """Flows with `compaction: log`."""

        self._repeated = Repeated(clock)
        self._slot_peak_bytes = 0

    # -- lanes -----------------------------------------------------------------------------------

    @_one_at_a_time
    def beat(self, states: Collection[FlowState], *, is_last: bool = False) -> None:
        """Log heartbeats and report progress, if they are due.

        Args:
            states: The flows of all lanes.
            is_last: The run ends.
        """
        self._heartbeat.beat(states)
        if self._progress is not None:
            self._progress.report(states, is_last=is_last)

    @_one_at_a_time
    def planned(self, states: Mapping[FlowId, FlowState], planned: Collection[FlowId]) -> None:
        """A tick was planned. A flow that no longer backs off and has nothing due has recovered.

        Args:
            states: All flows of the lane.
            planned: The flows that have a slice in this tick.
        """
        now_ms = self._clock.monotonic_ms()
        for flow in self.board.waiting_flows():
            state = states.get(flow)  # None: of another lane
            is_free = state and state.is_free(now_ms)
            if is_free and flow not in planned:
                self._resume(flow)

    @_one_at_a_time
    def memory_budget(self, memory_bytes: int) -> None:
        """All slots together may use this much memory, in bytes."""
        self.recorder.set(metrics.BUDGET, (), memory_bytes)

    @_one_at_a_time
    def slices_done(self, results: Iterable[SliceResult]) -> None:
        """The slices of a tick have ended."""
        for result in results:
            self._slot_peak_bytes = max(self._slot_peak_bytes, result.peak_bytes)
        if self._slot_peak_bytes:
            self.recorder.set(metrics.SLOT_PEAK, (), self._slot_peak_bytes)

    # -- flows -----------------------------------------------------------------------------------

    @_one_at_a_time
    def flow_opened(self, state: FlowState) -> None:
        """A flow has its first position."""
        flow, spec = state.flow, state.destination
        for counter in _COUNTERS:
            self.recorder.add(counter, _labels(flow), 0)
        self.recorder.set(metrics.RETRY_SECONDS, _labels(flow), metrics.NEVER)
        max_time_s = spec.max_time_ms / 1000
        self.recorder.set(metrics.MAX_TIME, (flow.mirror, flow.destination), max_time_s)
        if spec.compaction:
            self._snapshots.add(flow)
        self._enter(flow, "running")
        self._flushed_ms[flow] = self._clock.monotonic_ms()
        self._heartbeat.opened(state)
        self.board.flow_opened(state)
        self.position_changed(state)

    @_one_at_a_time
    def position_changed(self, state: FlowState) -> None:
        """A flow's position, or the end of its source, may have changed."""
        labels = _labels(state.flow)
        self.recorder.set(metrics.OFFSET_VERIFIED, labels, state.position)
        if state.source_end >= 0:
            lag = max(state.source_end - state.position, 0)
            self.recorder.set(metrics.SOURCE_END, labels, state.source_end)
            self.recorder.set(metrics.LAG, labels, lag)

    @_one_at_a_time
    def set_lag(self, flow: FlowId, since_ms: int | None) -> None:
        """Set the timestamp of the oldest record that a flow has not copied.

        Args:
            flow: The flow.
            since_ms: In milliseconds since 1970. None: the flow has no lag.
        """
        self.board.set_lag(flow, since_ms)
        self.recorder.set(metrics.LAG_SECONDS, _labels(flow), _moment_s(since_ms))

    @_one_at_a_time
    def set_stalled(self, flow: FlowId, since_ms: int | None) -> None:
        """Set since when a flow has had offsets to copy without a commit.

        Args:
            flow: The flow.
            since_ms: In milliseconds since 1970. None: the flow has no lag.
        """
        self.recorder.set(metrics.STALLED, _labels(flow), _moment_s(since_ms))

    @_one_at_a_time
    def flushed(self, flow: FlowId, receipt: Receipt, covered: OffsetRange, name: str) -> None:
        """An object is published, and so is every object before it.

        Args:
            flow: The flow.
            receipt: The object's receipt.
            covered: The offsets that the object covers.
            name: The object's file name.
        """
        labels, trigger = _labels(flow), receipt.trigger.value
        self.recorder.add(metrics.FLUSHES, (*labels, trigger))
        seconds = receipt.elapsed_ms / 1000
        self.recorder.observe(metrics.FLUSH_SECONDS, (flow.mirror, flow.destination), seconds)
        if flow in self._snapshots:
            self.recorder.set(metrics.KEYS, labels, receipt.record_count)
        self._count(labels, receipt)
        if receipt.existed:
            self.conflict(flow)
        facts = {
            **flow_facts(flow),
            "path": f"{flow.folder}/{name}",
            "from": covered.first,
            "to": covered.last,
            "count": receipt.record_count,
            "bytes": receipt.object_bytes,
            "elapsed_ms": receipt.elapsed_ms,
            "interval_ms": self.interval_ms(flow),
            "trigger": trigger,
        }
        _LOG.info("flushed", extra={"facts": facts})

    @_one_at_a_time
    def interval_ms(self, flow: FlowId) -> int:
        """Return the time since a flow's last flush or its opening, and start a new interval."""
        now_ms = self._clock.monotonic_ms()
        before_ms = self._flushed_ms.get(flow, now_ms)
        self._flushed_ms[flow] = now_ms
        return now_ms - before_ms

    @_one_at_a_time
    def claimed_by_other(
        self, flow: FlowId, receipt: Receipt, covered: OffsetRange, writer_id: str
    ) -> None:
        """The offsets of a published object had been claimed by another writer.

        Args:
            flow: The flow.
            receipt: The object's receipt, whose `claimed_by` is the other writer.
            covered: The offsets that the object covers.
            writer_id: The ID of this writer.
        """
        facts = {
            **flow_facts(flow),
            "from": covered.first,
            "to": covered.last,
            "claimed_by": receipt.claimed_by,
            "writer": writer_id,
        }
        _LOG.info("another writer was first", extra={"facts": facts})

    @_one_at_a_time
    def copied(self, flow: FlowId, receipt: Receipt) -> None:
        """A destination cluster has acknowledged the records of one slice."""
        self.recorder.add(metrics.BATCHES, _labels(flow), receipt.batch_count)
        self._count(_labels(flow), receipt)

    @_one_at_a_time
    def conflict(self, flow: FlowId) -> None:
        """Another writer claimed or published an object first."""
        self.recorder.add(metrics.CONFLICTS, _labels(flow))

    @_one_at_a_time
    def committed(self, state: FlowState) -> None:
        """All slices of a flow were committed without an error."""
        self._resume(state.flow)

    @_one_at_a_time
    def flow_waits(self, state: FlowState, error: LogmirrorError, wait_ms: int) -> None:
        """A flow failed with a retriable error and backs off for `wait_ms`."""
        labels = _labels(state.flow)
        self.recorder.add(metrics.RESTARTS, labels)
        self._failed(state.flow, error)
        since_ms = self.board.flow_waits(state.flow, error)
        if self._stages.get(state.flow) != "stopped":
            self.recorder.set(metrics.RETRY, labels, state.failures)
            self.recorder.set(metrics.RETRY_SECONDS, labels, _moment_s(since_ms))
            self._enter(state.flow, "waiting")
        of = (state.flow.mirror, state.flow.destination)
        repeated = self._repeated.admit((*of, error.kind, error.message))
        if repeated is None:
            return
        facts = {**error.facts, **flow_facts(state.flow), "failures": state.failures}
        facts |= {"retry_in_ms": wait_ms, "repeated": repeated}
        _LOG.warning("flow waits: %s", error.message, extra={"facts": facts})

    def _resume(self, flow: FlowId) -> None:
        self.board.flow_resumed(flow)
        if self._stages.get(flow) == "waiting":
            self._clear_retry(flow)
            self._enter(flow, "running")

    def _clear_retry(self, flow: FlowId) -> None:
        self.recorder.set(metrics.RETRY, _labels(flow), 0)
        self.recorder.set(metrics.RETRY_SECONDS, _labels(flow), metrics.NEVER)

    def _enter(self, flow: FlowId, stage: _Stage) -> None:
        """Move a flow from its previous stage to this one in the counts of flows."""
        of, before = (flow.mirror, flow.destination), self._stages.get(flow)
        if before == stage:
            return
        for each in _STAGES:
            self.recorder.add(metrics.FLOWS, (*of, each), (each == stage) - (each == before))
        self._stages[flow] = stage

    def _count(self, labels: Labels, receipt: Receipt) -> None:
        self.recorder.add(metrics.COMMITS, labels)
        self.recorder.add(metrics.RECORDS, labels, receipt.record_count)
        self.recorder.add(metrics.BYTES, labels, receipt.object_bytes)
        self.recorder.set(metrics.LAST_FLUSH, labels, self._clock.now_ms() / 1000)
        for cause, count in _counts(receipt.gaps):
            if count:
                self.recorder.add(metrics.GAPS, (*labels, cause.value), count)

    def _failed(self, flow: FlowId, error: LogmirrorError) -> None:
        self.recorder.add(metrics.ERRORS, (*_labels(flow), error.kind))

    # -- whole mirrors ---------------------------------------------------------------------------

    @_one_at_a_time
    def mirror_starts(self, mirror: MirrorSpec, states: Sequence[FlowState]) -> None:
        """A mirror starts, or has new partitions. `states` are the newly opened flows."""
        specs = [spec for _, spec in mirror.destinations]
        facts = {
            "mirror": mirror.name,
            "topic": mirror.topic,
            "partitions": len({state.flow.partition for state in states}),
            "destinations": [name for name, _ in mirror.destinations],
            "formats": [_format(spec) for spec in specs],
            "compaction": [_compaction(spec) for spec in specs],
            "position": sum(state.position for state in states),
        }
        _LOG.info("mirror starts", extra={"facts": facts})

    @_one_at_a_time
    def mirror_opened(
        self, mirror: str, destinations: Collection[str], unopened: Collection[str]
    ) -> None:
        """The flows of a mirror into `destinations` are open, except for those in `unopened`."""
        self.board.mirror_opened(mirror, unopened, destinations=destinations)

    @_one_at_a_time
    def opening_failed(self, facts: Mapping[str, object], error: LogmirrorError) -> None:
        """A mirror's source, or one of its destinations, could not be opened and backs off.

        Args:
            facts: `mirror`, `topic`, `destination` (empty: the source), and more for the log.
            error: The error.
        """
        mirror, destination, topic = (str(facts[k]) for k in ("mirror", "destination", "topic"))
        self.recorder.add(metrics.ERRORS, (mirror, destination, topic, "", error.kind))
        self.board.opening_failed(mirror, destination, error)
        _LOG.warning("mirror waits: %s", error.message, extra={"facts": {**error.facts, **facts}})

    @_one_at_a_time
    def mirror_stopped(
        self, mirror: str, topic: str, error: LogmirrorError, flow: FlowId | None
    ) -> None:
        """A mirror stopped, because of one of its flows or as a whole (`flow` is None)."""
        labels = _labels(flow) if flow else (mirror, "", topic, "")
        self.recorder.add(metrics.ERRORS, (*labels, error.kind))
        self.board.mirror_stopped(mirror, error, flow)
        for one in [one for one in self._stages if one.mirror == mirror]:
            self._clear_retry(one)
            self.board.flow_resumed(one)
            self._enter(one, "stopped")
        facts = {
            **error.facts,
            **(flow_facts(flow) if flow else {"mirror": mirror, "topic": topic}),
        }
        facts["kind"] = error.kind
        _LOG.error("mirror stopped: %s", error.message, extra={"facts": facts})


def flow_facts(flow: FlowId) -> dict[str, object]:
    """Return the fields that every log event of a flow has (R11)."""
    return {
        "mirror": flow.mirror,
        "destination": flow.destination,
        "topic": flow.topic,
        "partition": flow.partition,
    }


def _labels(flow: FlowId) -> Labels:
    return (flow.mirror, flow.destination, flow.topic, str(flow.partition))


def _moment_s(wall_ms: int | None) -> float:
    return metrics.NEVER if wall_ms is None else wall_ms / 1000


def _format(spec: DestinationSpec) -> str:
    return "kafka" if isinstance(spec, KafkaSpec) else spec.format


def _compaction(spec: DestinationSpec) -> str:
    return spec.compaction or "none"


def _counts(gaps: GapSummary) -> tuple[tuple[GapCause, int], ...]:
    return (
        (GapCause.CONTROL, gaps.control),
        (GapCause.ABORTED, gaps.aborted),
        (GapCause.COMPACTED, gaps.compacted),
    )
