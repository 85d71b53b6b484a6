"""Writing to Apache Kafka, both releases: stock clients read what was written.

Method: the pipeline writes batches of the pure Python encoder, librdkafka reads them back; log ends
and producer states are compared with what was written. Tests share brokers, but no topics.
"""

import time
from dataclasses import replace

import pytest

from kit.judges.clients import Message, produce, produce_transactions, rows_by_librdkafka
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.client import EARLIEST, LATEST, ClusterClient
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import FencedError, PositionError, UsageError
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.compression import Codec
from logmirror.wire.produce import PRODUCE_VERSION_MAX, PRODUCE_VERSION_MIN
from logmirror.wire.records import Record, encode_reference

PRODUCER = 0x6C6D << 48 | 7
START_MS = 1_700_000_000_000


def records(count, *, first=0):
    kind = TimestampType.CREATE_TIME
    return [
        Record(n, START_MS + first + n, kind, b"k%d" % (first + n), b"v" * (first + n), ())
        for n in range(count)
    ]


def batch(count, *, first=0, sequence=None, codec=Codec.NONE, timestamp_ms=None, **fields):
    """Records whose values are as long as their numbers; with a sequence if `sequence` is given."""
    rows = records(count, first=first)
    if timestamp_ms is not None:
        rows = [row._replace(timestamp_ms=timestamp_ms) for row in rows]
    if sequence is not None:
        fields |= {"producer_id": PRODUCER, "producer_epoch": 0, "base_sequence": sequence}
    return memoryview(
        encode_reference(rows, base_offset=0, last_offset=count - 1, codec=codec, **fields)
    )


@pytest.fixture
def client(apache_kafka):
    settings = replace(connection_settings(apache_kafka.bootstrap), retry_budget_ms=20_000)
    with ClusterClient(settings) as client:
        yield client


@pytest.fixture
def partition(apache_kafka, topic_name):
    return TopicPartition(apache_kafka.create_topic(topic_name), 0)


@pytest.fixture
def pipeline(client):
    with client.pipeline() as pipeline:
        yield pipeline


def collect_all(pipeline):
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    return responses


def test_many_requests_under_way_are_stored_in_order_and_read_by_librdkafka(
    apache_kafka, client, pipeline, topic_name
):
    apache_kafka.create_topic(topic_name, 3)
    partitions = [TopicPartition(topic_name, n) for n in range(3)]
    for n in range(20):
        codec = list(Codec)[n % len(Codec)]
        one = batch(5, first=5 * n, sequence=5 * n, codec=codec)
        pipeline.send([(partition, one) for partition in partitions])

    responses = collect_all(pipeline)

    assert {(response.error_code, response.error) for response in responses} == {(0, None)}
    for partition in partitions:
        bases = [response.base_offset for response in responses if response.partition == partition]
        assert bases == list(range(0, 100, 5))
        rows = rows_by_librdkafka(apache_kafka.bootstrap, topic_name, partition=partition.partition)
        assert [(row.offset, row.key, row.value, row.timestamp_ms) for row in rows] == [
            (n, b"k%d" % n, b"v" * n, START_MS + n) for n in range(100)
        ]


@pytest.mark.parametrize("version", range(PRODUCE_VERSION_MIN, PRODUCE_VERSION_MAX + 1))
def test_each_version_is_understood(client, pipeline, partition, version):
    pipeline.send([(partition, batch(1))])
    collect_all(pipeline)
    (link,) = pipeline._connections.values()  # noqa: SLF001  # a broker picks one; we try each
    link._version = version  # noqa: SLF001  # the same
    pipeline.send([(partition, batch(2, sequence=0))])
    pipeline.send([(partition, batch(2, sequence=50))])
    good, bad = collect_all(pipeline)
    assert (good.error, good.base_offset, good.log_append_time_ms) == (None, 1, -1)
    assert good.log_start_offset == (0 if version >= 5 else -1)
    assert (bad.error_code, type(bad.error)) == (45, PositionError)
    assert client.log_ends([partition]) == {partition: LogEnd(3, 0)}


def test_what_follows_a_refused_batch_is_refused_and_a_duplicate_is_recognised(
    client, pipeline, partition
):
    for sequence in (0, 10, 30, 40):
        pipeline.send([(partition, batch(10, sequence=sequence))])
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    codes = [response.error_code for response in responses]
    assert codes[:3] == [0, 0, 45]
    assert responses[3].error_code in (45, -2), "refused there, or here when the refusal was in"
    pipeline.send([(partition, batch(10, sequence=0))])
    (again,) = collect_all(pipeline)
    assert (again.error, again.base_offset) == (None, 0)
    assert again.log_append_time_ms >= 0, "the sign of a duplicate"
    assert client.log_ends([partition])[partition].end_offset == 20


def test_a_batch_that_is_too_large_is_refused_alone(apache_kafka, pipeline, topic_name):
    apache_kafka.create_topic(topic_name, 2, {"max.message.bytes": 1000})
    small, large = (TopicPartition(topic_name, n) for n in range(2))
    pipeline.send([(small, batch(1)), (large, batch(60))])
    responses = {response.partition: response for response in collect_all(pipeline)}
    assert responses[small].error is None
    assert (responses[large].error_code, type(responses[large].error)) == (10, UsageError)


def test_a_damaged_batch_is_refused_with_the_broker_s_words(pipeline, client, partition):
    damaged = bytearray(batch(3, sequence=0))
    damaged[-1] ^= 1
    pipeline.send([(partition, memoryview(damaged))])
    (response,) = collect_all(pipeline)
    assert response.error_code in (2, 87)
    assert response.error.kind == "corruption"
    assert client.log_ends([partition])[partition].end_offset == 0


# Ends and states.


def test_the_log_end_is_read_when_new_filled_trimmed_and_behind_open_transactions(
    apache_kafka, client, pipeline, topic_name
):
    apache_kafka.create_topic(topic_name, 2)
    used, empty = (TopicPartition(topic_name, n) for n in range(2))
    assert client.log_ends([used, empty]) == {used: LogEnd(0, 0), empty: LogEnd(0, 0)}
    pipeline.send([(used, batch(10))])
    collect_all(pipeline)
    with_open = client.transactional_producer(topic_name)
    identity = with_open.init()
    with_open.add_partitions([used])
    with client.pipeline(transactional_id=topic_name) as transactional:
        one = batch(
            2,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=0,
            transactional=True,
        )
        transactional.send([(used, one)])
        collect_all(transactional)
    assert client.log_ends([used])[used].end_offset == 12
    assert client.list_offsets([used], LATEST) == {used: 10}
    with_open.end(commit=False)
    until(lambda: client.log_ends([used])[used].end_offset == 13)
    until(lambda: client.list_offsets([used], LATEST) == {used: 13})
    assert client.admin.delete_records({used: 13}) == {used: 13}
    assert client.list_offsets([used], EARLIEST) == {used: 13}
    assert client.log_ends([used])[used].end_offset == 13


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_leader_remembers_a_producer_until_it_does_not(client, pipeline, partition):
    assert client.producer_states({partition: PRODUCER}) == {partition: None}
    now_ms = int(time.time() * 1000)
    pipeline.send([(partition, batch(10, sequence=5, timestamp_ms=now_ms))])
    collect_all(pipeline)
    expected = ProducerState(producer_epoch=0, last_sequence=14, last_timestamp_ms=now_ms)
    assert client.producer_states({partition: PRODUCER}) == {partition: expected}
    assert client.producer_states({partition: PRODUCER + 1}) == {partition: None}


@pytest.mark.parametrize("ask", ["log_ends", "producer_states", "delete_records"])
def test_a_partition_that_does_not_exist_is_a_usage_error(client, topic_name, ask):
    nowhere = TopicPartition(topic_name, 0)
    calls = {
        "log_ends": lambda: client.log_ends([nowhere]),
        "producer_states": lambda: client.producer_states({nowhere: 1}),
        "delete_records": lambda: client.admin.delete_records({nowhere: 0}),
    }
    with pytest.raises(NotFoundError):
        calls[ask]()


# Topics.


def test_a_topic_is_created_once_and_grows(client, topic_name):
    client.admin.create_topic(topic_name, partition_count=2, configs={"retention.ms": "123456"})
    until(lambda: topic_name in client.topics())
    assert list(client.topic(topic_name).partitions) == [0, 1]
    assert client.describe_topic_configs(topic_name)["retention.ms"] == "123456"
    with pytest.raises(UsageError) as caught:
        client.admin.create_topic(topic_name, partition_count=2)
    assert caught.value.facts["error"] == "TOPIC_ALREADY_EXISTS"
    client.admin.create_partitions(topic_name, 3)
    until(lambda: len(client.topic(topic_name).partitions) == 3)
    third = TopicPartition(topic_name, 2)
    assert client.log_ends([third]) == {third: LogEnd(0, 0)}
    with pytest.raises(UsageError) as caught:
        client.admin.create_partitions(topic_name, 3)
    assert caught.value.facts["error"] == "INVALID_PARTITIONS"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"configs": {"retention.ms": "soon"}}, "INVALID_CONFIG"),
        ({"replication_factor": 5}, "INVALID_REPLICATION_FACTOR"),
        ({"partition_count": 0}, "INVALID_PARTITIONS"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_with_the_broker_s_words(
    client, topic_name, wrong, error
):
    with pytest.raises(UsageError) as caught:
        client.admin.create_topic(topic_name, **{"partition_count": 1, **wrong})
    assert caught.value.facts["error"] == error
    assert caught.value.facts["reason"]
    assert caught.value.facts["topic"] == topic_name


def test_records_cannot_be_deleted_beyond_the_end(client, pipeline, partition):
    pipeline.send([(partition, batch(10))])
    collect_all(pipeline)
    with pytest.raises(PositionError) as caught:
        client.admin.delete_records({partition: 11})
    assert caught.value.facts["topic"] == partition.topic
    assert client.admin.delete_records({partition: 4}) == {partition: 4}
    assert client.list_offsets([partition], EARLIEST) == {partition: 4}


def test_each_broker_returns_its_configuration(client):
    ((node, configs),) = client.admin.broker_configs().items()
    assert node == 1
    assert configs["producer.id.expiration.ms"] == "86400000"
    assert configs["auto.create.topics.enable"] == "false"


# Control records.


def test_markers_take_one_offset_each_and_are_invisible(apache_kafka, client, pipeline, topic_name):
    apache_kafka.create_topic(topic_name, 2)
    one, other = (TopicPartition(topic_name, n) for n in range(2))
    pipeline.send([(one, batch(3, sequence=0)), (other, batch(3, sequence=0))])
    collect_all(pipeline)
    assert client.admin.may_write_markers() is True

    written = client.admin.write_txn_markers(
        {one: [TxnMarker(99, 0)] * 5, other: [TxnMarker(98, 0, commit=True), TxnMarker(97, 3)]}
    )

    assert written == {one: None, other: None}
    ends = {partition: end.end_offset for partition, end in client.log_ends([one, other]).items()}
    assert ends == {one: 8, other: 5}
    pipeline.send([(one, batch(2, first=3, sequence=3))])
    (response,) = collect_all(pipeline)
    assert (response.error, response.base_offset) == (None, 8)
    for level in ("read_committed", "read_uncommitted"):
        rows = rows_by_librdkafka(
            apache_kafka.bootstrap, topic_name, config={"isolation.level": level}
        )
        assert [row.offset for row in rows] == [0, 1, 2, 8, 9]


def test_a_marker_of_an_old_epoch_is_refused_by_name_of_its_partition(
    client, partition, apache_kafka
):
    assert client.admin.write_txn_markers({partition: [TxnMarker(99, 5)]}) == {partition: None}
    (error,) = client.admin.write_txn_markers({partition: [TxnMarker(99, 4)]}).values()
    assert type(error) is FencedError
    assert error.facts["topic"] == partition.topic
    assert client.log_ends([partition])[partition].end_offset == 1


def test_stock_writers_and_the_pipeline_share_a_partition(
    apache_kafka, client, pipeline, topic_name
):
    apache_kafka.create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    produce(apache_kafka.bootstrap, topic_name, [Message(value=b"theirs")] * 3)
    produce_transactions(
        apache_kafka.bootstrap,
        topic_name,
        [([Message(value=b"theirs")], True)],
        transactional_id=topic_name,
    )
    end = client.log_ends([partition])[partition].end_offset
    assert end == 5
    pipeline.send([(partition, batch(2, sequence=0))])
    (response,) = collect_all(pipeline)
    assert response.base_offset == end
