"""Archives as DataFrames: in every format, the rows are those that the source's clients read.

One Spark session reads archives that mirrors wrote from Apache Kafka, with transactions, nulls,
headers and offset gaps; aiokafka and kcat read the source for comparison. The session is that of a
user: it has none of logmirror's settings, on a machine with the package.
"""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import Message, Row, odd_messages, produce, produce_transactions
from kit.judges.truth import Source, object_names
from kit.runs.commands import FORMATS, logmirror, mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.class_archives import spark_classes
from kit.servers.machine import temporary_folder
from kit.servers.s3 import REGION, S3Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a pandas that PySpark does not know
    from pyspark.errors import PySparkException, StreamingQueryException
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

from logmirror.dataframes import LogmirrorArchive

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.xdist_group("e2e-kafka"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*pandas.*:FutureWarning"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dataframes.md"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as people make one; the Java machine starts quicker than theirs."""
    folder = temporary_folder()
    java = f"-XX:SharedArchiveFile={spark_classes()} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.local.dir", str(folder))
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.driver.extraJavaOptions", f"{java} -Djava.io.tmpdir={folder}")
            .getOrCreate()
        )
    session.dataSource.register(LogmirrorArchive)
    try:
        yield session
    finally:
        gateway = session.sparkContext._gateway  # noqa: SLF001  # the JVM outlives stop() otherwise
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)


@dataclass(frozen=True)
class Archive:
    """A topic, and the copies of it below a folder, one for each format."""

    source: Source
    root: Path
    config: Path


def fill(broker, topic):
    """Two partitions; the first has transactions that reach over several objects."""
    broker.create_topic(topic, partitions=2)
    small = {"batch.num.messages": 5, "linger.ms": 5}
    for codec in ("none", "zstd"):
        config = {**small, "compression.type": codec}
        produce(broker.bootstrap, topic, odd_messages(150, seed=1), config=config)
    for number, size in enumerate((30, 150, 1, 60)):
        messages = odd_messages(size, seed=10 + number)
        transactions = [(messages, number % 2 == 0), (odd_messages(7, seed=number), True)]
        produce_transactions(broker.bootstrap, topic, transactions, transactional_id=f"{topic}-t")
    produce(broker.bootstrap, topic, odd_messages(40, seed=3))
    produce(broker.bootstrap, topic, odd_messages(500, seed=4), partition=1, config=small)
    return Source(broker.bootstrap, topic, partitions=range(2))


@pytest.fixture(scope="module")
def archive(own_kafka, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    root = tmp_path_factory.mktemp("frames")
    source = fill(own_kafka, "frames")
    mirrors = [
        mirror("frames", own_kafka.bootstrap, root, form=form, max_bytes=10_000) for form in FORMATS
    ]
    config = write_config(root / "config.json", *mirrors)
    done = run_now(config)
    assert done.returncode == 0, done.stderr
    assert len(object_names(root / "native" / "0")) > 5
    return Archive(source, root, config)


def load(spark, root, destination, **options):
    reader = spark.read.format("logmirror").option("root", str(root))
    return reader.option("destination", destination).options(**options).load()


def rows_of(frame, topic):
    """What a DataFrame holds, as the judges have it, by partition; in the order of its rows."""
    found: dict[int, list[Row]] = {}
    for row in frame.withColumn("timestamp", f.unix_millis("timestamp")).collect():
        assert row.topic == topic
        headers = tuple((h.key.encode(), as_bytes(h.value)) for h in row.headers)
        key, value = as_bytes(row.key), as_bytes(row.value)
        record = Row(row.offset, row.timestamp, row.timestampType, key, value, headers)
        found.setdefault(row.partition, []).append(record)
    return found


def as_bytes(value):
    return None if value is None else bytes(value)


def truth(source):
    return {partition: source.rows(partition) for partition in source.partitions}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_what_the_source_shows(spark, archive, form):
    frame = load(spark, archive.root, form)
    assert dict(frame.dtypes) == COLUMNS
    assert rows_of(frame, "frames") == truth(archive.source)


def test_tasks_with_few_objects_resolve_transactions(spark, archive):
    frame = load(spark, archive.root, "native", maxPartitionBytes=20_000)
    assert frame.rdd.getNumPartitions() > 5
    assert rows_of(frame, "frames") == truth(archive.source)


def test_read_uncommitted_includes_aborted_transactions(spark, archive):
    committed = load(spark, archive.root, "native").count()
    everything = load(spark, archive.root, "native", isolationLevel="read_uncommitted").count()
    assert everything == committed + 150 + 60


@pytest.mark.parametrize("form", FORMATS)
def test_options_and_columns_choose_a_part(spark, archive, form):
    reader = spark.read.format("logmirror").schema("offset bigint, value binary, partition int")
    options = {"name": form, "partitions": "1", "startingOffset": 100, "endingOffset": 333}
    frame = reader.options(**options).load(str(archive.root))

    found = [(row.partition, row.offset, as_bytes(row.value)) for row in frame.collect()]

    wanted = [row for row in archive.source.rows(1) if 100 <= row.offset < 333]
    assert found == [(1, row.offset, row.value) for row in wanted]


def test_pushed_down_filters_skip_objects(spark, archive, tmp_path):
    form = "ndjson"
    shutil.copytree(archive.root / form, tmp_path / form)
    first = tmp_path / form / "1" / object_names(tmp_path / form / "1")[0]
    shutil.copytree(archive.root / ".logmirror", tmp_path / ".logmirror")
    first.write_bytes(first.read_bytes()[:-9])
    frame = load(spark, tmp_path, form, maxPartitionBytes=30_000)
    where = "partition = 1 and offset > 299 and offset in (300, 301, 7)"

    with pytest.raises(PySparkException, match=re.escape(first.name)):
        frame.where("partition = 1 and offset >= 300").collect()
    spark.conf.set(PUSHDOWN, "true")
    try:
        found = [row.offset for row in frame.where("partition = 1 and offset >= 300").collect()]
        some = [row.offset for row in frame.where(where).collect()]
        others = frame.where("partition = 0 and key is not null").count()
    finally:
        spark.conf.set(PUSHDOWN, "false")

    assert found == [row.offset for row in archive.source.rows(1) if row.offset >= 300]
    assert some == [300, 301]
    assert others == len([row for row in archive.source.rows(0) if row.key is not None])


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_archive_fails_the_query(spark, archive, form, tmp_path):
    shutil.copytree(archive.root / form, tmp_path / form)
    shutil.copytree(archive.root / ".logmirror", tmp_path / ".logmirror")
    folder = tmp_path / form / "1"
    names = object_names(folder)
    middle = folder / names[len(names) // 2]
    whole = middle.read_bytes()

    middle.write_bytes(
        whole[: len(whole) // 2]
        + bytes([whole[len(whole) // 2] ^ 4])
        + whole[len(whole) // 2 + 1 :]
    )
    with pytest.raises(PySparkException, match=re.escape(middle.name)):
        load(spark, tmp_path, form).count()
    middle.unlink()
    with pytest.raises(PySparkException, match="gap in the chain"):
        load(spark, tmp_path, form).count()
    middle.write_bytes(whole)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(PySparkException, match="unknown object in the chain"):
        load(spark, tmp_path, form).count()


def test_a_wrong_option_is_reported_with_a_hint(spark, archive):
    with pytest.raises(PySparkException, match="hint: did you mean `root`"):
        spark.read.format("logmirror").option("roott", "/archive").load().count()
    with pytest.raises(PySparkException, match=r"exactly one destination.*native, ndjson, parquet"):
        spark.read.format("logmirror").load(str(archive.root)).count()


def test_an_archive_that_grows_and_is_compacted_shows_a_complete_prefix(spark, own_kafka, tmp_path):
    topic = own_kafka.create_topic("frames-grow")
    mirrors = [
        mirror(topic, own_kafka.bootstrap, tmp_path, form=form, max_bytes=2_000) for form in FORMATS
    ]
    config = write_config(tmp_path / "config.json", *mirrors)
    for number in range(2):
        produce(own_kafka.bootstrap, topic, odd_messages(100, seed=number))
        done = run_now(config)
        assert done.returncode == 0, done.stderr
        frames = {
            form: load(spark, tmp_path, form, endingOffset=80 + 100 * number) for form in FORMATS
        }
        merged = logmirror("compact", "-c", config, "--min-objects", "2")
        assert merged.returncode == 0, merged.stderr
        rows = Source(own_kafka.bootstrap, topic).rows(0)
        for form in FORMATS:
            assert rows_of(frames[form], topic) == {0: rows[: 80 + 100 * number]}, form
            assert rows_of(load(spark, tmp_path, form), topic) == {0: rows}, form


def test_the_newest_snapshot_is_the_table(spark, own_kafka, tmp_path):
    topic = own_kafka.create_topic("frames-table", config={"cleanup.policy": "compact"})
    more = {"compaction": "log", "snapshots": "keep-all", "name": "table"}
    config = write_config(tmp_path / "c.json", mirror(topic, own_kafka.bootstrap, tmp_path, **more))
    wanted = {}
    for number in range(2):
        messages = [
            Message(b"k%d" % n, b"%d-%d" % (number, n), (), 1000 + n)
            for n in range(20 * number, 50)
        ]
        messages.append(Message(b"k0", None, (), 5))
        produce(own_kafka.bootstrap, topic, messages)
        wanted |= {m.key: m.value for m in messages}
        assert run_now(config).returncode == 0
    assert len(object_names(tmp_path / "table" / "0")) == 2

    rows = rows_of(load(spark, tmp_path, "table"), topic)[0]

    assert {row.key: row.value for row in rows} == {
        k: v for k, v in wanted.items() if v is not None
    }
    assert len(rows) == len({row.key for row in rows})
    with pytest.raises(PySparkException, match="not a range of offsets"):
        load(spark, tmp_path, "table", startingOffset=3).count()


def test_a_bucket_is_read_and_no_plan_shows_its_keys(spark, archive, tmp_path, capfd):
    with S3Server(tmp_path / "s3") as server:
        bucket = server.new_bucket()
        shutil.copytree(archive.root / "native", server.files(bucket) / "deep" / "native")
        shutil.copytree(archive.root / "parquet", server.files(bucket) / "deep" / "parquet")
        shutil.copytree(archive.root / ".logmirror", server.files(bucket) / "deep" / ".logmirror")
        options = {
            "endpoint": server.endpoint,
            "region": REGION,
            "access-key-id": server.access_key,
            "secretAccessKey": server.secret_key,
        }
        for form in ("native", "parquet"):
            frame = load(spark, f"s3://{bucket}/deep", form, **options)
            assert rows_of(frame, "frames") == truth(archive.source)
            for mode in ("extended", "formatted", "codegen", "cost"):
                frame.where("offset > 3").explain(mode)
        with pytest.raises(PySparkException) as caught:
            load(spark, f"s3://{bucket}x/deep", "native", **options).count()
    shown = capfd.readouterr()
    assert "Scan" in shown.out
    assert server.secret_key not in shown.out + shown.err + str(caught.value)


def with_retries(act):
    """Spark gives the process that plans a stream some seconds to start: few for a busy machine."""
    for _ in range(4):
        try:
            return act()
        except StreamingQueryException as error:
            if not re.search(r"failed to connect back|CANNOT_OPEN_SOCKET.*timed out", str(error)):
                raise
    return act()


def stream(spark, root, form, folder, **options):
    """Run a stream to what is there now."""
    return with_retries(lambda: _stream(spark, root, form, folder, options))


def _stream(spark, root, form, folder, options):
    reader = spark.readStream.format("logmirror").option("root", str(root))
    query = (
        reader.option("destination", form)
        .options(**options)
        .load()
        .writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query.recentProgress


def test_a_stream_resumes_at_its_checkpoint(spark, own_kafka, tmp_path):
    topic = own_kafka.create_topic("frames-stream", partitions=2)
    one = mirror(topic, own_kafka.bootstrap, tmp_path, form="native", max_bytes=4_000)
    config = write_config(tmp_path / "config.json", one)
    for number in range(2):
        for partition in range(2):
            messages = odd_messages(100, seed=number)
            produce(own_kafka.bootstrap, topic, messages, partition=partition)
        transaction = [(odd_messages(30, seed=number), number == 1)]
        produce_transactions(own_kafka.bootstrap, topic, transaction, transactional_id=topic)
        assert run_now(config).returncode == 0
        progress = stream(spark, tmp_path, "native", tmp_path, maxBytesPerTrigger=30_000)
        assert sum(one["numInputRows"] > 0 for one in progress) > 1

    found = rows_of(spark.read.parquet(str(tmp_path / "out")).orderBy("offset"), topic)

    assert found == truth(Source(own_kafka.bootstrap, topic, partitions=range(2)))


@pytest.mark.gate("a page by copy and paste; the README runs in `make test`")
def test_the_page_works_by_copy_and_paste(spark, archive, tmp_path):
    """Its blocks in turn, but for the one that needs Amazon; folders and offsets are replaced."""
    shutil.copytree(archive.root / "parquet", tmp_path / "archive" / "orders")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        if "s3://" in block:
            continue
        code = block.replace('"/archive"', repr(str(tmp_path / "archive")))
        code = code.replace('"/tables', f'"{tmp_path}/tables').replace("2-3", "1")
        with_retries(lambda code=code: exec(compile(code, str(PAGE), "exec"), names))
    assert names["spark"] is spark or names["spark"].sparkContext is spark.sparkContext
    rows = sum(len(archive.source.rows(partition)) for partition in range(2))
    assert names["orders"].count() == rows
    assert spark.read.parquet(str(tmp_path / "tables" / "orders")).count() == rows
    assert names["part"].columns == ["partition", "offset", "value"]
