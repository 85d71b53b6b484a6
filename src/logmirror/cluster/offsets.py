"""Log start and log end offsets, and producer states, as leaders report them.

Invariants:
1. Every request only reads, and is retried as reads are.
2. `log_ends` returns the leader's log end offset, not the high watermark: records that are not yet
   on all replicas count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeProducersRequest,
)
from kafka.protocol.consumer import (  # type: ignore[import-untyped]  # ships no py.typed
    ListOffsetsRequest,
)

from logmirror.cluster.leader_epochs import read_epoch_ends
from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import InternalError, LogmirrorError, UnavailableError, UsageError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import LeaderCall, Router
    from logmirror.cluster.topology import PartitionMetadata

EARLIEST: Final = -2
"""`list_offsets`: the log start offset."""
LATEST: Final = -1
"""`list_offsets`: the last stable offset or the high watermark."""
NO_OFFSET: Final = -1
"""`list_offsets` by time: no record at or after that time."""

_LIST_OFFSETS_VERSION_MIN: Final = 2
"""The first version with isolation levels."""
_CONSUMER: Final = -1
"""The replica ID of a consumer."""
_NO_EPOCH: Final = -1


class LogEnd(NamedTuple):
    """The log end offset of a partition on its leader."""

    end_offset: int
    """The offset of the next record."""
    leader_epoch: int
    """The epoch of the leader that responded; a later, greater one means a new leader."""


class ProducerState(NamedTuple):
    """A leader's state of one producer ID in one partition."""

    producer_epoch: int
    last_sequence: int
    """The sequence of the last record; the next must have this + 1, modulo 2^31. -1: none yet."""
    last_timestamp_ms: int
    """The greatest record timestamp of its last batch. The leader expires the state when this is
    older than `producer.id.expiration.ms`."""
    coordinator_epoch: int = -1
    """The epoch of its last control record, the least that is accepted; -1: none yet."""


class Offsets:
    """Reads offsets and producer states from the leaders of one cluster.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def list_offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool
    ) -> dict[TopicPartition, int]:
        """See `ClusterClient.list_offsets`."""
        if at < EARLIEST:
            raise InternalError("not a timestamp", at=at)
        call = self._list_offsets_call(at, read_committed=read_committed)
        return self._router.ask_leaders(partitions, call, "could not look up offsets", at=at)

    def try_list_offsets(
        self, partitions: Iterable[TopicPartition], at: int
    ) -> dict[TopicPartition, int | LogmirrorError]:
        """See `ClusterClient.try_list_offsets`. After an error the next request has new leaders."""
        wanted = list(partitions)
        call = self._list_offsets_call(at, read_committed=True)
        found: dict[TopicPartition, int | LogmirrorError]
        try:
            found = self._router.each_leader(wanted, call)
        except LogmirrorError as error:
            found = dict.fromkeys(wanted, error)
        for partition, response in found.items():
            if isinstance(response, LogmirrorError):
                found[partition] = response.copy(
                    topic=partition.topic, partition=partition.partition, at=at
                )
                self._router.topology.forget()
        return found

    def list_offsets_once(
        self, partition: TopicPartition, at: int, *, read_committed: bool
    ) -> int | None:
        """Ask once, for the facts of an error; None without a result."""
        call = self._list_offsets_call(at, read_committed=read_committed)
        try:
            response = self._router.each_leader([partition], call)[partition]
        except LogmirrorError:
            return None
        return response if isinstance(response, int) else None

    def log_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """See `ClusterClient.log_ends`."""
        return self._router.ask_leaders(
            partitions, _log_ends_once, "could not look up log end offsets"
        )

    def producer_states(
        self, producer_ids: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ProducerState | None]:
        """See `ClusterClient.producer_states`."""

        def call(
            connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
        ) -> dict[TopicPartition, ProducerState | LogmirrorError | None]:
            return _producer_states_once(connection, led, producer_ids)

        return self._router.ask_leaders(producer_ids, call, "could not look up producer states")

    def _list_offsets_call(self, at: int, *, read_committed: bool) -> LeaderCall[int]:
        timeout_ms = self._router.settings.request_timeout_ms

        def call(
            connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
        ) -> dict[TopicPartition, int | LogmirrorError]:
            made = ListOffsetsRequest.ListOffsetsTopic
            topics = by_topic(
                led,
                lambda partition: made.ListOffsetsPartition(
                    partition_index=partition.partition,
                    current_leader_epoch=led[partition].leader_epoch,
                    timestamp=at,
                ),
            )
            request = ListOffsetsRequest(
                replica_id=_CONSUMER,
                isolation_level=1 if read_committed else 0,
                topics=[made(name=name, partitions=entries) for name, entries in topics.items()],
                timeout_ms=timeout_ms,
            )
            response = connection.call(request, low=_LIST_OFFSETS_VERSION_MIN)
            entries = (
                (TopicPartition(topic.name, entry.partition_index), entry)
                for topic in response.topics
                for entry in topic.partitions
            )
            return read_entries(
                entries, lambda entry: int(entry.offset), "could not look up an offset"
            )

        return call


def _log_ends_once(
    connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
) -> dict[TopicPartition, LogEnd | LogmirrorError]:
    """Request the end of the leader's current epoch, which is its log end."""
    if any(metadata.leader_epoch == _NO_EPOCH for metadata in led.values()):
        raise UsageError(
            "the broker does not report leader epochs, which log end offsets require",
            hint="Apache Kafka 2.1 or later is required",
            host=connection.host,
            port=connection.port,
        )
    found = read_epoch_ends(
        connection,
        led,
        {partition: metadata.leader_epoch for partition, metadata in led.items()},
        lambda entry: LogEnd(int(entry.end_offset), int(entry.leader_epoch)),
        "could not look up a log end offset",
    )
    for partition, end in found.items():
        expected = led[partition].leader_epoch if partition in led else _NO_EPOCH
        if isinstance(end, LogEnd) and (end.end_offset < 0 or end.leader_epoch != expected):
            # The end of another epoch is not the log end. A new leader soon responds for its own.
            found[partition] = UnavailableError(
                "the leader cannot report its log end offset yet",
                topic=partition.topic,
                partition=partition.partition,
                expected_epoch=expected,
                found_epoch=end.leader_epoch,
            )
    return found


def _producer_states_once(
    connection: Connection,
    led: Mapping[TopicPartition, PartitionMetadata],
    producer_ids: Mapping[TopicPartition, int],
) -> dict[TopicPartition, ProducerState | LogmirrorError | None]:
    made = DescribeProducersRequest.TopicRequest
    topics = by_topic(led, lambda partition: partition.partition)
    request = DescribeProducersRequest(
        topics=[made(name=name, partition_indexes=numbers) for name, numbers in topics.items()]
    )
    response = connection.call(request)
    entries = (
        (TopicPartition(topic.name, entry.partition_index), entry)
        for topic in response.topics
        for entry in topic.partitions
    )
    found = read_entries(
        entries, lambda entry: entry.active_producers, "could not look up a producer state"
    )
    return {
        partition: producers
        if isinstance(producers, LogmirrorError)
        else _state_of(producers, producer_ids.get(partition))
        for partition, producers in found.items()
    }


def _state_of(producers: Any, producer_id: int | None) -> ProducerState | None:  # noqa: ANN401  # untyped library
    for one in producers:
        if one.producer_id == producer_id:
            return ProducerState(
                one.producer_epoch, one.last_sequence, one.last_timestamp, one.coordinator_epoch
            )
    return None
