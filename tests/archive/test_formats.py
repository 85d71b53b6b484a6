"""The pages in docs/formats describe the bytes.

Method: a statement is read from the page, or implemented again from its text alone, and compared
with the output of the encoders.
"""

import json
import re
import struct
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from kit.runs.objects import FOLDER, as_read, make_object, odd_records
from logmirror.archive.claims import Claim
from logmirror.archive.envelope import COMPRESSIONS, ROW_GROUP_BYTES, ROW_GROUP_ROWS
from logmirror.archive.naming import parse_name
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.object_check import check_object
from logmirror.model import Decided, Gap, GapCause, OffsetRange, Trigger
from logmirror.testing import MemoryStore

PAGES = Path(__file__).parents[2] / "docs" / "formats"
RECORDS = odd_records(80)


def page(name):
    return (PAGES / f"{name}.md").read_text()


def first_cells(text, pattern):
    return re.findall(rf"^\| `({pattern})`", text, re.MULTILINE)


def digest_by_the_page(records):
    """The digest as docs/formats/parquet.md describes it, without the product's code."""
    streams = [b""] * 12

    def add(index, data):
        streams[index] += data

    def add_sized(index, data):
        add(index, struct.pack("<i", -1 if data is None else len(data)))
        add(index + 1, data or b"")

    for record in records:
        add(0, struct.pack("<q", record.offset))
        add(1, struct.pack("<q", record.timestamp_ms))
        add(2, struct.pack("<i", record.timestamp_type))
        add_sized(3, record.key)
        add_sized(5, record.value)
        add(7, struct.pack("<i", len(record.headers)))
        for key, value in record.headers:
            add_sized(8, key)
            add_sized(10, value)
    joined = b"".join(xxhash.xxh3_128(stream).digest() for stream in streams)
    return f"xxh3:{xxhash.xxh3_128(joined).hexdigest()}"


def test_the_digest_is_the_one_on_the_page():
    for extension in ("parquet", "ndjson"):
        name, data, digest = make_object(extension, RECORDS)
        assert digest == digest_by_the_page(as_read(RECORDS))
        store = MemoryStore()
        store.create(f"{FOLDER}/{name}", data)
        assert check_object(store, FOLDER, name, deep=True).digest == digest


def test_the_page_lists_the_columns_and_keys_of_a_parquet_object():
    _, data, _ = make_object("parquet", RECORDS)
    text = page("parquet")
    metadata = pq.read_metadata(pa.BufferReader(data)).metadata
    keys = [key.decode() for key in metadata if key.startswith(b"logmirror.")]
    keys.append("logmirror.compaction")  # of snapshots only
    assert sorted(first_cells(text, r"logmirror\.[a-z-]+")) == sorted(keys)
    columns = pq.read_schema(pa.BufferReader(data)).names
    assert first_cells(text, "[a-zA-Z]+")[: len(columns)] == columns
    assert all(f"`{compression}`" in text for compression in COMPRESSIONS)
    assert f"{ROW_GROUP_ROWS:,} rows" in text
    assert f"{ROW_GROUP_BYTES >> 20} MiB" in text


def test_the_query_on_the_page_runs(tmp_path):
    records = odd_records(80, text=True)
    name, data, _ = make_object("parquet", records)
    (folder := tmp_path / "archive/orders/0").mkdir(parents=True)
    (folder / name).write_bytes(data)
    [query] = re.findall(r"```sql\n(.*?)```", page("parquet"), re.DOTALL)
    rows = duckdb.sql(query.replace("archive/", f"{tmp_path}/archive/")).fetchall()
    assert rows == [
        (r.offset, r.timestamp_ms, None if r.value is None else r.value.decode())
        for r in as_read(records)
    ]


def test_the_page_lists_the_fields_of_a_claim():
    claim = Claim(
        covered=OffsetRange(first=0, last=1),
        digest="xxh3:" + "0" * 32,
        writer="w",
        topic="t",
        topic_id="",
        partition=0,
        created_ms=0,
        record_count=1,
        trigger=Trigger.DAILY,
        leader_epoch=0,
        gaps=(Gap(first=0, last=0, cause=GapCause.ABORTED),),
        decided=(Decided(1, (7,), ()),),
        rewritable=True,
        gap_counts={GapCause.ABORTED: 1},
    )
    text = page("claim")
    assert first_cells(text, "[a-z_]+") == sorted(
        json.loads(claim.to_bytes()), key=first_cells(text, "[a-z_]+").index
    )
    causes = [cause for cause in GapCause if cause is not GapCause.UNRECORDED]
    assert all(f"`{value}`" in text for value in [*Trigger, *causes])


def test_the_line_on_the_page_is_one_that_is_read(tmp_path):
    [line] = re.findall(r"```json\n(.*?\n)```", page("ndjson"), re.DOTALL)
    (path := tmp_path / "x").write_text(line)
    with path.open("rb") as file:
        [batch] = read_ndjson(file, name="x")
    assert batch.to_pylist()[0]["value"] == b'{"id":1}'
    assert first_cells(page("ndjson"), "[a-z_]+") == list(json.loads(line))


def test_the_names_on_the_archive_page_are_names():
    names = re.findall(r"\d{20}-\d{20}\.\w+", page("archive"))
    assert len(names) == 2
    assert all(parse_name(name) for name in names)
