"""Consumer groups: which there are, their committed offsets, and changes of these.

Invariants:
1. Offsets are read when no transaction with an offset commit is open (KIP-447).
2. A commit here is that of an administrator: it has no member. The coordinator refuses it while the
   group has members, so a running consumer is never moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeGroupsRequest,
    ListGroupsRequest,
)
from kafka.protocol.consumer import (  # type: ignore[import-untyped]  # ships no py.typed
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)

from logmirror.cluster.connection import ResponseMemo
from logmirror.cluster.coordinators import GROUP, Coordinator
from logmirror.cluster.router import by_topic, read_entries
from logmirror.errors import LogmirrorError
from logmirror.model import TopicPartition
from logmirror.wire.messages import UNKNOWN_TOPIC_OR_PARTITION, api_error, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router

_VERSION: Final = 7
"""The first version that can require stable offsets (Apache Kafka 2.5), and the last for a single
group."""


_FETCH: Final = "could not read a group's offsets"
_LIST: Final = "could not list the groups"
_DESCRIBE: Final = "could not describe a group"
_COMMIT: Final = "could not commit a group's offsets"
_DELETE: Final = "could not delete a group's offsets"
_T = TypeVar("_T")
_STATES_FROM: Final = 4
"""The first ListGroups version with states (Apache Kafka 2.6)."""
_DESCRIBE_VERSIONS: Final = (0, 5)
"""Version 6 reports a group that does not exist as an error."""
_COMMIT_VERSIONS: Final = (2, 8)
"""Without a retention time of its own, and by topic name."""


class GroupListing(NamedTuple):
    """A group that a cluster has."""

    group: str
    protocol_type: str
    """`consumer` for groups of consumers; empty if it never had a member, or none is known."""
    state: str
    """As Kafka names it: `Empty`, `Stable`, `PreparingRebalance`, ..."""


class GroupOffset(NamedTuple):
    """One committed offset."""

    offset: int
    """The next offset to read."""
    leader_epoch: int
    """The leader epoch of the record before it; -1 if unknown."""
    metadata: str
    """The metadata that the client committed."""


class Groups:
    """The groups of one cluster; see `ClusterClient.groups`.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def offsets(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, GroupOffset | None]:
        """Read a group's committed offsets, when no transaction with an offset commit is open.

        Returns:
            The committed offset for each partition; None if there is none.

        Raises:
            UsageError: No permission to read the group.
            UnavailableError: No coordinator responded within the budget, or a transaction with an
                offset commit for the group stayed open for as long.
        """
        wanted = list(dict.fromkeys(partitions))
        if not wanted:
            return {}
        found = self._fetched(group, by_topic(wanted, lambda partition: partition.partition))
        return {partition: found.get(partition) for partition in wanted}

    def all_offsets(self, group: str) -> dict[TopicPartition, GroupOffset]:
        """Read all committed offsets of a group; errors are those of `offsets`."""
        return self._fetched(group, None)

    def _fetched(
        self, group: str, topics: Mapping[str, list[int]] | None
    ) -> dict[TopicPartition, GroupOffset]:
        made = OffsetFetchRequest.OffsetFetchRequestTopic
        entities = topics and [
            made(name=name, partition_indexes=numbers) for name, numbers in topics.items()
        ]

        def attempt(connection: Connection) -> dict[TopicPartition, GroupOffset]:
            request = OffsetFetchRequest(group_id=group, topics=entities, require_stable=True)
            found = _committed(connection.call(request, low=_VERSION, high=_VERSION))
            for error in found.errors.values():
                raise error
            return dict(found.offsets)

        return self._coordinated(group, attempt, _FETCH)

    def listed(self) -> list[GroupListing]:
        """List the groups that this user may describe, by name.

        Raises:
            UnavailableError: A broker did not respond within the budget.
        """
        topology = self._router.topology

        def attempt() -> list[GroupListing]:
            topology.refresh([])
            found: dict[str, GroupListing] = {}
            for node in topology.nodes():
                response = topology.connection(node).call(ListGroupsRequest(), low=_STATES_FROM)
                if response.error_code:
                    raise api_error(response.error_code, action=_LIST)
                for one in response.groups:
                    listing = GroupListing(one.group_id, one.protocol_type, one.group_state)
                    found[one.group_id] = listing
            return [found[name] for name in sorted(found)]

        return self._router.retry.run(attempt, _LIST)

    def members(self, group: str) -> list[str]:
        """Return the IDs of a group's members; none if there is no such group.

        Raises:
            UsageError: No permission to describe the group.
            UnavailableError: No coordinator responded within the budget.
        """

        def attempt(connection: Connection) -> list[str]:
            low, high = _DESCRIBE_VERSIONS
            response = connection.call(DescribeGroupsRequest(groups=[group]), low=low, high=high)
            (found,) = response.groups
            if found.error_code:
                raise api_error(found.error_code, action=_DESCRIBE)
            return [member.member_id for member in found.members]

        return self._coordinated(group, attempt, _DESCRIBE)

    def commit(
        self, group: str, offsets: Mapping[TopicPartition, GroupOffset]
    ) -> dict[TopicPartition, LogmirrorError | None]:
        """Commit offsets of a group without members; returns the error of each partition.

        Raises:
            UnavailableError: No coordinator responded within the budget; it may have been done.
        """
        made = OffsetCommitRequest.OffsetCommitRequestTopic
        topics = by_topic(
            offsets,
            lambda partition: made.OffsetCommitRequestPartition(
                partition_index=partition.partition,
                committed_offset=offsets[partition].offset,
                committed_leader_epoch=offsets[partition].leader_epoch,
                committed_metadata=offsets[partition].metadata,
            ),
        )
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[made(name=name, partitions=entries) for name, entries in topics.items()],
        )

        def attempt(connection: Connection) -> dict[TopicPartition, LogmirrorError | None]:
            low, high = _COMMIT_VERSIONS
            return _outcomes(connection.call(request, low=low, high=high), _COMMIT)

        return self._coordinated(group, attempt, _COMMIT)

    def delete_offsets(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LogmirrorError | None]:
        """Delete committed offsets of a group; returns the error of each partition.

        Raises:
            UsageError: The group does not exist, or this user may not delete from it.
            UnavailableError: No coordinator responded within the budget; it may have been done.
        """
        topic = OffsetDeleteRequest.OffsetDeleteRequestTopic
        entry = topic.OffsetDeleteRequestPartition
        topics = by_topic(partitions, lambda one: entry(partition_index=one.partition))
        request = OffsetDeleteRequest(
            group_id=group,
            topics=[topic(name=name, partitions=entries) for name, entries in topics.items()],
        )

        def attempt(connection: Connection) -> dict[TopicPartition, LogmirrorError | None]:
            response = connection.call(request)
            if response.error_code:
                raise api_error(response.error_code, action=_DELETE)
            return _outcomes(response, _DELETE)

        return self._coordinated(group, attempt, _DELETE)

    def followed(self) -> CommittedOffsets:
        """Return a reader for groups whose offsets are read again and again."""
        return CommittedOffsets(self._router)

    def _coordinated(self, group: str, attempt: Callable[[Connection], _T], action: str) -> _T:
        return Coordinator(self._router, group, GROUP).run(attempt, action, group=group)


class ReadOffsets(NamedTuple):
    """All committed offsets of one group."""

    offsets: Mapping[TopicPartition, GroupOffset]
    errors: Mapping[TopicPartition, LogmirrorError]
    """Partitions whose offset could not be read: no permission, or a transaction with an offset
    commit is open (KIP-447)."""


@dataclass(slots=True)
class _Followed:
    coordinator: Coordinator
    memo: ResponseMemo = field(default_factory=ResponseMemo)
    response: Any = None
    found: ReadOffsets | None = None


class CommittedOffsets:
    """All committed offsets of groups that are read again and again. Not thread-safe.

    One request per group and read. A group whose coordinator sends the same bytes as before costs
    no decoding.

    Args:
        router: The router of the cluster.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._groups: dict[str, _Followed] = {}

    def read(self, group: str) -> ReadOffsets:
        """Read a group's offsets; unchanged ones are the same object as before.

        Raises:
            UsageError: No permission to read the group.
            UnavailableError: No coordinator responded within the budget.
        """
        if group not in self._groups:
            self._groups[group] = _Followed(Coordinator(self._router, group, GROUP))
        known = self._groups[group]

        def attempt(connection: Connection) -> ReadOffsets:
            request = OffsetFetchRequest(group_id=group, topics=None, require_stable=True)
            response = connection.call(request, low=_VERSION, high=_VERSION, memo=known.memo)
            if known.found is None or response is not known.response:
                known.found, known.response = _committed(response), response
            return known.found

        return known.coordinator.run(attempt, _FETCH, group=group)

    def retain(self, groups: Collection[str]) -> None:
        """Forget all other groups."""
        for group in self._groups.keys() - set(groups):
            del self._groups[group]


def _committed(response: Any) -> ReadOffsets:  # noqa: ANN401  # untyped library
    if response.error_code:
        raise api_error(response.error_code, action=_FETCH)
    offsets: dict[TopicPartition, GroupOffset] = {}
    errors: dict[TopicPartition, LogmirrorError] = {}
    for partition, offset in read_entries(_entries(response), _offset_of, _FETCH).items():
        if isinstance(offset, LogmirrorError):
            errors[partition] = offset
        elif offset is not None:
            offsets[partition] = offset
    return ReadOffsets(offsets, errors)


def _entries(response: Any) -> Iterator[tuple[TopicPartition, Any]]:  # noqa: ANN401  # untyped library
    for topic in response.topics:
        for entry in topic.partitions:
            yield TopicPartition(topic.name, entry.partition_index), entry


def _offset_of(entry: Any) -> GroupOffset | None:  # noqa: ANN401  # the same
    if entry.committed_offset < 0:
        return None
    epoch = int(entry.committed_leader_epoch)
    return GroupOffset(int(entry.committed_offset), epoch, entry.metadata or "")


def _outcomes(response: Any, action: str) -> dict[TopicPartition, LogmirrorError | None]:  # noqa: ANN401  # the same
    """Return the error of each partition; raises one that is worth another attempt."""
    found: dict[TopicPartition, LogmirrorError | None] = {}
    for partition, entry in _entries(response):
        error = api_error(entry.error_code, action=action) if entry.error_code else None
        is_final = entry.error_code == UNKNOWN_TOPIC_OR_PARTITION
        if error is not None and not is_final and error_of(entry.error_code).retriable:
            raise error
        found[partition] = error
    return found
