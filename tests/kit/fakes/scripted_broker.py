"""A scripted broker: it speaks Kafka's protocol, and injects faults on request.

Several brokers share a `World` with the leaders of all partitions; the protocol is kafka-python's.
A fault is a function of (connection, request, response frame) that sends any bytes, for one
request.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import uuid
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field

from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)

FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, DESCRIBE_CONFIGS = 1, 2, 3, 18, 32
EPOCH_ENDS = 23

VERSIONS = {
    FETCH: (4, 16),
    LIST_OFFSETS: (1, 9),
    METADATA: (0, 12),
    API_VERSIONS: (0, 4),
    EPOCH_ENDS: (0, 4),
}
_REQUESTS = {
    FETCH: FetchRequest,
    LIST_OFFSETS: ListOffsetsRequest,
    METADATA: MetadataRequest,
    API_VERSIONS: ApiVersionsRequest,
    DESCRIBE_CONFIGS: DescribeConfigsRequest,
    EPOCH_ENDS: OffsetForLeaderEpochRequest,
}


@dataclass
class Topic:
    """One topic; `leaders[n]` is (node id, epoch) of partition n, `logs[n]` its record bytes."""

    topic_id: bytes
    leaders: list[tuple[int, int]]
    logs: list[bytes] = field(default_factory=list)
    ends: tuple[int, int, int] = (100, 90, 10)
    """High watermark, last stable offset, log start: of every partition."""
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Each leader epoch and its first offset, of every partition."""

    def epoch_end(self, epoch):
        """Return the largest known epoch up to this one, and its end; (-1, -1): unknown."""
        later = [start for known, start in self.epochs if known > epoch]
        known = [known for known, _ in self.epochs if known <= epoch]
        return (known[-1], min(later, default=self.ends[0])) if known else (-1, -1)


@dataclass
class World:
    """The metadata that all brokers of a cluster share."""

    topics: dict[str, Topic] = field(default_factory=dict)
    brokers: dict[int, ScriptedBroker] = field(default_factory=dict)
    cluster_id: str = "scripted"


class ScriptedBroker:
    """A broker on a loopback port, until `close`."""

    request_classes = _REQUESTS

    def __init__(self, world, node_id=1, *, versions=None, throttle_ms=0):
        self.world, self.node_id, self.throttle_ms = world, node_id, throttle_ms
        self.versions = {**VERSIONS, **(versions or {})}
        self.requests = []
        """(API key, version, request), in the order of arrival."""
        self.connection_count = 0
        self.faults = defaultdict(deque)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = []
        self._closing = False
        world.brokers[node_id] = self
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def once(self, api_key, *faults):
        """Inject these faults into the next requests of this kind, in order."""
        self.faults[api_key].extend(faults)

    def asked(self, api_key):
        """Return the received requests of one kind."""
        return [request for key, _, request in self.requests if key == api_key]

    def close(self):
        """Refuse connections from now on: no other server gets the port."""
        if self._closing:
            return
        self._closing = True
        address = self._listener.getsockname()
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        reserved = socket.socket()
        weakref.finalize(self, reserved.close)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            reserved.bind(address)
        for thread in self._threads:
            thread.join(5)

    def _accept(self):
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connection_count += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                frame = stream.read(struct.unpack(">i", head)[0])
                key, version, correlation_id = struct.unpack_from(">hhi", frame)
                low, high = self.versions[key]
                if low <= version <= high:
                    request = self.request_classes[key].decode(frame, version=version, header=True)
                    response = self._response(key, version, request)
                else:
                    request, version = None, 0
                    response = self._api_versions(0, error_code=35)
                self.requests.append((key, version, request))
                response.with_header(correlation_id=correlation_id)
                frame = response.encode(header=True, framed=True)
                if self.faults[key]:
                    self.faults[key].popleft()(connection, request, frame)
                else:
                    connection.sendall(frame)

    def _response(self, key, version, request):
        handler = {
            FETCH: self._fetch,
            LIST_OFFSETS: self._list_offsets,
            METADATA: self._metadata,
            API_VERSIONS: lambda version, _: self._api_versions(version),
            DESCRIBE_CONFIGS: self._describe_configs,
            EPOCH_ENDS: self._epoch_ends,
        }[key]
        return handler(version, request)

    def _api_versions(self, version, error_code=0):
        entries = [
            ApiVersionsResponse.ApiVersion(
                version=version, api_key=key, min_version=low, max_version=high
            )
            for key, (low, high) in self.versions.items()
        ]
        return ApiVersionsResponse(version=version, error_code=error_code, api_keys=entries)

    def _metadata(self, version, request):
        made = MetadataResponse
        brokers = [
            made.MetadataResponseBroker(
                version=version, node_id=broker.node_id, host="127.0.0.1", port=broker.port
            )
            for broker in self.world.brokers.values()
        ]
        names = self.world.topics if request.topics is None else [t.name for t in request.topics]
        topics = []
        for name in names:
            topic = self.world.topics.get(name)
            partitions = [
                made.MetadataResponseTopic.MetadataResponsePartition(
                    version=version,
                    error_code=0 if leader >= 0 else 5,
                    partition_index=number,
                    leader_id=leader,
                    leader_epoch=epoch,
                    replica_nodes=[],
                    isr_nodes=[],
                    offline_replicas=[],
                )
                for number, (leader, epoch) in enumerate(topic.leaders if topic else [])
            ]
            topics.append(
                made.MetadataResponseTopic(
                    version=version,
                    error_code=0 if topic else 3,
                    name=name,
                    topic_id=uuid.UUID(bytes=topic.topic_id if topic else bytes(16)),
                    partitions=partitions,
                )
            )
        return made(
            version=version,
            throttle_time_ms=self.throttle_ms,
            brokers=brokers,
            cluster_id=self.world.cluster_id,
            controller_id=1,
            topics=topics,
        )

    def _check(self, topic, partition, epoch):
        """Return the error code of a real broker for a client with an old or a newer epoch."""
        if topic is None or partition >= len(topic.leaders):
            return 3
        leader, current = topic.leaders[partition]
        if leader != self.node_id:
            return 6
        if epoch >= 0 and epoch != current:
            return 74 if epoch < current else 75
        return 0

    def _list_offsets(self, version, request):
        made = ListOffsetsResponse.ListOffsetsTopicResponse
        topics = []
        for asked in request.topics:
            topic = self.world.topics.get(asked.name)
            partitions = []
            for one in asked.partitions:
                error = self._check(topic, one.partition_index, one.current_leader_epoch)
                high, stable, start = topic.ends if topic else (-1, -1, -1)
                latest = stable if request.isolation_level else high
                offset = {-1: latest, -2: start}.get(one.timestamp, -1)
                partitions.append(
                    made.ListOffsetsPartitionResponse(
                        version=version,
                        partition_index=one.partition_index,
                        error_code=error,
                        timestamp=-1,
                        offset=-1 if error else offset,
                        leader_epoch=0,
                    )
                )
            topics.append(made(version=version, name=asked.name, partitions=partitions))
        return ListOffsetsResponse(version=version, throttle_time_ms=0, topics=topics)

    def _fetch(self, version, request):
        made = FetchResponse.FetchableTopicResponse
        (asked,) = request.topics
        (one,) = asked.partitions
        if version >= 13:
            named = [n for n, t in self.world.topics.items() if t.topic_id == asked.topic_id.bytes]
            topic, missing = self.world.topics.get(named[0] if named else ""), 100
        else:
            topic, missing = self.world.topics.get(asked.topic), 3
        error = (
            missing
            if topic is None
            else self._check(topic, one.partition, one.current_leader_epoch)
        )
        high, stable, start = topic.ends if topic else (-1, -1, -1)
        if not error and not start <= one.fetch_offset <= high:
            error = 1
        records = b"" if error else topic.logs[one.partition]
        diverging = {}
        if not error and version >= 12 and one.last_fetched_epoch >= 0:
            epoch, end = topic.epoch_end(one.last_fetched_epoch)
            if epoch < one.last_fetched_epoch or end < one.fetch_offset:
                records = b""
                of_end = made.PartitionData.EpochEndOffset(
                    version=version, epoch=epoch, end_offset=end
                )
                diverging = {"diverging_epoch": of_end}
        partition = made.PartitionData(
            **diverging,
            version=version,
            partition_index=one.partition,
            error_code=error,
            high_watermark=-1 if error else high,
            last_stable_offset=-1 if error else stable,
            log_start_offset=-1 if error else start,
            aborted_transactions=None,
            preferred_read_replica=-1,
            records=records,
        )
        responses = [
            made(
                version=version, topic=asked.topic, topic_id=asked.topic_id, partitions=[partition]
            )
        ]
        return FetchResponse(
            version=version,
            throttle_time_ms=self.throttle_ms,
            error_code=0,
            session_id=0,
            responses=responses,
        )

    def _epoch_ends(self, version, request):
        made = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        topics = []
        for asked in request.topics:
            topic = self.world.topics.get(asked.topic)
            partitions = []
            for one in asked.partitions:
                error = self._check(topic, one.partition, one.current_leader_epoch)
                epoch, end = (-1, -1) if error else topic.epoch_end(one.leader_epoch)
                partitions.append(
                    made.EpochEndOffset(
                        version=version,
                        error_code=error,
                        partition=one.partition,
                        leader_epoch=epoch,
                        end_offset=end,
                    )
                )
            topics.append(made(version=version, topic=asked.topic, partitions=partitions))
        return OffsetForLeaderEpochResponse(version=version, throttle_time_ms=0, topics=topics)

    def _describe_configs(self, version, request):
        (resource,) = request.resources
        known = resource.resource_name in self.world.topics
        result = DescribeConfigsResponse.DescribeConfigsResult(
            version=version,
            error_code=0 if known else 3,
            error_message=None,
            resource_type=2,
            resource_name=resource.resource_name,
            configs=[],
        )
        return DescribeConfigsResponse(version=version, throttle_time_ms=0, results=[result])


# Faults.


def hang(_connection, _request, _response):
    """Send no response, and keep the connection."""


def hang_up(connection, _request, _response):
    """Close the connection instead of responding."""
    connection.shutdown(socket.SHUT_RDWR)


def cut_after(count):
    """Send the first bytes of the response, then close."""

    def fault(connection, _request, response):
        connection.sendall(response[:count])
        connection.shutdown(socket.SHUT_RDWR)

    return fault


def trickle(interval_s, stop=None):
    """Send the response byte by byte, each just before the timeout."""

    def fault(connection, _request, response):
        waiting = stop or threading.Event()
        for byte in response:
            connection.sendall(bytes([byte]))
            if waiting.wait(interval_s):
                return

    return fault


def instead(*pieces):
    """Send these bytes instead of the response."""

    def fault(connection, _request, _response):
        for piece in pieces:
            connection.sendall(piece)

    return fault


def edited(edit):
    """Send the response after `edit(bytearray)` changed it in place."""

    def fault(connection, _request, response):
        data = bytearray(response)
        edit(data)
        connection.sendall(data)

    return fault
