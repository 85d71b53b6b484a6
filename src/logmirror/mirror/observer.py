"""Driver: what the loop says of its work: metrics, log events, health, heartbeats.

Called by the loop alone, after what is told has become durable, so that no figure runs ahead of the
copy (I5).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final, Literal

from logmirror.mirror.health import StatusBoard
from logmirror.mirror.heartbeat import Heartbeat
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.model import GapCause
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import DestinationSpec, FlowId, GapSummary, Receipt, SliceResult
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.model import OffsetRange
    from logmirror.monitoring.metrics import Labels, Recorder

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
"""Of a flow; they are there, as 0, before anything has happened."""


class Observer:
    """Takes the loop's word and passes it on.

    Args:
        mirrors: Names of all mirrors.
        recorder: Takes the metrics.
        clock: Time.
        heartbeat_ms: Between two heartbeats; 0: none.
        silent: What has no say in readiness; see `StatusBoard`.
    """

    def __init__(
        self,
        mirrors: Sequence[str],
        recorder: Recorder,
        clock: Clock,
        *,
        heartbeat_ms: int = 0,
        silent: Collection[tuple[str, str]] = (),
    ) -> None:
        self.recorder, self._clock = recorder, clock
        self.board = StatusBoard(mirrors, clock, silent)
        self._heartbeat = Heartbeat(heartbeat_ms, clock)
        self._flushed_ms: dict[FlowId, int] = {}
        """Monotonic time of the last flush of a flow, or of its opening."""

        self._stages: dict[FlowId, _Stage] = {}
        self._snapshots: set[FlowId] = set()
        """Flows with `compaction: log`."""

        self._slot_peak_bytes = 0

    # -- the loop --------------------------------------------------------------------------------

    def turned(self, states: Iterable[FlowState]) -> None:
        """The loop has run what was due."""
        self.board.turned()
        self._heartbeat.beat(states)

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Slices run inside of this."""
        self.board.ticking(on=True)
        try:
            yield
        finally:
            self.board.ticking(on=False)

    def planned(self, states: Mapping[FlowId, FlowState], planned: Collection[FlowId]) -> None:
        """What is due is known: a flow that may go on and has nothing due waits no longer."""
        now_ms = self._clock.monotonic_ms()
        for flow in self.board.waiting():
            if flow not in states:  # its mirror has stopped
                self._goes_on(flow)
                continue
            is_free = states[flow].retry_at_ms <= now_ms and not states[flow].lost
            if is_free and flow not in planned:
                self._goes_on(flow)

    def budget(self, memory_bytes: int) -> None:
        """What all slots together may hold."""
        self.recorder.set(metrics.BUDGET, (), memory_bytes)

    def ran(self, results: Iterable[SliceResult]) -> None:
        """Slices have come back from their slots."""
        for result in results:
            self._slot_peak_bytes = max(self._slot_peak_bytes, result.peak_bytes)
        if self._slot_peak_bytes:
            self.recorder.set(metrics.SLOT_PEAK, (), self._slot_peak_bytes)

    # -- flows -----------------------------------------------------------------------------------

    def opened(self, state: FlowState) -> None:
        """A flow has its first position."""
        flow, spec = state.flow, state.destination
        for counter in _COUNTERS:
            self.recorder.add(counter, _labels(flow), 0)
        self.recorder.set(metrics.RETRY_SECONDS, _labels(flow), metrics.NEVER)
        max_time_ms = spec.max_time_ms if isinstance(spec, ArchiveSpec) else 0
        self.recorder.set(metrics.MAX_TIME, (flow.mirror, flow.destination), max_time_ms / 1000)
        if isinstance(spec, ArchiveSpec) and spec.compaction:
            self._snapshots.add(flow)
        self._enter(flow, "running")
        self._flushed_ms[flow] = self._clock.monotonic_ms()
        self._heartbeat.opened(state)
        self.board.knows(state)
        self.saw(state)

    def saw(self, state: FlowState) -> None:
        """A flow's position, or the end of its source, may be another one."""
        self.board.turned()
        labels = _labels(state.flow)
        self.recorder.set(metrics.OFFSET_VERIFIED, labels, state.position)
        if state.source_end >= 0:
            lag = max(state.source_end - state.position, 0)
            self.recorder.set(metrics.SOURCE_END, labels, state.source_end)
            self.recorder.set(metrics.LAG, labels, lag)

    def lags(self, flow: FlowId, since_ms: int | None) -> None:
        """The oldest record that a flow has not copied is of that time; None: it has them all."""
        self.board.lags(flow, since_ms)
        self.recorder.set(metrics.LAG_SECONDS, _labels(flow), _moment_s(since_ms))

    def stalls(self, flow: FlowId, since_ms: int | None) -> None:
        """Since that time a flow has had something to copy; None: it has nothing."""
        self.recorder.set(metrics.STALLED, _labels(flow), _moment_s(since_ms))

    def flushed(self, flow: FlowId, receipt: Receipt, covered: OffsetRange, name: str) -> None:
        """An object is published, and everything before it too.

        Args:
            flow: Whose object.
            receipt: What it contains.
            covered: Its offsets.
            name: Its name in the flow's folder.
        """
        labels, trigger = _labels(flow), receipt.trigger.value
        self.recorder.add(metrics.FLUSHES, (*labels, trigger))
        seconds = receipt.elapsed_ms / 1000
        self.recorder.observe(metrics.FLUSH_SECONDS, (flow.mirror, flow.destination), seconds)
        if flow in self._snapshots:
            self.recorder.set(metrics.KEYS, labels, receipt.record_count)
        self._count(labels, receipt)
        if receipt.peer:
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

    def interval_ms(self, flow: FlowId) -> int:
        """How long ago a flow was last told to have been flushed, or opened; it is told now."""
        now_ms = self._clock.monotonic_ms()
        before_ms = self._flushed_ms.get(flow, now_ms)
        self._flushed_ms[flow] = now_ms
        return now_ms - before_ms

    def overtaken(
        self, flow: FlowId, receipt: Receipt, covered: OffsetRange, writer_id: str
    ) -> None:
        """What we publish had been claimed by another writer, which is named."""
        facts = {
            **flow_facts(flow),
            "from": covered.first,
            "to": covered.last,
            "claimed_by": receipt.claimed_by,
            "writer": writer_id,
        }
        _LOG.info("another writer was first", extra={"facts": facts})

    def copied(self, flow: FlowId, receipt: Receipt) -> None:
        """Another cluster has acknowledged what one slice brought."""
        self.recorder.add(metrics.BATCHES, _labels(flow), receipt.batch_count)
        self._count(_labels(flow), receipt)

    def conflict(self, flow: FlowId) -> None:
        """Another writer had claimed or published an object before us."""
        self.recorder.add(metrics.CONFLICTS, _labels(flow))

    def committed(self, state: FlowState) -> None:
        """A flow's slices came without an error."""
        self._goes_on(state.flow)

    def waits(self, state: FlowState, error: LogmirrorError, wait_ms: int) -> None:
        """A flow failed for now."""
        self.board.turned()
        labels = _labels(state.flow)
        self.recorder.add(metrics.RESTARTS, labels)
        self._failed(state.flow, error)
        since_ms = self.board.waits(state.flow, error)
        if self._stages.get(state.flow) != "stopped":
            self.recorder.set(metrics.RETRY, labels, state.failures)
            self.recorder.set(metrics.RETRY_SECONDS, labels, _moment_s(since_ms))
            self._enter(state.flow, "waiting")
        facts = {**error.facts, **flow_facts(state.flow), "failures": state.failures}
        facts["retry_in_ms"] = wait_ms
        _LOG.warning("flow waits: %s", error.message, extra={"facts": facts})

    def _goes_on(self, flow: FlowId) -> None:
        self.board.goes_on(flow)
        if self._stages.get(flow) == "waiting":
            self._waits_no_more(flow)
            self._enter(flow, "running")

    def _waits_no_more(self, flow: FlowId) -> None:
        self.recorder.set(metrics.RETRY, _labels(flow), 0)
        self.recorder.set(metrics.RETRY_SECONDS, _labels(flow), metrics.NEVER)

    def _enter(self, flow: FlowId, stage: _Stage) -> None:
        """Count a flow as running, waiting or stopped, and no longer as what it was."""
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

    def mirror_starts(self, mirror: MirrorSpec, states: Sequence[FlowState]) -> None:
        """A mirror begins, or has new partitions: these flows are new."""
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

    def mirror_opened(self, mirror: str, unopened: Collection[str] = ()) -> None:
        """All flows of a mirror have positions, but for those of these destinations."""
        self.board.opened(mirror, unopened)

    def not_opened(self, facts: Mapping[str, object], error: LogmirrorError) -> None:
        """A mirror, or one destination of it, could not be looked at; the other flows may go on.

        Args:
            facts: `mirror`, `topic`, `destination` (empty: it is the source), and more for the log.
            error: What happened.
        """
        self.board.turned()
        mirror, destination, topic = (str(facts[k]) for k in ("mirror", "destination", "topic"))
        self.recorder.add(metrics.ERRORS, (mirror, destination, topic, "", error.kind))
        self.board.unreachable(mirror, destination, error)
        _LOG.warning("mirror waits: %s", error.message, extra={"facts": {**error.facts, **facts}})

    def stopped(self, mirror: str, topic: str, error: LogmirrorError, flow: FlowId | None) -> None:
        """A mirror must not go on, because of one of its flows or as a whole."""
        labels = _labels(flow) if flow else (mirror, "", topic, "")
        self.recorder.add(metrics.ERRORS, (*labels, error.kind))
        self.board.stopped(mirror, error, flow)
        for one in [one for one in self._stages if one.mirror == mirror]:
            self._waits_no_more(one)
            self._enter(one, "stopped")
        facts = {
            **error.facts,
            **(flow_facts(flow) if flow else {"mirror": mirror, "topic": topic}),
        }
        facts["kind"] = error.kind
        _LOG.error("mirror stopped: %s", error.message, extra={"facts": facts})


def flow_facts(flow: FlowId) -> dict[str, object]:
    """What every log event of a flow carries (R11)."""
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
    return "none" if isinstance(spec, KafkaSpec) else spec.compaction or "none"


def _counts(gaps: GapSummary) -> tuple[tuple[GapCause, int], ...]:
    return (
        (GapCause.CONTROL, gaps.control),
        (GapCause.ABORTED, gaps.aborted),
        (GapCause.COMPACTED, gaps.compacted),
    )
