"""Objects of mirror-v3 are read completely, in each layout, and damaged ones are found.

Method: `kit.runs.mirror_v3_archive` writes objects from the description of the formats, without
code of the product; rows are read back through the product's one reader and must be the written
ones. Then objects are broken in each way that the format can be wrong. Covers ENC-01..03, ENC-10
and ENC-11 of mirror-v3's own list, for reading.
"""

import base64
import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.judges.clients import CREATE_TIME, LOG_APPEND_TIME, Row
from kit.runs.mirror_v3_archive import (
    COMPRESSIONS,
    HEAD,
    TYPES,
    MirrorV3Object,
    encode,
    name_of,
    odd_rows,
    snapshot,
)
from logmirror.archive import parquet
from logmirror.archive.claims import Claim, claim_name
from logmirror.archive.mirror_v3 import converter
from logmirror.archive.naming import parse_name
from logmirror.archive.object_check import check_object
from logmirror.archive.reader import iterate
from logmirror.errors import CorruptionError
from logmirror.model import Gap, GapCause, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.columns import SCHEMA

FOLDER, TOPIC, PARTITION = "orders/3", "orders größe", 3
LAYOUTS = [("ndjson", {})] + [
    ("parquet", {"keys": keys, "values": values})
    for keys, values in [(kind, kind) for kind in TYPES] + [("utf8", "bytes"), ("bytes", "json")]
]
ALL_BEFORE = 2**63


def rows_for(form, options, **more):
    text = form == "parquet" and not {"bytes", HEAD}.issuperset(options.values())
    return odd_rows(40, first=100, text=text, **more)


def object_of(rows, form="parquet", *, first=100, **options):
    found = MirrorV3Object(first, rows[-1].offset, rows)
    return name_of(found, form), encode(rows, TOPIC, PARTITION, form, **options)


def store_of(name, data):
    store = MemoryStore()
    store.objects[f"{FOLDER}/{name}"] = data
    return store


def read(name, data):
    return [row for batch in iterate(store_of(name, data), FOLDER, name) for row in rows_of(batch)]


def rows_of(batch):
    assert batch.schema.equals(SCHEMA)
    batch.validate(full=True)
    stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
    for found, stamp in zip(batch.to_pylist(), stamps, strict=True):
        assert (found["topic"], found["partition"]) == (TOPIC, PARTITION)
        headers = tuple((h["key"].encode(), h["value"]) for h in found["headers"])
        yield Row(
            found["offset"], stamp, found["timestampType"], found["key"], found["value"], headers
        )


def check(name, data, **options):
    options = {"deep": True, "mirror_v3_before": ALL_BEFORE, **options}
    return check_object(store_of(name, data), FOLDER, name, **options)


def refused(name, data, **options):
    with pytest.raises(CorruptionError) as caught:
        check(name, data, **options)
    assert caught.value.facts["name"].endswith(name)
    return caught.value


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_every_field_comes_back(form, options):
    """ENC-01, ENC-02, ENC-10, ENC-11."""
    rows = rows_for(form, options)
    name, data = object_of(rows, form, **options)

    assert read(name, data) == rows

    kinds = {(row.timestamp_ms == -1, row.timestamp_type) for row in rows}
    assert kinds == {(True, CREATE_TIME), (False, CREATE_TIME), (False, LOG_APPEND_TIME)}
    assert {None, b""} <= {row.key for row in rows} & {row.value for row in rows}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_compression_is_read(compression):
    """ENC-03."""
    rows = odd_rows(40)
    name, data = object_of(rows, first=0, keys="bytes", values="bytes", compression=compression)
    assert read(name, data) == rows


def test_the_deprecated_code_of_lz4_is_read():
    """ENC-03: its `lz4` has another number in the file than ours."""
    rows = odd_rows(40)
    name, data = object_of(rows, first=0, keys=HEAD, values=HEAD, compression="lz4")
    ours, theirs = (
        b"\x15" + bytes([2 * code]) + b"\x16" for code in (7, 5)
    )  # Thrift: LZ4_RAW, LZ4
    assert data.count(ours) == 9
    data = data.replace(ours, theirs)
    assert read(name, data) == rows


def test_a_file_is_read_in_pieces_of_bounded_size(monkeypatch):
    rows = odd_rows(600, first=100)
    name, data = object_of(rows, keys="bytes", values="bytes")
    whole = [len(batch) for batch in iterate(store_of(name, data), FOLDER, name)]
    monkeypatch.setattr(parquet, "_MIRROR_V3_BYTES", 1000)
    pieces = [len(batch) for batch in iterate(store_of(name, data), FOLDER, name)]
    assert len(whole) == 1
    assert len(pieces) > 10
    assert read(name, data) == rows


def test_a_file_without_rows_is_none_of_its_own():
    name = name_of(MirrorV3Object(0, 4, []), "parquet")
    assert (
        "end at the last offset of its name"
        in refused(name, encode([], TOPIC, 3, "parquet")).message
    )


def test_other_columns_are_nobodys():
    name, data = object_of(odd_rows(5, first=100, text=True))
    table = pq.read_table(io.BytesIO(data))
    for changed in (
        table.drop_columns(["headers"]),
        table.append_column("more", pa.array([1] * len(table))),
        table.rename_columns(["t", *table.column_names[1:]]),
        with_column(table, "offset", pa.int64()),
        with_column(table, "timestamp_ms", pa.int32()),
        with_column(table, "key", pa.string(), extension="somebody.else"),
        with_column(table, "key", pa.large_string(), extension="mirror_v3.bytes_base64"),
    ):
        assert converter(changed.schema) is None
        assert "columns" in refused(name, as_parquet(changed)).message


def with_column(table, name, kind, *, values=None, extension=""):
    index = table.schema.get_field_index(name)
    metadata = {"ARROW:extension:name": extension} if extension else None
    if values is None:
        values = pa.array([0 if pa.types.is_integer(kind) else None] * len(table), kind)
    return table.set_column(index, pa.field(name, kind, metadata=metadata), values)


def as_parquet(table):
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


# --- base64 ---------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=30), st.data())
def test_base64_is_what_the_standard_library_makes_of_it(payloads, data):
    rows = [Row(n, 1, CREATE_TIME, None, value) for n, value in enumerate(payloads)]
    name, written = object_of(rows, first=0, values="bytes")
    assert [row.value for row in read(name, written)] == payloads
    table = pq.read_table(io.BytesIO(written))
    start = data.draw(st.integers(0, len(rows) - 1))  # a part of an array, whose buffers are whole
    (batch, *_) = table.to_batches()
    part = converter(table.schema)(batch.slice(start))
    assert part.column("value").to_pylist() == payloads[start:]


BAD_BASE64 = {
    "no padding": "YWI",
    "padding alone": "====",
    "too much padding": "Y===",
    "padding inside": "YQ==YQ==",
    "one padding inside": "YWI=YWJj",
    "padding before the end": "Y=Jj",
    "bits behind the end": "YR==",
    "bits behind the end of two": "YWJ=",
    "a space": "YW J",
    "a line feed": "YWJ\n",
    "of URLs": "_-8=",
    "not ASCII": "Yé=",
}


@pytest.mark.parametrize("bad", BAD_BASE64.values(), ids=BAD_BASE64)
@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("column", ["key", "value"])
def test_base64_that_no_encoder_writes_is_named_with_its_offset(column, at, bad):
    texts = ["", None, "YWJj", "YQ==", "", "YWI=", None]
    texts[at] = bad
    rows = [Row(100 + n, 1, CREATE_TIME, None, None) for n in range(len(texts))]
    name, data = object_of(rows, keys="bytes", values="bytes")
    table = pq.read_table(io.BytesIO(data))
    field = table.schema.field(column)
    table = table.set_column(table.schema.get_field_index(column), field, pa.array(texts))
    error = refused(name, as_parquet(table))
    assert (error.facts["offset"], error.facts["column"]) == (100 + at, column)


def test_every_pair_of_characters_is_judged_as_the_standard_library_does():
    chooser = random.Random(64)
    alphabet = [chr(n) for n in range(1, 127)] + ["é"]
    texts = ["".join(chooser.choices(alphabet, k=4)) for _ in range(300)]
    texts += ["".join(chooser.choices("AQgw=+/", k=4)) for _ in range(700)]
    for text in texts:
        try:
            expected = base64.b64decode(text, validate=True)
        except ValueError:
            expected = None
        is_canonical = expected is not None and base64.b64encode(expected).decode() == text
        row = [Row(0, 1, CREATE_TIME, None, b"x")]
        table = pq.read_table(io.BytesIO(object_of(row, first=0, values="bytes")[1]))
        field = table.schema.field("value")
        table = table.set_column(6, field, pa.array([text]))
        (batch,) = table.to_batches()
        convert = converter(table.schema)
        if is_canonical:
            assert convert(batch).column("value").to_pylist() == [expected]
        else:
            with pytest.raises(CorruptionError):
                convert(batch)


# --- what is wrong --------------------------------------------------------------------------------


def test_timestamps_of_unknown_or_contradicting_type_are_found():
    rows = odd_rows(20, first=100, text=True, gaps=False)
    name, data = object_of(rows)
    table = pq.read_table(io.BytesIO(data))
    types = table.column("timestamp_type").to_pylist()
    for value, problem in (
        ("sometime", "unknown timestamp type"),
        ("not_available", "type not_available"),
    ):
        at = next(n for n, row in enumerate(rows) if n > 3 and row.timestamp_ms != -1)
        changed = pa.array([*types[:at], value, *types[at + 1 :]])
        found = refused(
            name, as_parquet(with_column(table, "timestamp_type", pa.string(), values=changed))
        )
        assert problem in found.message
        assert found.facts["offset"] == rows[at].offset


def test_nulls_and_offsets_beyond_kafkas_are_found():
    name, data = object_of(odd_rows(3, first=100, text=True, gaps=False))
    table = pq.read_table(io.BytesIO(data))
    for column in ("topic", "partition", "offset", "timestamp_type", "headers"):
        kind = table.schema.field(column).type
        nulls = pa.array([None, *table.column(column).to_pylist()[1:]], kind)
        found = refused(name, as_parquet(with_column(table, column, kind, values=nulls)))
        assert (found.message, found.facts["column"]) == ("null in a column without nulls", column)
    huge = pa.array([100, 101, 2**63], pa.uint64())
    found = refused(name, as_parquet(with_column(table, "offset", pa.uint64(), values=huge)))
    assert "exceeds 2^63" in found.message


LIES = {
    "a row less at the end": lambda rows: rows[:-1],
    "two rows swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
    "a row twice": lambda rows: [*rows, rows[-1]],
    "an offset below": lambda rows: [rows[0]._replace(offset=99), *rows[1:]],
    "an offset beyond": lambda rows: [*rows[:-1], rows[-1]._replace(offset=9999)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize(("form", "options"), LAYOUTS[:3], ids=str)
def test_rows_that_are_not_those_of_the_name_are_found(form, options, lie):
    """NAM-01: the name gives the range; here the content contradicts it."""
    rows = rows_for(form, options, gaps=False)
    name, _ = object_of(rows, form, **options)
    data = encode(lie(rows), TOPIC, PARTITION, form, **options)
    if form == "ndjson" and lie is LIES["a row less at the end"]:
        # Its lines are like logmirror's, which may end in a gap: reported, the caller decides.
        assert check(name, data).gaps.unexplained_count == 1
    else:
        refused(name, data)


@pytest.mark.parametrize(("form", "options"), LAYOUTS[:3], ids=str)
def test_another_partition_or_topic_is_found(form, options):
    rows = rows_for(form, options)
    name, _ = object_of(rows, form, **options)
    refused(name, encode(rows, TOPIC, 4, form, **options))
    refused(name, encode(rows, "other", PARTITION, form, **options), topic=TOPIC)


@pytest.mark.parametrize("extension", ["parquet", "ndjson"])
def test_a_cut_object_is_found_at_every_length(extension):
    rows = odd_rows(6, first=100, text=True, gaps=False)
    name, data = object_of(rows, extension)
    for size in range(0, len(data), 1 if extension == "ndjson" else 7):
        ends_in_a_line = data[:size].endswith(b"\n") or not size
        if extension == "ndjson" and ends_in_a_line:
            assert check(name, data[:size]).gaps.unexplained_count
        else:
            refused(name, data[:size])


def test_a_timestamp_that_its_line_denies_is_found():
    rows = odd_rows(5, first=100, gaps=False)
    name, data = object_of(rows, "ndjson")
    assert b"not_available" in data
    refused(
        name, data.replace(b'"timestamp_type":"create_time"', b'"timestamp_type":"not_available"')
    )
    refused(name, data.replace(b"not_available", b"unknown"))


# --- what is not recorded -------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "options"), LAYOUTS, ids=str)
def test_gaps_have_no_cause_and_are_no_finding(form, options):
    rows = rows_for(form, options)
    report = check(*object_of(rows, form, **options))

    missing = sorted(set(range(100, 140)) - {row.offset for row in rows})
    assert len(missing) == 8
    assert report.record_count == len(rows)
    assert report.gaps.counts == {GapCause.UNRECORDED: len(missing)}
    assert report.gaps.runs == tuple(
        Gap(first=n, last=n, cause=GapCause.UNRECORDED) for n in missing
    )
    assert report.gaps.unexplained_count == 0
    assert not report.is_witnessed
    assert report.metadata is None


def test_lines_are_its_own_only_below_our_first_claim():
    """logmirror's objects have a claim; without it the causes of gaps are lost, not unrecorded."""
    rows = odd_rows(40, first=100)
    name, data = object_of(rows, "ndjson")
    assert check(name, data, mirror_v3_before=101).gaps.unexplained_count == 0
    assert check(name, data, mirror_v3_before=100).gaps.unexplained_count == 8


def test_a_claim_for_such_an_object_means_that_it_was_changed():
    rows = odd_rows(40, first=100, text=True)
    name, data = object_of(rows)
    store, covered = store_of(name, data), parse_name(name)[0]
    claim = Claim(
        covered=covered,
        digest="xxh3:" + "0" * 32,
        writer="w",
        topic=TOPIC,
        topic_id="",
        partition=3,
        created_ms=0,
        record_count=40,
        trigger=Trigger.MAX_TIME,
    )
    store.create(claim_name("orders", 3, 100), claim.to_bytes())
    with pytest.raises(CorruptionError, match="no logmirror metadata"):
        check_object(store, FOLDER, name, deep=True)


# --- snapshots ------------------------------------------------------------------------------------


def keyed(count):
    return [
        Row(n, n, CREATE_TIME, b"k%d" % (n % 7), None if n % 11 == 3 else b"v%d" % n)
        for n in range(count)
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_a_snapshot_is_checked_as_one_where_the_configuration_says_so(kind):
    rows = snapshot(keyed(50))
    name = name_of(MirrorV3Object(40, 49, rows), "parquet")
    data = encode(rows, TOPIC, PARTITION, "parquet", keys=kind, values=kind)

    report = check(name, data, snapshots=True)

    assert report.record_count == len(rows)
    assert report.gaps.offset_count == 0
    refused(name, data)  # as an object of all records it is none
    for lie in (rows[::-1], [*rows, rows[-1]], [rows[0]._replace(offset=50), *rows[1:]]):
        lying = encode(lie, TOPIC, PARTITION, "parquet", keys=kind, values=kind)
        refused(name, lying, snapshots=True)
