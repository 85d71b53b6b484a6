"""Goal: every advertised version of every API is implemented, in the layout of that version.

Method: kio, an independent codec, writes the requests and reads the responses to their last byte.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.raw_client import RawClient, build, nested, read_response, request_frame
from logmirror.broker.apis import ADVERTISED_FROM, VERSIONS, Api
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker

MINUTE = timedelta(minutes=1)


def _versions(api: Api) -> range:
    first, last = VERSIONS[api]
    return range(first, last + 1)


@pytest.fixture
def client(embedded: EmbeddedBroker) -> Iterator[RawClient]:
    with RawClient(embedded.port) as client:
        yield client


def _entity(api: Api, version: int, entity: str, /, **fields: object) -> Any:
    return build(nested(api, version, "request", entity), **fields)


def _create(client: RawClient, name: str, partitions: int = 2) -> uuid.UUID:
    topic = _entity(
        Api.CREATE_TOPICS,
        7,
        "CreatableTopic",
        name=name,
        num_partitions=partitions,
        replication_factor=1,
        assignments=(),
        configs=(),
    )
    response = client.ask(
        Api.CREATE_TOPICS, 7, topics=(topic,), timeout=MINUTE, validate_only=False
    )
    assert response.topics[0].error_code == ErrorCode.none
    found = response.topics[0].topic_id
    assert isinstance(found, uuid.UUID)
    return found


def _produce(client: RawClient, name: str, version: int = 9, *, partition: int = 0) -> Any:
    batch = encode_reference([Record(n, 5000 + n, 0, b"k", b"v%d" % n, ()) for n in range(3)])
    data = _entity(Api.PRODUCE, version, "PartitionProduceData", index=partition, records=batch)
    topic = _entity(Api.PRODUCE, version, "TopicProduceData", name=name, partition_data=(data,))
    fields = {"transactional_id": None, "acks": -1, "timeout": MINUTE, "topic_data": (topic,)}
    return client.ask(Api.PRODUCE, version, **fields)


@pytest.mark.parametrize("version", range(-1, 8))
def test_api_versions_always_has_a_response(client, version):
    known = 0 <= version <= 4
    layout = version if known else 0
    fields = {"client_software_name": "test", "client_software_version": "1"}
    request = build(
        nested(Api.API_VERSIONS, max(0, min(version, 4)), "request", "ApiVersionsRequest"), **fields
    )
    client.send_frame(request_frame(Api.API_VERSIONS, version, request))

    _, response = read_response(Api.API_VERSIONS, layout, client.receive_frame())

    assert response.error_code == (ErrorCode.none if known else ErrorCode.unsupported_version)
    found = {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}
    assert found == {
        key: (ADVERTISED_FROM.get(key, first), last) for key, (first, last) in VERSIONS.items()
    }
    assert found[Api.PRODUCE] == (0, 12)
    features = [(f.name, f.max_version_level) for f in getattr(response, "finalized_features", ())]
    assert features == ([("transaction.version", 2)] if layout >= 3 else [])


@pytest.mark.parametrize("version", _versions(Api.METADATA))
def test_metadata(client, topic_name, version, embedded):
    topic_id = _create(client, topic_name)
    topic = _entity(Api.METADATA, version, "MetadataRequestTopic", name=topic_name, topic_id=None)

    response = client.ask(
        Api.METADATA,
        version,
        topics=(topic,),
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )

    [broker] = response.brokers
    assert (broker.node_id, broker.host, broker.port) == (1, "127.0.0.1", embedded.port)
    [found] = response.topics
    assert (found.name, found.error_code) == (topic_name, ErrorCode.none)
    assert [(p.partition_index, p.leader_id) for p in found.partitions] == [(0, 1), (1, 1)]
    if version >= 2:
        assert len(response.cluster_id) == 22
    if version >= 10:
        assert found.topic_id == topic_id


@pytest.mark.parametrize("version", _versions(Api.METADATA))
def test_metadata_of_all_topics(client, topic_name, version):
    _create(client, topic_name)

    response = client.ask(
        Api.METADATA,
        version,
        topics=() if version == 0 else None,
        allow_auto_topic_creation=True,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )

    assert topic_name in [topic.name for topic in response.topics]


@pytest.mark.parametrize("name", [None, "", "another"])
def test_metadata_by_id(client, topic_name, name):
    """Java clients send an empty name beside it. As in Apache Kafka, no name beside it counts."""
    topic_id = _create(client, topic_name)

    def ask(wanted: uuid.UUID) -> Any:
        topic = _entity(Api.METADATA, 12, "MetadataRequestTopic", name=name, topic_id=wanted)
        fields = {"include_topic_authorized_operations": False}
        return client.ask(Api.METADATA, 12, topics=(topic,), **fields).topics[0]

    assert ask(topic_id).name == topic_name
    assert ask(uuid.UUID(int=99)).error_code == ErrorCode.unknown_topic_id


@pytest.mark.parametrize("version", _versions(Api.PRODUCE))
def test_produce(client, topic_name, version):
    _create(client, topic_name)

    offsets = []
    for _ in range(2):
        response = _produce(client, topic_name, version)
        [partition] = response.responses[0].partition_responses
        assert partition.error_code == ErrorCode.none
        offsets.append(partition.base_offset)

    assert offsets == [0, 3]


@pytest.mark.parametrize("version", _versions(Api.FETCH))
def test_fetch(client, topic_name, version):
    topic_id = _create(client, topic_name)
    _produce(client, topic_name)
    _produce(client, topic_name, partition=1)

    response = _fetch(client, version, topic_name, topic_id, {0: 0, 1: 3})

    full, empty = response.responses[0].partitions
    assert [(p.error_code, p.high_watermark) for p in (full, empty)] == [(ErrorCode.none, 3)] * 2
    assert [record.value for record in decode_reference(full.records)] == [b"v0", b"v1", b"v2"]
    assert not empty.records


def _fetch(
    client: RawClient,
    version: int,
    name: str,
    topic_id: uuid.UUID,
    offsets: dict[int, int],
    **fields: Any,
) -> Any:
    partitions = tuple(
        _entity(
            Api.FETCH,
            version,
            "FetchPartition",
            partition=partition,
            current_leader_epoch=fields.get("leader_epoch", -1),
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=fields.get("partition_max_bytes", 1_000_000),
        )
        for partition, offset in offsets.items()
    )
    topic = _entity(
        Api.FETCH, version, "FetchTopic", topic=name, topic_id=topic_id, partitions=partitions
    )
    return client.ask(
        Api.FETCH,
        version,
        replica_id=-1,
        max_wait=timedelta(milliseconds=fields.get("max_wait_ms", 0)),
        min_bytes=fields.get("min_bytes", 0),
        max_bytes=fields.get("max_bytes", 1_000_000),
        isolation_level=0,
        session_id=fields.get("session_id", 0),
        session_epoch=fields.get("session_epoch", -1),
        topics=(topic,),
        forgotten_topics_data=(),
        rack_id="",
    )


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"offsets": {0: 4}}, ErrorCode.offset_out_of_range),
        ({"offsets": {0: -1}}, ErrorCode.offset_out_of_range),
        ({"offsets": {0: 2**63 - 1}}, ErrorCode.offset_out_of_range),
        ({"offsets": {2: 0}}, ErrorCode.unknown_topic_or_partition),
        ({"offsets": {-1: 0}}, ErrorCode.unknown_topic_or_partition),
        ({"name": "unknown"}, ErrorCode.unknown_topic_or_partition),
        ({"leader_epoch": 1}, ErrorCode.unknown_leader_epoch),
        ({"version": 13, "topic_id": uuid.UUID(int=9)}, ErrorCode.unknown_topic_id),
    ],
)
def test_a_fetch_with_an_error_is_responded_at_once(client, topic_name, wrong, code):
    topic_id = _create(client, topic_name)
    _produce(client, topic_name)
    asked = {
        "version": 12,
        "name": topic_name,
        "topic_id": topic_id,
        "offsets": {0: 0},
        "max_wait_ms": 20_000,
        "min_bytes": 10_000,
        **wrong,
    }

    response = _fetch(client, **asked)

    assert response.responses[0].partitions[0].error_code == code


def test_a_fetch_session_is_refused_and_a_full_fetch_has_none(client, topic_name):
    topic_id = _create(client, topic_name)

    response = _fetch(client, 12, topic_name, topic_id, {0: 0}, session_id=5, session_epoch=3)
    assert response.error_code == ErrorCode.fetch_session_id_not_found
    response = _fetch(client, 12, topic_name, topic_id, {0: 0}, session_id=0, session_epoch=0)
    assert (response.error_code, response.session_id) == (ErrorCode.none, 0)


@pytest.mark.parametrize(
    ("max_bytes", "partition_max_bytes"), [(1, 10**6), (10**6, 1), (0, 0), (-5, -5)]
)
def test_limits_too_small_for_a_batch_still_give_one(
    client, topic_name, max_bytes, partition_max_bytes
):
    topic_id = _create(client, topic_name)
    for _ in range(2):
        _produce(client, topic_name)
        _produce(client, topic_name, partition=1)

    response = _fetch(
        client,
        12,
        topic_name,
        topic_id,
        {0: 0, 1: 0},
        max_bytes=max_bytes,
        partition_max_bytes=partition_max_bytes,
    )

    first, second = response.responses[0].partitions
    assert len(decode_reference(first.records)) == 3
    assert not second.records


def test_a_fetch_waits_for_enough_bytes_and_no_longer_than_asked(client, embedded, topic_name):
    topic_id = _create(client, topic_name)
    _produce(client, topic_name)

    short = _fetch(client, 12, topic_name, topic_id, {0: 0}, max_wait_ms=300, min_bytes=10**6)
    assert len(decode_reference(short.responses[0].partitions[0].records)) == 3

    with RawClient(embedded.port) as other:
        partition = {"max_wait_ms": 60_000, "min_bytes": 1}
        topic = _entity(
            Api.FETCH,
            12,
            "FetchTopic",
            topic=topic_name,
            partitions=(
                _entity(
                    Api.FETCH,
                    12,
                    "FetchPartition",
                    partition=0,
                    fetch_offset=3,
                    log_start_offset=-1,
                    partition_max_bytes=1000,
                ),
            ),
        )
        request = build(
            nested(Api.FETCH, 12, "request", "FetchRequest"),
            replica_id=-1,
            max_wait=timedelta(milliseconds=partition["max_wait_ms"]),
            min_bytes=1,
            max_bytes=1000,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=(topic,),
            forgotten_topics_data=(),
            rack_id="",
        )
        other.send_frame(request_frame(Api.FETCH, 12, request))
        _produce(client, topic_name)
        _, response = read_response(Api.FETCH, 12, other.receive_frame())

    records = decode_reference(response.responses[0].partitions[0].records)
    assert [record.offset for record in records] == [3, 4, 5]


@pytest.mark.parametrize("version", _versions(Api.LIST_OFFSETS))
def test_list_offsets(client, topic_name, version):
    _create(client, topic_name)
    _produce(client, topic_name)
    asked = {-2: 0, -1: 3, 0: 0, 5001: 1, 5003: -1, -3: 2, -4: 0, -5: -1}

    found = {}
    for timestamp in asked:
        partition = _entity(
            Api.LIST_OFFSETS,
            version,
            "ListOffsetsPartition",
            partition_index=0,
            current_leader_epoch=-1,
            timestamp=timestamp,
        )
        topic = _entity(
            Api.LIST_OFFSETS, version, "ListOffsetsTopic", name=topic_name, partitions=(partition,)
        )
        response = client.ask(
            Api.LIST_OFFSETS,
            version,
            replica_id=-1,
            isolation_level=0,
            topics=(topic,),
            timeout=MINUTE,
        )
        [listed] = response.topics[0].partitions
        assert listed.error_code == ErrorCode.none
        found[timestamp] = listed.offset
        if timestamp in (-3, 5001):
            assert listed.timestamp == (5002 if timestamp == -3 else 5001)

    assert found == asked


def test_list_offsets_of_unknown_topics_and_partitions(client, topic_name):
    _create(client, topic_name)
    for name, number, timestamp, code in (
        ("unknown", 0, -1, ErrorCode.unknown_topic_or_partition),
        (topic_name, 9, -1, ErrorCode.unknown_topic_or_partition),
        (topic_name, 0, -6, ErrorCode.unsupported_version),
    ):
        partition = _entity(
            Api.LIST_OFFSETS, 7, "ListOffsetsPartition", partition_index=number, timestamp=timestamp
        )
        topic = _entity(Api.LIST_OFFSETS, 7, "ListOffsetsTopic", name=name, partitions=(partition,))
        response = client.ask(
            Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=(topic,)
        )
        assert response.topics[0].partitions[0].error_code == code


@pytest.mark.parametrize("version", _versions(Api.CREATE_TOPICS))
def test_create_and_delete_topics(client, topic_name, version):
    config = _entity(
        Api.CREATE_TOPICS, version, "CreatableTopicConfig", name="segment.bytes", value="5000"
    )
    topic = _entity(
        Api.CREATE_TOPICS,
        version,
        "CreatableTopic",
        name=topic_name,
        num_partitions=3,
        replication_factor=1,
        assignments=(),
        configs=(config,),
    )

    [created] = client.ask(
        Api.CREATE_TOPICS, version, topics=(topic,), timeout=MINUTE, validate_only=False
    ).topics

    assert (created.name, created.error_code) == (topic_name, ErrorCode.none)
    if version >= 5:
        assert (created.num_partitions, created.replication_factor) == (3, 1)
        assert {c.name: c.value for c in created.configs}["segment.bytes"] == "5000"
    delete_version = version - 1
    fields: dict[str, object] = {"topic_names": (topic_name,)}
    if delete_version >= 6:
        to_delete = _entity(
            Api.DELETE_TOPICS, 6, "DeleteTopicState", name=None, topic_id=created.topic_id
        )
        fields = {"topics": (to_delete,)}
    [deleted] = client.ask(Api.DELETE_TOPICS, delete_version, timeout=MINUTE, **fields).responses
    assert (deleted.name, deleted.error_code) == (topic_name, ErrorCode.none)


@pytest.mark.parametrize("version", _versions(Api.INIT_PRODUCER_ID))
def test_init_producer_id(client, version):
    fields = {"transaction_timeout": MINUTE, "producer_id": -1, "producer_epoch": -1}

    replies = [
        client.ask(Api.INIT_PRODUCER_ID, version, transactional_id=None, **fields) for _ in "ab"
    ]
    refused = client.ask(Api.INIT_PRODUCER_ID, version, transactional_id="", **fields)

    assert [(a.error_code, a.producer_epoch) for a in replies] == [(ErrorCode.none, 0)] * 2
    assert replies[0].producer_id < replies[1].producer_id
    assert refused.error_code == ErrorCode.invalid_request


@pytest.mark.parametrize("version", _versions(Api.DESCRIBE_CLUSTER))
def test_describe_cluster(client, embedded, version):
    response = client.ask(
        Api.DESCRIBE_CLUSTER, version, include_cluster_authorized_operations=False, endpoint_type=1
    )

    [broker] = response.brokers
    assert (broker.broker_id, broker.host, broker.port) == (1, "127.0.0.1", embedded.port)
    assert len(response.cluster_id) == 22


@pytest.mark.parametrize("version", _versions(Api.DESCRIBE_CONFIGS))
def test_describe_configs(client, topic_name, version):
    _create(client, topic_name)

    def ask(kind: int, name: str, keys: tuple[str, ...] | None = None) -> Any:
        resource = _entity(
            Api.DESCRIBE_CONFIGS,
            version,
            "DescribeConfigsResource",
            resource_type=kind,
            resource_name=name,
            configuration_keys=keys,
        )
        fields = {"include_synonyms": True, "include_documentation": True}
        return client.ask(Api.DESCRIBE_CONFIGS, version, resources=(resource,), **fields).results[0]

    topic = {config.name: config.value for config in ask(2, topic_name).configs}
    assert topic["cleanup.policy"] == "delete"
    assert topic["retention.ms"] == "-1"
    assert [c.name for c in ask(2, topic_name, ("segment.bytes",)).configs] == ["segment.bytes"]
    broker = {config.name: config.value for config in ask(4, "1").configs}
    assert (broker["num.partitions"], broker["producer.id.expiration.ms"]) == ("1", "2147483647")
    assert ask(2, "unknown").error_code == ErrorCode.unknown_topic_or_partition
    assert ask(4, "2").error_code == ErrorCode.invalid_request
    assert ask(99, "x").error_code == ErrorCode.invalid_request
