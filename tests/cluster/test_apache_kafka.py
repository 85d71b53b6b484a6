"""The client against Apache Kafka, both releases: it reads what stock clients wrote.

Method: librdkafka writes, the client reads raw batches, the pure Python decoder decodes them.
Topics are deleted, trimmed and recreated while they are read.
"""

import time

import pytest
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, odd_messages, produce, produce_transactions
from logmirror.cluster.client import EARLIEST, LATEST, NO_OFFSET, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import PositionError
from logmirror.model import TopicPartition
from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import decode_reference


@pytest.fixture
def client(apache_kafka):
    with ClusterClient(connection_settings(apache_kafka.bootstrap)) as client:
        yield client


def read_all(client, partition, *, topic_id, view_bytes=1 << 16, read_committed=True):
    """Every whole batch of the partition, and the aborted transactions that were listed."""
    view, data, aborted, offset = memoryview(bytearray(view_bytes)), b"", set(), 0
    (end,) = client.list_offsets([partition], LATEST, read_committed=read_committed).values()
    while offset < end:
        result = client.fetch(
            partition, offset, view, topic_id=topic_id, read_committed=read_committed
        )
        if result.needed_bytes:
            view = memoryview(bytearray(result.needed_bytes))
            continue
        aborted |= set(result.aborted)
        at = 0
        while at + 61 <= result.size:
            header = parse_header(view, at)
            if at + header.size_bytes > result.size:
                break
            data += view[at : at + header.size_bytes]
            offset, at = header.last_offset + 1, at + header.size_bytes
        assert at > 0
    return data, aborted


@pytest.mark.parametrize("by_id", [True, False])
def test_what_librdkafka_wrote_is_fetched_whole(apache_kafka, client, topic_name, by_id):
    apache_kafka.create_topic(topic_name, 2)
    messages = odd_messages(500, seed=1)
    offsets = produce(apache_kafka.bootstrap, topic_name, messages, partition=1)
    topic = client.topic(topic_name)

    data, aborted = read_all(
        client,
        TopicPartition(topic_name, 1),
        topic_id=topic.topic_id if by_id else None,
        view_bytes=3000,
    )

    records = decode_reference(data)
    assert [record.offset for record in records] == offsets
    assert [(r.key, r.value, r.headers, r.timestamp_ms) for r in records] == [
        (m.key, m.value, m.headers, m.timestamp_ms) for m in messages
    ]
    assert aborted == set()


def test_a_topic_has_an_id_leaders_and_configurations(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name, 3, {"retention.ms": 12_345_678})
    topic = client.topic(topic_name)
    assert len(topic.topic_id) == 16
    assert any(topic.topic_id)
    assert {n: (p.leader, p.error) for n, p in topic.partitions.items()} == {
        0: (1, 0),
        1: (1, 0),
        2: (1, 0),
    }
    assert topic_name in client.topics()
    configs = client.describe_topic_configs(topic_name)
    assert configs["retention.ms"] == "12345678"
    assert configs["cleanup.policy"] == "delete"
    assert len(client.cluster_id()) == 22


def test_some_configurations_of_several_topics_take_one_request(apache_kafka, client, topic_name):
    compacted = f"{topic_name}-compacted"
    apache_kafka.create_topic(topic_name)
    apache_kafka.create_topic(compacted, 1, {"cleanup.policy": "compact,delete"})
    keys = ("cleanup.policy", "delete.retention.ms")
    found = client.describe_configs_of_topics([topic_name, compacted, "no-such-topic"], keys)
    day = "86400000"
    assert found == {
        topic_name: {"cleanup.policy": "delete", "delete.retention.ms": day},
        compacted: {"cleanup.policy": "compact,delete", "delete.retention.ms": day},
    }


def test_offsets_are_found_by_end_and_by_time(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name, 2)
    messages = [Message(value=b"v", timestamp_ms=1_000_000 + 1000 * n) for n in range(10)]
    produce(apache_kafka.bootstrap, topic_name, messages)
    full, empty = TopicPartition(topic_name, 0), TopicPartition(topic_name, 1)
    assert client.list_offsets([full, empty], EARLIEST) == {full: 0, empty: 0}
    assert client.list_offsets([full, empty], LATEST) == {full: 10, empty: 0}
    assert client.list_offsets([full, empty], 1_003_500) == {full: 4, empty: NO_OFFSET}
    assert client.list_offsets([full], 1_010_000) == {full: NO_OFFSET}


def test_an_open_transaction_ends_the_stable_part_and_an_aborted_one_is_listed(
    apache_kafka, client, topic_name
):
    apache_kafka.create_topic(topic_name)
    one = [Message(value=b"x")]
    produce_transactions(
        apache_kafka.bootstrap,
        topic_name,
        [(one, True), (one * 2, False), (one, True)],
        transactional_id=topic_name,
    )
    partition = TopicPartition(topic_name, 0)
    topic_id = client.topic(topic_name).topic_id
    # Records and their markers: 0 M1, 2 3 M4, 5 M6.
    assert client.list_offsets([partition], LATEST) == {partition: 7}

    data, aborted = read_all(client, partition, topic_id=topic_id)
    ((_, first_offset),) = aborted
    assert first_offset == 2
    assert [record.offset for record in decode_reference(data)] == [0, 2, 3, 5]

    data, aborted = read_all(client, partition, topic_id=topic_id, read_committed=False)
    assert aborted == set()
    assert [record.offset for record in decode_reference(data)] == [0, 2, 3, 5]


def test_a_batch_larger_than_the_view_says_how_much_it_needs(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name)
    produce(apache_kafka.bootstrap, topic_name, [Message(value=bytes(50_000))])
    partition, view = TopicPartition(topic_name, 0), memoryview(bytearray(1000))
    topic_id = client.topic(topic_name).topic_id
    result = client.fetch(partition, 0, view, topic_id=topic_id)
    assert result.size == 0
    assert 50_000 < result.needed_bytes < 50_200
    larger = memoryview(bytearray(result.needed_bytes))
    assert client.fetch(partition, 0, larger, topic_id=topic_id).size == len(larger)


def test_an_empty_end_is_waited_at_as_long_as_asked(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name)
    partition, view = TopicPartition(topic_name, 0), memoryview(bytearray(1000))
    client.topic(topic_name)
    begun = time.monotonic()
    result = client.fetch(partition, 0, view, topic_id=None, max_wait_ms=400)
    assert (result.size, result.high_watermark) == (0, 0)
    assert time.monotonic() - begun >= 0.39


@pytest.mark.mirror_v3("E2E-14")
def test_a_position_below_the_log_start_is_reported_with_the_bounds(
    apache_kafka, client, topic_name
):
    apache_kafka.create_topic(topic_name)
    produce(apache_kafka.bootstrap, topic_name, [Message(value=b"v")] * 10)
    admin = AdminClient({"bootstrap.servers": apache_kafka.bootstrap})
    for future in admin.delete_records([ConfluentPartition(topic_name, 0, 6)]).values():
        future.result(20)
    partition, view = TopicPartition(topic_name, 0), memoryview(bytearray(1000))
    with pytest.raises(PositionError) as caught:
        client.fetch(partition, 3, view, topic_id=client.topic(topic_name).topic_id)
    facts = caught.value.facts
    assert (facts["offset"], facts["log_start_offset"], facts["log_end_offset"]) == (3, 6, 10)
    assert client.fetch(partition, 6, view, topic_id=None).log_start_offset == 6
    with pytest.raises(PositionError):
        client.fetch(partition, 11, view, topic_id=None)


def test_a_topic_created_again_under_its_name_is_another(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name)
    produce(apache_kafka.bootstrap, topic_name, [Message(value=b"old")])
    partition, view = TopicPartition(topic_name, 0), memoryview(bytearray(1000))
    old_id = client.topic(topic_name).topic_id
    client.fetch(partition, 0, view, topic_id=old_id)
    apache_kafka.delete_topic(topic_name)
    apache_kafka.create_topic(topic_name)
    produce(apache_kafka.bootstrap, topic_name, [Message(value=b"new")])

    with pytest.raises(PositionError) as caught:
        client.fetch(partition, 0, view, topic_id=old_id)
    new_id = client.topic(topic_name).topic_id
    assert caught.value.facts["expected_topic_id"] == old_id.hex()
    assert caught.value.facts["found_topic_id"] == new_id.hex()
    assert client.fetch(partition, 0, view, topic_id=new_id).size > 0


def test_a_deleted_topic_is_gone_and_looking_does_not_create_it(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name)
    partition, view = TopicPartition(topic_name, 0), memoryview(bytearray(1000))
    topic_id = client.topic(topic_name).topic_id
    apache_kafka.delete_topic(topic_name)
    with pytest.raises(NotFoundError):
        client.fetch(partition, 0, view, topic_id=topic_id, max_wait_ms=0)
    with pytest.raises(NotFoundError):
        client.topic(topic_name)
    assert topic_name not in client.topics()
