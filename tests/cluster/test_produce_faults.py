"""The pipeline reports the outcome of each batch also when responses are lost, wrong or late.

Method: scripted brokers that keep what is appended, and that are slow, silent, gone, or wrong where
the test says so. What they keep decides whether a response is true.
"""

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.fakes.scripted_broker import Topic, World, cut_after, edited, hang, hang_up
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
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.produce_responses import NO_RESPONSE
from logmirror.cluster.transport import LINGER_MS_MAX
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
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


# Missing responses.


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
def test_after_a_lost_response_everything_behind_it_is_unknown_and_responded_once(
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

    responses = collect_all(pipeline)

    assert kinds([response for response in responses if response.partition == T1]) == [type(None)]
    of_t0 = [response for response in responses if response.partition == T0]
    assert kinds(of_t0) == [type(None), OutcomeUnknownError, OutcomeUnknownError]
    for response in of_t0[1:]:
        assert (response.error_code, response.base_offset) == (NO_RESPONSE, -1)
        assert response.error.facts["port"] == brokers[1].port
        assert response.error.facts["partition"] == 0
    until(lambda: 2 in written(brokers[1], T0))  # unknown: this one was written
    pipeline.send([(T0, batch(9))])
    assert kinds(collect_all(pipeline)) == [type(None)]


def test_a_response_that_is_late_but_here_counts(pipeline, brokers):
    pipeline.send([(T0, batch(1))])
    until(lambda: written(brokers[1], T0))
    time.sleep(0.5)  # as after SIGSTOP: past the deadline of 300 ms, the response already here
    assert kinds(pipeline.collect(block=True)) == [type(None)]


def test_each_response_restarts_the_deadline_of_the_next(pipeline, brokers):
    def slowly(connection, _request, response):
        time.sleep(0.2)
        connection.sendall(response)

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
    responses = {response.partition: type(response.error) for response in collect_all(pipeline)}
    assert responses == {T0: OutcomeUnknownError, T1: type(None)}


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
    long_timeout = quick(brokers[1].address, socket_timeout_ms=20_000)
    with ClusterClient(long_timeout) as client, client.pipeline() as pipeline:
        pipeline.send([(T0, batch(0))])
        collect_all(pipeline)
        brokers[1].once(PRODUCE, held(release))
        large = batch(2, size=80_000_000)
        pipeline.send([(T0, batch(1)), (T1, batch(1))])
        begun = time.monotonic()
        moment_ms = SYSTEM_CLOCK.monotonic_ms() + 300
        pipeline.send([(T0, large), (T1, batch(3))], not_after_ms=moment_ms)
        assert 0.25 < time.monotonic() - begun < 15
        release.set()
        responses = collect_all(pipeline)
    of_t0 = [type(response.error) for response in responses if response.partition == T0]
    assert of_t0 == [OutcomeUnknownError, UnavailableError]
    assert (
        kinds([response for response in responses if response.partition == T1]) == [type(None)] * 2
    )
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


def test_a_large_send_goes_on_while_the_broker_waits_for_us_to_read_its_responses(brokers):
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
        pipeline.send([(T0, large)])  # 24 MB of responses come before it is taken
        responses = collect_all(pipeline)
        timer.join()
    assert [response.error_code for response in responses] == [19] * 61


def test_sockets_send_at_once_and_do_not_keep_bytes_for_long(client, pipeline):
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    (link,) = pipeline._connections.values()  # noqa: SLF001  # its socket's options are what is promised
    raw = link._transport._socket  # noqa: SLF001  # the same
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LINGER_MS_MAX


def test_a_throttle_is_waited_out_before_the_next_send(client, pipeline, brokers):
    client.topic("t")
    brokers[1].throttle_ms = 400
    pipeline.send([(T0, batch())])
    collect_all(pipeline)
    brokers[1].throttle_ms = 0
    begun = time.monotonic()
    pipeline.send([(T0, batch())])
    assert 0.3 < time.monotonic() - begun < 10
    assert kinds(collect_all(pipeline)) == [type(None)]


@pytest.mark.parametrize("newest", range(3, 14))
def test_any_version_that_a_broker_speaks_will_do(brokers, newest):
    brokers[1].versions[PRODUCE] = (3, newest)
    long_timeout = quick(brokers[1].address, socket_timeout_ms=20_000)
    with ClusterClient(long_timeout) as client, client.pipeline() as pipeline:
        pipeline.send([(T0, batch(7))])
        (response,) = collect_all(pipeline)
    assert (response.error, response.base_offset) == (None, 0)
    (used,) = [version for key, version, _ in brokers[1].requests if key == PRODUCE]
    assert used == min(newest, 9)


def test_a_broker_that_is_too_old_is_refused(pipeline, brokers):
    brokers[1].versions[PRODUCE] = (0, 2)
    pipeline.send([(T0, batch())])
    (response,) = collect_all(pipeline)
    assert type(response.error) is UsageError
    assert response.error.facts["broker_versions"] == (0, 2)


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
def test_every_response_is_true_whatever_happens(actions):
    world = World({"t": Topic(TOPIC_ID, [(1, 0), (2, 0), (2, 0)])})
    brokers = {node: WritableBroker(world, node) for node in (1, 2)}
    marks, responses = [], []
    try:
        with ClusterClient(quick(brokers[1].address)) as client:
            pipeline = client.pipeline()
            for mark, action in enumerate(actions):
                if action == "send":
                    pipeline.send([(each, batch(mark)) for each in (T0, T1, T2)])
                    marks.append(mark)
                elif action == "collect":
                    responses += pipeline.collect(block=True)
                elif action == "close":
                    pipeline.close()
                else:
                    FAULTY[action](world, brokers)
            pipeline.close()
            responses += collect_all(pipeline)
    finally:
        for broker in brokers.values():
            broker.close()

    for partition in (T0, T1, T2):
        stored = written(brokers[1], partition) + written(brokers[2], partition)
        errors = [response.error for response in responses if response.partition == partition]
        for mark, error in zip(marks, errors, strict=True):
            possible = {1} if error is None else {0}
            if isinstance(error, OutcomeUnknownError):
                possible = {0, 1}
            assert stored.count(mark) in possible
