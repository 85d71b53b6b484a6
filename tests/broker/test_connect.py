"""Goal: the embedded broker is the cluster of a Connect worker, in which MirrorMaker 2 copies.

Method: the worker runs MirrorMaker's source connector twice: from Apache Kafka to the broker, in
transactions, and from the broker to Apache Kafka. Worker and broker are killed. Independent clients
read both ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.connect import ConnectWorker
from kit.judges.mirrormaker import MirrorMakerTools
from kit.runs.commands import wait_until
from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = [pytest.mark.timeout(600), pytest.mark.in_bucket]

CLIENTS = ("producer", "admin", "consumer")
"""Of the worker, for the connector: they write records and keep its offsets at the target."""

COMMITTED = {"consumer.isolation.level": "read_committed"}
MIRROR_SOURCE = "org.apache.kafka.connect.mirror.MirrorSourceConnector"


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket) as broker:
        yield broker


def _mirror(source: str, source_alias: str, target: str, topic: str) -> dict[str, str]:
    return {
        "connector.class": MIRROR_SOURCE,
        "source.cluster.alias": source_alias,
        "target.cluster.alias": "target",
        "source.cluster.bootstrap.servers": source,
        "target.cluster.bootstrap.servers": target,
        **{f"{client}.override.bootstrap.servers": target for client in CLIENTS},
        "topics": topic,
        "replication.factor": "1",
        "offset-syncs.topic.replication.factor": "1",
        "refresh.topics.interval.seconds": "1",
        "sync.topic.acls.enabled": "false",
        "tasks.max": "1",
    }


def _values(bootstrap: str, topic: str) -> list[bytes | None]:
    return [row.value for row in rows_by_librdkafka(bootstrap, topic)]


def _write(bootstrap: str, topic: str, numbers: range) -> None:
    produce(bootstrap, topic, [Message(value=b"%d" % number) for number in numbers])


def _await(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []

    def is_there() -> bool:
        found[:] = _values(bootstrap, topic)
        return len(set(found)) >= count

    wait_until(is_there, what=lambda: f"{count} records in {topic}, not {len(found)}")
    return found


def _setting(bootstrap: str, topic: str, name: str) -> str | None:
    resource = ConfigResource("topic", topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    value: str | None = admin.describe_configs([resource])[resource].result(20)[name].value
    return value


@pytest.mark.gate("a Connect worker")
def test_mirrormaker_in_a_distributed_worker_copies_to_the_broker_and_back(
    broker, kafka_431, topic_name, tmp_path
):
    here, there = broker.bootstrap, kafka_431.bootstrap
    kafka_431.create_topic(topic_name, config={"retention.ms": "123456789"})
    create_topic(here, f"own-{topic_name}", 1, {})
    _write(there, topic_name, range(300))
    _write(here, f"own-{topic_name}", range(300))
    to_us = _mirror(there, "kafka", here, topic_name)
    from_us = _mirror(here, "us", there, f"own-{topic_name}")
    with ConnectWorker(MirrorMakerTools(VERSIONS[-1]), here, tmp_path / "connect") as worker:
        worker.put("to-us", to_us | {"exactly.once.support": "required", **COMMITTED})
        worker.put("from-us", from_us)
        _await(here, f"kafka.{topic_name}", 300)
        _await(there, f"us.own-{topic_name}", 300)
        worker.kill()
        _write(there, topic_name, range(300, 500))
        broker.kill()
        broker.start()
        worker.start()
        for name in ("to-us", "from-us"):  # both are in its topics on the broker
            worker.wait_until_running(name)
        _write(here, f"own-{topic_name}", range(300, 500))
        arrived = _await(here, f"kafka.{topic_name}", 500)
        returned = _await(there, f"us.own-{topic_name}", 500)

    assert _setting(here, f"kafka.{topic_name}", "retention.ms") == "123456789"
    assert "Could not alter" not in worker.log.read_text()
    assert arrived == [b"%d" % number for number in range(500)]
    assert set(returned) == {b"%d" % number for number in range(500)}
