"""Properties mean what librdkafka's mean; none is silently ignored; secrets stay secret.

Method: tables, compared with the names and values of librdkafka itself.
"""

import pickle
from dataclasses import fields

import pytest
from confluent_kafka import Consumer, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from logmirror.cluster.properties import (
    KNOWN_PROPERTIES,
    ConnectionSettings,
    connection_settings,
    parse_servers,
    property_problems,
)
from logmirror.cluster.refused_properties import REFUSED
from logmirror.errors import UsageError

SERVERS = "a:1,b:2"
SCRAM = {
    "security.protocol": "sasl_ssl",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "alice",
    "sasl.password": "hunter2-secret",
}


def problems(properties, servers=SERVERS):
    return [(p.name, p.message, p.suggestion) for p in property_problems(servers, properties)]


def test_everything_has_a_default_but_the_servers():
    settings = connection_settings(SERVERS)
    assert settings.bootstrap_servers == (("a", 1), ("b", 2))
    assert settings == ConnectionSettings(bootstrap_servers=(("a", 1), ("b", 2)))
    assert not settings.uses_tls
    assert not settings.uses_sasl
    assert settings.check_crcs


def test_values_reach_their_fields_whatever_the_case_of_a_choice():
    settings = connection_settings(
        SERVERS,
        {
            **SCRAM,
            "client.id": "me",
            "socket.timeout.ms": "1234",
            "enable.ssl.certificate.verification": "FALSE",
            "ssl.endpoint.identification.algorithm": "none",
            "max.partition.fetch.bytes": "2000000",
            "check.crcs": "0",
            "ssl.ca.pem": "line\\nline",
        },
    )
    assert (settings.security_protocol, settings.sasl_mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (settings.client_id, settings.socket_timeout_ms) == ("me", 1234)
    assert (settings.ssl_verify, settings.ssl_verify_hostname) == (False, False)
    assert (settings.max_partition_fetch_bytes, settings.check_crcs) == (2_000_000, False)
    assert settings.ssl_ca_pem == "line\nline"
    assert settings.uses_tls
    assert settings.uses_sasl


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("h", (("h", 9092),)),
        ("h:1, [::1]:2 ,,[fe80::1]", (("h", 1), ("::1", 2), ("fe80::1", 9092))),
        ("SSL://h:9", (("h", 9),)),
    ],
)
def test_servers_are_read_in_every_usual_form(text, servers):
    assert parse_servers(text) == servers


@pytest.mark.parametrize("text", ["", " , ", "h:", "h:0", "h:65536", "h:x", ":1", "h:1/topic"])
def test_servers_that_are_none_are_refused(text):
    ((name, _, _),) = problems({}, servers=text)
    assert name == "bootstrap.servers"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("security.protocoll", "security.protocol"),
        ("sasl.user", "sasl.username"),
        ("ssl.ca.file", "ssl.ca.location"),
        ("fetch.max.wait.ms", "fetch.wait.max.ms"),  # the Java client's name
        ("ssl.truststore.location", "ssl.ca.location"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    ((found, message, suggestion),) = problems({name: "x"})
    assert (found, message) == (name, "is an unknown property")
    assert nearest in suggestion


def test_a_name_like_no_other_gets_no_suggestion():
    assert problems({"zzz": "x"}) == [("zzz", "is an unknown property", "")]


def test_a_property_without_meaning_here_is_refused_with_the_reason():
    ((_, message, _),) = problems({"group.id": "g"})
    assert "position is read from the destination" in message
    ((_, message, _),) = problems({"isolation.level": "read_uncommitted"})
    assert "read_committed" in message


def test_no_name_is_both_used_and_refused():
    assert not set(REFUSED) & set(KNOWN_PROPERTIES)


def known_to_librdkafka(name):
    try:
        Consumer({"group.id": "g", name: "1"})
    except KafkaException as error:
        return "No such configuration property" not in str(error)
    except TypeError:  # a callback, which must be a function
        return True
    return True


@pytest.mark.parametrize("name", KNOWN_PROPERTIES)
def test_every_name_that_we_use_is_librdkafkas(name):
    assert known_to_librdkafka(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("socket.timeout.ms", "9"),
        ("socket.timeout.ms", "1.5"),
        ("socket.timeout.ms", ""),
        ("fetch.wait.max.ms", "300001"),
        ("security.protocol", "TLS"),
        ("broker.address.family", "v5"),
        ("check.crcs", "yes"),
        ("sasl.mechanism", "GSSAPI"),
    ],
)
def test_a_value_outside_its_range_is_refused(name, value):
    found = problems({**SCRAM, name: value})
    assert (name, "expects") in [(one[0], one[1].split()[0]) for one in found]


def test_two_names_for_one_thing_contradict():
    found = problems({**SCRAM, "sasl.mechanisms": "PLAIN"})
    assert found == [("sasl.mechanisms", "means the same as sasl.mechanism", "")]


def test_every_problem_is_found_at_once_and_the_error_carries_them():
    wrong = {"securty.protocol": "SSL", "socket.timeout.ms": "x", "group.id": "g"}
    with pytest.raises(UsageError) as caught:
        connection_settings("h:x", wrong)
    names = [problem.name for problem in caught.value.facts["problems"]]
    assert names == ["bootstrap.servers", "securty.protocol", "socket.timeout.ms", "group.id"]
    assert "3 more" in caught.value.message


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism"),
        ({"sasl.mechanism": "PLAIN"}, "sasl.mechanism"),
        ({**SCRAM, "sasl.password": ""}, "sasl.password"),
        ({"ssl.ca.location": "/ca.pem"}, "ssl.ca.location"),
        ({"security.protocol": "SSL", "ssl.key.location": "/k"}, "ssl.certificate.location"),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"},
            "enable.sasl.oauthbearer.unsecure.jwt",
        ),
        (
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": "i",
                "sasl.oauthbearer.client.secret": "s",
            },
            "sasl.oauthbearer.token.endpoint.url",
        ),
    ],
)
def test_properties_that_do_not_go_together_are_refused(properties, name):
    assert [problem[0] for problem in problems(properties)] == [name]


def test_secrets_are_in_no_text():
    secrets = {
        "sasl.password": "hunter2-secret",
        "ssl.key.pem": "key-secret",
        "ssl.key.password": "pass-secret",
        "ssl.certificate.pem": "c",
    }
    settings = connection_settings(SERVERS, {**SCRAM, **secrets})
    assert "secret" not in repr(settings)
    assert "secret" not in str(problems({**secrets, "sasl.passwort": "typo-secret"}))
    hidden = {field.name for field in fields(settings) if not field.repr}
    assert {name for name in settings.__slots__ if "secret" in str(getattr(settings, name))} <= (
        hidden
    )


def test_settings_travel_to_executors_whole():
    settings = connection_settings(SERVERS, SCRAM)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.sasl_password == "hunter2-secret"


@given(
    st.dictionaries(st.text(max_size=30), st.text(max_size=30), max_size=4), st.text(max_size=30)
)
def test_no_text_makes_the_check_itself_fail(properties, servers):
    found = property_problems(servers, properties)
    # Hypothesis also draws words of the product, and some of them are properties.
    assert {problem.name for problem in found} >= set(properties) - set(KNOWN_PROPERTIES)
