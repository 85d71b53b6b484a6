"""The main path, end to end: the files hold what the source holds, and nothing else.

The same tests run over Apache Kafka 3.9.2 and 4.3.1 and over the embedded broker. Each source gets
records that are hard to copy, in batches of every codec and of several producers. The command line
copies them once to all three formats, and each test checks another aspect of the result.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest
from confluent_kafka import Producer

from kit.judges.clients import (
    CREATE_TIME,
    LOG_APPEND_TIME,
    odd_messages,
    produce,
    produce_transactions,
)
from kit.judges.truth import Source, object_names
from kit.runs.commands import FORMATS, logmirror, logmirror_json, mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.apache import VERSIONS, ApacheTools

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LINGER = {"linger.ms": 20}
SMALL = {"batch.num.messages": 3, "linger.ms": 5}
TEXT_COPY = "from-java-text"
EMPTY = len(CODECS)
"""The partition that has no records."""

# https://spark.apache.org/docs/latest/streaming/structured-streaming-kafka-integration.html
SPARK_COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
DUCKDB_COLUMNS = {
    "key": "BLOB",
    "value": "BLOB",
    "topic": "VARCHAR",
    "partition": "INTEGER",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP WITH TIME ZONE",
    "timestampType": "INTEGER",
    "headers": 'STRUCT("key" VARCHAR, "value" BLOB)[]',
}
READ_BY_SPARK = """
import json, sys
from pyspark.sql import SparkSession
from pyspark.sql.functions import sum as total

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
for folders in sys.argv[1:]:
    rows = spark.read.parquet(*folders.split(","))
    offsets = rows.agg(total("offset")).first()[0]
    print(json.dumps({"columns": dict(rows.dtypes), "count": rows.count(), "offsets": offsets}))
"""


@dataclass(frozen=True)
class Copied:
    """What one source holds, and where its copies are."""

    topics: dict[str, Source]
    config: Path
    root: Path

    def copies(self):
        """Every copy: its topic, its format and the folder's name."""
        return [(t, form, f"{t.topic}-{form}") for t in self.topics.values() for form in FORMATS]


@pytest.fixture(scope="module")
def copied(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"copied-{source.version}")
    topics, kept_open = fill(source)
    mirrors = [
        mirror(topic, source.bootstrap, folder, form=f, name=f"{topic}-{f}", max_bytes=20_000)
        for topic in topics
        for f in FORMATS
    ]
    text = {"keys": {"type": "utf8"}, "values": {"type": "json"}}
    mirrors.append(mirror("from-java", source.bootstrap, folder, name=TEXT_COPY, **text))
    config = write_config(folder / "config.json", *mirrors)
    # On Spark once; from the other sources the same work in one process.
    on_spark = source.version == VERSIONS[-1]
    result = logmirror("run", "--until-now", "-c", config) if on_spark else run_now(config)
    assert result.returncode == 0, result.stderr
    yield Copied(topics, config, folder)
    del kept_open


def fill(broker):
    """Write what is hard to copy; returns the topics, and what must live as long as they do."""
    broker.create_topic("odd", partitions=len(CODECS) + 1)
    for partition, codec in enumerate(CODECS):
        for number, batching in enumerate((LINGER, SMALL, {**LINGER, "batch.size": 4000})):
            messages = odd_messages(120, seed=10 * partition + number)
            config = {**batching, "compression.type": codec}
            produce(broker.bootstrap, "odd", messages, partition=partition, config=config)

    # The Java client frames snappy in its own way.
    broker.create_topic("from-java")
    lines = "".join(f"k{n}\tgr\u00fc\u00dfe {n}\n" for n in range(500))
    arguments = ("--bootstrap-server", broker.bootstrap, "--topic", "from-java")
    options = ("--compression-codec=snappy", "--property", "parse.key=true")
    tools = ApacheTools(VERSIONS[-1])
    tools.run("kafka-console-producer", *arguments, *options, stdin=lines)

    names = {"odd": len(CODECS) + 1, "from-java": 1, "appended": 1, "transactions": 1}
    broker.create_topic("appended", config={"message.timestamp.type": "LogAppendTime"})
    produce(broker.bootstrap, "appended", odd_messages(200, seed=5), config=LINGER)
    kept_open = fill_with_transactions(broker)
    topics = {
        name: Source(broker.bootstrap, name, partitions=range(n)) for name, n in names.items()
    }
    return topics, kept_open


def fill_with_transactions(broker):
    """Write transactions of two producers, plain records between them, and one left open."""
    broker.create_topic("transactions")
    sizes = [(3, True), (40, False), (1, True), (25, True), (2, False), (60, False), (30, True)]
    for round_number, transactional_id in enumerate(("first", "second", "first")):
        transactions = [
            (odd_messages(size, seed=100 * round_number + size), commit) for size, commit in sizes
        ]
        produce_transactions(
            broker.bootstrap, "transactions", transactions, transactional_id=transactional_id
        )
        produce(broker.bootstrap, "transactions", odd_messages(50, seed=round_number))
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": "open",
            "transaction.timeout.ms": 900_000,
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("transactions", value=b"not yet")
    producer.flush(60)
    produce(broker.bootstrap, "transactions", odd_messages(20, seed=9))
    return producer


@pytest.mark.mirror_v3("FSL-01", "E2E-02")
def test_every_record_is_copied_once_unchanged_and_in_order(copied):
    for topic, form, name in copied.copies():
        assert topic.anomalies(copied.root, form, name=name) == [], name
    odd = [row for n in range(len(CODECS)) for row in copied.topics["odd"].rows(n)]
    assert len(odd) == 360 * len(CODECS)
    assert {row.value for row in odd} >= {None, b""}
    assert {row.key for row in odd} >= {None, b""}
    assert any(value is None for row in odd for _, value in row.headers)
    assert any(len({k for k, _ in row.headers}) < len(row.headers) for row in odd)
    for name, topic in copied.topics.items():
        kinds = {row.timestamp_type for n in topic.partitions for row in topic.rows(n)}
        assert kinds == {LOG_APPEND_TIME if name == "appended" else CREATE_TIME}


def test_what_is_not_committed_is_not_copied(copied):
    topic = copied.topics["transactions"]
    start, end = topic.bounds(0)

    assert len(topic.rows(0)) == 3 * (3 + 1 + 25 + 30 + 50)
    assert end - start == len(topic.rows(0)) + 3 * (40 + 2 + 60) + 3 * 7
    for form in FORMATS:
        assert topic.anomalies(copied.root, form, name=f"transactions-{form}") == []


def test_status_shows_that_nothing_is_left_to_copy(copied):
    rows = logmirror_json("status", "-c", copied.config)

    partitions = sum(len(topic.partitions) for topic in copied.topics.values())
    assert len(rows) == partitions * len(FORMATS) + 1  # TEXT_COPY
    for row in rows:
        end = copied.topics[row["topic"]].bounds(row["partition"])[1]
        assert (row["source_end"], row["position"], row["lag"]) == (end, end, 0)


def test_verify_proves_every_object_against_the_source(copied):
    reports = logmirror_json("verify", "--deep", "--against-source", "-c", copied.config)

    assert len(reports) == len(copied.copies()) + len(FORMATS) * EMPTY + 1  # TEXT_COPY
    for report in reports:
        assert report["problems"] == []
        assert report["compared_with_source"] == report["objects"]
        assert (report["objects"] > 0) == (report["next_offset"] > 0)
        if report["destination"] != "transactions-native":  # it keeps aborted records, as logs do
            rows = copied.topics[report["topic"]].rows(report["partition"])
            assert report["records"] == len(rows)


@pytest.mark.mirror_v3("E2E-02")
def test_a_second_run_adds_nothing(copied):
    before = files_of(copied)

    result = run_now(copied.config)

    assert result.returncode == 0, result.stderr
    assert "flushed" not in result.stderr
    assert files_of(copied) == before


def files_of(copied):
    return {
        path: path.stat().st_mtime_ns
        for _, _, name in copied.copies()
        for path in (copied.root / name).rglob("*")
        if path.is_file()
    }


def test_a_partition_is_cut_into_several_objects(copied):
    for form in FORMATS:
        for n in range(len(CODECS)):
            assert len(object_names(copied.root / f"odd-{form}" / str(n))) > 1, (form, n)


@pytest.mark.mirror_v3("E2E-09")
def test_duckdb_reads_a_whole_archive_with_the_columns_of_the_kafka_source(copied):
    archive = f"read_parquet('{copied.root}/odd-parquet/*/*.parquet')"
    connection = duckdb.connect()

    described = connection.execute(f"DESCRIBE SELECT * FROM {archive}").fetchall()
    count = connection.execute(f'SELECT count(*), sum("offset") FROM {archive}').fetchone()

    assert {name: kind for name, kind, *_ in described} == DUCKDB_COLUMNS
    offsets = [row.offset for n in range(len(CODECS)) for row in copied.topics["odd"].rows(n)]
    assert count == (len(offsets), sum(offsets))


@pytest.mark.parametrize("source", VERSIONS[-1:], indirect=True)
def test_spark_reads_a_whole_archive_with_the_columns_of_its_kafka_source(copied):
    folders = [f"{copied.root}/odd-parquet/{n}" for n in range(len(CODECS))]

    result = subprocess.run(
        [sys.executable, "-c", READ_BY_SPARK, ",".join(folders), f"{copied.root}/{TEXT_COPY}/0"],
        text=True,
        capture_output=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    found, found_text = map(json.loads, result.stdout.splitlines())
    offsets = [row.offset for n in range(len(CODECS)) for row in copied.topics["odd"].rows(n)]
    assert found == {"columns": SPARK_COLUMNS, "count": len(offsets), "offsets": sum(offsets)}
    assert found_text == {
        "columns": SPARK_COLUMNS | {"key": "string", "value": "string"},
        "count": 500,
        "offsets": sum(range(500)),
    }
