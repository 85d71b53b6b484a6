"""Driver: one tick of a lane: plan slices, run them, commit their results.

Slices into clusters follow their source for a follow window. Shortly before a window ends, the tick
starts the job that follows it (`ports.Job.after`), which takes over within milliseconds: between
two windows nothing waits. The next tick waits for that job.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.errors import EndsEarlierError, PositionMovedError, UnavailableError
from logmirror.mirror.follow import LONG_MS, SHORT_MS
from logmirror.mirror.plan import plan
from logmirror.mirror.ports import (
    SLOT_BYTES,
    EngineLostError,
    FlowId,
    Job,
    Work,
)
from logmirror.mirror.slots import SLOW_MS
from logmirror.mirror.units import units
from logmirror.mirror.worker_deaths import WorkerDeaths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logmirror.mirror.flow_table import FlowTable, LoopContext
    from logmirror.mirror.health import LaneProgress
    from logmirror.mirror.plan import Planned
    from logmirror.mirror.ports import Runner, SliceResult
    from logmirror.mirror.slots import SlotPool

LEAD_MS: Final = 2_000
"""A job that follows another one is started this long before the other one's window ends."""

_JOBS_MAX: Final = 2
"""A job, and the one that follows it."""

CALM_BYTES_S: Final = 16_000_000
"""Flows that together copy less than this per second are followed by one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where the slices of all lanes run."""

    runner: Runner
    slots: SlotPool
    writer_id: str
    """The ID of this process as a writer."""

    memory_bytes: int | None
    """The memory of all slots together, in bytes; None: `SLOT_BYTES` each."""

    in_threads: bool = False
    """Whether jobs run in threads, so that one may start before the previous one ends."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Running:
    """A job that was started."""

    works: list[Work]
    slots: int
    job: Job
    begun_ms: int
    window_ms: int
    follows: bool
    """Whether it took over from another job."""

    results: list[SliceResult] = field(default_factory=list)
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def flows(self) -> list[FlowId]:
        return [work.slice.flow for work in self.works]


class _Workers:
    """Two threads of a lane, which wait for jobs. They end with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, call: Callable[[], None]) -> None:
        """Make one of the threads call this. At most two calls run at a time."""
        if len(self._threads) < _JOBS_MAX:
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()


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
        self._workers = _Workers()
        self._deaths = WorkerDeaths()
        self._next: _Running | None = None
        """The job that follows the last one, which was started by the previous tick."""

        self._is_calm = False
        """Whether the last windows copied less than `CALM_BYTES_S`."""

        self._is_slow = False
        """Whether the slices of the previous tick held their slots for longer than `SLOW_MS`."""

    def run(self, *, explicit: bool, follows: bool = True) -> bool:
        """Run the slices that are due; return whether any ran.

        Args:
            explicit: Write all that waits (`--until-now`, or a shutdown).
            follows: Whether slices may copy what arrives after the last poll of the source.

        Raises:
            EngineLostError: Spark has ended.
        """
        running, self._next = self._next, None
        if running is None:
            running = self._start(explicit=explicit, follows=follows)
        elif explicit or self._others_are_due(running):
            self._engine.runner.end_follow_windows(running.job)
        if running is None:
            return False
        with self._progress.running(running.flows):
            self._wait(running, may_overlap=follows and not explicit)
        self._finish(running)
        return True

    # -- start -----------------------------------------------------------------------------------

    def _plan(self, wall_ms: int, *, explicit: bool) -> list[Planned]:
        total = self._engine.runner.slots
        return plan(
            self._table.states.values(),
            slots=1 if self._is_calm else self._engine.slots.limit(total),
            now_ms=self._clock.monotonic_ms(),
            wall_ms=wall_ms,
            explicit=explicit,
        )

    def _others_are_due(self, running: _Running) -> bool:
        """Whether a flow that `running` does not copy is due, or a copied one was dropped."""
        flows = set(running.flows)
        due = {planned.slice.flow for planned in self._plan(self._clock.now_ms(), explicit=False)}
        return due != flows

    def _start(self, *, explicit: bool, follows: bool) -> _Running | None:
        wall_ms = self._clock.now_ms()
        planned = self._plan(wall_ms, explicit=explicit)
        flows = {each.slice.flow for each in planned}
        self._observer.planned(self._table.states, flows)
        window_ms = self._window_ms if follows and not explicit else 0
        running = self._begin(planned, window_ms, None) if planned else None
        if running is not None or not planned:
            for flow, state in self._table.states.items():
                state.schedule_daily(wall_ms, is_planned=flow in flows)
        return running

    def _begin(
        self, planned: Sequence[Planned], window_ms: int, after: _Running | None
    ) -> _Running | None:
        """Start a job; None if there are not enough slots now."""
        total = self._engine.runner.slots
        whole_bytes = self._engine.memory_bytes
        memory_bytes = whole_bytes // total if whole_bytes else SLOT_BYTES
        self._observer.memory_budget(total * memory_bytes)
        works = self._deaths.next_job(
            [self._work(each, window_ms, memory_bytes) for each in planned]
        )
        wanted = 1 if self._is_calm and window_ms else len(units(works))
        job = Job(on_progress=self._progress.beat, after=after.job if after else None)
        slots = self._engine.slots.take(job, wanted, total, is_slow=self._is_slow)
        if not slots:
            return None
        failpoints.reach("plan.dispatch")
        running = _Running(
            works=works,
            slots=slots,
            job=job,
            begun_ms=self._clock.monotonic_ms(),
            window_ms=window_ms,
            follows=after is not None,
        )
        if self._engine.in_threads:
            self._workers.start(functools.partial(self._run, running))
        else:
            self._run(running)
        return running

    def _run(self, running: _Running) -> None:
        try:
            results = self._engine.runner.run(running.works, running.slots, running.job)
            running.results = results
        except BaseException as error:  # noqa: BLE001  # the lane's thread handles it
            running.error = error
        finally:
            self._engine.slots.give_back(running.job)
            running.is_over.set()

    def _work(self, planned: Planned, window_ms: int, memory_bytes: int) -> Work:
        flow = planned.slice.flow
        state, mirror = self._table.states[flow], self._table.mirror_of[flow]
        return Work(
            slice=planned.slice,
            source=mirror.source,
            destination=state.destination,
            writer_id=self._engine.writer_id,
            estimated_bytes=planned.estimated_bytes,
            tail_checked=state.tail_checked,
            fenced=state.fenced,
            in_flight_max=state.in_flight_max,
            hold=state.held_at(planned.slice.first),
            window_ms=window_ms,
            until_ms=mirror.until.time_ms if mirror.until else None,
            memory_bytes=memory_bytes,
        )

    # -- wait ------------------------------------------------------------------------------------

    def _wait(self, running: _Running, *, may_overlap: bool) -> None:
        """Wait for a job; start the one that follows it shortly before its windows end.

        The wait has no deadline of its own: the job may still write. Slices have deadlines for
        each request; what hangs all the same is reported by `health`, and left behind by `service`.
        """
        if may_overlap and self._engine.in_threads and self._is_calm:
            lead_ms = running.begun_ms + running.window_ms - LEAD_MS - self._clock.monotonic_ms()
            if not running.is_over.wait(max(lead_ms, 0) / 1000):
                self._next = self._follow(running)
        running.is_over.wait()

    def _follow(self, running: _Running) -> _Running | None:
        """Start the job that follows `running`, if the same flows are due again."""
        states = [self._table.states.get(flow) for flow in running.flows]
        is_ready = running.window_ms == LONG_MS and not running.job.is_over
        if not is_ready or not all(
            state is not None
            and state.destination.follows
            and state.tail_checked
            and not state.failures
            for state in states
        ):
            return None
        planned = self._plan(self._clock.now_ms(), explicit=False)
        if {each.slice.flow for each in planned} != set(running.flows):
            return None
        following = self._begin(planned, LONG_MS, running)
        if following is not None:
            following.begun_ms = running.begun_ms + running.window_ms
        return following

    # -- commit ----------------------------------------------------------------------------------

    def _finish(self, running: _Running) -> None:
        took_ms = self._clock.monotonic_ms() - running.begun_ms
        self._is_slow = took_ms - running.window_ms > SLOW_MS
        error = running.error
        if error is not None:
            if isinstance(error, EngineLostError) or not isinstance(error, UnavailableError):
                raise error
            for flow, its_error in self._deaths.failed(running.works, error).items():
                if flow in self._table.states:
                    self._table.states[flow].outdated()
                    self._table.fail(self._table.states[flow], its_error)
            return
        if running.results:  # else it took over from a job that failed, and ran nothing
            self._deaths.finished(running.works)
        copied = sum(result.source_bytes for result in running.results)
        is_light = copied < CALM_BYTES_S * max(took_ms, 1) / 1000
        has_clusters_only = all(work.destination.follows for work in running.works)
        self._is_calm = running.window_ms > 0 and is_light and has_clusters_only
        self._observer.slices_done(running.results)
        self._commit(running.works, running.results, took_over=running.follows)

    def _commit(
        self, works: Sequence[Work], results: Iterable[SliceResult], *, took_over: bool
    ) -> None:
        by_flow: dict[FlowId, list[SliceResult]] = defaultdict(list)
        for result in results:
            by_flow[result.slice.flow].append(result)
        works_of: dict[FlowId, list[Work]] = defaultdict(list)
        for work in works:
            works_of[work.slice.flow].append(work)
        for flow, of_flow in by_flow.items():
            state = self._table.states.get(flow)
            if state is None:
                continue  # its mirror has stopped meanwhile
            if took_over and of_flow[0].slice.first != state.position:
                state.outdated()  # the previous job ended elsewhere than it had reported
                continue
            self._commit_flow(flow, works_of[flow], of_flow)
        has_failed = any(result.error for of_flow in by_flow.values() for result in of_flow)
        self._window_ms = SHORT_MS if has_failed else self._longer_window_ms()

    def _commit_flow(
        self, flow: FlowId, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> None:
        state = self._table.states[flow]
        error = self._context.destination(flow).commit(state, works, results)
        self._observer.position_changed(state)
        if error is None:
            state.committed()
            self._observer.committed(state)
            return
        state.outdated()
        if isinstance(error, EndsEarlierError) and state.end_before(error.offset):
            return
        if isinstance(error, PositionMovedError):
            self._observer.conflict(flow)
        else:
            self._table.fail(state, error, results[-1].hold)

    def _longer_window_ms(self) -> int:
        """Double the follow window, unless a flow into an archive or a failed flow waits for it."""
        others_wait = any(
            not state.destination.follows or state.position_stale or state.failures
            for state in self._table.states.values()
        )
        return SHORT_MS if others_wait else min(2 * self._window_ms, LONG_MS)
