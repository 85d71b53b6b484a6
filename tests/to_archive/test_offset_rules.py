"""R1 and R2: which offsets the source may deliver next, and the errors for all others.

Method: a scripted source (kit.fakes.scripted) does what a broker never should: it serves offsets
below the expected one, or skips some without a cause. Replicas in each format and in a cluster must
stop with both numbers, and hold nothing of it.
"""

import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    FixedResponses,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
)
from kit.fakes.scripted import service as scripted_service
from kit.fakes.scripted_copies import World, value
from logmirror.errors import PositionError
from logmirror.mirror.ports import FlowId, Slice
from logmirror.model import GapCause, TopicPartition, Trigger
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.records import encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
FORMATS = ["native", "parquet", "ndjson"]


def run(client, form, *, compacted=False, end=20, staged=False):
    store = MemoryStore()
    slice_ = Slice(
        flow=FLOW,
        topic_id=TOPIC_ID,
        compacted=compacted,
        first=0,
        end=end,
        tail=Trigger.EXPLICIT,
        staged=staged,
    )
    return store, run_slice(client, store, slice_, archive_spec(format=form, max_offsets=10))


def published(store):
    return [name for name in store.objects if not name.startswith(".")]


def refused(result, reason):
    assert isinstance(result.error, PositionError)
    assert result.error.facts["reason"] == reason
    return result.error.facts["expected"], result.error.facts["got"]


# R1


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.mirror_v3("RUN-04", "FS-03")
def test_r1_an_offset_below_the_expected_one_stops_and_nothing_is_written(form, compacted, staged):
    """The log is served again from offset 0 when 5 is expected."""
    client = FixedResponses(batches(0, 5), batches(0, 5), end=20)

    store, result = run(client, form, compacted=compacted, staged=staged)

    assert refused(result, "SourceWentBackwards") == (5, 0)
    assert (published(store), store.staged) == ([], {})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("compacted", [False, True])
def test_r1_a_batch_that_reaches_back_over_what_was_read_stops(form, compacted):
    """5 is expected; the next batch is 3-7: the log was cut and written again."""
    client = FixedResponses(
        batches(0, 5), [encode_reference([record(o) for o in range(3, 8)])], end=20
    )

    store, result = run(client, form, compacted=compacted)

    assert refused(result, "SourceWentBackwards") == (5, 3)
    assert (published(store), store.staged) == ([], {})


@pytest.mark.parametrize("form", FORMATS)
def test_r1_objects_that_were_finished_before_it_stay(form):
    client = FixedResponses(batches(0, 15), batches(5, 10), end=20)

    store, result = run(client, form)

    assert refused(result, "SourceWentBackwards") == (15, 5)
    assert [name.rpartition("/")[2][:41] for name in published(store)] == [f"{0:020}-{9:020}"]


@pytest.mark.parametrize("compacted", [False, True])
def test_r1_a_batch_that_reaches_back_is_not_sent_to_a_cluster(compacted):
    world = World(Log(batches(0, 10)))
    world.source = FixedResponses(
        batches(0, 5), [encode_reference([record(o) for o in range(3, 8)])], end=8
    )

    (result,) = world.run(compacted=compacted)

    assert refused(result, "SourceWentBackwards") == (5, 3)
    assert world.destination.values() == [(n, value(n)) for n in range(5)]


@pytest.mark.parametrize("chain_start", [None, "earliest"])
def test_r1_a_source_that_ends_below_the_position_stops_the_next_run(chain_start):
    store = MemoryStore()

    def copy(log):
        spec = archive_spec()
        with scripted_service(ScriptedClient([log]), store, spec=spec, chain_start=chain_start) as (
            made,
            _,
        ):
            made.run(until_now=True)

    copy(Log(batches(0, 20)))
    before = dict(store.objects)
    with pytest.raises(PositionError) as caught:
        copy(Log(batches(0, 10)))

    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["got"]) == ("SourceWentBackwards", 20, 10)
    assert store.objects == before


@pytest.mark.parametrize("method", ["read", "poll"])
def test_r1_holds_however_the_source_is_read(method):
    """Copies into clusters poll."""
    client = FixedResponses(batches(0, 5), end=20)
    partition = TopicPartition("t", 0)
    source = KafkaSource(client, partition, topic_id=TOPIC_ID, buffer=FetchBuffer(4096))
    with pytest.raises(PositionError) as caught:
        next(source.read(9, 20)) if method == "read" else source.poll(9, max_wait_ms=0)
    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["got"]) == ("SourceWentBackwards", 9, 0)


# R2


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("place", ["between responses", "between batches", "inside a batch"])
@pytest.mark.mirror_v3("RUN-03")
def test_r2_an_offset_above_the_expected_one_without_a_cause_stops(form, place):
    inside = [record(o) for o in (5, 6, 8, 9)]
    client = {
        "between responses": FixedResponses(batches(0, 5), batches(7, 20), end=20),
        "between batches": FixedResponses([*batches(0, 5), *batches(7, 20)], end=20),
        "inside a batch": FixedResponses([*batches(0, 5), encode_reference(inside)], end=10),
    }[place]

    store, result = run(client, form, end=client.logs[TopicPartition("t", 0)].end)

    expected, got = refused(result, "SourceGapAboveExpected")
    assert expected <= 5 < got
    if place != "inside a batch":
        assert (expected, got) == (5, 7)
    assert (published(store), store.staged) == ([], {})


@pytest.mark.parametrize("form", FORMATS)
def test_r2_what_lies_before_an_unexplained_gap_is_kept(form):
    client = FixedResponses([*batches(0, 12), *batches(15, 20)], end=20)

    store, result = run(client, form)

    assert refused(result, "SourceGapAboveExpected") == (12, 15)
    assert all(name.rpartition("/")[2] < f"{10:020}" for name in published(store))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.mirror_v3("RUN-03", "FS-03")
def test_r2_known_causes_are_recorded_gaps(form):
    fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    log = Log(
        [
            *batches(0, 2),
            *batches(2, 5, base_sequence=0, **fields),
            encode_marker(MarkerType.ABORT, offset=5, producer_id=7),
            *batches(9, 12),
        ],
        aborted=((7, 2, 5),),
    )
    store, result = run(ScriptedClient([log]), form, compacted=True, end=12)

    assert result.error is None
    counts = {GapCause.CONTROL: 0, GapCause.ABORTED: 0, GapCause.COMPACTED: 0}
    for receipt in result.receipts:
        counts[GapCause.CONTROL] += receipt.gaps.control
        counts[GapCause.ABORTED] += receipt.gaps.aborted
        counts[GapCause.COMPACTED] += receipt.gaps.compacted
    assert counts == {
        GapCause.CONTROL: 1,
        GapCause.ABORTED: 0 if form == "native" else 3,  # whose records are in the object
        GapCause.COMPACTED: 3,
    }
    assert published(store)
