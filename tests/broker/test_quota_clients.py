"""Goal: Apache Kafka's tool sets and shows quotas, and stock clients are slowed to them.

Method: `kafka-configs` of each release sets, describes and removes quotas. Then the perf producer
of Apache Kafka, and librdkafka as producer and consumer, move some seconds' worth of the quota as a
limited client, for which the quota gives a lower bound of the time, and as another one, which
reports no throttle time.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kit.judges.quota_requests import alter
from kit.judges.raw_client import RawClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import LogBucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import ThrottleEvent

pytestmark = pytest.mark.in_bucket

KIB: Final = 1024
RATE: Final = 256 * KIB
RECORDS: Final = 1024
"""Of 1 KiB each: four seconds' worth, of which the first second is the burst."""


@pytest.fixture(scope="module")
def limited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedBroker]:
    """A broker of its own, because quotas concern every client."""
    place = None
    if request.param == "bucket":
        server = request.getfixturevalue("s3_server")
        place = LogBucket(server, server.new_bucket())
    broker = EmbeddedBroker(tmp_path_factory.mktemp("limited"), bucket=place)
    with broker:
        yield broker
        assert broker.stop() == 0
    assert "internal error" not in broker.log.read_text()


@pytest.mark.timeout(600)
def test_kafka_configs_sets_describes_and_removes_quotas(limited, apache_tools):
    def configs(*arguments: str, check: bool = True) -> str:
        at = ("--bootstrap-server", limited.bootstrap)
        found = apache_tools.run("kafka-configs", *at, *arguments, check=check)
        return found.stdout + found.stderr

    client = ("--entity-type", "clients", "--entity-name", "x")
    default = ("--entity-type", "clients", "--entity-default")
    both = ("--entity-type", "users", "--entity-name", "u", *client)
    configs("--alter", *client, "--add-config", "producer_byte_rate=1048576,request_percentage=50")
    configs("--alter", *default, "--add-config", "consumer_byte_rate=2048")
    configs("--alter", *both, "--add-config", "producer_byte_rate=7")

    found = configs("--describe", *client)
    assert "producer_byte_rate=1048576.0" in found
    assert "request_percentage=50.0" in found
    found = configs("--describe", "--entity-type", "clients")
    assert "the default client-id are consumer_byte_rate=2048.0" in found
    assert "client-id 'x'" in found
    found = configs("--describe", *both)
    assert re.search(r"user-principal 'u', client-id 'x' are producer_byte_rate=7\.0", found)

    refused = configs("--alter", *client, "--add-config", "controller_mutation_rate=1", check=False)
    assert "not a quota of this broker" in refused
    for entity, names in (
        (client, "producer_byte_rate,request_percentage"),
        (default, "consumer_byte_rate"),
        (both, "producer_byte_rate"),
    ):
        configs("--alter", *entity, "--delete-config", names)
        assert "byte_rate" not in configs("--describe", *entity)


@pytest.mark.timeout(600)
def test_the_perf_producer_is_slowed_and_its_neighbour_is_not(limited, apache_tools, topic_name):
    create_topic(limited.bootstrap, topic_name, 1, {})
    with RawClient(limited.port) as admin:
        alter(admin, ([("client-id", "slow")], {"producer_byte_rate": float(RATE)}))

    def run(client_id: str) -> tuple[float, float]:
        """Return records per second, and the largest throttle time in milliseconds."""
        size = ("--num-records", str(RECORDS), "--record-size", str(KIB), "--throughput", "-1")
        properties = (f"bootstrap.servers={limited.bootstrap}", f"client.id={client_id}")
        command = ("--topic", topic_name, *size, "--print-metrics", "--producer-props", *properties)
        found = apache_tools.run("kafka-producer-perf-test", *command).stdout
        [rate] = re.findall(rf"{RECORDS} records sent, ([\d.]+) records/sec", found)
        [throttled] = re.findall(r"produce-throttle-time-max:\S+\s*: ([\d.]+)", found)
        return float(rate), float(throttled)

    slow, fast = run("slow"), run("fast")

    # Four seconds' worth take three, because of the burst, without the last batch.
    assert slow[0] <= RECORDS / 2.5
    assert slow[1] > 0
    assert fast[1] == 0


def _settings(broker: EmbeddedBroker, client_id: str, times: list[float]) -> dict[str, object]:
    def throttled(event: ThrottleEvent) -> None:
        times.append(event.throttle_time)

    return {
        "bootstrap.servers": broker.bootstrap,
        "client.id": client_id,
        "throttle_cb": throttled,
        "batch.size": 64 * KIB,
    }


def test_librdkafka_reports_the_throttle_time_and_loses_nothing(limited, topic_name):
    create_topic(limited.bootstrap, topic_name, 1, {})
    with RawClient(limited.port) as admin:
        rates = {"producer_byte_rate": float(RATE), "consumer_byte_rate": float(RATE)}
        alter(admin, ([("client-id", "slow")], rates))
    times: dict[str, list[float]] = {"slow": [], "fast": []}
    took_s: dict[str, tuple[float, float]] = {}
    for client_id, found in times.items():
        settings = _settings(limited, client_id, found)
        began_s = time.monotonic()
        producer = Producer(settings)
        for number in range(RECORDS):
            producer.produce(topic_name, b"%07d" % number + bytes(KIB - 7))
            producer.poll(0)
        assert producer.flush(60) == 0
        wrote_s = time.monotonic() - began_s

        began_s = time.monotonic()
        group = {"group.id": "none", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        del settings["batch.size"]
        consumer = Consumer({**settings, **group})
        consumer.assign([TopicPartition(topic_name, 0, 0)])
        deadline_s, values = began_s + 60, []
        while len(values) < RECORDS:
            assert time.monotonic() < deadline_s
            values += [message.value()[:7] for message in consumer.consume(RECORDS, 0.1)]
        took_s[client_id] = wrote_s, time.monotonic() - began_s
        assert values[:RECORDS] == [b"%07d" % number for number in range(RECORDS)]
        consumer.close()

    assert max(times["slow"]) > 0.1
    assert times["fast"] == []
    # Without the burst, and the last request, whose response is sent before its time is over.
    assert min(took_s["slow"]) >= 1.5
