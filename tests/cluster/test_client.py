"""The client finds the leader, retries what may succeed, and reports clearly what cannot.

Method: two or three scripted brokers that share one world, which the test changes: leaders move,
topics disappear and come back, brokers stop responding.
"""

import os
import pickle
import time
import warnings
from dataclasses import replace

import pytest

from kit.fakes.scripted_broker import (
    FETCH,
    LIST_OFFSETS,
    METADATA,
    ScriptedBroker,
    Topic,
    World,
    edited,
    hang,
    hang_up,
)
from logmirror.clock import Clock
from logmirror.cluster.client import EARLIEST, LATEST, NO_OFFSET, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import (
    CorruptionError,
    InternalError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.model import TopicPartition

TOPIC_ID = bytes(range(16))
OTHER_ID = bytes(range(1, 17))
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def world():
    return World({"t": Topic(TOPIC_ID, [(1, 5), (2, 5)], [b"zero" * 50, b"one" * 50])})


@pytest.fixture
def client(brokers):
    settings = replace(
        connection_settings(brokers[1].address),
        socket_timeout_ms=1000,  # the broker is a thread of a process that may have to wait
        connect_timeout_ms=1000,
        retry_backoff_ms=5,
        retry_backoff_max_ms=20,
        reconnect_backoff_ms=5,
        reconnect_backoff_max_ms=20,
        retry_budget_ms=5000,
    )
    with ClusterClient(settings) as client:
        yield client


@pytest.fixture
def hasty(client, brokers):
    """Gives up soon, yet not before several attempts on a busy machine."""
    settings = replace(client._settings, retry_budget_ms=500)  # noqa: SLF001  # the same but for one
    with ClusterClient(settings) as hasty:
        yield hasty


def view():
    return memoryview(bytearray(4096))


def fetched(client, partition=T0, offset=10, topic_id=TOPIC_ID):
    into = view()
    result = client.fetch(partition, offset, into, topic_id=topic_id, max_wait_ms=0)
    return bytes(into[: result.size])


def test_a_topic_is_described_with_its_id_and_leaders(client):
    topic = client.topic("t")
    assert (topic.name, topic.topic_id) == ("t", TOPIC_ID)
    leaders = {n: (p.leader, p.leader_epoch, p.error) for n, p in topic.partitions.items()}
    assert leaders == {0: (1, 5, 0), 1: (2, 5, 0)}
    assert client.cluster_id() == "scripted"
    assert client.topics() == ["t"]


def test_looking_never_creates(client, brokers):
    with pytest.raises(UsageError):
        client.topic("nope")
    client.topics()
    for broker in brokers.values():
        for key, version, request in broker.requests:
            if key == METADATA:
                assert version >= 4
                assert request.allow_auto_topic_creation is False


def test_a_topic_that_does_not_exist_is_said_at_once(client):
    begun = time.monotonic()
    with pytest.raises(NotFoundError) as caught:
        client.topic("nope")
    assert caught.value.facts == {"topic": "nope"}
    assert caught.value.kind == "usage"
    assert time.monotonic() - begun < 4  # the budget for retries is 5 s


def test_offsets_are_asked_once_per_leader_and_by_isolation(client, brokers):
    assert client.list_offsets([T0, T1], LATEST) == {T0: 90, T1: 90}
    assert client.list_offsets([T0, T1], LATEST, read_committed=False) == {T0: 100, T1: 100}
    assert client.list_offsets([T0, T1], EARLIEST) == {T0: 10, T1: 10}
    assert client.list_offsets([T0], 1_700_000_000_000) == {T0: NO_OFFSET}
    assert client.list_offsets([], LATEST) == {}
    assert len(brokers[2].asked(LIST_OFFSETS)) == 3
    assert all(len(request.topics) == 1 for request in brokers[1].asked(LIST_OFFSETS))


def test_a_time_that_is_none_is_a_bug_of_ours(client):
    with pytest.raises(InternalError):
        client.list_offsets([T0], -3)


def test_each_partition_is_fetched_from_its_leader(client, brokers):
    assert fetched(client, T0) == b"zero" * 50
    assert fetched(client, T1) == b"one" * 50
    assert len(brokers[1].asked(FETCH)) == len(brokers[2].asked(FETCH)) == 1
    assert brokers[2].connection_count == 1


@pytest.mark.parametrize("by_id", [True, False])
def test_a_leader_that_moved_is_followed(client, world, brokers, by_id):
    topic_id = TOPIC_ID if by_id else None
    fetched(client, T0, topic_id=topic_id)
    world.topics["t"].leaders[0] = (2, 6)
    assert fetched(client, T0, topic_id=topic_id) == b"zero" * 50
    assert len(brokers[2].asked(FETCH)) == 1
    world.topics["t"].leaders[0] = (1, 7)
    assert client.list_offsets([T0, T1], LATEST) == {T0: 90, T1: 90}


def test_a_leader_of_an_old_epoch_is_not_believed(client, world, brokers):
    fetched(client, T0)
    world.topics["t"].leaders[0] = (1, 6)
    assert fetched(client, T0) == b"zero" * 50
    epochs = [r.topics[0].partitions[0].current_leader_epoch for r in brokers[1].asked(FETCH)]
    assert epochs == [5, 5, 6]


def test_a_leader_that_is_gone_is_replaced_by_the_next(client, world, brokers):
    fetched(client, T1)
    brokers[2].close()
    del world.brokers[2]
    world.topics["t"].leaders[1] = (1, 6)
    assert fetched(client, T1) == b"one" * 50


@pytest.mark.parametrize("fault", [hang, hang_up])
def test_a_lost_response_is_asked_for_again_on_a_new_connection(client, brokers, fault):
    fetched(client, T1)
    brokers[2].once(FETCH, fault)
    assert fetched(client, T1) == b"one" * 50
    assert brokers[2].connection_count == 2


def test_a_partition_without_a_leader_is_waited_for_until_the_budget_ends(hasty, world):
    world.topics["t"].leaders[0] = (-1, 5)
    with pytest.raises(UnavailableError) as caught:
        fetched(hasty, T0)
    assert caught.value.facts["error"] == "LEADER_NOT_AVAILABLE"
    assert caught.value.facts["topic"] == "t"
    assert caught.value.facts["attempts"] > 1
    with pytest.raises(UnavailableError):
        hasty.list_offsets([T0, T1], LATEST)
    assert fetched(hasty, T1) == b"one" * 50


def test_one_attempt_has_a_result_or_an_error_for_each_partition(client, world, brokers):
    assert client.try_list_offsets([T0, T1], EARLIEST) == {T0: 10, T1: 10}
    world.topics["t"].leaders[0] = (-1, 6)
    before = len(brokers[1].asked(LIST_OFFSETS))
    for error in ("NOT_LEADER_OR_FOLLOWER", "LEADER_NOT_AVAILABLE"):  # then the metadata is new
        found = client.try_list_offsets([T0, T1], LATEST)
        assert found[T1] == 90
        assert isinstance(found[T0], UnavailableError)
        assert found[T0].facts["error"] == error
        assert (found[T0].facts["topic"], found[T0].facts["partition"]) == ("t", 0)
        assert len(brokers[1].asked(LIST_OFFSETS)) == before + 1
    world.topics["t"].leaders[0] = (2, 7)
    assert client.try_list_offsets([T0, T1], LATEST) == {T0: 90, T1: 90}
    for broker in brokers.values():
        broker.close()
    found = client.try_list_offsets([T0, T1], LATEST)
    assert [error.facts["partition"] for error in found.values()] == [0, 1]
    assert {type(error) for error in found.values()} == {UnavailableError}


def test_no_broker_at_all_is_unavailable_and_names_each(hasty, world, brokers):
    hasty.topic("t")
    for broker in brokers.values():
        broker.close()
    with pytest.raises(UnavailableError) as caught:
        hasty.topic("t")
    assert brokers[1].address in caught.value.facts["brokers"]


def test_all_brokers_moved_but_the_bootstrap_list_still_works(client, world, brokers):
    fetched(client, T1)
    world.topics["t"].leaders[1] = (3, 6)
    brokers[2].close()
    moved = ScriptedBroker(world, 3)
    del world.brokers[2]
    try:
        assert fetched(client, T1) == b"one" * 50
    finally:
        moved.close()


@pytest.mark.mirror_v3("KAF-02")
def test_an_offset_outside_the_log_is_a_position_error_with_the_bounds(client):
    with pytest.raises(PositionError) as caught:
        fetched(client, offset=5)
    facts = caught.value.facts
    assert (facts["offset"], facts["log_start_offset"], facts["log_end_offset"]) == (5, 10, 100)
    assert caught.value.hint


def test_the_bounds_are_left_out_when_they_cannot_be_asked(client, brokers):
    brokers[1].once(LIST_OFFSETS, hang_up, hang_up)
    with pytest.raises(PositionError) as caught:
        fetched(client, offset=5)
    assert caught.value.facts["offset"] == 5
    assert "log_start_offset" not in caught.value.facts


@pytest.mark.parametrize("newest_fetch", [16, 11])
def test_a_topic_created_again_is_never_taken_for_the_old_one(client, world, brokers, newest_fetch):
    for broker in brokers.values():
        broker.versions[FETCH] = (4, newest_fetch)
    fetched(client, T0)
    # A higher epoch, so that a broker that knows no ids makes us look.
    world.topics["t"] = Topic(OTHER_ID, [(1, 6), (2, 6)], [b"new", b"new"])
    with pytest.raises(PositionError) as caught:
        fetched(client, T0)
    assert caught.value.facts["expected_topic_id"] == TOPIC_ID.hex()
    assert caught.value.facts["found_topic_id"] == OTHER_ID.hex()


@pytest.mark.parametrize("by_id", [True, False])
def test_a_topic_that_vanishes_is_believed_gone_only_after_a_while(client, world, by_id):
    topic_id = TOPIC_ID if by_id else None
    fetched(client, T0, topic_id=topic_id)
    del world.topics["t"]
    settings = replace(client._settings, retry_budget_ms=10_000)  # noqa: SLF001  # the same but for one
    begun = time.monotonic()
    with ClusterClient(settings) as long_timeout, pytest.raises(NotFoundError):
        fetched(long_timeout, T0, topic_id=topic_id)
    assert 2.5 < time.monotonic() - begun < 9


def test_a_topic_that_is_only_late_is_waited_for(client, world):
    late = world.topics.pop("t")
    settings = client._settings  # noqa: SLF001  # the same

    class Waiting(Clock):
        def sleep_ms(self, duration_ms):
            world.topics["t"] = late

    with ClusterClient(settings, clock=Waiting()) as other:
        assert fetched(other, T0) == b"zero" * 50


def test_a_partition_that_does_not_exist_is_a_usage_error(client):
    with pytest.raises(NotFoundError) as caught:
        fetched(client, TopicPartition("t", 9))
    assert caught.value.facts["partition_count"] == 2


def test_a_refused_topic_is_not_tried_again(client, brokers):
    def deny(data):
        # The partition's error code follows its index; the response's high watermark is 100.
        at = data.index((100).to_bytes(8, "big")) - 2
        data[at : at + 2] = (29).to_bytes(2, "big")

    fetched(client, T0)
    brokers[1].once(FETCH, edited(deny))
    with pytest.raises(UsageError) as caught:
        fetched(client, T0)
    assert caught.value.facts["error"] == "TOPIC_AUTHORIZATION_FAILED"
    assert len(brokers[1].asked(FETCH)) == 2


def test_a_response_that_contradicts_itself_is_corruption_and_not_tried_again(client, brokers):
    fetched(client, T0)
    brokers[1].once(FETCH, edited(lambda data: data.__setitem__(slice(4, 8), b"\0\0\0\0")))
    with pytest.raises(CorruptionError) as caught:
        fetched(client, T0)
    assert caught.value.facts["topic"] == "t"
    assert len(brokers[1].asked(FETCH)) == 2
    assert fetched(client, T0) == b"zero" * 50


def test_a_view_that_is_too_small_gets_the_required_size(client):
    result = client.fetch(T0, 10, view()[:10], topic_id=TOPIC_ID)
    assert (result.size, result.needed_bytes) == (0, 200)
    assert (result.high_watermark, result.last_stable_offset, result.log_start_offset) == (
        100,
        90,
        10,
    )


def test_leaders_are_looked_up_again_when_what_we_know_is_old(client, brokers):
    settings = replace(client._settings, metadata_refresh_ms=0)  # noqa: SLF001  # the same but for one
    with ClusterClient(settings) as other:
        for _ in range(3):
            fetched(other, T0)
    assert len(brokers[1].asked(METADATA)) == 3


def test_configurations_are_listed_and_a_missing_topic_is_said(client, brokers):
    for broker in brokers.values():
        broker.versions[32] = (1, 4)
    assert client.describe_topic_configs("t") == {}
    with pytest.raises(NotFoundError):
        client.describe_topic_configs("nope")


def test_a_child_process_leaves_the_parents_connections_alone(client, brokers):
    fetched(client, T0)
    with warnings.catch_warnings():
        # The scripted brokers run in threads of this process; the child does not use them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if fetched(client, T0) == b"zero" * 50 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert brokers[1].connection_count == 2
    assert fetched(client, T0) == b"zero" * 50
    assert brokers[1].connection_count == 2


def test_a_client_cannot_be_pickled_its_settings_can(client):
    with pytest.raises(TypeError, match="ConnectionSettings"):
        pickle.dumps(client)
    settings = client._settings  # noqa: SLF001  # what was given
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_closed_client_opens_again_when_used(client, brokers):
    fetched(client, T0)
    client.close()
    client.close()
    assert fetched(client, T0) == b"zero" * 50
