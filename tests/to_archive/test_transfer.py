"""A slice becomes objects: their ends, their content, and the causes of their offset gaps.

Method: a scripted source (kit.fakes.scripted) and a store in memory; the objects are read back by
independent readers (pyarrow, json, the reference decoder). The same log is read again with fetch
responses of another size, in two runs, or by two writers: the objects must be the same.
"""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
)
from kit.runs.objects import offsets_of
from logmirror.archive.claims import Claim, claim_name
from logmirror.archive.naming import format_name
from logmirror.archive.object_check import check_object
from logmirror.errors import CorruptionError, PositionError, UnavailableError
from logmirror.mirror.ports import FlowId, Slice
from logmirror.model import OffsetRange, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.compression import Codec
from logmirror.wire.records import encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
FORMATS = ["native", "parquet", "ndjson"]
EXTENSIONS = {"native": "batches", "parquet": "parquet", "ndjson": "ndjson"}


def slice_of(first, end, *, tail=Trigger.EXPLICIT, **fields):
    return Slice(
        flow=FLOW,
        topic_id=TOPIC_ID,
        compacted=fields.pop("compacted", False),
        first=first,
        end=end,
        tail=tail,
        **fields,
    )


def copy(log, slice_, *, store=None, writer_id="w", response_batches=3, **spec):
    store = MemoryStore() if store is None else store
    client = ScriptedClient([log], response_batches=response_batches)
    result = run_slice(client, store, slice_, archive_spec(**spec), writer_id=writer_id)
    return store, result


@pytest.mark.parametrize("kind", FORMATS)
def test_the_tail_is_written_when_it_is_due_and_left_when_not(kind):
    log = Log(batches(0, 20))
    store, result = copy(log, slice_of(0, 20), format=kind)
    assert offsets_of(store) == {(0, 19): list(range(20))}
    assert [r.trigger for r in result.receipts] == [Trigger.EXPLICIT]
    store, result = copy(log, slice_of(0, 20, tail=None), format=kind)
    assert offsets_of(store) == {}
    assert (result.rest_bytes > 0, result.next_offset, result.error) == (True, 20, None)
    assert store.staged == {}, "what was not finished must not stay"


@pytest.mark.parametrize("kind", ["parquet", "ndjson"])
@pytest.mark.mirror_v3("FS-02")
def test_max_offsets_cuts_records_exactly(kind):
    store, result = copy(Log(batches(0, 23)), slice_of(0, 23), format=kind, max_offsets=7)
    ends = [(0, 6), (7, 13), (14, 20), (21, 22)]
    assert offsets_of(store) == {
        (first, last): list(range(first, last + 1)) for first, last in ends
    }
    assert [r.trigger.value for r in result.receipts] == ["max-offsets"] * 3 + ["explicit"]


def test_native_objects_end_where_batches_end():
    store, _ = copy(Log(batches(0, 23)), slice_of(0, 23), format="native", max_offsets=7)
    assert offsets_of(store) == {
        (0, 9): list(range(10)),
        (10, 19): list(range(10, 20)),
        (20, 22): [20, 21, 22],
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_a_copy_may_begin_inside_a_batch(kind):
    store, result = copy(Log(batches(0, 20), log_start=7), slice_of(7, 20), format=kind)
    first = 5 if kind == "native" else 7  # native keeps batches whole
    assert result.error is None
    assert offsets_of(store) == {(7, 19): list(range(first, 20))}
    assert [r.record_count for r in result.receipts] == [13]
    report = check_object(
        store, "d/0", format_name(OffsetRange(first=7, last=19), EXTENSIONS[kind]), deep=True
    )
    assert report.record_count == 13


@pytest.mark.parametrize("kind", FORMATS)
def test_a_copy_may_begin_inside_a_batch_that_was_compacted(kind):
    log = Log([encode_reference([record(offset) for offset in (0, 2, 4, 7, 9)])], log_start=3)
    store, result = copy(log, slice_of(3, 10, compacted=True), format=kind)
    assert result.error is None
    assert [(r.record_count, r.gaps.compacted) for r in result.receipts] == [(3, 4)]
    assert list(offsets_of(store)) == [(3, 9)]


def test_native_bytes_are_the_bytes_of_the_source():
    log = Log(batches(0, 20, codec=Codec.ZSTD))
    store, _ = copy(log, slice_of(0, 20), format="native")
    [data] = [d for n, d in store.objects.items() if not n.startswith(".")]
    assert data == b"".join(log.batches)


def test_max_bytes_cuts_after_the_record_that_reaches_it():
    log = Log([encode_reference([record(i, key=None, value=b"x" * 10) for i in range(10)])])
    store, result = copy(log, slice_of(0, 10), max_bytes=25)
    assert list(offsets_of(store)) == [(0, 2), (3, 5), (6, 8), (9, 9)]
    assert [r.payload_bytes for r in result.receipts] == [30, 30, 30, 10]


LOGS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(
    sizes=LOGS,
    kind=st.sampled_from(FORMATS),
    max_bytes=st.integers(1, 400),
    max_offsets=st.integers(1, 40),
    responses=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_cuts_depend_on_the_log_not_on_how_it_arrives(
    sizes, kind, max_bytes, max_offsets, responses
):
    log, first = Log(), 0
    for size in sizes:
        log.batches += batches(first, first + size, size)
        first += size
    limits = {"format": kind, "max_bytes": max_bytes, "max_offsets": max_offsets}
    (one, _), (two, _) = (
        copy(log, slice_of(0, first), response_batches=n, **limits) for n in responses
    )
    assert offsets_of(one) == offsets_of(two)
    assert sorted(o for offsets in offsets_of(one).values() for o in offsets) == list(range(first))
    ranges = sorted(offsets_of(one))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == first - 1
    assert all(a[1] + 1 == b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_second_run_finds_its_own_objects_and_says_so(kind):
    log = Log(batches(0, 20))
    store, first = copy(log, slice_of(0, 20), format=kind)
    before = dict(store.objects)
    _, again = copy(log, slice_of(0, 20), store=store, writer_id="other", format=kind)
    assert store.objects == before
    assert [r.digest for r in again.receipts] == [r.digest for r in first.receipts]
    assert [r.existed for r in again.receipts] == [True]


def claim_for(first, last, digest="xxh3:0", **changes):
    fields = {
        "covered": OffsetRange(first=first, last=last),
        "digest": digest,
        "writer": "gone",
        "topic": "t",
        "topic_id": TOPIC_ID.hex(),
        "partition": 0,
        "created_ms": 1,
        "record_count": last - first + 1,
        "trigger": Trigger.MAX_TIME,
    }
    return Claim(**{**fields, **changes})


@pytest.mark.parametrize("kind", FORMATS)
def test_a_claim_of_a_dead_writer_is_carried_out_as_it_was_meant(kind):
    """I2: the range claimed first is the one that becomes visible, whatever is due now."""
    log = Log(batches(0, 20))
    finished, _ = copy(log, slice_of(0, 10), format=kind)
    claim = finished.objects[claim_name("d", 0, 0)]
    store = MemoryStore()
    store.create(claim_name("d", 0, 0), claim)
    _, result = copy(log, slice_of(0, 20), store=store, format=kind)
    assert list(offsets_of(store)) == [(0, 9), (10, 19)]
    assert [r.existed for r in result.receipts] == [True, False]


def test_a_claim_that_appears_while_we_stage_wins():
    log = Log(batches(0, 20))
    finished, _ = copy(log, slice_of(0, 10))
    claim = finished.objects[claim_name("d", 0, 0)]
    armed = [True]

    def before(operation, _name):
        if operation == "create" and armed.pop() if armed else False:
            store.objects[claim_name("d", 0, 0)] = claim

    store = MemoryStore(before=before)
    copy(log, slice_of(0, 20), store=store)
    assert list(offsets_of(store)) == [(0, 9), (10, 19)]
    assert store.staged == {}


def test_a_claim_beyond_the_slice_is_written_whole():
    log = Log(batches(0, 20))
    finished, _ = copy(log, slice_of(0, 20))
    store = MemoryStore()
    store.create(claim_name("d", 0, 0), finished.objects[claim_name("d", 0, 0)])
    _, result = copy(log, slice_of(0, 5), store=store)
    assert list(offsets_of(store)) == [(0, 19)]
    assert result.error is None


@pytest.mark.mirror_v3("RUN-08")
def test_the_same_range_with_other_content_stops_with_both_digests():
    store = MemoryStore()
    store.create(claim_name("d", 0, 0), claim_for(0, 19).to_bytes())
    _, result = copy(Log(batches(0, 20)), slice_of(0, 20), store=store)
    assert isinstance(result.error, PositionError)
    assert result.error.facts["found"] == "xxh3:0"
    assert offsets_of(store) == {}
    assert store.staged == {}


def transactional_log():
    """0-4 data, 5-9 aborted, 10 abort marker, 11-12 committed, 13 commit marker, 14-15 data."""
    fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    parts = [
        *batches(0, 5),
        *batches(5, 10, base_sequence=0, **fields),
        encode_marker(MarkerType.ABORT, offset=10, producer_id=7),
        *batches(11, 13, base_sequence=5, **fields),
        encode_marker(MarkerType.COMMIT, offset=13, producer_id=7),
        *batches(14, 16),
    ]
    return Log(parts, aborted=((7, 5, 10),))


@pytest.mark.parametrize("kind", ["parquet", "ndjson"])
@pytest.mark.parametrize("responses", [1, 2, 10])
def test_markers_and_aborted_records_are_gaps_with_causes(kind, responses):
    """I3: each missing offset of a copy has its cause."""
    store, result = copy(
        transactional_log(), slice_of(0, 16), response_batches=responses, format=kind
    )
    assert offsets_of(store) == {(0, 15): [0, 1, 2, 3, 4, 11, 12, 14, 15]}
    [receipt] = result.receipts
    assert [(h.first, h.last, h.cause.value) for h in receipt.gaps.runs] == [
        (5, 9, "aborted"),
        (10, 10, "control"),
        (13, 13, "control"),
    ]
    assert (receipt.gaps.control, receipt.gaps.aborted) == (2, 5)


def test_native_keeps_every_batch_and_counts_all_but_markers():
    store, result = copy(transactional_log(), slice_of(0, 16), format="native")
    [data] = [d for n, d in store.objects.items() if not n.startswith(".")]
    assert data == b"".join(transactional_log().batches)
    assert (result.receipts[0].record_count, result.receipts[0].gaps.offset_count) == (14, 2)


def gap_log():
    compacted = encode_reference([record(0), record(3), record(9)], base_offset=0, last_offset=9)
    return Log([compacted, *batches(30, 35)], last_stable_offset=35)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_gap_stops_the_flow_unless_the_topic_is_compacted(kind):
    store, result = copy(gap_log(), slice_of(0, 35), format=kind)
    assert isinstance(result.error, PositionError)
    assert result.error.facts["reason"] == "SourceGapAboveExpected"
    assert offsets_of(store) == {}
    store, result = copy(gap_log(), slice_of(0, 35, compacted=True), format=kind)
    assert offsets_of(store) == {(0, 34): [0, 3, 9, 30, 31, 32, 33, 34]}
    assert result.receipts[0].gaps.compacted == 27


@pytest.mark.mirror_v3("RUN-09")
def test_a_flipped_bit_at_the_source_stops_with_the_place():
    log = Log(batches(0, 10))
    log.batches[1] = log.batches[1][:-3] + b"\xff" + log.batches[1][-2:]
    store, result = copy(log, slice_of(0, 10), response_batches=1, max_offsets=5)
    assert isinstance(result.error, CorruptionError)
    assert result.error.facts["topic"] == "t"
    assert result.error.facts["offset"] == 5
    assert offsets_of(store) == {(0, 4): [0, 1, 2, 3, 4]}, "what was sound before it is kept"
    assert len(result.receipts) == 1


def test_a_source_that_ends_early_is_an_error():
    _, result = copy(Log(batches(0, 10)), slice_of(0, 20))
    assert isinstance(result.error, PositionError)
    assert (result.error.facts["expected"], result.error.facts["got"]) == (20, 10)


def test_a_store_without_space_reports_and_leaves_nothing():
    def before(operation, _name):
        if operation == "publish":
            raise UnavailableError("no space left")

    store = MemoryStore(before=before)
    _, result = copy(Log(batches(0, 10)), slice_of(0, 10), store=store)
    assert isinstance(result.error, UnavailableError)
    assert offsets_of(store) == {}
    assert store.staged == {}


def test_a_budget_ends_the_slice_at_an_object_boundary():
    log = Log(batches(0, 100))
    _, result = copy(log, slice_of(0, 100, budget_bytes=1), max_offsets=20, response_batches=1)
    assert [r.covered.last for r in result.receipts] == [19]
    assert result.error is None


@pytest.mark.parametrize("kind", FORMATS)
def test_staged_slices_hand_tokens_to_the_driver(kind):
    log = Log(batches(0, 20))
    store, result = copy(log, slice_of(10, 20, staged=True), format=kind)
    assert offsets_of(store) == {}
    [receipt] = result.receipts
    assert list(store.staged) == [receipt.token]
    assert not any(name.startswith(".logmirror/claims") for name in store.objects)
