"""Goal: Spark's Kafka connector has the embedded broker as its cluster, in batches and streams.

Method: Spark writes, reads and copies; librdkafka reads what it wrote, and writes transactions,
one aborted and one open, which a stream must not copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kit.judges.clients import (
    Message,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_librdkafka,
)
from kit.judges.spark_connector import SparkConnector
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

# One process starts Spark, once.
pytestmark = [
    pytest.mark.in_bucket,
    pytest.mark.jvm,
    pytest.mark.xdist_group("spark_connector"),
]

PARTITIONS = range(2)
SOON = {"fetch.wait.max.ms": 20}
"""librdkafka finds the end of a partition after one such wait."""


@pytest.fixture(scope="module")
def spark(embedded, tmp_path_factory) -> Iterator[SparkConnector]:
    with SparkConnector(embedded.bootstrap, tmp_path_factory.mktemp("spark")) as spark:
        yield spark


def _create(broker, *topics):
    for topic in topics:
        create_topic(broker.bootstrap, topic, len(PARTITIONS), {})


def _rows(broker, topic):
    """What librdkafka reads, by partition."""
    return {
        partition: list(
            rows_by_librdkafka(broker.bootstrap, topic, partition=partition, config=SOON)
        )
        for partition in PARTITIONS
    }


def _contents(broker, topic):
    """The same without offsets and times."""
    return {
        partition: [(row.key, row.value, row.headers) for row in rows]
        for partition, rows in _rows(broker, topic).items()
    }


def test_spark_writes_keys_headers_and_partitions(embedded, spark, topic_name):
    _create(embedded, topic_name)

    spark.write(topic_name, 1000, partitions=2)

    for partition, found in _contents(embedded, topic_name).items():
        expected = {
            (
                None if number % 7 == 0 else b"k%d" % number,
                None if number % 11 == 0 else b"v%d" % number,
                ((b"n", b"%d" % number), (b"n", None)),
            )
            for number in range(partition, 1000, 2)
        }
        assert set(found) == expected
        assert len(found) == 500


def test_spark_reads_the_records_and_offsets_that_librdkafka_reads(embedded, spark, topic_name):
    _create(embedded, topic_name)
    for partition, codec in enumerate(("lz4", "snappy")):
        messages = odd_messages(300, seed=partition)
        config = {"compression.type": codec}
        produce(embedded.bootstrap, topic_name, messages, partition=partition, config=config)

    found = spark.read(topic_name)

    assert found == _rows(embedded, topic_name)
    assert [row.offset for row in found[0]] == list(range(300))


def test_a_stream_that_restarts_copies_each_committed_record_once(embedded, spark, topic_name):
    """Spark's sink is at-least-once after a failure, and exact after an end in order."""
    out = f"{topic_name}-out"
    _create(embedded, topic_name, out)
    server = embedded.bootstrap

    def messages(name: str, count: int) -> list[Message]:
        headers = ((b"h", b"1"),)
        return [Message(b"k%d" % n, f"{name}-{n}".encode(), headers) for n in range(count)]

    def stream() -> int:
        copied = spark.stream(topic_name, out)
        assert _contents(embedded, out) == _contents(embedded, topic_name)
        return sum(copied)

    for partition in PARTITIONS:
        transactions = [
            (messages("first", 150), True),
            (messages("aborted", 50), False),
            (messages("second", 20), True),
        ]
        produce_transactions(
            server, topic_name, transactions, partition=partition, transactional_id=topic_name
        )
    assert stream() == 2 * 170
    assert stream() == 0

    writer = Producer({"bootstrap.servers": server, "transactional.id": f"{topic_name}-open"})
    writer.init_transactions(20)
    writer.begin_transaction()
    writer.produce(topic_name, b"open", partition=0)
    assert writer.flush(20) == 0
    for partition in PARTITIONS:
        produce(server, topic_name, messages("behind", 30), partition=partition)
    assert stream() == 30  # of the partition that has no open transaction
    writer.commit_transaction(20)
    assert stream() == 31

    values = [value for rows in _contents(embedded, out).values() for _, value, _ in rows]
    assert len(values) == 2 * 200 + 1
    assert not [value for value in values if value.startswith(b"aborted")]
