"""A scripted broker that accepts writes: its partitions keep the appended batches, in order.

It also acts as coordinator and controller, as far as a client's retries need them: each kind of
request gets the queued error codes of the test as responses, and success after those.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import ClassVar

from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
)
from kafka.protocol.consumer import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse
from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

from kit.fakes.scripted_broker import VERSIONS, ScriptedBroker
from logmirror.cluster.properties import connection_settings

PRODUCE, FIND_COORDINATOR, CREATE_TOPICS, DELETE_RECORDS = 0, 10, 19, 21
INIT_PRODUCER_ID, OFFSET_FOR_LEADER_EPOCH, ADD_PARTITIONS, END_TXN = 22, 23, 24, 26
WRITE_TXN_MARKERS, CREATE_PARTITIONS, DESCRIBE_PRODUCERS = 27, 37, 61

_CLASSES = {
    PRODUCE: (ProduceRequest, (3, 13)),
    FIND_COORDINATOR: (FindCoordinatorRequest, (0, 6)),
    CREATE_TOPICS: (CreateTopicsRequest, (2, 7)),
    DELETE_RECORDS: (DeleteRecordsRequest, (0, 2)),
    INIT_PRODUCER_ID: (InitProducerIdRequest, (0, 5)),
    OFFSET_FOR_LEADER_EPOCH: (OffsetForLeaderEpochRequest, (2, 4)),
    ADD_PARTITIONS: (AddPartitionsToTxnRequest, (0, 5)),
    END_TXN: (EndTxnRequest, (0, 5)),
    WRITE_TXN_MARKERS: (WriteTxnMarkersRequest, (1, 2)),
    CREATE_PARTITIONS: (CreatePartitionsRequest, (0, 3)),
    DESCRIBE_PRODUCERS: (DescribeProducersRequest, (0, 0)),
}


class WritableBroker(ScriptedBroker):
    """A broker that is leader, coordinator and controller.

    Attributes:
        appended: The appended batches of each partition, with their base offsets.
        codes: Error codes of the next responses, by API key.
        said: Error message of a Produce response for each refused partition.
    """

    request_classes: ClassVar = {
        **ScriptedBroker.request_classes,
        **{key: cls for key, (cls, _) in _CLASSES.items()},
    }

    def __init__(self, world, node_id=1, *, versions=None, throttle_ms=0):
        self.appended = defaultdict(list)
        self.codes = defaultdict(deque)
        self.said = None
        self.coordinator = None
        own = {key: versions for key, (_, versions) in _CLASSES.items()}
        super().__init__(
            world,
            node_id,
            versions={**VERSIONS, **own, **(versions or {})},
            throttle_ms=throttle_ms,
        )

    def end(self, topic, partition):
        """Return the log end offset of a partition."""
        batches = self.appended[topic, partition]
        return batches[-1][0] + _count(batches[-1][1]) if batches else 0

    def _response(self, key, version, request):
        handler = {
            PRODUCE: self._produce,
            FIND_COORDINATOR: self._find_coordinator,
            CREATE_TOPICS: self._create_topics,
            DELETE_RECORDS: self._delete_records,
            INIT_PRODUCER_ID: self._init_producer_id,
            OFFSET_FOR_LEADER_EPOCH: self._offset_for_leader_epoch,
            ADD_PARTITIONS: self._add_partitions,
            END_TXN: self._end_txn,
            WRITE_TXN_MARKERS: self._write_txn_markers,
            CREATE_PARTITIONS: self._create_partitions,
            DESCRIBE_PRODUCERS: self._describe_producers,
        }.get(key)
        if handler is None:
            return super()._response(key, version, request)
        return handler(version, request)

    def _code(self, key):
        return self.codes[key].popleft() if self.codes[key] else 0

    def _produce(self, version, request):
        made = ProduceResponse.TopicProduceResponse
        code = self._code(PRODUCE)
        topics = []
        for topic in request.topic_data:
            partitions = []
            for one in topic.partition_data:
                error = code or self._check(self.world.topics.get(topic.name), one.index, -1)
                base = -1 if error else self.end(topic.name, one.index)
                if not error:
                    self.appended[topic.name, one.index].append((base, bytes(one.records)))
                partitions.append(
                    made.PartitionProduceResponse(
                        version=version,
                        index=one.index,
                        error_code=error,
                        base_offset=base,
                        log_append_time_ms=-1,
                        log_start_offset=0,
                        record_errors=[],
                        error_message=self.said if error else None,
                    )
                )
            topics.append(made(version=version, name=topic.name, partition_responses=partitions))
        return ProduceResponse(version=version, responses=topics, throttle_time_ms=self.throttle_ms)

    def _find_coordinator(self, version, request):
        node = self.coordinator or self.node_id
        broker = self.world.brokers[node]
        code = self._code(FIND_COORDINATOR)
        return FindCoordinatorResponse(
            version=version,
            throttle_time_ms=0,
            error_code=code,
            error_message=None,
            node_id=-1 if code else node,
            host="" if code else "127.0.0.1",
            port=-1 if code else broker.port,
        )

    def _create_topics(self, version, request):
        made = CreateTopicsResponse.CreatableTopicResult
        result = made(
            version=version,
            name=request.topics[0].name,
            error_code=self._code(CREATE_TOPICS),
            error_message=self.said,
            num_partitions=1,
            replication_factor=1,
            configs=[],
        )
        return CreateTopicsResponse(version=version, throttle_time_ms=0, topics=[result])

    def _create_partitions(self, version, request):
        result = CreatePartitionsResponse.CreatePartitionsTopicResult(
            version=version,
            name=request.topics[0].name,
            error_code=self._code(CREATE_PARTITIONS),
            error_message=self.said,
        )
        return CreatePartitionsResponse(version=version, throttle_time_ms=0, results=[result])

    def _delete_records(self, version, request):
        made = DeleteRecordsResponse.DeleteRecordsTopicResult
        code = self._code(DELETE_RECORDS)
        topics = [
            made(
                version=version,
                name=topic.name,
                partitions=[
                    made.DeleteRecordsPartitionResult(
                        version=version,
                        partition_index=one.partition_index,
                        low_watermark=-1 if code else one.offset,
                        error_code=code,
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return DeleteRecordsResponse(version=version, throttle_time_ms=0, topics=topics)

    def _init_producer_id(self, version, request):
        code = self._code(INIT_PRODUCER_ID)
        return InitProducerIdResponse(
            version=version,
            throttle_time_ms=0,
            error_code=code,
            producer_id=-1 if code else 4000,
            producer_epoch=-1 if code else 2,
        )

    def _offset_for_leader_epoch(self, version, request):
        made = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        code = self._code(OFFSET_FOR_LEADER_EPOCH)
        topics = [
            made(
                version=version,
                topic=topic.topic,
                partitions=[
                    made.EpochEndOffset(
                        version=version,
                        error_code=(
                            error := code
                            or self._check(
                                self.world.topics.get(topic.topic),
                                one.partition,
                                one.current_leader_epoch,
                            )
                        ),
                        partition=one.partition,
                        leader_epoch=-1 if error else one.leader_epoch,
                        end_offset=-1 if error else self.end(topic.topic, one.partition),
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return OffsetForLeaderEpochResponse(version=version, throttle_time_ms=0, topics=topics)

    def _describe_producers(self, version, request):
        made = DescribeProducersResponse.TopicResponse
        state = made.PartitionResponse.ProducerState(
            version=version,
            producer_id=7,
            producer_epoch=0,
            last_sequence=41,
            last_timestamp=1_700_000_000_000,
            coordinator_epoch=-1,
            current_txn_start_offset=-1,
        )
        code = self._code(DESCRIBE_PRODUCERS)
        topics = [
            made(
                version=version,
                name=topic.name,
                partitions=[
                    made.PartitionResponse(
                        version=version,
                        partition_index=number,
                        error_code=code,
                        error_message=None,
                        active_producers=[] if code else [state],
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in request.topics
        ]
        return DescribeProducersResponse(version=version, throttle_time_ms=0, topics=topics)

    def _add_partitions(self, version, request):
        made = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        code = self._code(ADD_PARTITIONS)
        topics = [
            made(
                version=version,
                name=topic.name,
                results_by_partition=[
                    made.AddPartitionsToTxnPartitionResult(
                        version=version, partition_index=number, partition_error_code=code
                    )
                    for number in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
        return AddPartitionsToTxnResponse(
            version=version, throttle_time_ms=0, results_by_topic_v3_and_below=topics
        )

    def _end_txn(self, version, request):
        return EndTxnResponse(version=version, throttle_time_ms=0, error_code=self._code(END_TXN))

    def _write_txn_markers(self, version, request):
        made = WriteTxnMarkersResponse.WritableTxnMarkerResult
        code = self._code(WRITE_TXN_MARKERS)
        markers = [
            made(
                version=version,
                producer_id=marker.producer_id,
                topics=[
                    made.WritableTxnMarkerTopicResult(
                        version=version,
                        name=topic.name,
                        partitions=[
                            made.WritableTxnMarkerTopicResult.WritableTxnMarkerPartitionResult(
                                version=version, partition_index=number, error_code=code
                            )
                            for number in topic.partition_indexes
                        ],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
        return WriteTxnMarkersResponse(version=version, markers=markers)


def _count(batch):
    """Offsets that a batch takes: last offset delta + 1."""
    return struct.unpack_from(">i", batch, 23)[0] + 1


def held(release):
    """Respond when the event is set; nothing else is read from the connection until then."""

    def fault(connection, _request, response):
        release.wait(20)
        connection.sendall(response)

    return fault


# What tests of writing share.


def batch(mark=0, *, records=1, size=100):
    """Return bytes that this broker takes for a record batch: it reads only the offset count."""
    data = bytearray(max(size, 61))
    struct.pack_into(">i", data, 23, records - 1)
    struct.pack_into(">i", data, 57, mark)
    return memoryview(data)


def mark_of(data):
    """Return the number that was passed to `batch`."""
    return struct.unpack_from(">i", data, 57)[0]


def quick(address, **changes):
    """Return settings with short timeouts: a response may take 600 ms."""
    base = {
        "socket_timeout_ms": 500,
        "connect_timeout_ms": 1000,
        "request_timeout_ms": 100,
        "reconnect_backoff_ms": 60,
        "reconnect_backoff_max_ms": 60,
        "retry_backoff_ms": 5,
        "retry_budget_ms": 2000,
    }
    return replace(connection_settings(address), **{**base, **changes})


def collect_all(pipeline):
    """Return the responses to all sent requests."""
    responses = []
    while pipeline.in_flight():
        responses += pipeline.collect(block=True)
    return responses


def kinds(responses):
    """Return the error type of each response."""
    return [type(response.error) for response in responses]


def written(broker, partition):
    """Return the marks of the batches in a partition."""
    return [mark_of(data) for _, data in broker.appended[partition.topic, partition.partition]]


def until(condition):
    """Wait for it."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
