"""The pipeline reports the outcome of each batch: written, not written, or unknown.

Method: scripted brokers that keep what is appended, which decides whether a response is true. Here
they respond, also with errors; `test_produce_faults` is about brokers that do not.
"""

import socket
import struct
import threading
import time

import pytest

from kit.fakes.scripted_broker import Topic, World
from kit.fakes.scripted_writes import (
    PRODUCE,
    WritableBroker,
    batch,
    collect_all,
    held,
    kinds,
    quick,
    until,
    written,
)
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.produce_responses import NO_RESPONSE
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import (
    InternalError,
    OutcomeUnknownError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.model import TopicPartition

TOPIC_ID = bytes(range(16))
T0, T1, T2 = (TopicPartition("t", n) for n in range(3))


@pytest.fixture
def world():
    return World({"t": Topic(TOPIC_ID, [(1, 5), (2, 5), (2, 5)])})


@pytest.fixture
def client(brokers):
    with ClusterClient(quick(brokers[1].address)) as client:
        yield client


@pytest.fixture
def pipeline(client):
    with client.pipeline() as pipeline:
        yield pipeline


def test_each_leader_gets_one_request_with_all_its_partitions(pipeline, brokers):
    pipeline.send([(T0, batch(records=3)), (T1, batch()), (T2, batch(records=5))])
    pipeline.send([(T0, batch()), (T2, batch())])

    responses = collect_all(pipeline)

    assert {(response.error_code, response.error) for response in responses} == {(0, None)}
    found = sorted((response.partition, response.base_offset) for response in responses)
    assert found == [(T0, 0), (T0, 3), (T1, 0), (T2, 0), (T2, 5)]
    asked = [
        [one.index for topic in request.topic_data for one in topic.partition_data]
        for request in brokers[2].asked(PRODUCE)
    ]
    assert asked == [[1, 2], [2]]
    (first, _) = brokers[1].asked(PRODUCE)
    assert (first.acks, first.timeout_ms, first.transactional_id) == (-1, 100, None)


def test_requests_follow_each_other_without_waiting_for_responses(pipeline, brokers):
    release = threading.Event()
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    brokers[1].once(PRODUCE, held(release))
    for mark in range(1, 6):
        pipeline.send([(T0, batch(mark))])
    assert (pipeline.in_flight(), pipeline.in_flight(T0), pipeline.in_flight(T1)) == (5, 5, 0)
    assert pipeline.collect(block=False) == []
    release.set()
    assert [response.base_offset for response in collect_all(pipeline)] == [1, 2, 3, 4, 5]
    assert written(brokers[1], T0) == [0, 1, 2, 3, 4, 5]
    assert pipeline.in_flight() == 0


def test_buffers_may_be_used_again_when_send_returns(pipeline, brokers):
    view = batch(1, size=3_000_000)
    pipeline.send([(T0, view)])
    struct.pack_into(">i", view, 57, 2)
    pipeline.send([(T0, view)])
    collect_all(pipeline)
    assert written(brokers[1], T0) == [1, 2]


def test_with_nothing_under_way_nothing_is_waited_for(pipeline):
    assert pipeline.collect(block=True) == []
    pipeline.send([])
    assert pipeline.collect(block=True) == []


def test_a_partition_twice_in_one_send_is_a_bug_of_ours(pipeline, brokers):
    with pytest.raises(InternalError):
        pipeline.send([(T0, batch()), (T0, batch())])
    assert pipeline.in_flight() == 0
    assert brokers[1].asked(PRODUCE) == []


def test_writing_without_responses_is_not_offered(client):
    with pytest.raises(InternalError):
        client.pipeline(acks=0)


# Refusals.


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (7, OutcomeUnknownError),
        (10, UsageError),
        (19, UnavailableError),
        (20, OutcomeUnknownError),
        (45, PositionError),
    ],
)
def test_an_error_code_becomes_its_error_class(pipeline, brokers, code, kind):
    brokers[1].codes[PRODUCE].append(code)
    brokers[1].said = "no"
    pipeline.send([(T0, batch())])
    (response,) = collect_all(pipeline)
    assert (response.error_code, type(response.error)) == (code, kind)
    facts = response.error.facts
    assert (facts["topic"], facts["partition"], facts["code"]) == ("t", 0, code)
    assert facts["reason"] == "no"


def test_nothing_more_is_sent_to_a_partition_whose_failure_was_not_collected(pipeline, brokers):
    brokers[2].codes[PRODUCE].append(45)
    pipeline.send([(T1, batch(1))])
    until(lambda: len(brokers[2].asked(PRODUCE)) == 1)
    time.sleep(0.05)
    pipeline.send([(T1, batch(2)), (T2, batch(3))])

    responses = collect_all(pipeline)

    of_t1 = [response for response in responses if response.partition == T1]
    assert kinds(of_t1) == [PositionError, UnavailableError]
    assert (written(brokers[2], T1), written(brokers[2], T2)) == ([], [3])
    pipeline.send([(T1, batch(4))])
    assert kinds(collect_all(pipeline)) == [type(None)]
    assert written(brokers[2], T1) == [4]


@pytest.fixture
def slow_pipeline(brokers):
    """A pipeline with a long timeout."""
    with (
        ClusterClient(quick(brokers[1].address, socket_timeout_ms=10_000)) as client,
        client.pipeline() as pipeline,
    ):
        yield pipeline


def test_a_batch_that_was_not_sent_has_response_after_those_that_were_sent_before_it(
    slow_pipeline, brokers
):
    pipeline, refuse, release = slow_pipeline, threading.Event(), threading.Event()
    brokers[2].codes[PRODUCE].append(45)
    brokers[2].once(PRODUCE, held(refuse), held(release))
    pipeline.send([(T1, batch(1))])
    pipeline.send([(T1, batch(2))])
    refuse.set()
    until(lambda: len(brokers[2].asked(PRODUCE)) == 2)  # one is refused by now, the next one held
    pipeline.send([(T1, batch(3))])  # not sent: the refusal is not collected
    early = pipeline.collect(block=True)
    assert [response.error_code for response in early] == [45]
    pipeline.send([(T1, batch(4))])
    release.set()
    responses = early + collect_all(pipeline)
    said = [
        mark for mark, response in zip((1, 2, 3, 4), responses, strict=True) if not response.error
    ]
    assert said == written(brokers[2], T1) == [2]


# Leaders.


def test_a_leader_that_moved_is_found_again_after_its_refusal(pipeline, world, brokers):
    pipeline.send([(T0, batch(1))])
    collect_all(pipeline)
    world.topics["t"].leaders[0] = (2, 6)
    pipeline.send([(T0, batch(2))])
    (refused,) = collect_all(pipeline)
    assert (refused.error_code, type(refused.error)) == (6, UnavailableError)
    pipeline.send([(T0, batch(2))])
    assert kinds(collect_all(pipeline)) == [type(None)]
    assert (written(brokers[1], T0), written(brokers[2], T0)) == ([1], [2])


def test_nothing_goes_to_a_new_leader_before_the_old_one_has_responded(
    client, pipeline, world, brokers
):
    release = threading.Event()
    brokers[1].once(PRODUCE, held(release))
    pipeline.send([(T0, batch(1))])
    until(lambda: brokers[1].asked(PRODUCE))
    world.topics["t"].leaders[0] = (2, 6)
    client.topic("t")  # the metadata now names the new leader
    pipeline.send([(T0, batch(2))])
    assert brokers[2].asked(PRODUCE) == []
    release.set()
    responses = collect_all(pipeline)
    assert [response.error_code for response in responses] == [0, 6]
    pipeline.send([(T0, batch(2))])
    collect_all(pipeline)
    assert written(brokers[2], T0) == [2]


def test_a_partition_without_a_leader_holds_up_no_other(pipeline, world, brokers):
    world.topics["t"].leaders[0] = (-1, 5)
    pipeline.send([(T0, batch()), (T1, batch(1))])
    responses = {response.partition: response for response in collect_all(pipeline)}
    assert responses[T0].error_code == NO_RESPONSE
    assert type(responses[T0].error) is UnavailableError
    assert responses[T0].error.facts["error"] == "LEADER_NOT_AVAILABLE"
    assert responses[T1].error is None


def test_a_topic_that_does_not_exist_holds_up_no_other(pipeline, brokers):
    pipeline.send([(TopicPartition("nope", 0), batch()), (T1, batch(1)), (T0, batch(2))])
    responses = {response.partition: response.error for response in collect_all(pipeline)}
    assert type(responses.pop(TopicPartition("nope", 0))) is NotFoundError
    assert responses == {T0: None, T1: None}


def test_a_broker_out_of_reach_is_tried_again_after_a_pause(pipeline, world, brokers):
    brokers[2].close()
    for _ in range(3):
        pipeline.send([(T0, batch()), (T1, batch())])
        responses = {response.partition: response.error for response in collect_all(pipeline)}
        assert responses[T0] is None
        assert type(responses[T1]) is UnavailableError
        assert responses[T1].facts["partition"] == 1
    brokers[3] = world.brokers[2] = WritableBroker(world, 2)  # another port, the same node
    time.sleep(0.1)
    pipeline.send([(T1, batch())])
    assert kinds(collect_all(pipeline)) == [type(None)]


def test_a_broker_out_of_reach_is_not_waited_for_at_every_send(world, brokers):
    silent = socket.create_server(("127.0.0.1", 0), backlog=1)
    settings = quick(
        brokers[1].address,
        connect_timeout_ms=5_000,
        reconnect_backoff_ms=60_000,
        reconnect_backoff_max_ms=60_000,
    )
    with silent, ClusterClient(settings) as client, client.pipeline() as pipeline:
        brokers[2].close()
        brokers[2].port = silent.getsockname()[1]  # accepts, says nothing
        pipeline.send([(T1, batch())])
        collect_all(pipeline)
        begun = time.monotonic()
        pipeline.send([(T1, batch()), (T0, batch())])
        assert time.monotonic() - begun < 4, "connect_timeout_ms is 5000"
        assert set(kinds(collect_all(pipeline))) == {type(None), UnavailableError}


def test_a_connection_that_was_closed_while_idle_is_replaced_before_anything_is_sent(
    pipeline, brokers
):
    pipeline.send([(T1, batch(1))])
    collect_all(pipeline)
    for connection in brokers[2]._open:  # noqa: SLF001  # as a broker does after its idle time
        connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    pipeline.send([(T1, batch(2))])
    assert kinds(collect_all(pipeline)) == [type(None)]
    assert written(brokers[2], T1) == [1, 2]
