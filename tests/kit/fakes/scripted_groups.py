"""A source whose groups and committed offsets a test sets, for what reads them again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logmirror.cluster.groups import GroupListing, GroupOffset, ReadOffsets
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class ScriptedSource:
    """The methods of `ClusterClient` and `Groups` that read groups.

    Args:
        topic: Its one topic, of four partitions.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._committed: dict[str, dict[TopicPartition, GroupOffset]] = {}
        self._cache: dict[str, ReadOffsets] = {}
        self.topic_id = bytes(16)
        self.unreadable: set[str] = set()
        """Groups whose coordinator does not respond."""

        self.unread: set[tuple[str, int]] = set()
        """Partitions of groups in which a transaction is open."""

        self.before_read: Callable[[str], None] = lambda _group: None

    def commit(self, group: str, *offsets: int, topic: str = "", metadata: str = "") -> None:
        """Commit an offset of each partition, from 0 on."""
        for number, offset in enumerate(offsets):
            where = TopicPartition(topic or self._topic, number)
            committed = GroupOffset(offset, 5, metadata)
            self._committed.setdefault(group, {})[where] = committed

    def delete(self, group: str) -> None:
        """Delete a group."""
        del self._committed[group]

    @property
    def groups(self) -> ScriptedSource:
        """As `ClusterClient.groups`."""
        return self

    def followed(self) -> ScriptedSource:
        """As `Groups.followed`."""
        return self

    def cluster_id(self) -> str:
        """As `ClusterClient.cluster_id`."""
        return "c1"

    def describe_topics(self, names: Collection[str]) -> dict[str, Any]:
        """As `ClusterClient.describe_topics`."""
        partitions = dict.fromkeys(range(4))
        topic = SimpleNamespace(topic_id=self.topic_id, partitions=partitions)
        return dict.fromkeys(names, topic)

    def listed(self) -> list[GroupListing]:
        """As `Groups.listed`."""
        return [GroupListing(group, "consumer", "Empty") for group in sorted(self._committed)]

    def retain(self, groups: Collection[str]) -> None:
        """As `CommittedOffsets.retain`."""

    def read(self, group: str) -> ReadOffsets:
        """As `CommittedOffsets.read`."""
        self.before_read(group)
        if group in self.unreadable:
            raise UnavailableError("no coordinator responded", group=group)
        errors: dict[TopicPartition, LogmirrorError] = {
            one: UnavailableError("a transaction is open")
            for one in self._committed[group]
            if (group, one.partition) in self.unread
        }
        offsets = {at: one for at, one in self._committed[group].items() if at not in errors}
        found = ReadOffsets(offsets, errors)
        if (known := self._cache.get(group)) is None or known != found:
            self._cache[group] = found
        return self._cache[group]
