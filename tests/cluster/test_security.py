"""Encryption and authentication against Apache Kafka: each mechanism, each misconfiguration.

Method: one broker with TLS and SASL listeners. The sessions of one listener expire after seconds,
and are read across their end.
"""

import json
import socket
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kit.judges.clients import Message, produce
from kit.servers.security import MECHANISMS, PASSWORD, SHORT_SESSION_MS, USER, unsecured_token
from logmirror.clock import Clock
from logmirror.cluster.client import LATEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UnavailableError, UsageError
from logmirror.model import TopicPartition


def credentials(mechanism):
    if mechanism == "OAUTHBEARER":
        return {
            "sasl.mechanism": mechanism,
            "enable.sasl.oauthbearer.unsecure.jwt": "true",
            "sasl.oauthbearer.config": f"principal={USER} lifeSeconds=600",
        }
    return {"sasl.mechanism": mechanism, "sasl.username": USER, "sasl.password": PASSWORD}


@pytest.fixture
def open_client(secure_kafka):
    opened = []

    def open_client(listener, properties, **changes):
        settings = connection_settings(secure_kafka.address(listener), properties)
        changes = {"retry_budget_ms": 5000, **changes}
        opened.append(ClusterClient(replace(settings, **changes)))
        return opened[-1]

    yield open_client
    for client in opened:
        client.close()


@pytest.fixture
def topic(secure_kafka, topic_name):
    secure_kafka.create_topic(topic_name)
    produce(secure_kafka.bootstrap, topic_name, [Message(value=bytes(100))] * 3000)
    return topic_name


def fetched_bytes(client, topic):
    view = memoryview(bytearray(1 << 20))
    partition = TopicPartition(topic, 0)
    result = client.fetch(partition, 0, view, topic_id=client.topic(topic).topic_id)
    assert client.list_offsets([partition], LATEST) == {partition: 3000}
    assert result.size > 300_000
    return bytes(view[: result.size])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_mechanism_reads_over_tls_and_without(open_client, certificates, topic, mechanism):
    plain = open_client("SASL", {"security.protocol": "SASL_PLAINTEXT", **credentials(mechanism)})
    tls = open_client(
        "SASLTLS",
        {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificates.authority),
            **credentials(mechanism),
        },
    )
    assert fetched_bytes(plain, topic) == fetched_bytes(tls, topic)


@pytest.mark.parametrize("form", ["files", "one file", "text"])
def test_a_client_certificate_is_shown_from_files_or_from_text(
    open_client, certificates, topic, form
):
    parts = {
        "files": {
            "ssl.certificate.location": str(certificates.client_certificate),
            "ssl.key.location": str(certificates.client_key),
        },
        "one file": {"ssl.certificate.location": str(certificates.client)},
        "text": {
            "ssl.certificate.pem": certificates.client_certificate.read_text(),
            "ssl.key.pem": certificates.client_key.read_text().replace("\n", "\\n"),
        },
    }[form]
    ca = {"ssl.ca.pem": certificates.authority.read_text()}
    client = open_client("TLS", {"security.protocol": "SSL", **ca, **parts})
    assert fetched_bytes(client, topic)


def test_a_missing_client_certificate_is_reported(open_client, certificates):
    ca = {"ssl.ca.location": str(certificates.authority)}
    with pytest.raises(UsageError) as caught:
        open_client("TLS", {"security.protocol": "SSL", **ca}).topics()
    assert "ssl.certificate.location" in caught.value.hint


def test_a_broker_whose_authority_is_unknown_is_not_trusted(open_client, certificates):
    for ca in ({}, {"ssl.ca.location": str(certificates.other_authority)}):
        properties = {"security.protocol": "SASL_SSL", **credentials("PLAIN"), **ca}
        begun = time.monotonic()
        with pytest.raises(UsageError) as caught:
            open_client("SASLTLS", properties, retry_budget_ms=60_000).topics()
        assert "not trusted" in caught.value.message
        assert "ssl.ca.location" in caught.value.hint
        assert time.monotonic() - begun < 10, "trying again does not help"


def test_a_name_that_the_certificate_does_not_have_is_not_trusted(
    secure_kafka, certificates, monkeypatch
):
    resolve = socket.getaddrinfo

    def resolve_alias(host, *rest):
        return resolve("127.0.0.1" if host == "kafka.example" else host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_alias)
    server = secure_kafka.address("SASLTLS").replace("127.0.0.1", "kafka.example")
    ca = {"ssl.ca.location": str(certificates.authority)}
    properties = {"security.protocol": "SASL_SSL", **ca, **credentials("PLAIN")}

    with ClusterClient(connection_settings(server, properties)) as client:
        with pytest.raises(UsageError) as caught:
            client.topics()
        assert "kafka.example" in caught.value.message
    lenient = {**properties, "ssl.endpoint.identification.algorithm": "none"}
    with ClusterClient(connection_settings(server, lenient)) as client:
        client.topics()


def test_verification_can_be_switched_off(open_client):
    off = {"enable.ssl.certificate.verification": "false"}
    properties = {"security.protocol": "SASL_SSL", **credentials("PLAIN"), **off}
    open_client("SASLTLS", properties).topics()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_wrong_password_is_a_usage_error_that_does_not_repeat_it(open_client, mechanism):
    wrong = {**credentials(mechanism), "sasl.password": "open sesame"}
    properties = {"security.protocol": "SASL_PLAINTEXT", **wrong}
    client = open_client("SASL", properties, retry_budget_ms=60_000)
    begun = time.monotonic()
    with pytest.raises(UsageError) as caught:
        client.topics()
    assert caught.value.facts["error"] == "SASL_AUTHENTICATION_FAILED"
    assert "open sesame" not in f"{caught.value!r} {caught.value} {caught.value.facts}"
    assert "sasl.password" in caught.value.hint
    assert time.monotonic() - begun < 10, "trying again does not help"


def test_a_user_name_with_the_characters_of_the_mechanism_is_sent_as_it_is(open_client):
    odd = {**credentials("SCRAM-SHA-256"), "sasl.username": "a=b,c"}
    client = open_client("SASL", {"security.protocol": "SASL_PLAINTEXT", **odd})
    with pytest.raises(UsageError) as caught:
        client.topics()
    # Refused as an unknown user, not as a malformed message.
    assert caught.value.facts["error"] == "SASL_AUTHENTICATION_FAILED"


def test_a_token_that_has_run_out_is_refused(open_client):
    stale = credentials("OAUTHBEARER") | {
        "sasl.oauthbearer.config": f"principal={USER} lifeSeconds=1"
    }
    client = open_client("SASL", {"security.protocol": "SASL_PLAINTEXT", **stale})

    class Yesterday(Clock):
        def now_ms(self):
            return super().now_ms() - 86_400_000

    settings = client._settings  # noqa: SLF001  # the same
    with ClusterClient(settings, clock=Yesterday()) as late, pytest.raises(UsageError) as caught:
        late.topics()
    assert caught.value.facts["mechanism"] == "OAUTHBEARER"


def test_no_credentials_where_they_are_wanted_is_unavailable_with_a_hint(open_client):
    client = open_client("SASL", {}, retry_budget_ms=300)
    with pytest.raises((UsageError, UnavailableError)) as caught:
        client.topics()
    assert "security.protocol" in caught.value.hint


def test_plain_text_to_a_tls_listener_says_so(open_client):
    client = open_client("TLS", {}, retry_budget_ms=300)
    with pytest.raises((UsageError, UnavailableError)) as caught:
        client.topics()
    assert "security.protocol" in caught.value.hint


def test_tls_to_a_plain_listener_says_so(secure_kafka):
    settings = connection_settings(secure_kafka.bootstrap, {"security.protocol": "SSL"})
    settings = replace(settings, retry_budget_ms=300, connect_timeout_ms=2000)
    with ClusterClient(settings) as client, pytest.raises((UsageError, UnavailableError)):
        client.topics()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_session_is_renewed_before_it_ends_and_after(open_client, topic, mechanism):
    client = open_client("SHORT", {"security.protocol": "SASL_PLAINTEXT", **credentials(mechanism)})
    fetched_bytes(client, topic)
    first = [*client._topology._connections.values()]  # noqa: SLF001  # were they replaced?
    begun = time.monotonic()
    while time.monotonic() - begun < 1.5 * SHORT_SESSION_MS / 1000:
        fetched_bytes(client, topic)
        time.sleep(0.1)
    time.sleep(1.2 * SHORT_SESSION_MS / 1000)  # idle over the end of a session
    fetched_bytes(client, topic)
    now = [*client._topology._connections.values()]  # noqa: SLF001  # as above
    assert now == first, "the same connections, authenticated again"


def oidc(endpoint):
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "mirror",
        "sasl.oauthbearer.client.secret": "s3cret-value",
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.token.endpoint.url": f"http://127.0.0.1:{endpoint.server_port}/token",
    }


def tokens(status=200, **headers):
    body = json.dumps({"access_token": unsecured_token(), "expires_in": 600}).encode()
    return status, headers, body


def test_a_token_is_asked_from_the_endpoint_once_and_accepted(open_client, serve, topic):
    endpoint = serve(tokens())
    with ThreadPoolExecutor(8) as pool:
        clients = list(pool.map(lambda _: open_client("SASL", oidc(endpoint)), range(8)))
        read = set(pool.map(lambda client: fetched_bytes(client, topic), clients))
    assert len(read) == 1
    ((_, headers, body),) = endpoint.asked
    assert headers["Authorization"] == "Basic bWlycm9yOnMzY3JldC12YWx1ZQ=="
    assert dict(urllib.parse.parse_qsl(body)) == {
        "grant_type": "client_credentials",
        "scope": "kafka",
    }


def test_an_endpoint_that_is_busy_is_asked_again_when_it_says_so(open_client, serve, topic):
    endpoint = serve((429, {"Retry-After": "1"}, b""), tokens())
    begun = time.monotonic()
    assert fetched_bytes(open_client("SASL", oidc(endpoint), retry_budget_ms=20_000), topic)
    assert time.monotonic() - begun >= 1
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(("status", "kind"), [(401, UsageError), (503, UnavailableError)])
def test_an_endpoint_without_a_token_is_reported_without_the_secret(
    open_client, serve, status, kind
):
    endpoint = serve((status, {}, b"s3cret-value"))
    with pytest.raises(kind) as caught:
        open_client("SASL", oidc(endpoint), retry_budget_ms=300).topics()
    assert "s3cret-value" not in f"{caught.value!r} {caught.value} {caught.value.facts}"


@pytest.mark.parametrize(
    "config", ["", "principal", "principal=", "who=a", "principal=a lifeSeconds=x"]
)
def test_a_token_configuration_that_makes_none_is_refused(open_client, config):
    wrong = {**credentials("OAUTHBEARER"), "sasl.oauthbearer.config": config}
    with pytest.raises(UsageError, match=r"sasl\.oauthbearer\.config"):
        open_client("SASL", {"security.protocol": "SASL_PLAINTEXT", **wrong}).topics()


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location"),
        ({"ssl.ca.pem": "none"}, "ssl.ca.pem"),
        ({"ssl.certificate.location": "/nowhere/c.pem"}, "client certificate"),
        ({"ssl.cipher.suites": "NONE-SUCH"}, "ssl.cipher.suites"),
    ],
)
def test_invalid_tls_files_are_reported_before_connecting(properties, named):
    settings = connection_settings("h:1", {"security.protocol": "SSL", **properties})
    with pytest.raises(UsageError, match=named):
        ClusterClient(settings)
