"""Goal: users, ACLs, settings and transactions are in the bucket too, and outlive the machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from kit.judges.clients import rows_by_librdkafka
from kit.judges.quota_requests import alter, describe
from kit.judges.raw_client import RawClient
from kit.servers.bucket_broker import BucketBroker
from kit.servers.machine import HOST, free_ports

if TYPE_CHECKING:
    from pathlib import Path

    from kit.judges.quota_requests import Named
    from kit.servers.s3 import S3Server

TOPIC = "orders"
TOPICS = [TOPIC, "bills"]
QUOTAS: list[tuple[Named, dict[str, float | None]]] = [
    ([("client-id", None)], {"producer_byte_rate": 2_000_000.0, "request_percentage": 150.0}),
    ([("user", "reader")], {"consumer_byte_rate": 1_000_000.0}),
]
TIMEOUT_S = 20
PASSWORD = "secret"
ACL = AclBinding(
    ResourceType.TOPIC,
    TOPIC,
    ResourcePatternType.LITERAL,
    "User:reader",
    "*",
    AclOperation.READ,
    AclPermissionType.ALLOW,
)
GROUP_ACL = AclBinding(
    ResourceType.GROUP,
    "unused",
    ResourcePatternType.LITERAL,
    "User:*",
    "*",
    AclOperation.READ,
    AclPermissionType.ALLOW,
)
"""For the group of `rows_by_librdkafka`."""

ANY_ACL = AclBindingFilter(
    ResourceType.ANY,
    None,
    ResourcePatternType.ANY,
    None,
    None,
    AclOperation.ANY,
    AclPermissionType.ANY,
)


class Machine(BucketBroker):
    """A broker with a listener where users log in; without a login a client is a super user."""

    def __init__(self, folder: Path, server: S3Server, bucket: str) -> None:
        plain, self.sasl_port = free_ports(2)
        listeners = f"PLAINTEXT://{HOST}:{plain}", f"SASL_PLAINTEXT://{HOST}:{self.sasl_port}"
        options = [part for one in listeners for part in ("--listener", one)]
        super().__init__(folder, server, bucket, "--super-user", "User:ANONYMOUS", *options)
        self.port = plain

    def login(self, user: str, password: str) -> dict[str, Any]:
        """The settings of a client that logs in."""
        return {
            "bootstrap.servers": f"{HOST}:{self.sasl_port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
        }

    def values_for(self, user: str) -> list[bytes]:
        """The values of the topic as a user reads them."""
        login = self.login(user, PASSWORD)
        rows = rows_by_librdkafka(login["bootstrap.servers"], TOPIC, config=login)
        return [row.value for row in rows]

    def refuses(self, user: str, password: str) -> bool:
        """Whether a login fails."""
        errors: list[int] = []
        settings = {"error_cb": lambda error: errors.append(error.code()), "log_level": 0}
        client = AdminClient(self.login(user, password) | settings)
        deadline_s = time.monotonic() + TIMEOUT_S
        while KafkaError._AUTHENTICATION not in errors and time.monotonic() < deadline_s:  # noqa: SLF001  # its public name
            client.poll(0.1)
        return KafkaError._AUTHENTICATION in errors  # noqa: SLF001  # as above


def identities(broker: BucketBroker) -> tuple[str, dict[str, str], object]:
    """The cluster ID, the topic IDs and the client quotas, as clients see them."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    cluster = admin.describe_cluster().result(TIMEOUT_S).cluster_id
    topics = admin.describe_topics(TopicCollection(TOPICS))
    ids = {name: str(found.result(TIMEOUT_S).topic_id) for name, found in topics.items()}
    with RawClient(broker.port) as client:
        return cluster, ids, describe(client)


@pytest.fixture
def two_machines(tmp_path: Path, s3_server: S3Server, bucket: str):
    """Two brokers on one bucket, neither of them running."""
    made = [Machine(tmp_path / name, s3_server, bucket) for name in ("first", "second")]
    yield made
    for broker in made:
        broker.__exit__()


def transactional(bootstrap, transactional_id):
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    return producer


def test_the_cluster_its_topics_and_quotas_are_the_same_on_another_machine(two_machines):
    first, second = two_machines
    first.start()
    admin = AdminClient({"bootstrap.servers": first.bootstrap})
    for done in admin.create_topics([NewTopic(name, 2, 1) for name in TOPICS]).values():
        done.result(TIMEOUT_S)
    with RawClient(first.port) as client:
        assert alter(client, *QUOTAS) == [0] * len(QUOTAS)
    wanted = identities(first)
    cluster, ids, quotas = wanted
    assert cluster
    assert len({*ids.values()}) == len(TOPICS)
    assert quotas == (0, QUOTAS)
    first.kill()

    second.start()
    assert identities(second) == wanted
    with RawClient(second.port) as client:
        assert alter(client, (QUOTAS[0][0], dict.fromkeys(QUOTAS[0][1]))) == [0]
    second.kill()
    first.start()
    assert identities(first) == (cluster, ids, (0, QUOTAS[1:]))


def test_users_acls_settings_and_transactions_outlive_the_machine(two_machines):
    first, second = two_machines
    first.start()
    admin = AdminClient({"bootstrap.servers": first.bootstrap})
    settings = {"retention.ms": "123456789"}
    admin.create_topics([NewTopic(TOPIC, 1, 1, config=settings)])[TOPIC].result(TIMEOUT_S)
    scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    changes = [
        UserScramCredentialUpsertion(user, scram, PASSWORD.encode())
        for user in ("reader", "stranger")
    ]
    for done in admin.alter_user_scram_credentials(changes).values():
        done.result(TIMEOUT_S)
    for done in admin.create_acls([ACL, GROUP_ACL]).values():
        done.result(TIMEOUT_S)
    for name, commits in (("one", True), ("two", False)):
        producer = transactional(first.bootstrap, name)
        producer.produce(TOPIC, name)
        ended = producer.commit_transaction if commits else producer.abort_transaction
        ended(TIMEOUT_S)
    left_open = transactional(first.bootstrap, "three")
    left_open.produce(TOPIC, "three")
    assert left_open.flush(TIMEOUT_S) == 0
    first.kill()

    second.start()
    admin = AdminClient({"bootstrap.servers": second.bootstrap})
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
    found = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    assert found["retention.ms"].value == "123456789"
    users = admin.describe_user_scram_credentials(["reader"])["reader"].result(TIMEOUT_S)
    (kept,) = users.scram_credential_infos
    assert (kept.mechanism, kept.iterations) == (scram.mechanism, scram.iterations)
    assert set(admin.describe_acls(ANY_ACL).result(TIMEOUT_S)) == {ACL, GROUP_ACL}
    assert second.values_for("reader") == [b"one"]
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        second.values_for("stranger")
    assert second.refuses("reader", "wrong")
    committed = [row.value for row in rows_by_librdkafka(second.bootstrap, TOPIC)]
    assert committed == [b"one"], "what was left open is not visible"
    again = transactional(second.bootstrap, "three")  # aborts what was left open
    again.produce(TOPIC, "four")
    again.commit_transaction(TIMEOUT_S)
    committed = [row.value for row in rows_by_librdkafka(second.bootstrap, TOPIC)]
    assert committed == [b"one", b"four"]
    assert second.stop() == 0
