"""Goal: requests that are refused have the responses of Apache Kafka.

Method: as in `test_differential`.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.fuzz.dictionary import sealed
from kit.judges.coordinator_requests import Api as Coordinated
from kit.judges.coordinator_requests import (
    create,
    has_coordinators,
    produce,
    until_known,
)
from kit.judges.differential import check_same
from kit.judges.partition_client import data_batch
from logmirror.broker.apis import Api
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.judges.conversation import Conversation
    from kit.servers.embedded import EmbeddedBroker
    from kit.servers.kafka import ApacheKafka

# ---- Topics --------------------------------------------------------------------------------------


def refused_topics(talk: Conversation) -> None:
    topic = create(talk, "there")

    def ask(label: str, *topics: dict[str, Any]) -> None:
        usual = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        wanted = [usual | {"name": talk.name("new")} | changed for changed in topics]
        fields = {"timeout": 30_000, "validate_only": True}
        talk.ask(label, Api.CREATE_TOPICS, 4, topics=wanted, **fields)

    def assigned(*partitions: tuple[int, list[int]]) -> dict[str, Any]:
        given = [{"partition_index": n, "broker_ids": ids} for n, ids in partitions]
        return {"num_partitions": -1, "replication_factor": -1, "assignments": given}

    ask("exists", {"name": topic})
    ask("twice", {}, {})
    ask("no replicas", {"replication_factor": 0})
    ask("negative partitions", {"num_partitions": -2})
    ask("assigned", assigned((0, [1])))
    ask("assigned and counted", assigned((0, [1])) | {"num_partitions": 1})
    ask("not from 0", assigned((1, [1])))
    ask("a partition twice", assigned((0, [1]), (0, [1])))
    ask("unknown broker", assigned((0, [7])))
    ask("a broker twice", assigned((0, [1, 1])))
    ask("no broker", assigned((0, [])))
    ask("empty name", {"name": ""})
    ask("a colon", {"name": "a:b"})
    ask("one dot", {"name": "."})


def grown_topics(talk: Conversation) -> None:
    topic = create(talk, "grown", partitions=2)

    def ask(label: str, name: str, count: int, assignments: Any = None, *, times: int = 1) -> None:
        given = None if assignments is None else [{"broker_ids": ids} for ids in assignments]
        wanted = {"name": name, "count": count, "assignments": given}
        fields = {"timeout": 30_000, "validate_only": True}
        talk.ask(label, Api.CREATE_PARTITIONS, 3, topics=[wanted] * times, **fields)

    ask("fits", topic, 3)
    ask("as many", topic, 2)
    ask("fewer", topic, 1)
    ask("none", topic, 0)
    ask("negative", topic, -1)
    ask("unknown", talk.name("none"), 3)
    ask("empty name", "", 3)
    ask("twice", topic, 3, times=2)
    ask("assigned", topic, 3, [[1]])
    ask("too few assigned", topic, 4, [[1]])
    ask("too many assigned", topic, 3, [[1], [1]])
    ask("unknown broker", topic, 3, [[7]])
    ask("a broker twice", topic, 3, [[1, 1]])
    ask("no broker", topic, 3, [[]])


def deleted_topics_and_records(talk: Conversation) -> None:
    topic = create(talk, "deleted", partitions=2)
    produce(talk, "written", topic, data_batch(5))

    def ask(label: str, name: str, index: int, offset: int) -> None:
        partition = {"partition_index": index, "offset": offset}
        wanted = [{"name": name, "partitions": [partition]}]
        talk.ask(label, Api.DELETE_RECORDS, 2, topics=wanted, timeout=30_000)

    ask("beyond the end", topic, 0, 6)
    ask("negative", topic, 0, -2)
    ask("unknown partition", topic, 7, 0)
    ask("unknown topic", talk.name("none"), 0, 0)
    ask("to 3", topic, 0, 3)
    ask("to 1", topic, 0, 1)
    ask("to the end", topic, 0, -1)
    ask("of nothing", topic, 1, -1)
    compacted = create(talk, "compacted", cleanup_policy="compact")
    ask("of a compacted topic", compacted, 0, 0)
    by_id = {"name": None, "topic_id": uuid.UUID(int=77)}
    talk.ask("unknown ID", Api.DELETE_TOPICS, 6, topics=[by_id], timeout=30_000)
    unknown = {"name": talk.name("none"), "topic_id": None}
    talk.ask("unknown name", Api.DELETE_TOPICS, 6, topics=[unknown], timeout=30_000)
    names = [talk.name("none"), ""]
    talk.ask("unknown names", Api.DELETE_TOPICS, 5, topic_names=names, timeout=30_000)


def metadata_of_what_is_not_there(talk: Conversation) -> None:
    topic = create(talk, "known")

    def ask(label: str, version: int, *topics: tuple[str | None, int]) -> None:
        wanted = [
            {"name": name, "topic_id": uuid.UUID(int=number) if number else None}
            for name, number in topics
        ]
        fields: dict[str, Any] = {"allow_auto_topic_creation": False}
        fields |= {"include_cluster_authorized_operations": False}
        fields |= {"include_topic_authorized_operations": False}
        talk.ask(label, Api.METADATA, version, topics=wanted, **fields)
        for name in ("brokers", "cluster_id", "controller_id"):
            talk.heard[-1][1].pop(name, None)

    ask("known", 9, (topic, 0))
    ask("unknown", 9, (talk.name("none"), 0))
    ask("bad names", 9, ("", 0), ("a/b", 0), ("..", 0), ("x" * 250, 0))
    ask("unknown ID", 12, (None, 77))
    ask("by ID in version 10", 10, (None, 77))
    ask("by name and ID in version 11", 11, (topic, 77))
    ask("without both", 12, (None, 0))


# ---- Records -------------------------------------------------------------------------------------


def refused_batches(talk: Conversation) -> None:
    topic = create(talk, "strict", max_message_bytes="500")
    compacted = create(talk, "keyed", cleanup_policy="compact")
    good = data_batch(2)
    keyless = encode_reference([Record(0, 1, 0, None, b"v", ())])
    produce(talk, "unknown topic", talk.name("none"), good)
    produce(talk, "too large", topic, encode_reference([Record(0, 1, 0, None, bytes(900), ())]))
    produce(talk, "checksum", topic, good[:-1] + b"\xff")
    produce(talk, "cut off", topic, good[:-1])
    produce(talk, "magic 1", topic, good[:16] + b"\1" + good[17:])
    produce(talk, "without a key", compacted, keyless)
    produce(talk, "unknown codec", topic, _with_codec(good, 5))
    produce(
        talk, "transactional", topic, data_batch(1, producer_id=5, sequence=0, transactional=True)
    )
    for codec in Codec:
        produce(talk, f"fits, {codec.name}", topic, data_batch(2, codec=codec))
    _produce(talk, "unknown partition", topic, index=7)
    _produce(talk, "negative partition", topic, index=-1)
    _produce(talk, "acks", topic, acks=2)


def _with_codec(batch: bytes, codec: int) -> bytes:
    return sealed(batch[:21] + codec.to_bytes(2) + batch[23:])


def _produce(talk: Conversation, label: str, topic: str, *, index: int = 0, acks: int = -1) -> None:
    data = {"index": index, "records": data_batch(2)}
    fields = {"transactional_id": None, "acks": acks, "timeout": 30_000}
    wanted = [{"name": topic, "partition_data": [data]}]
    talk.ask(label, Coordinated.PRODUCE, 9, topic_data=wanted, **fields)


def refused_fetches(talk: Conversation) -> None:
    topic = create(talk, "fetched")
    produce(talk, "written", topic, data_batch(3))

    def ask(label: str, name: str = topic, version: int = 12, **changed: Any) -> None:
        partition = {
            "partition": 0,
            "current_leader_epoch": -1,
            "fetch_offset": 0,
            "last_fetched_epoch": -1,
            "log_start_offset": -1,
            "partition_max_bytes": 1_000_000,
            "replica_directory_id": uuid.UUID(int=0),
        }
        wanted = {"topic": name, "topic_id": uuid.UUID(int=77)}
        wanted |= {"partitions": [partition | changed]}
        fields: dict[str, Any] = {
            "replica_id": -1,
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": 1_000_000,
            "isolation_level": 0,
            "session_id": 0,
            "session_epoch": -1,
            "forgotten_topics_data": [],
            "rack_id": "",
        }
        fields |= {key: value for key, value in changed.items() if key in fields}
        talk.ask(label, Api.FETCH, version, topics=[wanted], **fields)

    ask("fits")
    ask("at the end", fetch_offset=3)
    ask("beyond the end", fetch_offset=4)
    ask("negative", fetch_offset=-1)
    ask("very negative", fetch_offset=-(2**63))
    ask("unknown topic", talk.name("none"))
    ask("unknown ID", version=13)
    ask("unknown partition", partition=7)
    ask("negative partition", partition=-1)
    ask("later epoch", current_leader_epoch=1)
    ask("unknown session", session_id=77, session_epoch=3)
    ask("isolation level", isolation_level=1)
    ask("no bytes", partition_max_bytes=0, max_bytes=0)


def refused_positions(talk: Conversation) -> None:
    topic = create(talk, "positions")
    produce(talk, "written", topic, data_batch(3))

    def ask(label: str, name: str = topic, **changed: Any) -> None:
        partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
        wanted = [{"name": name, "partitions": [partition | changed]}]
        fields = {"replica_id": -1, "isolation_level": 0}
        talk.ask(label, Api.LIST_OFFSETS, 7, topics=wanted, **fields)

    ask("unknown partition", partition_index=7)
    ask("later epoch", current_leader_epoch=1)
    ask("epoch", current_leader_epoch=0)
    ask("no such time", timestamp=-9)
    ask("unknown topic", talk.name("none"))

    def epoch(label: str, name: str = topic, **changed: Any) -> None:
        partition = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
        wanted = [{"topic": name, "partitions": [partition | changed]}]
        talk.ask(label, Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=wanted)

    epoch("end of the epoch")
    epoch("end of a later epoch", leader_epoch=5)
    epoch("end of a negative epoch", leader_epoch=-1)
    epoch("end, with a later epoch", current_leader_epoch=1)
    epoch("end of an unknown partition", partition=7)
    epoch("end of an unknown topic", talk.name("none"))


# ---- Groups, producers, users, quotas ------------------------------------------------------------


def groups_without_a_name(talk: Conversation) -> None:
    member = {"group_id": "", "member_id": "m", "group_instance_id": None}
    talk.ask("heartbeat", Api.HEARTBEAT, 4, generation_id=1, **member)
    kind = {"protocol_type": "consumer", "protocol_name": "range"}
    talk.ask("sync", Api.SYNC_GROUP, 5, generation_id=1, assignments=[], **kind, **member)
    who = {"member_id": "m", "group_instance_id": None, "reason": None}
    talk.ask("leave", Api.LEAVE_GROUP, 5, group_id="", members=[who])
    talk.ask("delete", Api.DELETE_GROUPS, 2, groups_names=["", talk.name("none")])
    flags = {"include_authorized_operations": False}
    talk.ask("describe", Api.DESCRIBE_GROUPS, 5, groups=[""], **flags)
    topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
    talk.ask("offsets", Api.OFFSET_DELETE, 0, group_id="", topics=topics)
    group = [{"group_id": "", "topics": None}]
    talk.ask("fetch offsets", Api.OFFSET_FETCH, 8, groups=group, require_stable=False)


def refused_producers(talk: Conversation) -> None:
    def ask(label: str, **changed: Any) -> None:
        fields = {"transactional_id": None, "transaction_timeout": 60_000}
        fields |= {"producer_id": -1, "producer_epoch": -1}
        talk.ask(label, Api.INIT_PRODUCER_ID, 4, **(fields | changed))

    name = talk.name("id")
    ask("an ID without an epoch", transactional_id=name, producer_id=5)
    ask("an epoch without an ID", transactional_id=name, producer_epoch=5)
    ask("unknown ID", transactional_id=talk.name("other"), producer_id=5, producer_epoch=0)
    ask("negative timeout", transactional_id=name, transaction_timeout=-1)
    topics = [{"name": talk.name("none"), "partition_indexes": [0]}]
    talk.ask("producers of no topic", Api.DESCRIBE_PRODUCERS, 0, topics=topics)
    own = {"transactional_id": "", "producer_id": 5, "producer_epoch": 0}
    talk.ask("end without an ID", Api.END_TXN, 3, committed=True, **own)
    ids = {f"v3_and_below_{key}": value for key, value in own.items()}
    topics = [{"name": create(talk, "added"), "partitions": [0]}]
    wanted = {"v3_and_below_topics": topics}
    talk.ask("add without an ID", Api.ADD_PARTITIONS_TO_TXN, 3, **ids, **wanted)


def quotas(talk: Conversation) -> None:
    user = {"entity_type": "user", "entity_name": talk.name("user")}

    def alter(label: str, named: list[dict[str, Any]], **values: float) -> None:
        changes = [{"key": k, "value": v, "remove": v == 0.25} for k, v in values.items()]
        entry = {"entity": named, "ops": changes}
        talk.ask(label, Api.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=True)

    def describe(label: str, *parts: tuple[str, int, str | None]) -> None:
        components = [{"entity_type": t, "match_type": m, "match": n} for t, m, n in parts]
        talk.ask(label, Api.DESCRIBE_CLIENT_QUOTAS, 1, components=components, strict=True)

    alter("fits", [user], producer_byte_rate=1.0, request_percentage=0.5)
    alter("zero", [user], producer_byte_rate=0.0)
    alter("negative", [user], consumer_byte_rate=-1.0)
    alter("half a byte", [user], consumer_byte_rate=1.5)
    alter("unknown key", [user], bytes=1.0)
    alter("a key of addresses", [user], connection_creation_rate=1.0)
    alter("removed", [user], producer_byte_rate=0.25)
    alter("no entity", [])
    alter("unknown type", [{"entity_type": "group", "entity_name": "g"}], producer_byte_rate=1.0)
    alter("empty name", [{"entity_type": "user", "entity_name": ""}], producer_byte_rate=1.0)
    address = {"entity_type": "ip", "entity_name": "10.0.0.1"}
    alter("address", [address], connection_creation_rate=5.0)
    alter("a key of users", [address], producer_byte_rate=1.0)
    alter("address and user", [address, user], producer_byte_rate=1.0)
    describe("none", ("user", 0, talk.name("user")))
    describe("any", ("ip", 2, None))
    describe("exact null", ("user", 0, None))
    describe("default with a name", ("user", 1, "x"))
    describe("any with a name", ("user", 2, "x"))
    describe("unknown match", ("user", 3, None))
    describe("no type", ("", 2, None))
    describe("unknown filter", ("group", 2, None))
    describe("a type twice", ("user", 2, None), ("user", 2, None))
    describe("address with a user", ("user", 2, None), ("ip", 2, None))


def users(talk: Conversation) -> None:
    name = talk.name("user")

    def alter(label: str, deletions: list[Any] = [], upsertions: list[Any] = []) -> None:  # noqa: B006  # read only
        fields = {"deletions": deletions, "upsertions": upsertions}
        talk.ask(label, Api.ALTER_USER_SCRAM_CREDENTIALS, 0, **fields)

    new = {"name": name, "mechanism": 1, "iterations": 4096, "salt": b"salt"}
    new |= {"salted_password": bytes(32)}
    alter("deletion of no user", [{"name": name, "mechanism": 1}])
    alter("unknown mechanism", [{"name": name, "mechanism": 7}])
    alter("few iterations", [], [new | {"iterations": 4095}])
    alter("many iterations", [], [new | {"iterations": 16_385}])
    alter("no name", [], [new | {"name": ""}])
    alter("twice", [], [new, new])
    describe = Api.DESCRIBE_USER_SCRAM_CREDENTIALS
    talk.ask("describe no user", describe, 0, users=[{"name": name}])
    talk.ask("describe one twice", describe, 0, users=[{"name": name}] * 2)
    every = {"resource_type_filter": 2, "resource_name_filter": None, "pattern_type_filter": 3}
    every |= {"principal_filter": None, "host_filter": None, "operation": 2, "permission_type": 3}
    talk.ask("ACLs", Api.DESCRIBE_ACLS, 3, **every)


def reassignments(talk: Conversation) -> None:
    topic = create(talk, "assigned", partitions=2)

    def ask(label: str, name: str, index: int, replicas: list[int] | None) -> None:
        wanted = [{"partition_index": index, "replicas": replicas}]
        topics = [{"name": name, "partitions": wanted}]
        talk.ask(label, Api.ALTER_PARTITION_REASSIGNMENTS, 0, topics=topics, timeout=30_000)

    ask("the replica that there is", topic, 0, [1])
    ask("cancel", topic, 0, None)
    ask("another broker", topic, 0, [7])
    ask("one more broker", topic, 0, [1, 7])
    ask("no broker", topic, 0, [])
    ask("a broker twice", topic, 0, [1, 1])
    ask("a negative broker", topic, 0, [-1])
    ask("unknown partition", topic, 2, [1])
    ask("unknown topic", talk.name("none"), 0, [1])
    for label, topics in (("all", None), ("one", [{"name": topic, "partition_indexes": [0]}])):
        talk.ask(label, Api.LIST_PARTITION_REASSIGNMENTS, 0, topics=topics, timeout=30_000)


def versions_and_cluster(talk: Conversation) -> None:
    for label, name in (("no name", ""), ("spaces", "a b"), ("a dash at the end", "a-")):
        fields = {"client_software_name": name, "client_software_version": "1"}
        talk.ask(label, Api.API_VERSIONS, 3, **fields)
        for part in ("api_keys", "supported_features", "finalized_features"):
            talk.heard[-1][1].pop(part, None)
        talk.heard[-1][1].pop("finalized_features_epoch", None)
    for endpoint in (2, 7):
        fields = {"include_cluster_authorized_operations": False, "endpoint_type": endpoint}
        talk.ask(f"endpoint {endpoint}", Api.DESCRIBE_CLUSTER, 1, **fields)
        talk.heard[-1][1].pop("cluster_id")
        talk.heard[-1][1].pop("controller_id")


SCENARIOS: Final = [
    refused_topics,
    grown_topics,
    deleted_topics_and_records,
    metadata_of_what_is_not_there,
    refused_batches,
    refused_fetches,
    refused_positions,
    groups_without_a_name,
    refused_producers,
    quotas,
    users,
    reassignments,
    versions_and_cluster,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_responses_are_those_of_apache_kafka(
    scenario: Callable[[Conversation], None],
    embedded: EmbeddedBroker,
    kafka_392: ApacheKafka,
    kafka_431: ApacheKafka,
    topic_name: str,
) -> None:
    brokers = embedded, kafka_392, kafka_431
    check_same(
        scenario,
        brokers,
        topic_name,
        ready=lambda talk: until_known(lambda: has_coordinators(talk), talk),
    )
