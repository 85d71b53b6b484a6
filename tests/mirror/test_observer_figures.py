"""Metrics of the loop, and of flows that wait, stop or have special destinations.

Method: as in `test_observer`: the real loop over a scripted source, a store in memory, a clock that
moves only when the loop sleeps; metrics are read as a scrape reads them. Results of
other kinds of destinations are passed in as receipts.
"""

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from kit.judges.scrape import samples
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.mirror.flow_state import FlowState
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import (
    SLOT_BYTES,
    FlowId,
    GapSummary,
    KafkaSpec,
    Receipt,
    Slice,
    SliceResult,
)
from logmirror.mirror.service import POLL_MS
from logmirror.model import OffsetRange, Trigger
from logmirror.monitoring.metrics import Recorder
from logmirror.testing import MemoryStore

FLOW = ("m", "d", "t", "0")
OF = ("m", "d")


class _LeftError(Exception):
    pass


class World:
    """One mirror of a scripted topic, looked at whenever the loop sleeps."""

    def __init__(self, *logs, configs=None, **spec):
        self.clock, self.recorder, self.store = SteppingClock(), Recorder(), MemoryStore()
        self.client = ScriptedClient(logs, configs=configs)
        self.observer = Observer(["m"], self.recorder, self.clock)
        limits = {"max_offsets": 10, "max_bytes": 1 << 30, "max_time_ms": 120_000}
        self.spec = archive_spec(**{**limits, **spec})
        self.seen = []
        """(time, samples)"""

    def run(self, until_ms, **more):
        def look():
            self.seen.append((self.clock.ms, self.samples))
            if self.clock.ms >= until_ms:
                raise _LeftError

        self.clock.on_sleep = look
        with service(
            self.client,
            self.store,
            spec=self.spec,
            clock=self.clock,
            observer=self.observer,
            **more,
        ) as (made, _):
            made.run()

    @property
    def samples(self):
        return samples(self.recorder, clock=self.clock)

    def flows(self, found):
        return {state: found["mirror_flows", (*OF, state)] for state in STATES}


STATES = ("running", "waiting", "stopped")


def test_a_waiting_flow_reports_its_failures_and_their_duration():
    def full(operation, _name):
        if operation == "publish" and world.clock.ms < 10_000:
            raise UnavailableError("no space left")

    world = World(Log(batches(0, 10)), Log(batches(0, 5)))
    world.store = MemoryStore(before=full)
    with pytest.raises(_LeftError):
        world.run(60_000)
    during = [(ms, found) for ms, found in world.seen if found["flow_inflight_retry", FLOW]]
    assert during
    failures = [found["flow_inflight_retry", FLOW] for _, found in during]
    assert failures == sorted(failures)
    assert failures[-1] >= 3
    began_ms = during[0][0]
    for ms, found in during:
        age_s = (ms - began_ms + POLL_MS) / 1000  # it failed before the loop slept
        assert found["flow_inflight_retry_seconds", FLOW] == pytest.approx(age_s, abs=0.001)
        assert world.flows(found) == {"running": 1, "waiting": 1, "stopped": 0}
        assert found["flow_inflight_retry", (*FLOW[:3], "1")] == 0
    record_lag = [found["flow_inflight_retry_seconds", FLOW] for _, found in during]
    assert record_lag == sorted(record_lag)
    after = world.samples
    assert after["flow_inflight_retry", FLOW] == 0
    assert after["flow_inflight_retry_seconds", FLOW] == 0
    assert world.flows(after) == {"running": 2, "waiting": 0, "stopped": 0}
    assert after["mirror_restarts_total", OF] == failures[-1]
    assert after["mirror_errors_total", (*OF, "unavailable")] == failures[-1]


def test_flows_of_a_mirror_that_has_stopped_are_counted_as_stopped_and_none_of_them_waits():
    broken = bytearray(batches(0, 5)[0])
    broken[-1] ^= 1
    world = World(Log([bytes(broken)]), Log(batches(0, 5)), max_offsets=5)
    with pytest.raises(CorruptionError):
        world.run(60_000)
    found = world.samples
    assert world.flows(found) == {"running": 0, "waiting": 0, "stopped": 2}
    assert found["mirror_errors_total", (*OF, "corruption")] == 1
    assert found["flow_inflight_retry", FLOW] == 0


def test_a_flow_that_fails_after_its_mirror_stopped_still_counts_as_stopped():
    world = World(Log(batches(0, 5)))
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    state = FlowState(flow=flow, destination=world.spec, topic_id=None, compacted=False, position=0)
    world.observer.flow_opened(state)
    state.failures = 1
    world.observer.flow_waits(state, UnavailableError("no response"), 1000)
    assert world.samples["flow_inflight_retry", FLOW] == 1
    world.observer.mirror_stopped("m", "t", CorruptionError("broken"), None)
    assert world.samples["flow_inflight_retry", FLOW] == 0
    world.observer.flow_waits(state, UnavailableError("no response"), 1000)
    world.observer.committed(state)
    found = world.samples
    assert world.flows(found) == {"running": 0, "waiting": 0, "stopped": 1}
    assert found["flow_inflight_retry", FLOW] == 0


def test_max_time_and_memory_budget_are_exported():
    world = World(Log(batches(0, 10)))
    with pytest.raises(_LeftError):
        world.run(1000, memory_bytes=64 << 20)
    found = world.samples
    assert found["destination_max_time_seconds", OF] == 120
    assert found["memory_budget_bytes", ()] == 64 << 20
    assert found["destination_commits_total", FLOW] == 1
    unlimited = World(Log(batches(0, 10)))
    with pytest.raises(_LeftError):
        unlimited.run(1000)
    assert unlimited.samples["memory_budget_bytes", ()] == 2 * SLOT_BYTES


def test_the_peak_memory_of_all_slots_is_exported():
    world = World(Log())
    part = Slice(
        flow=FlowId(mirror="m", destination="d", topic="t", partition=0),
        topic_id=None,
        compacted=False,
        first=0,
        end=1,
        tail=None,
    )
    for peaks, expected in (((0, 0), None), ((5, 9), 9), ((0, 7), 9)):
        results = [SliceResult(slice=part, receipts=(), peak_bytes=n) for n in peaks]
        world.observer.slices_done(results)
        assert world.samples.get(("slot_memory_peak_bytes", ())) == expected


def test_the_keys_of_a_snapshot_are_exported():
    world = World(Log(batches(0, 10)), configs={"cleanup.policy": "compact"}, compaction="log")
    with pytest.raises(_LeftError):
        world.run(1000)
    assert world.samples["destination_compaction_keys", FLOW] == 1
    assert world.samples["destination_records_total", FLOW] == 1
    plain = World(Log(batches(0, 10)))
    with pytest.raises(_LeftError):
        plain.run(1000)
    assert ("destination_compaction_keys", FLOW) not in plain.samples


def test_what_another_cluster_acknowledges_is_counted_in_commits_batches_bytes_and_records():
    world = World(Log())
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    spec = KafkaSpec(cluster=None, topic="t")
    world.observer.flow_opened(
        FlowState(flow=flow, destination=spec, topic_id=None, compacted=False, position=0)
    )
    receipt = Receipt(
        covered=OffsetRange(first=0, last=99),
        record_count=90,
        payload_bytes=1000,
        object_bytes=1000,
        digest="",
        trigger=Trigger.EXPLICIT,
        gaps=GapSummary(control=10),
        elapsed_ms=5,
        batch_count=7,
    )
    for _ in range(2):
        world.observer.copied(flow, receipt)
    found = world.samples
    assert found["destination_commits_total", FLOW] == 2
    assert found["destination_batches_total", FLOW] == 14
    assert found["destination_bytes_total", FLOW] == 2000
    assert found["destination_records_total", FLOW] == 180
    assert found["source_offset_gap_records_total", (*FLOW, "control")] == 20
    assert found["destination_last_flush_timestamp_seconds", FLOW] == 1_700_000_000
    assert found["destination_max_time_seconds", OF] == 0


def test_the_first_event_of_a_mirror_lists_its_destinations(caplog):
    caplog.set_level("INFO", logger="logmirror")
    world = World(Log(batches(0, 10)), Log(batches(0, 5)), max_offsets=5)
    with pytest.raises(_LeftError):
        world.run(1000)
    (facts,) = [r.facts for r in caplog.records if r.getMessage() == "mirror starts"]
    assert facts == {
        "mirror": "m",
        "topic": "t",
        "partitions": 2,
        "destinations": ["d"],
        "formats": ["parquet"],
        "compaction": ["none"],
        "position": 0,
    }
