"""Goal: objects added or removed by others are detected while a mirror runs, not at its next start.

Method: the real loop over a scripted source and a store in memory whose listings are counted; at a
moment of its own, a test adds objects to the store or takes some away.
"""

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.archive.naming import format_name
from logmirror.errors import CorruptionError, PositionError, UnavailableError
from logmirror.mirror import drift
from logmirror.mirror.drift import DriftSchedule
from logmirror.mirror.flow_state import FlowState
from logmirror.mirror.ports import FlowId
from logmirror.model import OffsetRange
from logmirror.testing import MemoryStore

SPEC = archive_spec(max_offsets=50, drift_check_ms=10_000)


def name(first, last):
    return f"d/0/{format_name(OffsetRange(first=first, last=last), 'parquet')}"


def objects(store):
    return sorted(n for n in store.objects if not n.startswith("."))


def run_until(ms, client, store, at, spec=SPEC):
    """Run for so many milliseconds; `at` are moments and what happens then."""
    clock, left = SteppingClock(), sorted(at.items(), reverse=True)
    with service(client, store, spec=spec, clock=clock) as (made, _):

        def on_sleep():
            while left and clock.ms >= left[-1][0]:
                left.pop()[1]()
            if clock.ms >= ms:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()


@pytest.mark.mirror_v3("RUN-07")
def test_objects_of_another_writer_are_continued_without_new_records():
    store, log, found = MemoryStore(), Log(batches(0, 20)), []

    def other():
        log.batches += batches(20, 35)
        store.create(name(20, 29), store.read(name(0, 19)))

    spec = archive_spec(max_offsets=50, drift_check_ms=2_000, max_time_ms=60_000)
    first = archive_spec(max_offsets=50)
    with service(ScriptedClient([log]), store, spec=first, clock=SteppingClock()) as (made, _):
        made.run(until_now=True)

    def look():
        found.append(objects(store))

    run_until(15_000, ScriptedClient([log]), store, {5000: other, 14_000: look}, spec)

    assert found == [[name(0, 19), name(20, 29)]]
    assert objects(store) == [name(0, 19), name(20, 29), name(30, 34)]


@pytest.mark.parametrize("left", ["nothing", "older objects"])
@pytest.mark.mirror_v3("RUN-07")
def test_missing_objects_stop_the_flow_with_both_names(left):
    store, log = MemoryStore(), Log(batches(0, 20))

    def vanish():
        store.delete(name(20, 29))
        if left == "nothing":
            store.delete(name(0, 19))

    grow = {5000: lambda: log.batches.extend(batches(20, 30)), 9000: vanish}
    with pytest.raises(PositionError) as caught:
        run_until(60_000, ScriptedClient([log]), store, grow)

    facts = caught.value.facts
    assert facts["reason"] == "DestinationDrift"
    assert f"d/0/{facts['expected']}" == name(20, 29)
    assert facts["found"] == ("nothing" if left == "nothing" else name(0, 19)[4:])


COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": "86400000"}
SNAPSHOTS = archive_spec(max_offsets=50, drift_check_ms=10_000, compaction="log")


def snapshot_client(log):
    return ScriptedClient([log], configs=COMPACTED)


def test_a_missing_snapshot_stops_the_flow_with_both_names():
    store, log = MemoryStore(), Log(batches(0, 20))
    grow = {
        5000: lambda: log.batches.extend(batches(20, 30)),
        9000: lambda: store.delete(name(20, 29)),
    }
    with pytest.raises(PositionError) as caught:
        run_until(60_000, snapshot_client(log), store, grow, SNAPSHOTS)
    facts = caught.value.facts
    assert (facts["reason"], facts["found"]) == ("DestinationDrift", name(0, 19)[4:])
    assert f"d/0/{facts['expected']}" == name(20, 29)


def test_a_snapshot_that_was_pruned_is_no_drift():
    """`keep-snapshots`, or an operator, deletes older ones at any time."""
    store, log = MemoryStore(), Log(batches(0, 20))
    at = {
        5000: lambda: log.batches.extend(batches(20, 30)),
        9000: lambda: store.delete(name(0, 19)),
        40_000: lambda: log.batches.extend(batches(30, 35)),
    }
    run_until(60_000, snapshot_client(log), store, at, SNAPSHOTS)
    assert objects(store) == [name(20, 29), name(30, 34)]


def test_a_snapshot_of_another_writer_is_continued():
    store, log, other = MemoryStore(), Log(batches(0, 20)), MemoryStore()
    other_log = Log(batches(0, 20))
    for end in (20, 30):  # what another mirror wrote
        other_log.batches = batches(0, end)
        with service(snapshot_client(other_log), other, spec=SNAPSHOTS) as (made, _):
            made.run(until_now=True)

    def take_over():
        log.batches.extend(batches(20, 30))
        for each, data in other.objects.items():
            if each not in store.objects:
                store.objects[each] = data

    late = {5000: take_over, 40_000: lambda: log.batches.extend(batches(30, 35))}
    run_until(60_000, snapshot_client(log), store, late, SNAPSHOTS)
    assert objects(store) == [name(0, 19), name(20, 29), name(30, 34)]


def test_drift_is_detected_while_objects_are_written_continuously():
    store, log = MemoryStore(), Log(batches(0, 50))

    def grow():
        log.batches += batches(log.end, log.end + 50)

    at = dict.fromkeys(range(500, 60000, 500), grow) | {
        20_001: lambda: store.delete(objects(store)[-1])
    }
    with pytest.raises(CorruptionError, match="gap in the chain"):
        run_until(60_000, ScriptedClient([log]), store, at)

    assert log.end < 4000, "it was seen within its interval"


def test_one_inconsistent_listing_is_no_drift():
    store, log = MemoryStore(), Log(batches(0, 20))
    asked = []

    def hide(operation, folder):
        if operation == "names":
            asked.append(folder)
            if len(asked) == 1:
                store.objects["d/0/half"] = b""
            else:
                store.objects.pop("d/0/half", None)

    run_until(30_000, ScriptedClient([log]), store, {3000: lambda: setattr(store, "before", hide)})
    assert len(asked) >= 2
    assert objects(store) == [name(0, 19)]


def test_an_idle_flow_causes_one_listing_per_interval():
    store, asked = MemoryStore(), []
    begin = {3000: lambda: setattr(store, "before", lambda op, n: asked.append((op, n)))}

    run_until(3000 + 60_000, ScriptedClient([Log(batches(0, 20))]), store, begin)

    assert set(asked) == {("names", "d/0")}
    assert 5 <= len(asked) <= 7


def test_a_failed_drift_check_makes_the_flow_back_off_and_resume():
    store, log = MemoryStore(), Log(batches(0, 20))

    def fail(operation, _name):
        if operation == "names":
            raise UnavailableError("down")

    at = {
        3000: lambda: setattr(store, "before", fail),
        20_000: lambda: setattr(store, "before", lambda *_: None),
        21_000: lambda: log.batches.extend(batches(20, 30)),
    }
    run_until(90_000, ScriptedClient([log]), store, at)

    assert objects(store) == [name(0, 19), name(20, 29)]


def test_drift_checks_are_spread_and_use_a_small_part_of_the_time(monkeypatch):
    """With a thousand flows, each look of which takes 30 ms."""
    monkeypatch.setattr(drift, "BUDGET_MS", 100)
    clock = SteppingClock()
    flows = [FlowId(mirror="m", destination="d", topic="t", partition=n) for n in range(1000)]
    states = {
        flow: FlowState(flow=flow, destination=SPEC, topic_id=None, compacted=False, position=0)
        for flow in flows
    }
    schedule, looked, longest = DriftSchedule(clock), [], 0
    while len(looked) < 3000:
        began = clock.ms
        for found in schedule.due(states):
            clock.ms += 30
            looked.append(found.flow.partition)
        longest = max(longest, clock.ms - began)
        clock.sleep_ms(250)

    assert longest <= 130
    assert sorted(looked[:1000]) == list(range(1000))
    assert sorted(looked[1000:2000]) == list(range(1000))
