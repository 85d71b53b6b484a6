"""Transactions begin, end and fence as reported to their owner, also when responses are lost.

Method: Apache Kafka, both releases, read by librdkafka. Responses are lost by a connection that
drops them after the broker has processed the request. Scripted brokers for responses that real ones
seldom give: coordinators that move, load, or are unavailable.
"""

import time
from dataclasses import replace

import pytest

from kit.fakes.dropping import Dropping
from kit.fakes.scripted_broker import Topic, World, hang_up
from kit.fakes.scripted_writes import (
    ADD_PARTITIONS,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
)
from kit.judges.clients import rows_by_librdkafka
from logmirror.cluster.client import LATEST, ClusterClient
from logmirror.cluster.connection import Connection
from logmirror.cluster.groups import GroupOffset
from logmirror.cluster.properties import connection_settings
from logmirror.errors import (
    FencedError,
    InternalError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.records import Record, encode_reference

INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def client(apache_kafka):
    settings = replace(connection_settings(apache_kafka.bootstrap), retry_budget_ms=20_000)
    with ClusterClient(settings) as client:
        yield client


@pytest.fixture
def partitions(apache_kafka, topic_name):
    apache_kafka.create_topic(topic_name, 2)
    return [TopicPartition(topic_name, n) for n in range(2)]


@pytest.fixture
def producer(client, topic_name):
    producer = client.transactional_producer(topic_name)
    producer.init()
    return producer


class Writer:
    """Writes single records inside transactions, each partition's sequence from 0 on."""

    def __init__(self, client, producer):
        self.pipeline = client.pipeline(transactional_id=producer.transactional_id)
        self.producer = producer
        self.next = {}

    def write(self, partition, value):
        identity = self.producer.identity
        sequence = self.next.get(partition, 0)
        self.next[partition] = sequence + 1
        row = Record(0, 1_700_000_000_000, TimestampType.CREATE_TIME, None, value, ())
        data = encode_reference(
            [row],
            base_offset=0,
            last_offset=0,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
            transactional=True,
        )
        self.pipeline.send([(partition, memoryview(data))])
        (response,) = self.pipeline.collect(block=True)
        return response


@pytest.fixture
def writer(client, producer):
    writer = Writer(client, producer)
    yield writer
    writer.pipeline.close()


def ends(client, partitions):
    return [client.log_ends(partitions)[partition].end_offset for partition in partitions]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def values(broker, partition):
    rows = rows_by_librdkafka(broker.bootstrap, partition.topic, partition=partition.partition)
    return [row.value for row in rows]


def test_readers_see_what_was_committed_and_no_more(
    apache_kafka, client, producer, writer, partitions
):
    for commit, value in ((True, b"a"), (False, b"b"), (True, b"c")):
        producer.add_partitions(partitions)
        for partition in partitions:
            assert writer.write(partition, value).error is None
        producer.end(commit=commit)
        producer.end(commit=commit)  # nothing is open: nothing is asked
    until(lambda: ends(client, partitions) == [6, 6])
    until(lambda: set(client.list_offsets(partitions, LATEST).values()) == {6})
    assert values(apache_kafka, partitions[0]) == [b"a", b"c"]
    assert values(apache_kafka, partitions[1]) == [b"a", b"c"]


def test_an_empty_transaction_takes_one_offset_of_each_partition_however_it_ends(
    apache_kafka, client, producer, partitions
):
    for number in range(10):
        producer.add_partitions(partitions)
        producer.add_partitions(partitions)
        producer.end(commit=number % 2 == 0)
        until(lambda number=number: ends(client, partitions) == [number + 1] * 2)
    assert values(apache_kafka, partitions[0]) == []


def test_progress_is_committed_with_the_transaction_or_not_at_all(
    client, producer, writer, partitions, topic_name
):
    group = f"group-{topic_name}"
    assert client.groups.offsets(group, partitions) == dict.fromkeys(partitions)
    for offset, commit in ((10, True), (20, False), (30, True)):
        producer.add_partitions(partitions[:1])
        writer.write(partitions[0], b"v")
        progress = GroupOffset(offset, 3, f"until {offset}")
        producer.commit_offsets(group, {partitions[0]: progress})
        producer.end(commit=commit)
        kept = progress if commit else GroupOffset(10, 3, "until 10")
        assert client.groups.offsets(group, partitions) == {
            partitions[0]: kept,
            partitions[1]: None,
        }


def test_progress_in_an_open_transaction_is_waited_for(
    apache_kafka, client, producer, partitions, topic_name
):
    producer.commit_offsets(topic_name, {partitions[0]: GroupOffset(5, -1, "")})
    settings = replace(connection_settings(apache_kafka.bootstrap), retry_budget_ms=300)
    with ClusterClient(settings) as hasty:
        with pytest.raises(UnavailableError) as caught:
            hasty.groups.offsets(topic_name, partitions)
        assert caught.value.facts["error"] == "UNSTABLE_OFFSET_COMMIT"
    producer.end(commit=True)
    found = client.groups.offsets(topic_name, partitions)
    assert found[partitions[0]] == GroupOffset(5, -1, "")


def test_a_new_owner_ends_the_old_one_for_good_and_aborts_what_it_left(
    apache_kafka, client, producer, writer, partitions
):
    producer.add_partitions(partitions)
    writer.write(partitions[0], b"left")
    successor = client.transactional_producer(producer.transactional_id)
    assert successor.init().producer_epoch > producer.identity.producer_epoch
    assert ends(client, partitions) == [2, 1], "both markers are there when init returns"

    assert type(writer.write(partitions[0], b"late").error) is FencedError
    with pytest.raises(FencedError):
        producer.end(commit=True)
    for after in (
        lambda: producer.add_partitions(partitions),
        lambda: producer.end(commit=False),
        lambda: producer.identity,
        lambda: producer.commit_offsets("g", {}),
    ):
        with pytest.raises(FencedError):
            after()
    successor.add_partitions(partitions)
    successor.end(commit=True)
    until(lambda: ends(client, partitions) == [3, 2])
    assert values(apache_kafka, partitions[0]) == []
    producer.init()
    with pytest.raises(FencedError):
        successor.add_partitions(partitions)


def test_a_transaction_left_open_too_long_is_aborted_and_its_owner_fenced(
    client, partitions, topic_name
):
    producer = client.transactional_producer(topic_name, timeout_ms=1000)
    producer.init()
    producer.add_partitions(partitions[:1])
    # The coordinator looks every ten seconds.
    until(lambda: ends(client, partitions) == [1, 0])
    with pytest.raises(FencedError):
        producer.end(commit=True)


def test_what_the_brokers_do_not_permit_is_a_usage_error(client, producer, topic_name):
    with pytest.raises(UsageError) as caught:
        client.transactional_producer(topic_name + "-2", timeout_ms=2**30).init()
    assert caught.value.facts["error"] == "INVALID_TRANSACTION_TIMEOUT"
    with pytest.raises(InternalError):
        client.transactional_producer(topic_name).add_partitions([T0])


@pytest.fixture
def dropping(monkeypatch):
    return Dropping(monkeypatch)


@pytest.mark.parametrize("commit", [True, False])
def test_each_lost_response_is_asked_for_again_and_nothing_is_done_twice(
    apache_kafka, client, dropping, partitions, commit
):
    topic_name = partitions[0].topic
    dropping.names = [
        "FindCoordinatorRequest",
        "InitProducerIdRequest",
        "AddPartitionsToTxnRequest",
        "AddOffsetsToTxnRequest",
        "TxnOffsetCommitRequest",
        "EndTxnRequest",
    ]
    producer = client.transactional_producer(topic_name)
    producer.init()
    producer.add_partitions(partitions)
    writer = Writer(client, producer)
    assert writer.write(partitions[0], b"v").error is None
    writer.pipeline.close()
    producer.commit_offsets(topic_name, {partitions[0]: GroupOffset(7, -1, "")})
    producer.end(commit=commit)
    assert dropping.names == []
    assert dropping.seen.count("EndTxnRequest") >= 2
    until(lambda: ends(client, partitions) == [2, 1])
    time.sleep(0.2)
    assert ends(client, partitions) == [2, 1], "one marker each"
    assert values(apache_kafka, partitions[0]) == ([b"v"] if commit else [])
    found = client.groups.offsets(topic_name, partitions[:1])[partitions[0]]
    assert found == (GroupOffset(7, -1, "") if commit else None)


@pytest.mark.parametrize("newer_epoch", [True, False], ids=["newer epoch", "same epoch"])
def test_an_end_that_comes_late_ends_the_next_transaction_unless_that_has_a_newer_epoch(
    apache_kafka, client, dropping, topic_name, newer_epoch
):
    """What a broker does to a request that was delayed and repeated meanwhile."""
    apache_kafka.create_topic(topic_name, 1)
    partition, producer = TopicPartition(topic_name, 0), client.transactional_producer(topic_name)
    producer.init()
    dropping.names = ["EndTxnRequest"]
    for value in (b"a", b"b"):
        assert not producer.has_stray
        producer.add_partitions([partition])
        writer = Writer(client, producer)
        writer.next = {partition: 0 if newer_epoch or value == b"a" else 1}
        assert writer.write(partition, value).error is None
        writer.pipeline.close()
        if value == b"b":
            break
        producer.end(commit=True)
        assert producer.has_stray
        if newer_epoch:
            producer.init()
        else:
            producer._has_stray = False  # noqa: SLF001  # the rule that is left out
    response = dropping.arrives_late(high=4)
    if newer_epoch:
        assert response.error_code in (INVALID_PRODUCER_EPOCH, PRODUCER_FENCED)
        producer.end(commit=False)
        assert values(apache_kafka, partition) == [b"a"]
    else:
        assert response.error_code == 0
        with pytest.raises(UsageError):
            producer.end(commit=False)
        until(lambda: values(apache_kafka, partition) == [b"a", b"b"])


def test_an_abort_after_an_add_that_may_not_have_been_done_ends_cleanly(
    apache_kafka, client, monkeypatch, partitions, topic_name
):
    settings = replace(connection_settings(apache_kafka.bootstrap), retry_budget_ms=200)
    with ClusterClient(settings) as hasty:
        producer = hasty.transactional_producer(topic_name)
        producer._coordinator = client.transactional_producer(topic_name)._coordinator  # noqa: SLF001  # with a long timeout until here
        producer.init()
        producer._coordinator = hasty.transactional_producer(topic_name)._coordinator  # noqa: SLF001  # hasty from here
        call = Connection.call

        def never(connection, request, **options):
            if request.name == "AddPartitionsToTxnRequest":
                raise UnavailableError("not sent")
            return call(connection, request, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "call", never)
            with pytest.raises(UnavailableError):
                producer.add_partitions(partitions)
            with pytest.raises(InternalError):
                producer.end(commit=True)
        producer.end(commit=False)
        producer.add_partitions(partitions)
        producer.end(commit=True)
    until(lambda: ends(client, partitions) == [1, 1])


# Scripted coordinators.


@pytest.fixture
def world():
    return World({"t": Topic(bytes(16), [(1, 5), (2, 5)])})


@pytest.fixture
def scripted(brokers):
    settings = replace(
        connection_settings(brokers[1].address),
        socket_timeout_ms=1000,
        retry_backoff_ms=5,
        retry_backoff_max_ms=20,
        reconnect_backoff_ms=5,
        reconnect_backoff_max_ms=20,
        retry_budget_ms=2000,
    )
    with ClusterClient(settings) as client:
        yield client.transactional_producer("mine")


@pytest.mark.parametrize("code", [15, 16])
def test_a_coordinator_that_moved_is_followed(scripted, brokers, code):
    scripted.init()
    brokers[1].codes[END_TXN].append(code)
    brokers[1].coordinator = 2
    scripted.add_partitions([T0])
    scripted.end(commit=True)
    assert len(brokers[1].asked(END_TXN)) == len(brokers[2].asked(END_TXN)) == 1
    assert len(brokers[1].asked(FIND_COORDINATOR)) == 2


def test_a_coordinator_that_is_gone_is_looked_up_again(scripted, brokers, world):
    brokers[1].coordinator = 2
    scripted.init()
    scripted.add_partitions([T0])
    brokers[2].close()
    brokers[1].coordinator = 1
    scripted.end(commit=True)
    assert len(brokers[1].asked(END_TXN)) == 1


def test_a_busy_coordinator_is_asked_again_soon(scripted, brokers):
    brokers[1].codes[FIND_COORDINATOR].append(15)
    brokers[1].codes[INIT_PRODUCER_ID].extend([14, 51])
    scripted.init()
    brokers[1].codes[ADD_PARTITIONS].extend([51] * 6)
    begun = time.monotonic()
    scripted.add_partitions([T0, T1])
    assert time.monotonic() - begun < 1.5
    assert len(brokers[1].asked(ADD_PARTITIONS)) == 7
    brokers[1].codes[END_TXN].append(51)
    scripted.end(commit=True)
    assert len(brokers[1].asked(FIND_COORDINATOR)) == 2


def test_the_versions_that_leave_the_epoch_alone_are_used(scripted, brokers):
    scripted.init()
    scripted.add_partitions([T0])
    scripted.end(commit=True)
    used = {key: version for key, version, _ in brokers[1].requests}
    assert (used[ADD_PARTITIONS], used[END_TXN], used[INIT_PRODUCER_ID]) == (3, 4, 5)


def test_an_end_without_any_response_is_unknown_and_may_be_asked_again(scripted, brokers):
    scripted.init()
    scripted.add_partitions([T0])
    brokers[1].once(END_TXN, *[hang_up] * 200)
    with pytest.raises(OutcomeUnknownError) as caught:
        scripted.end(commit=True)
    assert caught.value.facts["transactional_id"] == "mine"
    brokers[1].faults[END_TXN].clear()
    scripted.end(commit=True)
    assert brokers[1].asked(END_TXN)[-1].committed is True


def test_a_refused_partition_takes_none_with_it(scripted, brokers):
    scripted.init()
    brokers[1].codes[ADD_PARTITIONS].append(29)
    with pytest.raises(UsageError) as caught:
        scripted.add_partitions([T0])
    assert caught.value.facts["topic"] == "t"
    scripted.end(commit=True)
    assert brokers[1].asked(END_TXN) == []
    scripted.add_partitions([T0])
    scripted.end(commit=True)
    assert len(brokers[1].asked(END_TXN)) == 1


@pytest.mark.parametrize("code", [47, 49, 90])
def test_a_fenced_owner_stays_fenced_until_it_takes_the_id_again(scripted, brokers, code):
    scripted.init()
    scripted.add_partitions([T0])
    brokers[1].codes[END_TXN].append(code)
    for _ in range(2):
        with pytest.raises(FencedError):
            scripted.end(commit=True)
    assert len(brokers[1].asked(END_TXN)) == 1
    scripted.init()
    scripted.add_partitions([T0])
    scripted.end(commit=True)
