"""Where logs begin and end, and what leaders remember of producers.

Invariants:
1. All of it reads; all of it is tried again as reads are.
2. `log_ends` is the end of the leader's log, not the high watermark: what was appended and is not
   yet on all replicas counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeProducersRequest,
)
from kafka.protocol.consumer import (  # type: ignore[import-untyped]  # ships no py.typed
    ListOffsetsRequest,
    OffsetForLeaderEpochRequest,
)

from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import InternalError, LogmirrorError, UnavailableError, UsageError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import LeaderCall, Router
    from logmirror.cluster.topology import PartitionMetadata

EARLIEST: Final = -2
"""`list_offsets`: the first offset that is still there."""
LATEST: Final = -1
"""`list_offsets`: the first offset that is not there yet."""
NO_OFFSET: Final = -1
"""`list_offsets` by time: no record is that young."""

_LIST_OFFSETS_VERSION_MIN: Final = 2
"""The first that knows isolation levels."""
_EPOCH_VERSION_MIN: Final = 2
"""The first whose answer can be refused because our leader is an old one."""
_CONSUMER: Final = -1
"""Replica id of one that is no replica."""
_NO_EPOCH: Final = -1


class LogEnd(NamedTuple):
    """Where a partition's log ends on its leader."""

    end_offset: int
    """The offset that the next record gets."""
    leader_epoch: int
    """Of the leader that said so; a greater one later means that the leader has changed."""


class ProducerState(NamedTuple):
    """What a leader remembers of one producer id in one partition."""

    producer_epoch: int
    last_sequence: int
    """Of the last record written; the next one must have this + 1, modulo 2^31. -1: none yet."""
    last_timestamp_ms: int
    """The greatest record timestamp of its last batch, by which the leader forgets it: once it is
    older than `producer.id.expiration.ms`."""
    coordinator_epoch: int = -1
    """Of the last control record in its name, below which none is taken; -1: there was none."""


class Offsets:
    """Asks the leaders of one cluster.

    Args:
        router: Of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def list_offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool
    ) -> dict[TopicPartition, int]:
        """See `ClusterClient.list_offsets`."""
        if at < EARLIEST:
            raise InternalError("not a point in time", at=at)
        call = self._list_offsets_call(at, read_committed=read_committed)
        return self._router.ask_leaders(partitions, call, "could not look up offsets", at=at)

    def list_offsets_once(
        self, partition: TopicPartition, at: int, *, read_committed: bool
    ) -> int | None:
        """Ask once, for the facts of an error; None where nothing was learnt."""
        call = self._list_offsets_call(at, read_committed=read_committed)
        try:
            answer = self._router.each_leader([partition], call)[partition]
        except LogmirrorError:
            return None
        return answer if isinstance(answer, int) else None

    def log_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """See `ClusterClient.log_ends`."""
        return self._router.ask_leaders(
            partitions, _log_ends_once, "could not look up the ends of logs"
        )

    def producer_states(
        self, producer_ids: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ProducerState | None]:
        """See `ClusterClient.producer_states`."""

        def call(
            connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
        ) -> dict[TopicPartition, ProducerState | LogmirrorError | None]:
            return _producer_states_once(connection, led, producer_ids)

        return self._router.ask_leaders(producer_ids, call, "could not look up producers")

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
    """Ask where the leader's current epoch ends: that is where its log ends."""
    if any(metadata.leader_epoch == _NO_EPOCH for metadata in led.values()):
        raise UsageError(
            "the broker does not tell leader epochs, without which a log's end is not known",
            hint="Apache Kafka 2.1 or later is needed",
            host=connection.host,
            port=connection.port,
        )
    made = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    topics = by_topic(
        led,
        lambda partition: made.OffsetForLeaderPartition(
            partition=partition.partition,
            current_leader_epoch=led[partition].leader_epoch,
            leader_epoch=led[partition].leader_epoch,
        ),
    )
    request = OffsetForLeaderEpochRequest(
        replica_id=_CONSUMER,
        topics=[made(topic=name, partitions=entries) for name, entries in topics.items()],
    )
    response = connection.call(request, low=_EPOCH_VERSION_MIN)
    found = read_entries(
        (
            (TopicPartition(topic.topic, entry.partition), entry)
            for topic in response.topics
            for entry in topic.partitions
        ),
        lambda entry: LogEnd(int(entry.end_offset), int(entry.leader_epoch)),
        "could not look up a log's end",
    )
    for partition, end in found.items():
        expected = led[partition].leader_epoch if partition in led else _NO_EPOCH
        if isinstance(end, LogEnd) and (end.end_offset < 0 or end.leader_epoch != expected):
            # Another epoch's end is not the log's; a leader that is new answers for its own soon.
            found[partition] = UnavailableError(
                "the leader does not know yet where its log ends",
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
        entries, lambda entry: entry.active_producers, "could not look up a producer"
    )
    return {
        partition: told
        if isinstance(told, LogmirrorError)
        else _state_of(told, producer_ids.get(partition))
        for partition, told in found.items()
    }


def _state_of(producers: Any, producer_id: int | None) -> ProducerState | None:  # noqa: ANN401  # untyped library
    for one in producers:
        if one.producer_id == producer_id:
            return ProducerState(
                one.producer_epoch, one.last_sequence, one.last_timestamp, one.coordinator_epoch
            )
    return None
