"""Progress counts when its transaction is committed, and is read without waiting for others.

Method: records written to a real broker by logmirror's producers; transactions are committed,
aborted and left open. The tests spell out keys and values as the format says.
"""

import contextlib
import dataclasses
import json

import pytest
from confluent_kafka import Producer

from logmirror.clock import Clock
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import (
    CorruptionError,
    FencedError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.model import TopicPartition
from logmirror.to_kafka.producer_sessions import ProducerSessions
from logmirror.to_kafka.translate_progress import (
    PROGRESS_CONFIGS,
    FlowKey,
    Progress,
    ProgressReader,
    _parsed,
    encode_owner,
    encode_progress,
)
from logmirror.wire.rebatch import stamp

KEY = FlowKey("m", "orders", 3, "orders-copy")
OTHER = FlowKey("m", "orders", 4, "orders-copy")
KEY_TEXT = b'["next","m","orders",3,"orders-copy"]'


def progress(next_offset, writer="w"):
    return Progress(
        next_offset=next_offset,
        source_topic_id=bytes(range(16)),
        target_topic_id=None,
        writer=writer,
    )


@pytest.fixture
def client(apache_kafka):
    settings = connection_settings(apache_kafka.bootstrap, {})
    with ClusterClient(dataclasses.replace(settings, retry_budget_ms=3000)) as one:
        yield one


@pytest.fixture
def where(apache_kafka, topic_name):
    """The one partition of a topic for progress; each test has its own."""
    apache_kafka.create_topic(topic_name, config=PROGRESS_CONFIGS)
    return TopicPartition(topic_name, 0)


@pytest.fixture
def reader(client, where):
    return ProgressReader(client, where)


@pytest.fixture
def copier(client, where):
    with contextlib.ExitStack() as stack:

        def make(key):
            one = Copier(client, where, key)
            stack.callback(one.link.pipeline.close)
            return one

        yield make


@pytest.fixture
def say_plainly(apache_kafka, where):
    def say(key, value):
        producer = Producer({"bootstrap.servers": apache_kafka.bootstrap})
        producer.produce(where.topic, key=key, value=value, partition=0)
        assert producer.flush(20) == 0

    return say


class Copier:
    """Writes progress in transactions, as a copier does."""

    def __init__(self, client, where, key):
        self.where, self.key = where, key
        self.link = ProducerSessions(client).open(key.transactional_id)
        self.sequence = 0

    def say(self, next_offset):
        self.link.producer.add_partitions([self.where])
        batch = memoryview(encode_progress(self.key, progress(next_offset), 1))
        identity = self.link.producer.identity._asdict()
        stamp(batch, **identity, sequence=self.sequence, transactional=True)
        self.link.pipeline.send([(self.where, batch)])
        (response,) = self.link.pipeline.collect(block=True)
        assert response.error is None
        self.sequence += 1

    def end(self, *, commit):
        """End the transaction, and return when its marker is written."""
        self.link.producer.end(commit=commit)
        self.link.producer.init()
        self.sequence = 0


def test_bytes_are_those_of_the_format():
    value = encode_progress(KEY, progress(5), 1_700_000_000_000)
    wanted = {
        "version": 1,
        "next": 5,
        "source_topic_id": "000102030405060708090a0b0c0d0e0f",
        "target_topic_id": None,
        "writer": "w",
    }
    assert KEY_TEXT in value
    assert json.dumps(wanted, separators=(",", ":")).encode() in value
    known = encode_progress(KEY, dataclasses.replace(progress(5), leader_epoch=3), 1)
    with_epoch = json.dumps({**wanted, "leader_epoch": 3}, separators=(",", ":")).encode()
    assert with_epoch in known
    assert _parsed(None, with_epoch).leader_epoch == 3
    assert _parsed(None, json.dumps(wanted).encode()).leader_epoch == -1  # of an older version
    owner = encode_owner(KEY, "w", 1)
    assert b'["owner","m","orders",3,"orders-copy"]' in owner
    assert b'{"version":1,"writer":"w"}' in owner


def test_ids_of_flows_whose_names_run_together_differ():
    one = FlowKey("a-b", "c", 0, "d").transactional_id
    assert one.startswith("logmirror-a-b-d-0-")
    assert one != FlowKey("a", "b-c", 0, "d").transactional_id
    assert FlowKey("a", "c", 0, "b-d").transactional_id != one


def test_aborted_and_open_transactions_do_not_count_and_cause_no_wait(
    client, where, reader, copier
):
    one, other = copier(KEY), copier(OTHER)
    other.say(100)  # stays open throughout
    assert reader.refresh().progress(KEY) is None
    one.say(7)
    assert reader.refresh().progress(KEY) is None
    one.end(commit=True)
    assert reader.refresh().progress(KEY) == progress(7)
    one.say(8)
    one.end(commit=False)
    assert reader.refresh().progress(KEY) == progress(7)
    assert ProgressReader(client, where).refresh().progress(KEY) == progress(7)
    assert reader.progress(OTHER) is None
    other.end(commit=True)
    assert reader.refresh().progress(OTHER) == progress(100)
    assert dict(reader.of_target(TopicPartition("orders-copy", 3))) == {KEY: progress(7)}


def test_who_takes_a_flow_over_aborts_what_was_open_and_refuses_the_rest(reader, copier):
    older = copier(KEY)
    older.say(7)
    newer = copier(KEY)
    assert reader.refresh().progress(KEY) is None
    newer.say(3)
    with pytest.raises(FencedError):
        older.link.producer.end(commit=True)
    newer.end(commit=True)
    assert reader.refresh().progress(KEY) == progress(3)


def test_the_last_owner_counts_and_a_tombstone_forgets(client, where, reader, copier, say_plainly):
    with client.pipeline() as pipeline:
        for writer in ("first", "second"):
            pipeline.send([(where, memoryview(encode_owner(KEY, writer, 1)))])
            assert pipeline.collect(block=True)[0].error is None
    assert reader.refresh().owner(KEY) == "second"
    assert reader.owner(OTHER) is None
    one = copier(KEY)
    one.say(7)
    one.end(commit=True)
    assert reader.refresh().progress(KEY) == progress(7)
    say_plainly(KEY_TEXT, None)
    assert reader.refresh().progress(KEY) is None
    assert reader.owner(KEY) == "second"


def test_records_that_are_none_of_ours_are_passed_over(reader, say_plainly):
    other = b'["else","m","orders",3,"orders-copy"]'
    for key in (None, b"", b"text", b"{}", b'["next"]', b'["next","m","orders","x","c"]', other):
        say_plainly(key, b"anything")
    assert reader.refresh().progress(KEY) is None


@pytest.mark.parametrize(
    "value", [b"", b"[]", b'{"version":1}', b'{"version":1,"writer":"w","next":"x"}']
)
def test_progress_that_cannot_be_read_stops_the_reader(reader, say_plainly, value):
    say_plainly(KEY_TEXT, value)
    with pytest.raises(CorruptionError):
        reader.refresh()


def test_progress_of_another_version_is_refused(reader, say_plainly):
    say_plainly(KEY_TEXT, b'{"version":2,"writer":"w","next":5}')
    with pytest.raises(UsageError, match="another version") as refused:
        reader.refresh()
    assert refused.value.facts["version"] == 2


def test_a_missing_topic_is_believed_only_by_who_writes_nothing(client, topic_name):
    reader = ProgressReader(client, TopicPartition(topic_name, 0))
    assert reader.refresh(may_be_missing=True).progress(KEY) is None
    with pytest.raises(UnavailableError):
        reader.refresh()


def test_a_recreated_topic_is_not_taken_for_the_old_one(
    apache_kafka, where, reader, copier, say_plainly
):
    one = copier(KEY)
    one.say(7)
    one.end(commit=True)
    assert reader.refresh().progress(KEY) == progress(7)
    apache_kafka.delete_topic(where.topic)
    apache_kafka.create_topic(where.topic)
    for _ in range(5):
        say_plainly(b"k", b"v")
    with pytest.raises(PositionError):
        reader.refresh()


def test_a_log_that_is_longer_than_one_response_is_read_to_its_end(client, where, reader):
    with client.pipeline() as pipeline:
        for number in range(40):
            entry = dataclasses.replace(progress(number), writer="w" * 50_000)
            pipeline.send([(where, memoryview(encode_progress(KEY, entry, 1)))])
            assert pipeline.collect(block=True)[0].error is None
    found = reader.refresh().progress(KEY)
    assert found is not None
    assert found.next_offset == 39


class ActingClock(Clock):
    """A clock that moves only in `sleep_ms`, which also runs an action."""

    def __init__(self, act):
        self.act, self.slept_ms = act, 0

    def monotonic_ms(self):
        return self.slept_ms

    def sleep_ms(self, duration_ms):
        self.slept_ms += duration_ms
        self.act()


def test_markers_that_are_on_their_way_are_awaited(client, where, copier):
    one = copier(KEY)
    one.say(5)
    clock = ActingClock(lambda: one.end(commit=True))
    reader = ProgressReader(client, where, clock).refresh()
    assert reader.progress(KEY) is None

    reader.await_markers([OTHER, KEY])

    assert reader.progress(KEY) == progress(5)
    reader.await_markers([OTHER, KEY])
    assert clock.slept_ms == 10


def test_an_abandoned_transaction_causes_no_long_wait(client, where, copier):
    copier(KEY).say(5)
    clock = ActingClock(lambda: None)
    reader = ProgressReader(client, where, clock).refresh()

    reader.await_markers([OTHER])
    assert clock.slept_ms == 0
    reader.await_markers([OTHER, KEY])

    assert clock.slept_ms == 200
    assert reader.progress(KEY) is None
