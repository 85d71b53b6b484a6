"""Query plans: filters and options select objects, and tasks return Spark's types.

Method: the data source is called as Spark's planner calls it, without Spark; sessions are in
`tests/e2e/test_dataframes.py`.
"""

import pickle
import warnings

import pyarrow as pa
import pytest

from kit.runs.mirror_v3_archive import HEAD, cut, odd_rows, snapshot, write_chain
from kit.runs.objects import FOLDER, OBJECTS, PER_OBJECT, TOPIC, make_object, new_chain
from logmirror.errors import CorruptionError, PositionError, UsageError
from logmirror.model import TimestampType
from logmirror.wire.records import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a pandas that PySpark does not know
    from pyspark.sql.datasource import (
        DataSourceReader,
        EqualNullSafe,
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
        Not,
    )
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes
    from pyspark.sql.types import StructType

    from logmirror.dataframes.source import SCHEMA, LogmirrorArchive

END = OBJECTS * PER_OBJECT
OFFSET, PARTITION = ("offset",), ("partition",)


def folder_with(tmp_path, extension="parquet", **options):
    store, _ = new_chain(extension, **options)
    for name, data in store.objects.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


def source(root, **options):
    return LogmirrorArchive({"root": str(root), "maxPartitionBytes": "1", **options})


def planned(reader):
    """First offset and end of each piece."""
    found = [partition.value for partition in pickle.loads(pickle.dumps(reader)).partitions()]
    return [(piece.first, piece.end) for piece in found]


def every_object(first=0, end=END):
    starts = range(first - first % PER_OBJECT, end, PER_OBJECT)
    return [(max(first, at), min(end, at + PER_OBJECT)) for at in starts]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([], (0, END)),
        ([EqualTo(OFFSET, 20)], (20, 21)),
        ([In(OFFSET, (9, 30, 11))], (9, 31)),
        ([GreaterThan(OFFSET, 20)], (21, END)),
        ([GreaterThanOrEqual(OFFSET, 20)], (20, END)),
        ([LessThan(OFFSET, 20)], (0, 20)),
        ([LessThanOrEqual(OFFSET, 20)], (0, 21)),
        ([GreaterThan(OFFSET, 20), LessThan(OFFSET, 40), LessThan(OFFSET, 60)], (21, 40)),
        ([EqualTo(PARTITION, 3), In(PARTITION, (1, 3))], (0, END)),
        ([EqualTo(PARTITION, 4)], None),
        ([GreaterThan(OFFSET, END)], None),
        # Filters that do not concern names select everything.
        ([Not(EqualTo(OFFSET, 20)), Not(EqualTo(PARTITION, 3))], (0, END)),
        ([EqualNullSafe(OFFSET, None), EqualTo(("headers", "offset"), 1)], (0, END)),
        ([EqualTo(("key",), b"k"), EqualTo(("topic",), "t"), In(OFFSET, ())], (0, END)),
    ],
)
def test_filters_choose_objects_and_are_all_left_to_spark(tmp_path, filters, wanted):
    reader = source(folder_with(tmp_path)).reader(SCHEMA)

    left = list(reader.pushFilters(filters))

    assert [id(one) for one in left] == [id(one) for one in filters]
    assert planned(reader) == (every_object(*wanted) if wanted else [])


def test_spark_takes_the_reader_for_one_without_filters_where_they_are_switched_off(tmp_path):
    """Its own words: `getattr(reader.pushFilters, "__func__", None) is not ...`."""
    reader = source(folder_with(tmp_path)).reader(SCHEMA)
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters


def test_a_task_reads_its_piece_in_the_types_of_spark(tmp_path):
    reader = source(folder_with(tmp_path, "ndjson")).reader(SCHEMA)
    for partition in reader.partitions():
        for batch in reader.read(pickle.loads(pickle.dumps(partition))):
            assert batch.schema.field("timestamp").type == pa.timestamp("us", "UTC")
            assert batch.column("topic").unique().to_pylist() == [TOPIC]
            assert batch.schema.names == SCHEMA.names


@pytest.mark.parametrize(
    ("form", "kinds"),
    [("ndjson", {}), ("parquet", {"keys": HEAD, "values": HEAD})]
    + [("parquet", {"keys": kind, "values": kind}) for kind in ("bytes", "utf8")],
)
def test_objects_of_mirror_v3_are_rows_like_ours(tmp_path, form, kinds):
    rows = odd_rows(30, text="utf8" in kinds.values())
    write_chain(tmp_path / FOLDER, TOPIC, 3, cut(rows, 7), form=form, **kinds)
    reader = source(tmp_path).reader(SCHEMA)

    read = [batch for partition in reader.partitions() for batch in reader.read(partition)]

    table = pa.Table.from_batches(read)
    found = zip(
        *(table.column(name).to_pylist() for name in ("offset", "key", "value")), strict=True
    )
    assert list(found) == [(row.offset, row.key, row.value) for row in rows]


def test_a_table_of_mirror_v3_is_not_taken_for_a_chain_of_records(tmp_path):
    """Nothing in its file says that it is one; its order does."""
    keyed = [row._replace(key=b"%d" % (-row.offset % 7), value=b"v") for row in odd_rows(30)]
    (whole,) = cut(keyed, 30)
    write_chain(tmp_path / FOLDER, TOPIC, 3, [whole._replace(rows=snapshot(whole.rows))])
    reader = source(tmp_path).reader(SCHEMA)

    with pytest.raises(CorruptionError, match="do not ascend"):
        list(reader.read(reader.partitions()[0]))


def test_columns_may_be_left_out_and_nothing_else(tmp_path):
    root = folder_with(tmp_path)
    some = StructType([SCHEMA["offset"], SCHEMA["key"]])
    reader = source(root).reader(some)
    (batch,) = reader.read(reader.partitions()[0])
    assert batch.schema.names == ["offset", "key"]
    with pytest.raises(UsageError, match="not a column"):
        source(root).reader(StructType().add("offset", "integer"))
    with pytest.raises(UsageError, match="not a column"):
        source(root).reader(StructType().add("sum", "long"))


def test_a_timestamp_that_spark_cannot_hold_is_an_error(tmp_path):
    record = Record(0, 2**62, TimestampType.CREATE_TIME, None, b"v", ())
    name, data, _ = make_object("parquet", [record])
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / name).write_bytes(data)
    reader = source(tmp_path).reader(SCHEMA)
    (partition,) = reader.partitions()
    with pytest.raises(UsageError, match="does not fit"):
        list(reader.read(partition))
    without = source(tmp_path).reader(StructType([SCHEMA["value"]]))
    assert [len(batch) for batch in without.read(without.partitions()[0])] == [1]


def test_native_objects_without_claims_need_the_topic_option(tmp_path):
    root = folder_with(tmp_path, "batches", claims=False)
    with pytest.raises(UsageError, match="the topic is unknown") as caught:
        source(root).reader(SCHEMA).partitions()
    assert any("option('topic'" in note for note in caught.value.__notes__)
    reader = source(root, topic="mine").reader(SCHEMA)
    (batch,) = reader.read(reader.partitions()[0])
    assert batch.column("topic").unique().to_pylist() == ["mine"]


def streamed(root, **options):
    return source(root, **options).streamReader(SCHEMA)


@pytest.mark.parametrize("extension", ["parquet", "batches"])
def test_a_stream_takes_whole_objects_up_to_its_limit(tmp_path, extension):
    reader = streamed(folder_with(tmp_path, extension), maxBytesPerTrigger="1")
    start = reader.initialOffset()
    assert start == {"3": 0}
    assert reader.getDefaultReadLimit() == ReadMaxBytes(1)
    one = reader.latestOffset(start, ReadMaxBytes(1))
    assert one == {"3": PER_OBJECT}
    assert reader.latestOffset(one, ReadAllAvailable()) == {"3": END}
    assert reader.latestOffset({"3": END}, ReadAllAvailable()) == {"3": END}
    pieces = [partition.value for partition in reader.partitions(one, {"3": END})]
    assert [(piece.first, piece.end) for piece in pieces] == every_object(PER_OBJECT)
    assert reader.partitions(one, one) == []


def test_a_stream_to_what_is_there_now_does_not_follow_what_comes(tmp_path):
    root = folder_with(tmp_path, objects=3)
    reader = streamed(root)
    assert reader.getDefaultReadLimit() == ReadAllAvailable()
    reader.prepareForTriggerAvailableNow()
    folder_with(tmp_path)
    assert reader.latestOffset({"3": 0}, ReadAllAvailable()) == {"3": 3 * PER_OBJECT}
    assert streamed(root).latestOffset({"3": 0}, ReadAllAvailable()) == {"3": END}


def test_a_stream_whose_archive_lost_objects_ends(tmp_path):
    reader = streamed(folder_with(tmp_path))
    with pytest.raises(PositionError, match="ends before"):
        reader.partitions({"3": 0}, {"3": END + 1})
    with pytest.raises(UsageError, match="no `endingOffset`"):
        streamed(tmp_path, endingOffset="3")
