"""A request of every API for which a client needs a permission, and how it is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kit.judges.partition_client import data_batch
from kit.judges.raw_client import build, nested
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from collections.abc import Callable

MINUTE: Final = timedelta(minutes=1)
TOPIC_DENIED: Final = ErrorCode.topic_authorization_failed
GROUP_DENIED: Final = ErrorCode.group_authorization_failed
CLUSTER_DENIED: Final = ErrorCode.cluster_authorization_failed
ID_DENIED: Final = ErrorCode.transactional_id_authorization_failed


def part(api: Api, version: int, name: str, /, **fields: object) -> Any:
    """Build a structure within a request."""
    return build(nested(api, version, "request", name), **fields)


def metadata(topic: str) -> dict[str, Any]:
    """Return the fields of Metadata."""
    return {
        "topics": (part(Api.METADATA, 12, "MetadataRequestTopic", name=topic, topic_id=None),),
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": True,
    }


def produce(topic: str) -> dict[str, Any]:
    """Return the fields of Produce."""
    data = part(Api.PRODUCE, 9, "PartitionProduceData", index=0, records=data_batch(1))
    topics = (part(Api.PRODUCE, 9, "TopicProduceData", name=topic, partition_data=(data,)),)
    return {"transactional_id": None, "acks": -1, "timeout": MINUTE, "topic_data": topics}


def fetch(topic: str) -> dict[str, Any]:
    """Return the fields of Fetch."""
    partition = part(
        Api.FETCH,
        12,
        "FetchPartition",
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=0,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1000,
    )
    return {
        "replica_id": -1,
        "max_wait": timedelta(0),
        "min_bytes": 0,
        "max_bytes": 1000,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": (part(Api.FETCH, 12, "FetchTopic", topic=topic, partitions=(partition,)),),
        "forgotten_topics_data": (),
        "rack_id": "",
    }


def _list_offsets(topic: str) -> dict[str, Any]:
    api = Api.LIST_OFFSETS
    fields = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    partition = part(api, 7, "ListOffsetsPartition", **fields)
    topics = (part(api, 7, "ListOffsetsTopic", name=topic, partitions=(partition,)),)
    return {"replica_id": -1, "isolation_level": 0, "topics": topics}


def _epoch(topic: str) -> dict[str, Any]:
    api = Api.OFFSET_FOR_LEADER_EPOCH
    fields = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
    partition = part(api, 4, "OffsetForLeaderPartition", **fields)
    topics = (part(api, 4, "OffsetForLeaderTopic", topic=topic, partitions=(partition,)),)
    return {"replica_id": -1, "topics": topics}


def _create_topics(topic: str) -> dict[str, Any]:
    fields = {"num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()}
    wanted = part(Api.CREATE_TOPICS, 7, "CreatableTopic", name=topic, **fields)
    return {"topics": (wanted,), "timeout": MINUTE, "validate_only": True}


def _delete_topics(topic: str) -> dict[str, Any]:
    wanted = part(Api.DELETE_TOPICS, 6, "DeleteTopicState", name=topic, topic_id=None)
    return {"topics": (wanted,), "timeout": MINUTE}


def _delete_records(topic: str) -> dict[str, Any]:
    api = Api.DELETE_RECORDS
    partition = part(api, 2, "DeleteRecordsPartition", partition_index=0, offset=0)
    topics = (part(api, 2, "DeleteRecordsTopic", name=topic, partitions=(partition,)),)
    return {"topics": topics, "timeout": MINUTE}


def _create_partitions(topic: str) -> dict[str, Any]:
    fields = {"name": topic, "count": 9, "assignments": None}
    wanted = part(Api.CREATE_PARTITIONS, 3, "CreatePartitionsTopic", **fields)
    return {"topics": (wanted,), "timeout": MINUTE, "validate_only": True}


def _alter_dirs(topic: str) -> dict[str, Any]:
    api = Api.ALTER_REPLICA_LOG_DIRS
    topics = (part(api, 2, "AlterReplicaLogDirTopic", name=topic, partitions=(0,)),)
    return {"dirs": (part(api, 2, "AlterReplicaLogDir", path="/none", topics=topics),)}


def _reassign(topic: str) -> dict[str, Any]:
    api = Api.ALTER_PARTITION_REASSIGNMENTS
    partition = part(api, 0, "ReassignablePartition", partition_index=0, replicas=(1,))
    topics = (part(api, 0, "ReassignableTopic", name=topic, partitions=(partition,)),)
    return {"topics": topics, "timeout": MINUTE}


def _describe_producers(topic: str) -> dict[str, Any]:
    fields = {"name": topic, "partition_indexes": (0,)}
    return {"topics": (part(Api.DESCRIBE_PRODUCERS, 0, "TopicRequest", **fields),)}


def _describe_configs(kind: int) -> Callable[[str], dict[str, Any]]:
    def fields(topic: str) -> dict[str, Any]:
        resource = part(
            Api.DESCRIBE_CONFIGS,
            4,
            "DescribeConfigsResource",
            resource_type=kind,
            resource_name=topic if kind == 2 else "",
            configuration_keys=None,
        )
        flags = {"include_synonyms": False, "include_documentation": False}
        return {"resources": (resource,), **flags}

    return fields


def _alter_configs(api: Api, version: int, kind: int) -> Callable[[str], dict[str, Any]]:
    def fields(topic: str) -> dict[str, Any]:
        entry = part(api, version, "AlterableConfig", name="x", value="1", config_operation=0)
        named = {"resource_type": kind, "resource_name": topic if kind == 2 else ""}
        resource = part(api, version, "AlterConfigsResource", configs=(entry,), **named)
        return {"resources": (resource,), "validate_only": True}

    return fields


def _markers(topic: str) -> dict[str, Any]:
    api = Api.WRITE_TXN_MARKERS
    named = {"name": topic, "partition_indexes": (0,)}
    topics = (part(api, 1, "WritableTxnMarkerTopic", **named),)
    facts = {"producer_id": 7, "producer_epoch": 0, "transaction_result": True}
    marker = part(api, 1, "WritableTxnMarker", topics=topics, coordinator_epoch=0, **facts)
    return {"markers": (marker,)}


def _coordinator(kind: int) -> Callable[[str], dict[str, Any]]:
    return lambda topic: {"key_type": kind, "coordinator_keys": (topic,)}


def producer_id(transactional_id: str | None) -> Callable[[str], dict[str, Any]]:
    """Return the fields of InitProducerId."""
    fixed = {"transaction_timeout": MINUTE, "producer_id": -1, "producer_epoch": -1}
    return lambda _: {"transactional_id": transactional_id, **fixed}


def acl_filter() -> dict[str, Any]:
    """Return the fields of a filter that matches every ACL."""
    any_one = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1}
    none = {"resource_name_filter": None, "principal_filter": None, "host_filter": None}
    return {**any_one, **none, "permission_type": 1}


def create_acls(topic: str) -> dict[str, Any]:
    """Return the fields of CreateAcls."""
    acl = part(
        Api.CREATE_ACLS,
        3,
        "AclCreation",
        resource_type=2,
        resource_name=topic,
        resource_pattern_type=3,
        principal="User:nothing",
        host="*",
        operation=3,
        permission_type=3,
    )
    return {"creations": (acl,)}


def _delete_acls(_: str) -> dict[str, Any]:
    fields = {**acl_filter(), "principal_filter": "User:nothing"}
    return {"filters": (part(Api.DELETE_ACLS, 3, "DeleteAclsFilter", **fields),)}


def _alter_users(topic: str) -> dict[str, Any]:
    api, named = Api.ALTER_USER_SCRAM_CREDENTIALS, {"name": topic, "mechanism": 1}
    return {"deletions": (part(api, 0, "ScramCredentialDeletion", **named),), "upsertions": ()}


def _alter_quotas(topic: str) -> dict[str, Any]:
    api = Api.ALTER_CLIENT_QUOTAS
    who = (part(api, 1, "EntityData", entity_type="user", entity_name=topic),)
    change = (part(api, 1, "OpData", key="producer_byte_rate", value=1.0, remove=False),)
    entry = part(api, 1, "EntryData", entity=who, ops=change)
    return {"entries": (entry,), "validate_only": True}


MEMBER: Final = {
    "group_id": "theirs",
    "member_id": "m",
    "group_instance_id": None,
    "protocol_type": "consumer",
    "protocol_name": "range",
    "generation_id": 1,
}


def _join(_: str) -> dict[str, Any]:
    protocol = part(Api.JOIN_GROUP, 7, "JoinGroupRequestProtocol", name="range", metadata=b"")
    return {
        **MEMBER,
        "session_timeout": timedelta(seconds=10),
        "rebalance_timeout": timedelta(seconds=10),
        "protocols": (protocol,),
    }


def _leave(_: str) -> dict[str, Any]:
    member = part(Api.LEAVE_GROUP, 4, "MemberIdentity", **MEMBER)
    return {"group_id": "theirs", "members": (member,)}


def commit(api: Api, version: int, prefix: str) -> Callable[[str], dict[str, Any]]:
    """Return the fields of OffsetCommit or TxnOffsetCommit."""

    def fields(topic: str) -> dict[str, Any]:
        partition = part(
            api,
            version,
            f"{prefix}RequestPartition",
            partition_index=0,
            committed_offset=1,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
        topics = (part(api, version, f"{prefix}RequestTopic", name=topic, partitions=(partition,)),)
        ids = {"transactional_id": "mine", "producer_id": 7, "producer_epoch": 0}
        return {**MEMBER, **ids, "generation_id_or_member_epoch": -1, "topics": topics}

    return fields


def _offset_fetch(topic: str) -> dict[str, Any]:
    api, named = Api.OFFSET_FETCH, {"name": topic, "partition_indexes": (0,)}
    topics = (part(api, 8, "OffsetFetchRequestTopics", **named),)
    group = part(api, 8, "OffsetFetchRequestGroup", group_id="theirs", topics=topics)
    return {"groups": (group,), "require_stable": False}


def _offset_delete(topic: str) -> dict[str, Any]:
    api = Api.OFFSET_DELETE
    partition = part(api, 0, "OffsetDeleteRequestPartition", partition_index=0)
    named = {"name": topic, "partitions": (partition,)}
    topics = (part(api, 0, "OffsetDeleteRequestTopic", **named),)
    return {"group_id": "theirs", "topics": topics}


def _add_partitions(topic: str) -> dict[str, Any]:
    api, named = Api.ADD_PARTITIONS_TO_TXN, {"name": topic, "partitions": (0,)}
    return {
        "v3_and_below_transactional_id": "mine",
        "v3_and_below_producer_id": 7,
        "v3_and_below_producer_epoch": 0,
        "v3_and_below_topics": (part(api, 3, "AddPartitionsToTxnTopic", **named),),
    }


def _transaction(_: str) -> dict[str, Any]:
    ids = {"transactional_id": "mine", "producer_id": 7, "producer_epoch": 0}
    return {**ids, "committed": True, "group_id": "theirs"}


def _heartbeat_848(topic: str) -> dict[str, Any]:
    return {
        **MEMBER,
        "member_epoch": 0,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": timedelta(seconds=10),
        "subscribed_topic_names": (topic,),
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": (),
    }


FILTERED: Final = {Api.LIST_GROUPS, Api.LIST_TRANSACTIONS}
"""Their responses leave out what the client may not see."""

REQUESTS: Final[list[tuple[Api, int, Callable[[str], dict[str, Any]], ErrorCode]]] = [
    (Api.PRODUCE, 9, produce, TOPIC_DENIED),
    (Api.FETCH, 12, fetch, TOPIC_DENIED),
    (Api.LIST_OFFSETS, 7, _list_offsets, TOPIC_DENIED),
    (Api.METADATA, 12, metadata, TOPIC_DENIED),
    (Api.FIND_COORDINATOR, 6, _coordinator(0), GROUP_DENIED),
    (Api.FIND_COORDINATOR, 6, _coordinator(1), ID_DENIED),
    (Api.CREATE_TOPICS, 7, _create_topics, TOPIC_DENIED),
    (Api.DELETE_TOPICS, 6, _delete_topics, TOPIC_DENIED),
    (Api.DELETE_RECORDS, 2, _delete_records, TOPIC_DENIED),
    (Api.INIT_PRODUCER_ID, 4, producer_id(None), CLUSTER_DENIED),
    (Api.INIT_PRODUCER_ID, 4, producer_id("mine"), ID_DENIED),
    (Api.OFFSET_FOR_LEADER_EPOCH, 4, _epoch, TOPIC_DENIED),
    (Api.WRITE_TXN_MARKERS, 1, _markers, CLUSTER_DENIED),
    (Api.DESCRIBE_ACLS, 3, lambda _: acl_filter(), CLUSTER_DENIED),
    (Api.CREATE_ACLS, 3, create_acls, CLUSTER_DENIED),
    (Api.DELETE_ACLS, 3, _delete_acls, CLUSTER_DENIED),
    (Api.DESCRIBE_CONFIGS, 4, _describe_configs(2), TOPIC_DENIED),
    (Api.DESCRIBE_CONFIGS, 4, _describe_configs(4), CLUSTER_DENIED),
    (Api.ALTER_CONFIGS, 2, _alter_configs(Api.ALTER_CONFIGS, 2, 2), TOPIC_DENIED),
    (Api.ALTER_CONFIGS, 2, _alter_configs(Api.ALTER_CONFIGS, 2, 4), CLUSTER_DENIED),
    (
        Api.INCREMENTAL_ALTER_CONFIGS,
        1,
        _alter_configs(Api.INCREMENTAL_ALTER_CONFIGS, 1, 2),
        TOPIC_DENIED,
    ),
    (Api.CREATE_PARTITIONS, 3, _create_partitions, TOPIC_DENIED),
    (Api.ALTER_REPLICA_LOG_DIRS, 2, _alter_dirs, CLUSTER_DENIED),
    (Api.DESCRIBE_LOG_DIRS, 4, lambda _: {"topics": None}, CLUSTER_DENIED),
    (Api.ALTER_PARTITION_REASSIGNMENTS, 0, _reassign, CLUSTER_DENIED),
    (
        Api.LIST_PARTITION_REASSIGNMENTS,
        0,
        lambda _: {"topics": None, "timeout": MINUTE},
        CLUSTER_DENIED,
    ),
    (
        Api.DESCRIBE_CLIENT_QUOTAS,
        1,
        lambda _: {"components": (), "strict": False},
        CLUSTER_DENIED,
    ),
    (Api.ALTER_CLIENT_QUOTAS, 1, _alter_quotas, CLUSTER_DENIED),
    (Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, lambda _: {"users": None}, CLUSTER_DENIED),
    (Api.ALTER_USER_SCRAM_CREDENTIALS, 0, _alter_users, CLUSTER_DENIED),
    (Api.DESCRIBE_PRODUCERS, 0, _describe_producers, TOPIC_DENIED),
    (Api.JOIN_GROUP, 7, _join, GROUP_DENIED),
    (Api.SYNC_GROUP, 5, lambda _: {**MEMBER, "assignments": ()}, GROUP_DENIED),
    (Api.HEARTBEAT, 4, lambda _: MEMBER, GROUP_DENIED),
    (Api.LEAVE_GROUP, 4, _leave, GROUP_DENIED),
    (
        Api.DESCRIBE_GROUPS,
        5,
        lambda _: {"groups": ("theirs",), "include_authorized_operations": True},
        GROUP_DENIED,
    ),
    (Api.DELETE_GROUPS, 2, lambda _: {"groups_names": ("theirs",)}, GROUP_DENIED),
    (Api.OFFSET_COMMIT, 8, commit(Api.OFFSET_COMMIT, 8, "OffsetCommit"), GROUP_DENIED),
    (Api.OFFSET_FETCH, 8, _offset_fetch, GROUP_DENIED),
    (Api.OFFSET_DELETE, 0, _offset_delete, GROUP_DENIED),
    (Api.CONSUMER_GROUP_HEARTBEAT, 0, _heartbeat_848, GROUP_DENIED),
    (
        Api.CONSUMER_GROUP_DESCRIBE,
        0,
        lambda _: {"group_ids": ("theirs",), "include_authorized_operations": True},
        GROUP_DENIED,
    ),
    (Api.ADD_PARTITIONS_TO_TXN, 3, _add_partitions, ID_DENIED),
    (Api.ADD_OFFSETS_TO_TXN, 3, _transaction, ID_DENIED),
    (Api.END_TXN, 3, _transaction, ID_DENIED),
    (Api.TXN_OFFSET_COMMIT, 3, commit(Api.TXN_OFFSET_COMMIT, 3, "TxnOffsetCommit"), ID_DENIED),
    (
        Api.DESCRIBE_TRANSACTIONS,
        0,
        lambda _: {"transactional_ids": ("another",)},
        ID_DENIED,
    ),
]
