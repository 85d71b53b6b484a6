"""Goal: a service that reads, writes and commits its offsets in transactions does each record once.

Method: librdkafka's transactional producer and a consumer of a group, as in KIP-447, on the broker
in a process of its own. The broker is killed, and the service is replaced in mid-transaction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = pytest.mark.in_bucket
COUNT = 400
DEADLINE_S = 120


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, bucket=log_bucket) as running:
        create_topic(running.bootstrap, "in", 2, {})
        create_topic(running.bootstrap, "out", 2, {})
        producer = Producer({"bootstrap.servers": running.bootstrap})
        for number in range(COUNT):
            producer.produce("in", key=str(number), value=str(number))
        assert producer.flush(30) == 0
        yield running


class Service:
    """Copies `in` to `out`, each batch and its offsets in one transaction."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        where = {"bootstrap.servers": broker.bootstrap}
        settings = {
            "group.id": "service",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "session.timeout.ms": 6000,
        }
        self.consumer = Consumer(where | settings)
        self.consumer.subscribe(["in"])
        self.producer = Producer(where | {"transactional.id": "service"})
        self.producer.init_transactions(30)

    def step(self, *, completes: bool = True) -> int:
        """Copy what arrives within a moment; returns the number of records."""
        found = [m for m in self.consumer.consume(25, 1.0) if m.error() is None]
        if not found:
            return 0
        self.producer.begin_transaction()
        for message in found:
            self.producer.produce("out", key=message.key(), value=message.value())
        offsets = self.consumer.position(self.consumer.assignment())
        members = self.consumer.consumer_group_metadata()
        self.producer.send_offsets_to_transaction(offsets, members, 30)
        self.producer.flush(30)
        if completes:
            self.producer.commit_transaction(30)
        return len(found)

    def close(self) -> None:
        self.consumer.close()


def committed(broker: EmbeddedBroker, count: int) -> list[int]:
    """Return what a reader of committed records finds, until there are no more for a second."""
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "reader",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition("out", n, 0) for n in (0, 1)])
    values: list[int] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [int(m.value()) for m in consumer.consume(500, 1.0) if m.error() is None]
        values += found
        if not found and len(values) >= count:
            break
    consumer.close()
    return values


def test_each_record_is_copied_once_although_the_broker_is_killed_and_the_service_replaced(broker):
    service, done, kills = Service(broker), 0, 0
    deadline = time.monotonic() + DEADLINE_S
    while done < COUNT:
        assert time.monotonic() < deadline, done
        if done >= 100 and kills == 0:
            service.step(completes=False)
            broker.kill()
            broker.start()
            kills += 1
            service.close()
            service = Service(broker)  # fences the first one, and aborts its transaction
        try:
            done += service.step()
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            service.producer.abort_transaction(30)
            service.close()
            service = Service(broker)
    service.close()

    assert kills == 1
    assert sorted(committed(broker, COUNT)) == list(range(COUNT))
