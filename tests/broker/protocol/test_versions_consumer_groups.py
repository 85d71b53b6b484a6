"""Goal: the APIs of KIP-848 are implemented in every advertised version.

Method: as in `test_versions_groups`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import RawClient, build, nested
from logmirror.broker.apis import VERSIONS, Api

SESSION = timedelta(seconds=10)


def _versions(api: Api) -> range:
    first, last = VERSIONS[api]
    return range(first, last + 1)


def _entity(api: Api, version: int, entity: str, /, **fields: object) -> Any:
    return build(nested(api, version, "request", entity), **fields)


def _beat(client: RawClient, version: int, **fields: object) -> Any:
    return client.ask(
        Api.CONSUMER_GROUP_HEARTBEAT,
        version,
        **{
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout": SESSION,
            "subscribed_topic_regex": None,
            "server_assignor": "uniform",
            "topic_partitions": (),
            **fields,
        },
    )


@pytest.mark.parametrize("version", _versions(Api.CONSUMER_GROUP_HEARTBEAT))
def test_consumer_group_heartbeat(group_client, topic_name, version):
    who: dict[str, object] = {"group_id": topic_name, "member_id": "", "member_epoch": 0}
    if version >= 1:
        who["member_id"] = "mine"

    joined = _beat(group_client, version, subscribed_topic_names=(topic_name,), **who)

    assert (joined.error_code, joined.member_epoch) == (ErrorCode.none, 1)
    assert joined.heartbeat_interval == timedelta(seconds=5)
    [topic] = joined.assignment.topic_partitions
    assert topic.partitions == (0, 1)
    assert (joined.member_id == "mine") == (version >= 1)
    who |= {"member_id": joined.member_id, "member_epoch": 1, "subscribed_topic_names": None}
    owned = _entity(
        Api.CONSUMER_GROUP_HEARTBEAT,
        version,
        "TopicPartitions",
        topic_id=topic.topic_id,
        partitions=(0, 1),
    )
    again = _beat(group_client, version, topic_partitions=(owned,), **who)
    assert (again.error_code, again.assignment) == (ErrorCode.none, None)
    stale = _beat(group_client, version, **{**who, "member_epoch": 9})
    assert stale.error_code == ErrorCode.fenced_member_epoch
    assert _beat(group_client, version, **{**who, "member_epoch": -1}).member_epoch == -1


def test_a_subscription_by_regular_expression(group_client, topic_name):
    names = {"subscribed_topic_names": None, "subscribed_topic_regex": f"{topic_name}|other"}
    who = {"group_id": topic_name, "member_id": "mine", "member_epoch": 0}

    joined = _beat(group_client, 1, **who, **names)

    [topic] = joined.assignment.topic_partitions
    assert topic.partitions == (0, 1)
    described = {"group_ids": (topic_name,), "include_authorized_operations": False}
    [group] = group_client.ask(Api.CONSUMER_GROUP_DESCRIBE, 1, **described).groups
    [member] = group.members
    assert member.subscribed_topic_regex == f"{topic_name}|other"
    assert member.subscribed_topic_names == ()


def test_a_regular_expression_that_is_none(group_client, topic_name):
    names = {"subscribed_topic_names": None, "subscribed_topic_regex": "a("}
    who = {"group_id": topic_name, "member_id": "mine", "member_epoch": 0}

    refused = _beat(group_client, 1, **who, **names)

    assert refused.error_code == ErrorCode.invalid_regular_expression
    assert "missing ): a(" in refused.error_message


@pytest.mark.parametrize("version", _versions(Api.CONSUMER_GROUP_DESCRIBE))
def test_consumer_group_describe(group_client, topic_name, version):
    who = {"group_id": topic_name, "member_id": "mine", "member_epoch": 0}
    _beat(group_client, 1, subscribed_topic_names=(topic_name,), **who)

    def describe(group: str) -> Any:
        fields = {"group_ids": (group, group), "include_authorized_operations": True}
        [found] = group_client.ask(Api.CONSUMER_GROUP_DESCRIBE, version, **fields).groups
        return found

    found = describe(topic_name)
    assert (found.error_code, found.group_state) == (ErrorCode.none, "Stable")
    assert (found.group_epoch, found.assignment_epoch, found.assignor_name) == (1, 1, "uniform")
    assert found.authorized_operations == sum(1 << n for n in (3, 6, 8, 10, 11))
    [member] = found.members
    assert (member.member_id, member.member_epoch, member.client_id) == ("mine", 1, "test")
    assert (member.client_host, member.subscribed_topic_names) == ("/127.0.0.1", (topic_name,))
    for share in (member.assignment, member.target_assignment):
        [topic] = share.topic_partitions
        assert (topic.topic_name, topic.partitions) == (topic_name, (0, 1))
    if version >= 1:
        assert member.member_type == 1
    assert describe("unknown").error_code == ErrorCode.group_id_not_found
    assert describe("").error_code == ErrorCode.invalid_group_id
    listed = group_client.ask(
        Api.LIST_GROUPS, 5, states_filter=(), types_filter=("consumer",)
    ).groups
    assert topic_name in {group.group_id for group in listed}


def test_offsets_of_a_consumer_group_need_the_members_epoch(group_client, topic_name):
    who = {"group_id": topic_name, "member_id": "mine", "member_epoch": 0}
    _beat(group_client, 1, subscribed_topic_names=(topic_name,), **who)

    def commit(epoch: int) -> Any:
        partition = _entity(
            Api.OFFSET_COMMIT,
            9,
            "OffsetCommitRequestPartition",
            partition_index=0,
            committed_offset=10,
            committed_leader_epoch=-1,
            committed_metadata=None,
        )
        fields = {"name": topic_name, "partitions": (partition,)}
        topic = _entity(Api.OFFSET_COMMIT, 9, "OffsetCommitRequestTopic", **fields)
        response = group_client.ask(
            Api.OFFSET_COMMIT,
            9,
            group_id=topic_name,
            member_id="mine",
            generation_id_or_member_epoch=epoch,
            group_instance_id=None,
            topics=(topic,),
        )
        return response.topics[0].partitions[0].error_code

    assert commit(1) == ErrorCode.none
    assert commit(0) == ErrorCode.stale_member_epoch
    entity = _entity(
        Api.OFFSET_FETCH,
        9,
        "OffsetFetchRequestGroup",
        group_id=topic_name,
        member_id="mine",
        member_epoch=7,
        topics=None,
    )
    response = group_client.ask(Api.OFFSET_FETCH, 9, groups=(entity,), require_stable=False)
    assert response.groups[0].error_code == ErrorCode.stale_member_epoch
