"""All groups by ID: how they begin and end, and what they take in memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.classic import ClassicGroup
from logmirror.broker.groups.classic_state import CLASSIC
from logmirror.broker.groups.consumer import ConsumerGroup
from logmirror.broker.groups.consumer_state import (
    CONSUMER,
    ConsumerMember,
    TopicInfo,
    read_member,
    read_member_key,
)
from logmirror.broker.groups.encoding import decoded
from logmirror.broker.groups.timers import Timers
from logmirror.broker.groups.values import (
    GROUP,
    GROUP_MEMBER,
    Now,
    RefusedError,
    StateChange,
)
from logmirror.wire.frames import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.groups.values import GroupSettings, Rows
    from logmirror.wire.frames import Cursor

Group = ClassicGroup | ConsumerGroup

EXPIRY: Final = "expiry"
"""The timer for the next check of a group's offsets."""

_TIMER_BYTES: Final = 250
"""Of a timer in memory. They count: those of members that have left stay until they are due."""


class GroupTable:
    """The groups and their timers.

    Args:
        settings: Limits and timeouts.
        find_topic: Returns a topic that exists, by name; for the groups that it assigns.
    """

    def __init__(
        self, settings: GroupSettings, find_topic: Callable[[str], TopicInfo | None]
    ) -> None:
        self._settings = settings
        self._find_topic = find_topic
        self.by_id: dict[str, Group] = {}
        self.timers = Timers()
        self._bytes = 0

    # Start

    def load(self, rows: Rows, now: Now) -> list[StateChange]:
        """Restore the groups, see `GroupCoordinator.load`.

        Raises:
            CorruptionError: A value cannot be read.
        """
        changes = []
        for key, value in rows(GROUP):
            read = functools.partial(self._restored, key.decode(), now)
            self.recount(decoded("group", key, value, read))
        for key, value in rows(GROUP_MEMBER):
            group_id, member_id = read_member_key(key)
            member = ConsumerMember(member_id=member_id)
            decoded("group", key, value, functools.partial(read_member, member))
            group = self.by_id.get(group_id)
            if isinstance(group, ConsumerGroup):
                group.restore_member(member, now)
                self.recount(group)
            else:
                changes.append(StateChange(GROUP_MEMBER, key, None))
        return changes

    def _restored(self, group_id: str, now: Now, cursor: Cursor) -> Group:
        kind = bytes(cursor.take(len(CLASSIC)))
        if kind == CONSUMER:
            group = self._added_consumer(group_id, now)
            group.restore(cursor)
            return group
        if kind != CLASSIC:
            raise RemoteProtocolError("unknown type of group", type=kind.hex())
        classic = self._added_classic(group_id, now)
        classic.restore(cursor, now)
        return classic

    def load_others(self, group_ids: set[str], now: Now) -> None:
        """Add the groups that have no durable state of their own: those with offsets only."""
        for group_id in group_ids - self.by_id.keys():
            self._added_classic(group_id, now)

    # Groups

    def _added_classic(self, group_id: str, now: Now) -> ClassicGroup:
        group = ClassicGroup(group_id, self._settings, self.timers)
        self.by_id[group_id] = group
        self.expire_later(group, now)
        return group

    def _added_consumer(self, group_id: str, now: Now) -> ConsumerGroup:
        group = ConsumerGroup(group_id, self._settings, self.timers, self._find_topic)
        self.by_id[group_id] = group
        self.expire_later(group, now)
        return group

    def begin_classic(self, group_id: str, now: Now) -> ClassicGroup:
        """Begin a group of the classic protocol, perhaps in place of one without members.

        Raises:
            RefusedError: There are too many groups.
        """
        epoch, empty_since_ms = self._make_room(group_id)
        group = self._added_classic(group_id, now)
        group.generation, group.empty_since_ms = epoch, empty_since_ms
        return group

    def begin_consumer(self, group_id: str, now: Now) -> ConsumerGroup:
        """Begin a group of the consumer protocol, as `begin_classic`.

        Raises:
            RefusedError: There are too many groups.
        """
        generation, empty_since_ms = self._make_room(group_id)
        group = self._added_consumer(group_id, now)
        group.epoch, group.empty_since_ms = generation, empty_since_ms
        return group

    def _make_room(self, group_id: str) -> tuple[int, int]:
        """Return what a new group with this ID continues from.

        That is the generation or epoch, and the time when the last member left. A client that asks
        for a member ID may never join, and the offsets must not expire sooner because of it.
        """
        group = self.by_id.get(group_id)
        if group is None:
            if len(self.by_id) >= self._settings.max_groups:
                raise RefusedError(ErrorCode.POLICY_VIOLATION, "too many groups")
            return 0, 0
        self._bytes -= group.counted_bytes
        epoch = group.epoch if isinstance(group, ConsumerGroup) else group.generation
        return epoch, group.empty_since_ms

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self.by_id[group.group_id]
        self._bytes -= group.counted_bytes

    def expire_later(self, group: Group, now: Now) -> None:
        """Set the timer for the next check of a group's offsets."""
        group.check_due_ms = now.monotonic_ms + self._settings.offsets_check_ms
        self.timers.set(group.check_due_ms, group.group_id, EXPIRY)

    # Memory

    def recount(self, group: Group) -> None:
        """Count what a group takes in memory."""
        self._bytes += group.size_bytes - group.counted_bytes
        group.counted_bytes = group.size_bytes

    def check_bytes(self, more: int) -> None:
        """Refuse a request that would store so many bytes more than all groups may take.

        Raises:
            RefusedError: It would.
        """
        timers = _TIMER_BYTES * len(self.timers)
        if self._bytes + timers + more > self._settings.max_bytes:
            reason = "subscriptions and assignments of all groups exceed the broker's limit"
            raise RefusedError(ErrorCode.POLICY_VIOLATION, reason)
