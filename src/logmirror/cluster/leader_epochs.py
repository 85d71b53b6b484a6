"""Where leader epochs end (KIP-320): whether a log still holds what was read from it.

A leader that lost records of an earlier leader begins its own epoch below them. So the end of the
epoch of a batch that was read is at or above that batch's end, unless the log was truncated since.

Invariants:
1. Every request only reads, and is retried as reads are.
2. Brokers that report no leader epochs (before Apache Kafka 2.1) are not asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafka.protocol.consumer import (  # type: ignore[import-untyped]  # ships no py.typed
    OffsetForLeaderEpochRequest,
)

from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import LogmirrorError
from logmirror.model import EpochEnd, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import LeaderCall, Router
    from logmirror.cluster.topology import PartitionMetadata

_VERSION_MIN: Final = 2
"""The first version with the current leader epoch, so that an old leader refuses it."""
_CONSUMER: Final = -1
"""The replica ID of a consumer."""

_R = TypeVar("_R")


class LeaderEpochs:
    """Looks up the ends of leader epochs in one cluster.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._compared: dict[TopicPartition, tuple[int, int, EpochEnd | None]] = {}
        """For each partition the leader's epoch, the epoch that was looked up, and its end."""

    def ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, EpochEnd | None]:
        """See `ClusterClient.epoch_ends`."""
        return self._router.ask_leaders(
            epochs, _ends_call(epochs), "could not look up the end of a leader epoch"
        )

    def diverging(
        self, partition: TopicPartition, offset: int, last_epoch: int, metadata: PartitionMetadata
    ) -> EpochEnd | None:
        """Compare a fetch with the leader's log, as newer brokers do themselves.

        One request for each new leader, because the end of an earlier epoch does not change.

        Args:
            partition: The partition.
            offset: The offset of the fetch.
            last_epoch: The leader epoch of the batch before `offset`.
            metadata: The partition's leader.

        Returns:
            What a newer broker returns in `FetchHead.diverging`.

        Raises:
            LogmirrorError: The leader did not respond.
        """
        leader_epoch = metadata.leader_epoch
        if leader_epoch <= last_epoch:
            return None
        known = self._compared.get(partition)
        if known is None or known[:2] != (leader_epoch, last_epoch):
            response = self._router.each_leader([partition], _ends_call({partition: last_epoch}))
            end = response[partition]
            if isinstance(end, LogmirrorError):
                raise end
            known = self._compared[partition] = (leader_epoch, last_epoch, end)
        end = known[2]
        if end is None or (end.leader_epoch == last_epoch and end.end_offset >= offset):
            return None
        return end


def _ends_call(epochs: Mapping[TopicPartition, int]) -> LeaderCall[EpochEnd | None]:
    def call(
        connection: Connection, led: Mapping[TopicPartition, PartitionMetadata]
    ) -> dict[TopicPartition, EpochEnd | LogmirrorError | None]:
        asked = {each: metadata for each, metadata in led.items() if metadata.leader_epoch >= 0}
        unknown: dict[TopicPartition, EpochEnd | LogmirrorError | None] = dict.fromkeys(led)
        return unknown | (_ends_once(connection, asked, epochs) if asked else {})

    return call


def _ends_once(
    connection: Connection,
    led: Mapping[TopicPartition, PartitionMetadata],
    epochs: Mapping[TopicPartition, int],
) -> dict[TopicPartition, EpochEnd | LogmirrorError | None]:
    return read_epoch_ends(
        connection,
        led,
        epochs,
        lambda entry: (
            EpochEnd(int(entry.leader_epoch), int(entry.end_offset))
            if entry.leader_epoch >= 0 and entry.end_offset >= 0
            else None
        ),
        "could not look up the end of a leader epoch",
    )


def read_epoch_ends(
    connection: Connection,
    led: Mapping[TopicPartition, PartitionMetadata],
    epochs: Mapping[TopicPartition, int],
    read: Callable[[Any], _R],
    failed: str,
) -> dict[TopicPartition, _R | LogmirrorError]:
    """Send one OffsetForLeaderEpoch request to a leader.

    Args:
        connection: To the leader.
        led: The partitions, and their metadata.
        epochs: The epoch that is looked up for each.
        read: Converts an entry of the response.
        failed: Message of the error for an entry with an error code.
    """
    made = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    topics = by_topic(
        led,
        lambda partition: made.OffsetForLeaderPartition(
            partition=partition.partition,
            current_leader_epoch=led[partition].leader_epoch,
            leader_epoch=epochs[partition],
        ),
    )
    request = OffsetForLeaderEpochRequest(
        replica_id=_CONSUMER,
        topics=[made(topic=name, partitions=entries) for name, entries in topics.items()],
    )
    response = connection.call(request, low=_VERSION_MIN)
    return read_entries(
        (
            (TopicPartition(topic.topic, entry.partition), entry)
            for topic in response.topics
            for entry in topic.partitions
        ),
        read,
        failed,
    )
