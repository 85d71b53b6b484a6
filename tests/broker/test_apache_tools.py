"""Goal: the console tools of Apache Kafka, of both releases, work on the embedded broker unchanged.

Method: each tool does its usual job; its output or its exit code is checked.
"""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient, data_batch
from kit.judges.transaction_client import TransactionClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

pytestmark = pytest.mark.in_bucket


def test_topics_are_created_listed_described_and_deleted(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap)
    create = ("--create", "--topic", topic_name, "--partitions", "3", "--replication-factor", "1")
    apache_tools.run("kafka-topics", *at, *create, "--config", "segment.bytes=2000000")

    assert topic_name in apache_tools.run("kafka-topics", *at, "--list").stdout.split()
    described = apache_tools.run("kafka-topics", *at, "--describe", "--topic", topic_name).stdout
    assert "PartitionCount: 3" in described
    assert "segment.bytes=2000000" in described
    assert described.count("Leader: 1") == 3
    [topic_id] = re.findall(r"TopicId: (\S+)", described)
    by_id = apache_tools.run("kafka-topics", *at, "--describe", "--topic-id", topic_id)
    assert by_id.stdout == described
    again = apache_tools.run("kafka-topics", *at, *create, check=False)
    assert again.returncode == 1
    assert "TopicExistsException" in again.stdout + again.stderr
    refused = ("--create", "--topic", topic_name + "x", "--config", "min.insync.replicas=2")
    found = apache_tools.run("kafka-topics", *at, *refused, check=False)
    assert "min.insync.replicas: this broker supports only 1" in found.stdout + found.stderr
    apache_tools.run("kafka-topics", *at, "--delete", "--topic", topic_name)
    assert topic_name not in apache_tools.run("kafka-topics", *at, "--list").stdout.split()


def test_console_producer_writes_and_console_consumer_reads(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap, "--topic", topic_name)
    lines = [f"line {number}" for number in range(200)]
    codec = ("--compression-codec", "lz4")

    apache_tools.run("kafka-console-producer", *at, *codec, stdin="\n".join(lines) + "\n")

    limits = ("--max-messages", "200", "--timeout-ms", "30000")
    where = ("--partition", "0", "--offset", "earliest")
    found = apache_tools.run("kafka-console-consumer", *at, *where, *limits)
    assert found.stdout.splitlines() == lines
    where = ("--partition", "0", "--offset", "195")
    found = apache_tools.run("kafka-console-consumer", *at, *where, "--max-messages", "5")
    assert found.stdout.splitlines() == lines[195:]


@pytest.mark.gate("a load")
def test_perf_producer_writes_and_get_offsets_sees_it(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap)
    create = ("--create", "--topic", topic_name, "--partitions", "1")
    apache_tools.run("kafka-topics", *at, *create)
    size = ("--num-records", "5000", "--record-size", "1000", "--throughput", "-1")
    properties = ("--producer-props", f"bootstrap.servers={embedded.bootstrap}", "acks=all")

    said = apache_tools.run(
        "kafka-producer-perf-test", "--topic", topic_name, *size, *properties
    ).stdout

    assert "5000 records sent" in said
    rows = list(rows_by_librdkafka(embedded.bootstrap, topic_name))
    assert [row.offset for row in rows] == list(range(5000))
    for time, offset in (("earliest", 0), ("latest", 5000), (str(rows[77].timestamp_ms), None)):
        found = apache_tools.run("kafka-get-offsets", *at, "--topic", topic_name, "--time", time)
        wanted = offset
        if wanted is None:
            wanted = next(r.offset for r in rows if r.timestamp_ms >= rows[77].timestamp_ms)
        assert found.stdout.strip() == f"{topic_name}:0:{wanted}"
    found = apache_tools.run(
        "kafka-get-offsets", *at, "--topic", topic_name, "--time", "max-timestamp"
    )
    newest = max(row.timestamp_ms for row in rows)
    wanted = next(row.offset for row in rows if row.timestamp_ms == newest)
    assert found.stdout.strip() == f"{topic_name}:0:{wanted}"


def test_partitions_and_settings_are_changed(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap)
    topic = ("--topic", topic_name)
    apache_tools.run("kafka-topics", *at, "--create", *topic, "--partitions", "1")

    apache_tools.run("kafka-topics", *at, "--alter", *topic, "--partitions", "4")
    where = ("--entity-type", "topics", "--entity-name", topic_name)
    changes = ("--add-config", "segment.bytes=2000000,message.timestamp.type=LogAppendTime")
    apache_tools.run("kafka-configs", *at, "--alter", *where, *changes)
    apache_tools.run("kafka-configs", *at, "--alter", *where, "--delete-config", "segment.bytes")

    described = apache_tools.run("kafka-topics", *at, "--describe", *topic).stdout
    assert described.count("Leader: 1") == 4
    assert "message.timestamp.type=LogAppendTime" in described
    assert "segment.bytes" not in described
    refused = ("--add-config", "compression.type=zstd")
    found = apache_tools.run("kafka-configs", *at, "--alter", *where, *refused, check=False)
    assert "compression.type: this broker supports only producer" in found.stdout + found.stderr


def test_records_are_deleted_and_producers_described(embedded, apache_tools, topic_name, tmp_path):
    at = ("--bootstrap-server", embedded.bootstrap)
    produce(embedded.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(30)])
    wanted = {"partitions": [{"topic": topic_name, "partition": 0, "offset": 12}], "version": 1}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))

    options = ("--offset-json-file", str(tmp_path / "wanted.json"))
    deleted = apache_tools.run("kafka-delete-records", *at, *options).stdout

    assert f"{topic_name}-0\tlow_watermark: 12" in deleted
    earliest = ("--topic", topic_name, "--time", "earliest")
    found = apache_tools.run("kafka-get-offsets", *at, *earliest).stdout
    assert found.strip() == f"{topic_name}:0:12"
    which = ("describe-producers", "--topic", topic_name, "--partition", "0")
    table = apache_tools.run("kafka-transactions", *at, *which).stdout.splitlines()
    names, row = table[0].split(), table[1].split()
    assert names[:3] == ["ProducerId", "ProducerEpoch", "LatestCoordinatorEpoch"]
    assert (row[1], row[2], row[3], row[5]) == ("0", "-1", "29", "None")


def test_the_console_consumer_reads_over_markers(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 1, {})
    with PartitionClient(embedded.bootstrap, topic_name) as partition:
        partition.produce(data_batch(3))
        partition.write_markers(*[(99, 0)] * 50)
        partition.produce(data_batch(3))
        partition.write_markers((99, 0))

    options = ("--topic", topic_name, "--partition", "0", "--offset", "earliest")
    shown = ("--property", "print.offset=true", "--property", "print.value=false")
    committed = ("--isolation-level", "read_committed", "--timeout-ms", "3000")
    at = ("--bootstrap-server", embedded.bootstrap)
    found = apache_tools.run("kafka-console-consumer", *at, *options, *shown, *committed).stdout

    # The newer one warns of an option that the older one does not know under another name.
    offsets = [line for line in found.splitlines() if line.startswith("Offset:")]
    assert offsets == [f"Offset:{offset}" for offset in (0, 1, 2, 53, 54, 55)]


def test_the_tool_for_transactions_lists_and_describes_them(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap)
    create_topic(embedded.bootstrap, topic_name, 1, {})
    with TransactionClient(embedded.bootstrap, topic_name) as client:
        writer = client.init()
        client.add(writer)
        client.produce(writer, 0)

        listed = apache_tools.run("kafka-transactions", *at, "list").stdout.splitlines()[1:]
        wanted = [topic_name, "1", str(writer.producer_id), "Ongoing"]
        assert [line.split() for line in listed if topic_name in line] == [wanted]
        which = ("describe", "--transactional-id", topic_name)
        described = apache_tools.run("kafka-transactions", *at, *which).stdout.splitlines()[1]
        assert described.split()[1:5] == [topic_name, str(writer.producer_id), "0", "Ongoing"]
        assert f"{topic_name}-0" in described


def test_the_tool_for_transactions_ends_one_that_hangs(apache_tools, tmp_path, topic_name):
    """The coordinator has lost its state: the transaction hangs until the tool ends it."""
    broker = EmbeddedBroker(tmp_path / "broker")
    with broker, contextlib.ExitStack() as stack:
        at = ("--bootstrap-server", broker.bootstrap)
        create_topic(broker.bootstrap, topic_name, 1, {})
        client = stack.enter_context(TransactionClient(broker.bootstrap, topic_name))
        writer = client.init()
        client.add(writer)
        client.produce(writer, 0)
        broker.stop()
        (broker.log_dir / ".logmirror" / "state.sqlite").unlink()
        broker.start()
        hanging = ("find-hanging", "--topic", topic_name, "--max-transaction-timeout", "0")
        found = apache_tools.run("kafka-transactions", *at, *hanging).stdout.splitlines()[1:]
        assert [line.split()[:3] for line in found] == [[topic_name, "0", str(writer.producer_id)]]
        where = ("--topic", topic_name, "--partition", "0", "--start-offset", "0")
        apache_tools.run("kafka-transactions", *at, "abort", *where)
        client = stack.enter_context(PartitionClient(broker.bootstrap, topic_name))
        assert client.fetch(0).last_stable_offset == client.log_end == 4
        assert list(rows_by_librdkafka(broker.bootstrap, topic_name)) == []


def test_the_perf_producer_writes_transactions(embedded, apache_tools, topic_name):
    create_topic(embedded.bootstrap, topic_name, 3, {})
    size = ("--num-records", "2000", "--record-size", "100", "--throughput", "1000")
    transactions = ("--transactional-id", topic_name, "--transaction-duration-ms", "200")
    properties = ("--producer-props", f"bootstrap.servers={embedded.bootstrap}")

    said = apache_tools.run(
        "kafka-producer-perf-test", "--topic", topic_name, *size, *transactions, *properties
    ).stdout

    assert "2000 records sent" in said
    rows = [
        row
        for partition in range(3)
        for row in rows_by_librdkafka(embedded.bootstrap, topic_name, partition=partition)
    ]
    assert len(rows) == 2000
    with TransactionClient(embedded.bootstrap, topic_name) as client:
        state, _, epoch, _ = client.described()
        assert state == "CompleteCommit"
        # Transaction version 2 increments the epoch with every transaction.
        assert (epoch > 3) == (apache_tools.version == "4.3.1")
