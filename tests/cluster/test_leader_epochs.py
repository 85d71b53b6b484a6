"""The client learns whether a log still holds the batch that was fetched before (KIP-320).

Method: scripted brokers. The log had epochs 3 and 5; its leader has lost the end of 5, and leads
in epoch 7. Brokers of Fetch version 12 compare by themselves, older ones are asked with
OffsetForLeaderEpoch. tests/e2e/test_second_history.py shows the same with Apache Kafka.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.fakes.scripted_broker import EPOCH_ENDS, FETCH, ScriptedBroker, Topic, World
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.model import EpochEnd, TopicPartition

TOPIC_ID = bytes(range(16))
WHERE = TopicPartition("t", 0)
FETCH_VERSIONS = [9, 11, 12, 13, 16]


@pytest.fixture(params=FETCH_VERSIONS)
def broker(request):
    topic = Topic(TOPIC_ID, [(1, 7)], [b"records"], epochs=[(3, 0), (5, 40), (7, 60)])
    broker = ScriptedBroker(World({"t": topic}), versions={FETCH: (4, request.param)})
    yield broker
    broker.close()


@pytest.fixture
def client(broker):
    settings = replace(connection_settings(broker.address), retry_budget_ms=5000)
    with ClusterClient(settings) as client:
        yield client


def fetch(client, offset, epoch, *, ahead=False):
    view = memoryview(bytearray(100))
    if ahead:
        client.fetch_ahead(WHERE, offset, len(view), topic_id=TOPIC_ID, last_epoch=epoch)
    response = client.fetch(WHERE, offset, view, topic_id=TOPIC_ID, max_wait_ms=0, last_epoch=epoch)
    return bytes(view[: response.size]), response.diverging


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("offset", "epoch", "diverging"),
    [
        (60, 5, None),
        (61, 5, EpochEnd(5, 60)),
        (30, 3, None),
        (41, 3, EpochEnd(3, 40)),
        (50, 4, EpochEnd(3, 40)),  # the leader never had epoch 4
        (70, 7, None),
        (70, -1, None),
        (70, 9, None),  # above the leader's: not compared
    ],
)
def test_a_fetch_shows_where_the_log_diverges(client, offset, epoch, diverging, ahead):
    data, found = fetch(client, offset, epoch, ahead=ahead)
    assert found == diverging
    assert data == (b"" if diverging else b"records")


def test_each_new_leader_is_asked_once_and_newer_brokers_never(client, broker):
    for offset in (45, 50, 55, 60):
        assert fetch(client, offset, 5) == (b"records", None)
    assert fetch(client, 61, 5)[1] == EpochEnd(5, 60)
    is_old = broker.versions[FETCH][1] < 12
    assert len(broker.asked(EPOCH_ENDS)) == is_old
    broker.world.topics["t"].leaders[0] = (1, 8)  # the next fetch finds out
    broker.world.topics["t"].epochs.append((8, 90))
    assert fetch(client, 60, 5) == (b"records", None)
    assert len(broker.asked(EPOCH_ENDS)) == 2 * is_old


def test_the_ends_of_epochs_are_looked_up(client):
    ends = {5: EpochEnd(5, 60), 4: EpochEnd(3, 40), 7: EpochEnd(7, 100), 2: None}
    for epoch, end in ends.items():
        assert client.epoch_ends({WHERE: epoch}) == {WHERE: end}


def test_a_cluster_without_leader_epochs_is_not_asked(client, broker):
    broker.world.topics["t"].leaders[0] = (1, -1)
    assert client.epoch_ends({WHERE: 5}) == {WHERE: None}
    assert fetch(client, 61, 5) == (b"records", None)
    assert broker.asked(EPOCH_ENDS) == []
