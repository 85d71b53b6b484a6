"""Goal: Apache Kafka's verifiable clients and its consumer of load run on the embedded broker.

Method: the verifiable producer reports each acknowledged offset, the verifiable consumer each batch
and commit; both reports are compared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.judges.clients import Message, produce
from kit.servers.apache import VERSIONS
from kit.servers.kafka import create_topic

pytestmark = pytest.mark.in_bucket

COUNT = 500


def _events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_verifiable_producer_and_consumer_agree(embedded, apache_tools, topic_name, protocol):
    create_topic(embedded.bootstrap, topic_name, 2, {})
    at = ("--bootstrap-server", embedded.bootstrap, "--topic", topic_name)
    limit = ("--max-messages", str(COUNT))

    wrote = _events(apache_tools.run("kafka-verifiable-producer", *at, *limit).stdout)
    group = ("--group-id", topic_name, "--group-protocol", protocol)
    if apache_tools.version != VERSIONS[-1]:
        group = (*group[:2], *(() if protocol == "classic" else group[2:]))
    options = (*group, "--reset-policy", "earliest", "--verbose")
    read = _events(apache_tools.run("kafka-verifiable-consumer", *at, *limit, *options).stdout)

    acked = {
        (event["partition"], event["offset"]): event["value"]
        for event in wrote
        if event["name"] == "producer_send_success"
    }
    assert [event["name"] for event in wrote if "error" in event["name"]] == []
    consumed = [event for event in read if event["name"] == "record_data"]
    assert len(consumed) == len(acked) == COUNT
    assert {(one["partition"], one["offset"]): one["value"] for one in consumed} == acked
    commits = [event for event in read if event["name"] == "offsets_committed"]
    assert commits
    assert all(event["success"] for event in commits)


def test_perf_consumer_reads_all(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    produce(embedded.bootstrap, topic_name, [Message(value=b"x" * 100)] * 5000)
    at = ("--bootstrap-server", embedded.bootstrap, "--topic", topic_name)

    found = apache_tools.run("kafka-consumer-perf-test", *at, "--messages", "5000")

    row = [line for line in found.stdout.splitlines() if line][-1]
    assert row.split(",")[4].strip() == "5000", found.stdout
