"""Secrets that executors resolve: what tasks contain, what executors read, what is refused.

Method: a configuration with a secret wherever one can be. Its works are pickled as Spark's driver
pickles them, the bytes are searched for each secret, and the executor's function takes them over.
"""

import json
import pickle
import socket
from dataclasses import fields, replace

import pytest
from pyspark.serializers import CPickleSerializer

from kit.runs.configs import mirror, problems_of, settings_of, shared_mirror, text_of
from logmirror.app.specs import mirror_specs
from logmirror.cluster.properties import ConnectionSettings, connection_settings
from logmirror.config.secret_rules import REFERABLE
from logmirror.config.settings import load_text
from logmirror.engine.executor import with_secrets
from logmirror.errors import UsageError
from logmirror.mirror.ports import FlowId, Slice, Work
from logmirror.references import Reference, Secret, resolved

NAMES = ("PASSWORD", "CLIENT_SECRET", "CONFIG", "KEY_PASSWORD", "KEY", "ENDPOINT", "EXTENSIONS")
ENVIRON = {name: f"canary-of-{name.lower()}" for name in (*NAMES, "ID", "S3_ENV", "S3", "TOKEN")}
ENVIRON |= {"ENDPOINT": "https://idp/?canary-of-the-url", "EXTENSIONS": "a=canary-of-the-ext"}
FILE = "canary-of-the-file"
CANARIES = {*ENVIRON.values(), FILE} - {ENVIRON["ID"]}
SASL = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "user",
    "sasl.password": "${PASSWORD}",
    "ssl.certificate.pem": "public",
    "ssl.key.pem": "${KEY}",
    "ssl.key.password": "${KEY_PASSWORD}",
}
OIDC = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.client.id": "user",
    "sasl.oauthbearer.client.secret": "${CLIENT_SECRET}",
    "sasl.oauthbearer.config": "${CONFIG}",
    "sasl.oauthbearer.token.endpoint.url": "${ENDPOINT}",
    "sasl.oauthbearer.extensions": "${EXTENSIONS}",
}
SERVERS, OTHER = {"bootstrap-servers": "h:1"}, {"bootstrap-servers": "h:2"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{FILE}\n")
    return path


def configuration(file, secrets="executors"):
    """All places of secrets, each with a reference."""
    s3 = {"type": "s3", "bucket": "archive"}
    both = {
        "write": {"access-key-id-env": "ID", "secret-access-key-env": "S3_ENV"},
        "read": {"access-key-id": "a", "secret-access-key": f"${{file:{file}}}"},
    }
    token = {"access-key-id": "a", "secret-access-key": "${S3}", "session-token": "${TOKEN}"}
    destinations = [
        {"name": "lake", **s3, "credentials": both},
        {"name": "pool", **s3, "prefix": "p", "credentials": token},
        {"name": "standby", "type": "kafka", **OTHER, "properties": OIDC},
    ]
    one = mirror(source=SERVERS | {"properties": SASL}, destinations=destinations)
    return json.dumps({"mirrors": [one], "spark": {"secrets": secrets}})


def works_of(settings):
    (spec,) = mirror_specs(settings)
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    part = Slice(flow=flow, topic_id=None, compacted=False, first=7, end=9, tail=None)
    return [
        Work(slice=part, source=spec.source, destination=to, writer_id="w", estimated_bytes=1)
        for _, to in spec.destinations
    ]


def shown(data):
    return {canary for canary in CANARIES if canary.encode() in data}


def test_tasks_contain_references_and_executors_resolve_them(file, monkeypatch):
    works = works_of(load_text(configuration(file), environ=ENVIRON))
    plain = works_of(load_text(configuration(file, "driver"), environ=ENVIRON))
    task = CPickleSerializer().dumps([works])

    assert shown(CPickleSerializer().dumps([plain])) == CANARIES, "the option has an effect"
    assert shown(task) == set()
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    (taken,) = pickle.loads(task)
    found, failed = with_secrets(taken)
    assert (found, failed) == (plain, [])
    assert found == works
    assert shown(pickle.dumps(found)) == set(), "pickled again, too"


def test_a_shared_destination_is_referenced_too():
    keys = {"access-key-id": "a", "secret-access-key": "${S3}"}
    for shared in (
        {"type": "s3", "bucket": "archive", "flush": mirror()["flush"], "credentials": keys},
        {"type": "kafka", **OTHER, "properties": SASL},
    ):
        one = shared_mirror(source=SERVERS | {"properties": SASL})
        text = text_of(one, destination=shared, spark={"secrets": "executors"})
        works = works_of(load_text(text, environ=ENVIRON))
        assert shown(pickle.dumps(works)) == set()
        assert b"${" not in pickle.dumps(works), "as name or path, not as text to expand"


@pytest.mark.parametrize(
    ("missing", "named", "reason"),
    [
        ("KEY", "${KEY}", "the environment variable is not set"),
        ("file", "${file:", "the file cannot be read: no such file or directory"),
        ("", "${TOKEN}", "it is empty"),
    ],
)
def test_a_missing_secret_ends_its_slices_alone(file, monkeypatch, missing, named, reason):
    works = works_of(load_text(configuration(file), environ=ENVIRON))
    taken = pickle.loads(pickle.dumps(works))
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    if missing == "file":
        file.unlink()
    elif missing:
        monkeypatch.delenv(missing)
    else:
        monkeypatch.setenv("TOKEN", "")
    resolved.cache_clear()

    found, failed = with_secrets(taken)

    assert len(failed) == (3 if missing == "KEY" else 1)
    assert len(found) + len(failed) == len(works)
    for result in failed:
        assert isinstance(result.error, UsageError)
        assert str(result.error.facts["reference"]).startswith(named)
        assert result.error.facts["host"] == socket.gethostname()
        assert result.error.facts["reason"] == reason
        assert result.next_offset == 7
        assert shown(f"{result.error} {result.error.facts} {result.error.hint}".encode()) == set()


@pytest.mark.parametrize("text", ["canary", "${PASSWORD:-canary}", "canary${PASSWORD}", "$$", ""])
def test_a_secret_that_is_not_one_reference_is_refused(text):
    source = SERVERS | {"properties": {"sasl.password": text}}
    keys = {"access-key-id": "a", "secret-access-key": text, "session-token": text}
    lake = {"type": "s3", "bucket": "archive", "credentials": {"write": keys, "read": keys}}
    one = mirror(source=source, destinations=[lake])
    assert problems_of(text_of(one, spark={"secrets": "driver"}), ENVIRON) == []
    found = problems_of(text_of(one, spark={"secrets": "executors"}), ENVIRON)
    where = "mirrors[0].destinations[0].credentials"
    assert {problem.path for problem in found} == {
        "mirrors[0].source.properties.sasl.password",
        *(f"{where}.{w}.{k}" for w in ("write", "read") for k in list(keys)[1:]),
    }
    assert "canary" not in str(found)


def test_each_hidden_property_can_be_a_reference():
    hidden = {field.name for field in fields(ConnectionSettings) if not field.repr}
    start = {name.replace("_", ".").replace("oauth.", "sasl.oauthbearer.") for name in hidden}
    assert len(start) == len(REFERABLE)
    assert all(any(name.startswith(one) for one in start) for name in REFERABLE)


def test_a_key_on_one_line_stays_a_reference():
    secret = Secret("a\\nb", Reference("KEY"))
    properties = {"security.protocol": "SSL", "ssl.certificate.pem": "c", "ssl.key.pem": secret}
    settings = connection_settings("h:1", properties)
    assert b"a\\nb" not in pickle.dumps(replace(settings, retry_budget_ms=1))


def test_the_default_is_the_driver():
    assert settings_of(mirror()).spark.secrets == "driver"
