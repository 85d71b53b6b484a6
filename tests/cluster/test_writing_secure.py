"""Writing to Apache Kafka over TLS and SASL, and without permissions.

Method: the listeners of `kit.servers.security`; the sessions of one of them expire every three
seconds while many requests are in flight. A separate broker has an authorizer and a user with few
permissions.
"""

import time
from dataclasses import replace

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kit.judges.clients import rows_by_librdkafka
from kit.servers.apache import RELEASES
from kit.servers.kafka import ApacheKafka, Listener
from kit.servers.security import PASSWORD, USER
from logmirror.cluster.admin import TxnMarker
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.produce_connection import ProduceConnection
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UsageError
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.records import Record, encode_reference

CREDENTIALS = {"sasl.mechanism": "PLAIN", "sasl.username": USER, "sasl.password": PASSWORD}


def batch(values, *, sequence):
    kind = TimestampType.CREATE_TIME
    rows = [Record(n, 1_700_000_000_000, kind, None, value, ()) for n, value in enumerate(values)]
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
    return memoryview(
        encode_reference(rows, base_offset=0, last_offset=len(values) - 1, **producer)
    )


def collect_all(pipeline):
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    return responses


def test_large_and_small_batches_arrive_whole_over_tls(secure_kafka, certificates, topic_name):
    secure_kafka.create_topic(topic_name, 60)
    settings = connection_settings(
        secure_kafka.address("SASLTLS"),
        {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificates.authority),
            **CREDENTIALS,
        },
    )
    small = [TopicPartition(topic_name, n) for n in range(1, 60)]
    large = TopicPartition(topic_name, 0)
    body = bytes(range(256)) * 3_000
    with ClusterClient(settings) as client, client.pipeline() as pipeline:
        for n in range(6):
            wanted = [(each, batch([b"%d" % n], sequence=n)) for each in small]
            wanted.insert(30, (large, batch([body[n:]], sequence=n)))
            pipeline.send(wanted)
        responses = collect_all(pipeline)
    assert {(response.error_code, response.error) for response in responses} == {(0, None)}
    assert len(responses) == 360
    found = [row.value for row in rows_by_librdkafka(secure_kafka.bootstrap, topic_name)]
    assert found == [body[n:] for n in range(6)]
    last = rows_by_librdkafka(secure_kafka.bootstrap, topic_name, partition=59)
    assert [row.value for row in last] == [b"%d" % n for n in range(6)]


def test_a_session_that_ends_is_renewed_between_responses_and_requests(
    secure_kafka, topic_name, monkeypatch
):
    secure_kafka.create_topic(topic_name)
    renewed = []
    authenticate = ProduceConnection._authenticate  # noqa: SLF001  # counted, and what it finds

    def counted(connection, deadline_ms):
        renewed.append(len(connection.in_flight))
        authenticate(connection, deadline_ms)

    monkeypatch.setattr(ProduceConnection, "_authenticate", counted)
    settings = connection_settings(
        secure_kafka.address("SHORT"), {"security.protocol": "SASL_PLAINTEXT", **CREDENTIALS}
    )
    partition, responses, sent = TopicPartition(topic_name, 0), [], 0
    with ClusterClient(settings) as client, client.pipeline() as pipeline:
        until = time.monotonic() + 7
        while time.monotonic() < until:
            while pipeline.in_flight() < 5:
                pipeline.send([(partition, batch([b"v"], sequence=sent))])
                sent += 1
            responses += pipeline.collect(block=True)
            time.sleep(0.01)
        responses += collect_all(pipeline)
    assert {response.error for response in responses} == {None}
    assert [response.base_offset for response in responses] == list(range(sent))
    assert len(renewed) >= 3, "the first, and one each 2.5 seconds"
    assert set(renewed) == {0}, "nothing was under way at any"


@pytest.fixture(scope="module", params=RELEASES)
def secured_kafka(request, tmp_path_factory):
    """A broker with an authorizer; users of the plain listener may do everything."""
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    listener = Listener(
        name="SASL",
        protocol="SASL_PLAINTEXT",
        config={
            "sasl.enabled.mechanisms": "PLAIN",
            "plain.sasl.jaas.config": f'{module} required user_{USER}="{PASSWORD}";',
        },
    )
    broker = ApacheKafka(
        request.param,
        tmp_path_factory.mktemp("kafka-guarded"),
        config={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
        listeners=[listener],
    )
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture
def grant(secured_kafka):
    """Gives the user a right; all are taken back at the end."""
    admin = AdminClient({"bootstrap.servers": secured_kafka.bootstrap})
    given = []

    def grant(kind, name, operation):
        who = (f"User:{USER}", "*", operation, AclPermissionType.ALLOW)
        binding = AclBinding(kind, name, ResourcePatternType.LITERAL, *who)
        admin.create_acls([binding])[binding].result(20)
        given.append(AclBindingFilter(kind, name, ResourcePatternType.LITERAL, *who))

    yield grant
    for future in admin.delete_acls(given).values():
        future.result(20)


@pytest.fixture
def limited(secured_kafka):
    settings = replace(
        connection_settings(
            secured_kafka.address("SASL"), {"security.protocol": "SASL_PLAINTEXT", **CREDENTIALS}
        ),
        retry_budget_ms=5000,
    )
    with ClusterClient(settings) as client:
        yield client


@pytest.mark.jvm
@pytest.mark.xdist_group("restricted-kafka")
def test_missing_permissions_are_distinguished_and_nothing_is_written(
    secured_kafka, limited, grant, topic_name
):
    secured_kafka.create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    grant(ResourceType.TOPIC, topic_name, AclOperation.DESCRIBE)
    assert limited.log_ends([partition])[partition].end_offset == 0

    assert limited.admin.may_write_markers() is False
    (error,) = limited.admin.write_txn_markers({partition: [TxnMarker(99, 0)]}).values()
    assert type(error) is UsageError
    assert error.facts["error"] == "CLUSTER_AUTHORIZATION_FAILED"

    with limited.pipeline() as pipeline:
        pipeline.send([(partition, batch([b"v"], sequence=0))])
        (response,) = collect_all(pipeline)
    assert type(response.error) is UsageError
    assert response.error.facts["error"] == "TOPIC_AUTHORIZATION_FAILED"

    for refused in (
        lambda: limited.admin.create_topic(topic_name + "-2", partition_count=1),
        lambda: limited.admin.create_partitions(topic_name, 2),
        lambda: limited.admin.delete_records({partition: 0}),
        limited.admin.broker_configs,
        lambda: limited.producer_states({partition: 7}),
        lambda: limited.transactional_producer("mine").init(),
        lambda: limited.groups.offsets("mine", [partition]),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert caught.value.facts["error"].endswith("AUTHORIZATION_FAILED")
    assert limited.log_ends([partition])[partition].end_offset == 0


@pytest.mark.jvm
@pytest.mark.xdist_group("restricted-kafka")
def test_cluster_action_permits_markers_and_describe_reports_it(
    secured_kafka, limited, grant, topic_name
):
    secured_kafka.create_topic(topic_name)
    partition = TopicPartition(topic_name, 0)
    grant(ResourceType.TOPIC, topic_name, AclOperation.DESCRIBE)
    grant(ResourceType.BROKER, "kafka-cluster", AclOperation.CLUSTER_ACTION)
    grant(ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE)
    assert limited.admin.may_write_markers() is True
    assert limited.admin.write_txn_markers({partition: [TxnMarker(99, 0)] * 2}) == {partition: None}
    assert limited.log_ends([partition])[partition].end_offset == 2
