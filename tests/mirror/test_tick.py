"""Ticks of a lane into a cluster: when the next job starts, and what its results may change.

Method: the real tick with its threads over a scripted engine: each job runs until the test ends it,
with the results that the test gives. Follow windows have their full length; the lead is longer, so
that the next job starts at once.
"""

import contextlib
import dataclasses
import threading

import pytest

from kit.runs.commands import wait_until
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError
from logmirror.mirror import tick as module
from logmirror.mirror.flow_state import FlowState
from logmirror.mirror.flow_table import FlowTable, LoopContext
from logmirror.mirror.follow import LONG_MS
from logmirror.mirror.health import LaneProgress
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import Begun, FlowId, KafkaSpec, SliceResult, SourceView, Start
from logmirror.mirror.slots import SlotPool
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.stopped import StoppedMirrors
from logmirror.mirror.tick import Engine, Tick
from logmirror.monitoring.metrics import Recorder

SPEC = KafkaSpec(cluster="cluster", topic="t")
MIRROR = MirrorSpec(
    name="m",
    source="source",
    topic="t",
    partitions=None,
    destinations=(("d", SPEC),),
    chain_start=None,
)


class Started:
    """A job that the engine runs."""

    def __init__(self, works, job):
        self.works, self.after = works, job.after
        self.job, self.ended = job, threading.Event()
        self.results, self.error = [], None

    def end(self, *, begun=None, at=None, error=None):
        """End it: its slices began at `begun` and reached `at`. Without these: it ran nothing."""
        self.error = error
        if at is not None:
            self.results = [
                SliceResult(
                    slice=dataclasses.replace(work.slice, first=begun), receipts=(), next_offset=at
                )
                for work in self.works
            ]
        self.ended.set()


class Engines:
    """A runner whose jobs the test ends."""

    slots = 4

    def __init__(self):
        self.jobs = []

    def run(self, works, _slots, job):
        started = Started(works, job)
        self.jobs.append(started)
        assert started.ended.wait(30)
        if started.error is not None:
            raise started.error
        return started.results

    def end_follow_windows(self, job=None):
        job.is_over = True


class Copies:
    """The driver's side of the destination: advances to where a slice ended."""

    def commit(self, state, _works, results):
        (result,) = results
        assert result.slice.first == state.position
        state.position = result.next_offset


class World:
    """One flow, whose tick is calm and has its longest window."""

    def __init__(self):
        self.runner, observer = Engines(), Observer(["m"], Recorder(), SYSTEM_CLOCK)
        context = LoopContext(
            client=None,
            brief_client=None,
            destinations={("m", "d"): Copies()},
            observer=observer,
            clock=SYSTEM_CLOCK,
        )
        self.table = FlowTable([MIRROR], context, StoppedMirrors("exit", ["m"]))
        flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
        self.state = FlowState(
            flow=flow, destination=SPEC, topic_id=None, compacted=False, position=10, source_end=10
        )
        observer.flow_opened(self.state)
        self.table.add(MIRROR, self.state)
        engine = Engine(
            runner=self.runner,
            slots=SlotPool(2),
            writer_id="w",
            memory_bytes=None,
            in_threads=True,
        )
        self.tick = Tick(self.table, context, engine, LaneProgress([("m", ["d"])], SYSTEM_CLOCK))
        self.tick._window_ms, self.tick._is_calm = LONG_MS, True  # noqa: SLF001  # takes 30 s else

    @contextlib.contextmanager
    def running(self):
        """Run one tick beside the block, which must end its job."""
        errors = []

        def run():
            try:
                self.tick.run(explicit=False)
            except BaseException as error:  # noqa: BLE001  # the test must see it
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
        thread.join(30)
        assert not thread.is_alive()
        assert errors == []

    def job(self, number):
        wait_until(lambda: len(self.runner.jobs) > number, what=lambda: f"job {number}")
        return self.runner.jobs[number]


@pytest.fixture(autouse=True)
def _next_jobs_start_at_once(monkeypatch):
    monkeypatch.setattr(module, "LEAD_MS", 3 * LONG_MS)


def test_the_next_job_starts_before_its_predecessor_ends_and_names_it():
    world = World()
    with world.running():
        first, second = world.job(0), world.job(1)
        assert not first.ended.is_set()
        assert first.after is None
        assert second.after is first.job
        first.end(begun=10, at=15)
    assert world.state.position == 15
    with world.running():
        third = world.job(2)
        assert third.after is second.job
        second.end(begun=15, at=20)
    assert world.state.position == 20
    third.end()


def test_a_job_that_began_elsewhere_than_its_predecessor_ended_is_not_committed():
    """The engine may run a job again after it has handed over."""
    world = World()
    with world.running():
        world.job(1)
        world.job(0).end(begun=10, at=12)
    with world.running():
        third = world.job(2)
        world.job(1).end(begun=15, at=20)
    third.end()
    assert world.state.position == 12
    assert world.state.position_stale


def test_a_flow_that_fails_has_no_next_job():
    world = World()
    world.state.failures = 1
    with world.running():
        world.job(0).end(begun=10, at=12)
    assert len(world.runner.jobs) == 1


def test_a_job_that_ran_nothing_does_not_clear_the_failure_of_its_predecessor():
    """A job of the same range is named when it fails again; see `worker_deaths`."""
    world = World()
    with world.running():
        world.job(1)
        world.job(0).end(error=UnavailableError("the Spark job failed"))
    with world.running():
        world.job(1).end()
    view = SourceView(topic_id=None, log_start=0, last_stable_offset=10)
    start = Start(position=10, leader_epoch=-1, tail_checked=True, view=view)
    world.state.opened(start, Begun(), now_ms=0)
    failures = []
    world.table.fail = lambda _state, error: failures.append(error)
    with world.running():
        world.job(2).end(error=UnavailableError("the Spark job failed"))
    (error,) = failures
    assert error.facts["failed_jobs"] == 2
