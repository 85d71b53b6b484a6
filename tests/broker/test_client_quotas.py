"""Goal: quotas are kept, limit the clients that they name, and no other client.

Method: a raw client sets quotas, and measures with the monotonic clock how long its connection is
muted, which a busy machine can only prolong. The amounts are such that the bound in
`quotas.limits` is far above what an unlimited broker takes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.partition_client import PartitionClient
from kit.judges.quota_requests import alter, describe
from kit.judges.raw_client import RawClient, build, message_class, read_response, request_frame
from kit.judges.restricted_requests import metadata
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker.apis import Api
from logmirror.broker.security.users import put_user
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB: Final = 1024
BATCH: Final = encode_reference([Record(0, 1, 0, None, bytes(64 * KIB), ())])
PRODUCE, FETCH = "producer_byte_rate", "consumer_byte_rate"
EXACT, DEFAULT, ANY = range(3)
TIMER_S: Final = 0.002
"""How early a timer of the event loop may end; what is missing is charged to the next request."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker of its own, because quotas concern every client."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("limited"), idle_timeout_ms=1000)
    with broker:
        create_topic(broker.bootstrap, "limited", 1, {})
        yield broker
        assert broker.stop() == 0
    assert "internal error" not in broker.log.read_text()


@pytest.fixture
def client(limited: EmbeddedBroker) -> Iterator[PartitionClient]:
    """A client whose quotas are removed after the test."""
    with PartitionClient(limited.bootstrap, "limited") as found:
        yield found
    with RawClient(limited.port) as other:
        _, entries = describe(other)
        alter(other, *((named, dict.fromkeys(values)) for named, values in entries))


def _of(client_id: str) -> list[tuple[str, str | None]]:
    return [("client-id", client_id)]


@pytest.mark.parametrize("version", [0, 1])
def test_quotas_are_set_described_and_removed(client, version):
    user, both = [("user", "u")], [("user", "u"), ("client-id", None)]

    def ask(*entries):
        return alter(client, *entries, version=version)

    assert ask((user, {PRODUCE: 5.0, "request_percentage": 1.5}), (both, {FETCH: 7.0})) == [0, 0]
    found = describe(client, ("user", EXACT, "u"), version=version)
    assert found == (0, [(user, {PRODUCE: 5.0, "request_percentage": 1.5}), (both, {FETCH: 7.0})])
    assert ask((user, {PRODUCE: 6.0, "request_percentage": None, FETCH: None})) == [0]
    assert describe(client, ("user", ANY, None), strict=True) == (0, [(user, {PRODUCE: 6.0})])
    assert ask((both, {FETCH: None}), (user, {PRODUCE: None})) == [0, 0]
    assert describe(client) == (0, [])


def test_what_cannot_be_is_refused_and_changes_nothing(client):
    invalid = ErrorCode.invalid_request
    assert alter(
        client,
        (_of("a"), {PRODUCE: 0.0}),
        (_of("b"), {"controller_mutation_rate": 1.0}),
        ([("group", "x")], {PRODUCE: 1.0}),
        (_of("c"), {FETCH: 1.0, PRODUCE: -1.0}),
        (_of("d"), {FETCH: 1.0}),
        ([("ip", "127.0.0.1")], {FETCH: 2.0}),
    ) == [invalid] * 4 + [0, invalid]
    assert alter(client, (_of("e"), {FETCH: 1.0}), (_of("e"), {FETCH: 2.0})) == [invalid]
    assert alter(client, (_of("f"), {FETCH: 1.0}), validate_only=True) == [0]

    assert describe(client) == (0, [(_of("d"), {FETCH: 1.0})])
    assert describe(client, ("group", ANY, None))[0] == ErrorCode.unsupported_version
    assert describe(client, ("user", EXACT, None))[0] == invalid


def test_quotas_are_there_after_kill_9(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker")
    with broker:
        with RawClient(broker.port) as client:
            alter(client, (_of("x"), {PRODUCE: 5.0}), ([("user", None)], {FETCH: 7.0}))
            alter(client, (_of("x"), {PRODUCE: 9.0}))
        broker.kill()
        broker.start()
        with RawClient(broker.port) as client:
            found = describe(client)[1]
    assert sorted(found) == [(_of("x"), {PRODUCE: 9.0}), ([("user", None)], {FETCH: 7.0})]


def _ask(client: RawClient) -> None:
    client.ask(Api.API_VERSIONS, 0)


def _connect(broker: EmbeddedBroker, client_id: str) -> PartitionClient:
    client = PartitionClient(broker.bootstrap, "limited")
    client.client_id = client_id
    return client


def _produced(client: PartitionClient, count: int) -> list[float]:
    """Append batches; returns the throttle times."""
    found = []
    for _ in range(count):
        assert client.produce(BATCH).error == 0
        found.append(client.throttle_s)
    return found


def test_a_producer_over_its_quota_is_muted_and_no_other(limited, client):
    alter(client, (_of("slow"), {PRODUCE: 64.0 * KIB}))
    with _connect(limited, "slow") as slow, _connect(limited, "fast") as fast:
        began_s = time.monotonic()
        throttled = _produced(slow, 3)
        # The response is sent at once, with the time for which the next request waits.
        assert throttled[0] < throttled[1] <= 1.1
        assert throttled[2] > 0
        assert time.monotonic() - began_s >= sum(throttled[:2]) - TIMER_S
        assert _produced(fast, 20) == [0.0] * 20
        assert time.monotonic() - began_s < 20
        _ask(slow)
        # Three batches of a second each; the burst is the first of them.
        assert time.monotonic() - began_s >= 2 - TIMER_S


def test_a_muted_client_shares_its_quota_with_its_other_connections(limited, client):
    alter(client, ([("user", "ANONYMOUS"), ("client-id", None)], {PRODUCE: 64.0 * KIB}))
    with _connect(limited, "twice") as first, _connect(limited, "twice") as second:
        [once] = _produced(first, 1)
        [again] = _produced(second, 1)
    assert again > once
    assert again > 0.5


def test_a_consumer_gets_a_second_of_its_quota_at_a_time(limited, client):
    _produced(client, 8)
    alter(client, (_of("reader"), {FETCH: 100.0 * KIB}))
    with _connect(limited, "reader") as reader, _connect(limited, "other") as other:
        assert len(other.fetch(0).records) >= 8 * len(BATCH)
        began_s = time.monotonic()
        sizes, throttled = [], 0.0
        for _ in range(4):
            sizes.append(len(reader.fetch(0).records))
            throttled += reader.throttle_s
        _ask(reader)
        assert time.monotonic() - began_s >= throttled - 5 * TIMER_S
    assert sizes == [len(BATCH)] * 4  # two batches are more than a second's bytes
    # Four batches of two thirds of a second each; the burst is a second.
    assert throttled > 1.5


def test_a_share_of_the_event_loop_limits_requests_of_any_kind(limited, client):
    alter(client, (_of("busy"), {"request_percentage": 0.1}))
    with _connect(limited, "busy") as busy:
        began_s, throttled = time.monotonic(), 0.0
        while throttled < 0.2:
            assert busy.list_offset(-1)[0] == 0
            throttled += busy.throttle_s
        _ask(busy)
        assert time.monotonic() - began_s >= throttled * 0.9


def test_a_request_that_waits_is_charged_for_its_turns_and_can_be_cancelled(limited, client):
    alter(client, (_of("waits"), {"request_percentage": 50.0}))
    end = client.log_end
    with _connect(limited, "waits") as gone:
        gone.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            gone.fetch(end, max_wait_ms=60_000)
    with _connect(limited, "waits") as waits:
        reading = threading.Timer(0.2, _produced, (client, 1))
        reading.start()
        assert len(waits.fetch(end, max_wait_ms=60_000).records) == len(BATCH)
        assert waits.throttle_s < 1  # not for the time that it waited
        reading.join()


def test_a_quota_of_a_user_is_that_of_who_has_logged_in(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker", protocols=("SASL_PLAINTEXT",))
    for name in ("slow", "fast"):
        put_user(broker.log_dir, name, "secret")
    with broker:
        found = {}
        for name in ("fast", "slow"):
            with PartitionClient(broker.bootstrap, "limited") as user:
                user.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
                token = f"\0{name}\0secret".encode()
                assert user.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token).error_code == 0
                if name == "fast":
                    user.ask(Api.METADATA, 12, **metadata("limited"))
                    alter(user, ([("user", "slow")], {PRODUCE: 64.0 * KIB}))
                found[name] = _produced(user, 1)[0]
    assert found["fast"] == 0 < found["slow"]


def test_a_quota_that_is_removed_limits_the_next_request_no_longer(limited, client):
    alter(client, (_of("freed"), {PRODUCE: 64.0 * KIB}))
    with _connect(limited, "freed") as freed:
        assert _produced(freed, 2)[1] > 0
        alter(client, (_of("freed"), {PRODUCE: None}))
        assert _produced(freed, 20) == [0.0] * 20


def test_a_muted_connection_is_neither_idle_nor_in_the_way_of_a_stop(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker", idle_timeout_ms=500)
    with broker:
        create_topic(broker.bootstrap, "limited", 1, {})
        with RawClient(broker.port) as admin:
            alter(admin, (_of("slow"), {PRODUCE: 32.0 * KIB}), (_of("slower"), {PRODUCE: 300.0}))
        with _connect(broker, "slow") as slow:
            assert _produced(slow, 1)[0] > 1
            _ask(slow)
        with _connect(broker, "slower") as slower:
            assert _produced(slower, 1)[0] > 200
            began_s = time.monotonic()
            assert broker.stop() == 0
            assert time.monotonic() - began_s < 20
            assert slower.is_closed()


def test_connections_of_an_address_have_a_rate(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker")
    with broker:
        with RawClient(broker.port) as admin:
            alter(admin, ([("ip", "127.0.0.1")], {"connection_creation_rate": 1.0}))
            with RawClient(broker.port) as second, RawClient(broker.port) as third:
                _ask(second)
                _ask(third)
                with RawClient(broker.port) as refused:
                    assert refused.is_closed()
            alter(admin, ([("ip", "127.0.0.1")], {"connection_creation_rate": None}))
        with RawClient(broker.port) as allowed:
            _ask(allowed)
        assert "too many new connections of this address" in broker.log.read_text()


def test_pipelined_requests_wait_for_the_end_of_the_mute_and_keep_their_order(limited, client):
    alter(client, (_of("slow"), {PRODUCE: 64.0 * KIB}))
    versions = build(message_class(Api.API_VERSIONS, 0, "request"))
    with _connect(limited, "slow") as slow:
        began_s = time.monotonic()
        _produced(slow, 1)
        for number in range(3):
            slow.send_frame(
                request_frame(
                    Api.API_VERSIONS, 0, versions, correlation_id=number, client_id="slow"
                )
            )
        found = [read_response(Api.API_VERSIONS, 0, slow.receive_frame())[0] for _ in range(3)]
        assert found == [0, 1, 2]
        _produced(slow, 1)
        _ask(slow)
        assert time.monotonic() - began_s >= 1 - TIMER_S
