"""Goal: users, ACLs, settings and transactions are in the bucket too, and outlive the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
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
from kit.servers.bucket_broker import BucketBroker

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.s3 import S3Server

TOPIC = "orders"
TIMEOUT_S = 20
ACL = AclBinding(
    ResourceType.TOPIC,
    TOPIC,
    ResourcePatternType.LITERAL,
    "User:reader",
    "*",
    AclOperation.READ,
    AclPermissionType.ALLOW,
)
ANY_ACL = AclBindingFilter(
    ResourceType.ANY,
    None,
    ResourcePatternType.ANY,
    None,
    None,
    AclOperation.ANY,
    AclPermissionType.ANY,
)


@pytest.fixture
def two_machines(tmp_path: Path, s3_server: S3Server, bucket: str):
    """Two brokers on one bucket, neither of them running. Who connects is a super user."""
    made = [
        BucketBroker(tmp_path / name, s3_server, bucket, "--super-user", "User:ANONYMOUS")
        for name in ("first", "second")
    ]
    yield made
    for broker in made:
        broker.__exit__()


def transactional(bootstrap, transactional_id):
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    return producer


def test_users_acls_settings_and_transactions_outlive_the_machine(two_machines):
    first, second = two_machines
    first.start()
    admin = AdminClient({"bootstrap.servers": first.bootstrap})
    settings = {"retention.ms": "123456789"}
    admin.create_topics([NewTopic(TOPIC, 1, 1, config=settings)])[TOPIC].result(TIMEOUT_S)
    scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    change = UserScramCredentialUpsertion("reader", scram, b"secret")
    admin.alter_user_scram_credentials([change])["reader"].result(TIMEOUT_S)
    admin.create_acls([ACL])[ACL].result(TIMEOUT_S)
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
    assert admin.describe_acls(ANY_ACL).result(TIMEOUT_S) == [ACL]
    committed = [row.value for row in rows_by_librdkafka(second.bootstrap, TOPIC)]
    assert committed == [b"one"], "what was left open is not visible"
    again = transactional(second.bootstrap, "three")  # aborts what was left open
    again.produce(TOPIC, "four")
    again.commit_transaction(TIMEOUT_S)
    committed = [row.value for row in rows_by_librdkafka(second.bootstrap, TOPIC)]
    assert committed == [b"one", b"four"]
    assert second.stop() == 0
