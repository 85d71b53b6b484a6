"""Goal: no request does or shows what its client may not do or see.

Method: every API is sent by a client without any ACL, for a topic that exists and for one that does
not: each gets the same refusal, in the codes that Apache Kafka uses. A super user gets none. The
table must have every API that the broker has.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from kio.schema.errors import ErrorCode

from kit.judges import restricted_requests as requests
from kit.judges.raw_client import RawClient
from kit.judges.restricted_requests import (
    CLUSTER_DENIED,
    FILTERED,
    GROUP_DENIED,
    ID_DENIED,
    REQUESTS,
    TOPIC_DENIED,
)
from kit.servers.embedded import EmbeddedBroker
from logmirror.broker.apis import VERSIONS, Api
from logmirror.broker.security.authorization import REQUIRED

if TYPE_CHECKING:
    from collections.abc import Iterator

ADMIN: Final = "admin"
PASSWORD: Final = "correct horse, battery = staple; \N{SNOWMAN}"  # as in conftest
REFUSALS: Final = {TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, ID_DENIED}


def _codes(message: Any) -> set[ErrorCode]:
    """All error codes of a response."""
    if isinstance(message, tuple | list):
        return set().union(*map(_codes, message))
    if not dataclasses.is_dataclass(message):
        return set()
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    mine = {ErrorCode(int(code)) for name, code in values.items() if name.endswith("error_code")}
    return mine.union(*map(_codes, values.values()))


@pytest.fixture(scope="module")
def anonymous(secured) -> Iterator[RawClient]:
    with RawClient(secured.port_of("PLAINTEXT")) as client:
        yield client


@pytest.fixture(scope="module")
def super_user(secured) -> Iterator[RawClient]:
    with RawClient(secured.port_of("SASL_PLAINTEXT")) as client:
        client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        token = f"\0{ADMIN}\0{PASSWORD}".encode()
        assert int(client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token).error_code) == 0
        yield client


@pytest.fixture(scope="module")
def admin(settings) -> AdminClient:
    return AdminClient(settings())


@pytest.fixture
def topic(admin, topic_name) -> str:
    admin.create_topics([NewTopic(topic_name, 1)])[topic_name].result(20)
    return topic_name


def test_every_api_has_a_row_and_a_request():
    assert REQUIRED.keys() == VERSIONS.keys()
    restricted = {api for api, needs in REQUIRED.items() if needs}
    assert restricted == {api for api, *_ in REQUESTS} | FILTERED


@pytest.mark.parametrize(
    ("api", "version", "fields", "refusal"), REQUESTS, ids=lambda value: getattr(value, "name", "")
)
def test_a_client_without_acls_is_refused_and_learns_nothing(  # noqa: PLR0913, PLR0917  # a row, and two clients
    anonymous, super_user, topic, api, version, fields, refusal
):
    there = anonymous.ask(api, version, **fields(topic))
    missing = anonymous.ask(api, version, **fields("not-there"))

    assert _codes(there) - {ErrorCode.none} == {refusal}
    assert repr(there).replace(topic, "not-there") == repr(missing)
    allowed = super_user.ask(api, version, **fields("not-there"))
    assert not _codes(allowed) & REFUSALS


def _allow(
    admin: AdminClient, *bindings: tuple[ResourceType, str, AclOperation], host: str = "*"
) -> None:
    acls = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.LITERAL,
            "User:ANONYMOUS",
            host,
            operation,
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in bindings
    ]
    for done in admin.create_acls(acls).values():
        done.result(20)


@pytest.fixture
def no_acls(admin) -> Iterator[None]:
    """Remove the ACLs of anonymous clients after the test."""
    yield
    _remove_all(admin)


def _remove_all(admin: AdminClient) -> None:
    everything = AclBindingFilter(
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        "User:ANONYMOUS",
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    for done in admin.delete_acls([everything]).values():
        done.result(20)


def test_a_list_of_all_topics_has_those_that_may_be_described(anonymous, admin, topic, no_acls):
    fields = {**requests.metadata(topic), "topics": None}
    hidden = anonymous.ask(Api.METADATA, 12, **fields)
    _allow(admin, (ResourceType.TOPIC, topic, AclOperation.READ))
    shown = anonymous.ask(Api.METADATA, 12, **fields)

    assert hidden.topics == ()
    [found] = shown.topics
    assert found.name == topic
    assert found.topic_authorized_operations == (1 << AclOperation.READ.value) | (
        1 << AclOperation.DESCRIBE.value
    )
    # By its ID, too, a topic is found only by those who may describe it.
    by_id = requests.part(
        Api.METADATA, 12, "MetadataRequestTopic", name=None, topic_id=found.topic_id
    )
    fields = {**requests.metadata(topic), "topics": (by_id,)}
    assert anonymous.ask(Api.METADATA, 12, **fields).topics[0].name == topic
    _remove_all(admin)
    [unknown] = anonymous.ask(Api.METADATA, 12, **fields).topics
    assert (unknown.error_code, unknown.name) == (ErrorCode.unknown_topic_id, None)


def test_lists_leave_out_groups_that_may_not_be_described(
    anonymous, super_user, admin, topic, no_acls
):
    fields = requests.commit(Api.OFFSET_COMMIT, 8, "OffsetCommit")(topic)
    none = {"member_id": "", "generation_id_or_member_epoch": -1, "group_id": topic}
    super_user.ask(Api.OFFSET_COMMIT, 8, **{**fields, **none})
    ask = {"states_filter": (), "types_filter": ()}

    def listed(client: RawClient) -> set[str]:
        return {group.group_id for group in client.ask(Api.LIST_GROUPS, 5, **ask).groups}

    assert topic in listed(super_user)
    assert listed(anonymous) == set()
    _allow(admin, (ResourceType.GROUP, topic, AclOperation.READ))
    assert listed(anonymous) == {topic}


def test_a_regular_expression_matches_topics_that_may_be_described(
    anonymous, admin, topic, no_acls
):
    admin.create_topics([NewTopic(f"{topic}-2", 1)])[f"{topic}-2"].result(20)
    _allow(
        admin,
        (ResourceType.GROUP, topic, AclOperation.READ),
        (ResourceType.TOPIC, f"{topic}-2", AclOperation.DESCRIBE),
    )

    def topics_of_a_new_member(name: str) -> int:
        joined = anonymous.ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            1,
            group_id=topic,
            member_id=name,
            member_epoch=0,
            instance_id=None,
            rack_id=None,
            rebalance_timeout=timedelta(seconds=10),
            subscribed_topic_names=None,
            subscribed_topic_regex=f"{topic}.*",
            server_assignor=None,
            topic_partitions=(),
        )
        return len(joined.assignment.topic_partitions)

    assert topics_of_a_new_member("a") == 1
    _allow(admin, (ResourceType.TOPIC, topic, AclOperation.READ))
    assert topics_of_a_new_member("a") == 2


@pytest.mark.parametrize("host", ["*", "127.0.0.1"])
def test_members_with_different_permissions_and_one_regular_expression_become_stable(  # noqa: PLR0913, PLR0917  # two clients and their ACLs
    anonymous, super_user, admin, topic, no_acls, host
):
    admin.create_topics([NewTopic(f"{topic}-2", 2)])[f"{topic}-2"].result(20)
    _allow(
        admin,
        (ResourceType.GROUP, topic, AclOperation.READ),
        (ResourceType.TOPIC, f"{topic}-2", AclOperation.DESCRIBE),
        host=host,
    )
    clients, epochs = {"a": anonymous, "b": super_user}, {"a": 0, "b": 0}
    held: dict[str, set[tuple[bytes, int]]] = {"a": set(), "b": set()}

    def beat(name: str) -> None:
        joins = not epochs[name]
        mine = [
            requests.part(
                Api.CONSUMER_GROUP_HEARTBEAT, 1, "TopicPartitions", topic_id=one, partitions=(n,)
            )
            for one, n in held[name]
        ]
        found = clients[name].ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            1,
            group_id=topic,
            member_id=name,
            member_epoch=epochs[name],
            instance_id=None,
            rack_id=None,
            rebalance_timeout=timedelta(seconds=10 if joins else 0, milliseconds=-(not joins)),
            subscribed_topic_names=None,
            subscribed_topic_regex=f"{topic}.*" if joins else None,
            server_assignor=None,
            topic_partitions=tuple(mine),
        )
        assert found.error_code == ErrorCode.none
        epochs[name] = found.member_epoch
        if found.assignment is not None:
            held[name] = {
                (one.topic_id, number)
                for one in found.assignment.topic_partitions
                for number in one.partitions
            }

    for _ in range(4):
        beat("a")
        beat("b")
    stable = dict(epochs)
    for _ in range(3):
        beat("a")
        beat("b")

    assert epochs == stable
    assert sorted(number for _, number in held["a"] | held["b"]) == [0, 0, 1]
    assert len({one for one, _ in held["a"]}) == 1


def test_each_topic_of_a_request_is_judged_by_itself(anonymous, admin, topic, no_acls):
    _allow(admin, (ResourceType.TOPIC, topic, AclOperation.WRITE))
    fields = requests.produce(topic)
    fields["topic_data"] += requests.produce("not-there")["topic_data"]

    first, second = anonymous.ask(Api.PRODUCE, 9, **fields).responses

    assert first.partition_responses[0].error_code == ErrorCode.none
    assert second.partition_responses[0].error_code == TOPIC_DENIED
    assert anonymous.ask(Api.FETCH, 12, **requests.fetch(topic)).responses[0].partitions[
        0
    ].error_code == (TOPIC_DENIED)


def test_who_may_write_to_a_topic_may_be_an_idempotent_producer(anonymous, admin, topic, no_acls):
    ask = requests.producer_id(None)("")
    assert anonymous.ask(Api.INIT_PRODUCER_ID, 4, **ask).error_code == CLUSTER_DENIED
    _allow(admin, (ResourceType.TOPIC, topic, AclOperation.WRITE))
    assert anonymous.ask(Api.INIT_PRODUCER_ID, 4, **ask).error_code == ErrorCode.none


def test_a_topic_is_created_on_first_use_only_by_those_who_may(
    anonymous, super_user, admin, topic_name, no_acls
):
    _allow(admin, (ResourceType.TOPIC, topic_name, AclOperation.READ))
    [refused] = anonymous.ask(Api.METADATA, 12, **requests.metadata(topic_name)).topics
    assert refused.error_code == TOPIC_DENIED
    assert topic_name not in admin.list_topics(timeout=10).topics
    _allow(admin, (ResourceType.TOPIC, topic_name, AclOperation.CREATE))
    [created] = anonymous.ask(Api.METADATA, 12, **requests.metadata(topic_name)).topics
    assert created.error_code == ErrorCode.none


def test_cluster_operations_are_those_of_the_client(anonymous, super_user, admin, no_acls):
    ask = {"include_cluster_authorized_operations": True, "endpoint_type": 1}

    def operations(client: RawClient) -> int:
        return int(client.ask(Api.DESCRIBE_CLUSTER, 1, **ask).cluster_authorized_operations)

    assert operations(anonymous) == 0
    assert operations(super_user) == sum(1 << n for n in (5, 7, 8, 9, 10, 11, 12))
    _allow(
        admin,
        (ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE),
        (ResourceType.BROKER, "kafka-cluster", AclOperation.CREATE),
    )
    assert operations(anonymous) == (1 << 5) | (1 << 8)


def test_acls_survive_a_kill(tmp_path):
    broker = EmbeddedBroker(tmp_path / "broker", super_users=["User:ANONYMOUS"])
    with broker:
        with RawClient(broker.port) as client:
            assert _codes(client.ask(Api.CREATE_ACLS, 3, **requests.create_acls("kept"))) == {
                ErrorCode.none
            }
        broker.kill()
        broker.start()
        with RawClient(broker.port) as client:
            [found] = client.ask(Api.DESCRIBE_ACLS, 3, **requests.acl_filter()).resources
    assert found.resource_name == "kept"


def test_without_super_users_acls_are_disabled(embedded):
    with RawClient(embedded.port) as client:
        found = client.ask(Api.DESCRIBE_ACLS, 3, **requests.acl_filter())

    assert found.error_code == ErrorCode.security_disabled
