"""What the loop says of its work: metrics, log events, heartbeats, health (R9 to R12).

Method: the real loop over a scripted source, a store in memory and a clock that moves only when the
loop sleeps; metrics are read as a scrape reads them, log events as they are emitted.
"""

import ast
import json
import logging
from collections import defaultdict
from pathlib import Path

import pytest

import logmirror
from kit.fakes.scripted import (
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
    record,
    service,
)
from kit.judges.scrape import samples
from logmirror.archive.claims import latest_claim
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.mirror.flow_state import DAY_MS
from logmirror.mirror.health import LIVE_MS
from logmirror.mirror.observer import Observer
from logmirror.model import Trigger
from logmirror.monitoring.metrics import OFFSET_VERIFIED, RECORDS, Recorder
from logmirror.testing import MemoryStore
from logmirror.wire.records import encode_reference

FLOW = ("m", "d", "t", "0")
FACTS = {"mirror": "m", "destination": "d", "topic": "t", "partition": 0}
FAR = {"max_offsets": 10**6, "max_bytes": 1 << 30, "max_time_ms": 10**12}


class World:
    """One mirror of a scripted topic, and all that is said of it."""

    def __init__(self, *logs, heartbeat_ms=0, configs=None, **limits):
        self.clock, self.store, self.recorder = SteppingClock(), MemoryStore(), Recorder()
        self.client = ScriptedClient(logs or [Log()], configs=configs)
        self.observer = Observer(["m"], self.recorder, self.clock, heartbeat_ms=heartbeat_ms)
        self.spec = archive_spec(**{**FAR, **limits})

    def run(self, *, until_ms=None):
        """Run until a moment, without a last flush, or to the ends of the logs."""
        with service(
            self.client, self.store, spec=self.spec, clock=self.clock, observer=self.observer
        ) as (made, _):
            if until_ms is None:
                made.run(until_now=True)
                return
            self.clock.on_sleep = lambda: self.leave(until_ms)
            with pytest.raises(_LeftError):
                made.run()

    def leave(self, until_ms):
        if self.clock.ms >= until_ms:
            raise _LeftError

    @property
    def samples(self):
        return samples(self.recorder)


class _LeftError(Exception):
    pass


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="logmirror")


def events(caplog, name):
    return [r.facts for r in caplog.records if r.getMessage() == name]


# -- R9 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "limits", "until_ms"),
    [
        (Trigger.MAX_OFFSETS, {"max_offsets": 10}, 1000),
        (Trigger.MAX_BYTES, {"max_bytes": 50}, 1000),
        (Trigger.MAX_TIME, {"max_time_ms": 500}, 1500),
        (Trigger.DAILY, {}, 10_000),
        (Trigger.EXPLICIT, {}, None),
    ],
)
@pytest.mark.mirror_v3("FS-20")
def test_r9_log_receipt_and_metric_have_the_trigger_of_each_flush(
    caplog, trigger, limits, until_ms
):
    world = World(Log(batches(0, 10)), **limits)
    if trigger is Trigger.DAILY:
        in_5_s = (world.clock.now_ms() % DAY_MS) // 1000 + 5
        world.spec = archive_spec(**{**FAR, "daily_at_utc_s": in_5_s % 86_400})
    world.run(until_ms=until_ms)
    flushed = events(caplog, "flushed")
    assert flushed
    assert {facts["trigger"] for facts in flushed} == {trigger.value}
    assert latest_claim(world.store, "d", 0).trigger is trigger
    name = "destination_flushes_total"
    found = {labels: n for (of, labels), n in world.samples.items() if of == name}
    assert found == {(*FLOW, trigger.value): len(flushed)}


@pytest.mark.mirror_v3("OBS-01", "FS-19")
def test_the_flush_event_has_path_offsets_and_duration(caplog):
    world = World(Log(batches(0, 25)), max_offsets=10)
    world.run()
    first, *_ = flushed = events(caplog, "flushed")
    assert list(first) == [
        *FACTS, "path", "from", "to", "count", "bytes", "elapsed_ms", "interval_ms", "trigger"
    ]  # fmt: skip
    ranges = [(facts["from"], facts["to"], facts["count"]) for facts in flushed]
    assert ranges == [(0, 9, 10), (10, 19, 10), (20, 24, 5)]
    for facts in flushed:
        assert facts["bytes"] == len(world.store.objects[facts["path"]])


@pytest.mark.mirror_v3("OBS-03")
def test_a_flush_is_reported_only_if_it_succeeded(caplog):
    failed = []

    def full(operation, _name):
        if operation == "publish" and len(failed) < 2:
            failed.append(events(caplog, "flushed"))
            raise UnavailableError("no space left")

    world = World(Log(batches(0, 10)), max_offsets=10)
    world.store = MemoryStore(before=full)
    world.run(until_ms=20_000)
    assert failed == [[], []]
    (flushed,) = events(caplog, "flushed")
    assert (flushed["from"], flushed["to"], flushed["count"]) == (0, 9, 10)
    assert world.samples["destination_records_total", FLOW] == 10


@pytest.mark.parametrize("compaction", [None, "log"])
def test_the_start_event_lists_the_compaction_of_each_destination(caplog, compaction):
    world = World(Log(batches(0, 5)), compaction=compaction, configs={"cleanup.policy": "compact"})
    world.run()
    (start,) = events(caplog, "mirror starts")
    assert start["compaction"] == [compaction or "none"]
    assert (start["mirror"], start["topic"], start["destinations"]) == ("m", "t", ["d"])


def test_the_interval_counts_from_the_previous_flush_or_the_opening(caplog):
    log = Log(batches(0, 10))
    world = World(log, max_offsets=10)

    def grow():
        if world.clock.ms in (1000, 3000):
            log.batches += batches(log.end, log.end + 10)
        world.leave(4000)

    with service(
        world.client, world.store, spec=world.spec, clock=world.clock, observer=world.observer
    ) as (made, _):
        world.clock.on_sleep = grow
        with pytest.raises(_LeftError):
            made.run()
    assert [facts["interval_ms"] for facts in events(caplog, "flushed")] == [0, 1000, 2000]


# -- the figures -----------------------------------------------------------------------------------


@pytest.mark.mirror_v3("OBS-04", "ACK-05")
def test_metrics_match_the_replica():
    world = World(Log(batches(0, 25)), Log(batches(0, 5)), max_offsets=10)
    world.run(until_ms=1000)
    found = world.samples
    size = sum(len(data) for name, data in world.store.objects.items() if name.startswith("d/0/"))
    assert found["destination_offset_verified", FLOW] == 20
    assert found["source_end_offset", FLOW] == 25
    assert found["source_lag_offsets", FLOW] == 5
    assert found["destination_records_total", FLOW] == 20
    assert found["destination_bytes_total", FLOW] == size
    assert found["destination_last_flush_timestamp_seconds", FLOW] == 1_700_000_000
    assert found["destination_flush_duration_seconds_count", ("m", "d")] == 2
    other = (*FLOW[:3], "1")
    assert found["destination_offset_verified", other] == 0
    assert found["destination_records_total", other] == 0
    assert ("destination_last_flush_timestamp_seconds", other) not in found


@pytest.mark.mirror_v3("OBS-02")
def test_no_metric_runs_ahead_of_the_store(monkeypatch):
    """I5: before each operation of the store, executors and driver publishing in turn."""
    monkeypatch.setattr("logmirror.mirror.plan.SLICE_BYTES", 400)
    seen = []

    def look(operation, name):
        del operation, name
        ends = [
            int(n.split("-")[-1].split(".")[0]) + 1 for n in world.store.objects if n[:4] == "d/0/"
        ]
        exported = dict(world.recorder.numbers(OFFSET_VERIFIED)).get(FLOW, 0)
        records = dict(world.recorder.numbers(RECORDS)).get(FLOW, 0)
        seen.append((max(exported, records), max(ends, default=0)))

    world = World(Log(batches(0, 400)), max_offsets=10, format="native")
    world.store = MemoryStore(before=look)
    world.run()
    assert len(seen) > 20
    assert all(exported <= durable for exported, durable in seen)
    assert len({exported for exported, _ in seen}) > 5
    assert world.samples["destination_offset_verified", FLOW] == 400
    assert world.samples["destination_records_total", FLOW] == 400


@pytest.mark.parametrize(("nth", "conflicts"), [(1, 1), (2, 2)])
def test_a_position_claimed_first_by_another_writer_is_a_conflict(monkeypatch, nth, conflicts):
    """An executor finds a claim taken; in the second case the driver another one, behind it."""
    monkeypatch.setattr("logmirror.mirror.plan.SLICE_BYTES", 400)
    one, other = (
        World(Log(batches(0, 100)), max_offsets=limit, format="native") for limit in (10, 15)
    )
    other.store, claims = one.store, []

    def race(operation, name):
        if operation == "create" and "claims" in name:
            claims.append(name)
            if len(claims) == nth:
                other.run()

    one.store.before = race
    one.run()
    assert len(claims) > nth
    assert one.samples["create_conflicts_total", FLOW] == conflicts
    assert other.samples["create_conflicts_total", FLOW] == 0
    assert one.samples["destination_offset_verified", FLOW] == 100


# -- R10 -------------------------------------------------------------------------------------------


def test_r10_gaps_are_counted_by_cause_and_never_logged_one_by_one(caplog):
    kept = [i for i in range(20_000) if i % 4 == 0]
    compacted = [
        encode_reference([record(i) for i in kept[at : at + 50]]) for at in range(0, len(kept), 50)
    ]
    world = World(Log(compacted), configs={"cleanup.policy": "compact"}, max_offsets=10_000)
    world.run()
    gaps = {k: n for k, n in world.samples.items() if k[0] == "source_offset_gap_records_total"}
    end = kept[-1] + 1
    assert gaps == {("source_offset_gap_records_total", (*FLOW, "compacted")): end - len(kept)}
    assert world.samples["destination_records_total", FLOW] == len(kept)
    assert len(caplog.records) <= 10


# -- R11 -------------------------------------------------------------------------------------------


def test_r11_every_event_of_a_mirror_names_it_its_topic_and_where_it_applies_its_partition(
    caplog, monkeypatch
):
    """Including events of failures: unreachable sources, flows that wait, mirrors that stop."""
    world = World(Log(batches(0, 500)), max_offsets=10, heartbeat_ms=1000)
    ends, topics = world.client.list_offsets, world.client.describe_topics

    def fail(*_, **__):
        if 2000 < world.clock.ms < 4000:
            raise UnavailableError("no response", server="x")
        return ends(*_, **__)

    def fail_topics(names):
        if 4000 < world.clock.ms < 6000:
            raise UnavailableError("no response", server="x")
        return topics(names)

    monkeypatch.setattr(world.client, "list_offsets", fail)
    monkeypatch.setattr(world.client, "describe_topics", fail_topics)
    world.run(until_ms=12_000)
    log = world.client.logs[next(iter(world.client.logs))]
    broken = bytearray(batches(500, 505)[0])
    broken[-1] ^= 1
    log.batches.append(bytes(broken))
    with pytest.raises(CorruptionError):
        world.run()
    names = {r.getMessage().partition(":")[0] for r in caplog.records}
    assert names == {
        "mirror starts", "flushed", "heartbeat", "flow waits", "mirror waits", "mirror stopped"
    }  # fmt: skip
    for said in caplog.records:
        facts = said.facts
        assert (facts["mirror"], facts["topic"]) == ("m", "t"), said
        if said.getMessage().startswith(("fl", "mirror stopped")):  # of one flow
            assert {name: facts[name] for name in FACTS} == FACTS, said


def test_r11_each_event_of_the_data_path_has_its_mirror():
    """Each call that logs passes facts; which ones, the test before sees."""
    calls = []
    rooms = ("mirror", "source", "to_archive", "to_kafka")
    root = Path(logmirror.__file__).parent
    for path in sorted(path for room in rooms for path in (root / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_LOG."):
                if ast.unparse(node.func) == "_LOG.isEnabledFor":
                    continue
                calls.append(node)
                extra = [k.value for k in node.keywords if k.arg == "extra"]
                assert extra, f"{path.name}:{node.lineno} logs without facts"
    assert len(calls) >= 10


# -- R12 -------------------------------------------------------------------------------------------


def test_r12_a_heartbeat_is_one_debug_line_for_each_mirror_with_position_and_progress(caplog):
    log = Log(batches(0, 30))
    world = World(log, Log(batches(0, 10)), max_offsets=10, heartbeat_ms=2000)
    world.run(until_ms=4100)
    beats = [r for r in caplog.records if r.getMessage() == "heartbeat"]
    assert [r.levelno for r in beats] == [logging.DEBUG] * 2
    assert [r.facts for r in beats] == [
        {
            "mirror": "m",
            "topic": "t",
            "flows": 2,
            "position": 40,
            "progress": progress,
            "lag": 0,
            "waiting": 0,
        }
        for progress in (40, 0)
    ]


def test_r12_an_interval_of_0_is_no_heartbeat(caplog):
    World(Log(batches(0, 30)), heartbeat_ms=0).run(until_ms=100_000)
    assert events(caplog, "heartbeat") == []


def test_r12_a_heartbeat_never_delays_a_flush(caplog, monkeypatch):
    """Due in one turn, the flush comes first; flushes come when they come without heartbeats."""

    said = []
    """Time and event; time moves only between two turns of the loop."""

    def flushes(heartbeat_ms):
        at, log = [], Log()
        world = World(log, max_time_ms=1000, heartbeat_ms=heartbeat_ms)
        said.clear()
        monkeypatch.setattr(
            caplog.handler, "emit", lambda r: said.append((world.clock.ms, r.getMessage()))
        )

        def grow():
            log.batches += batches(log.end, log.end + 1)
            world.leave(20_000)

        def look(operation, _name):
            if operation == "publish":
                at.append(world.clock.ms)

        world.store = MemoryStore(before=look)
        with service(
            world.client, world.store, spec=world.spec, clock=world.clock, observer=world.observer
        ) as (made, _):
            world.clock.on_sleep = grow
            with pytest.raises(_LeftError):
                made.run()
        return at

    without = flushes(0)
    assert len(without) > 10
    assert flushes(1000) == without
    assert [name for _, name in said].count("heartbeat") > 10
    of_turn = defaultdict(list)
    for ms, name in said:
        of_turn[ms].append(name)
    both = [names for names in of_turn.values() if {"heartbeat", "flushed"} <= set(names)]
    assert both
    assert all(names == ["flushed", "heartbeat"] for names in both)


# -- health ----------------------------------------------------------------------------------------


def test_a_mirror_waits_from_its_first_failure_until_it_resumes(monkeypatch):
    world = World(Log(batches(0, 10)), max_offsets=10)
    health, states = world.observer.board, []
    ends = world.client.list_offsets

    def fail(*_, **__):
        if 1000 < world.clock.ms < 5000:
            raise UnavailableError("no response")
        return ends(*_, **__)

    monkeypatch.setattr(world.client, "list_offsets", fail)
    sleep = world.clock.sleep_ms

    def note(duration_ms):
        (mirror,) = health.mirrors()
        states.append((mirror.state, mirror.kind))
        sleep(duration_ms)

    monkeypatch.setattr(world.clock, "sleep_ms", note)
    (before,) = health.mirrors()
    assert before.state == "starting"
    world.run(until_ms=15_000)
    assert list(dict.fromkeys(states)) == [("running", ""), ("waiting", "unavailable")]
    assert states[-1] == ("running", "")
    (flow,) = health.status()["flows"]
    assert (flow["position"], flow["source_end"], flow["lag"]) == (10, 10, 0)
    assert flow["waiting_since_ms"] is None
    assert flow["last_error"] == {"kind": "unavailable", "message": "no response"}
    assert json.loads(json.dumps(health.status())) == health.status()
    found = world.samples
    assert found["errors_total", (*FLOW, "unavailable")] == found["flow_restarts_total", FLOW] > 1


def test_a_flow_whose_destination_fails_waits_until_something_is_committed_there():
    """Polling the source alone proves nothing."""
    failing = []

    def full(operation, _name):
        if operation == "publish" and world.clock.ms < 3000:
            failing.append(world.clock.ms)
            raise UnavailableError("no space left")

    world = World(Log(batches(0, 10)), max_offsets=10)
    world.store = MemoryStore(before=full)
    states = {}
    with service(
        world.client, world.store, spec=world.spec, clock=world.clock, observer=world.observer
    ) as (made, _):

        def note():
            states[world.clock.ms] = made.health()[0].state
            world.leave(20_000)

        world.clock.on_sleep = note
        with pytest.raises(_LeftError):
            made.run()
    assert len(failing) > 1
    assert {s for ms, s in states.items() if ms <= failing[-1] + 500} == {"waiting"}
    assert states[max(states)] == "running"


def test_a_stopped_mirror_reports_its_error():
    broken = bytearray(batches(0, 5)[0])
    broken[-1] ^= 1
    world = World(Log([bytes(broken)]))
    with pytest.raises(CorruptionError) as caught:
        world.run()
    (mirror,) = world.observer.board.mirrors()
    exported = (mirror.state, mirror.kind, mirror.message)
    assert exported == ("stopped", "corruption", caught.value.message)


def test_the_process_is_live_while_a_lane_makes_progress():
    world = World(Log())
    health, clock = world.observer.board, world.clock
    clock.ms += 2 * LIVE_MS
    assert health.not_live() == []  # Spark starts
    world.run(until_ms=clock.ms + 1000)
    clock.ms += LIVE_MS - 1000
    assert health.not_live() == []
    clock.ms += 1001
    (reason,) = health.not_live()
    assert "has made no progress" in reason
