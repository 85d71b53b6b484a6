"""Driver: one tick of a lane: plan slices, run them, commit their results."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.errors import PositionMovedError, UnavailableError
from logmirror.mirror.follow import LONG_MS, SHORT_MS
from logmirror.mirror.plan import plan
from logmirror.mirror.ports import (
    SLOT_BYTES,
    ArchiveSpec,
    EngineLostError,
    FlowId,
    Work,
)
from logmirror.mirror.slots import SLOW_MS
from logmirror.mirror.units import units

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.health import LaneProgress
    from logmirror.mirror.plan import Planned
    from logmirror.mirror.ports import Runner, SliceResult
    from logmirror.mirror.slots import SlotPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where the slices of all lanes run."""

    runner: Runner
    slots: SlotPool
    writer_id: str
    """The ID of this process as a writer."""

    memory_bytes: int | None
    """The memory of all slots together, in bytes; None: `SLOT_BYTES` each."""


class Tick:
    """Runs what is due in a lane, one tick at a time.

    Args:
        table: The flows.
        context: Destinations, observer and clock.
        engine: Where slices run.
        progress: Receives the lane's progress.
    """

    def __init__(
        self, table: FlowTable, context: LoopContext, engine: Engine, progress: LaneProgress
    ) -> None:
        self._table, self._context = table, context
        self._observer, self._clock = context.observer, context.clock
        self._engine, self._progress = engine, progress
        self._window_ms = SHORT_MS
        self._is_slow = False
        """Whether the slices of the previous tick held their slots for longer than `SLOW_MS`."""

    def run(self, *, explicit: bool) -> bool:
        """Run the slices that are due; return whether any ran.

        Args:
            explicit: Write all that waits (`--until-now`, or a shutdown).

        Raises:
            EngineLostError: Spark has ended.
        """
        total, memory_bytes = self._slots_and_memory()
        planned = plan(
            self._table.states.values(),
            slots=self._engine.slots.limit(total),
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.now_ms(),
            explicit=explicit,
        )
        self._observer.planned(self._table.states, {p.slice.flow for p in planned})
        if not planned:
            return False
        window_ms = 0 if explicit else self._window_ms
        works = [self._work(each, window_ms, memory_bytes) for each in planned]
        wanted = len(units(works))
        slots = self._engine.slots.take(self, wanted, total, is_slow=self._is_slow)
        if not slots:
            return False
        failpoints.reach("plan.dispatch")
        begun_ms = self._clock.monotonic_ms()
        try:
            with self._progress.running([work.slice.flow for work in works]):
                results = self._engine.runner.run(works, slots, self._progress.beat)
        except EngineLostError:
            raise
        except UnavailableError as error:
            for flow in {work.slice.flow for work in works}:
                self._table.states[flow].position_stale = True
                self._table.fail(self._table.states[flow], error)
            return True
        finally:
            self._engine.slots.give_back(self)
            took_ms = self._clock.monotonic_ms() - begun_ms - window_ms
            self._is_slow = took_ms > SLOW_MS
        self._observer.slices_done(results)
        self._commit(works, results)
        return True

    def _slots_and_memory(self) -> tuple[int, int]:
        """Return the engine's slots, and the memory of each in bytes."""
        total = self._engine.runner.slots
        whole_bytes = self._engine.memory_bytes
        memory_bytes = whole_bytes // total if whole_bytes else SLOT_BYTES
        self._observer.memory_budget(total * memory_bytes)
        return total, memory_bytes

    def _work(self, planned: Planned, window_ms: int, memory_bytes: int) -> Work:
        flow = planned.slice.flow
        state = self._table.states[flow]
        return Work(
            slice=planned.slice,
            source=self._table.mirror_of[flow].source,
            destination=state.destination,
            writer_id=self._engine.writer_id,
            estimated_bytes=planned.estimated_bytes,
            tail_checked=state.tail_checked,
            fenced=state.fenced,
            window_ms=window_ms,
            memory_bytes=memory_bytes,
        )

    def _commit(self, works: Sequence[Work], results: Iterable[SliceResult]) -> None:
        by_flow: dict[FlowId, list[SliceResult]] = defaultdict(list)
        for result in results:
            by_flow[result.slice.flow].append(result)
        works_of: dict[FlowId, list[Work]] = defaultdict(list)
        for work in works:
            works_of[work.slice.flow].append(work)
        for flow, of_flow in by_flow.items():
            self._commit_flow(flow, works_of[flow], of_flow)
        has_failed = any(result.error for of_flow in by_flow.values() for result in of_flow)
        self._window_ms = SHORT_MS if has_failed else self._longer_window_ms()

    def _commit_flow(
        self, flow: FlowId, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> None:
        state = self._table.states[flow]
        error = self._context.destination(state.destination).commit(state, works, results)
        self._observer.position_changed(state)
        if error is None:
            state.failures, state.retry_at_ms = 0, 0
            self._observer.committed(state)
            return
        state.position_stale = True
        if isinstance(error, PositionMovedError):
            self._observer.conflict(flow)
        else:
            self._table.fail(state, error)

    def _longer_window_ms(self) -> int:
        """Double the follow window, unless a flow into an archive or a failed flow waits for it."""
        others_wait = any(
            isinstance(state.destination, ArchiveSpec) or state.position_stale or state.failures
            for state in self._table.states.values()
        )
        return SHORT_MS if others_wait else min(2 * self._window_ms, LONG_MS)
