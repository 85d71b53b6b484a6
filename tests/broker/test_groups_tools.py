"""Goal: Apache Kafka's console tools for groups, of both releases, work on the embedded broker.

Method: a group has a live member of another client; each tool does its usual job, and its output or
its exit code is checked.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from kit.judges import clients
from kit.judges.clients import Message, produce
from kit.servers.apache import VERSIONS, ApacheTools
from kit.servers.kafka import create_topic

pytestmark = pytest.mark.in_bucket
_READER = Path(clients.__file__).with_name("ReadByPattern.java")


@pytest.mark.statement("C11")
def test_console_consumers_share_a_group(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 2, {})
    for partition in range(2):
        messages = [Message(value=b"%d" % number) for number in range(20)]
        produce(embedded.bootstrap, topic_name, messages, partition=partition)
    at = ("--bootstrap-server", embedded.bootstrap, "--topic", topic_name)
    options = ("--group", topic_name, "--from-beginning", "--timeout-ms", "20000")

    first = apache_tools.run("kafka-console-consumer", *at, *options, "--max-messages", "40")
    assert sorted(first.stdout.split()) == sorted(2 * [str(number) for number in range(20)])
    produce(embedded.bootstrap, topic_name, [Message(value=b"new")])
    again = apache_tools.run("kafka-console-consumer", *at, *options, "--max-messages", "1")

    assert again.stdout.split() == ["new"]


def test_a_consumer_of_kip_848_is_described(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 2, {})
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")] * 30)
    at = ("--bootstrap-server", embedded.bootstrap)
    group = ("--group", topic_name)
    options = ("--topic", topic_name, "--from-beginning", "--timeout-ms", "20000")
    protocol = ("--consumer-property", "group.protocol=consumer", "--max-messages", "30")
    found = apache_tools.run("kafka-console-consumer", *at, *group, *options, *protocol)
    assert found.stdout.count("x\n") == 30
    consumer = _member(embedded, topic_name, 0, **{"group.protocol": "consumer"})

    table = apache_tools.run("kafka-consumer-groups", *at, *group, "--describe").stdout

    assert _rows(table, topic_name)[0][2:6] == ["0", "30", "30", "0"]
    assert "the-client" in table
    listed = apache_tools.run("kafka-consumer-groups", *at, "--list", "--type", "consumer").stdout
    assert topic_name in listed
    consumer.close()


def test_a_java_client_subscribes_by_an_expression_that_the_broker_evaluates(embedded, topic_name):
    """It looks up the names of the topics by their IDs."""
    topics = [f"{topic_name}.{end}" for end in ("a", "b", "c")]
    for topic in topics:
        create_topic(embedded.bootstrap, topic, 1, {})
        produce(embedded.bootstrap, topic, [Message(value=b"x")])
    arguments = (embedded.bootstrap, f".*{topic_name}[.][ab]", topic_name, "2")
    command = ApacheTools(VERSIONS[-1]).application(_READER, "ReadByPattern", *arguments)

    found = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)

    assert sorted(found.stdout.splitlines()) == [f"{topic} x" for topic in topics[:2]]


def test_consumer_groups_are_listed_described_reset_and_deleted(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 2, {})
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")] * 30)
    consumer = _member(embedded, topic_name)
    group = ("--group", topic_name)

    def run(*options: str, check: bool = True) -> Any:
        at = ("--bootstrap-server", embedded.bootstrap)
        return apache_tools.run("kafka-consumer-groups", *at, *options, check=check)

    assert topic_name in run("--list").stdout.split()
    rows = _rows(run("--describe", *group).stdout, topic_name)
    assert rows[0][1:6] == [topic_name, "0", "10", "30", "20"]
    assert [row[2] for row in rows] == ["0", "1"]
    members = run("--describe", *group, "--members", "--verbose").stdout
    assert "0,1" in members  # the releases differ in the rest
    assert "the-client" in members
    assert "Stable" in run("--describe", *group, "--state").stdout
    refused = run("--delete", *group, check=False)
    assert "GroupNotEmptyException" in refused.stdout + refused.stderr
    subscribed = run("--delete-offsets", *group, "--topic", topic_name, check=False)
    assert "GroupSubscribedToTopicException" in subscribed.stdout + subscribed.stderr
    consumer.close()

    where = ("--topic", f"{topic_name}:0", "--to-offset", "7", "--execute")
    run("--reset-offsets", *group, *where)
    [row] = _rows(run("--describe", *group).stdout, topic_name)[:1]
    assert row[3] == "7"
    run("--delete-offsets", *group, "--topic", f"{topic_name}:0")
    rows = _rows(run("--describe", *group, check=False).stdout, topic_name)
    assert not any(row[2] == "0" for row in rows)
    run("--delete", *group)
    assert topic_name not in run("--list").stdout.split()


def _member(broker: Any, topic: str, count: int = 10, **config: object) -> Consumer:
    """Return the only member of a group; it has consumed and committed some records."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": topic,
            "client.id": "the-client",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **config,
        }
    )
    consumer.subscribe([topic])
    found = [consumer.consume(1, 20)[0] for _ in range(count)]
    if found:
        consumer.commit(message=found[-1], asynchronous=False)
    deadline = time.monotonic() + 30
    while not consumer.assignment():
        assert time.monotonic() < deadline
        consumer.poll(0.1)
    return consumer


def _rows(table: str, group: str) -> list[list[str]]:
    """Return the rows of a group by partition."""
    rows = [line.split() for line in table.splitlines() if line.startswith(group)]
    return sorted(rows, key=lambda row: row[2])
