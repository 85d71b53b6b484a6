"""A simulated group coordinator: committed offsets, members, and the states of groups.

Offsets that a client commits without being a member are refused while the group has members, as
brokers do. Transactions with offset commits are not simulated.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.model import TopicPartition
from logmirror.wire.messages import NONE, UNKNOWN_TOPIC_OR_PARTITION

if TYPE_CHECKING:
    from collections.abc import Callable, Container

_UNKNOWN_MEMBER_ID: Final = 25


class Committed(NamedTuple):
    """One committed offset."""

    offset: int
    metadata: str


class Change(NamedTuple):
    """One committed offset of a client that is not a member."""

    process: str
    group: str
    partition: TopicPartition
    before: Committed | None
    made: Committed
    is_raced: bool
    """Whether the group's offsets have changed between the client's read and this."""


class GroupOffsets:
    """The groups of a cluster.

    Attributes:
        offsets: The committed offsets of each group.
        active: The groups with members.
        versions: How often the offsets of a group were changed.
        changed: Called with a `Change` by a client that is not a member.
    """

    def __init__(self) -> None:
        self.offsets: dict[str, dict[TopicPartition, Committed]] = {}
        self.active: set[str] = set()
        self.versions: Counter[str] = Counter()
        self.changed: Callable[[Change], None] = lambda _change: None
        self._read: dict[tuple[str, str], int] = {}

    def read_by(self, process: str, group: str) -> int:
        """Return the version of a group's offsets that a process has read last."""
        return self._read.get((process, group), -1)

    def listed(self) -> SimpleNamespace:
        """ListGroups."""
        groups = [
            SimpleNamespace(
                group_id=group,
                protocol_type="consumer",
                group_state="Stable" if group in self.active else "Empty",
            )
            for group in sorted({*self.offsets, *self.active})
        ]
        return SimpleNamespace(error_code=NONE, groups=groups)

    def fetched(self, request: Any, process: str) -> SimpleNamespace:  # noqa: ANN401  # untyped library
        """OffsetFetch, of one group."""
        group = request.group_id
        offsets = self.offsets.get(group, {})
        wanted = sorted(offsets)
        if request.topics is not None:
            wanted = [
                TopicPartition(topic.name, number)
                for topic in request.topics
                for number in topic.partition_indexes
            ]
        self._read[process, group] = self.versions[group]
        missing = Committed(-1, "")
        topics = [_entry(one, *offsets.get(one, missing)) for one in wanted]
        return SimpleNamespace(error_code=NONE, topics=topics)

    def commit(
        self,
        request: Any,  # noqa: ANN401  # untyped library
        topics: Container[str],
        process: str,
        read: int,
    ) -> SimpleNamespace:
        """OffsetCommit by a client that is not a member.

        Args:
            request: The request.
            topics: The topics that exist.
            process: The name of the process that has sent it.
            read: The version of the offsets that the process had read when it sent the request.
        """
        group, results = request.group_id, []
        is_raced = read != self.versions[group]
        self.versions[group] += 1
        for topic in request.topics:
            for entry in topic.partitions:
                partition = TopicPartition(topic.name, entry.partition_index)
                made = Committed(entry.committed_offset, entry.committed_metadata)
                code = NONE
                if group in self.active:
                    code = _UNKNOWN_MEMBER_ID
                elif topic.name not in topics:
                    code = UNKNOWN_TOPIC_OR_PARTITION
                else:
                    offsets = self.offsets.setdefault(group, {})
                    before = offsets.get(partition)
                    offsets[partition] = made
                    self.changed(Change(process, group, partition, before, made, is_raced))
                result = SimpleNamespace(partition_index=partition.partition, error_code=code)
                results.append(SimpleNamespace(name=topic.name, partitions=[result]))
        return SimpleNamespace(topics=results)


def _entry(partition: TopicPartition, offset: int, metadata: str) -> SimpleNamespace:
    entry = SimpleNamespace(
        partition_index=partition.partition,
        committed_offset=offset,
        committed_leader_epoch=-1,
        metadata=metadata,
        error_code=NONE,
    )
    return SimpleNamespace(name=partition.topic, partitions=[entry])
