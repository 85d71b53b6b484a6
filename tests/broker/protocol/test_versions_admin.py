"""Goal: the APIs that change and describe topics are implemented in every advertised version.

Method: as in `test_versions`: kio, an independent codec, writes the requests and reads the
responses to their last byte. The meaning of a response is checked in each version, refusals in the
last one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.partition_client import EARLIEST, PartitionClient, data_batch
from kit.judges.raw_client import build, nested
from kit.servers.kafka import create_topic
from logmirror.broker.apis import VERSIONS, Api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker

MINUTE = timedelta(minutes=1)
TOPIC = 2
BROKER = 4
SET, DELETE, APPEND, SUBTRACT = range(4)


def _versions(api: Api) -> range:
    first, last = VERSIONS[api]
    return range(first, last + 1)


@pytest.fixture
def partition(embedded: EmbeddedBroker, topic_name: str) -> Iterator[PartitionClient]:
    create_topic(embedded.bootstrap, topic_name, 2, {})
    with PartitionClient(embedded.bootstrap, topic_name) as client:
        yield client


def _entity(api: Api, version: int, entity: str, /, **fields: object) -> Any:
    return build(nested(api, version, "request", entity), **fields)


@pytest.mark.parametrize("version", _versions(Api.OFFSET_FOR_LEADER_EPOCH))
def test_offset_for_leader_epoch(partition, version):
    partition.produce(data_batch(3))

    assert partition.end_of_epoch(version=version) == (0, 0, 3)


@pytest.mark.parametrize("version", _versions(Api.DELETE_RECORDS))
def test_delete_records(partition, version):
    partition.produce(data_batch(3))

    assert partition.delete_records(2, version) == (0, 2)
    assert partition.list_offset(EARLIEST)[2] == 2


def test_delete_records_responses_each_partition_for_itself(partition):
    partition.produce(data_batch(3))
    partitions = tuple(
        _entity(Api.DELETE_RECORDS, 2, "DeleteRecordsPartition", partition_index=n, offset=offset)
        for n, offset in ((0, 3), (1, 1), (2, 0))
    )
    topics = tuple(
        _entity(Api.DELETE_RECORDS, 2, "DeleteRecordsTopic", name=name, partitions=partitions)
        for name in (partition.topic, "not-there")
    )

    ours, other = partition.ask(Api.DELETE_RECORDS, 2, topics=topics, timeout=MINUTE).topics

    unknown = (ErrorCode.unknown_topic_or_partition, -1)
    found = [(response.error_code, response.low_watermark) for response in ours.partitions]
    assert found == [(ErrorCode.none, 3), (ErrorCode.offset_out_of_range, -1), unknown]
    assert [(a.error_code, a.low_watermark) for a in other.partitions] == [unknown] * 3


def test_describe_producers_of_unknown_topics_and_partitions(partition):
    topics = tuple(
        _entity(Api.DESCRIBE_PRODUCERS, 0, "TopicRequest", name=name, partition_indexes=(0, 5))
        for name in (partition.topic, "not-there")
    )

    ours, other = partition.ask(Api.DESCRIBE_PRODUCERS, 0, topics=topics).topics

    unknown = ErrorCode.unknown_topic_or_partition
    codes = [[response.error_code for response in topic.partitions] for topic in (ours, other)]
    assert codes == [[ErrorCode.none, unknown], [unknown, unknown]]


def _create_partitions(
    partition: PartitionClient, version: int, *wanted: Any, **fields: Any
) -> Any:
    fields = {"timeout": MINUTE, "validate_only": False, **fields}
    return partition.ask(Api.CREATE_PARTITIONS, version, topics=wanted, **fields).results


def _grown(version: int, name: str, count: int, brokers: Any = None) -> Any:
    assignments = None
    if brokers is not None:
        assignments = tuple(
            _entity(Api.CREATE_PARTITIONS, version, "CreatePartitionsAssignment", broker_ids=ids)
            for ids in brokers
        )
    fields = {"name": name, "count": count, "assignments": assignments}
    return _entity(Api.CREATE_PARTITIONS, version, "CreatePartitionsTopic", **fields)


def _partition_count(partition: PartitionClient) -> int:
    topic = _entity(Api.METADATA, 9, "MetadataRequestTopic", name=partition.topic)
    fields = {
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }
    [found] = partition.ask(Api.METADATA, 9, topics=(topic,), **fields).topics
    return len(found.partitions)


@pytest.mark.parametrize("version", _versions(Api.CREATE_PARTITIONS))
def test_create_partitions(partition, version):
    [dry] = _create_partitions(
        partition, version, _grown(version, partition.topic, 3), validate_only=True
    )
    before = _partition_count(partition)
    [done] = _create_partitions(partition, version, _grown(version, partition.topic, 5, [(1,)] * 3))

    assert (dry.error_code, done.error_code) == (ErrorCode.none, ErrorCode.none)
    assert (before, _partition_count(partition)) == (2, 5)


def test_partitions_that_cannot_be_are_refused(partition):
    name = partition.topic
    for wanted, code in (
        (_grown(3, name, 2), ErrorCode.invalid_partitions),
        (_grown(3, name, 1), ErrorCode.invalid_partitions),
        (_grown(3, name, -1), ErrorCode.invalid_partitions),
        (_grown(3, name, 10_001), ErrorCode.invalid_partitions),
        (_grown(3, name, 3, [(1,), (1,)]), ErrorCode.invalid_replica_assignment),
        (_grown(3, name, 3, [(1, 2)]), ErrorCode.invalid_replica_assignment),
        (_grown(3, "not-there", 3), ErrorCode.unknown_topic_or_partition),
    ):
        [found] = _create_partitions(partition, 3, wanted)
        assert (found.error_code, bool(found.error_message)) == (code, True)
    [twice] = _create_partitions(partition, 3, _grown(3, name, 3), _grown(3, name, 4))
    assert twice.error_code == ErrorCode.invalid_request
    assert _partition_count(partition) == 2


def _settings(partition: PartitionClient) -> dict[str, str]:
    """The settings that DescribeConfigs returns as set for the topic."""
    resource = _entity(
        Api.DESCRIBE_CONFIGS,
        4,
        "DescribeConfigsResource",
        resource_type=TOPIC,
        resource_name=partition.topic,
        configuration_keys=None,
    )
    fields = {"include_synonyms": False, "include_documentation": False}
    [found] = partition.ask(Api.DESCRIBE_CONFIGS, 4, resources=(resource,), **fields).results
    return {config.name: config.value for config in found.configs if config.config_source == 1}


def _alter(  # noqa: PLR0913  # a request has that many parts, most with a default
    partition: PartitionClient,
    api: Api,
    version: int,
    *changes: tuple[object, ...],
    kind: int = TOPIC,
    name: str | None = None,
    dry_run: bool = False,
) -> ErrorCode:
    """Change settings: each name, value and, where the request has it, operation."""
    configs = tuple(
        _entity(
            api,
            version,
            "AlterableConfig",
            name=change[0],
            value=change[1],
            config_operation=change[-1],
        )
        for change in changes
    )
    resource = _entity(
        api,
        version,
        "AlterConfigsResource",
        resource_type=kind,
        resource_name=partition.topic if name is None else name,
        configs=configs,
    )
    [found] = partition.ask(api, version, resources=(resource,), validate_only=dry_run).responses
    return ErrorCode(found.error_code)


@pytest.mark.parametrize("version", _versions(Api.ALTER_CONFIGS))
def test_alter_configs_replaces_all_settings(partition, version):
    first = (("segment.bytes", "5000"), ("max.message.bytes", "300"))
    assert _alter(partition, Api.ALTER_CONFIGS, version, *first) == ErrorCode.none
    assert _settings(partition) == dict(first)
    assert partition.produce(data_batch(50)).error == ErrorCode.message_too_large

    only = ("message.timestamp.type", "LogAppendTime")
    dry = _alter(partition, Api.ALTER_CONFIGS, version, only, dry_run=True)
    assert (dry, _settings(partition)) == (ErrorCode.none, dict(first))
    assert _alter(partition, Api.ALTER_CONFIGS, version, only) == ErrorCode.none
    assert _settings(partition) == dict([only])
    assert partition.produce_response(data_batch(50)).log_append_time is not None


@pytest.mark.parametrize("version", _versions(Api.INCREMENTAL_ALTER_CONFIGS))
def test_incremental_alter_configs_changes_what_it_names(partition, version):
    def change(*changes: tuple[object, ...]) -> ErrorCode:
        return _alter(partition, Api.INCREMENTAL_ALTER_CONFIGS, version, *changes)

    assert change(("segment.bytes", "5000", SET), ("max.message.bytes", "300", SET)) == 0
    assert change(("max.message.bytes", None, DELETE)) == ErrorCode.none
    assert _settings(partition) == {"segment.bytes": "5000"}
    assert change(("cleanup.policy", "delete", APPEND)) == ErrorCode.none
    assert _settings(partition) == {"segment.bytes": "5000", "cleanup.policy": "delete"}
    assert change(("preallocate", None, DELETE)) == ErrorCode.none, "a setting of Kafka alone"
    assert change(("made.up", None, DELETE)) == ErrorCode.none
    for refused in (
        ("preallocate", "true", SET),
        ("cleanup.policy", "shred", APPEND),
        ("cleanup.policy", "delete", SUBTRACT),
        ("segment.bytes", "1", APPEND),
        ("compression.type", "gzip", SET),
        ("made.up", "1", SET),
    ):
        assert change(refused) == ErrorCode.invalid_config, refused
    for malformed in (
        [("segment.bytes", None, SET)],
        [("segment.bytes", "5001", 9)],
        [("segment.bytes", "1024", SET), ("segment.bytes", None, DELETE)],
    ):
        assert change(*malformed) == ErrorCode.invalid_request, malformed
    assert _settings(partition) == {"segment.bytes": "5000", "cleanup.policy": "delete"}


def test_settings_of_unknown_resources_cannot_be_changed(partition):
    change = ("segment.bytes", "5000", SET)
    api = Api.INCREMENTAL_ALTER_CONFIGS

    assert _alter(partition, api, 1, change, kind=BROKER, name="1") == ErrorCode.invalid_request
    unknown = ErrorCode.unknown_topic_or_partition
    assert _alter(partition, api, 1, change, name="not-there") == unknown
