"""The coordinator: all groups of the broker, and their offsets.

Sans-IO: requests, identifiers and readings of the clocks come in as values. A method changes the
state at once and adds to `Effects` what has to be made durable and which waiting requests get a
response. The caller sends no response before the changes of this call and all earlier ones are
durable, so that no client sees a state that a crash can undo.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.assignors import ASSIGNORS
from logmirror.broker.groups.classic import ClassicGroup
from logmirror.broker.groups.classic_state import CLASSIC
from logmirror.broker.groups.consumer import (
    JOINING,
    LEAVING_FOR_A_MOMENT,
    ConsumerGroup,
    ConsumerHeartbeat,
    ConsumerResult,
)
from logmirror.broker.groups.consumer_state import (
    CONSUMER,
    ConsumerMember,
    TopicInfo,
    read_member,
    read_member_key,
)
from logmirror.broker.groups.encoding import (
    decoded,
    get_offset,
    read_offset_key,
    read_pending_key,
)
from logmirror.broker.groups.offsets import OffsetTable
from logmirror.broker.groups.timers import Timers
from logmirror.broker.groups.values import (
    GROUP,
    GROUP_MEMBER,
    OFFSET,
    PENDING_OFFSET,
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
from logmirror.wire.frames import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.broker.groups.values import GroupSettings
    from logmirror.wire.frames import Cursor

Group = ClassicGroup | ConsumerGroup

_EXPIRY: Final = "expiry"
_TIMER_BYTES: Final = 250
"""Of a timer in memory. They count: those of members that have left stay until they are due."""

MAX_PROTOCOLS: Final = 100
"""Limit for the protocols that a member supports; clients have up to about five."""

MAX_TOPICS: Final = 20_000
"""Limit for the topics that a member of the consumer protocol subscribes to."""

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
        self._find_topic = find_topic
        self.groups: dict[str, Group] = {}
        self.offsets = OffsetTable()
        self._found: dict[str, set[bytes]] = {}  # IDs of the topics that the start found offsets of
        self._timers = Timers()
        self._bytes = 0

    # Start

    def load(
        self,
        rows: Callable[[str], Iterable[tuple[bytes, bytes]]],
        topic_ids: Mapping[str, bytes],
        now: Now,
    ) -> list[StateChange]:
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
        changes = []
        for key, value in rows(GROUP):
            read = functools.partial(self._restored, key.decode(), now)
            self._recount(decoded("group", key, value, read))
        for key, value in rows(GROUP_MEMBER):
            group_id, member_id = read_member_key(key)
            member = ConsumerMember(member_id=member_id)
            decoded("group", key, value, functools.partial(read_member, member))
            group = self.groups.get(group_id)
            if isinstance(group, ConsumerGroup):
                group.restore_member(member, now)
                self._recount(group)
            else:
                changes.append(StateChange(GROUP_MEMBER, key, None))
        for key, value in rows(OFFSET):
            group_id, topic, number = read_offset_key(key)
            found = decoded("committed offset", key, value, get_offset)
            if topic_ids.get(topic, found.topic_id) == found.topic_id:
                self._found.setdefault(topic, set()).add(found.topic_id)
                self.offsets.put(group_id, {(topic, number): found})
            else:
                changes.append(StateChange(OFFSET, key, None))
        for key, value in rows(PENDING_OFFSET):
            group_id, producer_id, topic, number = read_pending_key(key)
            found = decoded("committed offset", key, value, get_offset)
            if topic_ids.get(topic, found.topic_id) == found.topic_id:
                self._found.setdefault(topic, set()).add(found.topic_id)
                self.offsets.put_pending(group_id, producer_id, {(topic, number): found})
            else:
                changes.append(StateChange(PENDING_OFFSET, key, None))
        for group_id in self.offsets.groups() - self.groups.keys():
            self._created(group_id, now)
        return changes

    def _restored(self, group_id: str, now: Now, cursor: Cursor) -> Group:
        kind = bytes(cursor.take(len(CLASSIC)))
        if kind == CONSUMER:
            group = self._created_consumer(group_id, now)
            group.restore(cursor)
            return group
        if kind != CLASSIC:
            raise RemoteProtocolError("unknown type of group", type=kind.hex())
        classic = self._created(group_id, now)
        classic.restore(cursor, now)
        return classic

    def _created(self, group_id: str, now: Now) -> ClassicGroup:
        group = ClassicGroup(group_id, self.settings, self._timers)
        self.groups[group_id] = group
        self._expire_later(group, now)
        return group

    def _created_consumer(self, group_id: str, now: Now) -> ConsumerGroup:
        group = ConsumerGroup(group_id, self.settings, self._timers, self._find_topic)
        self.groups[group_id] = group
        self._expire_later(group, now)
        return group

    def _expire_later(self, group: Group, now: Now) -> None:
        group.check_due_ms = now.monotonic_ms + self.settings.offsets_check_ms
        self._timers.set(group.check_due_ms, group.group_id, _EXPIRY)

    def _check_count(self) -> None:
        if len(self.groups) >= self.settings.max_groups:
            raise RefusedError(ErrorCode.POLICY_VIOLATION, "too many groups")

    def _recount(self, group: Group) -> None:
        """Count what a group takes in memory."""
        self._bytes += group.size_bytes - group.counted_bytes
        group.counted_bytes = group.size_bytes

    def _check_bytes(self, more: int) -> None:
        timers = _TIMER_BYTES * len(self._timers)
        if self._bytes + timers + more > self.settings.max_bytes:
            reason = "subscriptions and assignments of all groups exceed the broker's limit"
            raise RefusedError(ErrorCode.POLICY_VIOLATION, reason)

    def _known(self, group_id: str) -> ClassicGroup:
        """Return the group of the classic protocol that a member says it belongs to."""
        if not group_id:
            raise RefusedError(ErrorCode.INVALID_GROUP_ID)
        group = self.groups.get(group_id)
        if not isinstance(group, ClassicGroup):
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        return group

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
        self._check_bytes(sum(len(name) + len(data) for name, data in request.protocols))
        group = self.groups.get(request.group_id)
        if not isinstance(group, ClassicGroup):
            if group is not None and not group.is_empty:
                raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            if request.member_id:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            if not request.protocol_type or not request.protocols:
                raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            epoch = self._make_room(group)
            group = self._created(request.group_id, now)
            group.generation = epoch
        group.join(request, token, now, out)
        self._recount(group)

    def _make_room(self, group: Group | None) -> int:
        """Prepare for a group of another protocol in place of one without members.

        Returns the generation or epoch that the new group continues from.
        """
        if group is None:
            self._check_count()
            return 0
        self._bytes -= group.counted_bytes
        return group.epoch if isinstance(group, ConsumerGroup) else group.generation

    def consumer_heartbeat(
        self, request: ConsumerHeartbeat, now: Now, out: Effects
    ) -> ConsumerResult:
        """Handle ConsumerGroupHeartbeat.

        Raises:
            RefusedError: The request gets this error.
        """
        _check_heartbeat(request)
        self._check_bytes(sum(len(topic) for topic in request.topics or ()))
        group = self.groups.get(request.group_id)
        if not isinstance(group, ConsumerGroup):
            if group is not None and not (group.is_empty and not group.pending):
                reason = "the group uses the classic protocol"
                raise RefusedError(ErrorCode.GROUP_ID_NOT_FOUND, reason)
            if request.member_epoch != JOINING:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            generation = self._make_room(group)
            group = self._created_consumer(request.group_id, now)
            group.epoch = generation
        try:
            return group.heartbeat(request, now, out)
        finally:
            self._recount(group)

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
        self._check_bytes(sum(len(data) for data in request.assignments.values()))
        group.sync(request, token, now, out)
        self._recount(group)

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
            self._recount(group)
        return codes

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
            self._check_count()
            group = self._created(who.group_id, now)
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
        """Remove what the start kept of an earlier topic: an archive might have been away only."""
        if self._found.pop(topic, set()) - {topic_id}:
            self.topic_deleted(topic, out)

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
        del self.groups[group.group_id]
        self._bytes -= group.counted_bytes
        out.changes += self.offsets.remove_group(group.group_id)
        out.changes.append(StateChange(GROUP, group.group_id.encode(), None))

    # Time

    def next_due_ms(self) -> int | None:
        """Return when `fire_due` has something to do, on the monotonic clock."""
        return self._timers.next_due_ms()

    def fire_due(self, now: Now, out: Effects) -> None:
        """Handle the timers that are due, at most `TIMERS_PER_CALL`."""
        for _ in range(TIMERS_PER_CALL):
            timer = self._timers.take_due(now.monotonic_ms)
            if timer is None:
                return
            group = self.groups.get(timer.group_id)
            if group is None:
                continue
            if timer.kind == _EXPIRY:
                if timer.due_ms == group.check_due_ms:
                    self._expire(group, now, out)
            else:
                group.fired(timer.kind, timer.key, now, out)
                self._recount(group)

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
        self._expire_later(group, now)


def _check_heartbeat(request: ConsumerHeartbeat) -> None:
    """Check the fields of a ConsumerGroupHeartbeat request, as Kafka does."""
    reason = ""
    epoch = request.member_epoch
    if not request.group_id:
        reason = "the group ID must not be empty"
    elif not request.member_id:
        reason = "the member ID must not be empty"
    elif "" in {request.instance_id, request.rack_id, request.assignor}:
        reason = "instance ID, rack ID and assignor must not be empty"
    elif epoch < LEAVING_FOR_A_MOMENT:
        reason = f"member epoch {epoch} is not valid"
    elif epoch == LEAVING_FOR_A_MOMENT and request.instance_id is None:
        reason = "only a static member leaves with epoch -2"
    elif len(request.topics or ()) > MAX_TOPICS:
        reason = f"a member may subscribe to at most {MAX_TOPICS} topics"
    elif epoch == JOINING:
        reason = _join_mistake(request)
    if reason:
        raise RefusedError(ErrorCode.INVALID_REQUEST, reason)
    if epoch >= JOINING and request.assignor not in {None, *ASSIGNORS}:
        known = ", ".join(ASSIGNORS)
        raise RefusedError(ErrorCode.UNSUPPORTED_ASSIGNOR, f"supported assignors: {known}")


def _join_mistake(request: ConsumerHeartbeat) -> str:
    """Return what is wrong with the first heartbeat of a member; empty if nothing is."""
    if request.rebalance_timeout_ms <= 0:
        return "a member that joins must have a rebalance timeout"
    if request.owned is None or request.owned:
        return "a member that joins must own no partitions"
    has_topics = request.topics is not None or request.regex is not None
    return "" if has_topics else "a member that joins must have a subscription"
