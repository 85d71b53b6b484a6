"""The coordinator: all groups of the broker, and their offsets.

Sans-IO: requests, identifiers and readings of the clocks come in as values. A method changes the
state at once and adds to `Effects` what has to be made durable and which waiting requests get a
response. The caller sends no response before the changes of this call and all earlier ones are
durable, so that no client sees a state that a crash can undo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.classic import ClassicGroup
from logmirror.broker.groups.consumer import ConsumerGroup
from logmirror.broker.groups.consumer_heartbeat import (
    JOINING,
    ConsumerHeartbeat,
    ConsumerResult,
    check_heartbeat,
)
from logmirror.broker.groups.offsets import OffsetTable
from logmirror.broker.groups.table import EXPIRY, Group, GroupTable
from logmirror.broker.groups.values import (
    GROUP,
    CommittedOffset,
    Effects,
    Identity,
    JoinRequest,
    Now,
    Partition,
    RefusedError,
    State,
    StateChange,
    SyncRequest,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.broker.groups.consumer_state import TopicInfo
    from logmirror.broker.groups.values import GroupSettings, Rows

MAX_PROTOCOLS: Final = 100
"""Limit for the protocols that a member supports; clients have up to about five."""

TIMERS_PER_CALL: Final = 256
"""Timers that fire in one call of `fire_due`; the caller gives others their turn in between."""


class GroupCoordinator:
    """All groups. Its methods are called one after the other.

    Args:
        settings: Limits and timeouts.
        find_topic: Returns a topic that exists, by name; for the groups that it assigns.
    """

    def __init__(
        self, settings: GroupSettings, find_topic: Callable[[str], TopicInfo | None]
    ) -> None:
        self.settings = settings
        self._table = GroupTable(settings, find_topic)
        self.groups = self._table.by_id
        self.offsets = OffsetTable()

    # Start

    def load(self, rows: Rows, topic_ids: Mapping[str, bytes], now: Now) -> list[StateChange]:
        """Restore the durable state.

        Args:
            rows: Returns keys and values of a kind.
            topic_ids: By name. Offsets of other topics of these names are dropped (`topic_added`).
            now: Every session begins again.

        Returns:
            Changes that remove what was dropped.

        Raises:
            CorruptionError: A value cannot be read.
        """
        changes = self._table.load(rows, now)
        changes += self.offsets.load(rows, topic_ids)
        self._table.load_others(self.offsets.groups(), now)
        return changes

    # Membership

    def join(self, request: JoinRequest, token: Token, now: Now, out: Effects) -> None:
        """Handle JoinGroup; the response is among the effects of this call or of a later one.

        Raises:
            RefusedError: The request gets this error at once.
        """
        settings = self.settings
        if not request.group_id:
            raise RefusedError(ErrorCode.INVALID_GROUP_ID)
        timeout_ms = request.session_timeout_ms
        if not settings.min_session_timeout_ms <= timeout_ms <= settings.max_session_timeout_ms:
            raise RefusedError(ErrorCode.INVALID_SESSION_TIMEOUT)
        if len(request.protocols) > MAX_PROTOCOLS:
            raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        self._table.check_bytes(sum(len(name) + len(data) for name, data in request.protocols))
        group = self.groups.get(request.group_id)
        if not isinstance(group, ClassicGroup):
            if group is not None and not group.is_empty:
                raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            if request.member_id:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            if not request.protocol_type or not request.protocols:
                raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            group = self._table.begin_classic(request.group_id, now)
        group.join(request, token, now, out)
        self._table.recount(group)

    def consumer_heartbeat(
        self, request: ConsumerHeartbeat, now: Now, out: Effects
    ) -> ConsumerResult:
        """Handle ConsumerGroupHeartbeat.

        Raises:
            RefusedError: The request gets this error.
        """
        check_heartbeat(request)
        self._table.check_bytes(sum(len(topic) for topic in request.topics or ()))
        group = self.groups.get(request.group_id)
        if not isinstance(group, ConsumerGroup):
            if group is not None and not (group.is_empty and not group.pending):
                reason = "the group uses the classic protocol"
                raise RefusedError(ErrorCode.GROUP_ID_NOT_FOUND, reason)
            if request.member_epoch != JOINING:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            group = self._table.begin_consumer(request.group_id, now)
        try:
            return group.heartbeat(request, now, out)
        finally:
            self._table.recount(group)

    def regex_of(self, group_id: str, member_id: str) -> str:
        """Return the regular expression that a member subscribes by; empty if it has none."""
        group = self.groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or member_id not in group.members:
            return ""
        return group.members[member_id].regex

    def sync(self, request: SyncRequest, token: Token, now: Now, out: Effects) -> None:
        """Handle SyncGroup, as `join`.

        Raises:
            RefusedError: The request gets this error at once.
        """
        group = self._known(request.member.group_id)
        self._table.check_bytes(sum(len(data) for data in request.assignments.values()))
        group.sync(request, token, now, out)
        self._table.recount(group)

    def heartbeat(self, who: Identity, now: Now) -> ErrorCode:
        """Handle Heartbeat.

        Raises:
            RefusedError: The member is unknown or fenced, or its generation is over.
        """
        return self._known(who.group_id).heartbeat(who, now)

    def leave(
        self, group_id: str, members: Iterable[tuple[str, str | None]], now: Now, out: Effects
    ) -> list[ErrorCode]:
        """Handle LeaveGroup; returns an error code for each member ID and instance ID.

        Raises:
            RefusedError: The group ID is empty.
        """
        if not group_id:
            raise RefusedError(ErrorCode.INVALID_GROUP_ID)
        group = self.groups.get(group_id)
        codes = []
        for member_id, instance_id in members:
            code = ErrorCode.UNKNOWN_MEMBER_ID
            if isinstance(group, ClassicGroup):
                try:
                    group.leave(member_id, instance_id, now, out)
                    code = ErrorCode.NONE
                except RefusedError as refused:
                    code = refused.code
            codes.append(code)
        if group is not None:
            self._table.recount(group)
        return codes

    def _known(self, group_id: str) -> ClassicGroup:
        """Return the group of the classic protocol that a member says it belongs to."""
        if not group_id:
            raise RefusedError(ErrorCode.INVALID_GROUP_ID)
        group = self.groups.get(group_id)
        if not isinstance(group, ClassicGroup):
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        return group

    # Offsets

    def commit(
        self,
        who: Identity,
        offsets: Mapping[Partition, CommittedOffset],
        now: Now,
        out: Effects,
        *,
        producer_id: int | None = None,
    ) -> None:
        """Commit offsets of existing partitions.

        Args:
            who: A member, or none (generation -1) in a group without members.
            offsets: By partition.
            now: The time of the commit, already in `offsets`.
            out: Gets the changes.
            producer_id: The offsets belong to the open transaction of this producer: they are
                committed by `end_transaction`.

        Raises:
            RefusedError: Nothing was committed.
        """
        group = self.groups.get(who.group_id)
        if group is None:
            if who.generation >= 0:
                raise RefusedError(ErrorCode.ILLEGAL_GENERATION)
            group = self._table.begin_classic(who.group_id, now)
        group.check_commit(who, now, in_transaction=producer_id is not None)
        if self.offsets.count + len(offsets) > self.settings.max_offsets:
            new = offsets.keys() - self.offsets.of_group(who.group_id).keys()
            if new:
                raise RefusedError(ErrorCode.POLICY_VIOLATION, "too many committed offsets")
        if not offsets:
            return
        if producer_id is None:
            out.changes += self.offsets.put(who.group_id, offsets)
        else:
            out.changes += self.offsets.put_pending(who.group_id, producer_id, offsets)

    def end_transaction(self, producer_id: int, out: Effects, *, is_committed: bool) -> None:
        """Commit or drop the offsets of a producer's open transaction."""
        out.changes += self.offsets.end_transaction(producer_id, is_committed=is_committed)

    def delete_offsets(
        self, group_id: str, partitions: Iterable[Partition], out: Effects
    ) -> dict[Partition, ErrorCode]:
        """Handle OffsetDelete; returns an error code for each partition.

        Raises:
            RefusedError: The group does not exist, or has members that are no consumers.
        """
        if not group_id:
            raise RefusedError(ErrorCode.INVALID_GROUP_ID)
        group = self.groups.get(group_id)
        if group is None:
            raise RefusedError(ErrorCode.GROUP_ID_NOT_FOUND)
        subscribed: set[str] = set()
        if not group.is_empty:
            found = group.topics()
            if found is None:
                raise RefusedError(ErrorCode.NON_EMPTY_GROUP)
            subscribed = found
        codes = {
            one: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if one[0] in subscribed else ErrorCode.NONE
            for one in partitions
        }
        gone = [one for one, code in codes.items() if code is ErrorCode.NONE]
        out.changes += self.offsets.remove(group_id, gone)
        return codes

    def topic_deleted(self, topic: str, out: Effects) -> None:
        """Remove the offsets of a deleted topic."""
        out.changes += self.offsets.remove_topic(topic)

    def topic_added(self, topic: str, topic_id: bytes, out: Effects) -> None:
        """Remove the offsets of an earlier topic of this name that the start kept."""
        out.changes += self.offsets.topic_added(topic, topic_id)

    # Groups

    def delete(self, group_id: str, _: Now, out: Effects) -> ErrorCode:
        """Delete a group without members, and its offsets."""
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if not group.is_empty:
            return ErrorCode.NON_EMPTY_GROUP
        self._delete(group, out)
        return ErrorCode.NONE

    def _delete(self, group: Group, out: Effects) -> None:
        self._table.remove(group)
        out.changes += self.offsets.remove_group(group.group_id)
        out.changes.append(StateChange(GROUP, group.group_id.encode(), None))

    # Time

    def next_due_ms(self) -> int | None:
        """Return when `fire_due` has something to do, on the monotonic clock."""
        return self._table.timers.next_due_ms()

    def fire_due(self, now: Now, out: Effects) -> None:
        """Handle the timers that are due, at most `TIMERS_PER_CALL`."""
        for _ in range(TIMERS_PER_CALL):
            timer = self._table.timers.take_due(now.monotonic_ms)
            if timer is None:
                return
            group = self.groups.get(timer.group_id)
            if group is None:
                continue
            if timer.kind == EXPIRY:
                if timer.due_ms == group.check_due_ms:
                    self._expire(group, now, out)
            else:
                group.fired(timer.kind, timer.key, now, out)
                self._table.recount(group)

    def _expire(self, group: Group, now: Now, out: Effects) -> None:
        """Remove expired offsets, and the group if nothing is left of it."""
        kept: set[str] | None = set()
        if not group.is_empty:
            kept = group.topics() if group.state is State.STABLE else None
        if kept is not None:
            out.changes += self.offsets.remove_expired(
                group.group_id,
                now.time_ms,
                retention_ms=self.settings.offsets_retention_ms,
                empty_since_ms=group.empty_since_ms if group.is_empty else 0,
                kept_topics=kept,
            )
        is_over = group.is_empty and not group.pending
        has_offsets = bool(self.offsets.of_group(group.group_id))
        if is_over and not has_offsets and not self.offsets.has_pending(group.group_id):
            self._delete(group, out)
            return
        self._table.expire_later(group, now)
