"""Goal: stock admin clients manage topics here as on Kafka.

Method: librdkafka, kafka-python and aiokafka each use the operations that they offer. Another
client reads the result back, and once more after the broker was killed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiokafka
import kafka
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewPartitions as AioNewPartitions
from aiokafka.admin.records_to_delete import RecordsToDelete
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    OffsetSpec,
    ResourceType,
)
from kafka.admin import AbortTransactionSpec

from kit.judges.clients import Message, produce, rows_by_aiokafka, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = pytest.mark.in_bucket


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket) as broker:
        yield broker


def _admin(broker: EmbeddedBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})


def _offset(admin: AdminClient, topic: str, spec: OffsetSpec) -> int:
    partition = TopicPartition(topic, 0)
    [found] = admin.list_offsets({partition: spec}).values()
    return int(found.result(20).offset)


def _settings(admin: AdminClient, topic: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    [found] = admin.describe_configs([resource]).values()
    return {name: entry.value for name, entry in found.result(20).items() if not entry.is_default}


def _alter(
    admin: AdminClient, topic: str, *changes: tuple[str, str | None, AlterConfigOpType]
) -> None:
    entries = [ConfigEntry(n, v, incremental_operation=operation) for n, v, operation in changes]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    [done] = admin.incremental_alter_configs([resource]).values()
    done.result(20)


def test_librdkafka_adds_partitions_and_they_hold_records_after_a_kill(broker, topic_name):
    admin = _admin(broker)
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(value=b"old")])

    admin.create_partitions([NewPartitions(topic_name, 3)])[topic_name].result(20)

    for partition in (1, 2):
        assert produce(
            broker.bootstrap, topic_name, [Message(value=b"%d" % partition)], partition=partition
        ) == [0]
    broker.kill()
    broker.start()
    found = [
        [row.value for row in rows_by_librdkafka(broker.bootstrap, topic_name, partition=number)]
        for number in range(3)
    ]
    assert found == [[b"old"], [b"1"], [b"2"]]
    with pytest.raises(KafkaException) as raised:
        admin.create_partitions([NewPartitions(topic_name, 2)])[topic_name].result(20)
    assert raised.value.args[0].name() == "INVALID_PARTITIONS"


def test_librdkafka_deletes_records(broker, topic_name):
    admin = _admin(broker)
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(50)])

    [done] = admin.delete_records([TopicPartition(topic_name, 0, 20)]).values()

    assert done.result(20).low_watermark == 20
    assert _offset(admin, topic_name, OffsetSpec.earliest()) == 20
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, start=20))
    assert [row.value for row in rows] == [b"%d" % n for n in range(20, 50)]
    with pytest.raises(KafkaException) as raised:
        list(rows_by_librdkafka(broker.bootstrap, topic_name, start=19))
    assert "Offset out of range" in str(raised.value)
    [refused] = admin.delete_records([TopicPartition(topic_name, 0, 51)]).values()
    with pytest.raises(KafkaException) as raised:
        refused.result(20)
    assert raised.value.args[0].name() == "OFFSET_OUT_OF_RANGE"


def test_a_consumer_that_stands_in_deleted_records_begins_where_the_log_does(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(50)])
    admin = _admin(broker)
    [done] = admin.delete_records([TopicPartition(topic_name, 0, 20)]).values()
    done.result(20)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "unused",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )

    consumer.assign([TopicPartition(topic_name, 0, 3)])
    message = consumer.poll(20)
    consumer.close()

    assert message is not None
    assert message.error() is None
    assert message.offset() == 20


def test_librdkafka_changes_settings_and_they_hold_after_a_kill(broker, topic_name):
    admin = _admin(broker)
    create_topic(broker.bootstrap, topic_name, 1, {"segment.bytes": "5000"})
    _alter(
        admin,
        topic_name,
        ("max.message.bytes", "1000", AlterConfigOpType.SET),
        ("segment.bytes", None, AlterConfigOpType.DELETE),
        ("message.timestamp.type", "LogAppendTime", AlterConfigOpType.SET),
    )

    for _ in range(2):
        wanted = {"max.message.bytes": "1000", "message.timestamp.type": "LogAppendTime"}
        assert _settings(admin, topic_name) == wanted
        with pytest.raises(RuntimeError, match="MSG_SIZE_TOO_LARGE"):
            produce(broker.bootstrap, topic_name, [Message(value=b"x" * 2000)])
        broker.kill()
        broker.start()
    produce(broker.bootstrap, topic_name, [Message(value=b"x", timestamp_ms=1000)])
    [row] = rows_by_aiokafka(broker.bootstrap, topic_name)
    assert row.timestamp_type == 1
    assert row.timestamp_ms > 1000
    with pytest.raises(KafkaException, match=r"min\.insync\.replicas: this broker supports only 1"):
        _alter(admin, topic_name, ("min.insync.replicas", "2", AlterConfigOpType.SET))
    assert _settings(admin, topic_name) == wanted


def test_librdkafka_reads_over_markers_and_goes_on_behind_them(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        for number in range(5):
            produce(broker.bootstrap, topic_name, [Message(value=b"%d" % number)])
            partition.write_markers(*[(99, 0)] * 100)

    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))

    assert [row.offset for row in rows] == [0, 101, 202, 303, 404]
    assert rows_by_aiokafka(broker.bootstrap, topic_name, start=405) == []
    assert _offset(_admin(broker), topic_name, OffsetSpec.latest()) == 505


def test_kafka_python_does_all_of_it(embedded, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")] * 10)
    admin = kafka.KafkaAdminClient(bootstrap_servers=embedded.bootstrap)
    try:
        partition = kafka.TopicPartition(topic_name, 0)
        admin.create_partitions({topic_name: 4})
        assert admin.delete_records({partition: 4})[partition]["low_watermark"] == 4
        [producers] = admin.describe_producers([partition]).values()
        admin.abort_transaction(AbortTransactionSpec(partition, 99, 0))
        resource = kafka.admin.ConfigResource("TOPIC", topic_name, {"segment.bytes": "7000"})
        admin.alter_configs([resource])
        described = admin.describe_topics([topic_name])
    finally:
        admin.close()

    [producer] = producers.active_producers
    assert (producer.last_sequence, producer.producer_epoch) == (9, 0)
    assert produce(embedded.bootstrap, topic_name, [Message(value=b"behind the marker")]) == [11]
    assert len(described[0]["partitions"]) == 4
    assert _settings(_admin(embedded), topic_name) == {"segment.bytes": "7000"}


def test_aiokafka_adds_partitions_and_deletes_records(embedded, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")] * 10)

    async def act() -> dict[aiokafka.TopicPartition, int]:
        admin = AIOKafkaAdminClient(bootstrap_servers=embedded.bootstrap)
        await admin.start()
        try:
            await admin.create_partitions({topic_name: AioNewPartitions(2)})
            partition = aiokafka.TopicPartition(topic_name, 0)
            return await admin.delete_records({partition: RecordsToDelete(before_offset=7)})
        finally:
            await admin.close()

    assert asyncio.run(act()) == {aiokafka.TopicPartition(topic_name, 0): 7}
    assert produce(embedded.bootstrap, topic_name, [Message(value=b"y")], partition=1) == [0]
    assert [row.offset for row in rows_by_aiokafka(embedded.bootstrap, topic_name, start=7)] == [
        7,
        8,
        9,
    ]
