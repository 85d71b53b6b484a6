"""A record that is not of its column's type ends the copy before it, wherever copies go.

Of the checklist: RUN-16, ENC-07, ENC-12, CFG-15, FS-16, FS-17.

Method: scripted sources (kit.fakes.scripted) with one bad value among good ones, stores in memory
and a scripted cluster. What was published or appended must be all that stands before the value
(native: before its batch) and nothing else, however often it is tried, and with other writers.
"""

import io
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    InlineRunner,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
)
from kit.fakes.scripted_copies import World, value
from logmirror.archive.claims import Claim, claim_name, latest_claim
from logmirror.archive.object_check import check_object
from logmirror.archive.reader import iterate
from logmirror.errors import CorruptionError, UsageError
from logmirror.mirror.ports import FlowId, Slice, Work
from logmirror.model import ColumnTypes, OffsetRange, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.compression import Codec
from logmirror.wire.records import encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
FORMATS = ["native", "parquet", "ndjson"]
BAD = 17
CHECKED = {
    "utf8": ColumnTypes(value="utf8"),
    "json": ColumnTypes(value="json"),
    "json-parseable": ColumnTypes(value="json-parseable"),
}
GOOD = {"utf8": b"words", "json": b"no json", "json-parseable": b'{"a":[1]}'}
WRONG = {"utf8": b"\xff", "json": b"\xed\xa0\x80", "json-parseable": b'{"a":[1}'}


def log_with(kind, *bad, stop=40, size=5, **fields):
    """Batches of `size` records of which some are not of their type."""
    return Log(
        [
            encode_reference(
                [
                    record(n, value=(WRONG if n in bad else GOOD)[kind])
                    for n in range(at, at + size)
                ],
                **fields,
            )
            for at in range(0, stop, size)
        ]
    )


def slice_of(first, end, **fields):
    fields = {"compacted": False, "tail": Trigger.EXPLICIT, **fields}
    return Slice(flow=FLOW, topic_id=TOPIC_ID, first=first, end=end, **fields)


def copy(log, slice_, *, store=None, writer_id="w", **spec):
    store = MemoryStore() if store is None else store
    client = ScriptedClient([log])
    result = run_slice(client, store, slice_, archive_spec(**spec), writer_id=writer_id)
    assert store.staged == {} or slice_.staged
    return store, result


def ranges(result):
    return [(r.covered.first, r.covered.last) for r in result.receipts]


def published(store):
    """The ranges of the objects, each of which is sound."""
    names = sorted(n.rpartition("/")[2] for n in store.objects if n.startswith("d/0/"))
    for name in names:
        check_object(store, "d/0", name, deep=True, topic="t")
    return [tuple(map(int, name.partition(".")[0].split("-"))) for name in names]


def end_before(bad, kind):
    """Where the copy ends: native objects end with a batch of five."""
    return bad // 5 * 5 if kind == "native" else bad


@pytest.mark.mirror_v3("ENC-07")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", CHECKED)
def test_run_16_only_records_before_a_bad_value_are_written(kind, form):
    # The error names column and offset.
    log, types = log_with(kind, BAD), CHECKED[kind]
    store, result = copy(log, slice_of(0, 40), format=form, types=types)
    end = end_before(BAD, form)
    assert published(store) == ranges(result) == [(0, end - 1)]
    assert (type(result.error), result.next_offset) == (UsageError, end)
    facts = {"column": "value", "type": kind, "offset": BAD, "topic": "t", "partition": 0}
    assert result.error.facts.items() >= facts.items()

    # As often as it is tried.
    again, result = copy(log, slice_of(end, 40), store=store, format=form, types=types)
    assert published(again) == [(0, end - 1)]
    assert (ranges(result), result.error.facts["offset"]) == ([], BAD)

    # With a type that takes it, the copy resumes where it ended.
    store, result = copy(log, slice_of(end, 40), store=store, format=form)
    assert (published(store), result.error) == ([(0, end - 1), (end, 39)], None)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", CHECKED)
def test_good_values_and_nulls_are_copied_whole(kind, form):
    log = log_with(kind)
    log.batches.append(encode_reference([record(40, key=None, value=None)._replace(value=None)]))
    types = ColumnTypes(key="utf8", value=CHECKED[kind].value)
    store, result = copy(log, slice_of(0, 41), format=form, types=types)
    assert (published(store), result.error) == ([(0, 40)], None)


@pytest.mark.mirror_v3("ENC-12")
@pytest.mark.parametrize("form", FORMATS)
def test_a_bad_key_is_found_as_well(form):
    log = Log(batches(0, 10))
    log.batches.append(encode_reference([record(10, key=b"\x80"), record(11)]))
    _, result = copy(log, slice_of(0, 12), format=form, types=ColumnTypes(key="utf8"))
    assert ranges(result) == [(0, 9)]
    assert result.error.message == "a key is not UTF-8"
    assert (result.error.facts["column"], result.error.facts["offset"]) == ("key", 10)


@pytest.mark.parametrize("form", FORMATS)
def test_compressed_batches_are_checked(form):
    log = log_with("json-parseable", BAD, codec=Codec.ZSTD)
    _, result = copy(log, slice_of(0, 40), format=form, types=CHECKED["json-parseable"])
    assert ranges(result) == [(0, end_before(BAD, form) - 1)]


@pytest.mark.parametrize("form", FORMATS)
def test_invisible_records_are_not_checked(form):
    aborted = [record(5, value=b"\xff"), record(6, value=b"\xff")]
    fields = {"producer_id": 7, "producer_epoch": 0}
    log = Log(
        [
            *batches(0, 5),
            encode_reference(aborted, transactional=True, **fields),
            encode_marker(MarkerType.ABORT, offset=7, **fields),
            *batches(8, 12),
        ],
        aborted=((7, 5, 7),),
    )
    store, result = copy(log, slice_of(0, 12), format=form, types=CHECKED["utf8"])
    assert (published(store), result.error) == ([(0, 11)], None)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [0, 4, 5, 9, 10, 39])
@pytest.mark.parametrize("max_offsets", [3, 5, 10])
def test_objects_end_where_they_would_have_ended_and_once_more_before_the_value(
    form, bad, max_offsets
):
    log, options = log_with("utf8", bad), {"format": form, "max_offsets": max_offsets}
    store, result = copy(log, slice_of(0, 40), types=CHECKED["utf8"], **options)
    _, free = copy(log, slice_of(0, 40), **options)
    end = end_before(bad, form)
    cuts = [(first, min(last, end - 1)) for first, last in ranges(free) if first < end]
    assert published(store) == ranges(result) == cuts
    assert (result.error.facts["offset"], result.next_offset) == (bad, end)


@pytest.mark.parametrize("form", ["parquet", "ndjson"])
def test_a_gap_before_the_value_is_one_object(form):
    log = Log(
        [
            *batches(0, 5),
            encode_reference([record(30, value=b"\xff"), record(31)]),
            *batches(32, 36),
        ]
    )
    store, result = copy(
        log, slice_of(0, 36, compacted=True), format=form, max_offsets=10, types=CHECKED["utf8"]
    )
    assert published(store) == ranges(result) == [(0, 29)]
    assert [r.record_count for r in result.receipts] == [5]
    assert result.error.facts["offset"] == 30


@pytest.mark.parametrize("form", FORMATS)
def test_a_claimed_range_that_holds_the_value_stays_unfinished(form):
    store = MemoryStore()
    claim = Claim(
        covered=OffsetRange(first=0, last=29),
        digest="xxh3:" + "0" * 32,
        writer="other",
        topic="t",
        topic_id=TOPIC_ID.hex(),
        partition=0,
        created_ms=0,
        record_count=30,
        trigger=Trigger.MAX_BYTES,
    )
    store.create(claim_name("d", 0, 0), claim.to_bytes())
    log, types = log_with("utf8", BAD), CHECKED["utf8"]
    store, result = copy(log, slice_of(0, 40), store=store, format=form, types=types)
    assert (published(store), ranges(result)) == ([], [])
    assert result.error.facts["offset"] == BAD


@pytest.mark.parametrize("form", FORMATS)
def test_a_slice_with_a_small_budget_comes_to_the_value_in_a_later_one(form):
    log, position, seen = log_with("utf8", 27), 0, []
    store = MemoryStore()
    while True:
        slice_ = slice_of(position, 40, budget_bytes=1)
        _, result = copy(
            log, slice_, store=store, format=form, max_offsets=5, types=CHECKED["utf8"]
        )
        seen += ranges(result)
        position = result.next_offset
        if result.error:
            break
    assert seen == published(store)
    assert all(one[1] + 1 == other[0] for one, other in pairwise(seen))
    assert seen[-1][1] == end_before(27, form) - 1


@pytest.mark.parametrize("form", FORMATS)
def test_a_staged_slice_stages_what_stands_before_the_value(form):
    slice_ = slice_of(10, 40, staged=True)
    log, types = log_with("utf8", BAD), CHECKED["utf8"]
    store, result = copy(log, slice_, format=form, types=types)
    assert published(store) == []
    assert ranges(result) == [(10, end_before(BAD, form) - 1)]
    assert result.receipts[0].token in store.staged
    assert result.error.facts["offset"] == BAD


def test_mirrors_with_other_types_read_together_and_each_ends_by_its_own():
    log = log_with("json-parseable", 22, stop=60)
    log.batches[6] = encode_reference([record(n, value=b"\xff") for n in range(30, 35)])
    works = [
        Work(
            slice=Slice(
                flow=FlowId(mirror=f"m{n}", destination=f"d{n}", topic="t", partition=0),
                topic_id=TOPIC_ID,
                compacted=False,
                first=0,
                end=60,
                tail=Trigger.EXPLICIT,
            ),
            source=None,
            destination=archive_spec(format=form, types=ColumnTypes(value=kind)),
            writer_id="w",
            estimated_bytes=1,
        )
        for n, (form, kind) in enumerate(
            [
                *(("parquet", "bytes"), ("parquet", "utf8"), ("parquet", "json-parseable")),
                *(("native", "json-parseable"), ("native", "bytes"), ("ndjson", "utf8")),
            ]
        )
    ]
    client = ScriptedClient([log])
    runner = InlineRunner(client, MemoryStore())
    results = {r.slice.flow.destination: r for r in runner.run(works)}
    assert [ranges(results[f"d{n}"])[-1][1] for n in range(6)] == [59, 29, 21, 19, 59, 29]
    assert [bool(results[f"d{n}"].error) for n in range(6)] == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    alone = ScriptedClient([log])
    InlineRunner(alone, MemoryStore()).run(works[:1])
    assert client.fetches == alone.fetches


@pytest.mark.parametrize("second", ["utf8", "json"])
@pytest.mark.parametrize("first", ["bytes", "utf8"])
def test_of_two_writers_with_other_types_one_publishes(first, second):
    log, store = log_with("json"), MemoryStore()
    _, one = copy(log, slice_of(0, 40), store=store, types=ColumnTypes(value=first))
    before = dict(store.objects)
    _, other = copy(
        log, slice_of(0, 40), store=store, writer_id="v", types=ColumnTypes(value=second)
    )
    assert store.objects == before
    assert [r.digest for r in one.receipts] == [r.digest for r in other.receipts]
    assert [(r.existed, r.claimed_by) for r in other.receipts] == [(True, "w")]


def test_a_claim_is_carried_out_by_a_writer_with_other_types():
    log, store = log_with("json"), MemoryStore()
    copy(log, slice_of(0, 40), store=store)
    claim = latest_claim(store, "d", 0)
    (name,) = (n for n in store.objects if n.startswith("d/0/"))
    del store.objects[name]  # as if its maker had died before it published

    _, result = copy(log, slice_of(0, 40), store=store, types=CHECKED["json"], writer_id="v")

    assert (result.error, published(store)) == (None, [(0, 39)])
    assert result.receipts[0].digest == claim.digest
    schema = pq.read_schema(io.BytesIO(store.objects[name]))
    assert str(pq.ParquetFile(io.BytesIO(store.objects[name])).schema.column(1).logical_type) == (
        "String"
    )
    assert schema.names[1] == "value"


def test_a_chain_may_change_its_types_from_one_object_to_the_next():
    log, store = log_with("json-parseable"), MemoryStore()
    for first, kind in ((0, "bytes"), (10, "utf8"), (20, "json"), (30, "json-parseable")):
        copy(log, slice_of(first, first + 10), store=store, types=ColumnTypes(value=kind))
    assert published(store) == [(0, 9), (10, 19), (20, 29), (30, 39)]
    names = sorted(n.rpartition("/")[2] for n in store.objects if n.startswith("d/0/"))
    rows = [
        row for name in names for batch in iterate(store, "d/0", name) for row in batch.to_pylist()
    ]
    assert [(row["offset"], row["value"]) for row in rows] == [
        (n, GOOD["json-parseable"]) for n in range(40)
    ]


# -- snapshots -------------------------------------------------------------------------------------


def snapshot(log, slice_, store, **types):
    return copy(log, slice_, store=store, compaction="log", types=ColumnTypes(**types))[1]


def table_of(*rows):
    return Log([encode_reference([record(n, key=key, value=v)]) for n, (key, v) in enumerate(rows)])


@pytest.mark.parametrize("kind", ["bytes", "utf8", "json", "json-parseable"])
def test_cfg_15_snapshots_take_keys_of_any_type(kind):
    log, store = table_of((b'"b"', b"1"), (b'"a"', b"2"), (b'"b"', b"3")), MemoryStore()
    result = snapshot(log, slice_of(0, 3, rebuild=True), store, key=kind, value="utf8")
    assert (result.error, ranges(result), published(store)) == (None, [(0, 2)], [(0, 2)])
    log.batches.append(encode_reference([record(3, key=b'"c"', value=b"4")]))
    assert ranges(snapshot(log, slice_of(3, 4), store, key=kind, value="utf8")) == [(3, 3)]
    (newest,) = (n for n in store.objects if n.startswith("d/0/") and n.endswith("3.parquet"))
    rows = [r for b in iterate(store, "d/0", newest.rpartition("/")[2]) for r in b.to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [
        (b'"a"', b"2"),
        (b'"b"', b"3"),
        (b'"c"', b"4"),
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"\xff", "a key is not UTF-8"),
        (None, "a record without a key cannot be in a snapshot of keys"),
    ],
)
def test_fs_16_fs_17_a_key_that_is_null_or_no_text_is_refused(key, message):
    log, store = table_of((b"a", b"1"), (b"b", b"2")), MemoryStore()
    log.batches.append(encode_reference([record(2)._replace(key=key)]))
    result = snapshot(log, slice_of(0, 3, rebuild=True), store, key="utf8")
    assert (result.error.message, result.error.facts["offset"]) == (message, 2)
    assert (ranges(result), published(store)) == ([], [])


def test_a_snapshot_does_not_merge_records_of_the_wrong_type():
    log, store = table_of((b"a", b"\xff"), (b"b", b"2")), MemoryStore()
    snapshot(log, slice_of(0, 2, rebuild=True), store)
    log.batches.append(encode_reference([record(2, key=b"c", value=b"3")]))
    result = snapshot(log, slice_of(2, 3), store, value="utf8")
    assert (result.error.facts["column"], result.error.facts["offset"]) == ("value", 0)
    assert published(store) == [(0, 1)]
    # Overwritten since, it does not matter any more.
    log.batches.append(encode_reference([record(3, key=b"a", value=b"4")]))
    assert ranges(snapshot(log, slice_of(2, 4), store, value="utf8")) == [(2, 3)]


def test_a_snapshot_stops_at_a_bad_record_also_when_it_was_overwritten():
    log, store = table_of((b"a", b"1"), (b"a", b"\xff"), (b"a", b"2")), MemoryStore()
    result = snapshot(log, slice_of(0, 3, rebuild=True), store, value="utf8")
    assert (result.error.facts["offset"], published(store)) == (1, [])


# -- clusters --------------------------------------------------------------------------------------


def test_run_16_a_cluster_receives_only_records_before_a_bad_value():
    log = Log(batches(0, 40))
    log.batches[3] = encode_reference(
        [record(n, value=b"\xff" if n == BAD else None) for n in range(15, 20)]
    )
    world = World(log)
    for first, appended in ((0, BAD), (BAD, BAD)):
        (result,) = world.run(first, types=CHECKED["utf8"])
        assert world.destination.values() == [(n, value(n)) for n in range(appended)]
        assert (type(result.error), result.next_offset) == (UsageError, BAD)
        facts = {"column": "value", "type": "utf8", "offset": BAD, "topic": "t", "partition": 0}
        assert result.error.facts.items() >= facts.items()
        assert result.error.facts["target_topic"] == "copy"
    (result,) = world.run(BAD)
    assert (result.error, result.next_offset) == (None, 40)


def test_gaps_before_a_bad_value_are_kept_and_none_behind_it():
    log = Log(
        [
            *batches(0, 5),
            encode_reference([record(5), record(8), record(12, value=b"\xff"), record(14)]),
            *batches(20, 25),
        ]
    )
    world = World(log)
    (result,) = world.run(compacted=True, types=CHECKED["utf8"])
    assert [n for n, _ in world.destination.values()] == [0, 1, 2, 3, 4, 5, 8]
    assert world.gap_writer.filled == [(0, 6, 8), (0, 9, 12)]
    assert (result.error.facts["offset"], result.next_offset) == (12, 12)


def test_a_flow_with_a_bad_value_does_not_affect_others():
    bad = Log(batches(0, 20))
    bad.batches[1] = encode_reference([record(n, value=b"\xff") for n in range(5, 10)])
    world = World(bad, Log(batches(0, 20)))
    refused, whole = world.run(types=CHECKED["utf8"])
    assert (refused.next_offset, refused.error.facts["offset"]) == (5, 5)
    assert (whole.next_offset, whole.error) == (20, None)


def test_undecodable_batches_are_not_copied_if_types_are_checked():
    log = Log(batches(0, 10))
    broken = encode_reference([record(10)], attribute_bits=4)  # says zstd, and is not
    log.batches.append(broken)
    (result,) = World(log).run(types=CHECKED["utf8"])
    assert isinstance(result.error, CorruptionError)
    _, result = copy(log, slice_of(0, 11), format="native", types=CHECKED["utf8"])
    assert isinstance(result.error, CorruptionError)
