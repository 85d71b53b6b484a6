"""One connection, for any behaviour of the broker: deadlines, limits, typed errors.

Method: a scripted broker that responds correctly except for one fault, over a real loopback socket.
Time limits are short, so that a passing test is quick and a hanging one is ended by its timeout.
"""

import socket
import struct
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from kafka.protocol.metadata import MetadataRequest

from kit.fakes.scripted_broker import (
    API_VERSIONS,
    FETCH,
    METADATA,
    ScriptedBroker,
    Topic,
    World,
    cut_after,
    edited,
    hang,
    hang_up,
    instead,
    trickle,
)
from logmirror.cluster.connection import Connection
from logmirror.cluster.properties import connection_settings
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.wire.fetch import FetchRequest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TOPIC_ID = bytes(range(16))
LOG = bytes(range(256)) * 20
REQUEST = FetchRequest("t", TOPIC_ID, 0, 5, 10, 1 << 16, 0, 1, read_committed=True)


@pytest.fixture
def world():
    return World({"t": Topic(TOPIC_ID, [(1, 5)], [LOG])})


@pytest.fixture
def broker(world):
    broker = ScriptedBroker(world)
    yield broker
    broker.close()


def settings_for(broker, **changes):
    settings = connection_settings(broker.address)
    changes = {"socket_timeout_ms": 1000, "connect_timeout_ms": 1000, **changes}
    return replace(settings, **changes)


@pytest.fixture
def connect(broker):
    opened = []

    def connect(**changes):
        opened.append(Connection("127.0.0.1", broker.port, settings_for(broker, **changes)))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def names(connection):
    request = MetadataRequest(topics=None, allow_auto_topic_creation=False)
    return [topic.name for topic in connection.call(request, low=4).topics]


def fetch(connection, size=1 << 16, request=REQUEST):
    view = memoryview(bytearray(size))
    fetched = connection.fetch(request._replace(max_bytes=size), view)
    return fetched, view


def test_the_client_sends_its_software_name_and_version(broker, connect):
    connect()
    (request,) = broker.asked(API_VERSIONS)
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    sent = (request.client_software_name, request.client_software_version)
    assert sent == (project["name"], project["version"])


def test_the_highest_common_versions_are_used(broker, connect):
    connection = connect()
    assert names(connection) == ["t"]
    fetch(connection)
    fetch(connection, request=REQUEST._replace(topic_id=None))
    used = [(key, version) for key, version, _ in broker.requests]
    assert used == [(API_VERSIONS, 4), (METADATA, 12), (FETCH, 16), (FETCH, 12)]


@pytest.mark.parametrize("newest", [0, 1, 2, 3])
def test_an_older_version_negotiation_is_accepted(world, connect, broker, newest):
    broker.versions[API_VERSIONS] = (0, newest)
    assert names(connect()) == ["t"]
    assert broker.requests[0][0] == API_VERSIONS


def test_a_broker_without_topic_ids_is_fetched_by_name(broker, connect):
    broker.versions[FETCH] = (4, 11)
    connection = connect()
    assert not connection.speaks_topic_ids()
    fetched, view = fetch(connection, request=REQUEST._replace(topic_id=None))
    assert bytes(view[: fetched.size]) == LOG
    assert broker.requests[-1][1] == 11


def test_a_broker_that_is_too_old_is_refused(broker, connect):
    broker.versions[FETCH] = (0, 3)
    with pytest.raises(UsageError, match="too old"):
        fetch(connect())
    broker.versions[METADATA] = (0, 3)
    with pytest.raises(UsageError) as caught:
        names(connect())
    assert caught.value.facts["broker_versions"] == (0, 3)


@pytest.mark.parametrize("by_id", [True, False])
def test_records_land_in_the_view_and_nothing_behind_them(connect, by_id):
    connection = connect()
    request = REQUEST if by_id else REQUEST._replace(topic_id=None)
    fetched, view = fetch(connection, request=request)
    assert (fetched.size, fetched.needed_bytes) == (len(LOG), 0)
    assert bytes(view[: fetched.size]) == LOG
    assert not any(view[fetched.size :])
    assert fetched.head[:5] == (0, 100, 90, 10, ())


def test_a_view_that_is_too_small_stays_empty_and_gets_the_required_size(connect):
    connection = connect()
    fetched, view = fetch(connection, size=100)
    assert (fetched.size, fetched.needed_bytes) == (0, len(LOG))
    assert not any(view)
    fetched, view = fetch(connection, size=fetched.needed_bytes)
    assert bytes(view) == LOG


def test_a_kafka_error_leaves_the_connection_in_use(broker, connect):
    connection = connect()
    fetched, _ = fetch(connection, request=REQUEST._replace(offset=1000))
    assert fetched.head.error_code == 1
    assert fetch(connection)[0].size == len(LOG)
    assert broker.connection_count == 1


KEYS = {"call": METADATA, "fetch": FETCH}
ACTS = {"call": names, "fetch": fetch}


@pytest.mark.parametrize("what", ["call", "fetch"])
class TestFaults:
    """The same for the cold path and the hot one."""

    def fail(self, what, broker, connection, fault, kind):
        broker.once(KEYS[what], fault)
        begun = time.monotonic()
        with pytest.raises(kind) as caught:
            ACTS[what](connection)
        assert connection.closed
        with pytest.raises(UnavailableError):
            ACTS[what](connection)
        return caught.value, time.monotonic() - begun

    def test_no_response_ends_at_the_deadline(self, what, broker, connect):
        error, seconds = self.fail(what, broker, connect(), hang, UnavailableError)
        assert "in time" in error.message
        assert error.facts["port"] == broker.port
        assert 0.2 < seconds < 10

    def test_a_response_that_trickles_ends_at_the_same_deadline(self, what, broker, connect):
        stop = threading.Event()
        fault = trickle(0.02, stop)
        _, seconds = self.fail(what, broker, connect(), fault, UnavailableError)
        stop.set()
        assert 0.2 < seconds < 10

    def test_a_closed_connection_is_unavailable(self, what, broker, connect):
        self.fail(what, broker, connect(), hang_up, UnavailableError)

    @pytest.mark.parametrize("count", [1, 4, 7, 30, 60])
    def test_a_response_cut_off_is_unavailable(self, what, broker, connect, count):
        self.fail(what, broker, connect(), cut_after(count), UnavailableError)

    def test_another_requests_response_is_refused(self, what, broker, connect):
        fault = edited(lambda data: struct.pack_into(">i", data, 4, 999))
        error, _ = self.fail(what, broker, connect(), fault, CorruptionError)
        assert "another request" in error.message

    @pytest.mark.parametrize("size", [-1, 0, 3, 2**31 - 1])
    def test_a_frame_size_that_cannot_be_is_refused_at_once(self, what, broker, connect, size):
        fault = edited(lambda data: struct.pack_into(">i", data, 0, size))
        self.fail(what, broker, connect(), fault, CorruptionError)  # else UnavailableError, later

    def test_noise_is_refused(self, what, broker, connect):
        noise = struct.pack(">i", 40) + b"\0\0\0\x02" + b"\xff" * 36
        self.fail(what, broker, connect(), instead(noise), CorruptionError)


def test_a_response_above_the_cap_is_refused_before_it_is_received(broker, connect):
    connection = connect(receive_message_max_bytes=1000)
    broker.once(METADATA, instead(struct.pack(">i", 1001)))
    with pytest.raises(CorruptionError) as caught:
        names(connection)
    assert caught.value.facts["frame_bytes"] == 1001
    assert caught.value.facts["max_bytes"] == 1000


def test_a_fetch_may_exceed_the_cap_as_far_as_it_asked_to(connect):
    fetched, _ = fetch(connect(receive_message_max_bytes=1000), size=len(LOG))
    assert fetched.size == len(LOG)


def test_many_aborted_transactions_are_read_in_pieces(broker, connect):
    count = 20_000
    pairs = b"".join(struct.pack(">qq", n, n + 1) for n in range(count))

    def edit(data):
        at = data.index(struct.pack(">qqq", 100, 90, 10)) + 24
        data[at : at + 4] = struct.pack(">i", count) + pairs
        struct.pack_into(">i", data, 0, len(data) - 4)

    broker.versions[FETCH] = (4, 11)
    broker.once(FETCH, edited(edit))
    fetched, view = fetch(connect(), request=REQUEST._replace(topic_id=None))
    assert fetched.head.aborted == tuple((n, n + 1) for n in range(count))
    assert bytes(view[: fetched.size]) == LOG


def test_a_throttled_client_waits_before_its_next_request(broker, connect):
    connection = connect()
    broker.throttle_ms = 250
    names(connection)
    broker.throttle_ms = 0
    begun = time.monotonic()
    names(connection)
    assert time.monotonic() - begun >= 0.24


def test_a_refused_connection_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(UnavailableError) as caught:
        Connection("127.0.0.1", port, connection_settings("x:1"))
    assert caught.value.facts["port"] == port


def test_a_name_that_does_not_resolve_is_unavailable():
    with pytest.raises(UnavailableError, match="resolved"):
        Connection("no.such.host.invalid", 9092, connection_settings("x:1"))


def test_a_broker_that_accepts_and_stays_silent_is_given_up_at_the_deadline(broker):
    broker.once(API_VERSIONS, hang)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        Connection("127.0.0.1", broker.port, settings_for(broker, connect_timeout_ms=200))
    assert time.monotonic() - begun < 10


def test_a_tls_listener_is_recognised_by_its_alert(broker):
    broker.once(API_VERSIONS, instead(b"\x15\x03\x03\x00\x02\x02\x50"))
    with pytest.raises(UsageError) as caught:
        Connection("127.0.0.1", broker.port, settings_for(broker))
    assert "SSL" in caught.value.hint


def test_something_that_is_no_broker_is_refused(broker):
    broker.once(API_VERSIONS, instead(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    with pytest.raises(CorruptionError) as caught:
        Connection("127.0.0.1", broker.port, settings_for(broker))
    assert "Kafka listener" in caught.value.hint


def test_a_plain_listener_is_no_tls(broker):
    tls = connection_settings(broker.address, {"security.protocol": "SSL"})
    with pytest.raises((UsageError, UnavailableError)) as caught:
        Connection("127.0.0.1", broker.port, replace(tls, connect_timeout_ms=300))
    assert caught.value.facts["port"] == broker.port
