"""Changes to a cluster other than records: topics, partitions, deleted records, control records.

Invariants:
1. A request is not sent again once it may have been carried out: a lost response, or
   REQUEST_TIMED_OUT, is an `OutcomeUnknownError`, and the caller reads the result (topic, partition
   count, log start offset, log end offset). A transient refusal (no leader, not the controller) is
   retried.
2. Whether control records may be written is determined by reading (`may_write_markers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DescribeClusterRequest,
    DescribeConfigsRequest,
)
from kafka.protocol.metadata import (  # type: ignore[import-untyped]  # ships no py.typed
    MetadataRequest,
)
from kafka.protocol.producer import (  # type: ignore[import-untyped]  # ships no py.typed
    WriteTxnMarkersRequest,
)

from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.model import TopicPartition
from logmirror.wire.messages import (
    CLUSTER_AUTHORIZATION_FAILED,
    DESCRIBE_CLUSTER,
    METADATA,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
    WRITE_TXN_MARKERS,
    api_error,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router
    from logmirror.cluster.topology import PartitionMetadata

BROKER_DEFAULT: Final = -1
"""`create_topic`: the cluster's default replication factor (Apache Kafka 2.4 or later)."""

_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
_METADATA_OPERATIONS_VERSION: Final = 8
"""The first Metadata version with authorized operations."""
_CREATE_TOPICS_VERSION_MIN: Final = 4
_MARKERS_VERSION: Final = 1
"""The version that 3.9 and 4.3 share; 2 adds a transaction version, which has no effect here."""
OPERATIONS: Final = {
    3: "Read",
    4: "Write",
    5: "Create",
    6: "Delete",
    7: "Alter",
    8: "Describe",
    9: "ClusterAction",
    10: "DescribeConfigs",
    11: "AlterConfigs",
    12: "IdempotentWrite",
}
"""Operations by their code in a set of authorized operations (KIP-430)."""
_MARKING: Final = frozenset({"ClusterAction", "Alter"})
"""Either permits markers; Alter since Apache Kafka 3.8 (KIP-1037)."""


_FENCED: Final = "currently fenced"
"""Part of the controller's message if no broker can take replicas at the moment."""


class TxnMarker(NamedTuple):
    """One control record that ends a transaction, whether there is one or not.

    The leader appends it without checking for a transaction. It takes one offset, and no consumer
    sees it.
    """

    producer_id: int
    producer_epoch: int
    """A greater one than the leader's fences that producer; a smaller one is refused (47)."""
    commit: bool = False
    coordinator_epoch: int = 0


class Admin:
    """Changes one cluster; see `ClusterClient.admin`.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def create_topic(
        self,
        name: str,
        *,
        partition_count: int,
        replication_factor: int = BROKER_DEFAULT,
        configs: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic. Its leaders may not respond immediately.

        Raises:
            UsageError: It exists (fact `error` is TOPIC_ALREADY_EXISTS), or the cluster or its
                policy refuses it; fact `reason` has the broker's message.
            OutcomeUnknownError: It may have been created; read the topic.
            UnavailableError: No broker was reachable within the budget. It was not created.
        """
        made = CreateTopicsRequest.CreatableTopic
        topic = made(
            name=name,
            num_partitions=partition_count,
            replication_factor=replication_factor,
            assignments=[],
            configs=[
                made.CreatableTopicConfig(name=key, value=value)
                for key, value in (configs or {}).items()
            ],
        )

        def attempt() -> None:
            timeout_ms = self._router.settings.request_timeout_ms
            request = CreateTopicsRequest(
                topics=[topic], timeout_ms=timeout_ms, validate_only=False
            )
            response = self._controller().call(
                request, low=_CREATE_TOPICS_VERSION_MIN, wait_ms=timeout_ms, writes=True
            )
            _check_topic(response.topics, name, "could not create the topic")

        self._router.retry.run(attempt, "could not create the topic", writes=True, topic=name)

    def create_partitions(self, name: str, count: int) -> None:
        """Raise a topic's number of partitions to `count`.

        Raises:
            UsageError: It has as many or more (fact `error` is INVALID_PARTITIONS), does not exist,
                or permission is missing; fact `reason` has the broker's message.
            OutcomeUnknownError: They may have been added; read the topic.
            UnavailableError: No broker was reachable within the budget. None was added.
        """
        topic = CreatePartitionsRequest.CreatePartitionsTopic(
            name=name, count=count, assignments=None
        )

        def attempt() -> None:
            timeout_ms = self._router.settings.request_timeout_ms
            request = CreatePartitionsRequest(
                topics=[topic], timeout_ms=timeout_ms, validate_only=False
            )
            response = self._controller().call(request, wait_ms=timeout_ms, writes=True)
            _check_topic(response.results, name, "could not add partitions")

        self._router.retry.run(attempt, "could not add partitions", writes=True, topic=name)

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below an offset.

        Args:
            before: For each partition the new log start offset, at most the high watermark.

        Returns:
            Each partition's low watermark: the least log start offset of its replicas.

        Raises:
            PositionError: An offset is above the high watermark.
            UsageError: No such partition, or not allowed.
            OutcomeUnknownError: Records may have been deleted; read the log start offsets.
            UnavailableError: A partition had no reachable leader within the budget. Records of
            other
                partitions may have been deleted.
        """
        timeout_ms = self._router.settings.request_timeout_ms

        def call(
            connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
        ) -> dict[TopicPartition, int | LogmirrorError]:
            made = DeleteRecordsRequest.DeleteRecordsTopic
            topics = by_topic(
                led,
                lambda partition: made.DeleteRecordsPartition(
                    partition_index=partition.partition, offset=before[partition]
                ),
            )
            request = DeleteRecordsRequest(
                topics=[made(name=name, partitions=entries) for name, entries in topics.items()],
                timeout_ms=timeout_ms,
            )
            response = connection.call(request, wait_ms=timeout_ms, writes=True)
            entries = (
                (TopicPartition(topic.name, entry.partition_index), entry)
                for topic in response.topics
                for entry in topic.partitions
            )
            return read_entries(
                entries, lambda entry: int(entry.low_watermark), "could not delete records"
            )

        return self._router.ask_leaders(before, call, "could not delete records", writes=True)

    def topic_configs(self, name: str) -> dict[str, str | None]:
        """See `ClusterClient.describe_topic_configs`."""

        def attempt() -> dict[str, str | None]:
            connection = self._router.topology.any_connection()
            return _configs(connection, _TOPIC_RESOURCE, name)

        return self._router.retry.run(
            attempt, "could not read the topic's configuration", topic=name
        )

    def configs_of_topics(
        self, names: Collection[str], keys: Sequence[str]
    ) -> dict[str, dict[str, str | None]]:
        """See `ClusterClient.describe_configs_of_topics`."""

        def attempt() -> dict[str, dict[str, str | None]]:
            resources = [
                DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=_TOPIC_RESOURCE, resource_name=name, configuration_keys=list(keys)
                )
                for name in names
            ]
            connection = self._router.topology.any_connection()
            response = connection.call(DescribeConfigsRequest(resources=resources), low=1)
            return {
                result.resource_name: {config.name: config.value for config in result.configs}
                for result in response.results
                if not result.error_code
            }

        return self._router.retry.run(
            attempt, "could not read the configuration of topics", topics=len(names)
        )

    def broker_configs(self) -> dict[int, dict[str, str | None]]:
        """Each broker's effective configuration, by node ID, including defaults.

        Brokers may differ, so each is asked. A secret value is None.

        Raises:
            UsageError: No permission (DescribeConfigs on the cluster).
            UnavailableError: A broker was not reachable within the budget.
        """
        topology = self._router.topology
        found: dict[int, dict[str, str | None]] = {}

        def attempt() -> None:
            topology.refresh([])
            for node in topology.nodes():
                if node not in found:
                    found[node] = _configs(topology.connection(node), _BROKER_RESOURCE, str(node))

        self._router.retry.run(attempt, "could not read the brokers' configuration")
        return found

    def may_write_markers(self) -> bool:
        """Whether `write_txn_markers` is permitted (ClusterAction, or Alter), without writing.

        Brokers before 3.8 refuse it with Alter alone. False also if the brokers do not support the
        request, do not report permissions (before Apache Kafka 2.8), or do not report them to this
        user (without Describe on the cluster).

        Raises:
            UnavailableError: No broker responded within the budget.
        """
        operations = self.cluster_operations()
        if operations is None or operations.isdisjoint(_MARKING):
            return False

        def attempt() -> bool:
            return WRITE_TXN_MARKERS in self._router.topology.any_connection().versions

        return self._router.retry.run(attempt, "could not read the API versions")

    def cluster_operations(self) -> frozenset[str] | None:
        """The permitted operations on the cluster, from `OPERATIONS`.

        None if the brokers do not report them (before Apache Kafka 2.8). Empty without Describe on
        the cluster.

        Raises:
            UnavailableError: No broker responded within the budget.
        """

        def attempt() -> frozenset[str] | None:
            connection = self._router.topology.any_connection()
            if DESCRIBE_CLUSTER not in connection.versions:
                return None
            request = DescribeClusterRequest(include_cluster_authorized_operations=True)
            response = connection.call(request)
            if response.error_code == CLUSTER_AUTHORIZATION_FAILED:
                return frozenset()
            if response.error_code:
                raise api_error(response.error_code, action="could not read permissions")
            return _named(response.authorized_operations)

        return self._router.retry.run(attempt, "could not read permissions")

    def topic_operations(self, name: str) -> frozenset[str] | None:
        """The permitted operations on a topic, from `OPERATIONS`.

        None if there is no such topic, or the brokers do not report them (before Apache Kafka 2.3).

        Raises:
            UnavailableError: No broker responded within the budget.
        """
        made = MetadataRequest.MetadataRequestTopic
        request = MetadataRequest(
            topics=[made(name=name)],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=True,
        )

        def attempt() -> frozenset[str] | None:
            connection = self._router.topology.any_connection()
            if connection.versions[METADATA][1] < _METADATA_OPERATIONS_VERSION:
                return None
            (topic,) = connection.call(request, low=_METADATA_OPERATIONS_VERSION).topics
            if topic.error_code == TOPIC_AUTHORIZATION_FAILED:
                return frozenset()
            return None if topic.error_code else _named(topic.authorized_operations)

        return self._router.retry.run(attempt, "could not read permissions", topic=name)

    def write_txn_markers(
        self,
        markers: Mapping[TopicPartition, Sequence[TxnMarker]],
        *,
        send_until_ms: int | None = None,
    ) -> dict[TopicPartition, LogmirrorError | None]:
        """Append control records, one request per leader (WriteTxnMarkers).

        Each marker takes one offset, in the given order. Not idempotent: the same marker is
        appended again. So nothing is retried here, not even a refusal, because some of a
        partition's markers may have been appended before it. After an error, read the log end.

        Args:
            markers: One or more for each partition.
            send_until_ms: Monotonic deadline for the last byte; None for no deadline.

        Returns:
            For each partition None if all were appended, or an error: `UsageError` (fact `error` is
            CLUSTER_AUTHORIZATION_FAILED: not allowed, nothing appended), `UnavailableError` if the
            request was not sent or the leader has changed, `OutcomeUnknownError` if the response is
            lost, otherwise as the broker's error code says.

        Raises:
            UsageError: A topic does not exist, or is not visible to this user. Nothing was sent.
            UnavailableError: Leaders could not be looked up. Nothing was sent.
        """

        def call(
            connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
        ) -> dict[TopicPartition, LogmirrorError | None]:
            some = {each: markers[each] for each in led}
            return _write_markers_once(connection, some, send_until_ms)

        return self._router.each_leader(markers, call)

    def _controller(self) -> Connection:
        self._router.topology.refresh([])
        return self._router.topology.controller()


def _named(operations: set[int] | None) -> frozenset[str] | None:
    """The names of operations; None if not reported."""
    return None if operations is None else frozenset(OPERATIONS.get(n, "") for n in operations)


def _check_topic(entries: Sequence[Any], name: str, action: str) -> None:
    for entry in entries:
        if entry.name == name:
            if entry.error_code:
                reason = entry.error_message
                if _FENCED in (reason or ""):
                    # Brokers that have just started. The error code (38) blames the request.
                    raise UnavailableError(f"{action}: the brokers are fenced", reason=reason)
                facts = {} if reason is None else {"reason": reason}
                raise api_error(entry.error_code, action=action, **facts)
            return
    raise CorruptionError("a response does not contain the requested topic")


def _configs(connection: Connection, kind: int, name: str) -> dict[str, str | None]:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=None
    )
    response = connection.call(DescribeConfigsRequest(resources=[resource]), low=1)
    result = response.results[0]
    if result.error_code == UNKNOWN_TOPIC_OR_PARTITION:
        raise NotFoundError("topic does not exist", topic=name)
    if result.error_code:
        whose = "topic" if kind == _TOPIC_RESOURCE else "broker"
        raise api_error(
            result.error_code,
            action=f"could not read the {whose}'s configuration",
            **{whose: name},
        )
    return {config.name: config.value for config in result.configs}


def _write_markers_once(
    connection: Connection,
    markers: Mapping[TopicPartition, Sequence[TxnMarker]],
    send_until_ms: int | None,
) -> dict[TopicPartition, LogmirrorError | None]:
    made = WriteTxnMarkersRequest.WritableTxnMarker
    entries = [
        made(
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
            transaction_result=marker.commit,
            coordinator_epoch=marker.coordinator_epoch,
            topics=[
                made.WritableTxnMarkerTopic(
                    name=partition.topic, partition_indexes=[partition.partition]
                )
            ],
        )
        for partition, several in markers.items()
        for marker in several
    ]
    request = WriteTxnMarkersRequest(markers=entries)
    response = connection.call(
        request,
        low=_MARKERS_VERSION,
        high=_MARKERS_VERSION,
        writes=True,
        send_until_ms=send_until_ms,
    )
    # The broker responds once per producer ID, for any number of markers.
    found: dict[TopicPartition, LogmirrorError | None] = {}
    for marker in response.markers:
        for topic in marker.topics:
            for entry in topic.partitions:
                partition = TopicPartition(topic.name, entry.partition_index)
                error = (
                    api_error(
                        entry.error_code,
                        action="could not write control records",
                        topic=topic.name,
                        partition=entry.partition_index,
                    )
                    if entry.error_code
                    else None
                )
                found[partition] = found.get(partition) or error
    for partition in markers.keys() - found.keys():
        found[partition] = OutcomeUnknownError(
            "the response does not contain a partition",
            topic=partition.topic,
            partition=partition.partition,
        )
    return found
