"""The client against three brokers at once: librdkafka's mock cluster, another implementation.

Method: the mock runs inside a confluent-kafka producer, which writes to partitions of three
leaders. It also covers older Fetch versions.
"""

import pytest
from confluent_kafka import Producer

from logmirror.cluster.client import EARLIEST, LATEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.model import TopicPartition
from logmirror.wire.records import decode_reference

BROKER_COUNT = 3


@pytest.fixture
def mock():
    """A producer with brokers inside."""
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": BROKER_COUNT})
    yield producer
    producer.flush(5)


@pytest.fixture
def client(mock):
    brokers = mock.list_topics(timeout=10).brokers.values()
    servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    with ClusterClient(connection_settings(servers)) as client:
        yield client


def test_partitions_of_several_leaders_are_listed_and_fetched(mock, client):
    names = [f"orders-{n}" for n in range(8)]
    for name in names:
        mock.list_topics(name, timeout=10)  # the mock creates what is asked for, 4 partitions
        for number in range(40):
            mock.produce(name, f"v{number}".encode(), partition=number % 4)
    assert mock.flush(10) == 0

    topics = {name: client.topic(name) for name in names}
    partitions = [TopicPartition(name, n) for name, t in topics.items() for n in t.partitions]
    leaders = {p.leader for topic in topics.values() for p in topic.partitions.values()}
    assert len(leaders) > 1, "it spreads 32 partitions over 3 brokers at random"
    assert client.list_offsets(partitions, EARLIEST) == dict.fromkeys(partitions, 0)
    assert client.list_offsets(partitions, LATEST) == dict.fromkeys(partitions, 10)
    for partition in partitions:
        expected = [b"v%d" % n for n in range(partition.partition, 40, 4)]
        assert values_of(client, partition, topics[partition.topic].topic_id) == expected


def values_of(client, partition, topic_id):
    view, values, offset = memoryview(bytearray(1 << 16)), [], 0
    while offset < 10:
        result = client.fetch(partition, offset, view, topic_id=topic_id)
        records = decode_reference(bytes(view[: result.size]))
        values += [record.value for record in records if record.offset >= offset]
        offset = records[-1].offset + 1
    return values
