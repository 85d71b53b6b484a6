"""The driver loop: from a source that grows to a chain that continues it.

Method: the real planner, executor and committer over a scripted source, a store in memory and a
clock that moves only when the loop sleeps. Each test draws what happens at the source.
"""

from itertools import pairwise

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.archive.claims import latest_claim
from logmirror.errors import CorruptionError, PositionError, UnavailableError
from logmirror.testing import MemoryStore

SPEC = archive_spec(max_offsets=50)


def names(store):
    return sorted(n for n in store.objects if not n.startswith("."))


def ranges(store, partition=0):
    found = [n.split("/") for n in names(store)]
    return [
        tuple(int(x) for x in name.split(".")[0].split("-"))
        for _, number, name in found
        if int(number) == partition
    ]


def until_now(client, store, **options):
    options.setdefault("clock", SteppingClock())
    options.setdefault("spec", SPEC)
    with service(client, store, **options) as (made, runner):
        made.run(until_now=True)
        return runner


def test_until_now_copies_what_is_there_and_ends():
    store = MemoryStore()
    until_now(ScriptedClient([Log(batches(0, 120)), Log(batches(0, 7)), Log()]), store)
    assert ranges(store)[0][0] == 0
    assert ranges(store)[-1][1] == 119
    assert ranges(store, 1) == [(0, 6)]
    assert ranges(store, 2) == []


@pytest.mark.mirror_v3("RUN-01")
def test_a_second_run_continues_at_the_names():
    store, log = MemoryStore(), Log(batches(0, 20))
    until_now(ScriptedClient([log]), store)
    log.batches += batches(20, 33)
    until_now(ScriptedClient([log]), store)
    assert ranges(store) == [(0, 19), (20, 32)]
    before = dict(store.objects)
    until_now(ScriptedClient([log]), store)
    assert store.objects == before


def test_new_partitions_are_found_while_running():
    store, client, clock = MemoryStore(), ScriptedClient([Log(batches(0, 5))]), SteppingClock()
    spec = archive_spec(max_offsets=50)
    with service(client, store, spec=spec, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms > 2000 and len(client.logs) == 1:
                second = ScriptedClient([Log(), Log(batches(0, 9))]).logs
                client.logs |= {tp: log for tp, log in second.items() if tp.partition == 1}
            if clock.ms > 12_000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert ranges(store) == [(0, 4)]
    assert ranges(store, 1) == [(0, 8)]


def test_until_now_ends_although_partitions_appear_meanwhile():
    client, clock = ScriptedClient([Log(batches(0, 5))]), SteppingClock()

    def down(operation, _name):
        if operation == "publish" and clock.ms < 5_500:
            raise UnavailableError("no space left")

    def on_sleep():
        if clock.ms > 2000 and len(client.logs) == 1:
            second = ScriptedClient([Log(), Log(batches(0, 9))]).logs
            client.logs |= {tp: log for tp, log in second.items() if tp.partition == 1}
        assert clock.ms < 600_000, "it never ends"

    store, clock.on_sleep = MemoryStore(before=down), on_sleep
    until_now(client, store, clock=clock)
    assert clock.ms > 5_000, "long enough to see the new one"
    assert (ranges(store), ranges(store, 1)) == ([(0, 4)], [(0, 8)])


@pytest.mark.mirror_v3("RUN-14", "FS-07")
def test_a_trickle_is_written_when_its_time_is_over_and_a_stop_flushes_the_rest():
    store, log, clock = MemoryStore(), Log(batches(0, 5)), SteppingClock()
    with service(ScriptedClient([log]), store, spec=SPEC, clock=clock) as (made, runner):

        def on_sleep():
            if clock.ms >= 1500 and len(log.batches) == 1:
                log.batches += batches(5, 8)
            if clock.ms >= 2000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert ranges(store) == [(0, 4), (5, 7)]
    assert latest_claim(store, "d", 0).trigger.value == "explicit"
    assert runner.windows_ended


def test_parallel_backfill_of_one_partition_publishes_in_order(monkeypatch):
    monkeypatch.setattr("logmirror.mirror.plan.SLICE_BYTES", 400)
    published = []
    store = MemoryStore(
        before=lambda operation, name: published.append(name) if operation == "publish" else None
    )
    for kind in ("parquet", "native", "ndjson"):
        published.clear()
        store.objects.clear()
        spec = archive_spec(format=kind, max_offsets=50)
        client = ScriptedClient([Log(batches(0, 400, 7))])
        runner = until_now(client, store, spec=spec, slots=3)
        assert any(s.staged for tick in runner.ticks for s in tick)
        assert published == sorted(published)
        found = ranges(store)
        assert found[0][0] == 0
        assert found[-1][1] == 399
        assert all(a[1] + 1 == b[0] for a, b in pairwise(found))
        assert store.staged == {}


def test_a_recreated_topic_is_not_continued():
    """A21: records of two topics never share a chain."""
    store = MemoryStore()
    until_now(ScriptedClient([Log(batches(0, 20))]), store)
    before = dict(store.objects)
    again = ScriptedClient([Log(batches(0, 90))], topic_id=bytes(16))
    with pytest.raises(PositionError, match="deleted and created again") as caught:
        until_now(again, store)
    assert caught.value.facts["reason"] == "SourceRecreated"
    assert store.objects == before


def test_trimming_beyond_the_position_is_reported_with_both_offsets():
    store = MemoryStore()
    until_now(ScriptedClient([Log(batches(0, 20))]), store)
    trimmed = Log(batches(30, 50), log_start=30)
    with pytest.raises(PositionError, match="retention") as caught:
        until_now(ScriptedClient([trimmed]), store)
    assert (caught.value.facts["position"], caught.value.facts["log_start"]) == (20, 30)
    assert ranges(store) == [(0, 19)]


@pytest.mark.mirror_v3("RUN-12")
def test_r8_a_log_that_starts_late_needs_chain_start():
    """R8: append mode refuses a head that is gone, unless the chain declares its start."""
    log = Log(batches(8, 20), log_start=8)
    store = MemoryStore()
    with pytest.raises(PositionError, match="retention"):
        until_now(ScriptedClient([log]), store)
    assert store.objects == {}
    until_now(ScriptedClient([log]), store, chain_start="earliest")
    assert ranges(store) == [(8, 19)]
    until_now(ScriptedClient([log]), store, chain_start="earliest")
    assert ranges(store) == [(8, 19)]


@pytest.mark.mirror_v3("RUN-15")
def test_a_source_truncated_below_the_position_stops():
    store = MemoryStore()
    until_now(ScriptedClient([Log(batches(0, 20))]), store)
    with pytest.raises(PositionError, match="ends below") as caught:
        until_now(ScriptedClient([Log(batches(0, 10))]), store)
    assert caught.value.facts["reason"] == "SourceWentBackwards"


def test_a_short_recreated_topic_is_distinguished_from_a_truncated_log():
    store, client, clock = MemoryStore(), ScriptedClient([Log(batches(0, 20))]), SteppingClock()

    def on_sleep():
        if clock.ms > 2000:
            (log,) = client.logs.values()
            log.batches, client.topic_id = batches(0, 3), bytes(16)

    with service(client, store, spec=SPEC, clock=clock) as (made, _):
        clock.on_sleep = on_sleep
        with pytest.raises(PositionError, match="deleted and created again") as caught:
            made.run()
    assert caught.value.facts["reason"] == "SourceRecreated"
    assert ranges(store) == [(0, 19)]


def test_another_writer_during_the_start_is_not_ahead_of_its_source():
    log, store = Log(batches(0, 20)), MemoryStore()
    client, rival = ScriptedClient([log]), ScriptedClient([log])
    response = client.list_offsets

    def list_offsets(partitions, at, **options):
        responses = response(partitions, at, **options)
        log.batches += batches(log.end, log.end + 20)
        until_now(rival, store)
        return responses  # which are old by now

    client.list_offsets = list_offsets
    until_now(client, store)
    found = ranges(store)
    assert found[0][0] == 0
    assert all(a[1] + 1 == b[0] for a, b in pairwise(found))


def test_a_foreign_file_stops_before_anything_is_written():
    store = MemoryStore()
    store.objects["d/0/notes.txt"] = b"mine"
    with pytest.raises(CorruptionError) as caught:
        until_now(ScriptedClient([Log(batches(0, 20))]), store)
    assert caught.value.facts["name"] == "notes.txt"
    assert names(store) == ["d/0/notes.txt"]


def test_a_source_that_does_not_respond_is_retried():
    store, client, clock = MemoryStore(), ScriptedClient([Log(batches(0, 20))]), SteppingClock()
    response, failures = client.list_offsets, []

    def list_offsets(partitions, at, **options):
        if 500 < clock.ms < 8000:
            failures.append(clock.ms)
            raise UnavailableError("no broker responds")
        return response(partitions, at, **options)

    client.list_offsets = list_offsets
    with service(client, store, spec=SPEC, clock=clock) as (made, _):
        clock.on_sleep = lambda: made.stop() if clock.ms > 20_000 else None
        made.run()
    assert ranges(store) == [(0, 19)]
    assert 2 <= len(failures) <= 8, "it must try again, and not at every tick"


def test_until_now_gives_up_on_a_source_that_stays_away():
    client, clock = ScriptedClient([Log(batches(0, 20))]), SteppingClock()
    with service(client, MemoryStore(), spec=SPEC, clock=clock) as (made, runner):
        runner.run = lambda *_: (_ for _ in ()).throw(UnavailableError("engine is gone"))
        with pytest.raises(UnavailableError, match="engine is gone"):
            made.run(until_now=True)


def test_two_writers_in_turns_leave_one_chain():
    """I2: each position gets one successor, also where both would cut elsewhere."""
    log = Log(batches(0, 40))
    store = MemoryStore()
    client = ScriptedClient([log])
    rival = ScriptedClient([log])

    def before(operation, name):
        if operation == "create" and name.endswith("0" * 20) and not store.objects:
            store.before = lambda *_: None
            log.batches += batches(40, 60)
            until_now(rival, store)  # the other one runs to its end while we hold our first object

    store.before = before
    until_now(client, store)
    found = ranges(store)
    assert found[0][0] == 0
    assert all(a[1] + 1 == b[0] for a, b in pairwise(found))
    assert found[-1][1] == 59


def test_a_topic_that_becomes_compacted_has_gaps_from_then_on():
    """The policy is read again while the mirror runs."""
    log, clock, store = Log(batches(0, 5)), SteppingClock(), MemoryStore()
    client = ScriptedClient([log], configs={"cleanup.policy": "delete"})
    with service(client, store, spec=SPEC, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms > 2000:
                client.configs = {"cleanup.policy": "compact"}
            if clock.ms > 30_000 and len(log.batches) == 1:
                log.batches += batches(9, 12)
            if clock.ms > 40_000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert ranges(store) == [(0, 4), (5, 11)]


def test_an_error_of_the_engine_names_the_range_that_failed_twice(caplog):
    client, clock, failures = ScriptedClient([Log(batches(0, 20))]), SteppingClock(), []
    with service(client, MemoryStore(), spec=SPEC, clock=clock) as (made, runner):
        run = runner.run

        def fail_twice(works, *more):
            if len(failures) < 2:
                failures.append(works)
                raise UnavailableError("the Spark job failed", reason="worker died")
            return run(works, *more)

        runner.run = fail_twice
        made.run(until_now=True)
    waits = [r for r in caplog.records if r.getMessage().startswith("flow waits")]
    assert "failed_jobs" not in waits[0].facts
    assert (waits[1].facts["first_offset"], waits[1].facts["last_offset"]) == (0, 19)
