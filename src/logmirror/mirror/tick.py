"""Driver: one tick: plan slices, run them, commit their results."""

from __future__ import annotations

from collections import defaultdict
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.plan import Planned
    from logmirror.mirror.ports import Runner, SliceResult


class Tick:
    """Runs what is due, one tick at a time.

    Args:
        table: The flows.
        context: Destinations, observer and clock.
        runner: Where slices run.
        writer_id: The ID of this process as a writer.
        memory_bytes: The memory of all slots together, in bytes; None: `SLOT_BYTES` each.
    """

    def __init__(
        self,
        table: FlowTable,
        context: LoopContext,
        *,
        runner: Runner,
        writer_id: str,
        memory_bytes: int | None,
    ) -> None:
        self._table, self._context = table, context
        self._observer, self._clock = context.observer, context.clock
        self._runner, self._writer_id = runner, writer_id
        self._memory_bytes = memory_bytes
        self._window_ms = SHORT_MS

    def run(self, *, explicit: bool) -> bool:
        """Run the slices that are due; return whether there were any.

        Args:
            explicit: Write all that waits (`--until-now`, or a shutdown).

        Raises:
            EngineLostError: Spark has ended.
        """
        slots = self._runner.slots
        memory_bytes = self._memory_bytes // slots if self._memory_bytes else SLOT_BYTES
        self._observer.memory_budget(slots * memory_bytes)
        planned = plan(
            self._table.states.values(),
            slots=slots,
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.now_ms(),
            explicit=explicit,
        )
        self._observer.planned(self._table.states, {p.slice.flow for p in planned})
        if not planned:
            return False
        failpoints.reach("plan.dispatch")
        window_ms = 0 if explicit else self._window_ms
        works = [self._work(each, window_ms, memory_bytes) for each in planned]
        try:
            with self._observer.ticking():
                results = self._runner.run(works)
        except EngineLostError:
            raise
        except UnavailableError as error:
            for flow in {work.slice.flow for work in works}:
                self._table.states[flow].position_stale = True
                self._table.fail(self._table.states[flow], error)
            return True
        self._observer.slices_done(results)
        self._commit(works, results)
        return True

    def _work(self, planned: Planned, window_ms: int, memory_bytes: int) -> Work:
        flow = planned.slice.flow
        state = self._table.states[flow]
        return Work(
            slice=planned.slice,
            source=self._table.mirror_of[flow].source,
            destination=state.destination,
            writer_id=self._writer_id,
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
