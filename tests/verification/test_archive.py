"""Verification reports why offsets are missing, and what contradicts the source, with its offsets.

Method: slices of scripted logs (kit.fakes.scripted) become archives in memory. Then the log, the
archive or a claim is changed, as a cleaner, a broken disk or a user would, and verified again.
"""

import contextlib
from itertools import pairwise

import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
)
from kit.runs.objects import unsealed
from logmirror.archive.claims import claim_name
from logmirror.mirror.ports import FlowId, Slice, SourceView
from logmirror.model import GapCause, TopicPartition, Trigger
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore
from logmirror.verification.archive import verify_content, verify_names
from logmirror.verification.source import SourceSide, compare_with_source
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
FORMATS = ["native", "parquet", "ndjson"]
ROWS = ["parquet", "ndjson"]


def archive_of(log, form, *, compacted=False, max_offsets=1_000_000):
    """A store with the whole log, and the specification it was written by."""
    spec, store = archive_spec(format=form, max_offsets=max_offsets), MemoryStore()
    slice_ = Slice(
        flow=FLOW,
        topic_id=TOPIC_ID,
        compacted=compacted,
        first=log.log_start,
        end=log.end,
        tail=Trigger.EXPLICIT,
    )
    result = run_slice(ScriptedClient([log]), store, slice_, spec)
    assert result.error is None
    return store, spec


def deep(store, spec, *, ask_source=False, compacted=False):
    report, objects = verify_names(store, FLOW, spec.extension, chain_start="earliest")
    found = verify_content(report, objects, store, spec, ask_source=ask_source, compacted=compacted)
    return report, found


def proof(store, spec, log=None, *, compacted=False):
    """The report of `--deep`, or of `--against-source` where there is a log."""
    report, found = deep(store, spec, ask_source=log is not None, compacted=compacted)
    if log is None:
        assert len([*found]) <= report.objects
        return report
    side = SourceSide(
        archive=spec,
        store=store,
        folder=FLOW.folder,
        source=KafkaSource(
            ScriptedClient([log]), TopicPartition("t", 0), topic_id=TOPIC_ID, buffer=FetchBuffer(64)
        ),
        decoder=RecordDecoder(),
        view=SourceView(topic_id=TOPIC_ID, log_start=log.log_start, last_stable_offset=log.end),
        compacted=compacted,
    )
    for checked in found:
        compare_with_source(report, checked, side)
    return report


def only_problem(report):
    [problem] = report.problems
    assert problem["kind"] == "corruption"
    return problem


def runs(report):
    return [(gap.first, gap.last, gap.cause.value) for gap in report.gap_runs]


def transactions():
    """0-4 data, 5-9 aborted, 10 marker, 11-12 committed, 13 marker, 14-15 data, 16 marker."""
    fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    parts = [
        *batches(0, 5),
        *batches(5, 10, base_sequence=0, **fields),
        encode_marker(MarkerType.ABORT, offset=10, producer_id=7),
        *batches(11, 13, base_sequence=5, **fields),
        encode_marker(MarkerType.COMMIT, offset=13, producer_id=7),
        *batches(14, 16),
        encode_marker(MarkerType.COMMIT, offset=16, producer_id=8),
    ]
    return Log(parts, aborted=((7, 5, 10),))


def sparse():
    """A compacted log: 1-2 and 4-9 went out of a batch, 10-29 and 35-39 with their batches."""
    first = encode_reference([record(0), record(3)], base_offset=0, last_offset=9)
    return Log([first, *batches(30, 35), *batches(40, 43)])


SPARSE_RUNS = [(1, 2, "compacted"), (4, 29, "compacted"), (35, 39, "compacted")]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("max_offsets", [3, 8, 100])
def test_gaps_are_reported_with_range_and_cause(form, max_offsets):
    store, spec = archive_of(transactions(), form, max_offsets=max_offsets)

    report = proof(store, spec)

    aborted = [] if form == "native" else [(5, 9, "aborted")]  # where their records are kept
    assert report.problems == []
    assert joined(runs(report)) == [
        *aborted,
        (10, 10, "control"),
        (13, 13, "control"),
        (16, 16, "control"),
    ]
    assert sum(report.gap_counts.values()) == report.gap_offsets == 3 + 5 * len(aborted)
    assert report.record_count + report.gap_offsets == 17


def joined(found):
    """Runs whose ends an object's end has parted."""
    pieces = list(found[:1])
    for before, run in pairwise(found):
        if before[1] + 1 == run[0] and before[2] == run[2]:
            pieces[-1] = (pieces[-1][0], run[1], run[2])
        else:
            pieces.append(run)
    return pieces


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("max_offsets", [7, 100])
def test_compacted_offsets_are_reported_inside_batches(form, max_offsets):
    store, spec = archive_of(sparse(), form, compacted=True, max_offsets=max_offsets)

    report = proof(store, spec)

    assert report.problems == []
    assert joined(runs(report)) == SPARSE_RUNS
    assert report.gap_counts[GapCause.COMPACTED] == report.gap_offsets == 33


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("make", [transactions, sparse])
def test_the_source_confirms_every_gap(form, make):
    store, spec = archive_of(make(), form, compacted=make is sparse, max_offsets=8)

    report = proof(store, spec, make(), compacted=make is sparse)

    assert report.problems == []
    assert (report.compared, report.gone) == (report.objects, 0)
    assert report.compacted_since == 0


@pytest.mark.parametrize(
    ("form", "max_offsets", "first", "missing"),
    [("native", 100, 0, "1-2, 4-29, 35-39"), ("ndjson", 30, 30, "35-39")],
)
def test_a_gap_that_nothing_explains_is_a_finding_until_the_source_explains_it(
    form, max_offsets, first, missing
):
    """Lines below our first claim are mirror-v3's (test_mirror_v3_chains.py), so one stays."""
    store, spec = archive_of(sparse(), form, compacted=True, max_offsets=max_offsets)
    del store.objects[claim_name("d", 0, first)]

    problem = only_problem(proof(store, spec))
    asked = proof(store, spec, sparse(), compacted=True)

    assert problem["message"] == "offsets are missing without a recorded cause"
    assert problem["facts"]["offsets"] == missing
    assert asked.problems == []
    assert asked.gap_counts[GapCause.COMPACTED] == 33


def test_causes_without_a_claim_come_from_the_source():
    store, spec = archive_of(transactions(), "ndjson")
    del store.objects[claim_name("d", 0, 0)]

    report = proof(store, spec, transactions())

    assert report.problems == []
    assert report.gap_counts == {
        GapCause.CONTROL: 3,
        GapCause.ABORTED: 5,
        GapCause.COMPACTED: 0,
    }


@pytest.mark.parametrize("form", FORMATS)
def test_a_gap_that_nothing_explains_at_the_source_is_a_finding(form):
    store, spec = archive_of(sparse(), form, compacted=True)

    problem = only_problem(proof(store, spec, sparse()))

    assert problem["message"].startswith("the source has neither a record nor a cause")
    assert problem["facts"]["offsets"] == "1-2, 4-29, 35-39"


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_compacted_since_is_counted_and_no_finding(form):
    """Records 5-9 and 20-24 went, and one of a batch; what is left must be the same."""
    whole = Log(batches(0, 30))
    store, spec = archive_of(whole, form, compacted=True, max_offsets=12)
    kept = [r for r in range(10, 15) if r != 12]
    part = encode_reference([record(r) for r in kept], base_offset=10, last_offset=14)
    cleaned = Log([*batches(0, 5), part, *batches(15, 20), *batches(25, 30)])

    report = proof(store, spec, cleaned, compacted=True)

    assert report.problems == []
    assert (report.compared, report.compacted_since) == (report.objects, 11)
    without = proof(store, spec, cleaned)
    assert len(without.problems) > 0  # where the policy does not compact, nothing may go


@pytest.mark.parametrize("form", FORMATS)
def test_markers_that_the_cleaner_took_since_are_no_finding(form):
    log = transactions()
    store, spec = archive_of(log, form, compacted=True)
    cleaned = Log([log.batches[0], *batches(14, 16)], last_stable_offset=17)
    cleaned.batches.append(encode_marker(MarkerType.COMMIT, offset=16, producer_id=8))

    report = proof(store, spec, cleaned, compacted=True)

    assert report.problems == []
    assert report.compacted_since == (7 if form == "native" else 2)


@pytest.mark.parametrize("form", FORMATS)
def test_a_record_that_the_copy_lacks_is_a_finding_on_compacted_topics_too(form):
    store, spec = archive_of(Log([*batches(0, 5), *batches(10, 15)]), form, compacted=True)

    problem = only_problem(proof(store, spec, Log(batches(0, 15)), compacted=True))

    assert problem["message"] == "the archive lacks records that the source has"
    assert problem["facts"]["offsets"] == "5-9"
    assert problem["facts"]["missing"] == "5"


@pytest.mark.parametrize("form", FORMATS)
def test_records_that_the_copy_lacks_at_its_end_are_a_finding_too(form):
    short = encode_reference([record(o) for o in range(12)], base_offset=0, last_offset=14)
    store, spec = archive_of(Log([short]), form, compacted=True)

    problem = only_problem(proof(store, spec, Log(batches(0, 15, size=15)), compacted=True))

    assert problem["facts"]["offsets"] == "12-14"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("compacted", [False, True])
def test_a_record_that_differs_is_named(form, compacted):
    store, spec = archive_of(Log(batches(0, 15)), form, compacted=compacted)
    changed = [record(r, value=b"other" if r == 8 else None) for r in range(5, 10)]
    log = Log([*batches(0, 5), encode_reference(changed), *batches(10, 15)])

    problem = only_problem(proof(store, spec, log, compacted=compacted))

    assert problem["message"] == "the archive differs from the source at the same offset"
    assert problem["facts"]["offset"] == "8"
    assert "other" in problem["facts"]["expected"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_record_where_the_source_has_a_marker_is_a_finding(form):
    store, spec = archive_of(Log(batches(0, 8, size=1)), form, compacted=True)
    marker = encode_marker(MarkerType.COMMIT, offset=4, producer_id=7)
    log = Log([*batches(0, 4), marker, *batches(5, 8)])

    problem = only_problem(proof(store, spec, log, compacted=True))

    assert problem["message"] == "the archive has records at offsets where the source never had any"
    assert (problem["facts"]["offsets"], problem["facts"]["cause"]) == ("4-4", "control")


@pytest.mark.parametrize("form", ROWS)
def test_a_cause_that_the_source_contradicts_is_a_finding(form):
    """The copy says compacted, the source shows a marker there: the log is another one."""
    store, spec = archive_of(Log([*batches(0, 4), *batches(5, 8)]), form, compacted=True)
    marker = encode_marker(MarkerType.COMMIT, offset=4, producer_id=7)
    log = Log([*batches(0, 4), marker, *batches(5, 8)])

    problem = only_problem(proof(store, spec, log, compacted=True))

    assert problem["message"] == "the archive has another cause for missing offsets than the source"
    assert problem["facts"]["offsets"] == "4-4"


def test_the_same_records_in_other_batches_are_not_the_same_native_object():
    store, spec = archive_of(Log(batches(0, 10, size=5)), "native")

    problem = only_problem(proof(store, spec, Log(batches(0, 10, size=2))))

    assert "but the bytes of their batches differ" in problem["message"]
    rows, spec = archive_of(Log(batches(0, 10, size=5)), "parquet")
    assert proof(rows, spec, Log(batches(0, 10, size=2))).problems == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_batch_taken_out_of_the_middle_is_found(form):
    """Each part left is sound by itself, and on a compacted topic a gap is nothing strange."""
    store, spec = archive_of(sparse(), form, compacted=True)
    lacking, _ = archive_of(Log([sparse().batches[0], sparse().batches[2]]), form, compacted=True)
    [name] = [name for name in store.objects if not name.startswith(".")]
    store.objects[name] = lacking.objects[name]

    only_problem(proof(store, spec))


# Names


@pytest.mark.parametrize("gone", [[2], [1, 2], [0, 1, 2], [3], [2, 3], [0], [1]])
def test_objects_that_are_missing_are_found_by_their_names_and_claims(gone):
    store, spec = archive_of(Log(batches(0, 20)), "parquet", max_offsets=5)
    names = sorted(name for name in store.objects if not name.startswith("."))
    for index in gone:
        del store.objects[names[index]]

    report, _ = verify_names(store, FLOW, spec.extension, chain_start=None)

    if gone == [3]:  # a writer that died between claim and object leaves the same
        assert (report.problems, report.claimed.first, report.claimed.last) == ([], 15, 19)
    else:
        only_problem(report)


@pytest.mark.parametrize("chain_start", ["earliest", None])
def test_a_chain_of_which_nothing_is_left_is_found(chain_start):
    store, spec = archive_of(Log(batches(0, 20)), "parquet", max_offsets=5)
    for name in [name for name in store.objects if not name.startswith(".")]:
        del store.objects[name]

    report, _ = verify_names(store, FLOW, spec.extension, chain_start=chain_start)

    assert "missing at the end" in only_problem(report)["message"]


def test_an_object_of_another_incarnation_in_the_chain_is_found():
    store, spec = archive_of(Log(batches(0, 20)), "parquet", max_offsets=10)
    name = claim_name("d", 0, 0)
    with contextlib.suppress(KeyError):
        del store.objects[name]
    first = next(n for n in sorted(store.objects) if not n.startswith("."))
    assert TOPIC_ID.hex().encode() in store.objects[first]
    other = unsealed(store.objects[first]).replace(
        TOPIC_ID.hex().encode(), bytes(16).hex().encode()
    )
    store.objects[first] = other

    assert "another topic" in only_problem(proof(store, spec))["message"]
