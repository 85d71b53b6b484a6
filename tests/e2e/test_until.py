"""`until` with a real cluster: the copy has the records before a time, wherever it was killed.

Method: the source has transactions, whose markers are younger than all records, and timestamps that
step back. librdkafka reads the committed records of the source: the replicas must have those before
the first record of the time, with their offsets or in their order. The run ends by itself, and is
killed in between.
"""

import json
import re
from itertools import takewhile

import pytest

from kit.judges.clients import Message, odd_messages, produce, rows_by_librdkafka
from kit.judges.gaps import log_bounds, trim, write_transactions
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, config_text, mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from logmirror.failpoints import VARIABLE

PARTITIONS = 2
START_MS = 1_700_000_000_000
ENDED = 0
BEYOND = 69


def rows_before(bootstrap, topic, partition, time_ms):
    """The committed records before the first one with at least this timestamp."""
    rows = rows_by_librdkafka(bootstrap, topic, partition=partition)
    return list(takewhile(lambda row: row.timestamp_ms < time_ms, rows))


def fill(broker, topic):
    """Write transactions and odd messages; return a time in the middle of them."""
    broker.create_topic(topic, partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        write_transactions(broker.bootstrap, topic, partition, start_ms=START_MS)
        messages = odd_messages(2_000, seed=partition, start_ms=START_MS + 20_000)
        produce(broker.bootstrap, topic, messages, partition=partition)
    return START_MS + 30_000


@pytest.mark.parametrize("offsets", ["preserve", "translate"])
def test_a_replica_has_exactly_the_records_before_a_time(kafka_431, topic_name, tmp_path, offsets):
    broker, bootstrap = kafka_431, kafka_431.bootstrap
    time_ms = fill(broker, topic_name)
    copied = f"{topic_name}-{offsets}"
    mirror = mirror_to_cluster(topic_name, bootstrap, bootstrap, topic=copied, offsets=offsets)
    config = tmp_path / "mirror.yaml"
    config.write_text(config_text(mirror | {"until": {"time": time_ms}}))

    point = {"preserve": "produce.answered#2", "translate": "translate.committed#1"}[offsets]
    with InlineRun(config, folder=tmp_path, environment={VARIABLE: point}) as run:
        assert run.wait() != ENDED, "the crash point was not reached"
    for _ in range(2):
        with InlineRun(config, folder=tmp_path) as run:
            assert run.wait() == ENDED, run.text

    for partition in range(PARTITIONS):
        expected = rows_before(bootstrap, topic_name, partition, time_ms)
        assert 400 < len(expected) < 2_200, "the time is in the middle"
        found = list(rows_by_librdkafka(bootstrap, copied, partition=partition))
        if offsets == "translate":
            expected, found = ([row[1:] for row in rows] for rows in (expected, found))
        assert found == expected

    config.write_text(config_text(mirror | {"until": {"time": time_ms - 10_000}}))
    with InlineRun(config, folder=tmp_path) as run:
        assert run.wait() == BEYOND, run.text
    assert "beyond `until`" in run.text


def test_an_archive_ends_before_an_offset(kafka_431, topic_name, tmp_path):
    fill(kafka_431, topic_name)
    lake = {"name": "lake", "type": "filesystem", "root": str(tmp_path / "lake")}
    mirror = mirror_to_cluster(topic_name, kafka_431.bootstrap, "unused:1") | {
        "format": "ndjson",
        "flush": {"max-time-ms": 60_000, "max-bytes": 100_000_000, "max-offsets": 1_000},
        "destinations": [lake],
        "until": {"offset": 1_234},
    }
    config = tmp_path / "mirror.yaml"
    config.write_text(config_text(mirror))
    with InlineRun(config, folder=tmp_path) as run:
        assert run.wait() == ENDED, run.text
    for partition in range(PARTITIONS):
        last = max((tmp_path / "lake").glob(f"*/{partition}/*.ndjson"))
        assert last.name == f"{1_000:020}-{1_233:020}.ndjson"
        offsets = [json.loads(line)["offset"] for line in last.read_text().splitlines()]
        assert offsets == list(range(1_000, 1_234))


def test_a_copy_ends_there_while_another_one_waits(tmp_path):
    """The times of the records are old, so the broker keeps no state of their producer.

    The replica with the source's offsets therefore waits at its second start, and the other begins.
    """
    kinds = ("preserve", "translate")
    with EmbeddedBroker(tmp_path / "source") as broker:
        create_topic(broker.bootstrap, "t", 1, {})
        messages = [Message(None, b"%d" % n, (), START_MS + n) for n in range(50)]
        produce(broker.bootstrap, "t", messages, config={"batch.num.messages": 1})
        for end in (10, 30):
            until = {"until": {"offset": end}}
            copies = [
                mirror_to_cluster(
                    "t", broker.bootstrap, broker.bootstrap, name=kind, topic=kind, offsets=kind
                )
                for kind in kinds
            ]
            done = run_now(write_config(tmp_path / "copies.json", *(c | until for c in copies)))
            assert done.returncode == ENDED, done.stderr
            for kind in kinds:
                found = [row.value for row in rows_by_librdkafka(broker.bootstrap, kind)]
                assert found == [b"%d" % n for n in range(end)], kind


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("preserve", marks=pytest.mark.gate("its second run waits for writers")),
        "translate",
        "archive",
    ],
)
def test_a_limit_below_the_log_start_of_one_partition_ends_with_the_others_copied(tmp_path, kind):
    with EmbeddedBroker(tmp_path / "source") as broker:
        source = broker.bootstrap
        create_topic(source, "t", PARTITIONS, {})
        messages = [Message(None, b"%d" % n, (), START_MS + n) for n in range(50)]
        for partition in range(PARTITIONS):
            produce(source, "t", messages, partition=partition)
        trim(source, "t", 1, 20)
        if kind == "archive":
            copy = mirror("t", source, tmp_path / "lake", form="ndjson", chain_start="earliest")
        else:
            copy = mirror_to_cluster("t", source, source, topic="copy", offsets=kind)
        config = write_config(tmp_path / "copy.json", copy | {"until": {"offset": 10}})
        for _ in range(2):
            done = run_now(config)
            assert done.returncode == ENDED, done.stderr
        if kind == "archive":
            found = [file.name for file in (tmp_path / "lake").glob("*/*/*.ndjson")]
            assert found == [f"{0:020}-{9:020}.ndjson"]
        else:
            found = list(rows_by_librdkafka(source, "copy"))
            assert [row.value for row in found] == [b"%d" % n for n in range(10)]
            assert len(set(log_bounds(source, "copy", 1))) == 1, "no record"


def test_a_damaged_object_holds_up_its_own_partition_alone(tmp_path):
    """Two mirrors of one mounted archive end before the same time; one has a damaged object."""
    topics = ("damaged", "whole")
    until = {"until": {"time": START_MS + 102_000}}
    with EmbeddedBroker(tmp_path / "broker") as broker:
        to = broker.bootstrap
        archives = []
        for topic in topics:
            create_topic(to, topic, PARTITIONS, {})
            messages = [Message(None, b"%d" % n, (), START_MS + n * 1_000) for n in range(200)]
            for partition in range(PARTITIONS):
                one_each = {"batch.num.messages": 1}
                produce(to, topic, messages, partition=partition, config=one_each)
            more = {"form": "native", "max_offsets": 5, "name": topic}
            archives.append(mirror(topic, to, tmp_path / "lake", **more))
        assert run_now(write_config(tmp_path / "lake.json", *archives)).returncode == ENDED
        (damaged,) = (tmp_path / "lake" / "damaged" / "1").glob(f"{100:020}-*")
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

        with MountingBroker(tmp_path / "mounted", tmp_path / "lake") as source:
            copies = [
                mirror_to_cluster(topic, source, to, name=topic, topic=f"{topic}-copy") | until
                for topic in topics
            ]
            config = write_config(tmp_path / "copies.json", *copies)

            def found():
                return [log_bounds(to, f"{t}-copy", n)[1] for t in topics for n in (0, 1)]

            with InlineRun(config, folder=tmp_path) as run:
                wait_until(
                    lambda: "flow waits" in run.text and found() == [102, 0, 102, 102],
                    what=lambda: f"the copies, with {found()}: {run.text}",
                    timeout_s=50,  # a joint request with the damaged partition takes 60 s
                )
                waiting = re.findall(r"flow waits: .* topic=(\S+) partition=(\d+)", run.text)
                assert set(waiting) == {("damaged", "1")}
