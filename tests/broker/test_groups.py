"""Goal: stock clients consume in groups as with Kafka, and keep what they committed.

Method: clients of each family join, share partitions, come and go; what they consume and commit is
compared with what was written. The broker is killed between commits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, produce
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import sized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = pytest.mark.in_bucket

PARTITIONS = 4
TIMEOUT_S = 60
KIP_848 = "KIP-848"
CONSUMER = {"group.protocol": "consumer"}
"""The protocol of KIP-848: the broker assigns."""


@pytest.fixture
def topic(embedded: EmbeddedBroker, topic_name: str) -> str:
    """A topic of four partitions with 100 records each."""
    create_topic(embedded.bootstrap, topic_name, PARTITIONS, {})
    _write(embedded, topic_name, range(100))
    return topic_name


def _write(broker: EmbeddedBroker, topic: str, numbers: range) -> None:
    for partition in range(PARTITIONS):
        messages = [Message(value=b"%d-%d" % (partition, number)) for number in numbers]
        produce(broker.bootstrap, topic, messages, partition=partition)


def _consumer(broker: EmbeddedBroker, group: str, **config: object) -> Consumer:
    classic = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 200}
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **({} if "group.protocol" in config else classic),
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            **config,
        }
    )


def _poll_until(consumers: list[Consumer], is_done: Any) -> list[Any]:
    found = []
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < deadline, [c.assignment() for c in consumers]
        for consumer in consumers:
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                found.append(message)
    return found


def _owned(consumers: list[Consumer]) -> list[set[int]]:
    return [{one.partition for one in consumer.assignment()} for consumer in consumers]


def _shared(consumers: list[Consumer]) -> bool:
    """Whether each partition has one owner, and everybody owns some."""
    owned = _owned(consumers)
    return all(owned) and sorted(itertools.chain(*owned)) == list(range(PARTITIONS))


def _committed(consumer: Consumer, topic: str) -> list[int]:
    wanted = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    return [found.offset for found in consumer.committed(wanted, timeout=20)]


@pytest.mark.parametrize("strategy", ["range,roundrobin", "cooperative-sticky", KIP_848])
@pytest.mark.statement("C11")
def test_members_share_partitions_and_take_over_from_each_other(embedded, topic, strategy):
    config = {"partition.assignment.strategy": strategy} if strategy != KIP_848 else CONSUMER
    first, second = (_consumer(embedded, topic, **config) for _ in "ab")
    first.subscribe([topic])
    found = _poll_until([first], lambda: len(_owned([first])[0]) == PARTITIONS)
    second.subscribe([topic])
    found += _poll_until([first, second], lambda: _shared([first, second]))
    found += _poll_until([first, second], lambda: _position_sum([first, second]) >= 400)
    first.commit(asynchronous=False)
    second.commit(asynchronous=False)

    assert _committed(second, topic) == [100] * PARTITIONS
    values = {message.value() for message in found}
    assert values == {b"%d-%d" % one for one in itertools.product(range(4), range(100))}
    first.close()
    _poll_until([second], lambda: len(_owned([second])[0]) == PARTITIONS)
    second.close()


def test_members_subscribe_by_a_regular_expression_that_the_broker_evaluates(embedded, topic_name):
    create_topic(embedded.bootstrap, f"{topic_name}-a", 1, {})
    create_topic(embedded.bootstrap, f"other-{topic_name}-a", 1, {})
    consumers = [_consumer(embedded, topic_name, **CONSUMER) for _ in "ab"]
    for consumer in consumers:
        consumer.subscribe([f"^{topic_name}-.*"])

    def owned() -> list[str]:
        return sorted(one.topic for consumer in consumers for one in consumer.assignment())

    _poll_until(consumers, lambda: owned() == [f"{topic_name}-a"])
    create_topic(embedded.bootstrap, f"{topic_name}-b", 1, {})
    produce(embedded.bootstrap, f"{topic_name}-b", [Message(value=b"new")], partition=0)

    def is_shared() -> bool:
        return owned() == [f"{topic_name}-a", f"{topic_name}-b"] and all(
            consumer.assignment() for consumer in consumers
        )

    if not _poll_until(consumers, is_shared):
        _poll_until(consumers, lambda: _position_sum(consumers) == 1)
    for consumer in consumers:
        consumer.close()


def _position_sum(consumers: list[Consumer]) -> int:
    return sum(
        max(0, found.offset)
        for consumer in consumers
        for found in consumer.position(consumer.assignment())
    )


@pytest.mark.parametrize("config", [{}, CONSUMER], ids=["classic", KIP_848])
@pytest.mark.parametrize("begin", ["earliest", "latest"])
@pytest.mark.statement("C11")
def test_a_group_without_offsets_begins_where_its_client_says(embedded, topic, begin, config):
    consumer = _consumer(embedded, topic, **{"auto.offset.reset": begin}, **config)
    consumer.subscribe([topic])
    _poll_until([consumer], lambda: len(_owned([consumer])[0]) == PARTITIONS)
    found: list[Any] = []
    end = 100
    while {message.partition() for message in found} != set(range(PARTITIONS)):
        assert end < 1000, found
        _write(embedded, topic, range(end, end + 1))
        end += 1
        found += consumer.consume(PARTITIONS * 200, 0.2)
    found += _poll_until([consumer], lambda: _position_sum([consumer]) >= PARTITIONS * end)
    consumer.close()

    for partition in range(PARTITIONS):
        offsets = [message.offset() for message in found if message.partition() == partition]
        assert offsets == list(range(offsets[0], end))
        assert offsets[0] == 0 if begin == "earliest" else offsets[0] >= 100


@pytest.mark.parametrize("config", [{}, CONSUMER], ids=["classic", KIP_848])
def test_a_static_member_that_restarts_causes_no_rebalance(embedded, topic, config):
    names = ("a", "b")
    first, second = (
        _consumer(embedded, topic, **{"group.instance.id": name, "client.id": name, **config})
        for name in names
    )
    for consumer in (first, second):
        consumer.subscribe([topic])
    _poll_until([first, second], lambda: _shared([first, second]))
    before = _owned([first, second])
    revoked: list[object] = []
    second.close()  # does not leave the group

    again = _consumer(embedded, topic, **{"group.instance.id": "b", "client.id": "b", **config})
    again.subscribe([topic], on_revoke=lambda _, partitions: revoked.append(partitions))
    _poll_until([first, again], lambda: _shared([first, again]))

    assert _owned([first, again]) == before
    assert revoked == []
    admin = AdminClient({"bootstrap.servers": embedded.bootstrap})
    found = admin.describe_consumer_groups([topic])[topic].result(20)
    assert {member.group_instance_id for member in found.members} == {"a", "b"}
    first.close()
    again.close()


def test_a_fenced_static_member_cannot_commit(embedded, topic):
    config = {"group.instance.id": "a"}
    first = _consumer(embedded, topic, **config)
    first.subscribe([topic])
    _poll_until([first], lambda: len(_owned([first])[0]) == PARTITIONS)
    second = _consumer(embedded, topic, **config)
    second.subscribe([topic])
    _poll_until([second], lambda: len(_owned([second])[0]) == PARTITIONS)

    with pytest.raises(KafkaException):
        first.commit(offsets=[TopicPartition(topic, 0, 50)], asynchronous=False)

    assert _committed(second, topic)[0] == -1001
    second.close()
    first.close()


def test_a_silent_member_loses_its_partitions(embedded, topic):
    config = {"max.poll.interval.ms": 6000}
    first, second = (_consumer(embedded, topic, **config) for _ in "ab")
    for consumer in (first, second):
        consumer.subscribe([topic])
    _poll_until([first, second], lambda: _shared([first, second]))

    _poll_until([second], lambda: len(_owned([second])[0]) == PARTITIONS)

    with pytest.raises(KafkaException):
        first.commit(offsets=[TopicPartition(topic, 0, 50)], asynchronous=False)
    first.close()
    second.close()


@pytest.mark.in_bucket(tier="test")
@pytest.mark.statement("C11")
def test_kafka_python_consumes_in_a_group(embedded, topic):
    """One member: two that join a new group at once may wait for ever, at Kafka 4.3.1 too.

    It knows the topic before it joins. Otherwise it may, as the leader, assign itself nothing until
    its next refresh of metadata.
    """
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=embedded.bootstrap,
        group_id=topic,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        heartbeat_interval_ms=200,
        metadata_max_age_ms=1000,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not consumer.partitions_for_topic(topic):
        assert time.monotonic() < deadline
    consumer.subscribe([topic])
    seen: set[int] = set()
    while len(seen) < 400:
        assert time.monotonic() < deadline
        for records in consumer.poll(100).values():
            seen.update(100 * record.partition + record.offset for record in records)
    assert seen == set(range(400))
    while True:
        try:
            consumer.commit()
            break
        except kafka.errors.RebalanceInProgressError:  # a refresh of metadata: it joins again
            assert time.monotonic() < deadline
            consumer.poll(100)
    committed = [consumer.committed(kafka.TopicPartition(topic, n)) for n in range(PARTITIONS)]
    assert committed == [100] * PARTITIONS
    consumer.close()


@pytest.mark.in_bucket(tier="test")
@pytest.mark.statement("C11")
def test_aiokafka_consumes_in_a_group(embedded, topic):
    async def consume() -> tuple[set[Any], list[int | None]]:
        consumer = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=embedded.bootstrap,
            group_id=topic,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        found = {
            (one.partition, one.offset) for one in [await consumer.getone() for _ in "x" * 400]
        }
        await consumer.commit()
        partitions = [aiokafka.TopicPartition(topic, number) for number in range(PARTITIONS)]
        committed = [await consumer.committed(one) for one in partitions]
        await consumer.stop()
        return found, committed

    found, committed = asyncio.run(asyncio.wait_for(consume(), TIMEOUT_S))

    assert found == set(itertools.product(range(PARTITIONS), range(100)))
    assert committed == [100] * PARTITIONS


def test_a_deleted_topic_takes_its_offsets_along(embedded, topic):
    consumer = _consumer(embedded, topic)
    consumer.commit(offsets=[TopicPartition(topic, 0, 7, "seven")], asynchronous=False)
    [found] = consumer.committed([TopicPartition(topic, 0)], timeout=20)
    assert (found.offset, found.metadata) == (7, "seven")

    admin = AdminClient({"bootstrap.servers": embedded.bootstrap})
    admin.delete_topics([topic])[topic].result(20)
    create_topic(embedded.bootstrap, topic, PARTITIONS, {})

    assert _committed(consumer, topic) == [-1001] * PARTITIONS
    consumer.close()


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket) as broker:
        yield broker


def test_offsets_expire_after_their_time(tmp_path, log_bucket, topic_name):
    options = {"offsets_retention_minutes": 0, "offsets_retention_check_interval_ms": 100}
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket, **options) as broker:
        create_topic(broker.bootstrap, topic_name, PARTITIONS, {})
        consumer = _consumer(broker, "g")
        consumer.commit(offsets=[TopicPartition(topic_name, 0, 7)], asynchronous=False)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        deadline = time.monotonic() + TIMEOUT_S
        while admin.list_consumer_groups().result(20).valid:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert _committed(consumer, topic_name) == [-1001] * PARTITIONS
        consumer.close()


@pytest.mark.thinned
@pytest.mark.parametrize("config", [{}, CONSUMER], ids=["classic", KIP_848])
def test_killed_between_commits_no_commit_is_lost_or_rewound(broker, topic_name, config):
    create_topic(broker.bootstrap, topic_name, PARTITIONS, {})
    _write(broker, topic_name, range(100))
    # librdkafka 2.x may use a handle that it has closed when it bootstraps again.
    config = {**config, "metadata.recovery.strategy": "none"}
    consumers = [_consumer(broker, "g", **config) for _ in "ab"]
    for consumer in consumers:
        consumer.subscribe([topic_name])
    acknowledged = [-1001] * PARTITIONS  # librdkafka's number for none
    seen: Counter[bytes] = Counter()
    for _ in range(sized(2, 5, 20)):
        found = _poll_until(consumers, lambda: _shared(consumers))
        seen.update(message.value() for message in found)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            _consume_and_commit(consumers, acknowledged, seen)
        broker.kill()
        broker.start()
        after = _committed(consumers[0], topic_name)
        assert all(a >= b for a, b in zip(after, acknowledged, strict=True)), (after, acknowledged)
    deadline = time.monotonic() + TIMEOUT_S
    while acknowledged != [100] * PARTITIONS:
        assert time.monotonic() < deadline, (acknowledged, len(seen))
        _consume_and_commit(consumers, acknowledged, seen)
        _commit_positions(consumers, acknowledged)
    for consumer in consumers:
        consumer.close()
    assert seen.keys() == {b"%d-%d" % one for one in itertools.product(range(4), range(100))}


def _consume_and_commit(
    consumers: list[Consumer], acknowledged: list[int], seen: Counter[bytes]
) -> None:
    for consumer in consumers:
        message = consumer.poll(0.02)
        if message is None or message.error() is not None:
            continue
        seen[message.value()] += 1
        _commit(consumer, acknowledged, message=message)


def _commit_positions(consumers: list[Consumer], acknowledged: list[int]) -> None:
    """Commit what was consumed while partitions were shared, or while no commit succeeded."""
    for consumer in consumers:
        _commit(consumer, acknowledged)


def _commit(consumer: Consumer, acknowledged: list[int], **what: Any) -> None:
    try:
        committed = consumer.commit(asynchronous=False, **what)
    except KafkaException:  # the broker is not back, or nothing is new
        return
    for one in committed:
        if one.error is None:
            acknowledged[one.partition] = max(acknowledged[one.partition], one.offset)


def test_members_keep_their_generation_over_a_kill(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, PARTITIONS, {})
    consumers = [_consumer(broker, "g") for _ in "ab"]
    revoked: list[object] = []
    for consumer in consumers:
        consumer.subscribe([topic_name], on_revoke=lambda _, parts: revoked.append(parts))
    _poll_until(consumers, lambda: _shared(consumers))
    revoked.clear()
    before = _owned(consumers)

    broker.kill()
    broker.start()
    _write(broker, topic_name, range(10))
    found = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < 40:
        assert time.monotonic() < deadline
        found += _one_each(consumers)
    for consumer in consumers:
        consumer.commit(asynchronous=False)

    assert (_owned(consumers), revoked) == (before, [])
    assert _committed(consumers[0], topic_name) == [10] * PARTITIONS
    for consumer in consumers:
        consumer.close()


def _one_each(consumers: list[Consumer]) -> list[Any]:
    found = [consumer.poll(0.1) for consumer in consumers]
    return [message for message in found if message is not None and message.error() is None]
