"""A lease has one owner at a time, also when responses are lost.

Method: Apache Kafka, both releases; its own tool shows the state of an ID. Responses are lost by a
connection that drops them after the broker has processed the request.
"""

from dataclasses import replace

import pytest

from kit.servers.embedded import EmbeddedBroker
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.connection import Connection
from logmirror.cluster.properties import connection_settings
from logmirror.errors import FencedError, InternalError, UnavailableError
from logmirror.model import TopicPartition


@pytest.fixture
def client(apache_kafka):
    settings = replace(connection_settings(apache_kafka.bootstrap), retry_budget_ms=20_000)
    with ClusterClient(settings) as client:
        yield client


@pytest.fixture
def one(client, topic_name):
    return client.lease(topic_name)


@pytest.fixture
def other(client, topic_name):
    return client.lease(topic_name)


def test_acquiring_fences_the_previous_owner(client, one, other):
    assert client.has_leases()
    assert one.owner() is None
    assert one.acquire(None), "it never had an owner"
    one.check()
    seen = other.owner()
    assert seen is not None
    assert seen.is_holding

    assert not other.acquire(seen)

    other.check()
    with pytest.raises(FencedError):
        one.check()
    with pytest.raises(FencedError):
        one.release()
    other.check()
    assert one.owner().is_holding


def test_a_released_lease_is_free_as_kafkas_own_tool_shows(apache_kafka, one, other):
    one.acquire(None)
    one.release()
    seen = other.owner()
    assert not seen.is_holding
    described = apache_kafka.tools.run(
        "kafka-transactions",
        *("--bootstrap-server", apache_kafka.bootstrap, "describe"),
        *("--transactional-id", other.transactional_id),
    )
    line = described.stdout.splitlines()[-1].split()
    assert [str(seen.producer_id), str(seen.producer_epoch), "Empty", "1"] == line[2:6]

    assert other.acquire(seen)

    with pytest.raises(InternalError):
        one.check()


def test_of_two_that_saw_it_free_one_took_it_from_the_other(one, other):
    one.acquire(None)
    one.release()
    seen = one.owner()

    assert [one.acquire(seen), other.acquire(seen)] == [True, False]

    other.check()
    with pytest.raises(FencedError):
        one.check()


def test_of_two_that_saw_no_owner_one_fences_the_other(one, other):
    assert [one.owner(), other.owner()] == [None, None]
    assert [one.acquire(None), other.acquire(None)] == [True, False]


@pytest.fixture
def dropping(monkeypatch):
    """A connection drops the next successful response to a request."""
    drops = []
    call = Connection.call

    def lossy(connection, request, **options):
        response = call(connection, request, **options)
        if drops and request.name == drops[0] and not response.error_code:
            drops.pop()
            connection.close()
            raise UnavailableError("the response was dropped")
        return response

    monkeypatch.setattr(Connection, "call", lossy)
    return drops


def test_a_lost_response_leaves_the_owner_in_doubt_and_the_right_whole(one, other, dropping):
    dropping.append("InitProducerIdRequest")
    assert not one.acquire(None), "the first request may have been another process's"
    one.check()

    dropping.append("InitProducerIdRequest")
    one.release()
    seen = other.owner()
    assert not seen.is_holding
    assert other.acquire(seen)


def test_markers_that_are_late_are_not_sent(apache_kafka, client, topic_name):
    apache_kafka.create_topic(topic_name)
    where = TopicPartition(topic_name, 0)
    marker = {where: [TxnMarker(99, 0)]}
    late_ms = SYSTEM_CLOCK.monotonic_ms() - 1

    error = client.admin.write_txn_markers(marker, send_until_ms=late_ms)[where]

    assert type(error) is UnavailableError
    assert client.log_ends([where])[where].end_offset == 0
    until_ms = SYSTEM_CLOCK.monotonic_ms() + 3000
    assert client.admin.write_txn_markers(marker, send_until_ms=until_ms) == {where: None}
    assert client.log_ends([where])[where].end_offset == 1


def test_the_embedded_broker_has_leases(tmp_path):
    with (
        EmbeddedBroker(tmp_path) as broker,
        ClusterClient(connection_settings(broker.bootstrap)) as client,
    ):
        one, other = client.lease("id"), client.lease("id")
        assert client.has_leases()
        assert one.acquire(None)
        assert not other.acquire(other.owner())
        with pytest.raises(FencedError):
            one.check()
        other.check()
