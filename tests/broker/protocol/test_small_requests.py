"""Goal: a small request costs a broker little, whatever it names.

Method: a broker process gets each kind of request that names one thing many times, many things
once, or expands when it is read. Its CPU time, its memory, the response's size, and how long the
event loop works while another client waits are bounded, far below the cost without the limits.
"""

from __future__ import annotations

import gzip
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.burden import Burden, measured
from kit.judges.partition_client import PartitionClient, data_batch
from kit.judges.raw_client import (
    RawClient,
    build,
    message_class,
    nested,
    read_response,
    request_frame,
)
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from logmirror.broker.apis import Api
from logmirror.wire.compression import Codec, compress
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC: Final = "small"
MIB: Final = 1024 * 1024
TIMES: Final = 10_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker with one topic, 100 producers and a few records."""
    found = EmbeddedBroker(tmp_path_factory.mktemp("small"))
    with found:
        with PartitionClient(found.bootstrap, TOPIC) as client:
            _metadata(client, (TOPIC,), may_create=True)
            for producer_id in range(100):
                batch = data_batch(1, producer_id=producer_id, sequence=0)
                assert client.produce(batch).error == 0
        yield found
        assert found.stop() == 0
    assert "internal error" not in found.log.read_text()


def _metadata(client: RawClient, names: tuple[str, ...], *, may_create: bool = False) -> Any:
    topics = tuple(build(nested(3, 9, "request", "MetadataRequestTopic"), name=n) for n in names)
    return client.ask(
        Api.METADATA,
        9,
        topics=topics,
        allow_auto_topic_creation=may_create,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )


def _ask(client: RawClient, api: Api, version: int, **fields: object) -> tuple[Any, int]:
    """Return the response and its size in bytes."""
    client.send_frame(
        request_frame(api, version, build(message_class(api, version, "request"), **fields))
    )
    frame = client.receive_frame()
    return read_response(api, version, frame)[1], len(frame)


def _is_small(burden: Burden) -> None:
    assert burden.cpu_s < 1, burden
    assert burden.longest_turn_s < 0.2, burden
    assert burden.grown_bytes < 64 * MIB, burden


def test_describe_configs_of_one_topic_many_times_responds_once(broker):
    resource = build(
        nested(32, 4, "request", "DescribeConfigsResource"),
        resource_type=2,
        resource_name=TOPIC,
        configuration_keys=None,
    )
    with measured(broker) as burden, RawClient(broker.port) as client:
        response, size_bytes = _ask(
            client,
            Api.DESCRIBE_CONFIGS,
            4,
            resources=(resource,) * TIMES,
            include_synonyms=True,
            include_documentation=True,
        )

    assert len(response.results) == 1
    names = [config.name for config in response.results[0].configs]
    assert len(names) == len(set(names)) >= 10
    assert size_bytes < 10_000
    _is_small(burden)


def test_describe_configs_of_many_topics_has_a_limit_with_an_error_for_the_rest(broker):
    kind = nested(32, 4, "request", "DescribeConfigsResource")
    resources = tuple(
        build(
            kind, resource_type=4, resource_name="" if n == 0 else str(n), configuration_keys=None
        )
        for n in range(3000)
    )
    with RawClient(broker.port) as client:
        response, size_bytes = _ask(
            client,
            Api.DESCRIBE_CONFIGS,
            4,
            resources=resources,
            include_synonyms=True,
            include_documentation=True,
        )

    codes = [result.error_code for result in response.results]
    assert codes[2000:] == [ErrorCode.policy_violation] * 1000
    assert ErrorCode.policy_violation not in codes[:2000]
    assert "at most 2000" in response.results[2000].error_message
    assert size_bytes < MIB


def test_describe_producers_of_one_partition_many_times_responds_once(broker):
    topic = build(
        nested(61, 0, "request", "TopicRequest"), name=TOPIC, partition_indexes=(0,) * TIMES
    )
    with measured(broker) as burden, RawClient(broker.port) as client:
        response, size_bytes = _ask(client, Api.DESCRIBE_PRODUCERS, 0, topics=(topic, topic))

    assert [len(one.partitions) for one in response.topics] == [1]
    assert len(response.topics[0].partitions[0].active_producers) == 100
    assert size_bytes < 10_000
    _is_small(burden)


def _fetch_frame(offset: int, *, times: int, max_wait_ms: int) -> bytes:
    partition = build(
        nested(1, 4, "request", "FetchPartition"),
        partition=0,
        fetch_offset=offset,
        partition_max_bytes=1000,
    )
    topic = build(
        nested(1, 4, "request", "FetchTopic"), topic=TOPIC, partitions=(partition,) * times
    )
    request = build(
        message_class(1, 4, "request"),
        replica_id=-1,
        isolation_level=0,
        topics=(topic,),
        max_wait=timedelta(milliseconds=max_wait_ms),
        min_bytes=2**31 - 1,
        max_bytes=2**31 - 1,
    )
    return request_frame(1, 4, request)


def test_a_fetch_of_one_partition_many_times_reads_it_once_for_each_append(broker):
    with measured(broker) as burden, RawClient(broker.port) as polling:
        polling.send_frame(_fetch_frame(0, times=2 * TIMES, max_wait_ms=2000))
        with PartitionClient(broker.bootstrap, TOPIC) as client:
            for _ in range(30):
                client.produce(data_batch(1))

        frame = polling.receive_frame()

    _, response = read_response(1, 4, frame)
    assert [len(one.partitions) for one in response.responses] == [1]
    assert len(frame) < 2000
    _is_small(burden)


def test_list_offsets_of_one_partition_many_times_is_refused_once(broker):
    partition = build(
        nested(2, 7, "request", "ListOffsetsPartition"), partition_index=0, timestamp=-3
    )
    topic = build(
        nested(2, 7, "request", "ListOffsetsTopic"), name=TOPIC, partitions=(partition,) * TIMES
    )
    with measured(broker) as burden, RawClient(broker.port) as client:
        response, size_bytes = _ask(
            client, Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=(topic,)
        )

    (found,) = response.topics[0].partitions
    assert found.error_code == ErrorCode.invalid_request
    assert size_bytes < 1000
    _is_small(burden)


def test_end_offsets_of_one_partition_many_times_are_one_entry(broker):
    partition = build(
        nested(23, 4, "request", "OffsetForLeaderPartition"), partition=0, leader_epoch=0
    )
    topic = build(
        nested(23, 4, "request", "OffsetForLeaderTopic"),
        topic=TOPIC,
        partitions=(partition,) * TIMES,
    )
    with measured(broker) as burden, RawClient(broker.port) as client:
        response, size_bytes = _ask(
            client, Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-2, topics=(topic,)
        )

    (found,) = response.topics[0].partitions
    assert found.error_code == ErrorCode.none
    assert found.end_offset >= 100
    assert size_bytes < 1000
    _is_small(burden)


def test_delete_records_of_one_partition_many_times_is_one_deletion(broker):
    kind = nested(21, 2, "request", "DeleteRecordsPartition")
    topics = tuple(
        build(
            nested(21, 2, "request", "DeleteRecordsTopic"),
            name=TOPIC,
            partitions=(build(kind, partition_index=0, offset=offset),),
        )
        for offset in range(1, 90)
    )
    with RawClient(broker.port) as client:
        response, _ = _ask(
            client, Api.DELETE_RECORDS, 2, topics=topics, timeout=timedelta(minutes=1)
        )

    assert [len(one.partitions) for one in response.topics] == [1]
    assert response.topics[0].partitions[0].error_code == ErrorCode.none
    assert response.topics[0].partitions[0].low_watermark == 89


def test_one_coordinator_many_times_is_one_entry(broker):
    with measured(broker) as burden, RawClient(broker.port) as client:
        response, size_bytes = _ask(
            client, Api.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=("g",) * 30_000
        )

    assert len(response.coordinators) == 1
    assert size_bytes < 1000
    _is_small(burden)


def test_metadata_of_many_topics_lets_other_clients_have_their_turn(broker):
    names = tuple(f"missing-{n}" for n in range(40_000))
    with measured(broker) as burden, RawClient(broker.port, timeout_s=60) as client:
        response = _metadata(client, names)

    assert {topic.error_code for topic in response.topics} == {ErrorCode.unknown_topic_or_partition}
    assert len(response.topics) == len(names)
    assert burden.longest_turn_s < 0.2, burden


def test_more_entries_than_a_request_may_have_end_the_connection(broker):
    names = b"".join(struct.pack(">h", 1) + b"x" for _ in range(100_000))
    frame = struct.pack(">hhih", 3, 1, 7, -1) + struct.pack(">i", 100_000) + names
    with measured(broker) as burden, RawClient(broker.port) as client:
        client.send_frame(frame)
        assert client.is_closed()

    assert "request has more entries than allowed" in broker.log.read_text()
    _is_small(burden)


def _packed_batch(codec: Codec, body: bytes) -> bytes:
    """A batch of one record, with any compressed body."""
    plain = bytearray(data_batch(1)[:61])
    plain[22] |= codec
    batch = plain + body
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    checksum = crc32c_at(address_of(as_bytes_array(batch)) + 21, len(batch) - 21)
    struct.pack_into(">I", batch, 17, checksum)
    return bytes(batch)


def test_a_batch_of_empty_gzip_members_costs_no_more_than_its_bytes(broker):
    batch = _packed_batch(Codec.GZIP, gzip.compress(b"") * 50_000)
    with measured(broker) as burden, PartitionClient(broker.bootstrap, TOPIC) as client:
        assert client.produce(batch).error == ErrorCode.invalid_record

    assert burden.cpu_s < 0.5, burden  # half a microsecond a member; 1.3 s if it were quadratic
    assert burden.longest_turn_s < 0.2, burden


def test_batches_that_expand_delay_no_other_client(broker):
    batch = _packed_batch(Codec.ZSTD, bytes(compress(Codec.ZSTD, bytes(60 * MIB))))
    assert len(batch) < 10_000
    with measured(broker) as burden, RawClient(broker.port, timeout_s=60) as client:
        client.send_frame(_produce_frame((batch,) * 30))
        _, response = read_response(0, 9, client.receive_frame())

    codes = {one.error_code for one in response.responses[0].partition_responses}
    assert codes == {ErrorCode.invalid_record}
    assert burden.longest_turn_s < 0.2, burden
    assert burden.grown_bytes < 256 * MIB, burden


def _produce_frame(batches: tuple[bytes, ...]) -> bytes:
    kind = nested(0, 9, "request", "PartitionProduceData")
    data = tuple(build(kind, index=0, records=batch) for batch in batches)
    topic = build(nested(0, 9, "request", "TopicProduceData"), name=TOPIC, partition_data=data)
    request = build(
        message_class(0, 9, "request"),
        transactional_id=None,
        acks=-1,
        timeout=timedelta(minutes=1),
        topic_data=(topic,),
    )
    return request_frame(0, 9, request)


def test_large_and_small_batches_of_one_connection_keep_their_order(broker):
    large = data_batch(20_000, codec=Codec.GZIP)
    assert len(large) > 64 * 1024
    small = data_batch(3)
    with RawClient(broker.port, timeout_s=60) as client:
        for _ in range(20):
            client.send_frame(_produce_frame((large, small)))
            client.send_frame(_produce_frame((small,)))
        found = []
        for _ in range(40):
            _, response = read_response(0, 9, client.receive_frame())
            found += [
                (one.error_code, one.base_offset)
                for one in response.responses[0].partition_responses
            ]

    first = found[0][1]
    expected = [
        (ErrorCode.none, first + 20_006 * n + step)
        for n in range(20)
        for step in (0, 20_000, 20_003)
    ]
    assert found == expected


def test_producer_states_of_all_partitions_together_have_a_limit(tmp_path):
    found = EmbeddedBroker(tmp_path, max_producers=100, default_partitions=2)
    with found, RawClient(found.port) as client:
        _metadata(client, (TOPIC,), may_create=True)
        for producer_id in range(200):
            batch = data_batch(1, producer_id=producer_id, sequence=0)
            data = build(
                nested(0, 9, "request", "PartitionProduceData"),
                index=producer_id % 2,
                records=batch,
            )
            topic = build(
                nested(0, 9, "request", "TopicProduceData"), name=TOPIC, partition_data=(data,)
            )
            response, _ = _ask(
                client,
                Api.PRODUCE,
                9,
                transactional_id=None,
                acks=-1,
                timeout=timedelta(minutes=1),
                topic_data=(topic,),
            )
            assert response.responses[0].partition_responses[0].error_code == ErrorCode.none
        topic = build(
            nested(61, 0, "request", "TopicRequest"), name=TOPIC, partition_indexes=(0, 1)
        )
        response, _ = _ask(client, Api.DESCRIBE_PRODUCERS, 0, topics=(topic,))
        shown = [
            producer.producer_id
            for partition in response.topics[0].partitions
            for producer in partition.active_producers
        ]

        assert sorted(shown) == list(range(100, 200))
        assert "the oldest lose their idempotent-producer check" in found.log.read_text()


def test_a_fetch_beyond_the_limit_of_waiting_partitions_does_not_wait(tmp_path):
    found = EmbeddedBroker(tmp_path, max_waiting_partitions=1)
    with found, RawClient(found.port) as first, RawClient(found.port) as second:
        _metadata(first, (TOPIC,), may_create=True)
        frame = _fetch_frame(0, times=1, max_wait_ms=30_000)
        first.send_frame(frame)
        wait_until(lambda: _is_prompt(second, frame), what=lambda: "a prompt response")


def _is_prompt(client: RawClient, frame: bytes) -> bool:
    began = time.monotonic()
    client.send_frame(frame)
    client.receive_frame()
    return time.monotonic() - began < 10
