"""Goal: what a broker on a bucket has acknowledged is found by the next one, on any machine.

Content is compared by partition, offset and value, never by counts.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.commits import commit_files, committed
from kit.judges.partition_client import PartitionClient, data_batch
from kit.runs.bucket_load import PARTITIONS, Load, create, stored
from kit.servers.bucket_broker import BucketBroker
from kit.servers.s3 import LOG_DIR
from kit.tiers import all_but, sized
from logmirror.failpoints import BUCKET_POINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.servers.s3 import S3Server

pytestmark = pytest.mark.slow
SMALL = ("--override", "log.segment.bytes=100000")
KILLS = sized(3, 8, 30)
RECORDS_PER_S = 1_000


@pytest.fixture
def brokers(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> Iterator[Callable[..., BucketBroker]]:
    """Make brokers on one bucket, each with a machine of its own."""
    made: list[BucketBroker] = []

    def make(*options: str, **more: Any) -> BucketBroker:
        broker = BucketBroker(
            tmp_path / f"machine-{len(made)}", s3_server, bucket, *SMALL, *options, **more
        )
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.__exit__()


@pytest.mark.thinned
@pytest.mark.statement("C7", "N8")
def test_machines_that_burn_down_lose_nothing_acknowledged(brokers):
    broker = brokers().start()
    create(broker, "t")
    chance = random.Random(5)
    with Load(broker.bootstrap, "t", **{"enable.idempotence": True}) as load:
        for _ in range(KILLS):
            load.wait_for(chance.randint(100, 2_000))
            broker.kill()
            broker.start()
        load.wait_for(100)
    assert load.flush() == 0
    assert load.failures == []
    broker.kill()
    broker.start()

    found = stored(broker, "t")
    assert found == load.acked
    assert len(found) == load.sent
    by_partition = defaultdict(list)
    for partition, offset in sorted(found):
        by_partition[partition].append(int((found[partition, offset] or b"").split(b"-")[0]))
    assert all(numbers == sorted(numbers) for numbers in by_partition.values())


@pytest.mark.statement("T13")
def test_a_paused_owner_acknowledges_nothing_after_it_wakes(brokers):
    first, second = brokers().start(), brokers()
    create(first, "t")
    with Load(first.bootstrap, "t") as load:
        load.wait_for(500)
        first.pause()
        acked_before = dict(load.acked)
        second.start()
        produce(second.bootstrap, "t", [Message(value=b"from the new owner")], partition=0)
        after = stored(second, "t")
        first.resume()
        assert first.wait() == 69
        time.sleep(0.2)  # an acknowledgement in flight would have arrived

    assert "fenced" in first.log.read_text()
    # What was acknowledged before or in the moment of the pause is there; nothing later is.
    assert {at: after.get(at) for at in load.acked} == load.acked
    assert acked_before.items() <= load.acked.items()
    assert stored(second, "t") == after
    assert second.stop() == 0


OUT_OF_RANGE, OUT_OF_ORDER, STORAGE_ERROR = 1, 45, 56


@pytest.mark.parametrize("request_of", ["a consumer", "a producer"])
def test_an_owner_that_was_replaced_refuses_nothing_that_is_right_for_the_next_one(
    brokers, request_of
):
    """It learns of the other one within seconds. Clients may come back to it before."""

    def refused_by(client, sequence):
        if request_of == "a consumer":
            return client.fetch(sequence).error_code
        return client.produce(data_batch(1, producer_id=7, sequence=sequence)).error

    first, second = brokers().start(), brokers()
    create(first, "t")
    with PartitionClient(first.bootstrap, "t") as old:
        assert old.produce(data_batch(1, producer_id=7, sequence=0)).error == 0
        second.start()
        with PartitionClient(second.bootstrap, "t") as new:
            for sequence in (1, 2):
                assert new.produce(data_batch(1, producer_id=7, sequence=sequence)).error == 0
            with contextlib.suppress(OSError):  # it has stopped
                assert refused_by(old, 3) == STORAGE_ERROR
            expected = OUT_OF_RANGE if request_of == "a consumer" else OUT_OF_ORDER
            assert refused_by(new, 5) == expected
    assert first.wait() == 69


def test_an_idle_owner_learns_that_it_was_replaced(brokers):
    first, second = brokers().start(), brokers().start()
    assert first.wait() == 69
    create(second, "t")


@pytest.mark.parametrize("acks", ["all", "1"])
def test_an_outage_of_the_bucket_is_waited_for(brokers, s3_server, acks):
    broker = brokers().start()
    create(broker, "t")
    with Load(broker.bootstrap, "t", acks=acks) as load:
        load.wait_for(500)
        s3_server.kill()
        try:
            acked = dict(load.acked)
            partition, offset = max(acked)
            reader = {"group.id": "none", "enable.auto.commit": False}
            consumer = Consumer({"bootstrap.servers": broker.bootstrap, **reader})
            consumer.assign([TopicPartition("t", partition, offset)])
            message = consumer.poll(10)
            assert message is not None
            assert (message.error(), message.value()) == (None, acked[partition, offset])
            consumer.close()
            time.sleep(3)  # an outage of some seconds
            assert broker.alive
        finally:
            s3_server.start()
        load.wait_for(500)
    assert load.flush() == 0
    assert load.failures == []
    broker.kill()
    broker.start()
    found = stored(broker, "t")
    assert {at: found.get(at) for at in load.acked} == load.acked


def test_changes_that_wait_for_the_bucket_delay_no_other_requests(brokers, s3_server):
    """More producers than the broker has threads ask for producer IDs, which are in the bucket."""
    broker = brokers().start()
    create(broker, "t")
    produce(broker.bootstrap, "t", [Message(value=b"x", timestamp_ms=1_000)], partition=0)
    broker.stop()
    broker.start()  # with no producer IDs in reserve
    common = {"bootstrap.servers": broker.bootstrap, "log_level": 0}
    waiting = [Producer({**common, "enable.idempotence": True}) for _ in range(12)]
    s3_server.kill()
    try:
        for producer in waiting:
            producer.produce("t", b"later", partition=1)
            producer.poll(0.2)
        reader = Consumer({**common, "group.id": "none"})
        for _ in range(3):
            [found] = reader.offsets_for_times([TopicPartition("t", 0, 500)], timeout=5)
            assert (found.offset, found.error) == (0, None)
        reader.close()
    finally:
        s3_server.start()
    assert [producer.flush(30) for producer in waiting] == [0] * len(waiting)
    rows = list(rows_by_librdkafka(broker.bootstrap, "t", partition=1))
    assert [row.value for row in rows] == [b"later"] * len(waiting)


@pytest.mark.gate("it waits for 25 s")
def test_producers_get_an_error_that_they_retry_and_nothing_is_stored_twice(brokers, s3_server):
    """An outage that is longer than `commit_timeout_ms`; idempotence makes the repetition safe."""
    broker = brokers().start()
    create(broker, "t")
    with Load(broker.bootstrap, "t", **{"enable.idempotence": True}) as load:
        load.wait_for(200)
        s3_server.kill()
        try:
            time.sleep(25)
        finally:
            s3_server.start()
        load.wait_for(200)
    assert load.flush() == 0
    assert load.failures == []
    found = stored(broker, "t")
    assert found == load.placed(found)
    assert len(set(found.values())) == len(found) == load.sent


def test_without_flush_on_ack_records_are_readable_at_once(brokers, s3_server):
    broker = brokers("--no-flush-on-ack").start()
    create(broker, "t")
    # A producer ID needs the database, which is durable in the bucket in any case.
    produce(broker.bootstrap, "t", [Message(value=b"first")], partition=3)
    s3_server.kill()
    try:
        offsets = produce(
            broker.bootstrap, "t", [Message(value=b"%d" % n) for n in range(50)], partition=0
        )
        rows = list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))
    finally:
        s3_server.start()
    assert [row.offset for row in rows] == offsets == list(range(50))

    assert broker.stop() == 0
    broker.start()
    rows = list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))
    assert [row.value for row in rows] == [b"%d" % n for n in range(50)]


def test_a_stop_commits_what_is_not_flushed(brokers):
    broker = brokers("--no-flush-on-ack").start()
    create(broker, "t")
    produce(broker.bootstrap, "t", [Message(value=b"%d" % n) for n in range(50)], partition=1)
    assert broker.stop() == 0
    broker.start()
    rows = list(rows_by_librdkafka(broker.bootstrap, "t", partition=1))
    assert [row.value for row in rows] == [b"%d" % n for n in range(50)]


def test_groups_and_settings_are_in_the_bucket(brokers):
    broker = brokers().start()
    create(broker, "t")
    produce(broker.bootstrap, "t", [Message(value=b"%d" % n) for n in range(10)], partition=2)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "readers"})
    consumer.commit(offsets=[TopicPartition("t", 2, 7)], asynchronous=False)
    consumer.close()
    broker.kill()
    broker.start()

    again = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "readers"})
    assert again.committed([TopicPartition("t", 2)], 10)[0].offset == 7
    again.close()
    topics = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10).topics
    assert len(topics["t"].partitions) == PARTITIONS


@pytest.mark.statement("T16", "C15", "C16")
def test_deleted_records_and_topics_do_not_come_back(brokers, s3_server, bucket):
    """Each record has a value of its own, so that none stands for another one."""

    def write(topic: str, what: bytes, count: int) -> None:
        values = [b"%s %d " % (what, n) + b"x" * 1000 for n in range(count)]
        produce(broker.bootstrap, topic, [Message(value=one) for one in values], partition=0)

    broker = brokers().start()
    for topic in ("t", "gone"):
        create(broker, topic)
        write(topic, topic.encode(), 1_000)
    wanted = {at: one for at, one in stored(broker, "t").items() if at[1] >= 500}
    assert len(set(wanted.values())) == 500
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_records([TopicPartition("t", 0, 500)])[TopicPartition("t", 0)].result(20)
    admin.delete_topics(["gone"])["gone"].result(20)
    create(broker, "gone")
    names = [str(path) for path in s3_server.files(bucket).rglob("*.batches")]
    assert not [name for name in names if "/gone@" in name]
    assert not [name for name in names if int(name.rpartition("-")[2].split(".")[0]) < 500]
    broker.kill()
    broker.start()

    assert stored(broker, "t", {0: 500}) == wanted
    with pytest.raises(KafkaException, match="Offset out of range"):
        list(rows_by_librdkafka(broker.bootstrap, "t", partition=0, start=499))
    assert stored(broker, "gone") == {}
    write("gone", b"young", 5)
    young = stored(broker, "gone")
    assert young == {(0, n): b"young %d " % n + b"x" * 1000 for n in range(5)}
    broker.kill()
    broker.start()
    assert stored(broker, "gone") == young
    assert stored(broker, "t", {0: 500}) == wanted


@pytest.mark.statement("C7", "C2")
@pytest.mark.parametrize(
    "point", all_but(BUCKET_POINTS, "bucket.committed", "bucket.removed", reason="the same steps")
)
def test_a_crash_at_each_step_loses_nothing(brokers, point):
    broker = brokers()
    broker.start()
    create(broker, "t")
    first = {"bucket.fenced", "bucket.deleted", "bucket.removed"}
    nth = "#1" if point in first else "#20" if point == "bucket.committed" else "#2"
    broker.stop()
    broker.crash_at = point + nth
    broker.start(waits=point not in {"bucket.fenced", "bucket.removed"})
    with Load(broker.bootstrap, "t", **{"enable.idempotence": True}) as load:
        if point == "bucket.deleted":
            load.wait_for(3_000)
            admin = AdminClient({"bootstrap.servers": broker.bootstrap})
            admin.delete_records([TopicPartition("t", 0, 500)])
        assert broker.wait() == -9
        broker.crash_at = ""
        broker.start()
        load.wait_for(100)
    assert load.flush() == 0
    assert load.failures == []
    start = 500 if point == "bucket.deleted" else 0
    found = stored(broker, "t", {0: start})
    assert found == {at: v for at, v in load.acked.items() if at[0] or at[1] >= start}


def requests_per_s(broker: BucketBroker, proxy: S3Proxy, topic: str, partitions: int) -> float:
    """The requests of all kinds that arrive at the store while all partitions are written to."""
    create(broker, topic, partitions)
    with Load(broker.bootstrap, topic, per_s=RECORDS_PER_S, partitions=partitions) as load:
        load.wait_for(RECORDS_PER_S)  # the client has found the topic
        before, began_s = proxy.count, time.monotonic()
        load.wait_for(3 * RECORDS_PER_S)
        found = (proxy.count - before) / (time.monotonic() - began_s)
    assert load.flush() == 0
    assert load.failures == []
    assert {partition for partition, _ in load.acked} == set(range(partitions))
    return found


def partitions_per_commit(log_dir: Path) -> float:
    """How many partitions share a commit object, on average; of topics with several."""
    commits = [{one.partition for one in committed(path)} for path in commit_files(log_dir)]
    counts = [len(found) for found in commits if found - {0}]
    return sum(counts) / len(counts)


def test_requests_do_not_grow_with_partitions(brokers, s3_server, bucket):
    """The same load for as long. No segment is full or old in that time."""
    interval_ms = 200
    options = ("--override", "log.segment.bytes=100000000")
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        broker = brokers(
            "--commit-interval-ms", str(interval_ms), *options, endpoint=proxy.endpoint
        ).start()
        one = requests_per_s(broker, proxy, "one", 1)
        wide = requests_per_s(broker, proxy, "wide", 500)
    # In an interval, 200 records of as many partitions arrive; more, if the machine is busy.
    assert partitions_per_commit(s3_server.files(bucket) / LOG_DIR) > 50
    # A busy machine makes fewer commits than it may. A request for each commit of a partition would
    # be 1,000 per second.
    assert max(one, wide) < 2 * min(one, wide)
    # Beside commits there are heartbeats, listings, and what begins and ends in the window.
    assert max(one, wide) < 1_000 / interval_ms + 3
