"""The pipeline tells the truth about each batch: written, not written, or nobody knows.

Method: scripted brokers that keep what is appended, and that are slow, silent, gone, or wrong at a
point that the test chooses. What they keep is the judge of what the pipeline said.
"""

import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.scripted_broker import Topic, World, cut_after, edited, hang, hang_up
from kit.scripted_writes import PRODUCE, WritableBroker, held
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.produce import NO_ANSWER
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.transport import LINGER_MS_MAX
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


def batch(mark=0, *, records=1, size=100):
    """Bytes that pass for a record batch here: only the count of offsets is looked at."""
    data = bytearray(max(size, 61))
    struct.pack_into(">i", data, 23, records - 1)
    struct.pack_into(">i", data, 57, mark)
    return memoryview(data)


def mark_of(data):
    return struct.unpack_from(">i", data, 57)[0]


@pytest.fixture
def world():
    return World({"t": Topic(TOPIC_ID, [(1, 5), (2, 5), (2, 5)])})


@pytest.fixture
def brokers(world):
    brokers = {node: WritableBroker(world, node) for node in (1, 2)}
    yield brokers
    for broker in brokers.values():
        broker.close()


def quick(address, **changes):
    """Settings that give up soon: an answer may take 300 ms."""
    base = {
        "socket_timeout_ms": 200,
        "connect_timeout_ms": 1000,
        "request_timeout_ms": 100,
        "reconnect_backoff_ms": 60,
        "reconnect_backoff_max_ms": 60,
        "retry_backoff_ms": 5,
        "retry_budget_ms": 2000,
    }
    return replace(connection_settings(address), **{**base, **changes})


@pytest.fixture
def client(brokers):
    with ClusterClient(quick(brokers[1].address)) as client:
        yield client


@pytest.fixture
def pipeline(client):
    with client.pipeline() as pipeline:
        yield pipeline


def collect_all(pipeline):
    answers = []
    while pipeline.in_flight():
        answers += pipeline.collect(block=True)
    return answers


def kinds(answers):
    return [type(answer.error) for answer in answers]


def written(broker, partition):
    return [mark_of(data) for _, data in broker.appended[partition.topic, partition.partition]]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_leader_gets_one_request_with_all_its_partitions(pipeline, brokers):
    pipeline.send([(T0, batch(records=3)), (T1, batch()), (T2, batch(records=5))])
    pipeline.send([(T0, batch()), (T2, batch())])

    answers = collect_all(pipeline)

    assert {(answer.error_code, answer.error) for answer in answers} == {(0, None)}
    found = sorted((answer.partition, answer.base_offset) for answer in answers)
    assert found == [(T0, 0), (T0, 3), (T1, 0), (T2, 0), (T2, 5)]
    asked = [
        [one.index for topic in request.topic_data for one in topic.partition_data]
        for request in brokers[2].asked(PRODUCE)
    ]
    assert asked == [[1, 2], [2]]
    (first, _) = brokers[1].asked(PRODUCE)
    assert (first.acks, first.timeout_ms, first.transactional_id) == (-1, 100, None)


def test_requests_follow_each_other_without_waiting_for_answers(pipeline, brokers):
    release = threading.Event()
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    brokers[1].once(PRODUCE, held(release))
    for mark in range(1, 6):
        pipeline.send([(T0, batch(mark))])
    assert (pipeline.in_flight(), pipeline.in_flight(T0), pipeline.in_flight(T1)) == (5, 5, 0)
    assert pipeline.collect(block=False) == []
    release.set()
    assert [answer.base_offset for answer in collect_all(pipeline)] == [1, 2, 3, 4, 5]
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


def test_writing_without_answers_is_not_offered(client):
    with pytest.raises(InternalError):
        client.pipeline(acks=0)


# Answers that say no.


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
def test_an_error_code_is_told_as_its_kind(pipeline, brokers, code, kind):
    brokers[1].codes[PRODUCE].append(code)
    brokers[1].said = "no"
    pipeline.send([(T0, batch())])
    (answer,) = collect_all(pipeline)
    assert (answer.error_code, type(answer.error)) == (code, kind)
    facts = answer.error.facts
    assert (facts["topic"], facts["partition"], facts["code"]) == ("t", 0, code)
    assert facts["reason"] == "no"


def test_nothing_more_is_sent_to_a_partition_whose_failure_was_not_collected(pipeline, brokers):
    brokers[2].codes[PRODUCE].append(45)
    pipeline.send([(T1, batch(1))])
    until(lambda: len(brokers[2].asked(PRODUCE)) == 1)
    time.sleep(0.05)
    pipeline.send([(T1, batch(2)), (T2, batch(3))])

    answers = collect_all(pipeline)

    of_t1 = [answer for answer in answers if answer.partition == T1]
    assert kinds(of_t1) == [PositionError, UnavailableError]
    assert (written(brokers[2], T1), written(brokers[2], T2)) == ([], [3])
    pipeline.send([(T1, batch(4))])
    assert kinds(collect_all(pipeline)) == [type(None)]
    assert written(brokers[2], T1) == [4]


def test_a_batch_that_was_not_sent_is_answered_after_those_that_were_sent_before_it(
    pipeline, brokers
):
    release = threading.Event()
    brokers[2].codes[PRODUCE].append(45)
    pipeline.send([(T1, batch(1))])
    until(lambda: brokers[2].asked(PRODUCE))
    brokers[2].once(PRODUCE, held(release))
    pipeline.send([(T1, batch(2))])  # the refusal may have come by now, or not
    pipeline.send([(T1, batch(3))])
    early = pipeline.collect(block=True)
    assert early[0].error_code == 45
    pipeline.send([(T1, batch(4))])
    release.set()
    answers = early + collect_all(pipeline)
    stored = written(brokers[2], T1)
    said = [mark for mark, answer in zip((1, 2, 3, 4), answers, strict=True) if not answer.error]
    assert said == stored


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


def test_nothing_goes_to_a_new_leader_before_the_old_one_has_answered(
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
    answers = collect_all(pipeline)
    assert [answer.error_code for answer in answers] == [0, 6]
    pipeline.send([(T0, batch(2))])
    collect_all(pipeline)
    assert written(brokers[2], T0) == [2]


def test_a_partition_without_a_leader_holds_up_no_other(pipeline, world, brokers):
    world.topics["t"].leaders[0] = (-1, 5)
    pipeline.send([(T0, batch()), (T1, batch(1))])
    answers = {answer.partition: answer for answer in collect_all(pipeline)}
    assert answers[T0].error_code == NO_ANSWER
    assert type(answers[T0].error) is UnavailableError
    assert answers[T0].error.facts["error"] == "LEADER_NOT_AVAILABLE"
    assert answers[T1].error is None


def test_a_topic_that_does_not_exist_holds_up_no_other(pipeline, brokers):
    pipeline.send([(TopicPartition("nope", 0), batch()), (T1, batch(1)), (T0, batch(2))])
    answers = {answer.partition: answer.error for answer in collect_all(pipeline)}
    assert type(answers.pop(TopicPartition("nope", 0))) is NotFoundError
    assert answers == {T0: None, T1: None}


def test_a_broker_out_of_reach_is_tried_again_after_a_pause(pipeline, world, brokers):
    brokers[2].close()
    for _ in range(3):
        pipeline.send([(T0, batch()), (T1, batch())])
        answers = {answer.partition: answer.error for answer in collect_all(pipeline)}
        assert answers[T0] is None
        assert type(answers[T1]) is UnavailableError
        assert answers[T1].facts["partition"] == 1
    brokers[3] = world.brokers[2] = WritableBroker(world, 2)  # another port, the same node
    time.sleep(0.1)
    pipeline.send([(T1, batch())])
    assert kinds(collect_all(pipeline)) == [type(None)]


def test_a_broker_out_of_reach_is_not_waited_for_at_every_send(client, world, brokers):
    silent = socket.create_server(("127.0.0.1", 0), backlog=1)
    with silent, client.pipeline() as pipeline:
        brokers[2].close()
        brokers[2].port = silent.getsockname()[1]  # accepts, says nothing
        pipeline.send([(T1, batch())])
        collect_all(pipeline)
        begun = time.monotonic()
        pipeline.send([(T1, batch()), (T0, batch())])
        assert time.monotonic() - begun < 0.5, "connect_timeout_ms is 1000"
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


# Answers that do not come.


def swap_correlation_id(data):
    data[4:8] = b"\x00\xff\xff\xff"


def other_partition(data):
    # Topic count, name, partition count, then the partition's number.
    at = data.index(b"\x02t\x02") + 3
    data[at : at + 4] = (9).to_bytes(4, "big")


def negative_size(data):
    data[:4] = b"\xff\xff\xff\xff"


FAULTS = [
    hang,
    hang_up,
    cut_after(3),
    cut_after(10),
    cut_after(30),
    edited(swap_correlation_id),
    edited(other_partition),
    edited(negative_size),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_lost_answer_everything_behind_it_is_unknown_and_answered_once(
    pipeline, brokers, fault
):
    pipeline.send([(T0, batch(0))])
    collect_all(pipeline)
    release = threading.Event()
    brokers[1].once(PRODUCE, held(release), fault)
    for mark in (1, 2, 3):
        pipeline.send([(T0, batch(mark))])
    pipeline.send([(T1, batch(4))])
    release.set()

    answers = collect_all(pipeline)

    assert kinds([answer for answer in answers if answer.partition == T1]) == [type(None)]
    of_t0 = [answer for answer in answers if answer.partition == T0]
    assert kinds(of_t0) == [type(None), OutcomeUnknownError, OutcomeUnknownError]
    for answer in of_t0[1:]:
        assert (answer.error_code, answer.base_offset) == (NO_ANSWER, -1)
        assert answer.error.facts["port"] == brokers[1].port
        assert answer.error.facts["partition"] == 0
    until(lambda: 2 in written(brokers[1], T0))  # unknown: this one was written
    pipeline.send([(T0, batch(9))])
    assert kinds(collect_all(pipeline)) == [type(None)]


def test_an_answer_that_is_late_but_here_counts(pipeline, brokers):
    pipeline.send([(T0, batch(1))])
    until(lambda: written(brokers[1], T0))
    time.sleep(0.5)  # as after SIGSTOP: past the deadline of 300 ms, the answer long here
    assert kinds(pipeline.collect(block=True)) == [type(None)]


def test_each_answer_starts_the_wait_for_the_next_anew(pipeline, brokers):
    def slowly(connection, _request, answer):
        time.sleep(0.2)
        connection.sendall(answer)

    brokers[1].once(PRODUCE, *[slowly] * 4)
    for mark in range(4):
        pipeline.send([(T0, batch(mark))])
    assert kinds(collect_all(pipeline)) == [type(None)] * 4, "800 ms in all, 300 for each"


def test_closing_makes_what_is_under_way_unknown(pipeline, brokers):
    brokers[1].once(PRODUCE, hang)
    pipeline.send([(T0, batch(1)), (T1, batch(2))])
    until(lambda: written(brokers[2], T1))
    time.sleep(0.05)
    pipeline.close()
    answers = {answer.partition: type(answer.error) for answer in collect_all(pipeline)}
    assert answers == {T0: OutcomeUnknownError, T1: type(None)}


# Moments after which nothing is sent.


def test_past_its_moment_nothing_is_sent(pipeline, brokers):
    with pytest.raises(UnavailableError):
        pipeline.send([(T0, batch())], not_after_ms=SYSTEM_CLOCK.monotonic_ms())
    assert (pipeline.in_flight(), pipeline.collect(block=True)) == (0, [])
    assert brokers[1].asked(PRODUCE) == []
    pipeline.send([(T0, batch())], not_after_ms=SYSTEM_CLOCK.monotonic_ms() + 1000)
    assert kinds(collect_all(pipeline)) == [type(None)]


def test_a_request_that_is_half_sent_at_its_moment_is_cut_off_and_never_processed(
    brokers,
):
    release = threading.Event()
    patient = quick(brokers[1].address, socket_timeout_ms=20_000)
    with ClusterClient(patient) as client, client.pipeline() as pipeline:
        pipeline.send([(T0, batch(0))])
        collect_all(pipeline)
        brokers[1].once(PRODUCE, held(release))
        large = batch(2, size=80_000_000)
        pipeline.send([(T0, batch(1)), (T1, batch(1))])
        begun = time.monotonic()
        moment_ms = SYSTEM_CLOCK.monotonic_ms() + 300
        pipeline.send([(T0, large), (T1, batch(3))], not_after_ms=moment_ms)
        assert 0.25 < time.monotonic() - begun < 2
        release.set()
        answers = collect_all(pipeline)
    of_t0 = [type(answer.error) for answer in answers if answer.partition == T0]
    assert of_t0 == [OutcomeUnknownError, UnavailableError]
    assert kinds([answer for answer in answers if answer.partition == T1]) == [type(None)] * 2
    time.sleep(0.2)
    assert written(brokers[1], T0) == [0, 1]


def test_the_moment_is_looked_at_again_after_all_that_precedes_the_send(brokers):
    class Jumping(type(SYSTEM_CLOCK)):
        """Stands still until a connection was opened, as if we were stopped just then."""

        late_ms = 0

        def monotonic_ms(self):
            return super().monotonic_ms() + self.late_ms

    clock = Jumping()
    with ClusterClient(quick(brokers[1].address), clock=clock) as client:
        topology = client._router.topology  # noqa: SLF001  # where a stop is put in
        opened = topology.new_connection

        def slow(*arguments):
            made = opened(*arguments)
            clock.late_ms = 60_000
            return made

        topology.new_connection = slow
        with client.pipeline() as pipeline, pytest.raises(UnavailableError):
            pipeline.send([(T0, batch())], not_after_ms=clock.monotonic_ms() + 1000)
    assert brokers[1].asked(PRODUCE) == []


# The socket.


def test_a_large_send_goes_on_while_the_broker_waits_for_us_to_read_its_answers(brokers):
    release = threading.Event()
    brokers[1].said = "x" * 400_000
    brokers[1].codes[PRODUCE].extend([19] * 61)
    brokers[1].once(PRODUCE, held(release))
    large = batch(size=50_000_000)
    settings = quick(brokers[1].address, socket_timeout_ms=8000)
    with ClusterClient(settings) as client, client.pipeline() as pipeline:
        for _ in range(60):
            pipeline.send([(T0, batch())])
        timer = threading.Timer(0.2, release.set)
        timer.start()
        pipeline.send([(T0, large)])  # 24 MB of answers come before it is taken
        answers = collect_all(pipeline)
        timer.join()
    assert [answer.error_code for answer in answers] == [19] * 61


def test_sockets_send_at_once_and_do_not_keep_bytes_for_long(client, pipeline):
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    (link,) = pipeline._links.values()  # noqa: SLF001  # its socket's options are what is promised
    raw = link._transport._socket  # noqa: SLF001  # the same
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LINGER_MS_MAX == 10_000


def test_a_throttle_is_waited_out_before_the_next_send(client, pipeline, brokers):
    client.topic("t")
    brokers[1].throttle_ms = 400
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    brokers[1].throttle_ms = 0
    begun = time.monotonic()
    pipeline.send([(T0, batch())])
    assert 0.3 < time.monotonic() - begun < 1
    assert kinds(collect_all(pipeline)) == [type(None)]


@pytest.mark.parametrize("newest", range(3, 14))
def test_any_version_that_a_broker_speaks_will_do(brokers, newest):
    brokers[1].versions[PRODUCE] = (3, newest)
    with ClusterClient(quick(brokers[1].address)) as client, client.pipeline() as pipeline:
        pipeline.send([(T0, batch(7))])
        (answer,) = collect_all(pipeline)
    assert (answer.error, answer.base_offset) == (None, 0)
    (used,) = [version for key, version, _ in brokers[1].requests if key == PRODUCE]
    assert used == min(newest, 9)


def test_a_broker_that_is_too_old_is_refused(pipeline, brokers):
    brokers[1].versions[PRODUCE] = (0, 2)
    pipeline.send([(T0, batch())])
    (answer,) = collect_all(pipeline)
    assert type(answer.error) is UsageError
    assert answer.error.facts["broker_versions"] == (0, 2)


# All at once.


FAULTY = {
    "hang up": lambda _, brokers: brokers[2].once(PRODUCE, hang_up),
    "cut": lambda _, brokers: brokers[1].once(PRODUCE, cut_after(7)),
    "refuse": lambda _, brokers: brokers[2].codes[PRODUCE].append(19),
    "move": lambda world, _: world.topics["t"].leaders.__setitem__(
        1, (3 - world.topics["t"].leaders[1][0], world.topics["t"].leaders[1][1] + 1)
    ),
}
actions = st.lists(
    st.sampled_from(["send", "send", "send", "collect", "close", *FAULTY]), min_size=5, max_size=40
)


@settings(max_examples=25)
@given(actions)
def test_whatever_happens_what_is_said_of_each_batch_is_true(actions):
    world = World({"t": Topic(TOPIC_ID, [(1, 0), (2, 0), (2, 0)])})
    brokers = {node: WritableBroker(world, node) for node in (1, 2)}
    marks, answers = [], []
    try:
        with ClusterClient(quick(brokers[1].address)) as client:
            pipeline = client.pipeline()
            for mark, action in enumerate(actions):
                if action == "send":
                    pipeline.send([(each, batch(mark)) for each in (T0, T1, T2)])
                    marks.append(mark)
                elif action == "collect":
                    answers += pipeline.collect(block=True)
                elif action == "close":
                    pipeline.close()
                else:
                    FAULTY[action](world, brokers)
            pipeline.close()
            answers += collect_all(pipeline)
    finally:
        for broker in brokers.values():
            broker.close()

    for partition in (T0, T1, T2):
        stored = written(brokers[1], partition) + written(brokers[2], partition)
        told = [answer.error for answer in answers if answer.partition == partition]
        for mark, error in zip(marks, told, strict=True):
            possible = {1} if error is None else {0}
            if isinstance(error, OutcomeUnknownError):
                possible = {0, 1}
            assert stored.count(mark) in possible
