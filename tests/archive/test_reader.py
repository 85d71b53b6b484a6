"""An undamaged object is read back whole; a damaged one is detected and named.

Method: objects of the encoders are damaged in known ways (truncated at every length, one bit at a
time, spliced, renamed, written by other programs), with and without their claim; each must be a
CorruptionError that names the object.
"""

import errno
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.runs.objects import FOLDER, TOPIC, as_read, batches_of, make_object, odd_records, unsealed
from logmirror.archive import native
from logmirror.archive.claims import Claim, claim_name
from logmirror.archive.digest import object_digest
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import format_name, parse_name
from logmirror.archive.object_check import check_object
from logmirror.archive.reader import iterate
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.model import Gap, GapCause, OffsetRange, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.columns import SCHEMA
from logmirror.wire.compression import Codec
from logmirror.wire.records import encode_marker

FORMATS = ["batches", "parquet", "ndjson"]
RECORDS = odd_records(60, first=100)


def store_of(name, data):
    store = MemoryStore()
    store.objects[f"{FOLDER}/{name}"] = data
    return store


def check(name, data, *, claim=None, deep=True, **options):
    store = store_of(name, data)
    if claim:
        store.create(claim_name("orders", 3, claim.covered.first), claim.to_bytes())
    return check_object(store, FOLDER, name, deep=deep, **options)


def claim_for(name, digest):
    return Claim(
        covered=parse_name(name)[0],
        digest=digest,
        writer="h.1.a",
        topic=TOPIC,
        topic_id="",
        partition=3,
        created_ms=0,
        record_count=len(RECORDS),
        trigger=Trigger.MAX_TIME,
    )


def refused(name, data, **options):
    with pytest.raises(CorruptionError) as caught:
        check(name, data, **options)
    assert caught.value.facts["name"].endswith(name)
    return caught.value


@pytest.mark.parametrize("extension", FORMATS)
def test_a_sound_object_is_reported_with_its_digest(extension):
    name, data, digest = make_object(extension, RECORDS)
    for claim in [None, claim_for(name, digest)]:
        report = check(name, data, claim=claim)
        assert (report.name, report.covered) == (name, parse_name(name)[0])
        assert (report.size_bytes, report.record_count) == (len(data), len(RECORDS))
        assert report.digest == digest
    assert object_digest(store_of(name, data), f"{FOLDER}/{name}", expected=digest) == digest


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("read_bytes", [100, 1_000, 4 << 20])
def test_an_object_is_iterated_in_order_with_every_field(extension, read_bytes, monkeypatch):
    monkeypatch.setattr(native, "_READ_BYTES", read_bytes)
    name, data, _ = make_object(extension, RECORDS)
    rows = []
    for batch in iterate(store_of(name, data), FOLDER, name, topic=TOPIC):
        assert batch.schema.remove_metadata().equals(SCHEMA)
        rows += batch.to_pylist()
    assert [
        (
            row["offset"],
            row["key"],
            row["value"],
            tuple((h["key"].encode(), h["value"]) for h in row["headers"]),
        )
        for row in rows
    ] == [(r.offset, r.key, r.value, r.headers) for r in as_read(RECORDS)]
    assert {(row["topic"], row["partition"]) for row in rows} == {(TOPIC, 3)}


def test_ndjson_of_text_is_read_as_text_only_on_demand():
    records = odd_records(40, first=1, text=True)
    name, data, digest = make_object("ndjson", records, utf8=True)
    assert check(name, data, utf8=True).digest == digest
    refused(name, data)
    assert object_digest(store_of(name, data), f"{FOLDER}/{name}", expected=digest) == digest


@pytest.mark.parametrize("extension", FORMATS)
def test_a_cut_object_is_found_at_every_length(extension):
    name, data, digest = make_object(extension, RECORDS[:12])
    claim = claim_for(name, digest)
    for length in range(0, len(data), max(1, len(data) // 60)):
        refused(name, data[:length], claim=claim)
        if extension != "ndjson":  # lines do not show that more should follow
            refused(name, data[:length])


@pytest.mark.parametrize("extension", FORMATS)
def test_a_flipped_bit_is_found(extension):
    name, data, digest = make_object(extension, RECORDS)
    claim = claim_for(name, digest)
    chooser = random.Random(7)
    unnoticed = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        try:
            report = check(name, bytes(damaged), claim=claim)
        except CorruptionError:
            continue
        # Without the name of its own checksum a file is one of those that never had it.
        assert extension == "parquet"
        assert (report.digest, report.record_count) == (digest, len(RECORDS))
        unnoticed += 1
    assert unnoticed < 3


def footer_bytes(data):
    return int.from_bytes(data[-8:-4], "little") + 8


@pytest.mark.parametrize("extension", FORMATS)
def test_a_renamed_object_is_found(extension):
    name, data, _ = make_object(extension, RECORDS)
    covered = parse_name(name)[0]
    for first, last in [(1, -1), (1, 0), (0, -1)]:
        other = OffsetRange(first=covered.first + first, last=covered.last + last)
        if extension == "batches" and last == 0:
            continue  # a copy may begin inside a batch
        refused(format_name(other, extension), data)
    if extension != "ndjson":  # which does not say where it ends
        longer = OffsetRange(first=covered.first, last=covered.last + 1)
        refused(format_name(longer, extension), data)


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("junk", [b"", b"\0" * 100, b"PAR1", b"hello\n", b"PAR1" * 10])
def test_a_foreign_file_under_our_name_is_found(extension, junk):
    name = format_name(OffsetRange(first=0, last=9), extension)
    if extension == "ndjson" and not junk:
        assert check(name, junk).record_count == 0  # gaps only: lines do not show them
    else:
        refused(name, junk)


@pytest.mark.parametrize("extension", FORMATS)
def test_an_object_that_differs_from_its_claim_is_found(extension):
    name, data, digest = make_object(extension, RECORDS)
    error = refused(name, data, claim=claim_for(name, "xxh3:" + "0" * 32))
    assert (error.facts["expected"], error.facts["found"]) == ("xxh3:" + "0" * 32, digest)
    covered = parse_name(name)[0]
    other = format_name(OffsetRange(first=covered.first, last=covered.last + 5), extension)
    refused(name, data, claim=claim_for(other, digest))


def test_a_strange_name_is_refused():
    for name in ["x", f"{0:020d}-{9:020d}.csv"]:
        with pytest.raises(CorruptionError):
            check_object(MemoryStore(), FOLDER, name, deep=False)


def test_an_object_that_is_gone_is_a_key_error():
    with pytest.raises(KeyError):
        check_object(MemoryStore(), FOLDER, make_object("batches", RECORDS)[0], deep=True)


class BadSector(io.BytesIO):
    """A file of which nothing behind the first bytes can be read."""

    def readinto(self, buffer):
        raise OSError(errno.EIO, "Input/output error")

    def read(self, size=-1):
        raise OSError(errno.EIO, "Input/output error")

    readline = read


@pytest.mark.parametrize("extension", FORMATS)
def test_a_disk_that_cannot_be_read_is_not_called_corruption(extension):
    name, data, _ = make_object(extension, RECORDS)
    store = store_of(name, data)
    store.open = lambda _: BadSector(data)
    with pytest.raises(UnavailableError) as caught:
        check_object(store, FOLDER, name, deep=True)
    assert caught.value.facts["name"] == name


# --- native


def test_batches_out_of_order_or_twice_are_found_across_reads(monkeypatch):
    whole = batches_of(RECORDS)
    half = batches_of(RECORDS[:25])
    name = make_object("batches", RECORDS)[0]
    for data in [half + whole, whole[len(half) :] + half]:
        for read_bytes in [1, 100, 1 << 20]:
            monkeypatch.setattr(native, "_READ_BYTES", max(read_bytes, 61))
            refused(name, data)


def test_a_batch_larger_than_the_buffer_is_read(monkeypatch):
    monkeypatch.setattr(native, "_READ_BYTES", 64)
    name, data, digest = make_object("batches", RECORDS)
    assert check(name, data).digest == digest


def test_compressed_and_control_batches_are_read():
    data = batches_of(RECORDS[:10], codec=Codec.ZSTD)
    data += encode_marker(MarkerType.COMMIT, offset=RECORDS[9].offset + 1, producer_id=1)
    covered = OffsetRange(first=RECORDS[0].offset, last=RECORDS[9].offset + 1)
    assert check(format_name(covered, "batches"), data).record_count == 10


def test_the_first_batch_may_begin_before_the_range():
    data = batches_of(RECORDS[:10], size=10)
    covered = OffsetRange(first=RECORDS[4].offset, last=RECORDS[9].offset)
    name = format_name(covered, "batches")
    check(name, data)
    rows = [
        offset
        for batch in iterate(store_of(name, data), FOLDER, name)
        for offset in batch.column("offset").to_pylist()
    ]
    assert rows == [record.offset for record in RECORDS[4:10]]


def test_a_batch_that_lies_before_the_range_is_found():
    data = batches_of(RECORDS[:10], size=5)
    covered = OffsetRange(first=RECORDS[5].offset, last=RECORDS[9].offset)
    assert refused(format_name(covered, "batches"), data).facts["expected"] == covered.first


def test_an_end_without_trace_is_accepted_only_where_the_log_is_compacted():
    name, data, digest = make_object("batches", RECORDS)
    covered = parse_name(name)[0]
    longer = format_name(OffsetRange(first=covered.first, last=covered.last + 3), "batches")
    refused(longer, data)
    assert check(longer, data, compacted=True).digest == digest
    assert check(longer, data, claim=claim_for(longer, digest)).digest == digest


# --- Parquet


def parquet_bytes(table, metadata=None):
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata(metadata)
    pq.write_table(table.cast(schema), sink)
    return sink.getvalue().to_pybytes()


def sound_table():
    name, data, _ = make_object("parquet", RECORDS)
    table = pq.read_table(pa.BufferReader(data))
    metadata = pq.read_metadata(pa.BufferReader(data)).metadata
    ours = {key: value for key, value in metadata.items() if key.startswith(b"logmirror.")}
    assert ours.pop(b"logmirror.file-check")
    return name, table.replace_schema_metadata(ours)


def test_parquet_without_our_metadata_is_read_for_what_it_is():
    name, table = sound_table()
    report = check(name, parquet_bytes(table))
    assert report.metadata is None
    assert report.digest == make_object("parquet", RECORDS)[2]


def test_a_shallow_check_reads_the_footer_only():
    name, data, digest = make_object("parquet", RECORDS)
    assert check(name, data, deep=False).digest == digest
    damaged = bytearray(data)
    damaged[100] ^= 255
    check(name, bytes(damaged), deep=False)
    refused(name, bytes(damaged))
    for cut in (0, 3, len(data) - 1):
        refused(name, data[:cut], deep=False)


def with_column(table, name, values, kind=None):
    index = table.schema.get_field_index(name)
    field = table.schema.field(name)
    return table.set_column(
        index, pa.field(name, kind or field.type), pa.array(values, kind or field.type)
    )


LIES = {
    "a row less": lambda t: t.slice(1),
    "a row twice": lambda t: pa.concat_tables([t, t.slice(len(t) - 1)]),
    "two rows swapped": lambda t: t.take([1, 0, *range(2, len(t))]),
    "an offset beyond": lambda t: with_column(
        t, "offset", [*t.column("offset").to_pylist()[:-1], 10**6]
    ),
    "an offset below": lambda t: with_column(t, "offset", [1, *t.column("offset").to_pylist()[1:]]),
    "no offset": lambda t: with_column(t, "offset", [None, *t.column("offset").to_pylist()[1:]]),
    "another topic": lambda t: with_column(t, "topic", ["x"] * len(t)),
    "two topics": lambda t: with_column(t, "topic", ["x"] + [TOPIC] * (len(t) - 1)),
    "another partition": lambda t: with_column(t, "partition", [4] * len(t)),
    "offsets as text": lambda t: with_column(
        t, "offset", [str(o) for o in t.column("offset").to_pylist()], pa.string()
    ),
    "a column less": lambda t: t.drop_columns(["headers"]),
    "a column more": lambda t: t.append_column("x", pa.array([1] * len(t))),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_parquet_file_that_lies_is_found_with_and_without_metadata(lie):
    name, table = sound_table()
    lying = lie(table)
    refused(name, parquet_bytes(lying, table.schema.metadata))
    harmless_without_metadata = ["a row less", "another topic"]
    if lie not in [LIES[key] for key in harmless_without_metadata]:
        refused(name, parquet_bytes(lying))


def test_statistics_that_would_hide_rows_are_found():
    name, data, digest = make_object("parquet", RECORDS)
    data = unsealed(data)
    footer = len(data) - footer_bytes(data)
    highest = RECORDS[-1].offset.to_bytes(8, "little")
    at = data.index(highest, footer)
    damaged = data[:at] + (RECORDS[-1].offset - 1).to_bytes(8, "little") + data[at + 8 :]
    while (at := damaged.find(highest, footer)) >= 0:  # Parquet holds the extremes twice
        damaged = damaged[:at] + (RECORDS[-1].offset - 1).to_bytes(8, "little") + damaged[at + 8 :]
    error = refused(name, damaged, claim=claim_for(name, digest))
    assert (error.message, error.facts["column"]) == (
        "statistics in the footer contradict the rows",
        "offset",
    )


def test_a_changed_value_is_found_by_the_digest():
    name, table = sound_table()
    changed = with_column(table, "value", [b"other", *table.column("value").to_pylist()[1:]])
    error = refused(name, parquet_bytes(changed, table.schema.metadata))
    assert "digest" in error.message


GOOD = ObjectMetadata(
    topic="größe",
    topic_id="ab" * 16,
    partition=3,
    covered=OffsetRange(first=5, last=9),
    record_count=3,
    digest="xxh3:" + "0" * 32,
    gaps=(Gap(first=6, last=7, cause=GapCause.ABORTED),),
    gap_counts={GapCause.ABORTED: 2},
)


def as_bytes(texts):
    return {key.encode(): value.encode() for key, value in texts.items()}


def test_metadata_round_trips():
    pairs = as_bytes(GOOD.to_key_values())
    assert ObjectMetadata.from_key_values(pairs | {b"ARROW:schema": b"x"}, name="n") == GOOD
    assert ObjectMetadata.from_key_values({b"other": b"\xff"}, name="n") is None
    assert ObjectMetadata.from_key_values(None, name="n") is None


BAD_METADATA = {
    "logmirror.from": "x",
    "logmirror.to": "4",
    "logmirror.record-count": "4",
    "logmirror.holes": "[[6]]",
    "logmirror.hole-counts": '{"moths":2}',
    "logmirror.format-version": "one",
}


@pytest.mark.parametrize("key", BAD_METADATA)
def test_metadata_that_contradicts_itself_is_found(key):
    pairs = as_bytes(GOOD.to_key_values() | {key: BAD_METADATA[key]})
    with pytest.raises(CorruptionError) as caught:
        ObjectMetadata.from_key_values(pairs, name="n")
    assert caught.value.facts["name"] == "n"
    if key != "logmirror.format-version":
        missing = as_bytes({k: v for k, v in GOOD.to_key_values().items() if k != key})
        with pytest.raises(CorruptionError):
            ObjectMetadata.from_key_values(missing, name="n")


def test_metadata_of_a_newer_version_asks_for_an_upgrade():
    pairs = as_bytes(GOOD.to_key_values() | {"logmirror.format-version": "2"})
    with pytest.raises(UsageError):
        ObjectMetadata.from_key_values(pairs, name="n")


# --- NDJSON

LINE = {
    "topic": "t",
    "partition": 3,
    "offset": 5,
    "timestamp_ms": 1,
    "timestamp_type": "create_time",
    "key": "YQ==",
    "value": "Yg==",
    "headers": [{"key": "k", "value": "YQ=="}, {"key": "k"}],
}
LINE_NAME = format_name(OffsetRange(first=5, last=9), "ndjson")


def line(**changes):
    fields = {k: v for k, v in (LINE | changes).items() if v is not ...}
    return json.dumps(fields).encode() + b"\n"


def test_fields_in_another_order_and_spaces_are_read():
    turned = json.dumps(dict(reversed(LINE.items())), indent=None).encode() + b"\n"
    assert check(LINE_NAME, turned).digest == check(LINE_NAME, line()).digest


BAD_LINES = {
    "no line feed": line().rstrip(),
    "carriage return": line().rstrip() + b"\r\n",
    "byte order mark": b"\xef\xbb\xbf" + line(),
    "empty line": line() + b"\n",
    "not UTF-8": line().replace(b'"t"', b'"\xff"'),
    "two values": line().rstrip() + line(),
    "a list": b"[]\n",
    "a field twice": line().replace(b'"topic"', b'"offset": 6, "topic"'),
    "an unknown field": line(extra=1),
    "no topic": line(topic=...),
    "no offset": line(offset=...),
    "no type": line(timestamp_type=...),
    "unknown type": line(timestamp_type="not_available"),
    "offset as text": line(offset="5"),
    "offset as truth": line(offset=True),
    "offset below zero": line(offset=-1),
    "offset too large": line(offset=2**63),
    "offset a fraction": line(offset=5.0),
    "not a number": line().replace(b'"timestamp_ms": 1', b'"timestamp_ms": NaN'),
    "timestamp too large": line(timestamp_ms=2**63),
    "bad base64": line(key="YQ="),
    "base64 with bits behind the end": line(key="YR=="),
    "base64 with junk": line(key="Y Q=="),
    "a value that is no text": line(value=5),
    "headers that are no list": line(headers=5),
    "a header that is no object": line(headers=["k"]),
    "a header without key": line(headers=[{"value": "YQ=="}]),
    "a header with more": line(headers=[{"key": "k", "more": 1}]),
    "half a surrogate": line(topic="t").replace(b'"t"', b'"\\ud800"'),
    "another partition": line(partition=4),
    "another topic later": line() + line(offset=6, topic="u"),
    "offset twice": line() + line(),
    "offsets backwards": line(offset=6) + line(),
    "offset outside": line(offset=10),
    "nested deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("data", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_found(data):
    refused(LINE_NAME, data)


def test_a_line_without_end_is_not_read_into_memory(monkeypatch):
    monkeypatch.setattr("logmirror.archive.ndjson.LINE_BYTES_MAX", 1_000)
    error = refused(LINE_NAME, line(value="A" * 4_000))
    assert error.facts["line"] == 1
