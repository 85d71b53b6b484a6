"""Chains that mirror-v3 wrote are verified, continued in place and merged; broken ones are refused.

Method: `kit.runs.mirror_v3_archive` writes the objects, the product's loop continues them from a
scripted source that holds the same records and more. The result is read back object by object and
must be the source's records, once each and in order.
"""

import pytest

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, archive_spec, service
from kit.judges.clients import CREATE_TIME, Row
from kit.runs.mirror_v3_archive import (
    HEAD,
    MirrorV3Object,
    cut,
    encode,
    name_of,
    odd_rows,
    snapshot,
)
from logmirror.archive.claims import latest_claim
from logmirror.archive.compact import Limits, compact
from logmirror.archive.merge import Archive
from logmirror.archive.reader import iterate
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError
from logmirror.mirror.ports import FlowId, SourceView
from logmirror.model import GapCause, TimestampType, TopicPartition
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore, check_tiles, compare
from logmirror.to_archive.positions import read_chain
from logmirror.verification.archive import verify_content, verify_names
from logmirror.verification.snapshot import compare_snapshot
from logmirror.verification.source import SourceSide, compare_with_source
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
LAYOUTS = [
    ("ndjson", {}),
    ("parquet", {"keys": HEAD, "values": HEAD}),
    ("parquet", {"keys": "bytes", "values": "bytes"}),
    ("parquet", {"keys": "utf8", "values": "json"}),
]
HALF, END = 60, 100
TABLE = {"cleanup.policy": "compact", "delete.retention.ms": "86400000"}


def rows_for(options):
    text = bool(options) and not {"bytes", HEAD}.issuperset(options.values())
    rows = odd_rows(HALF, text=text)  # the last one has a record
    return rows, rows + odd_rows(END - HALF, first=HALF, text=text)


def log_of(rows, *, end=END, start=0):
    """A log with a batch for each record, and a transaction's marker wherever there is none."""
    found = {row.offset: row for row in rows}
    return Log(
        [
            one(found[n])
            if n in found
            else encode_marker(MarkerType.COMMIT, offset=n, producer_id=8)
            for n in range(start, end)
        ],
        log_start=start,
    )


def one(row):
    kind = TimestampType(row.timestamp_type)
    record = Record(row.offset, row.timestamp_ms, kind, row.key, row.value, row.headers)
    return encode_reference([record], timestamp_type=kind)


def chain_of(rows, form, options, *, max_offsets=11):
    store = MemoryStore()
    for found in cut(rows, max_offsets):
        data = encode(found.rows, "t", 0, form, **options)
        store.objects[f"d/0/{name_of(found, form)}"] = data
    return store


def continue_from(log, store, spec, **options):
    client = ScriptedClient([log], **options)
    with service(client, store, spec=spec) as (made, runner):
        made.run(until_now=True)
    return runner


def proof(store, spec, log=None, *, compacted=False):
    """The report of `verify --deep`, or of `--against-source` where there is a log."""
    is_log = spec.compaction is not None
    report, objects = verify_names(store, FLOW, spec.extension, chain_start=None, snapshots=is_log)
    found = verify_content(report, objects, store, spec, ask_source=log is not None)
    for checked in found:
        if log is None:
            continue
        client = ScriptedClient([log], topic_id=TOPIC_ID)
        where = TopicPartition("t", 0)
        side = SourceSide(
            archive=spec,
            store=store,
            folder=FLOW.folder,
            source=KafkaSource(client, where, topic_id=TOPIC_ID, buffer=FetchBuffer(64)),
            decoder=RecordDecoder(),
            view=SourceView(topic_id=TOPIC_ID, log_start=log.log_start, last_stable_offset=log.end),
            compacted=compacted,
        )
        if is_log and checked.obj == objects[-1]:
            compare_snapshot(report, checked, side)
        elif not is_log:
            compare_with_source(report, checked, side)
    return report


def rows_in(store, form):
    """All records of the chain, in the order of names."""
    for name in sorted(name for name in store.objects if name.startswith("d/0/")):
        for batch in iterate(store, "d/0", name.rpartition("/")[2]):
            stamps = batch.column("timestamp").cast("int64").to_pylist()
            for found, stamp in zip(batch.to_pylist(), stamps, strict=True):
                assert (found["topic"], found["partition"], form) == ("t", 0, form)
                headers = tuple((h["key"].encode(), h["value"]) for h in found["headers"])
                kind, key, value = found["timestampType"], found["key"], found["value"]
                yield Row(found["offset"], stamp, kind, key, value, headers)


def names_in(store):
    return sorted(n.removeprefix("d/0/") for n in store.objects if n.startswith("d/0/"))


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_a_chain_is_continued_in_place_at_the_next_offset(form, options):
    """RUN-13, FS-04, S3-03: the position is that of its names."""
    before, after = rows_for(options)
    store, spec = chain_of(before, form, options), archive_spec(format=form, max_offsets=10)
    theirs = dict(store.objects)
    assert read_chain(store, FLOW, spec).next_offset == HALF

    runner = continue_from(log_of(after), store, spec)

    assert runner.ticks[0][0].first == HALF
    assert theirs.items() <= store.objects.items()
    assert check_tiles(names_in(store), 0, END) == []
    assert compare(after, rows_in(store, form)) == []
    assert latest_claim(store, "d", 0).covered.last == END - 1


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_causes_that_its_objects_lack_are_counted_as_not_recorded(form, options):
    before, after = rows_for(options)
    store, spec = chain_of(before, form, options), archive_spec(format=form, max_offsets=10)
    objects = len(store.objects)
    continue_from(log_of(after), store, spec)

    report = proof(store, spec)

    assert report.problems == []
    assert report.unwitnessed == objects
    assert report.record_count == len(after)
    assert report.gap_counts == {
        GapCause.UNRECORDED: HALF - len(before),
        GapCause.CONTROL: END - len(after) - (HALF - len(before)),
    }


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_the_source_proves_every_record_and_gives_every_cause(form, options):
    before, after = rows_for(options)
    store, spec = chain_of(before, form, options), archive_spec(format=form, max_offsets=10)
    log = log_of(after)
    continue_from(log, store, spec)

    report = proof(store, spec, log)

    assert report.problems == []
    assert (report.compared, report.gone) == (report.objects, 0)
    counts = {cause: count for cause, count in report.gap_counts.items() if count}
    assert counts == {GapCause.CONTROL: END - len(after)}
    gaps = [n for run in report.gap_runs for n in range(run.first, run.last + 1)]
    assert gaps == sorted(set(range(END)) - {row.offset for row in after})
    assert {run.cause for run in report.gap_runs} == {GapCause.CONTROL}


@pytest.mark.parametrize(("form", "options"), LAYOUTS[:2], ids=str)
def test_where_the_source_has_lost_its_records_the_causes_stay_unrecorded(form, options):
    before, _ = rows_for(options)
    store, spec = chain_of(before, form, options), archive_spec(format=form)
    log = log_of([Row(n, 1, CREATE_TIME, None, b"x") for n in range(HALF, END)], start=HALF)

    report = proof(store, spec, log)

    assert report.problems == []
    assert (report.compared, report.gone) == (0, report.objects)
    assert report.gap_counts == {GapCause.UNRECORDED: HALF - len(before)}


@pytest.mark.parametrize(("form", "options"), LAYOUTS[:2], ids=str)
def test_a_record_that_was_changed_or_taken_out_is_found_beside_the_source(form, options):
    before, _ = rows_for(options)
    log = log_of(before, end=HALF)
    for lie in (
        lambda rows: [*rows[:3], rows[3]._replace(value=b"other"), *rows[4:]],
        lambda rows: [*rows[:3], *rows[4:]],
        lambda rows: [*rows[:3], rows[3]._replace(timestamp_ms=5), *rows[4:]],
        lambda rows: [*rows[:3], rows[3]._replace(headers=((b"h", b""),)), *rows[4:]],
    ):
        store = chain_of(before, form, options)
        found = cut(before, 11)[1]
        name = f"d/0/{name_of(found, form)}"
        store.objects[name] = encode(lie(found.rows), "t", 0, form, **options)
        spec = archive_spec(format=form)
        assert proof(store, spec).problems == []
        [problem] = proof(store, spec, log).problems
        assert problem["facts"]["name"] == name_of(found, form)


# --- chains that it would refuse ------------------------------------------------------------------


def broken(rows, form):
    objects = cut(rows, 11)
    names = [name_of(found, form) for found in objects]
    other = "ndjson" if form == "parquet" else "parquet"
    first, last = objects[1].first, objects[1].last
    return {
        "a foreign name": ([*names, "README.md"], "unknown object"),
        "too few digits": ([*names, f"{END}-{END + 9}.{form}"], "unknown object"),
        "another format": ([*names, f"{HALF:020d}-{HALF:020d}.{other}"], "mixed formats"),
        "a key id": ([*names, f"{HALF:020d}-{HALF:020d}.k-one.{form}"], "unknown object|mixed"),
        "to before from": ([*names, f"{HALF + 9:020d}-{HALF:020d}.{form}"], "unknown object"),
        "a gap": ([n for n in names if n != names[1]], "gap in the chain"),
        "an overlap": ([*names, f"{first + 1:020d}-{last + 1:020d}.{form}"], "overlap"),
        "one twice": ([*names, f"{first:020d}-{last - 1:020d}.{form}"], "overlap"),
        "no beginning": (names[1:], "does not begin at"),
    }


@pytest.mark.parametrize("form", ["parquet", "ndjson"])
@pytest.mark.parametrize("case", broken(odd_rows(HALF), "parquet"))
@pytest.mark.mirror_v3("NAM-05")
def test_a_chain_that_is_broken_is_refused_by_name(form, case):
    """FS-06, FS-23, NAM-02, NAM-03, S3-06, CRY and KEY: encrypted objects are not read."""
    names, problem = broken(odd_rows(HALF), form)[case]
    store = MemoryStore()
    for name in names:
        store.objects[f"d/0/{name}"] = b""
    spec = archive_spec(format=form)
    with pytest.raises(CorruptionError, match=problem) as caught:
        read_chain(store, FLOW, spec)
    assert caught.value.facts["name"] in names
    report, objects = verify_names(store, FLOW, form, chain_start=None)
    assert (len(report.problems), objects) == (1, ())


def test_a_declared_beginning_is_accepted():
    rows = odd_rows(HALF)
    store = chain_of(rows, "ndjson", {})
    del store.objects[f"d/0/{name_of(cut(rows, 11)[0], 'ndjson')}"]
    start = cut(rows, 11)[1].first
    found = read_chain(store, FLOW, archive_spec(format="ndjson"), chain_start=start)
    assert found.next_offset == HALF


def test_what_it_leaves_behind_is_passed_over():
    """FS-05."""
    rows = odd_rows(HALF, text=True)
    store = chain_of(rows, "parquet", {})
    leftover = f"{HALF:020d}-{HALF + 9:020d}.parquet.tmp.0b6f1c8e-1a2b-4c3d-9e8f-001122334455"
    store.objects[f"d/0/{leftover}"] = b"half"
    spec = archive_spec()
    assert read_chain(store, FLOW, spec).next_offset == HALF
    continue_from(log_of(rows_for({"keys": "utf8"})[1]), store, spec)
    assert proof(store, spec).problems == []


# --- compact --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_compact_merges_its_objects_with_ours(form, options):
    before, after = rows_for(options)
    store, spec = chain_of(before, form, options, max_offsets=3), archive_spec(format=form)
    spec = archive_spec(format=form, max_offsets=5)
    log = log_of(after)
    continue_from(log, store, spec)
    objects = len(names_in(store))
    archive = Archive(
        store=store,
        folder="d/0",
        topic="t",
        extension=form,
        compression="zstd-1",
        utf8=False,
    )

    compact(
        archive,
        Limits(target_bytes=1 << 20, min_objects=2),
        start=0,
        writer_id="c",
        clock=SYSTEM_CLOCK,
    )

    assert len(names_in(store)) < objects / 3
    assert compare(after, rows_in(store, form)) == []
    reported = proof(store, spec)
    assert reported.problems == []
    assert reported.gap_counts[GapCause.UNRECORDED] == HALF - len(before)
    assert sum(reported.gap_counts.values()) == END - len(after)
    asked = proof(store, spec, log)
    assert asked.problems == []
    assert {c for c, n in asked.gap_counts.items() if n} == {GapCause.CONTROL}


# --- snapshots ------------------------------------------------------------------------------------


def table(count, *, first=0):
    """Records over a few keys; some delete theirs."""
    return [
        Row(n, 1000 + n, CREATE_TIME, b"key-%d" % (n % 7), None if n % 9 == 4 else b"v%d" % n)
        for n in range(first, first + count)
    ]


def snapshots_of(rows, kind, *, every=20):
    store = MemoryStore()
    for first in range(0, len(rows), every):
        seen = rows[: first + every]
        found = MirrorV3Object(first, seen[-1].offset, snapshot(seen))
        data = encode(found.rows, "t", 0, "parquet", keys=kind, values=kind)
        store.objects[f"d/0/{name_of(found, 'parquet')}"] = data
    return store


def view_in(store, name):
    return {
        row["key"]: (row["offset"], row["value"])
        for batch in iterate(store, "d/0", name)
        for row in batch.to_pylist()
    }


def view_of(rows):
    return {row.key: (row.offset, row.value) for row in snapshot(rows)}


@pytest.mark.parametrize("kind", ["utf8", "bytes", HEAD])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_newest_snapshot_rebuilds_the_state(kind, pruned):
    """FS-14, S3-08: also where the source has trimmed what is in it, and older ones are gone."""
    rows = table(80)
    store, spec = snapshots_of(rows[:60], kind), archive_spec(compaction="log")
    if pruned:
        del store.objects[names_of(store)[0]], store.objects[names_of(store)[0]]
    report = proof(store, spec)
    assert (report.problems, report.next_offset) == ([], 60)

    log = Log([one(row) for row in rows[60:]], log_start=60)
    continue_from(log, store, spec, configs=TABLE)

    newest = names_in(store)[-1]
    assert newest.startswith(f"{60:020d}-{79:020d}")
    assert view_in(store, newest) == view_of(rows)
    assert proof(store, spec).problems == []


def names_of(store):
    return sorted(name for name in store.objects if name.startswith("d/0/"))


def test_a_source_that_was_cleaned_since_is_read_from_its_start():
    """A tombstone may be among what the cleaner took, so the old state is not to be trusted."""
    rows = table(60)
    store, spec = snapshots_of(rows, "utf8"), archive_spec(compaction="log")
    kept = [*snapshot(rows)[2:], *table(1, first=75)]
    log = Log([one(row) for row in sorted(kept)])
    continue_from(log, store, spec, configs=TABLE)
    assert view_in(store, names_in(store)[-1]) == view_of(sorted(kept))
    assert proof(store, spec, log, compacted=True).problems == []


def test_its_snapshot_after_ours_is_continued_too():
    """A user who returns to mirror-v3 and then to logmirror. Both programs' are pruned."""
    rows = table(90)
    store, spec = MemoryStore(), archive_spec(compaction="log", keep_snapshots=1)
    continue_from(Log([one(row) for row in rows[:40]]), store, spec, configs=TABLE)
    found = MirrorV3Object(40, 59, snapshot(rows[:60]))
    store.objects[f"d/0/{name_of(found, 'parquet')}"] = encode(found.rows, "t", 0, "parquet")
    continue_from(Log([one(row) for row in rows]), store, spec, configs=TABLE)
    (name,) = names_in(store)
    assert view_in(store, name) == view_of(rows)


def test_an_object_of_all_records_is_no_snapshot_to_go_on_from():
    rows = table(60)
    store, spec = chain_of(rows, "parquet", {}, max_offsets=60), archive_spec(compaction="log")
    log = Log([one(row) for row in table(70)[60:]], log_start=60)
    with pytest.raises(CorruptionError, match="not one for each key"):
        continue_from(log, store, spec, configs=TABLE)
    assert names_in(store) == [name_of(MirrorV3Object(0, 59, rows), "parquet")]
