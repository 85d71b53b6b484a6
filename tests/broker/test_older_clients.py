"""Goal: older releases of Python clients work on the embedded broker.

Method: each writes, consumes in a group and commits, in a process of its own; librdkafka of today
reads what it wrote, and an admin client what it committed.
"""

from __future__ import annotations

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import rows_by_librdkafka
from kit.judges.older_clients import run_with
from kit.servers.kafka import create_topic

pytestmark = pytest.mark.in_bucket
COUNT = 200

KAFKA_PYTHON = """
import json, sys
import kafka
bootstrap, topic, count = sys.argv[1:]
count = int(count)
producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, compression_type="gzip", acks="all")
for number in range(count):
    producer.send(topic, key=b"k%d" % number, value=b"v%d" % number, headers=[("h", b"1")])
producer.flush(30)
producer.close()
consumer = kafka.KafkaConsumer(
    topic, bootstrap_servers=bootstrap, group_id=topic, auto_offset_reset="earliest",
    enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=500,
)
values = []
while len(values) < count:
    for records in consumer.poll(timeout_ms=1000).values():
        values += [record.value.decode() for record in records]
consumer.commit()
consumer.close()
print(json.dumps({"version": kafka.__version__, "values": values}))
"""

CONFLUENT = """
import json, sys
import confluent_kafka
bootstrap, topic, count = sys.argv[1:]
count = int(count)
where = {"bootstrap.servers": bootstrap}
settings = {"transactional.id": topic, "compression.type": "zstd"}
producer = confluent_kafka.Producer({**where, **settings})
producer.init_transactions(30)
for end in ("abort", "commit"):
    producer.begin_transaction()
    for number in range(count):
        value = (b"v%d" if end == "commit" else b"aborted-%d") % number
        producer.produce(topic, key=b"k%d" % number, value=value, headers=[("h", b"1")])
    (producer.abort_transaction if end == "abort" else producer.commit_transaction)(30)
consumer = confluent_kafka.Consumer({
    **where, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False,
    "session.timeout.ms": 6000, "partition.assignment.strategy": "cooperative-sticky",
})
consumer.subscribe([topic])
values = []
while len(values) < count:
    values += [m.value().decode() for m in consumer.consume(count, 1) if m.error() is None]
consumer.commit(asynchronous=False)
consumer.close()
print(json.dumps({"version": confluent_kafka.__version__, "values": values}))
"""


def _check(broker, topic, found, version):
    values = [f"v{number}" for number in range(COUNT)]
    assert found == {"version": version, "values": values}
    rows = list(rows_by_librdkafka(broker.bootstrap, topic))
    assert [(row.key, row.value) for row in rows] == [
        (b"k%d" % number, b"v%d" % number) for number in range(COUNT)
    ]
    assert {row.headers for row in rows} == {((b"h", b"1"),)}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    wanted = [ConsumerGroupTopicPartitions(topic, [TopicPartition(topic, 0)])]
    (committed,) = admin.list_consumer_group_offsets(wanted)[topic].result(20).topic_partitions
    assert committed.offset == rows[-1].offset + 1


def test_kafka_python_2_0_2_writes_and_consumes_in_a_group(embedded, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    arguments = (embedded.bootstrap, topic_name, str(COUNT))
    found = run_with("kafka-python==2.0.2", KAFKA_PYTHON, *arguments)
    _check(embedded, topic_name, found, "2.0.2")


def test_librdkafka_2_0_writes_transactions_and_consumes_in_a_group(embedded, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    arguments = (embedded.bootstrap, topic_name, str(COUNT))
    found = run_with("confluent-kafka==2.0.2", CONFLUENT, *arguments)
    _check(embedded, topic_name, found, "2.0.2")
