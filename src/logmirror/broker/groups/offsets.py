"""Committed offsets of all groups, those of open transactions, and their expiry.

An offset expires `offsets.retention.minutes` after its commit or after its group lost its last
member, whichever is later (KIP-211); in a group with members, when none of them subscribes to the
topic any more. Offsets of open transactions never expire, and they keep the offset before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.groups.encoding import (
    decoded,
    get_offset,
    offset_key,
    pending_key,
    put_offset,
    read_offset_key,
    read_pending_key,
)
from logmirror.broker.groups.values import (
    NO_EXPIRY,
    OFFSET,
    PENDING_OFFSET,
    CommittedOffset,
    Partition,
    StateChange,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.broker.groups.values import Rows

_NONE: dict[Partition, CommittedOffset] = {}


class OffsetTable:
    """Offsets by group and partition. Methods that change it return the durable changes."""

    def __init__(self) -> None:
        self._by_group: dict[str, dict[Partition, CommittedOffset]] = {}
        self._pending: dict[str, dict[int, dict[Partition, CommittedOffset]]] = {}
        """By group and producer ID."""

        self._producers: dict[int, set[str]] = {}
        """The groups with offsets of a producer's open transaction."""

        self._topics: dict[str, set[str]] = {}
        """The groups with offsets of a topic. A group may have lost them since."""

        self._loaded: dict[str, set[bytes]] = {}
        """IDs of the topics that the start found offsets of, by name."""

        self.count = 0
        """Offsets of all groups, those of open transactions included."""

    def of_group(self, group_id: str) -> Mapping[Partition, CommittedOffset]:
        """Return a group's committed offsets."""
        return self._by_group.get(group_id, _NONE)

    def is_pending(self, group_id: str, partition: Partition) -> bool:
        """Whether an open transaction has an offset for this partition."""
        producers = self._pending.get(group_id)
        return producers is not None and any(partition in found for found in producers.values())

    def has_pending(self, group_id: str) -> bool:
        """Whether an open transaction has offsets for this group."""
        return group_id in self._pending

    def groups(self) -> set[str]:
        """Return the groups that have any."""
        return {*self._by_group, *self._pending}

    # Start

    def load(self, rows: Rows, topic_ids: Mapping[str, bytes]) -> list[StateChange]:
        """Restore the offsets, see `GroupCoordinator.load`.

        Raises:
            CorruptionError: A value cannot be read.
        """
        dropped = []

        def read(kind: str, key: bytes, value: bytes, topic: str) -> CommittedOffset | None:
            found = decoded("committed offset", key, value, get_offset)
            if topic_ids.get(topic, found.topic_id) != found.topic_id:
                dropped.append(StateChange(kind, key, None))
                return None
            self._loaded.setdefault(topic, set()).add(found.topic_id)
            return found

        for key, value in rows(OFFSET):
            group_id, topic, number = read_offset_key(key)
            if found := read(OFFSET, key, value, topic):
                self.put(group_id, {(topic, number): found})
        for key, value in rows(PENDING_OFFSET):
            group_id, producer_id, topic, number = read_pending_key(key)
            if found := read(PENDING_OFFSET, key, value, topic):
                self.put_pending(group_id, producer_id, {(topic, number): found})
        return dropped

    # Changes

    def put(self, group_id: str, offsets: Mapping[Partition, CommittedOffset]) -> list[StateChange]:
        """Commit offsets."""
        mine = self._by_group.setdefault(group_id, {})
        self.count -= len(mine)
        changes = []
        for partition, found in offsets.items():
            mine[partition] = found
            self._topics.setdefault(partition[0], set()).add(group_id)
            key = offset_key(group_id, *partition)
            changes.append(StateChange(OFFSET, key, put_offset(found)))
        self.count += len(mine)
        return changes

    def put_pending(
        self, group_id: str, producer_id: int, offsets: Mapping[Partition, CommittedOffset]
    ) -> list[StateChange]:
        """Add offsets to a producer's open transaction."""
        mine = self._pending.setdefault(group_id, {}).setdefault(producer_id, {})
        self._producers.setdefault(producer_id, set()).add(group_id)
        self.count -= len(mine)
        changes = []
        for partition, found in offsets.items():
            mine[partition] = found
            self._topics.setdefault(partition[0], set()).add(group_id)
            key = pending_key(group_id, producer_id, *partition)
            changes.append(StateChange(PENDING_OFFSET, key, put_offset(found)))
        self.count += len(mine)
        return changes

    def end_transaction(self, producer_id: int, *, is_committed: bool) -> list[StateChange]:
        """Commit or drop the offsets of a producer's open transaction, in all groups."""
        changes = []
        for group_id in sorted(self._producers.pop(producer_id, ())):
            found = self._pop_pending(group_id, producer_id)
            changes += _removed_pending(group_id, producer_id, found)
            if is_committed and found:
                changes += self.put(group_id, found)
        return changes

    def _pop_pending(self, group_id: str, producer_id: int) -> dict[Partition, CommittedOffset]:
        producers = self._pending.get(group_id, {})
        found = producers.pop(producer_id, {})
        if not producers:
            self._pending.pop(group_id, None)
        self.count -= len(found)
        return found

    def remove(self, group_id: str, partitions: Iterable[Partition]) -> list[StateChange]:
        """Remove committed offsets; those that do not exist are left out."""
        mine = self._by_group.get(group_id, {})
        gone = [partition for partition in partitions if mine.pop(partition, None) is not None]
        self.count -= len(gone)
        if not mine:
            self._by_group.pop(group_id, None)
        return [StateChange(OFFSET, offset_key(group_id, *one), None) for one in gone]

    def remove_group(self, group_id: str) -> list[StateChange]:
        """Remove all offsets of a group, those of open transactions too."""
        changes = self.remove(group_id, tuple(self.of_group(group_id)))
        for producer_id in tuple(self._pending.get(group_id, ())):
            found = self._pop_pending(group_id, producer_id)
            changes += _removed_pending(group_id, producer_id, found)
            groups = self._producers.get(producer_id, set())
            groups.discard(group_id)
            if not groups:
                self._producers.pop(producer_id, None)
        return changes

    def remove_topic(self, topic: str) -> list[StateChange]:
        """Remove the offsets of a deleted topic."""
        changes: list[StateChange] = []
        for group_id in self._topics.pop(topic, set()):
            mine = self.of_group(group_id)
            changes += self.remove(group_id, [one for one in mine if one[0] == topic])
            for producer_id, found in self._pending.get(group_id, {}).items():
                gone = {one: found.pop(one) for one in tuple(found) if one[0] == topic}
                self.count -= len(gone)
                changes += _removed_pending(group_id, producer_id, gone)
        return changes

    def topic_added(self, topic: str, topic_id: bytes) -> list[StateChange]:
        """Remove what the start kept of an earlier topic: an archive might have been away only."""
        is_new = bool(self._loaded.pop(topic, set()) - {topic_id})
        return self.remove_topic(topic) if is_new else []

    def remove_expired(
        self,
        group_id: str,
        time_ms: int,
        *,
        retention_ms: int,
        empty_since_ms: int,
        kept_topics: set[str],
    ) -> list[StateChange]:
        """Remove the offsets that have expired.

        Args:
            group_id: The group.
            time_ms: Now, since 1970.
            retention_ms: `offsets.retention.minutes`.
            empty_since_ms: Since when the group has no members; 0 if it has some.
            kept_topics: Topics whose offsets stay: those that members subscribe to.
        """
        gone = []
        for partition, found in self.of_group(group_id).items():
            expire_ms = found.expire_ms
            if expire_ms == NO_EXPIRY:
                expire_ms = max(found.commit_ms, empty_since_ms) + retention_ms
            is_kept = partition[0] in kept_topics or self.is_pending(group_id, partition)
            if expire_ms <= time_ms and not is_kept:
                gone.append(partition)
        return self.remove(group_id, gone)


def _removed_pending(
    group_id: str, producer_id: int, found: Iterable[Partition]
) -> list[StateChange]:
    return [
        StateChange(PENDING_OFFSET, pending_key(group_id, producer_id, *one), None) for one in found
    ]
