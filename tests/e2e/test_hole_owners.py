"""Several writers of holes: one fills a hole, and what another still has in hand comes too late.

Two that are awake, one that was paused, one that is silent, and somebody who writes a marker too
many; Apache Kafka, both releases, and the embedded broker where owners are not needed.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.apache import VERSIONS
from kit.commands import BrokerCommand
from kit.partition_client import PartitionClient
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import PositionError
from logmirror.mirror import hole_owners
from logmirror.mirror.kafka_holes import HoleWriter
from logmirror.mirror.ports import PositionMovedError
from logmirror.model import TopicPartition

pytestmark = [pytest.mark.xdist_group("e2e-holes"), pytest.mark.timeout(600)]

KINDS = (*VERSIONS, BrokerCommand.version)


@pytest.fixture(scope="module")
def brokers(request):
    names = ("kafka_392", "kafka_431", "cli_broker")
    return dict(zip(KINDS, map(request.getfixturevalue, names), strict=True))


@pytest.fixture
def client(brokers, kind):
    with ClusterClient(connection_settings(brokers[kind].bootstrap, {})) as client:
        yield client


def end_of(client, partition):
    return client.log_ends([partition])[partition].end_offset


@pytest.mark.parametrize("kind", KINDS)
def test_markers_of_a_writer_that_was_paused_are_refused(
    brokers, client, kind, topic_name, monkeypatch
):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    paused, other = HoleWriter(client), HoleWriter(client)
    seen_ms = SYSTEM_CLOCK.monotonic_ms() - 2000
    for writer in (paused, other):  # the pause comes behind the last look, and owners behind it
        monkeypatch.setattr(writer, "_look_again", lambda _partition, _first, seen_ms, _: seen_ms)
        monkeypatch.setattr(writer._owners, "own", lambda _partition, _first: None)  # noqa: SLF001  # the second of two guards is what is tested
    other.fill(partition, 0, 2, seen_ms=seen_ms + 1500)

    with pytest.raises(PositionMovedError) as caught:
        paused.fill(partition, 0, 2, seen_ms=seen_ms)

    assert caught.value.facts["error"] == "TRANSACTION_COORDINATOR_FENCED"
    assert end_of(client, partition) == 2
    # A clock that is behind keeps nobody out for long: the next try goes beyond what was seen.
    paused.fill(partition, 2, 5, seen_ms=seen_ms)
    assert end_of(client, partition) == 5


@pytest.mark.parametrize("kind", VERSIONS[-1:])
def test_of_two_writers_that_are_awake_the_later_one_finds_the_hole_filled(
    brokers, client, kind, topic_name
):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    seen_ms = SYSTEM_CLOCK.monotonic_ms() - 50
    HoleWriter(client).fill(partition, 0, 2, seen_ms=seen_ms)

    with pytest.raises(PositionMovedError) as caught:
        HoleWriter(client).fill(partition, 0, 2, seen_ms=seen_ms)

    assert (caught.value.facts["expected"], caught.value.facts["found"]) == (0, 2)
    assert end_of(client, partition) == 2


ROUNDS = 8


@pytest.mark.parametrize("kind", VERSIONS)
def test_of_two_writers_at_one_hole_at_the_same_moment_one_fills_it(
    brokers, kind, topic_name, monkeypatch
):
    monkeypatch.setattr(hole_owners, "SEND_DEADLINE_MS", 500)
    monkeypatch.setattr(hole_owners, "SETTLE_MS", 2000)
    settings = connection_settings(brokers[kind].bootstrap, {})
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    together, moved = threading.Barrier(2), []

    def fill_all():
        with ClusterClient(settings) as client:
            writer = HoleWriter(client)
            for number in range(ROUNDS):
                together.wait()
                try:
                    writer.fill(partition, 3 * number, 3 * number + 3, seen_ms=0)
                except PositionMovedError:
                    moved.append(number)
                writer.rest()
                together.wait()
                assert end_of(client, partition) == 3 * number + 3

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(fill_all) for _ in range(2)]:
            one.result()
    assert sorted(moved) == list(range(ROUNDS))


@pytest.mark.parametrize("kind", VERSIONS)
def test_the_holes_of_an_owner_that_is_silent_are_taken_over_after_its_time(
    brokers, client, kind, topic_name, monkeypatch
):
    monkeypatch.setattr(hole_owners, "PATIENCE_MS", 600)
    monkeypatch.setattr(hole_owners, "SETTLE_MS", 400)
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    silent, other, third = (HoleWriter(client) for _ in range(3))
    silent.fill(partition, 0, 2, seen_ms=0)

    begun_s = time.monotonic()
    other.fill(partition, 2, 4, seen_ms=0)
    assert time.monotonic() - begun_s > 1
    other.rest()
    begun_s = time.monotonic()
    third.fill(partition, 4, 6, seen_ms=0)
    assert time.monotonic() - begun_s < 1, "it was given back"

    monkeypatch.setattr(hole_owners, "_CONFIRM_EVERY_MS", 0)
    with pytest.raises(PositionMovedError) as caught:
        silent.fill(partition, 6, 8, seen_ms=SYSTEM_CLOCK.monotonic_ms())
    assert "transactional_id" in caught.value.facts
    silent.rest()
    third.fill(partition, 6, 8, seen_ms=0)
    assert end_of(client, partition) == 8


@pytest.mark.parametrize("kind", VERSIONS)
def test_two_writers_of_empty_transactions_take_the_ids_from_each_other(
    brokers, client, kind, topic_name, monkeypatch
):
    monkeypatch.setattr(client.admin, "may_write_markers", lambda: False)
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    one, other = HoleWriter(client), HoleWriter(client)
    one.fill(partition, 0, 2, seen_ms=0)
    other.fill(partition, 2, 4, seen_ms=0)

    with pytest.raises(PositionMovedError):
        one.fill(partition, 4, 6, seen_ms=0)

    assert end_of(client, partition) == 4
    one.fill(partition, 4, 6, seen_ms=0)
    assert end_of(client, partition) == 6


@pytest.fixture(params=["markers", "transactions"])
def writer(request, client, monkeypatch):
    """A writer of holes that may write markers, or may not."""
    monkeypatch.setattr(client.admin, "may_write_markers", lambda: request.param == "markers")
    return HoleWriter(client)


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_marker_too_many_is_found_before_anything_else_is_written(
    brokers, writer, kind, topic_name
):
    brokers[kind].create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    writer.fill(partition, 0, 1, seen_ms=0)
    with PartitionClient(brokers[kind].bootstrap, topic_name) as raw:
        assert raw.write_markers((4711, 0)) == {4711: 0}

    with pytest.raises(PositionError) as caught:
        writer.fill(partition, 1, 2, seen_ms=SYSTEM_CLOCK.monotonic_ms() + 1000)  # not looked again

    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("HoleTooLong", 2, 3)
