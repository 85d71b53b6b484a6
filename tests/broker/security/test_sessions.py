"""Goal: a login lasts as long as the broker says, unless the client repeats it (KIP-368).

Method: a raw client logs in, repeats its login as soon as it may, uses its connection until it is
closed, and does what it may not. Then librdkafka and Apache Kafka's producer send records until
the broker's log has repeated logins. Times have lower bounds only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka import Producer
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import RawClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import all_but
from logmirror.broker.apis import Api
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSION_S: Final = 2.5
DEADLINE_S: Final = 60
OVER: Final = "session has ended"
REPEATED: Final = "login repeated"
REFUSED: Final = ErrorCode.sasl_authentication_failed


@pytest.fixture
def broker(tmp_path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(
        tmp_path / "broker",
        protocols=("PLAINTEXT", "SASL_PLAINTEXT"),
        max_session_ms=round(SESSION_S * 1000),
        failed_authentication_delay_ms=1,
    )
    for user in ("alice", "bob"):
        put_user(broker.log_dir, user, "secret")
    with broker:
        yield broker
        assert broker.stop() == 0
    assert "internal error" not in broker.log.read_text()


def _client(broker: EmbeddedBroker) -> RawClient:
    return RawClient(broker.port_of("SASL_PLAINTEXT"))


def _handshake(client: RawClient, mechanism: str = "PLAIN") -> ErrorCode:
    return ErrorCode(client.ask(Api.SASL_HANDSHAKE, 1, mechanism=mechanism).error_code)


def _handshake_again(client: RawClient, mechanism: str = "PLAIN") -> ErrorCode:
    """Repeat the handshake until the last login is old enough."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (code := _handshake(client, mechanism)) == ErrorCode.illegal_sasl_state:
        assert time.monotonic() < deadline_s
    return code


def _token(client: RawClient, user: str = "alice", password: str = "secret", version: int = 2):
    token = f"\0{user}\0{password}".encode()
    return client.ask(Api.SASL_AUTHENTICATE, version, auth_bytes=token)


def _login(client: RawClient, version: int = 2):
    assert _handshake(client) == ErrorCode.none
    found = _token(client, version=version)
    assert found.error_code == ErrorCode.none
    return found


def _use(client: RawClient) -> None:
    client.ask(Api.DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=False)


def _use_until(client: RawClient, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        _use(client)


@pytest.mark.parametrize("version", all_but([0, 1, 2], 2, reason="older versions"))
def test_a_login_returns_how_long_it_lasts_and_then_the_connection_ends(broker, version):
    with _client(broker) as client, _client(broker) as unused:
        _login(unused)
        began_s = time.monotonic()
        found = _login(client, version)
        if version:
            assert found.session_lifetime.total_seconds() == SESSION_S
        with pytest.raises(EOFError):
            _use_until(client, began_s + DEADLINE_S)
        assert time.monotonic() - began_s >= SESSION_S
        # A connection that is not used stays, and may still repeat its login.
        assert _handshake(unused) == ErrorCode.none
        assert _token(unused).error_code == ErrorCode.none
        _use(unused)
    assert broker.log.read_text().count(OVER) == 1


def test_a_connection_whose_login_is_repeated_stays(broker):
    with _client(broker) as client:
        began_s = time.monotonic()
        _login(client)
        while time.monotonic() < began_s + 2 * SESSION_S:
            assert _handshake_again(client) == ErrorCode.none
            assert _token(client).session_lifetime.total_seconds() == SESSION_S
            _use(client)
    assert broker.log.read_text().count(REPEATED) >= 2


@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("bob", "secret")])
def test_another_user_or_a_wrong_password_ends_the_connection(broker, user, password):
    with _client(broker) as client:
        _login(client)
        assert _handshake_again(client) == ErrorCode.none
        assert _token(client, user, password).error_code == REFUSED
        assert client.is_closed()


def test_another_mechanism_ends_the_connection(broker):
    with _client(broker) as client:
        _login(client)
        code = _handshake_again(client, "SCRAM-SHA-256")
        assert code == ErrorCode.unsupported_sasl_mechanism
        assert client.is_closed()


def test_a_login_within_a_second_is_refused_and_does_not_end_the_session(broker):
    with _client(broker) as client:
        began_s = time.monotonic()
        _login(client)
        refused = _handshake(client) == ErrorCode.illegal_sasl_state
        assert refused or time.monotonic() - began_s >= 1
        assert _handshake_again(client) == ErrorCode.none
        assert time.monotonic() - began_s >= 0.99  # the clock of the event loop has milliseconds


def test_no_other_request_comes_between_handshake_and_token(broker):
    with _client(broker) as client:
        _login(client)
        assert _handshake_again(client) == ErrorCode.none
        with pytest.raises(EOFError):
            _use(client)


def test_without_the_option_a_login_has_no_end(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker", protocols=("SASL_PLAINTEXT",))
    put_user(broker.log_dir, "alice", "secret")
    with broker, _client(broker) as client:
        began_s = time.monotonic()
        assert _login(client).session_lifetime.total_seconds() == 0
        while time.monotonic() < began_s + SESSION_S:
            assert _handshake(client) == ErrorCode.illegal_sasl_state
            _use(client)


def test_librdkafka_repeats_its_logins(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    outcomes: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{broker.port_of('SASL_PLAINTEXT')}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "alice",
            "sasl.password": "secret",
        }
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while broker.log.read_text().count(REPEATED) < 2:
        assert time.monotonic() < deadline_s
        producer.produce(topic_name, b"x", callback=lambda error, _: outcomes.append(error))
        producer.poll(0.05)
    assert producer.flush(20) == 0
    assert set(outcomes) == {None}


@pytest.mark.timeout(600)
def test_apache_kafkas_producer_repeats_its_logins(broker, apache_tools, tmp_path, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    properties = tmp_path / "client"
    properties.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="alice" password="secret";\n'
        f"bootstrap.servers=127.0.0.1:{broker.port_of('SASL_PLAINTEXT')}\n"
    )
    size = ("--num-records", "100", "--record-size", "10", "--throughput", "10")
    command = ("--topic", topic_name, *size, "--producer.config", str(properties))
    found = apache_tools.run("kafka-producer-perf-test", *command)
    assert "100 records sent" in found.stdout
    assert broker.log.read_text().count(REPEATED) >= 2
