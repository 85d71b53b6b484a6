"""Changes to a cluster are requested once: lost responses are reported, transient refusals retried.

Method: scripted brokers that lose responses or refuse; their requests are counted.
"""

import socket
from dataclasses import replace

import pytest

from kit.fakes.scripted_broker import Topic, World, cut_after, hang, hang_up
from kit.fakes.scripted_writes import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_RECORDS,
    DESCRIBE_PRODUCERS,
    OFFSET_FOR_LEADER_EPOCH,
    WRITE_TXN_MARKERS,
    WritableBroker,
)
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.properties import connection_settings
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.model import TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def world():
    return World({"t": Topic(bytes(range(16)), [(1, 5), (2, 6)])})


@pytest.fixture
def client(brokers):
    settings = replace(
        connection_settings(brokers[1].address),
        socket_timeout_ms=1000,
        request_timeout_ms=100,
        connect_timeout_ms=1000,
        retry_backoff_ms=5,
        retry_backoff_max_ms=20,
        reconnect_backoff_ms=5,
        reconnect_backoff_max_ms=20,
        retry_budget_ms=3000,
    )
    with ClusterClient(settings) as client:
        yield client


WRITES = {
    CREATE_TOPICS: lambda client: client.admin.create_topic("new", partition_count=1),
    CREATE_PARTITIONS: lambda client: client.admin.create_partitions("t", 4),
    DELETE_RECORDS: lambda client: client.admin.delete_records({T0: 5, T1: 6}),
}


@pytest.mark.parametrize("key", WRITES)
@pytest.mark.parametrize("fault", [hang, hang_up, cut_after(6), cut_after(20)])
def test_a_write_whose_response_is_lost_is_unknown_and_not_asked_again(client, brokers, key, fault):
    brokers[1].once(key, fault)
    with pytest.raises(OutcomeUnknownError) as caught:
        WRITES[key](client)
    assert len(brokers[1].asked(key)) == 1
    assert caught.value.facts["port"] == brokers[1].port
    WRITES[key](client)


@pytest.mark.parametrize("key", WRITES)
def test_a_write_that_ran_out_of_time_at_the_broker_is_unknown_and_not_asked_again(
    client, brokers, key
):
    brokers[1].codes[key].append(7)
    with pytest.raises(OutcomeUnknownError) as caught:
        WRITES[key](client)
    assert caught.value.facts["error"] == "REQUEST_TIMED_OUT"
    assert len(brokers[1].asked(key)) == 1


@pytest.mark.parametrize(
    ("key", "code"), [(CREATE_TOPICS, 41), (CREATE_PARTITIONS, 41), (DELETE_RECORDS, 6)]
)
def test_a_refusal_that_passes_is_waited_for(client, brokers, key, code):
    brokers[1].codes[key].extend([code, code])
    WRITES[key](client)
    assert len(brokers[1].asked(key)) == 3


def test_fenced_brokers_are_waited_for_although_the_code_blames_the_request(client, brokers):
    brokers[
        1
    ].said = "Unable to replicate the partition 3 time(s): All brokers are currently fenced."
    brokers[1].codes[CREATE_TOPICS].extend([38, 38])
    WRITES[CREATE_TOPICS](client)
    assert len(brokers[1].asked(CREATE_TOPICS)) == 3

    brokers[1].said = "The target replication factor of 3 cannot be reached."
    brokers[1].codes[CREATE_TOPICS].append(38)
    with pytest.raises(UsageError):
        WRITES[CREATE_TOPICS](client)


@pytest.mark.parametrize("key", WRITES)
def test_a_broker_that_cannot_be_reached_was_not_asked(client, brokers, world, key):
    client.topic("t")
    for broker in brokers.values():
        broker.close()
    with pytest.raises(UnavailableError):
        WRITES[key](client)


@pytest.mark.parametrize("key", WRITES)
def test_a_connection_that_was_closed_while_idle_is_replaced_before_it_is_used(
    client, brokers, key
):
    WRITES[key](client)
    for broker in brokers.values():
        for connection in broker._open:  # noqa: SLF001  # as a broker does after its idle time
            connection.shutdown(socket.SHUT_RDWR)
    WRITES[key](client)


def test_a_response_of_one_leader_is_kept_while_the_other_is_asked_again(client, brokers):
    brokers[2].codes[DELETE_RECORDS].append(6)
    assert client.admin.delete_records({T0: 5, T1: 6}) == {T0: 5, T1: 6}
    assert (len(brokers[1].asked(DELETE_RECORDS)), len(brokers[2].asked(DELETE_RECORDS))) == (1, 2)


# Markers.


def test_markers_of_a_partition_travel_in_one_request_to_its_leader(client, brokers):
    markers = {T0: [TxnMarker(7, 0)] * 3, T1: [TxnMarker(8, 2, commit=True)]}
    assert client.admin.write_txn_markers(markers) == {T0: None, T1: None}
    (request,) = brokers[1].asked(WRITE_TXN_MARKERS)
    assert [marker.producer_id for marker in request.markers] == [7, 7, 7]
    (request,) = brokers[2].asked(WRITE_TXN_MARKERS)
    (marker,) = request.markers
    sent = (marker.producer_id, marker.producer_epoch, marker.transaction_result)
    assert sent == (8, 2, True)
    assert [version for key, version, _ in brokers[1].requests if key == WRITE_TXN_MARKERS] == [1]


@pytest.mark.parametrize("fault", [hang, hang_up, cut_after(9)])
def test_markers_whose_response_is_lost_are_unknown_for_that_leader_only(client, brokers, fault):
    brokers[2].once(WRITE_TXN_MARKERS, fault)
    sent = client.admin.write_txn_markers({T0: [TxnMarker(7, 0)], T1: [TxnMarker(7, 0)]})
    assert sent[T0] is None
    assert type(sent[T1]) is OutcomeUnknownError
    assert len(brokers[2].asked(WRITE_TXN_MARKERS)) == 1


@pytest.mark.parametrize(
    ("code", "kind"), [(6, UnavailableError), (31, UsageError), (7, OutcomeUnknownError)]
)
def test_refused_markers_are_reported_and_not_retried(client, brokers, code, kind):
    brokers[1].codes[WRITE_TXN_MARKERS].append(code)
    sent = client.admin.write_txn_markers({T0: [TxnMarker(7, 0)], T1: [TxnMarker(7, 0)]})
    assert (type(sent[T0]), sent[T1]) == (kind, None)
    assert sent[T0].facts["code"] == code
    assert len(brokers[1].asked(WRITE_TXN_MARKERS)) == 1


def test_brokers_that_do_not_report_permissions_count_as_forbidding_markers(client):
    assert client.admin.may_write_markers() is False


# Reads, which are asked again.


def test_ends_are_asked_once_per_leader_for_the_epoch_that_we_know(client, brokers):
    assert client.log_ends([T0, T1]) == {T0: LogEnd(0, 5), T1: LogEnd(0, 6)}
    assert client.log_ends([]) == {}
    (request,) = brokers[2].asked(OFFSET_FOR_LEADER_EPOCH)
    ((one,),) = [topic.partitions for topic in request.topics]
    assert (one.current_leader_epoch, one.leader_epoch, request.replica_id) == (6, 6, -1)


def test_a_leader_that_moved_is_asked_for_the_end_in_its_own_epoch(client, world, brokers):
    client.log_ends([T0, T1])
    world.topics["t"].leaders[0] = (2, 9)
    assert client.log_ends([T0, T1]) == {T0: LogEnd(0, 9), T1: LogEnd(0, 6)}


@pytest.mark.parametrize("fault", [hang, hang_up])
def test_a_lost_response_to_a_read_is_asked_for_again(client, brokers, fault):
    brokers[1].once(OFFSET_FOR_LEADER_EPOCH, fault)
    brokers[1].once(DESCRIBE_PRODUCERS, fault)
    assert client.log_ends([T0]) == {T0: LogEnd(0, 5)}
    state = ProducerState(0, 41, 1_700_000_000_000)
    assert client.producer_states({T0: 7, T1: 8}) == {T0: state, T1: None}


def test_an_end_of_another_epoch_is_never_taken_for_the_log_s(client, brokers, monkeypatch):
    original = WritableBroker._offset_for_leader_epoch  # noqa: SLF001  # what a new leader may say
    wrong = [(4, 17), (-1, -1)]

    def stale(broker, version, request):
        response = original(broker, version, request)
        if wrong:
            one = response.topics[0].partitions[0]
            one.leader_epoch, one.end_offset = wrong.pop()
        return response

    monkeypatch.setattr(WritableBroker, "_offset_for_leader_epoch", stale)
    assert client.log_ends([T0]) == {T0: LogEnd(0, 5)}
    assert len(brokers[1].asked(OFFSET_FOR_LEADER_EPOCH)) == 3


def test_brokers_without_leader_epochs_are_too_old(client, world):
    world.topics["t"].leaders[0] = (1, -1)
    with pytest.raises(UsageError) as caught:
        client.log_ends([T0])
    assert "2.1" in caught.value.hint


def test_a_response_that_leaves_out_a_partition_is_no_response(client, brokers, monkeypatch):
    original = WritableBroker._describe_producers  # noqa: SLF001  # cut down

    def less(broker, version, request):
        response = original(broker, version, request)
        response.topics[0].partitions.pop()
        return response

    monkeypatch.setattr(WritableBroker, "_describe_producers", less)
    with pytest.raises(Exception, match="does not contain") as caught:
        client.producer_states({T0: 7})
    assert caught.value.kind == "corruption"
    assert caught.value.facts == {"topic": "t", "partition": 0}
