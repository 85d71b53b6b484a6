"""Goal: stock clients log in with every protocol and mechanism, and no other client does.

Method: librdkafka, kafka-python and aiokafka connect to each listener, write and read; then with
what is wrong: a password, a user, a mechanism, a certificate. A removed user is cut off.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from kit.judges.raw_client import RawClient, build, message_class, request_frame
from kit.servers.machine import HOST
from logmirror.broker.apis import Api
from logmirror.broker.security.tls import subject_name
from logmirror.broker.security.users import list_users, put_user, remove_user

ADMIN = "admin"
PASSWORD = "correct horse, battery = staple; \N{SNOWMAN}"  # as in conftest
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SASL = [(p, m) for p in ("SASL_PLAINTEXT", "SASL_SSL") for m in MECHANISMS]


@pytest.fixture
def admin(settings):
    return AdminClient(settings())


@pytest.fixture
def topic(admin, topic_name):
    admin.create_topics([NewTopic(topic_name, 1)])[topic_name].result(20)
    return topic_name


def _produce(settings: dict[str, Any], topic: str, value: bytes) -> KafkaError | None:
    outcome: list[KafkaError | None] = []
    producer = Producer({**settings, "message.timeout.ms": 10_000})
    producer.produce(topic, value, callback=lambda error, _: outcome.append(error))
    producer.flush(15)
    return outcome[0]


def _values(settings: dict[str, Any], topic: str, count: int) -> list[bytes]:
    consumer = Consumer({**settings, "group.id": "none", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        found = consumer.consume(count, 20)
        for message in found:
            if message.error():
                raise KafkaException(message.error())
        return [message.value() for message in found]
    finally:
        consumer.close()


@pytest.mark.in_bucket
def test_librdkafka_writes_and_reads_over_every_protocol(settings, topic):
    values = []
    for protocol, mechanism in SASL:
        values.append(f"{protocol} {mechanism}".encode())
        assert _produce(settings(protocol, mechanism), topic, values[-1]) is None
    for protocol, mechanism in SASL:
        assert _values(settings(protocol, mechanism), topic, len(values)) == values


@pytest.mark.in_bucket
@pytest.mark.parametrize(("protocol", "mechanism"), SASL)
def test_kafka_python_writes_and_reads(secured, certificates, topic, protocol, mechanism):
    config = {
        "bootstrap_servers": f"{HOST}:{secured.port_of(protocol)}",
        "security_protocol": protocol,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": ADMIN,
        "sasl_plain_password": PASSWORD,
        "ssl_cafile": str(certificates.authority),
    }
    producer = kafka.KafkaProducer(**config)
    producer.send(topic, b"x").get(timeout=20)
    producer.close()
    consumer = kafka.KafkaConsumer(**config, auto_offset_reset="earliest")
    consumer.assign([kafka.TopicPartition(topic, 0)])
    assert next(iter(consumer)).value == b"x"
    consumer.close()


@pytest.mark.in_bucket
def test_aiokafka_writes_over_tls(secured, certificates, topic, settings):
    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=f"{HOST}:{secured.port_of('SASL_SSL')}",
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_plain_username=ADMIN,
            sasl_plain_password=PASSWORD,
            ssl_context=ssl.create_default_context(cafile=certificates.authority),
        )
        async with producer:
            await producer.send_and_wait(topic, b"x")

    asyncio.run(run())

    assert _values(settings(), topic, 1) == [b"x"]


def _refused(settings: dict[str, Any]) -> set[int]:
    errors: list[int] = []
    client = AdminClient({**settings, "error_cb": lambda error: errors.append(error.code())})
    with pytest.raises(KafkaException):
        client.list_topics(timeout=1.5)
    client.poll(0)
    return set(errors)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("user", "password"), [(ADMIN, "wrong"), ("nobody", PASSWORD)])
def test_a_wrong_password_or_user_is_refused(settings, mechanism, user, password):
    found = _refused(settings("SASL_PLAINTEXT", mechanism, user, password))

    assert KafkaError._AUTHENTICATION in found  # noqa: SLF001  # its public name


def test_the_error_reaches_the_client_before_the_connection_ends(secured):
    with RawClient(secured.port_of("SASL_PLAINTEXT")) as client:
        client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        found = client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=b"\0admin\0wrong")

        assert (int(found.error_code), found.error_message) == (58, "authentication failed")
        assert client.is_closed()


def test_a_client_without_a_certificate_or_with_a_foreign_one_is_refused(
    secured, certificates, settings
):
    without = settings("SSL")
    del without["ssl.certificate.location"], without["ssl.key.location"]
    _refused(without)
    context = ssl.create_default_context(cafile=certificates.authority)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = context.minimum_version = ssl.TLSVersion.TLSv1_1
    with (
        RawClient(secured.port_of("SSL")) as client,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(client.socket, server_hostname="localhost")


def _certificate_name(settings: dict[str, Any]) -> str:
    pem = Path(settings["ssl.certificate.location"]).read_text()
    return f"User:{subject_name(ssl.PEM_cert_to_DER_cert(pem))}"


def _allow(
    admin: AdminClient,
    principal: str,
    name: str,
    *operations: AclOperation,
    kind: ResourceType = ResourceType.TOPIC,
) -> None:
    acls = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.LITERAL,
            principal,
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    for done in admin.create_acls(acls).values():
        done.result(20)


def test_a_certificate_is_a_principal_with_acls(admin, settings, topic):
    mine = settings("SSL")
    denied = _produce(mine, topic, b"no")
    principal = _certificate_name(mine)
    _allow(admin, principal, topic, AclOperation.WRITE, AclOperation.READ)
    _allow(admin, principal, "none", AclOperation.READ, kind=ResourceType.GROUP)

    assert denied is not None
    assert denied.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert _produce(mine, topic, b"yes") is None
    assert _values(mine, topic, 1) == [b"yes"]


@pytest.mark.in_bucket
def test_a_user_of_kafkas_own_request_logs_in_until_it_is_removed(admin, settings, topic):
    mechanism = ScramMechanism.SCRAM_SHA_512
    info = ScramCredentialInfo(mechanism, 8192)
    upsert = UserScramCredentialUpsertion("carol", info, b"secret of carol")
    admin.alter_user_scram_credentials([upsert])["carol"].result(20)
    _allow(admin, "User:carol", topic, AclOperation.WRITE)
    described = admin.describe_user_scram_credentials(["carol"])["carol"].result(20)
    mine = settings("SASL_PLAINTEXT", "SCRAM-SHA-512", "carol", "secret of carol")

    assert [i.iterations for i in described.scram_credential_infos] == [8192]
    assert _produce(mine, topic, b"x") is None
    assert _produce({**mine, "sasl.mechanism": "PLAIN"}, topic, b"y") is None
    _refused({**mine, "sasl.mechanism": "SCRAM-SHA-256"})  # it has none
    deletion = UserScramCredentialDeletion("carol", mechanism)
    admin.alter_user_scram_credentials([deletion])["carol"].result(20)
    _refused(mine)
    with pytest.raises(KafkaException) as refused:
        admin.describe_user_scram_credentials(["carol"])["carol"].result(20)
    assert refused.value.args[0].code() == KafkaError.RESOURCE_NOT_FOUND


def test_the_open_connections_of_a_removed_user_are_closed(secured, settings, topic, admin):
    put_user(secured.log_dir, "dave", "secret of dave")  # while the broker runs
    _allow(admin, "User:dave", topic, AclOperation.DESCRIBE)
    errors: list[int] = []
    mine = settings("SASL_PLAINTEXT", "SCRAM-SHA-256", "dave", "secret of dave")
    client = AdminClient({**mine, "error_cb": lambda error: errors.append(error.code())})
    assert topic in client.list_topics(timeout=10).topics

    remove_user(secured.log_dir, "dave")

    deadline = time.monotonic() + 10
    while KafkaError._AUTHENTICATION not in errors:  # noqa: SLF001  # its public name
        assert time.monotonic() < deadline, "the connection stayed open"
        client.poll(0.2)
        try:
            client.list_topics(timeout=0.2)
        except KafkaException:
            continue


def test_an_unknown_user_gets_what_a_wrong_password_gets(secured):
    """Message by message, and the same challenge each time."""

    def attempt(user: bytes) -> tuple[bytes, bytes]:
        with RawClient(secured.port_of("SASL_PLAINTEXT")) as client:
            ask = message_class(Api.SASL_HANDSHAKE, 1, "request")
            client.send_frame(request_frame(17, 1, build(ask, mechanism="SCRAM-SHA-256")))
            client.receive_frame()
            first = client.ask(
                Api.SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=" + user + b",r=abc"
            ).auth_bytes
            nonce, salt, iterations = first.split(b",")
            final = b"c=biws," + nonce + b",p=" + b"A" * 43 + b"="
            client.send_frame(
                request_frame(36, 2, build(message_class(36, 2, "request"), auth_bytes=final))
            )
            refused = client.receive_frame()
            assert client.is_closed()
            return salt + b" " + iterations, refused

    known, unknown, again = attempt(b"admin"), attempt(b"nobody"), attempt(b"nobody")

    assert unknown == again
    assert unknown[1] == known[1]
    assert len(unknown[0]) == len(known[0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_tokens_without_headers_after_the_first_handshake_version(secured, mechanism):
    """As kafka-python before 2.1 sends them."""
    from kafka.net.sasl.scram import ScramClient  # noqa: PLC0415  # for two of the cases

    with RawClient(secured.port_of("SASL_PLAINTEXT")) as client:
        found = client.ask(Api.SASL_HANDSHAKE, 0, mechanism=mechanism)
        assert (int(found.error_code), found.mechanisms) == (0, MECHANISMS)
        if mechanism == "PLAIN":
            client.send_frame(f"\0{ADMIN}\0{PASSWORD}".encode())
            assert client.receive_frame() == b""
        else:
            scram = ScramClient(ADMIN, PASSWORD, mechanism)
            client.send_frame(scram.first_message())
            scram.process_server_first_message(client.receive_frame())
            client.send_frame(scram.final_message())
            scram.process_server_final_message(client.receive_frame())
        assert client.ask(Api.API_VERSIONS, 0).api_keys
        request = {"include_cluster_authorized_operations": False}
        assert client.ask(Api.DESCRIBE_CLUSTER, 0, **request).brokers


def test_the_oldest_login_with_a_wrong_password_just_ends(secured):
    with RawClient(secured.port_of("SASL_PLAINTEXT")) as client:
        client.ask(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN")
        client.socket.sendall(struct.pack(">i", 4) + b"\0a\0b")

        assert client.is_closed()


def test_a_client_learns_the_address_of_its_own_listener(settings, secured):
    for protocol in ("PLAINTEXT", "SASL_PLAINTEXT", "SASL_SSL", "SSL"):
        brokers = AdminClient(settings(protocol)).list_topics(timeout=10).brokers
        assert [(b.host, b.port) for b in brokers.values()] == [(HOST, secured.port_of(protocol))]


def test_users_are_managed_on_the_command_line(tmp_path):
    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "logmirror", "broker", "users", *arguments]
        command += ["--log-dir", str(tmp_path / "broker")]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    file = tmp_path / "password"
    file.write_text("another secret\n")
    added = run("add", "alice", stdin="a secret\n")
    again = run("add", "alice", "--password-file", str(file))
    listed = run("list")
    removed = run("remove", "alice")
    gone = run("remove", "alice")

    assert (added.returncode, added.stdout) == (0, "user alice added\n")
    assert again.stdout == "password of user alice replaced\n"
    assert listed.stdout == "alice  SCRAM-SHA-256, SCRAM-SHA-512\n"
    assert removed.stdout == "user alice removed\n"
    assert (gone.returncode, "no such user" in gone.stderr) == (2, True)
    assert run("add", "bob", stdin="\n").returncode == 2
    assert list_users(tmp_path / "broker") == {}
    stored = tmp_path / "broker" / ".logmirror" / "security.sqlite"
    assert stored.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in b"".join(p.read_bytes() for p in stored.parent.iterdir())
