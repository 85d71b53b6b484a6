"""Several destinations of one mirror: each has its own position, and a stop flushes all.

Method: the real loop over a scripted source; both destinations are directories of one store in
memory. mirror-v3 feeds all destinations from one position, the lowest.
"""

import logging

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.errors import PositionError
from logmirror.testing import MemoryStore

COMPACT = {"cleanup.policy": "compact", "delete.retention.ms": "86400000"}
BOTH = ("first", "second")


def ranges(store, destination):
    names = sorted(n.rpartition("/")[2] for n in store.objects if n.startswith(f"{destination}/0/"))
    return [tuple(map(int, name.split(".")[0].split("-"))) for name in names]


def until_now(log, store, *names, **options):
    """Run; returns (destination, first offset) of each slice, in order."""
    client, clock = ScriptedClient([log], configs=options.pop("configs", None)), SteppingClock()
    with service(client, store, clock=clock, names=names, **options) as (made, runner):
        made.run(until_now=True)
    return [(s.flow.destination, s.first) for tick in runner.ticks for s in tick]


@pytest.mark.mirror_v3("TEE-02")
def test_a_destination_that_lags_is_fed_from_its_own_position():
    store, log = MemoryStore(), Log(batches(0, 10))
    until_now(log, store, "first")
    before = dict(store.objects)
    log.batches += batches(10, 20)

    slices = until_now(log, store, *BOTH)

    assert sorted(slices) == [("first", 10), ("second", 0)]
    assert before.items() <= store.objects.items()
    assert ranges(store, "first") == [(0, 9), (10, 19)]
    assert ranges(store, "second") == [(0, 19)]


@pytest.mark.mirror_v3("TEE-04")
def test_a_stop_flushes_every_destination():
    store, log, clock = MemoryStore(), Log(batches(0, 10)), SteppingClock()
    spec = archive_spec(max_offsets=10**6, max_bytes=1 << 30, max_time_ms=10**12)
    before = []
    with service(ScriptedClient([log]), store, spec=spec, clock=clock, names=BOTH) as (made, _):

        def on_sleep():
            if clock.ms > 3000:
                before.append([ranges(store, name) for name in BOTH])
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert before[0] == [[], []]
    assert [ranges(store, name) for name in BOTH] == [[(0, 9)], [(0, 9)]]


@pytest.mark.mirror_v3("TEE-07")
def test_snapshots_of_a_trimmed_log_begin_at_its_start_in_every_destination():
    store, log = MemoryStore(), Log(batches(461, 470), log_start=461)

    slices = until_now(log, store, *BOTH, spec=archive_spec(compaction="log"), configs=COMPACT)

    assert sorted(slices) == [("first", 461), ("second", 461)]
    assert [ranges(store, name) for name in BOTH] == [[(461, 469)], [(461, 469)]]


@pytest.mark.mirror_v3("TEE-08", "TEE-09", "TEE-10")
def test_each_destination_reports_its_own_flushes_once(caplog):
    caplog.set_level(logging.INFO, logger="logmirror")
    store, log = MemoryStore(), Log(batches(0, 10))
    spec = archive_spec(max_offsets=5)
    until_now(log, store, *BOTH, spec=spec)
    until_now(log, store, *BOTH, spec=spec)
    flushed = [r.facts for r in caplog.records if r.getMessage() == "flushed"]
    found = sorted((facts["destination"], facts["from"], facts["to"]) for facts in flushed)
    assert found == [(name, first, first + 4) for name in BOTH for first in (0, 5)]


@pytest.mark.mirror_v3("TEE-14")
def test_a_position_that_the_source_does_not_reach_stops_the_whole_mirror():
    """The error does not name the destination; errors of a slice do: see test_shared_read.py."""
    store = MemoryStore()
    until_now(Log(batches(0, 30)), store, "second")
    before = dict(store.objects)
    with pytest.raises(PositionError) as caught:
        until_now(Log(batches(0, 10)), store, *BOTH)
    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["got"]) == ("SourceWentBackwards", 30, 10)
    assert (facts["topic"], facts["partition"]) == ("t", 0)
    assert store.objects == before
