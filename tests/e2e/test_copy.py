"""A topic is replicated to another cluster: every record once, at its offset, unchanged.

Sources and destinations are both releases of Apache Kafka and the embedded broker, all nine pairs:
two by the command line on Spark, the others with the slices executed in this process. The sources
hold records that are hard to copy. kcat and aiokafka read both clusters and decide.
"""

import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from kit.judges.clients import CREATE_TIME, LOG_APPEND_TIME, Message, kcat, odd_messages, produce
from kit.judges.copies import (
    anomalies,
    copy,
    copying,
    forget_connections,
    partition_anomalies,
    wait_for_end,
)
from kit.judges.partition_client import PartitionClient
from kit.judges.truth import Source
from kit.runs.commands import BrokerCommand, logmirror, logmirror_json, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.runs.writer import writing
from kit.servers.apache import VERSIONS, ApacheTools
from kit.tiers import NIGHTLY
from logmirror.cluster.produce import ProducePipeline

pytestmark = [pytest.mark.xdist_group("e2e-copy"), pytest.mark.timeout(600)]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LINGER = {"linger.ms": 20}
SMALL = {"batch.num.messages": 3, "linger.ms": 5}
EMPTY = len(CODECS)
"""The partition that has no records."""

KINDS = (*VERSIONS, BrokerCommand.version)
PAIRS = tuple(product(KINDS, KINDS))
ON_SPARK = (("3.9.2", "4.3.1"), ("4.3.1", "embedded"))


@dataclass(frozen=True)
class Copied:
    """Topics at a source and what became of them, by pair."""

    sources: dict[str, list[Source]]
    copies: dict[tuple[str, str], list[Source]]
    config: Path
    """Of all pairs."""


def name_of(topic: str, origin: str, destination: str) -> str:
    """The copy's name: the same, but within one cluster."""
    return f"copy-of-{topic}" if origin == destination else topic


@pytest.fixture(scope="module")
def brokers(request):
    names = ("kafka_392", "forgetful_kafka", "cli_broker")
    yield dict(zip(KINDS, map(request.getfixturevalue, names), strict=True))
    forget_connections()


@pytest.fixture(scope="module")
def copied(brokers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copied")
    sources = {kind: fill(broker, kind) for kind, broker in brokers.items()}
    copies, mirrors = {}, {}
    for origin, destination in PAIRS:
        pair = (origin, destination)
        mirrors[pair] = [
            mirror_to_cluster(
                source.topic,
                source.bootstrap,
                brokers[destination].bootstrap,
                name=f"{source.topic}-to-{destination}",
                topic=name_of(source.topic, *pair),
            )
            for source in sources[origin]
        ]
        copies[pair] = [
            Source(
                brokers[destination].bootstrap,
                name_of(source.topic, *pair),
                partitions=source.partitions,
            )
            for source in sources[origin]
        ]
    on_spark = write_config(folder / "spark.json", *(m for pair in ON_SPARK for m in mirrors[pair]))
    result = logmirror("run", "--until-now", "-c", on_spark)
    assert result.returncode == 0, result.stderr
    inline = [m for pair in PAIRS if pair not in ON_SPARK for m in mirrors[pair]]
    copy(*inline)
    everything = write_config(folder / "all.json", *(m for of in mirrors.values() for m in of))
    return Copied(sources, copies, everything)


def fill(broker, kind):
    """Write what is hard to copy."""
    odd = f"odd-of-{kind}"
    broker.create_topic(odd, partitions=len(CODECS) + 1)
    for partition, codec in enumerate(CODECS):
        for number, batching in enumerate((LINGER, SMALL, {**LINGER, "batch.size": 4000})):
            messages = odd_messages(120, seed=10 * partition + number)
            if partition % 2:  # of today: the destination remembers who wrote them
                messages = [message._replace(timestamp_ms=0) for message in messages]
            config = {**batching, "compression.type": codec}
            produce(broker.bootstrap, odd, messages, partition=partition, config=config)
    topics = {odd: len(CODECS) + 1}
    appended = f"appended-of-{kind}"
    broker.create_topic(appended, config={"message.timestamp.type": "LogAppendTime"})
    produce(broker.bootstrap, appended, odd_messages(200, seed=5), config=LINGER)
    topics[appended] = 1
    # The Java client frames snappy in its own way.
    java = f"java-of-{kind}"
    broker.create_topic(java)
    lines = "".join(f"k{n}\tgr\u00fc\u00dfe {n}\n" for n in range(500))
    arguments = ("--bootstrap-server", broker.bootstrap, "--topic", java)
    options = ("--compression-codec=snappy", "--property", "parse.key=true")
    tools = ApacheTools(kind if kind in VERSIONS else VERSIONS[-1])
    tools.run("kafka-console-producer", *arguments, *options, stdin=lines)
    topics[java] = 1
    return [Source(broker.bootstrap, name, partitions=range(n)) for name, n in topics.items()]


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
@pytest.mark.mirror_v3("E2E-01", "E2E-10", "E2E-22")
def test_every_record_is_copied_once_unchanged_at_its_offset(copied, pair):
    """Also MM-21 and MM-24."""
    for truth, found in zip(copied.sources[pair[0]], copied.copies[pair], strict=True):
        for partition in truth.partitions:
            assert partition_anomalies(truth, found, partition) == [], (truth.topic, partition)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sources_hold_what_is_hard_to_copy(copied, kind):
    odd = [row for n in range(len(CODECS)) for row in copied.sources[kind][0].rows(n)]

    assert len(odd) == 360 * len(CODECS)
    assert {row.value for row in odd} >= {None, b""}
    assert {row.key for row in odd} >= {None, b""}
    assert any(value is None for row in odd for _, value in row.headers)
    assert any(len({k for k, _ in row.headers}) < len(row.headers) for row in odd)
    assert any(a.timestamp_ms > b.timestamp_ms for a, b in pairwise(odd))
    assert copied.sources[kind][0].rows(EMPTY) == []


@pytest.mark.parametrize("kind", KINDS)
def test_log_append_time_becomes_create_time_of_the_same_value(copied, kind):
    truth = copied.sources[kind][1]
    stamps = [row.timestamp_ms for row in truth.rows(0)]

    assert {row.timestamp_type for row in truth.rows(0)} == {LOG_APPEND_TIME}
    for pair in PAIRS:
        if pair[0] == kind:
            rows = copied.copies[pair][1].rows(0)
            assert {row.timestamp_type for row in rows} == {CREATE_TIME}
            assert [row.timestamp_ms for row in rows] == stamps


def test_status_shows_that_nothing_is_left_to_copy(copied):
    rows = logmirror_json("status", "-c", copied.config)

    assert len(rows) == sum(len(c.partitions) for of in copied.copies.values() for c in of)
    assert {row["lag"] for row in rows} == {0}
    assert all(row["source_end"] == row["position"] for row in rows)


def test_verify_proves_every_copy_against_its_source(copied):
    reports = logmirror_json("verify", "--deep", "--against-source", "-c", copied.config)

    assert len(reports) == sum(len(c.partitions) for of in copied.copies.values() for c in of)
    assert [report["problems"] for report in reports if report["problems"]] == []
    assert sum(report["records"] for report in reports) == sum(
        len(c.rows(n)) for of in copied.copies.values() for c in of for n in c.partitions
    )


# What a source and a destination may hold, or become


def test_batches_of_many_megabytes_are_copied(brokers, topic_name):
    """A record of 30 MB, and 40 MB of records in one batch."""
    largest = {"max.message.bytes": 64 << 20}
    source, destination = brokers["embedded"], brokers["4.3.1"]
    source.create_topic(topic_name, config=largest)
    config = {
        "message.max.bytes": 64 << 20,
        "batch.size": 60 << 20,
        "linger.ms": 3000,
        "queue.buffering.max.kbytes": 200 << 10,
        "batch.num.messages": 100,
    }
    for sizes in ([30 << 20], [1 << 20] * 40, [5]):
        messages = [Message(b"k", bytes([65 + n % 26]) * size) for n, size in enumerate(sizes)]
        produce(source.bootstrap, topic_name, messages, config=config)

    copy(mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap))

    assert anomalies(source.bootstrap, topic_name, destination.bootstrap) == []
    rows = Source(destination.bootstrap, topic_name).rows(0)
    assert [len(row.value) for row in rows] == [30 << 20, *[1 << 20] * 40, 5]


def test_new_partitions_and_new_records_are_followed(brokers, topic_name):
    source, destination = brokers["4.3.1"], brokers["embedded"]
    source.create_topic(topic_name, partitions=2)
    admin = AdminClient({"bootstrap.servers": source.bootstrap})

    with (
        copying(mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap)),
        writing(source.bootstrap, topic_name, partitions=2, seed=1),
    ):
        wait_for_end(destination.bootstrap, topic_name, 20)
        admin.create_partitions([NewPartitions(topic_name, 3)])[topic_name].result(30)
        produce_when_ready(source, topic_name, 2)
        wait_for_end(destination.bootstrap, topic_name, 50, partition=2)

    found = anomalies(source.bootstrap, topic_name, destination.bootstrap, partitions=range(3))
    assert found == []


def produce_when_ready(broker, topic, partition):
    """A new partition is named before its leader knows of it; librdkafka tries again."""
    produce(broker.bootstrap, topic, odd_messages(50, seed=3), partition=partition)


@pytest.mark.gate("hundreds of partitions")
def test_hundreds_of_partitions_are_one_mirror(brokers, topic_name):
    source, destination = brokers["embedded"], brokers["4.3.1"]
    count = 1000 if NIGHTLY else 250
    source.create_topic(topic_name, partitions=count)
    producer = Producer({"bootstrap.servers": source.bootstrap, "linger.ms": 50})
    for number in range(5 * count):
        producer.produce(topic_name, b"%d" % number, partition=number % count)
    assert producer.flush(60) == 0

    copy(mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap))

    expected = [(n, at, b"%d" % (at * count + n)) for n in range(count) for at in range(5)]
    assert all_records(destination.bootstrap, topic_name) == expected


def all_records(bootstrap, topic):
    """Partition, offset, value of everything in a topic, by kcat."""
    options = ("-C", "-q", "-e", "-b", bootstrap, "-t", topic, "-o", "beginning")
    lines = kcat(*options, "-f", "%p %o %s\n").splitlines()
    rows = (line.split(b" ", 2) for line in lines)
    return sorted((int(partition), int(offset), value) for partition, offset, value in rows)


# Old records: no idempotent-producer check


def test_old_records_are_sent_one_batch_at_a_time_while_producer_state_expires(
    brokers, topic_name, monkeypatch
):
    source, destination = brokers["embedded"], brokers["4.3.1"]
    source.create_topic(topic_name)
    old = odd_messages(600, seed=7, start_ms=1_500_000_000_000)
    produce(source.bootstrap, topic_name, old, config={"batch.num.messages": 3, "linger.ms": 5})
    in_flight, remembered = [], []
    send = ProducePipeline.send

    def slow_send(pipeline, sent, **options):
        in_flight.append(pipeline.in_flight())
        if len(in_flight) in {50, 150}:
            deadline = time.monotonic() + 20  # a sweep comes every second
            with PartitionClient(destination.bootstrap, topic_name) as client:
                while (found := client.producers()) and time.monotonic() < deadline:
                    time.sleep(0.1)
            remembered.append(found)
        send(pipeline, sent, **options)

    monkeypatch.setattr(ProducePipeline, "send", slow_send)
    copy(mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap, max_batch_bytes=0))

    assert anomalies(source.bootstrap, topic_name, destination.bootstrap) == []
    assert len(in_flight) >= 200
    assert set(in_flight) == {0}
    assert remembered == [{}, {}]
