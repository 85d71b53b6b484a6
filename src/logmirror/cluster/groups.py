"""The committed offsets of consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kafka.protocol.consumer import (  # type: ignore[import-untyped]  # ships no py.typed
    OffsetFetchRequest,
)

from logmirror.cluster.coordinators import GROUP, Coordinator
from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import LogmirrorError
from logmirror.model import TopicPartition
from logmirror.wire.messages import api_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router

_VERSION: Final = 7
"""The first version that can require stable offsets (Apache Kafka 2.5), and the last for a single
group."""


class GroupOffset(NamedTuple):
    """One committed offset."""

    offset: int
    """The next offset to read."""
    leader_epoch: int
    """The leader epoch of the record before it; -1 if unknown."""
    metadata: str
    """The metadata that the client committed."""


class Groups:
    """Reads the committed offsets of one cluster's groups.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def offsets(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, GroupOffset | None]:
        """See `ClusterClient.group_offsets`."""
        wanted = list(dict.fromkeys(partitions))
        if not wanted:
            return {}
        made = OffsetFetchRequest.OffsetFetchRequestTopic
        topics = by_topic(wanted, lambda partition: partition.partition)

        def attempt(connection: Connection) -> dict[TopicPartition, GroupOffset | None]:
            request = OffsetFetchRequest(
                group_id=group,
                topics=[
                    made(name=name, partition_indexes=numbers) for name, numbers in topics.items()
                ],
                require_stable=True,
            )
            response = connection.call(request, low=_VERSION, high=_VERSION)
            if response.error_code:
                raise api_error(response.error_code, action="could not read a group's offsets")
            entries = (
                (TopicPartition(topic.name, entry.partition_index), entry)
                for topic in response.topics
                for entry in topic.partitions
            )
            found = read_entries(
                entries,
                lambda entry: (
                    None
                    if entry.committed_offset < 0
                    else GroupOffset(
                        int(entry.committed_offset),
                        int(entry.committed_leader_epoch),
                        entry.metadata or "",
                    )
                ),
                "could not read a group's offsets",
            )
            offsets: dict[TopicPartition, GroupOffset | None] = dict.fromkeys(wanted)
            for partition, offset in found.items():
                if isinstance(offset, LogmirrorError):
                    raise offset
                offsets[partition] = offset
            return offsets

        coordinator = Coordinator(self._router, group, GROUP)
        return coordinator.run(attempt, "could not read a group's offsets", group=group)
