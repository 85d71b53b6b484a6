"""Writing to the embedded broker: the same client, the same responses as from Apache Kafka.

Method: the pipeline writes, librdkafka reads; log ends and producer states are compared.
"""

import time

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.servers.embedded import EmbeddedBroker
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.client import EARLIEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.records import Record, encode_reference


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with EmbeddedBroker(tmp_path_factory.mktemp("embedded")) as broker:
        yield broker


@pytest.fixture
def client(broker):
    with ClusterClient(connection_settings(broker.bootstrap)) as client:
        yield client


def batch(count, *, sequence):
    now_ms = int(time.time() * 1000)
    rows = [
        Record(n, now_ms, TimestampType.CREATE_TIME, None, b"%d" % (sequence + n), ())
        for n in range(count)
    ]
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
    return memoryview(encode_reference(rows, base_offset=0, last_offset=count - 1, **producer))


def collect_all(pipeline):
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    return responses


def test_a_topic_is_made_written_measured_and_trimmed(broker, client, topic_name):
    client.admin.create_topic(topic_name, partition_count=2)
    partitions = [TopicPartition(topic_name, n) for n in range(2)]
    with client.pipeline() as pipeline:
        for sequence in range(0, 100, 5):
            one = batch(5, sequence=sequence)
            pipeline.send([(partition, one) for partition in partitions])
        responses = collect_all(pipeline)
        assert {(response.error_code, response.error) for response in responses} == {(0, None)}
        bases = [
            response.base_offset for response in responses if response.partition == partitions[0]
        ]
        assert bases == list(range(0, 100, 5))
        pipeline.send([(partitions[0], batch(5, sequence=200))])
        (refused,) = collect_all(pipeline)
    assert (refused.error_code, type(refused.error)) == (45, PositionError)
    ends = client.log_ends(partitions)
    assert [ends[partition].end_offset for partition in partitions] == [100, 100]
    state = client.producer_states({partitions[1]: 7})[partitions[1]]
    assert (state.producer_epoch, state.last_sequence) == (0, 99)
    assert client.producer_states({partitions[1]: 8}) == {partitions[1]: None}
    found = [row.value for row in rows_by_librdkafka(broker.bootstrap, topic_name)]
    assert found == [b"%d" % n for n in range(100)]
    assert client.admin.delete_records({partitions[0]: 40}) == {partitions[0]: 40}
    assert client.list_offsets(partitions, EARLIEST) == {partitions[0]: 40, partitions[1]: 0}
    client.admin.create_partitions(topic_name, 3)
    assert len(client.topic(topic_name).partitions) == 3


def test_control_records_take_offsets_and_are_invisible(broker, client, topic_name):
    client.admin.create_topic(topic_name, partition_count=1)
    partition = TopicPartition(topic_name, 0)
    assert client.admin.may_write_markers() is True
    with client.pipeline() as pipeline:
        pipeline.send([(partition, batch(2, sequence=0))])
        collect_all(pipeline)
        responses = client.admin.write_txn_markers({partition: [TxnMarker(99, 0)] * 3})
        assert responses == {partition: None}
        assert client.log_ends([partition])[partition].end_offset == 5
        pipeline.send([(partition, batch(2, sequence=2))])
        (response,) = collect_all(pipeline)
    assert (response.error, response.base_offset) == (None, 5)
    rows = rows_by_librdkafka(broker.bootstrap, topic_name)
    assert [(row.offset, row.value) for row in rows] == [
        (0, b"0"),
        (1, b"1"),
        (5, b"2"),
        (6, b"3"),
    ]
