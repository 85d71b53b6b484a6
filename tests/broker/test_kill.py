"""Goal: an acknowledged record survives every crash of the broker, once, at its offset.

Method: stock producers write while the broker is killed (SIGKILL) at random moments; they reconnect
and continue. At the end two independent readers find every acknowledged record at its acknowledged
offset, and no duplicate. Small segments make most kills happen near a seal.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kit.judges.clients import Message, produce, rows_by_aiokafka, rows_by_librdkafka
from kit.servers.embedded import EmbeddedBroker
from kit.tiers import sized
from logmirror.broker.log.file_names import open_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

KILLS = sized(2, 5, 20)
PARTITIONS = 2


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "broker", segment_bytes=40_000)
    with broker:
        yield broker


@pytest.fixture
def anywhere(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    """A broker with a log dir of each kind in turn."""
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket, segment_bytes=40_000) as broker:
        yield broker


def _create(broker: EmbeddedBroker, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


@pytest.mark.statement("C7")
@pytest.mark.thinned
def test_killed_again_and_again_while_producers_write(broker, topic_name):
    _create(broker, topic_name, PARTITIONS)
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 2,
            "message.timeout.ms": 280_000,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "batch.num.messages": 50,
            "log_level": 0,
        }
    )
    acked: dict[tuple[int, int], bytes] = {}
    failures: list[object] = []
    done = threading.Event()

    def delivered(error: object, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            acked[message.partition(), message.offset()] = message.value()

    def write() -> None:
        number = 0
        while not done.is_set():
            value = b"%d-" % number + b"x" * (number % 700)
            producer.produce(
                topic_name, value=value, partition=number % PARTITIONS, on_delivery=delivered
            )
            number += 1
            producer.poll(0.02 if len(producer) > 500 else 0)

    writer = threading.Thread(target=write)
    writer.start()
    chance = random.Random(3)
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.05, 0.5))
        broker.kill()
        broker.start()
    time.sleep(0.5)
    done.set()
    writer.join()
    assert producer.flush(60) == 0

    assert failures == []
    assert len(acked) > 500
    for partition in range(PARTITIONS):
        rows = list(rows_by_librdkafka(broker.bootstrap, topic_name, partition=partition))
        by_offset = {row.offset: row.value for row in rows}
        wanted = {offset: value for (p, offset), value in acked.items() if p == partition}
        assert by_offset == wanted
        numbers = [int((row.value or b"").partition(b"-")[0]) for row in rows]
        assert numbers == list(range(partition, numbers[-1] + 1, PARTITIONS))
        by_aiokafka = rows_by_aiokafka(broker.bootstrap, topic_name, partition=partition)
        assert by_aiokafka == rows


def test_a_torn_end_is_cut_and_writing_goes_on(broker, topic_name):
    _create(broker, topic_name)
    produce(broker.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(50)])
    broker.kill()
    with open_path(broker.log_dir / topic_name / "0", 0).open("ab") as log:
        log.write(b"\0\0\0\0\0\0\0\x32half a batch")
    broker.start()

    offsets = produce(broker.bootstrap, topic_name, [Message(value=b"after")])

    assert offsets == [50]
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
    assert [row.value for row in rows] == [b"%d" % n for n in range(50)] + [b"after"]
    assert "the log ends at offset 50" in broker.log.read_text()


def test_a_clean_restart_keeps_topics_ids_configs_and_the_cluster(broker, topic_name):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    wanted = NewTopic(topic_name, 3, 1, config={"max.message.bytes": "5000"})
    admin.create_topics([wanted])[topic_name].result(20)
    before = admin.list_topics(timeout=10)
    produce(broker.bootstrap, topic_name, [Message(value=b"x")] * 10, partition=1)
    assert broker.stop() == 0
    broker.start()

    after = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10)

    assert after.cluster_id == before.cluster_id
    assert set(after.topics) == set(before.topics)
    assert len(after.topics[topic_name].partitions) == 3
    with pytest.raises(RuntimeError, match="MSG_SIZE_TOO_LARGE"):
        produce(broker.bootstrap, topic_name, [Message(value=b"x" * 6000)])
    assert len(list(rows_by_librdkafka(broker.bootstrap, topic_name, partition=1))) == 10


@pytest.mark.statement("T16", "C15")
def test_a_recreated_topic_has_no_records_of_the_old_one(anywhere, topic_name):
    broker = anywhere
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    _create(broker, topic_name)
    produce(broker.bootstrap, topic_name, [Message(value=b"old" * 1000)] * 100)
    admin.delete_topics([topic_name])[topic_name].result(20)
    assert not (broker.log_dir / topic_name).exists()
    if broker.bucket is not None:
        assert not list(broker.bucket.files.rglob(f"{topic_name}@*/**/*.batches"))
    _create(broker, topic_name)

    assert list(rows_by_librdkafka(broker.bootstrap, topic_name)) == []
    broker.kill()
    broker.start()
    assert list(rows_by_librdkafka(broker.bootstrap, topic_name)) == []
    assert produce(broker.bootstrap, topic_name, [Message(value=b"new")]) == [0]


@pytest.mark.statement("T3", "T13", "C3")
def test_two_brokers_never_share_a_directory(broker, tmp_path):
    second = EmbeddedBroker(tmp_path / "second")
    second.log_dir = broker.log_dir

    with pytest.raises(RuntimeError, match="log directory is in use by another broker"):
        second.start()


def test_two_brokers_never_share_an_address(broker, tmp_path):
    second = EmbeddedBroker(tmp_path / "second")
    second.port = broker.port

    with pytest.raises(RuntimeError, match="cannot listen on this address"):
        second.start()


def test_a_partition_that_cannot_be_opened_is_offline_and_the_others_are_not(broker, topic_name):
    _create(broker, topic_name, 2)
    for partition in range(2):
        messages = [Message(value=b"x" * 900)] * 200
        small = {"batch.num.messages": 10}
        produce(broker.bootstrap, topic_name, messages, partition=partition, config=small)
    broker.kill()
    sealed = sorted((broker.log_dir / topic_name / "0").glob("*.batches"))
    sealed[1].unlink()
    broker.start()

    assert len(list(rows_by_librdkafka(broker.bootstrap, topic_name, partition=1))) == 200
    metadata = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10)
    leaders = {n: p.leader for n, p in metadata.topics[topic_name].partitions.items()}
    assert leaders == {0: -1, 1: 1}
