"""With `spark.secrets: executors`, Spark's workers resolve the secrets of a cluster and a bucket.

Spark gives its workers an environment that differs from the driver's (`spark.executorEnv`), so a
secret that the driver had sent would be noticed.
"""

from __future__ import annotations

import json
import socket

import pytest

from kit.judges.clients import Message, produce
from kit.runs.commands import Run
from kit.servers.s3 import S3Server
from kit.servers.security import PASSWORD, USER
from logmirror.app.verify import verify
from logmirror.config.settings import load

pytestmark = pytest.mark.timeout(600)
COUNT = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3-secrets")) as running:
        yield running


@pytest.fixture
def run(secure_kafka, certificates, server, tmp_path):
    """Runs a mirror from a cluster into a bucket: the password is a variable, the key a file."""
    topic = secure_kafka.create_topic(f"secrets-{tmp_path.name.replace('_', '-')}")
    produce(secure_kafka.bootstrap, topic, [Message(b"k", b"%d" % n, (), n) for n in range(COUNT)])
    key = tmp_path / "s3-key"
    key.write_text(f"{server.secret_key}\n")
    credentials = {"access-key-id": server.access_key, "secret-access-key": f"${{file:{key}}}"}
    source = {
        "bootstrap-servers": secure_kafka.address("SASLTLS"),
        "properties": {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": "${KAFKA_PASSWORD}",
            "ssl.ca.location": str(certificates.authority),
        },
    }
    one = {
        "name": "m",
        "source": source,
        "topic": topic,
        "partitions": "all",
        "flush": {"max-time-ms": 200, "max-bytes": 1 << 20, "max-offsets": 1000},
    }
    path = tmp_path / "config.json"

    def of(secrets, **environment):
        properties = {f"spark.executorEnv.{name}": value for name, value in environment.items()}
        spark = {"master": "local[1]", "secrets": secrets, "properties": properties}
        lake = server.destination(server.new_bucket(), name="lake", credentials=credentials)
        mirror = one | {"destinations": [lake]}
        path.write_text(json.dumps({"mirrors": [mirror], "spark": spark}))
        given = {"KAFKA_PASSWORD": PASSWORD}
        with Run(path, "--until-now", folder=tmp_path, environment=given) as started:
            code = started.wait()
            return code, started.text, path

    return of


def test_a_copy_with_secrets_of_the_executors(run):
    code, text, path = run("executors")

    assert code == 0, text
    (row,) = verify(load(path, environ={"KAFKA_PASSWORD": PASSWORD}))
    assert (row.next_offset, row.problems) == (COUNT, ())


def test_workers_use_their_own_environment(run):
    assert run("driver", KAFKA_PASSWORD="")[0] == 0, "the driver has sent it"

    code, text, _ = run("executors", KAFKA_PASSWORD="")

    assert code == 2, text
    for shown in ("${KAFKA_PASSWORD}", socket.gethostname(), "it is empty", "missing"):
        assert shown in text
    assert PASSWORD not in text
