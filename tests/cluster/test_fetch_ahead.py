"""A prefetched response is used if it matches the next fetch; otherwise it has no effect.

Method: two scripted brokers, whose requests show what was prefetched and what was fetched.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kit.fakes.scripted_broker import (
    FETCH,
    Topic,
    World,
    cut_after,
    edited,
    hang_up,
)
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError
from logmirror.model import TopicPartition

TOPIC_ID = bytes(range(16))
PARTITIONS = [TopicPartition("t", number) for number in range(4)]
LOGS = [b"%d" % number * 100_000 for number in range(4)]
SIZE = 200_000


@pytest.fixture
def world():
    return World({"t": Topic(TOPIC_ID, [(1, 5), (1, 5), (1, 5), (2, 5)], list(LOGS))})


@pytest.fixture
def client(brokers):
    settings = replace(
        connection_settings(brokers[1].address),
        socket_timeout_ms=2000,
        retry_backoff_ms=5,
        retry_backoff_max_ms=20,
        retry_budget_ms=5000,
    )
    with ClusterClient(settings) as client:
        yield client


def ask(client, number, offset=10, *, topic_id=TOPIC_ID):
    client.fetch_ahead(PARTITIONS[number], offset, SIZE, topic_id=topic_id)


def fetch(client, number, offset=10, *, topic_id=TOPIC_ID, size=SIZE, **more):
    view = memoryview(bytearray(size))
    response = client.fetch(PARTITIONS[number], offset, view, topic_id=topic_id, **more)
    return bytes(view[: response.size]), response


def fetched_by(broker):
    """(partition, offset) of every fetch that has come there, in order."""
    return [
        (one.partition, one.fetch_offset)
        for request in broker.asked(FETCH)
        for topic in request.topics
        for one in topic.partitions
    ]


def test_what_was_asked_is_not_fetched_again(client, brokers):
    ask(client, 0)

    data, response = fetch(client, 0)

    assert data == LOGS[0]
    assert (response.high_watermark, response.last_stable_offset) == (100, 90)
    assert fetched_by(brokers[1]) == [(0, 10)]


def test_many_may_be_asked_before_the_first_is_taken(client, brokers):
    for number in range(4):
        ask(client, number)

    assert [fetch(client, number)[0] for number in range(4)] == LOGS
    assert fetched_by(brokers[1]) == [(0, 10), (1, 10), (2, 10)]
    assert fetched_by(brokers[2]) == [(3, 10)]


def test_asking_goes_on_between_takes(client, brokers):
    ask(client, 0)
    ask(client, 1)
    for offset in range(11, 20):
        for number in (0, 1):
            assert fetch(client, number, offset - 1)[0] == LOGS[number]
            ask(client, number, offset)
    fetch(client, 1, 19)

    assert fetched_by(brokers[1]) == [(n, offset) for offset in range(10, 20) for n in (0, 1)]


def test_consecutive_empty_responses_are_distinguished(client, world):
    """They are shorter than what is read of one at first."""
    world.topics["t"].logs = [b"", b"", b"x", b""]
    for number in range(3):
        ask(client, number)

    assert [fetch(client, number)[0] for number in range(3)] == [b"", b"", b"x"]


def test_asked_twice_is_asked_once(client, brokers):
    ask(client, 0)
    ask(client, 0, 11)

    fetch(client, 0)

    assert fetched_by(brokers[1]) == [(0, 10)]


def test_unused_responses_are_skipped(client, brokers):
    for number in range(3):
        ask(client, number)

    assert fetch(client, 2)[0] == LOGS[2]
    assert fetch(client, 0)[0] == LOGS[0]
    assert fetched_by(brokers[1]) == [(0, 10), (1, 10), (2, 10), (0, 10)]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"offset": 20}, 2),
        ({"topic_id": None}, 2),
        ({"read_committed": False}, 2),
        ({"max_wait_ms": 1}, 1),
        ({"size": SIZE + 1}, 1),
    ],
)
def test_a_response_to_something_else_is_not_taken_for_this_one(client, brokers, wanted, count):
    ask(client, 0)

    assert fetch(client, 0, **wanted)[0] == LOGS[0]
    assert len(fetched_by(brokers[1])) == count


def test_a_response_that_is_too_large_says_how_much_it_needs(client):
    ask(client, 0)

    data, response = fetch(client, 0, size=50_000)

    assert (data, response.needed_bytes) == (b"", 100_000)


def test_brokers_that_do_not_know_topic_ids_are_not_asked(client, brokers):
    for broker in brokers.values():
        broker.versions[FETCH] = (4, 12)
    ask(client, 0)

    assert fetch(client, 0)[0] == LOGS[0]
    assert len(fetched_by(brokers[1])) == 1


def of_another_request(response):
    response[7] ^= 1


@pytest.mark.parametrize("fault", [hang_up, cut_after(40), edited(of_another_request)])
def test_what_goes_wrong_with_it_is_nobodys_loss(client, brokers, fault):
    brokers[1].once(FETCH, fault)
    for number in range(4):
        ask(client, number)

    assert [fetch(client, number)[0] for number in range(4)] == LOGS


def test_a_leader_that_moved_is_looked_up(client, brokers, world):
    ask(client, 0)
    fetch(client, 0)
    world.topics["t"].leaders[0] = (2, 6)
    ask(client, 0, 11)

    assert fetch(client, 0, 11)[0] == LOGS[0]
    assert fetched_by(brokers[2]) == [(0, 11)]


def test_a_leader_out_of_reach_does_not_stop_who_asks_ahead(client, brokers):
    fetch(client, 3)
    brokers[2].close()

    ask(client, 3)
    ask(client, 0)

    assert fetch(client, 0)[0] == LOGS[0]


def test_a_deleted_offset_is_reported_when_it_is_fetched(client):
    ask(client, 0, 5)

    with pytest.raises(PositionError):
        fetch(client, 0, 5)


def test_a_broker_that_throttles_is_not_asked_ahead(client, brokers):
    ask(client, 0)
    ask(client, 1)
    brokers[1].throttle_ms = 300
    ask(client, 2)
    for number in range(3):
        fetch(client, number)
    brokers[1].throttle_ms = 0

    ask(client, 0, 11)

    assert (0, 11) not in fetched_by(brokers[1])
    time.sleep(0.4)
    ask(client, 0, 12)
    assert fetch(client, 0, 12)[0] == LOGS[0]
    assert fetched_by(brokers[1]).count((0, 12)) == 1
