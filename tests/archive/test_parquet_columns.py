"""Keys and values are bytes or text in a Parquet object, and every reader sees the same rows.

Of the checklist: ENC-02, ENC-03, ENC-05, ENC-06, ENC-08, ENC-09, ENC-10, ENC-11.

Method: the same records are written under each pair of types and read back by the product, by
pyarrow and by DuckDB; files of other programs are made by pyarrow. Chains whose objects differ in
their types are merged.
"""

import base64
import io
import json
from itertools import product

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.runs.objects import FOLDER, TOPIC, Target, as_read, decode, make_object, odd_records
from logmirror.archive.compactions import read_cover
from logmirror.archive.envelope import COMPRESSIONS, ParquetEncoder
from logmirror.archive.merge import Archive, merge
from logmirror.archive.object_check import check_object
from logmirror.archive.parquet import column_types, open_parquet, read_parquet
from logmirror.archive.parquet_columns import common_types, layout_of, schema_for
from logmirror.archive.reader import iterate, object_types
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError
from logmirror.model import ColumnTypes, OffsetRange, TimestampType
from logmirror.testing import MemoryStore
from logmirror.wire.columns import SCHEMA
from logmirror.wire.records import Record, encode_reference

TYPES = ("bytes", "utf8", "json", "json-parseable")
PAIRS = [ColumnTypes(key=key, value=value) for key, value in product(TYPES, TYPES)]
TEXTS = odd_records(80, text=True)
MARK = {"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}


def stored(records, **options):
    """A store with one object of these records, and the object's name."""
    name, data, _ = make_object("parquet", records, **options)
    store = MemoryStore()
    store.create(f"{FOLDER}/{name}", data)
    return store, name


def rows_of(store, name):
    return [row for batch in iterate(store, FOLDER, name) for row in batch.to_pylist()]


def typed(kind):
    """The type as far as the columns of a file show it."""
    return "json" if kind == "json-parseable" else kind


@pytest.mark.mirror_v3("ENC-02", "ENC-05", "ENC-06")
@pytest.mark.parametrize("types", PAIRS, ids=lambda types: f"{types.key}+{types.value}")
def test_enc_02_enc_05_rows_and_digest_do_not_depend_on_the_types(types):
    # Nulls are among the keys and the values.
    store, name = stored(TEXTS, types=types)
    plain, _ = stored(TEXTS)
    assert any(record.value is None for record in TEXTS)
    assert rows_of(store, name) == rows_of(plain, name)
    found, expected = (check_object(s, FOLDER, name, deep=True) for s in (store, plain))
    assert (found.digest, found.record_count) == (expected.digest, len(TEXTS))
    assert object_types(store, FOLDER, name) == ColumnTypes(
        key=typed(types.key), value=typed(types.value)
    )


def test_enc_08_columns_keep_their_names_and_are_text_where_they_are_checked():
    for types in PAIRS:
        _, data, _ = make_object("parquet", TEXTS, types=types)
        schema = pq.read_schema(io.BytesIO(data))
        assert schema.names == SCHEMA.names
        parquet = pq.ParquetFile(io.BytesIO(data)).schema
        for index, kind in enumerate((types.key, types.value)):
            assert parquet.column(index).physical_type == "BYTE_ARRAY"
            expected = "None" if kind == "bytes" else "String"
            assert str(parquet.column(index).logical_type) == expected


def test_enc_09_json_columns_carry_the_mark_of_arrow_and_no_others_do():
    def marks(types):
        """The metadata of key and value in the file, with or without support for the mark."""
        _, data, _ = make_object("parquet", TEXTS, types=types)
        written = pq.read_metadata(io.BytesIO(data)).metadata[b"ARROW:schema"]
        return base64.b64decode(written).count(b"arrow.json")

    assert [marks(types) for types in PAIRS] == [
        (types.key in ("json", "json-parseable")) + (types.value in ("json", "json-parseable"))
        for types in PAIRS
    ]
    assert schema_for(ColumnTypes(value="json")).field("value").metadata == {
        key.encode(): value.encode() for key, value in MARK.items()
    }
    assert schema_for(ColumnTypes(value="utf8")).field("value").metadata is None
    assert schema_for(ColumnTypes()).equals(SCHEMA, check_metadata=True)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_enc_03_texts_are_the_same_under_every_compression(compression):
    types = ColumnTypes(key="utf8", value="json")
    store, name = stored(TEXTS, types=types, compression=compression)
    expected = [(r.key, r.value) for r in as_read(TEXTS)]
    assert [(row["key"], row["value"]) for row in rows_of(store, name)] == expected


def test_enc_10_enc_11_bytes_stay_bytes_all_256_of_them():
    every = bytes(range(256))
    records = [Record(0, 0, TimestampType.CREATE_TIME, every, every[::-1], ())]
    store, name = stored(records)
    assert [(row["key"], row["value"]) for row in rows_of(store, name)] == [(every, every[::-1])]
    table = pq.read_table(io.BytesIO(store.objects[f"{FOLDER}/{name}"]))
    assert [table.schema.field(i).type for i in (0, 1)] == [pa.binary(), pa.binary()]


def test_duckdb_reads_texts_as_texts_and_json_as_json(tmp_path):
    records = [
        Record(n, 0, TimestampType.CREATE_TIME, b"k%d" % n, value, ())
        for n, value in enumerate([b'{"n":1}', None, '{"n":"größe"}'.encode()])
    ]
    name, data, _ = make_object("parquet", records, types=ColumnTypes(key="utf8", value="json"))
    (path := tmp_path / name).write_bytes(data)
    query = "SELECT typeof(key), typeof(value), key, value->>'n' FROM read_parquet(?)"
    assert duckdb.connect().execute(query, [str(path)]).fetchall() == [
        ("VARCHAR", "VARCHAR", "k0", "1"),
        ("VARCHAR", "VARCHAR", "k1", None),
        ("VARCHAR", "VARCHAR", "k2", "größe"),
    ]


def test_objects_of_text_are_read_together_whether_they_are_json_or_not(tmp_path):
    texts = [types for types in PAIRS if "bytes" not in (types.key, types.value)]
    for number, types in enumerate(texts):
        _, data, _ = make_object("parquet", TEXTS, types=types)
        (tmp_path / f"{number}.parquet").write_bytes(data)
    count = (
        duckdb.connect()
        .execute(
            "SELECT count(*), count(DISTINCT value) FROM read_parquet(?)",
            [str(tmp_path / "*.parquet")],
        )
        .fetchone()
    )
    values = {record.value for record in TEXTS if record.value is not None}
    assert count == (len(texts) * len(TEXTS), len(values))


def written_as(schema):
    """A file of one row with other columns, as another program might write it."""
    row = dict.fromkeys(schema.names) | {
        "topic": TOPIC,
        "partition": 3,
        "offset": 0,
        "timestamp": 0,
        "timestampType": 0,
        "headers": [],
    }
    table = pa.Table.from_pylist([row], schema=schema)
    out = io.BytesIO()
    pq.write_table(table, out)
    return io.BytesIO(out.getvalue())


def with_field(index, field):
    return SCHEMA.set(index, field)


@pytest.mark.parametrize(
    "schema",
    [
        with_field(1, pa.field("value", pa.large_string())),
        with_field(1, pa.field("value", pa.large_binary())),
        with_field(1, pa.field("value", pa.int64())),
        with_field(1, pa.field("value", pa.string(), nullable=False)),
        with_field(1, pa.field("value", pa.string(), metadata={"ARROW:extension:name": "other"})),
        with_field(1, pa.field("value", pa.binary(), metadata=MARK)),
        with_field(2, pa.field("topic", pa.binary())),
        with_field(4, pa.field("offset", pa.uint64())),
        pa.schema([SCHEMA.field(1), SCHEMA.field(0), *list(SCHEMA)[2:]]),
        pa.schema(list(SCHEMA)[:-1]),
        pa.schema([*SCHEMA, pa.field("more", pa.int32())]),
    ],
    ids=lambda schema: str(len(schema)),
)
def test_other_columns_are_refused(schema):
    assert layout_of(schema) is None
    if "value" in schema.names and schema.field("value").nullable:
        with pytest.raises(CorruptionError, match=r"columns are not those|Invalid storage type"):
            open_parquet(written_as(schema), "x")


def test_a_file_of_another_program_in_known_columns_is_read():
    schema = schema_for(ColumnTypes(key="utf8", value="json"))
    parquet = open_parquet(written_as(schema), "x")
    assert column_types(parquet, "x") == ColumnTypes(key="utf8", value="json")
    (batch,) = read_parquet(parquet, "x")
    assert batch.schema.equals(SCHEMA)
    assert batch.to_pylist()[0]["value"] is None


def test_text_that_is_no_text_is_corruption():
    records = [Record(0, 0, TimestampType.CREATE_TIME, b"\xff", b"v", ())]
    store, name = stored(records, types=ColumnTypes(key="utf8"))  # unchecked
    with pytest.raises(CorruptionError, match="not a whole Parquet file"):
        check_object(store, FOLDER, name, deep=True)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["bytes", "bytes"], "bytes"),
        (["utf8", "utf8"], "utf8"),
        (["json", "json"], "json"),
        (["utf8", "json"], "utf8"),
        (["json", "bytes", "json"], "bytes"),
    ],
)
def test_a_merged_object_has_the_narrowest_types_that_hold_all_parts(parts, expected):
    store, expected_rows = MemoryStore(), []
    for number, kind in enumerate(parts):
        covered = OffsetRange(first=10 * number, last=10 * number + 9)
        records = odd_records(10, first=10 * number, seed=number, text=True)
        types = ColumnTypes(key="utf8", value=kind)
        name, data, _ = make_object("parquet", records, covered=covered, types=types)
        store.create(f"{FOLDER}/{name}", data)
        expected_rows += rows_of(store, name)
    archive = Archive(
        store=store,
        folder=FOLDER,
        topic=TOPIC,
        extension="parquet",
        compression="zstd-1",
        utf8=False,
    )
    objects = read_cover(store, FOLDER, extension="parquet", start=0).objects
    assert merge(archive, objects, writer_id="c", clock=SYSTEM_CLOCK).parts == len(parts)
    (name,) = (n.rpartition("/")[2] for n in store.objects if n.startswith(f"{FOLDER}/"))
    assert object_types(store, FOLDER, name) == ColumnTypes(key="utf8", value=expected)
    assert rows_of(store, name) == expected_rows


def test_common_types_of_one_object_are_its_own():
    for types in PAIRS:
        assert common_types([types]) == types


def test_rows_of_many_row_groups_and_trickled_rows_are_texts_too():
    records = [
        Record(n, 0, TimestampType.CREATE_TIME, None, json.dumps({"n": n}).encode(), ())
        for n in range(3000)
    ]
    data = b"".join(encode_reference(records[at : at + 7]) for at in range(0, 3000, 7))
    target = Target()
    encoder = ParquetEncoder(
        target, topic=TOPIC, partition=3, row_group_bytes=4096, types=ColumnTypes(value="json")
    )
    for columns in decode(data, max_chunk_bytes=2000):
        encoder.append(columns)
    encoder.finish({})
    parquet = open_parquet(io.BytesIO(bytes(target.data)), "x")
    assert parquet.metadata.num_row_groups > 5
    values = [row["value"] for batch in read_parquet(parquet, "x") for row in batch.to_pylist()]
    assert values == [record.value for record in records]
