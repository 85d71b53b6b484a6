"""Columns convert to Arrow without a change, and their digest depends only on the records.

Method: decoded columns, and any slice of them, are compared as Python objects with the records and
validated by Arrow; digests over every way to cut, over Arrow, over a Parquet file and back.
"""

import io
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import OFFSET_END, records, relaxed, runs_of_batches
from logmirror.errors import UsageError
from logmirror.model import TimestampType
from logmirror.wire.columns import SCHEMA, ContentDigest
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner


def columns_of(data):
    """The columns of all records at once; None if there is no record."""
    listed = BatchScanner().scan(data, len(data))
    return next(RecordDecoder(1 << 20).decode(data, listed, first=0, end=OFFSET_END), None)


def objects_of(batch):
    """An Arrow batch as records; timestamps as numbers, since datetime holds fewer years."""
    columns = [
        batch["offset"].to_pylist(),
        batch["timestamp"].cast(pa.int64()).to_pylist(),
        [TimestampType(kind) for kind in batch["timestampType"].to_pylist()],
        batch["key"].to_pylist(),
        batch["value"].to_pylist(),
        [
            tuple((pair["key"].encode(), pair["value"]) for pair in pairs)
            for pairs in batch["headers"].to_pylist()
        ],
    ]
    return [Record(*row) for row in zip(*columns, strict=True)]


def test_the_schema_is_that_of_spark_s_kafka_source():
    assert [(field.name, str(field.type)) for field in SCHEMA] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int32"),
        ("offset", "int64"),
        ("timestamp", "timestamp[ms, tz=UTC]"),
        ("timestampType", "int32"),
        ("headers", "list<item: struct<key: string, value: binary>>"),
    ]


@relaxed
@given(runs_of_batches(), st.data())
def test_any_slice_becomes_arrow_unchanged(drawn, data):
    batches, rows = drawn
    columns = columns_of(batches)
    if columns is None:
        return
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    for low, high in ((0, None), (start, stop)):
        batch = columns.to_arrow("orders", 3, low, high)
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
        assert objects_of(batch) == rows[low:high]
        assert set(batch["topic"].to_pylist()) <= {"orders"}
        assert set(batch["partition"].to_pylist()) <= {3}
        assert batch["headers"].null_count == 0


def test_topic_and_partition_follow_the_call_and_not_the_one_before():
    columns = columns_of(encode_reference([Record(i, 0, 0, None, None, ()) for i in range(5)]))
    for topic, partition, stop in (("a", 1, 2), ("a", 1, 5), ("a", 2, 5), ("b", 2, 1)):
        batch = columns.to_arrow(topic, partition, 0, stop)
        assert batch["topic"].to_pylist() == [topic] * stop
        assert batch["partition"].to_pylist() == [partition] * stop


@relaxed
@given(runs_of_batches())
def test_lengths_and_payload_are_those_of_the_records(drawn):
    data, rows = drawn
    columns = columns_of(data)
    if columns is None:
        return
    assert columns.rows == len(rows)
    assert columns.key_lengths.tolist() == [-1 if r.key is None else len(r.key) for r in rows]
    assert columns.value_lengths.tolist() == [-1 if r.value is None else len(r.value) for r in rows]
    assert columns.payload_bytes.tolist() == [
        len(r.key or b"") + len(r.value or b"") + sum(len(k) + len(v or b"") for k, v in r.headers)
        for r in rows
    ]
    assert columns.payload_bytes.dtype == np.int64


def test_a_header_key_that_is_no_text_is_named_with_its_offset():
    good = Record(7, 0, TimestampType.CREATE_TIME, b"", b"", (("schlüssel".encode(), b"x"),))
    # Split inside of a character, the keys together would be valid text.
    bad = good._replace(offset=9, headers=((b"ok", None), (b"\xc3", None), (b"\xbc", None)))
    columns = columns_of(encode_reference([good, bad]))
    assert columns.to_arrow("orders", 3, 0, 1).num_rows == 1
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        columns.to_arrow("orders", 3)
    assert caught.value.facts == {
        "topic": "orders",
        "partition": 3,
        "offset": 9,
        "key": b"\xc3",
    }
    assert "native" in caught.value.hint


@relaxed
@given(runs_of_batches(), st.data())
def test_a_digest_does_not_know_where_pieces_end(drawn, data):
    batches, rows = drawn
    columns = columns_of(batches)
    if columns is None:
        return
    n = len(rows)
    whole = ContentDigest()
    whole.update(columns, 0, n)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    edges = list(zip([0, *cuts], [*cuts, n], strict=True))

    pieces, arrow, sliced = ContentDigest(), ContentDigest(), ContentDigest()
    for low, high in edges:
        pieces.update(columns, low, high)
        arrow.update_arrow(columns.to_arrow("t", 0, low, high))
        sliced.update_arrow(columns.to_arrow("t", 0).slice(low, high - low))

    assert pieces.hexdigest() == arrow.hexdigest() == sliced.hexdigest() == whole.hexdigest()
    assert whole.hexdigest().startswith("xxh3:")
    assert len(whole.hexdigest()) == len("xxh3:") + 32


@relaxed
@given(records(max_size=20))
def test_a_digest_survives_parquet_in_small_row_groups(rows):
    columns = columns_of(encode_reference(rows, base_offset=0))
    if columns is None:
        return
    written, read = ContentDigest(), ContentDigest()
    written.update(columns, 0, columns.rows)
    file = io.BytesIO()
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        writer.write_batch(columns.to_arrow("t", 0), row_group_size=3)
    for batch in pq.ParquetFile(file).iter_batches(batch_size=2):
        read.update_arrow(batch)
    assert read.hexdigest() == written.hexdigest()


BASE = Record(5, 1000, TimestampType.CREATE_TIME, b"key", b"value", ((b"h", b"1"), (b"i", b"2")))
OTHERS = {
    "offset": BASE._replace(offset=6),
    "timestamp": BASE._replace(timestamp_ms=1001),
    "key null": BASE._replace(key=None),
    "key empty": BASE._replace(key=b""),
    "value": BASE._replace(value=b"valuf"),
    "value null": BASE._replace(value=None),
    "key and value shifted": BASE._replace(key=b"keyv", value=b"alue"),
    "headers swapped": BASE._replace(headers=BASE.headers[::-1]),
    "header gone": BASE._replace(headers=BASE.headers[:1]),
    "header value null": BASE._replace(headers=((b"h", b"1"), (b"i", None))),
    "header value empty": BASE._replace(headers=((b"h", b"1"), (b"i", b""))),
    "header bytes shifted": BASE._replace(headers=((b"h1", b""), (b"i", b"2"))),
    "headers without any": BASE._replace(headers=()),
}


def digest_of(rows, **options):
    columns, digest = columns_of(encode_reference(rows, **options)), ContentDigest()
    digest.update(columns, 0, columns.rows)
    return digest.hexdigest()


def test_every_difference_shows_in_the_digest():
    digests = [digest_of([BASE]), *(digest_of([other]) for other in OTHERS.values())]
    digests.append(digest_of([BASE], timestamp_type=TimestampType.LOG_APPEND_TIME))
    digests.append(digest_of([BASE, BASE._replace(offset=6)]))
    digests.append(ContentDigest().hexdigest())
    assert len(set(digests)) == len(digests)


def test_a_header_moved_to_the_next_record_shows_in_the_digest():
    bare = BASE._replace(offset=6, headers=())
    moved = [BASE._replace(headers=BASE.headers[:1]), bare._replace(headers=BASE.headers[1:])]
    assert digest_of([BASE, bare]) != digest_of(moved)


def test_the_digest_of_a_known_record_never_changes():
    """It is kept in archives: a new result here is a new format."""
    null = Record(2**40, -1, TimestampType.CREATE_TIME, None, None, ())
    streams = [
        struct.pack("<qq", 5, 2**40),
        struct.pack("<qq", 1000, -1),
        struct.pack("<ii", 0, 0),
        struct.pack("<ii", 3, -1),
        b"key",
        struct.pack("<ii", 5, -1),
        b"value",
        struct.pack("<ii", 2, 0),
        struct.pack("<ii", 1, 1),
        b"hi",
        struct.pack("<ii", 1, 1),
        b"12",
    ]
    joined = b"".join(xxhash.xxh3_128(stream).digest() for stream in streams)
    expected = xxhash.xxh3_128(joined).hexdigest()
    # In two batches: offsets of one batch cannot lie this far apart.
    columns, digest = columns_of(encode_reference([BASE])), ContentDigest()
    digest.update(columns, 0, 1)
    digest.update(columns_of(encode_reference([null])), 0, 1)
    assert digest.hexdigest() == f"xxh3:{expected}"
    assert digest_of([BASE]) == "xxh3:dec6acb453f65ea1f65c3f755a746712"


def test_bytes_that_arrow_hides_behind_a_null_do_not_count():
    columns = columns_of(encode_reference([BASE._replace(key=None), BASE._replace(offset=6)]))
    plain, hidden = ContentDigest(), ContentDigest()
    plain.update(columns, 0, 2)
    batch = columns.to_arrow("t", 0)
    validity, offsets = pa.py_buffer(bytes([2])), pa.py_buffer(np.array([0, 6, 9], np.int32))
    keys = pa.Array.from_buffers(pa.binary(), 2, [validity, offsets, pa.py_buffer(b"hiddenkey")])
    hidden.update_arrow(batch.set_column(0, SCHEMA.field(0), keys))
    assert hidden.hexdigest() == plain.hexdigest()


def test_text_columns_have_the_digest_of_their_bytes():
    columns = columns_of(encode_reference([BASE, BASE._replace(offset=6, key=None)]))
    binary, text = ContentDigest(), ContentDigest()
    batch = columns.to_arrow("t", 0)
    binary.update_arrow(batch)
    for index, kind in ((0, pa.string()), (1, pa.large_string())):
        batch = batch.set_column(index, batch.schema.names[index], batch.column(index).cast(kind))
    text.update_arrow(batch)
    assert text.hexdigest() == binary.hexdigest()
