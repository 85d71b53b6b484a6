"""Goal: a plan shows the record at which a group would continue, read in bounded time.

Method: records and transactions of librdkafka on the embedded broker; a clock moved by hand.
"""

from __future__ import annotations

import pytest

from kit.fakes.scripted import SteppingClock
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.gaps import trim, write_transactions
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UnavailableError, UsageError
from logmirror.groups import resume
from logmirror.groups.resume import KEY_CHARACTERS, ResumeReader, shortened
from logmirror.model import TopicPartition
from logmirror.reports import NextRecord
from logmirror.wire.decode import RecordDecoder


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def client(broker):
    with ClusterClient(connection_settings(broker.bootstrap)) as client:
        yield client


class Counting:
    """Counts the fetches of a client, which fail with an error if there is one."""

    def __init__(self, client, error=None):
        self.client, self.error, self.fetches = client, error, 0

    def __getattr__(self, name):
        return getattr(self.client, name)

    def fetch(self, *arguments, **more):
        self.fetches += 1
        if self.error is not None:
            raise self.error
        return self.client.fetch(*arguments, **more)


def reader(client, clock=SYSTEM_CLOCK, **more):
    return ResumeReader(client, RecordDecoder(1 << 20), clock, **more)


def test_the_next_record_is_the_first_visible_one_at_or_after_an_offset(broker, client, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    write_transactions(broker.bootstrap, topic_name, 0)  # committed, aborted, markers, in batches
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
    where = TopicPartition(topic_name, 0)
    end = client.log_ends([where])[where].end_offset
    found = reader(client)

    for offset in range(end + 1):
        row = next((row for row in rows if row.offset >= offset), None)
        expected = NextRecord(offset=None)
        if row is not None:
            key = None if row.key is None else shortened(row.key)
            expected = NextRecord(offset=row.offset, timestamp_ms=row.timestamp_ms, key=key)
        assert found.at(where, offset) == expected
    assert {row.offset for row in rows} < set(range(end))


def test_a_place_is_fetched_once_and_a_batch_larger_than_the_buffer_whole(
    broker, client, topic_name
):
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(b"large", b"v" * 300_000)])
    counting = Counting(client)
    found = reader(counting)
    where = TopicPartition(topic_name, 0)

    first = found.at(where, 0)

    assert first is not None
    assert (first.offset, first.key) == (0, "large")
    fetches = counting.fetches
    assert fetches <= 2
    assert found.at(where, 0) is first
    assert counting.fetches == fetches


def test_a_long_run_without_records_ends_after_a_number_of_fetches(
    broker, client, topic_name, monkeypatch
):
    create_topic(broker.bootstrap, topic_name, 1, {})
    write_transactions(broker.bootstrap, topic_name, 0)
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
    last = rows[-1].offset
    produce(broker.bootstrap, topic_name, [Message(b"k", b"v" * 200_000) for _ in range(3)])
    monkeypatch.setattr(ResumeReader, "_first", lambda *_: None)  # as if nothing were visible
    monkeypatch.setattr(resume, "FETCHES", 2)
    counting = Counting(client)

    assert reader(counting).at(TopicPartition(topic_name, 0), last) is None
    assert counting.fetches <= 4  # each may ask again for a batch larger than the buffer


def test_what_is_beyond_the_time_budget_is_not_read(broker, client, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(b"k", b"v")] * 3)
    clock, where = SteppingClock(), TopicPartition(topic_name, 0)
    counting = Counting(client)
    found = reader(counting, clock, budget_ms=1000)
    slow = counting.client.fetch

    def fetch(*arguments, **more):
        clock.sleep_ms(1000)
        return slow(*arguments, **more)

    counting.client = type("Slow", (), {"fetch": staticmethod(fetch)})()
    assert found.at(where, 0) == NextRecord(
        offset=0,
        timestamp_ms=next(rows_by_librdkafka(broker.bootstrap, topic_name)).timestamp_ms,
        key="k",
    )
    assert found.at(where, 1) is None
    assert counting.fetches == 1
    assert found.left_ms <= 0


@pytest.mark.parametrize(
    ("error", "fetches"), [(UsageError("no permission"), 1), (UnavailableError("no leader"), 2)]
)
def test_a_place_that_cannot_be_read_is_not_shown(client, error, fetches):
    counting = Counting(client, error)
    found = reader(counting)

    assert found.at(TopicPartition("orders", 0), 5) is None
    assert found.at(TopicPartition("orders", 1), 5) is None
    assert counting.fetches == fetches


def test_an_offset_that_retention_has_deleted_meanwhile_is_not_shown(broker, client, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(broker.bootstrap, topic_name, [Message(b"k", b"v")] * 3)
    trim(broker.bootstrap, topic_name, 0, 2)

    assert reader(client).at(TopicPartition(topic_name, 0), 0) is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"", ""),
        (b"order-17", "order-17"),
        ("Schl\u00fcssel".encode(), "Schl\u00fcssel"),
        (b"\x1b[31mred\n", "\\x1b[31mred\\n"),
        ("\u202egnp".encode(), "\\u202egnp"),
        (b"\xff\x00", "\\xff\\x00"),
        (b"k" * KEY_CHARACTERS, "k" * KEY_CHARACTERS),
        (b"k" * (KEY_CHARACTERS + 1), "k" * KEY_CHARACTERS + "..."),
        ("\u20ac".encode() * 10_000, "\u20ac" * KEY_CHARACTERS + "..."),
        ("\U0001f600".encode() * 41, "\U0001f600" * KEY_CHARACTERS + "..."),
        (("a" + "\U0001f600" * 40).encode(), "a" + "\U0001f600" * 39 + "..."),
    ],
)
def test_a_key_is_one_short_line_without_control_characters(key, expected):
    assert shortened(key) == expected
    assert shortened(key).isprintable()
