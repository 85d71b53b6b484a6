"""Goal: the APIs of groups and their offsets are implemented in every advertised version.

Method: as in `test_versions`: kio, an independent codec, writes the requests and reads the
responses to their last byte.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import RawClient, build, nested
from logmirror.broker.apis import VERSIONS, Api

SESSION = timedelta(seconds=10)
SUBSCRIPTION = b"opaque subscription"
ASSIGNMENT = b"opaque assignment"


def _versions(api: Api) -> range:
    first, last = VERSIONS[api]
    return range(first, last + 1)


def _entity(api: Api, version: int, entity: str, /, **fields: object) -> Any:
    return build(nested(api, version, "request", entity), **fields)


def _join(client: RawClient, group: str, version: int, member_id: str = "") -> Any:
    protocol = _entity(
        Api.JOIN_GROUP, version, "JoinGroupRequestProtocol", name="range", metadata=SUBSCRIPTION
    )
    return client.ask(
        Api.JOIN_GROUP,
        version,
        group_id=group,
        session_timeout=SESSION,
        rebalance_timeout=SESSION,
        member_id=member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocols=(protocol,),
        reason=None,
    )


def _joined(client: RawClient, group: str, version: int) -> Any:
    response = _join(client, group, version)
    if version >= 4:
        assert response.error_code == ErrorCode.member_id_required
        response = _join(client, group, version, response.member_id)
    assert response.error_code == ErrorCode.none
    return response


def _sync(client: RawClient, group: str, version: int, joined: Any) -> Any:
    assignment = _entity(
        Api.SYNC_GROUP,
        version,
        "SyncGroupRequestAssignment",
        member_id=joined.member_id,
        assignment=ASSIGNMENT,
    )
    return client.ask(
        Api.SYNC_GROUP,
        version,
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name="range",
        assignments=(assignment,),
    )


def _stable(client: RawClient, group: str) -> Any:
    joined = _joined(client, group, 9)
    assert _sync(client, group, 5, joined).error_code == ErrorCode.none
    return joined


@pytest.mark.parametrize("version", _versions(Api.FIND_COORDINATOR))
def test_find_coordinator_is_this_broker(group_client, embedded, version):
    for kind in (0, 1):
        response = group_client.ask(
            Api.FIND_COORDINATOR, version, key="a", key_type=kind, coordinator_keys=("a",)
        )

        found = response.coordinators[0] if version >= 4 else response
        assert found.error_code == ErrorCode.none
        assert f"{found.host}:{found.port}" == embedded.bootstrap


@pytest.mark.parametrize("version", _versions(Api.JOIN_GROUP))
def test_join_group(group_client, topic_name, version):
    joined = _joined(group_client, topic_name, version)

    assert (joined.generation_id, joined.protocol_name) == (1, "range")
    assert joined.leader == joined.member_id
    assert joined.member_id.startswith("test-")
    assert [(m.member_id, m.metadata) for m in joined.members] == [(joined.leader, SUBSCRIPTION)]


@pytest.mark.parametrize("version", _versions(Api.SYNC_GROUP))
def test_sync_group(group_client, topic_name, version):
    joined = _joined(group_client, topic_name, 9)

    synced = _sync(group_client, topic_name, version, joined)

    assert (synced.error_code, synced.assignment) == (ErrorCode.none, ASSIGNMENT)
    if version >= 5:
        assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")


@pytest.mark.parametrize("version", _versions(Api.HEARTBEAT))
def test_heartbeat(group_client, topic_name, version):
    joined = _stable(group_client, topic_name)

    def beat(generation: int, member_id: str) -> Any:
        fields = {"generation_id": generation, "member_id": member_id, "group_instance_id": None}
        return group_client.ask(Api.HEARTBEAT, version, group_id=topic_name, **fields).error_code

    assert beat(1, joined.member_id) == ErrorCode.none
    assert beat(0, joined.member_id) == ErrorCode.illegal_generation
    assert beat(1, "other") == ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", _versions(Api.LEAVE_GROUP))
def test_leave_group(group_client, topic_name, version):
    joined = _stable(group_client, topic_name)

    def leave() -> Any:
        fields: dict[str, object] = {"member_id": joined.member_id}
        if version >= 3:
            member = {"member_id": joined.member_id, "group_instance_id": None, "reason": None}
            fields = {"members": (_entity(Api.LEAVE_GROUP, version, "MemberIdentity", **member),)}
        response = group_client.ask(Api.LEAVE_GROUP, version, group_id=topic_name, **fields)
        return response.members[0].error_code if version >= 3 else response.error_code

    assert leave() == ErrorCode.none
    assert leave() == ErrorCode.unknown_member_id


def _commit(client: RawClient, group: str, version: int, offset: int, **who: object) -> Any:
    partition = {"committed_offset": offset, "committed_leader_epoch": 3, "commit_timestamp": -1}
    partitions = tuple(
        _entity(
            Api.OFFSET_COMMIT,
            version,
            "OffsetCommitRequestPartition",
            partition_index=number,
            committed_metadata=f"m{number}",
            **partition,
        )
        for number in (0, 1, 2)
    )
    topic = _entity(
        Api.OFFSET_COMMIT, version, "OffsetCommitRequestTopic", name=group, partitions=partitions
    )
    fields: dict[str, object] = {
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "retention_time": timedelta(milliseconds=-1),
        **who,
    }
    response = client.ask(Api.OFFSET_COMMIT, version, group_id=group, topics=(topic,), **fields)
    return [one.error_code for one in response.topics[0].partitions]


def _fetch(client: RawClient, group: str, version: int, *numbers: int) -> Any:
    """Return error code and partitions of a group's topics; without numbers, of all."""
    name = "OffsetFetchRequestTopics" if version >= 8 else "OffsetFetchRequestTopic"
    asked = _entity(Api.OFFSET_FETCH, version, name, name=group, partition_indexes=numbers)
    topics = (asked,) if numbers else None
    fields: dict[str, object] = {"group_id": group, "topics": topics}
    if version >= 8:
        wanted = {**fields, "member_id": None, "member_epoch": -1}
        entity = _entity(Api.OFFSET_FETCH, version, "OffsetFetchRequestGroup", **wanted)
        fields = {"groups": (entity,)}
    response = client.ask(Api.OFFSET_FETCH, version, require_stable=True, **fields)
    found = response.groups[0] if version >= 8 else response
    assert getattr(found, "error_code", ErrorCode.none) == ErrorCode.none
    return [
        (one.partition_index, one.committed_offset, one.metadata, one.error_code)
        for topic in found.topics
        for one in topic.partitions
    ]


@pytest.mark.parametrize("version", _versions(Api.OFFSET_COMMIT))
def test_offset_commit(group_client, topic_name, version):
    unknown = ErrorCode.unknown_topic_or_partition

    codes = _commit(group_client, topic_name, version, 10)

    assert codes == [ErrorCode.none, ErrorCode.none, unknown]
    found = _fetch(group_client, topic_name, 9, 0, 1)
    assert found == [(0, 10, "m0", ErrorCode.none), (1, 10, "m1", ErrorCode.none)]
    joined = _stable(group_client, topic_name)
    fenced = _commit(group_client, topic_name, version, 11)
    assert fenced == [*[ErrorCode.unknown_member_id] * 2, unknown]
    stale = {"generation_id_or_member_epoch": 9, "member_id": joined.member_id}
    old = _commit(group_client, topic_name, version, 11, **stale)
    assert old == [*[ErrorCode.illegal_generation] * 2, unknown]
    mine = {**stale, "generation_id_or_member_epoch": joined.generation_id}
    assert _commit(group_client, topic_name, version, 12, **mine)[0] == ErrorCode.none
    assert _fetch(group_client, topic_name, 9, 0)[0][1] == 12


@pytest.mark.parametrize("version", _versions(Api.OFFSET_FETCH))
def test_offset_fetch(group_client, topic_name, version):
    assert _fetch(group_client, topic_name, version, 0) == [(0, -1, "", ErrorCode.none)]
    _commit(group_client, topic_name, 9, 10)

    found = _fetch(group_client, topic_name, version, 1, 5)

    assert found == [(1, 10, "m1", ErrorCode.none), (5, -1, "", ErrorCode.none)]
    if version >= 2:
        both = [(0, 10, "m0", ErrorCode.none), (1, 10, "m1", ErrorCode.none)]
        assert _fetch(group_client, topic_name, version) == both


def test_offset_fetch_of_several_groups(group_client, topic_name):
    _commit(group_client, topic_name, 9, 10)
    groups = tuple(
        _entity(
            Api.OFFSET_FETCH,
            9,
            "OffsetFetchRequestGroup",
            group_id=group,
            member_id=None,
            member_epoch=-1,
            topics=None,
        )
        for group in (topic_name, "unknown", topic_name)
    )

    response = group_client.ask(Api.OFFSET_FETCH, 9, groups=groups, require_stable=False)

    found = {group.group_id: len(group.topics) for group in response.groups}
    assert found == {topic_name: 1, "unknown": 0}
    assert len(response.groups) == 2


def test_metadata_over_the_limit_is_refused_for_its_partition(group_client, topic_name):
    partitions = tuple(
        _entity(
            Api.OFFSET_COMMIT,
            9,
            "OffsetCommitRequestPartition",
            partition_index=number,
            committed_offset=1,
            committed_leader_epoch=-1,
            committed_metadata="x" * (4096 + number),
        )
        for number in (0, 1)
    )
    topic = _entity(
        Api.OFFSET_COMMIT, 9, "OffsetCommitRequestTopic", name=topic_name, partitions=partitions
    )

    response = group_client.ask(
        Api.OFFSET_COMMIT,
        9,
        group_id=topic_name,
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=(topic,),
    )

    codes = [one.error_code for one in response.topics[0].partitions]
    assert codes == [ErrorCode.none, ErrorCode.offset_metadata_too_large]


@pytest.mark.parametrize("version", _versions(Api.OFFSET_DELETE))
def test_offset_delete(group_client, topic_name, version):
    _commit(group_client, topic_name, 9, 10)

    def delete(group: str) -> Any:
        entities = tuple(
            _entity(Api.OFFSET_DELETE, version, "OffsetDeleteRequestPartition", partition_index=n)
            for n in (0, 5)
        )
        topic = {"name": topic_name, "partitions": entities}
        entity = _entity(Api.OFFSET_DELETE, version, "OffsetDeleteRequestTopic", **topic)
        return group_client.ask(Api.OFFSET_DELETE, version, group_id=group, topics=(entity,))

    response = delete(topic_name)

    codes = [one.error_code for one in response.topics[0].partitions]
    assert codes == [ErrorCode.none, ErrorCode.unknown_topic_or_partition]
    assert [one[0] for one in _fetch(group_client, topic_name, 9)] == [1]
    assert delete("unknown").error_code == ErrorCode.group_id_not_found
    _stable(group_client, topic_name)  # its subscription is not that of a consumer
    assert delete(topic_name).error_code == ErrorCode.non_empty_group


@pytest.mark.parametrize("version", _versions(Api.DESCRIBE_GROUPS))
def test_describe_groups(group_client, topic_name, version):
    joined = _stable(group_client, topic_name)

    def describe(group: str) -> Any:
        fields = {"groups": (group, group), "include_authorized_operations": True}
        [found] = group_client.ask(Api.DESCRIBE_GROUPS, version, **fields).groups
        return found

    found = describe(topic_name)
    assert (found.error_code, found.group_state) == (ErrorCode.none, "Stable")
    assert (found.protocol_type, found.protocol_data) == ("consumer", "range")
    [member] = found.members
    assert (member.member_id, member.client_id) == (joined.member_id, "test")
    assert member.client_host == "/127.0.0.1"
    assert (member.member_metadata, member.member_assignment) == (SUBSCRIPTION, ASSIGNMENT)
    if version >= 3:
        assert found.authorized_operations == sum(1 << n for n in (3, 6, 8, 10, 11))
    unknown = describe("unknown")
    assert unknown.group_state == "Dead"
    is_error = version >= 6
    assert unknown.error_code == (ErrorCode.group_id_not_found if is_error else ErrorCode.none)


@pytest.mark.parametrize("version", _versions(Api.LIST_GROUPS))
def test_list_groups(group_client, topic_name, version):
    _stable(group_client, topic_name)

    def listed(states: tuple[str, ...] = (), types: tuple[str, ...] = ()) -> Any:
        fields = {"states_filter": states, "types_filter": types}
        groups = group_client.ask(Api.LIST_GROUPS, version, **fields).groups
        return next((group for group in groups if group.group_id == topic_name), None)

    assert listed().protocol_type == "consumer"
    if version >= 4:
        assert listed(("stable",)).group_state == "Stable"
        assert listed(("Empty",)) is None
    if version >= 5:
        assert listed((), ("Classic",)).group_type == "classic"
        assert listed((), ("consumer",)) is None


@pytest.mark.parametrize("version", _versions(Api.DELETE_GROUPS))
def test_delete_groups(group_client, topic_name, version):
    joined = _stable(group_client, topic_name)

    def delete() -> Any:
        names = (topic_name, "unknown", "")
        results = group_client.ask(Api.DELETE_GROUPS, version, groups_names=names).results
        return {result.group_id: result.error_code for result in results}

    others = {"unknown": ErrorCode.group_id_not_found, "": ErrorCode.group_id_not_found}
    assert delete() == {topic_name: ErrorCode.non_empty_group, **others}
    group_client.ask(Api.LEAVE_GROUP, 0, group_id=topic_name, member_id=joined.member_id)
    _commit(group_client, topic_name, 9, 10)
    assert delete() == {topic_name: ErrorCode.none, **others}
    assert delete() == {topic_name: ErrorCode.group_id_not_found, **others}
    assert _fetch(group_client, topic_name, 9, 0) == [(0, -1, "", ErrorCode.none)]


@pytest.mark.parametrize("name", ["..", "/", "a\0b", "x" * 20_000, "\N{SNOWMAN}"])
def test_a_group_may_have_any_name(group_client, topic_name, name):
    group = f"{topic_name}{name}"
    joined = _stable(group_client, group)

    groups = group_client.ask(Api.LIST_GROUPS, 5, states_filter=(), types_filter=()).groups

    assert group in {found.group_id for found in groups}
    group_client.ask(Api.LEAVE_GROUP, 0, group_id=group, member_id=joined.member_id)


def test_a_member_that_leaves_many_times_is_removed_once(group_client, topic_name):
    joined = _stable(group_client, topic_name)
    member = {"member_id": joined.member_id, "group_instance_id": None, "reason": None}
    entity = _entity(Api.LEAVE_GROUP, 5, "MemberIdentity", **member)

    response = group_client.ask(Api.LEAVE_GROUP, 5, group_id=topic_name, members=(entity,) * 1_000)

    codes = [found.error_code for found in response.members]
    assert codes == [ErrorCode.none] + [ErrorCode.unknown_member_id] * 999


def test_a_subscription_that_is_null_ends_the_connection(embedded, topic_name):
    def text(value: str) -> bytes:
        return struct.pack(">h", len(value)) + value.encode()

    header = struct.pack(">hhi", Api.JOIN_GROUP, 0, 7) + text("test")
    body = text(topic_name) + struct.pack(">i", 10_000) + text("") + text("consumer")
    protocol = struct.pack(">i", 1) + text("range") + struct.pack(">i", -1)
    with RawClient(embedded.port) as client:
        client.send_frame(header + body + protocol)

        assert client.is_closed()
    with RawClient(embedded.port) as client:
        assert client.ask(Api.LIST_GROUPS, 0).error_code == ErrorCode.none
