"""Goal: stock transactional clients work as on Apache Kafka, and zombies do not.

Method: librdkafka and kafka-python write, librdkafka and aiokafka read; raw requests show the rest:
timeouts, fencing, transaction version 2, and what the coordinator says of itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaProducer
from kio.schema.errors import ErrorCode

from kit.judges.clients import Message, produce_transactions, rows_by_aiokafka, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient
from kit.judges.transaction_client import TransactionClient, Writer
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = pytest.mark.in_bucket

SOON_S = 20


_PEERS = [
    "embedded",
    pytest.param("apache", marks=[pytest.mark.jvm, pytest.mark.xdist_group("kafka_431")]),
]


@pytest.fixture(params=_PEERS)
def peer(request: pytest.FixtureRequest, topic_name: str) -> Iterator[TransactionClient]:
    """A raw client of the embedded broker, and one of Apache Kafka 4.3.1."""
    name = "embedded" if request.param == "embedded" else "kafka_431"
    bootstrap = request.getfixturevalue(name).bootstrap
    create_topic(bootstrap, topic_name, 1, {})
    with TransactionClient(bootstrap, topic_name) as client:
        yield client


@pytest.fixture
def partition(embedded: EmbeddedBroker, topic_name: str) -> Iterator[PartitionClient]:
    """A new partition."""
    create_topic(embedded.bootstrap, topic_name, 1, {})
    with PartitionClient(embedded.bootstrap, topic_name) as client:
        yield client


@pytest.fixture
def client(embedded: EmbeddedBroker, partition: PartitionClient) -> Iterator[TransactionClient]:
    """A raw client of a transactional ID of its own."""
    with TransactionClient(embedded.bootstrap, partition.topic) as client:
        yield client


def _values(bootstrap: str, topic: str) -> list[bytes | None]:
    rows = list(rows_by_librdkafka(bootstrap, topic))
    assert rows_by_aiokafka(bootstrap, topic) == rows
    return [row.value for row in rows]


# Stock clients


def test_librdkafka_commits_and_aborts(embedded, partition):
    topic, bootstrap = partition.topic, embedded.bootstrap
    transactions = [
        ([Message(value=b"%d-%d" % (number, n)) for n in range(50)], number % 2 == 0)
        for number in range(6)
    ]

    produce_transactions(bootstrap, topic, transactions, transactional_id=topic)

    wanted = [message.value for messages, commit in transactions if commit for message in messages]
    assert _values(bootstrap, topic) == wanted
    assert partition.log_end == 6 * 51
    assert partition.list_offset(-1) == (0, -1, 306)


def test_kafka_python_commits_and_aborts(embedded, partition):
    producer = KafkaProducer(bootstrap_servers=embedded.bootstrap, transactional_id=partition.topic)
    producer.init_transactions()
    for number in range(4):
        producer.begin_transaction()
        for _ in range(10):
            producer.send(partition.topic, b"%d" % number)
        producer.flush()
        if number % 2:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()

    assert _values(embedded.bootstrap, partition.topic) == [b"0"] * 10 + [b"2"] * 10


def test_a_reader_waits_for_the_end_of_a_transaction_and_gets_it_at_once(embedded, partition):
    topic = partition.topic
    producer = Producer({"bootstrap.servers": embedded.bootstrap, "transactional.id": topic})
    producer.init_transactions(SOON_S)
    producer.begin_transaction()
    producer.produce(topic, b"x")
    assert producer.flush(SOON_S) == 0
    settings: dict[str, Any] = {
        "bootstrap.servers": embedded.bootstrap,
        "group.id": "unused",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 20_000,
        "isolation.level": "read_committed",
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, 0, 0)])

    assert consumer.poll(1) is None
    assert partition.fetch(0).last_stable_offset == 0
    producer.commit_transaction(SOON_S)
    began = time.monotonic()
    message = consumer.poll(SOON_S)

    assert message is not None
    assert message.value() == b"x"
    assert time.monotonic() - began < 10, "the reader was not notified"
    consumer.close()


def test_a_second_client_of_an_id_fences_the_first_one_and_aborts_its_transaction(
    embedded, partition
):
    topic = partition.topic
    settings = {"bootstrap.servers": embedded.bootstrap, "transactional.id": topic}
    zombie = Producer(settings)
    zombie.init_transactions(SOON_S)
    zombie.begin_transaction()
    zombie.produce(topic, b"zombie")
    assert zombie.flush(SOON_S) == 0

    produce_transactions(
        embedded.bootstrap, topic, [([Message(value=b"new")], True)], transactional_id=topic
    )
    with pytest.raises(KafkaException) as raised:
        zombie.commit_transaction(SOON_S)

    assert raised.value.args[0].fatal()
    assert _values(embedded.bootstrap, topic) == [b"new"]


# The protocol: the same responses as from Apache Kafka


def test_the_finalized_transaction_version_is_2(peer):
    response = peer.ask(
        Api.API_VERSIONS, 3, client_software_name="test", client_software_version="1"
    )

    levels = {one.name: one.max_version_level for one in response.finalized_features}
    assert levels["transaction.version"] == 2


def test_records_need_a_transaction_of_their_producer(peer):
    older, writer = peer.init(), peer.init()
    assert peer.produce(writer, 0) == ErrorCode.invalid_txn_state
    assert peer.produce(writer, 0, version=11) == ErrorCode.transaction_abortable

    assert peer.add(writer) == ErrorCode.none
    assert peer.produce(writer, 0) == ErrorCode.none
    assert peer.produce(older, 0) == ErrorCode.invalid_producer_epoch
    other = Writer(writer.producer_id + 1000, writer.epoch)
    assert peer.produce(other, 0) == ErrorCode.invalid_producer_id_mapping
    assert peer.end(writer, commit=True)[0] == ErrorCode.none
    assert peer.end(writer, commit=True)[0] == ErrorCode.none
    assert peer.end(writer, commit=False)[0] == ErrorCode.invalid_txn_state


def test_with_version_2_produce_adds_the_partition_and_every_end_has_a_new_epoch(peer):
    first = peer.init()
    assert peer.produce_v2(first, 0) == ErrorCode.none

    code, second = peer.end(first, commit=True, version=5)

    assert (code, second) == (ErrorCode.none, Writer(first.producer_id, first.epoch + 1))
    assert peer.end(first, commit=True, version=5) == (ErrorCode.none, second)
    assert peer.end(first, commit=False, version=5)[0] == ErrorCode.invalid_txn_state
    assert peer.produce_v2(first, 3) == ErrorCode.invalid_producer_epoch
    assert peer.produce_v2(second, 0) == ErrorCode.none
    code, third = peer.end(second, commit=False, version=5)
    assert (code, third.epoch) == (ErrorCode.none, second.epoch + 1)
    code, fourth = peer.end(third, commit=False, version=5)
    assert (code, fourth.epoch) == (ErrorCode.none, third.epoch + 1)
    assert peer.end(fourth, commit=True, version=5)[0] == ErrorCode.invalid_txn_state
    assert _values(peer.bootstrap, peer.topic) == [b"record %d" % n for n in range(3)]


def test_with_version_2_the_first_batch_in_a_partition_has_sequence_0(peer):
    writer = peer.init()
    out_of_order = ErrorCode.out_of_order_sequence_number

    # The batch before it was refused, for instance while the previous transaction was completed.
    assert peer.produce_v2(writer, 3) == out_of_order
    assert peer.produce_v2(writer, 0) == ErrorCode.none
    assert peer.produce_v2(writer, 3) == ErrorCode.none
    assert peer.end(writer, commit=True, version=5)[0] == ErrorCode.none


def test_a_client_continues_with_the_next_epoch_and_may_repeat_the_request(peer):
    first = peer.init()
    second = peer.init(first)

    assert second == Writer(first.producer_id, first.epoch + 1)
    assert peer.init(first) == second
    peer.init()
    assert peer.init_error(second) == ErrorCode.producer_fenced
    assert peer.init_error(second, version=3) == ErrorCode.invalid_producer_epoch


def test_an_unknown_partition_is_added_to_no_transaction(peer):
    writer = peer.init()

    codes = peer.add_all(writer, (0, 7))

    assert codes == {0: ErrorCode.operation_not_attempted, 7: ErrorCode.unknown_topic_or_partition}
    assert peer.listed() == {peer.transactional_id: "Empty"}


def test_bad_requests_get_clear_errors(peer):
    assert peer.init_error(timeout_ms=3_600_000) == ErrorCode.invalid_transaction_timeout
    assert peer.init_error(timeout_ms=-1) == ErrorCode.invalid_transaction_timeout
    writer = peer.init()
    assert peer.end(writer, commit=True)[0] == ErrorCode.invalid_txn_state
    other = Writer(writer.producer_id + 1000, 0)
    assert peer.add(other) == ErrorCode.invalid_producer_id_mapping
    newer = Writer(writer.producer_id, 7)
    assert peer.end(newer, commit=True)[0] == ErrorCode.producer_fenced
    assert peer.end(newer, commit=True, version=1)[0] == ErrorCode.invalid_producer_epoch


# The protocol: what only this broker promises


def test_a_batch_sent_again_after_its_transaction_is_a_duplicate(client, partition):
    writer = client.init()
    client.add(writer)
    client.produce(writer, 0)
    client.end(writer, commit=True)

    assert client.produce(writer, 0) == ErrorCode.none
    assert partition.log_end == 4


def test_a_marker_from_outside_ends_a_transaction(client, partition):
    writer = client.init()
    client.add(writer)
    client.produce(writer, 0)
    stable = partition.fetch(0).last_stable_offset

    found = partition.write_markers(writer, commit=False, coordinator_epoch=9)

    assert found == {writer.producer_id: 0}
    fetched = partition.fetch(0)
    assert (stable, fetched.last_stable_offset) == (0, 4)
    listed = [(one.producer_id, one.first_offset) for one in fetched.aborted_transactions]
    assert listed == [(writer.producer_id, 0)]
    assert client.end(writer, commit=True)[0] == ErrorCode.none
    assert partition.fetch(0).last_stable_offset == 5
    assert _values(client.bootstrap, partition.topic) == []


def test_what_is_not_decided_is_not_the_latest_offset(client, partition):
    partition.produce(client.batch(Writer(-1, -1), -1, transactional=False))
    writer = client.init()
    client.add(writer)
    client.produce(writer, 0)

    latest = [partition.list_offset(-1, isolation=level)[2] for level in (0, 1)]
    by_time = [partition.list_offset(2_000_000_000_000, isolation=level)[2] for level in (0, 1)]

    assert latest == [6, 3]
    assert by_time == [-1, -1]
    first_ms = 1_700_000_000_000
    assert partition.list_offset(first_ms, isolation=1)[2] == 0
    client.end(writer, commit=True)
    assert partition.list_offset(-1, isolation=1)[2] == 7


def test_transactions_are_listed_and_described(client):
    writer = client.init()
    client.add(writer)
    assert client.described() == ("Ongoing", *writer, {client.topic: (0,)})
    assert client.listed(states=("Ongoing",)) == {client.transactional_id: "Ongoing"}
    assert client.listed(states=("CompleteCommit",)) == {}
    assert client.listed(states=("Nonsense",)) == {}
    assert client.listed(duration_ms=60_000) == {}
    client.end(writer, commit=True)
    assert client.described() == ("CompleteCommit", *writer, {})


def test_several_transactions_are_verified_in_one_request(client):
    writer = client.init()
    client.add(writer)

    codes = client.add_batched(writer, (0,), verify_only=True)
    assert codes == {0: ErrorCode.none}
    client.end(writer, commit=True)
    codes = client.add_batched(writer, (0,), verify_only=True)
    assert codes == {0: ErrorCode.transaction_abortable}
    assert client.add_batched(writer, (0,), verify_only=False) == {0: ErrorCode.none}
    assert client.described()[0] == "Ongoing"


def test_time_ends_transactions_and_forgets_ids(
    tmp_path: Path, log_bucket: LogBucket | None, topic_name: str
) -> None:
    broker = EmbeddedBroker(
        tmp_path / "broker", bucket=log_bucket, transactional_id_expiration_ms=3000
    )
    with broker:
        create_topic(broker.bootstrap, topic_name, 1, {})
        with TransactionClient(broker.bootstrap, topic_name) as client:
            writer = client.init(timeout_ms=500)
            client.add(writer)
            client.produce(writer, 0)
            deadline = time.monotonic() + SOON_S
            while client.described()[0] != "CompleteAbort":
                assert time.monotonic() < deadline, "the transaction hangs"
                time.sleep(0.1)
            assert client.end(writer, commit=True)[0] == ErrorCode.producer_fenced
            assert client.produce(writer, 3) == ErrorCode.invalid_producer_epoch
            while client.listed():
                assert time.monotonic() < deadline, "the ID does not expire"
                time.sleep(0.1)
    assert _read_after(broker, topic_name) == []


def _read_after(broker: EmbeddedBroker, topic: str) -> list[bytes | None]:
    with broker:
        return [row.value for row in rows_by_librdkafka(broker.bootstrap, topic)]


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_transaction_continues_after_a_restart(tmp_path, log_bucket, topic_name, how):
    broker = EmbeddedBroker(tmp_path / "broker", bucket=log_bucket)
    with broker:
        create_topic(broker.bootstrap, topic_name, 1, {})
        with TransactionClient(broker.bootstrap, topic_name) as client:
            writer = client.init()
            client.add(writer)
            client.produce(writer, 0)
        getattr(broker, how)()
        broker.start()
        with TransactionClient(broker.bootstrap, topic_name) as client:
            assert client.described()[0] == "Ongoing"
            assert client.produce(writer, 0) == ErrorCode.none
            assert client.produce(writer, 3) == ErrorCode.none
            assert client.end(writer, commit=True)[0] == ErrorCode.none
        assert len(_values(broker.bootstrap, topic_name)) == 6
