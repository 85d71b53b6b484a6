"""Goal: Apache Kafka's own tools manage users and ACLs, and its clients log in.

Method: one pass through `kafka-configs`, `kafka-acls` and the console producer; each result is read
back by another tool or by a stock client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kit.servers.machine import HOST

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.in_bucket

ADMIN = "admin"
PASSWORD = "correct horse, battery = staple; \N{SNOWMAN}"  # as in conftest


def _properties(  # noqa: PLR0913, PLR0917  # one for each part of the file
    path: Path, user: str, password: str, protocol: str, mechanism: str, authority: Path
) -> str:
    modules = "org.apache.kafka.common.security"
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    secret = password.encode("ascii", "backslashreplace").decode()
    path.write_text(
        f"security.protocol={protocol}\nsasl.mechanism={mechanism}\n"
        f"sasl.jaas.config={modules}.{module} required "
        f'username="{user}" password="{secret}";\n'
        f"ssl.truststore.type=PEM\nssl.truststore.location={authority}\n"
    )
    return str(path)


def _values(settings: dict[str, Any], topic: str) -> list[bytes]:
    """The values of a topic with one record."""
    consumer = Consumer({**settings, "group.id": "none", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = consumer.consume(1, 20)
    consumer.close()
    return [message.value() for message in found]


@pytest.mark.timeout(600)
def test_tools_manage_users_and_acls(  # noqa: PLR0913, PLR0917  # what a whole cluster has
    secured, settings, certificates, apache_tools, tmp_path, topic_name
):
    def run(name: str, protocol: str, mechanism: str, *arguments: str) -> str:
        at = ("--bootstrap-server", f"{HOST}:{secured.port_of(protocol)}")
        file = tmp_path / f"{protocol}-{mechanism}"
        authority = certificates.authority
        config = _properties(file, ADMIN, PASSWORD, protocol, mechanism, authority)
        found = apache_tools.run(name, *at, "--command-config", config, *arguments)
        return found.stdout + found.stderr

    admin = AdminClient(settings())
    admin.create_topics([NewTopic(topic_name, 1)])[topic_name].result(20)
    entity = ("--entity-type", "users", "--entity-name", "erin")
    config = "SCRAM-SHA-512=[iterations=8192,password=secret-of-erin]"
    run("kafka-configs", "SASL_SSL", "SCRAM-SHA-512", "--alter", *entity, "--add-config", config)
    described = run("kafka-configs", "SASL_PLAINTEXT", "PLAIN", "--describe", *entity)
    assert "SCRAM-SHA-512=iterations=8192" in described

    who = ("--allow-principal", "User:erin", "--topic", topic_name, "--force")
    run("kafka-acls", "SASL_SSL", "SCRAM-SHA-256", "--add", "--producer", *who)
    listed = run("kafka-acls", "SASL_SSL", "PLAIN", "--list", "--topic", topic_name)
    assert "principal=User:erin" in listed
    assert "operation=WRITE" in listed
    file = tmp_path / "erin"
    mine = _properties(
        file, "erin", "secret-of-erin", "SASL_SSL", "SCRAM-SHA-512", certificates.authority
    )
    apache_tools.run(
        "kafka-console-producer",
        "--bootstrap-server",
        f"{HOST}:{secured.port_of('SASL_SSL')}",
        "--topic",
        topic_name,
        "--producer.config" if apache_tools.major < 4 else "--command-config",
        mine,
        stdin="written by erin\n",
    )
    removed = run("kafka-acls", "SASL_SSL", "SCRAM-SHA-512", "--remove", "--producer", *who)
    assert "principal=User:erin" not in removed
    run(
        "kafka-configs", "SASL_SSL", "PLAIN", "--alter", *entity, "--delete-config", "SCRAM-SHA-512"
    )

    assert _values(settings(), topic_name) == [b"written by erin"]
    erin = AdminClient(settings("SASL_SSL", "SCRAM-SHA-512", "erin", "secret-of-erin"))
    with pytest.raises(KafkaException):
        erin.list_topics(timeout=1)
