"""Goal: the console tools of Apache Kafka, of both releases, work on the embedded broker unchanged.

Method: each tool does its usual job; what it prints or exits with is what is checked.
"""

from __future__ import annotations

from kit.clients import rows_by_librdkafka


def test_topics_are_created_listed_described_and_deleted(embedded, apache_tools, topic_name):
    at = ("--bootstrap-server", embedded.bootstrap)
    create = ("--create", "--topic", topic_name, "--partitions", "3", "--replication-factor", "1")
    apache_tools.run("kafka-topics", *at, *create, "--config", "segment.bytes=2000000")

    assert topic_name in apache_tools.run("kafka-topics", *at, "--list").stdout.split()
    described = apache_tools.run("kafka-topics", *at, "--describe", "--topic", topic_name).stdout
    assert "PartitionCount: 3" in described
    assert "segment.bytes=2000000" in described
    assert described.count("Leader: 1") == 3
    again = apache_tools.run("kafka-topics", *at, *create, check=False)
    assert again.returncode == 1
    assert "TopicExistsException" in again.stdout + again.stderr
    refused = ("--create", "--topic", topic_name + "x", "--config", "retention.ms=5")
    found = apache_tools.run("kafka-topics", *at, *refused, check=False)
    assert "retention.ms: this broker offers only -1" in found.stdout + found.stderr
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
