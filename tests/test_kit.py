"""The test kit does what tests rely on: brokers that start, stop, crash and come back.

Method: real brokers of both releases; what one client wrote before a crash, another reads after it;
three readers that share no code must agree on every field they show.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from confluent_kafka import Producer

from kit.judges.clients import (
    CREATE_TIME,
    LOG_APPEND_TIME,
    Message,
    Row,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_aiokafka,
    rows_by_kcat,
    rows_by_librdkafka,
)
from kit.servers.kafka import ApacheKafka
from kit.servers.security import MECHANISMS, PASSWORD, USER

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.apache import ApacheTools
    from kit.servers.security import Certificates


def _lines(broker: ApacheKafka, topic: str, count: int) -> list[str]:
    options = ("--topic", topic, "--partition", "0", "--offset", "earliest")
    limit = ("--max-messages", str(count), "--timeout-ms", "20000")
    server = ("--bootstrap-server", broker.bootstrap)
    return broker.tool("kafka-console-consumer", *server, *options, *limit).stdout.splitlines()


def test_what_is_produced_is_read_by_the_release_s_own_consumer(
    apache_kafka: ApacheKafka, topic_name: str
) -> None:
    apache_kafka.create_topic(topic_name)

    producer = Producer({"bootstrap.servers": apache_kafka.bootstrap})
    producer.produce(topic_name, b"one", partition=0)
    producer.produce(topic_name, b"two", partition=0)
    assert producer.flush(20) == 0

    assert _lines(apache_kafka, topic_name, 2) == ["one", "two"]


def test_a_topic_is_created_as_asked_and_deleted(
    apache_kafka: ApacheKafka, apache_tools: ApacheTools, topic_name: str
) -> None:
    apache_kafka.create_topic(topic_name, 3, {"segment.bytes": 1 << 20})
    server = ("--bootstrap-server", apache_kafka.bootstrap)

    described = apache_tools.run("kafka-topics", *server, "--describe", "--topic", topic_name)
    assert "PartitionCount: 3" in described.stdout
    assert "segment.bytes=1048576" in described.stdout

    apache_kafka.delete_topic(topic_name)
    listed = apache_tools.run("kafka-topics", *server, "--list")
    assert topic_name not in listed.stdout.splitlines()


@pytest.mark.gate("restarts of a broker")
def test_a_broker_that_is_killed_comes_back_with_its_records(tmp_path: Path) -> None:
    broker = ApacheKafka("4.3.1", tmp_path, config={"broker.session.timeout.ms": 2000})
    try:
        broker.start().create_topic("survivor")
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("survivor", b"still here", partition=0)
        assert producer.flush(20) == 0
        address = broker.bootstrap

        broker.restart(kill=True)

        assert broker.bootstrap == address
        assert _lines(broker, "survivor", 1) == ["still here"]
    finally:
        broker.remove()


def test_three_readers_see_what_one_producer_wrote(
    apache_kafka: ApacheKafka, topic_name: str
) -> None:
    apache_kafka.create_topic(topic_name)
    messages = odd_messages(300, seed=7)

    offsets = produce(apache_kafka.bootstrap, topic_name, messages)

    assert offsets == list(range(300))
    expected = [
        Row(offset, message.timestamp_ms, CREATE_TIME, message.key, message.value, message.headers)
        for offset, message in enumerate(messages)
    ]
    assert list(rows_by_librdkafka(apache_kafka.bootstrap, topic_name)) == expected
    assert rows_by_aiokafka(apache_kafka.bootstrap, topic_name) == expected
    without_headers = [row._replace(headers=()) for row in expected]
    assert rows_by_kcat(apache_kafka.bootstrap, topic_name) == without_headers


def test_readers_see_committed_transactions_only(
    apache_kafka: ApacheKafka, topic_name: str
) -> None:
    apache_kafka.create_topic(topic_name)

    transactions = [
        ([Message(value=b"a"), Message(value=b"b")], True),
        ([Message(value=b"lost")], False),
        ([Message(value=b"c")], True),
        ([Message(value=b"lost, too")], False),
    ]
    produce_transactions(
        apache_kafka.bootstrap, topic_name, transactions, transactional_id=topic_name
    )

    seen = [(0, b"a"), (1, b"b"), (5, b"c")]
    server = apache_kafka.bootstrap
    assert [(row.offset, row.value) for row in rows_by_librdkafka(server, topic_name)] == seen
    assert [(row.offset, row.value) for row in rows_by_aiokafka(server, topic_name)] == seen
    assert [(row.offset, row.value) for row in rows_by_kcat(server, topic_name)] == seen


def test_readers_see_the_time_that_the_broker_gave(
    apache_kafka: ApacheKafka, topic_name: str
) -> None:
    apache_kafka.create_topic(topic_name, 1, {"message.timestamp.type": "LogAppendTime"})

    produce(apache_kafka.bootstrap, topic_name, [Message(value=b"x", timestamp_ms=1_000)])

    (row,) = rows_by_librdkafka(apache_kafka.bootstrap, topic_name)
    assert row.timestamp_type == LOG_APPEND_TIME
    assert row.timestamp_ms > 1_700_000_000_000
    assert rows_by_aiokafka(apache_kafka.bootstrap, topic_name) == [row]


def _security(listener: str, mechanism: str, certificates: Certificates) -> dict[str, object]:
    config: dict[str, object] = {
        "security.protocol": "SASL_SSL" if listener == "SASLTLS" else "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
    }
    if listener == "SASLTLS":
        config["ssl.ca.location"] = str(certificates.authority)
    if mechanism == "OAUTHBEARER":
        config["enable.sasl.oauthbearer.unsecure.jwt"] = True
        config["sasl.oauthbearer.config"] = f"principal={USER}"
    else:
        config |= {"sasl.username": USER, "sasl.password": PASSWORD}
    return config


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("listener", ["SASLTLS", "SASL", "SHORT"])
def test_a_stock_client_gets_in_with_each_sasl_mechanism(
    secure_kafka: ApacheKafka, certificates: Certificates, listener: str, mechanism: str
) -> None:
    security = _security(listener, mechanism, certificates)
    topic = secure_kafka.create_topic(f"{listener}-{mechanism}")

    offsets = produce(
        secure_kafka.address(listener), topic, [Message(value=b"in")], config=security
    )

    assert offsets == [0]


def test_a_client_with_a_certificate_gets_in_and_one_without_does_not(
    secure_kafka: ApacheKafka, certificates: Certificates, topic_name: str
) -> None:
    secure_kafka.create_topic(topic_name)
    server = secure_kafka.address("TLS")
    no_certificate = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(certificates.authority),
        "message.timeout.ms": 2000,
    }
    with_certificate = {
        **no_certificate,
        "ssl.key.location": str(certificates.client_key),
        "ssl.certificate.location": str(certificates.client_certificate),
    }

    produce(server, topic_name, [Message(value=b"in")], config=with_certificate)

    with pytest.raises(RuntimeError, match="_MSG_TIMED_OUT"):
        produce(server, topic_name, [Message(value=b"out")], config=no_certificate)


def test_a_child_does_not_outlive_a_test_run_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from kit.servers.machine import Process;"
        "child = Process(['sleep', '600'], log=Path(sys.argv[1]));"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd="tests",
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()

    deadline = time.monotonic() + 10
    while psutil.pid_exists(child):
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.02)
