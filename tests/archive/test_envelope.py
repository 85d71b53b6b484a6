"""Objects hold exactly the records that were appended, as independent readers see them.

Method: records of every odd shape are encoded to batches by the reference encoder, decoded by the
kernels and written by the encoders; then pyarrow, DuckDB, `json` and the reference decoder read
them back, and everything must be equal.
"""

import base64
import json
import os
import subprocess
import sys

import duckdb
import pyarrow.parquet as pq
import pytest

from kit.runs.inline_run import python_path
from kit.runs.objects import (
    FOLDER,
    TOPIC,
    Target,
    as_read,
    batches_of,
    decode,
    make_object,
    odd_records,
)
from logmirror.archive import envelope
from logmirror.archive.envelope import COMPRESSIONS, NativeEncoder, NdjsonEncoder, ParquetEncoder
from logmirror.archive.reader import iterate
from logmirror.errors import UnavailableError, UsageError
from logmirror.model import TimestampType
from logmirror.testing import MemoryStore
from logmirror.wire.columns import SCHEMA
from logmirror.wire.records import Record, decode_reference, encode_reference

RECORDS = odd_records(300)


def encode_parquet(records, path=None, *, chunk=1 << 20, compression="zstd-1"):
    target = Target()
    encoder = ParquetEncoder(target, topic=TOPIC, partition=3, compression=compression)
    for columns in decode(batches_of(records), max_chunk_bytes=chunk):
        encoder.append(columns)
    encoder.finish({"a": "b"})
    if path:
        path.write_bytes(target.data)
    return target


def rows_of_parquet(path):
    return [
        Record(
            row["offset"],
            int(row["timestamp"].timestamp() * 1000 + 0.5 if row["timestamp"].year > 1969 else -1),
            TimestampType(row["timestampType"]),
            row["key"],
            row["value"],
            tuple((header["key"].encode(), header["value"]) for header in row["headers"]),
        )
        for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.mirror_v3("ENC-02", "ENC-03")
def test_parquet_holds_every_record_in_every_compression(tmp_path, compression):
    path = tmp_path / "x.parquet"
    encode_parquet(RECORDS, path, compression=compression)
    assert rows_of_parquet(path) == as_read(RECORDS)
    table = pq.read_table(path)
    assert table.schema.remove_metadata().equals(SCHEMA)
    assert set(table.column("topic").to_pylist()) == {TOPIC}
    assert set(table.column("partition").to_pylist()) == {3}


def test_parquet_is_smaller_than_ndjson_where_records_repeat():
    """ENC-04."""
    records = [
        Record(
            n, 1_700_000_000_000 + n, TimestampType.CREATE_TIME, b"key-%d" % (n % 7), b"v" * 80, ()
        )
        for n in range(2000)
    ]
    ndjson = make_object("ndjson", records)[1]
    for compression in ("zstd-1", "snappy", "lz4"):
        assert len(encode_parquet(records, compression=compression).data) < len(ndjson) / 5


def test_parquet_is_written_as_the_format_page_says(tmp_path):
    encode_parquet(RECORDS, path := tmp_path / "x.parquet")
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert not any(column.has_dictionary_page for column in columns)
    with_statistics = {c.path_in_schema for c in columns if c.is_stats_set and c.statistics}
    assert with_statistics == {"offset", "timestamp"}
    delta = {c.path_in_schema for c in columns if "DELTA_BINARY_PACKED" in c.encodings}
    assert delta == {"offset", "timestamp"}
    assert pq.read_metadata(path).metadata[b"a"] == b"b"


def test_duckdb_reads_parquet_as_the_reference_says(tmp_path):
    encode_parquet(RECORDS, path := tmp_path / "x.parquet")
    found = duckdb.sql(
        f'SELECT "offset", epoch_ms("timestamp"), timestampType, key, value, headers '
        f"FROM '{path}' ORDER BY \"offset\""
    ).fetchall()
    assert [
        Record(
            *row[:2],
            TimestampType(row[2]),
            *row[3:5],
            tuple((header["key"].encode(), header["value"]) for header in row[5]),
        )
        for row in found
    ] == as_read(RECORDS)


def test_row_groups_end_where_the_rows_say_not_where_chunks_end(tmp_path, monkeypatch):
    monkeypatch.setattr(envelope, "ROW_GROUP_BYTES", 3_000)
    monkeypatch.setattr(envelope, "ROW_GROUP_ROWS", 20)
    shapes = set()
    for chunk in [400, 2_000, 1 << 20]:
        path = tmp_path / f"{chunk}.parquet"
        encode_parquet(RECORDS, path, chunk=chunk)
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        assert max(groups) <= 20
        assert sum(groups) == len(RECORDS)
        assert min(groups[:-1]) < 20, "no group ended by bytes"
        shapes.add(tuple(groups))
        assert rows_of_parquet(path) == as_read(RECORDS)
    assert len(shapes) == 1


def test_rows_that_wait_survive_the_reuse_of_their_columns(tmp_path):
    encode_parquet(RECORDS, path := tmp_path / "x.parquet", chunk=50)
    assert rows_of_parquet(path) == as_read(RECORDS)
    assert pq.read_metadata(path).num_row_groups == 1


def test_a_trickle_of_single_rows_waits_in_few_batches():
    encoder = ParquetEncoder(Target(), topic="t", partition=0)
    for columns in decode(batches_of(RECORDS)):
        for row in range(columns.rows):
            encoder.append(columns, row, row + 1)
    assert len(encoder._waiting) < 12  # noqa: SLF001  # memory is what is tested


def test_parquet_is_written_in_large_pieces():
    target = encode_parquet(odd_records(2_000))
    assert target.writes < 3 + len(target.data) / (1 << 20)


def test_part_of_the_rows_can_be_appended(tmp_path):
    target = Target()
    encoder = ParquetEncoder(target, topic=TOPIC, partition=3)
    for columns in decode(batches_of(RECORDS)):
        encoder.append(columns, 10, 10)
        encoder.append(columns, 10, 20)
    encoder.finish({})
    (path := tmp_path / "x.parquet").write_bytes(target.data)
    assert rows_of_parquet(path) == as_read(RECORDS)[10:20]


def test_an_object_of_gaps_only_is_a_parquet_file_without_rows(tmp_path):
    target = Target()
    ParquetEncoder(target, topic=TOPIC, partition=3).finish({"logmirror.from": "5"})
    (path := tmp_path / "x.parquet").write_bytes(target.data)
    assert pq.read_table(path).num_rows == 0
    assert duckdb.sql(f"SELECT count(*) FROM '{path}'").fetchall() == [(0,)]


class FullDisk(Target):
    def write(self, data):
        raise UnavailableError("no space", path="x")


def test_an_error_of_the_target_arrives_as_it_was():
    encoder = ParquetEncoder(FullDisk(), topic=TOPIC, partition=3, compression="uncompressed")
    big = [Record(n, 0, TimestampType.CREATE_TIME, None, b"x" * 100_000, ()) for n in range(20)]

    def write():
        for columns in decode(encode_reference(big), max_chunk_bytes=4 << 20):
            encoder.append(columns)
        encoder.finish({})

    with pytest.raises(UnavailableError) as caught:
        write()
    assert caught.value.facts == {"path": "x"}


def test_an_encoder_that_is_dropped_writes_nothing_more():
    target = Target()
    encoder = ParquetEncoder(target, topic=TOPIC, partition=3)
    for columns in decode(batches_of(RECORDS)):
        encoder.append(columns)
    before = bytes(target.data)
    del encoder
    assert bytes(target.data) == before


def test_a_header_key_that_is_no_text_names_its_offset():
    bad = [Record(5, 0, TimestampType.CREATE_TIME, None, None, ((b"\xff", None),))]
    for kind in (ParquetEncoder, NdjsonEncoder):
        encoder = kind(Target(), topic="t", partition=0)
        chunks = decode(encode_reference(bad))
        columns = next(chunks)
        with pytest.raises(UsageError) as caught:
            encoder.append(columns)
        assert caught.value.facts["offset"] == 5


def lines_of(records, *, utf8, chunk=1 << 20):
    target = Target()
    encoder = NdjsonEncoder(target, topic=TOPIC, partition=3, utf8=utf8)
    for columns in decode(batches_of(records), max_chunk_bytes=chunk):
        encoder.append(columns)
    encoder.finish({})
    return bytes(target.data)


def expected_line(record, text):
    fields = {"topic": TOPIC, "partition": 3, "offset": record.offset}
    if record.timestamp_ms != -1:
        fields["timestamp_ms"] = record.timestamp_ms
    fields["timestamp_type"] = record.timestamp_type.name.lower()
    for name in ("key", "value"):
        if (data := getattr(record, name)) is not None:
            fields[name] = text(data)
    if record.headers:
        fields["headers"] = [
            {"key": key.decode()}
            | ({} if value is None else {"value": base64.b64encode(value).decode()})
            for key, value in record.headers
        ]
    return fields


@pytest.mark.parametrize("utf8", [False, True])
@pytest.mark.parametrize("chunk", [300, 1 << 20])
@pytest.mark.mirror_v3("ENC-01")
def test_ndjson_is_what_plain_json_reads(utf8, chunk, monkeypatch):
    monkeypatch.setattr(envelope, "_TEXT_BYTES", 700)
    records = odd_records(300, text=utf8)
    data = lines_of(records, utf8=utf8, chunk=chunk)
    text = bytes.decode if utf8 else lambda b: base64.b64encode(b).decode()
    assert data.endswith(b"\n")
    found = [json.loads(line) for line in data.decode().removesuffix("\n").split("\n")]
    expected = [expected_line(record, text) for record in as_read(records)]
    assert found == expected
    assert [list(line) for line in found] == [list(line) for line in expected]  # order of fields


@pytest.mark.parametrize("encoding", ["base64", "utf8"])
def test_a_small_batch_that_unpacks_to_a_huge_record_takes_two_copies_of_it(encoding):
    """In a process of its own: its peak memory, before and after.

    The batch is unpacked, and decoded into columns. The text takes a buffer of a fixed size.
    """
    size = 64 << 20
    command = [sys.executable, "-m", "kit.runs.ndjson_peak"]
    environment = {**os.environ, "PYTHONPATH": python_path()}

    def run(*arguments, data=None):
        done = subprocess.run(
            [*command, *arguments],
            check=True,
            input=data,
            capture_output=True,
            timeout=120,
            env=environment,
        )
        return done.stdout

    packed = run(str(size))
    found = json.loads(run("measure", encoding, data=packed))
    assert found["wire_bytes"] < 10_000
    assert found["text_bytes"] > size
    assert found["growth_bytes"] < 2 * size + (24 << 20)


def test_text_that_is_not_utf8_names_its_offset():
    bad = [Record(5, 0, TimestampType.CREATE_TIME, b"\xff", None, ())]
    encoder = NdjsonEncoder(Target(), topic="t", partition=0, utf8=True)
    chunks = decode(encode_reference(bad))
    columns = next(chunks)
    with pytest.raises(UsageError) as caught:
        encoder.append(columns)
    assert caught.value.facts["offset"] == 5


def test_native_is_the_bytes_that_came():
    target = Target()
    encoder = NativeEncoder(target)
    data = batches_of(RECORDS)
    encoder.append(memoryview(data)[:100])
    encoder.append(bytearray(data[100:]))
    encoder.finish({"ignored": "x"})
    assert target.data == data
    assert decode_reference(bytes(target.data)) == as_read(RECORDS)


@pytest.mark.parametrize("extension", ["batches", "parquet", "ndjson"])
def test_the_same_records_make_the_same_object(extension):
    assert make_object(extension, RECORDS) == make_object(extension, RECORDS)


def test_rows_copied_from_another_object_make_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(envelope, "ROW_GROUP_BYTES", 3000)
    path = tmp_path / "x.parquet"
    whole = encode_parquet(RECORDS, path).data
    for size in (1, 7, 1000):
        target = Target()
        encoder = ParquetEncoder(target, topic="", partition=0)
        for batch in pq.ParquetFile(path).iter_batches(batch_size=size):
            encoder.append_arrow(batch)
        encoder.finish({"a": "b"})

        assert target.data == whole


def test_of_a_large_parquet_object_only_the_last_row_group_is_read_at_the_end(monkeypatch):
    monkeypatch.setattr(envelope, "ROW_GROUP_ROWS", 20)
    name, data, _ = make_object("parquet", RECORDS)
    store = MemoryStore()
    store.objects[f"{FOLDER}/{name}"] = data
    whole = [row for batch in iterate(store, FOLDER, name) for row in batch["offset"].to_pylist()]
    end = [
        row
        for batch in iterate(store, FOLDER, name, at_end=True)
        for row in batch["offset"].to_pylist()
    ]
    assert 0 < len(end) <= 20 < len(whole)
    assert end == whole[-len(end) :]
