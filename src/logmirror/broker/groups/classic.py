"""A group of the classic protocol: members join, the leader assigns, members sync.

    Empty -> PreparingRebalance -> CompletingRebalance -> Stable
      ^             ^  |                  |                 |
      |             |  +- all members left                  |
      +-------------+---------------------+-----------------+
                    a member joins, leaves, or is silent

- A rebalance begins when a member joins, leaves, or changes its subscription. It ends when every
  member has joined again, or after the longest rebalance timeout; dynamic members that have not
  joined by then are removed. A static member (KIP-345) stays until its session ends.
- Each rebalance has a new generation. Requests of an older one get ILLEGAL_GENERATION.
- The leader's assignments are opaque. They are durable before a member gets one.
- Every JoinGroup and SyncGroup that waits gets a response: when the rebalance ends, when its member
  is removed, or when a later request of the same member takes its place.

Source of the rules: Kafka's protocol and KIP-62, 345, 394, 814.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.classic_state import ClassicState, read_group, stored_group
from logmirror.broker.groups.members import NO_TIMER, SESSION, Member, Roster
from logmirror.broker.groups.values import (
    Effects,
    Identity,
    JoinRequest,
    JoinResult,
    Now,
    RefusedError,
    State,
    SyncRequest,
    SyncResult,
    Token,
)

if TYPE_CHECKING:
    from logmirror.broker.groups.timers import Timers
    from logmirror.broker.groups.values import GroupSettings, StateChange
    from logmirror.wire.frames import Cursor

CONSUMER_TYPE: Final = "consumer"
NEW_MEMBER_TIMEOUT_MS: Final = 300_000
"""A new member may wait this long for its first response; then it is taken for gone, because
clients without KIP-394 join under another ID when they time out."""

_PENDING_BYTES: Final = 200
_PENDING: Final = "pending"
_JOIN: Final = "join"
_SYNC: Final = "sync"


class ClassicGroup:
    """One group. Times are milliseconds of the monotonic clock unless they are named otherwise."""

    type: Final = "classic"

    def __init__(self, group_id: str, settings: GroupSettings, timers: Timers) -> None:
        self.group_id = group_id
        self._settings = settings
        self._timers = timers
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol: str | None = None
        self.leader: str | None = None
        self.roster = Roster(group_id, timers)
        self.check_due_ms = 0
        """When the coordinator looks for expired offsets next."""

        self.counted_bytes = 0
        """What the table of groups has counted of `size_bytes`."""

        self.pending: dict[str, int] = {}
        """Members that got an ID and have not joined with it, and until when they may."""

        self._pending_sync: set[str] = set()
        self.empty_since_ms = 0
        """Since when it has no members, in milliseconds since 1970."""

        self._join_due_ms: int | None = None
        self._join_ends_ms = 0
        self._has_new_since_delay = False
        self._is_delayed = False

    # What others ask about

    @property
    def is_empty(self) -> bool:
        """Whether it has no members; some may have asked for an ID."""
        return self.state is State.EMPTY

    @property
    def members(self) -> dict[str, Member]:
        """The members by ID, in the order in which they came."""
        return self.roster.by_id

    @property
    def size_bytes(self) -> int:
        """What the members take in memory, roughly."""
        return self.roster.size_bytes + _PENDING_BYTES * len(self.pending)

    def topics(self) -> set[str] | None:
        """Return the topics that members subscribe to; None if unknown, or no consumers."""
        if self.protocol_type != CONSUMER_TYPE:
            return None
        return self.roster.topics(self.protocol)

    def supports(self, request: JoinRequest) -> bool:
        """Whether a member with these protocols can be in the group."""
        if not request.protocol_type or not request.protocols:
            return False
        if not self.members:
            return True
        same_type = request.protocol_type == self.protocol_type
        return same_type and self.roster.supports_any(request.protocols)

    def has_room(self, member_id: str) -> bool:
        """Whether a member may join. During a rebalance the first ones that join may."""
        limit = self._settings.max_members
        member = self.members.get(member_id)
        if not member_id and len(self.pending) >= limit:
            return False
        if self.state is State.PREPARING:
            waiting = sum(one.joining is not None for one in self.members.values())
            return (member is not None and member.joining is not None) or waiting < limit
        return member is not None or len(self.members) < limit

    def check_member(self, who: Identity) -> Member:
        """Return a member by its IDs and generation.

        Raises:
            RefusedError: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID or ILLEGAL_GENERATION.
        """
        member = self.roster.named(who.member_id, who.instance_id)
        if who.generation != self.generation:
            raise RefusedError(ErrorCode.ILLEGAL_GENERATION)
        return member

    def check_commit(self, who: Identity, now: Now, *, in_transaction: bool) -> None:
        """Check whether offsets of this member, or of no member, may be committed now.

        Raises:
            RefusedError: They may not.
        """
        if who.generation < 0 and self.is_empty:
            return
        if who.generation >= 0 or who.member_id or who.instance_id is not None:
            member = self.check_member(who)
            if self.state is State.COMPLETING and not in_transaction:
                # Kafka accepts it in a transaction: producers do not handle this code.
                raise RefusedError(ErrorCode.REBALANCE_IN_PROGRESS)
            self.roster.keep_alive(member, now.monotonic_ms)
        elif not in_transaction:
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)

    # Joining

    def join(self, request: JoinRequest, token: Token, now: Now, out: Effects) -> None:
        """Handle a JoinGroup request of a new or a known member.

        Raises:
            RefusedError: The request gets this error at once.
        """
        if not self.has_room(request.member_id):
            raise RefusedError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        if not self.supports(request):
            raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if not request.member_id:
            self._join_new(request, token, now, out)
        elif request.member_id in self.pending:
            if request.instance_id is not None:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            del self.pending[request.member_id]
            self._add(request, request.member_id, token, now)
            self._rebalance(now, out)
        else:
            self._join_again(request, token, now, out)

    def _join_new(self, request: JoinRequest, token: Token, now: Now, out: Effects) -> None:
        if request.instance_id is not None:
            known = self.roster.by_instance.get(request.instance_id)
            if known is not None:
                self._replace_static(known, request, token, now, out)
                return
        elif request.requires_known_id:
            deadline_ms = now.monotonic_ms + request.session_timeout_ms
            self.pending[request.new_member_id] = deadline_ms
            self._timers.set(deadline_ms, self.group_id, _PENDING, request.new_member_id)
            result = JoinResult(ErrorCode.MEMBER_ID_REQUIRED, request.new_member_id)
            out.replies.append((token, result))
            return
        self._add(request, request.new_member_id, token, now)
        self._rebalance(now, out)

    def _add(self, request: JoinRequest, member_id: str, token: Token, now: Now) -> None:
        if not self.members:
            self.protocol_type = request.protocol_type
        member = Member(
            member_id=member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            protocols=request.protocols,
            joining=token,
            is_new=True,
        )
        self.roster.add(member)
        if self.leader is None:
            self.leader = member_id
        self._has_new_since_delay = True
        self.roster.set_deadline(member, now.monotonic_ms + NEW_MEMBER_TIMEOUT_MS)

    def _join_again(self, request: JoinRequest, token: Token, now: Now, out: Effects) -> None:
        member = self.roster.named(request.member_id, request.instance_id)
        same = member.protocols == request.protocols
        if self.state is State.COMPLETING and same:
            self._reply_join(member, token, now, out)  # its response was lost
        elif self.state is State.STABLE and same and member.member_id != self.leader:
            self._reply_join(member, token, now, out)
        else:
            self._wait_to_join(member, request, token, out)
            self._rebalance(now, out)

    def _wait_to_join(
        self, member: Member, request: JoinRequest, token: Token, out: Effects
    ) -> None:
        self.roster.update(member, request)
        self._end_join(member, ErrorCode.REBALANCE_IN_PROGRESS, out)
        member.joining = token

    def _replace_static(
        self, member: Member, request: JoinRequest, token: Token, now: Now, out: Effects
    ) -> None:
        """A static member has restarted: it gets a new ID, and the old one is fenced (KIP-345)."""
        old_leader, old_id = self.leader, member.member_id
        self._end_join(member, ErrorCode.FENCED_INSTANCE_ID, out)
        self._end_sync(member, ErrorCode.FENCED_INSTANCE_ID, out)
        self.roster.rename(member, request.new_member_id)
        self.roster.update(member, request)
        if old_id in self._pending_sync:
            self._pending_sync.remove(old_id)
            self._pending_sync.add(member.member_id)
        if old_leader == old_id:
            self.leader = member.member_id
        member.timer_ms = NO_TIMER
        self.roster.keep_alive(member, now.monotonic_ms)
        if self.state is not State.STABLE or self.roster.best_protocol() != self.protocol:
            member.joining = token
            self._rebalance(now, out)
            return
        out.changes.append(self._change())
        # Without KIP-814 a returning leader must not assign, so its old ID is the leader.
        skips = request.may_skip_assignment
        self._reply_join(member, token, now, out, leader=None if skips else old_leader, skips=skips)

    def _reply_join(  # noqa: PLR0913  # one response
        self,
        member: Member,
        token: Token,
        now: Now,
        out: Effects,
        *,
        leader: str | None = None,
        skips: bool = False,
    ) -> None:
        leader = leader or self.leader or ""
        leads = leader == member.member_id
        result = JoinResult(
            error=ErrorCode.NONE,
            member_id=member.member_id,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=leader,
            skips_assignment=skips and leads,
            members=self.roster.subscriptions(self.protocol) if leads else (),
        )
        out.replies.append((token, result))
        self.roster.keep_alive(member, now.monotonic_ms)

    # The rebalance

    def _rebalance(self, now: Now, out: Effects) -> None:
        """Begin a rebalance, or end the one that is in progress if everybody has joined."""
        if self.state is not State.PREPARING:
            for member in self.members.values():
                self._end_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, out)
            self._pending_sync.clear()
            timeout_ms = self.roster.longest_timeout_ms()
            delay_ms = self._settings.initial_rebalance_delay_ms
            first = self.state is State.EMPTY
            self._join_ends_ms = now.monotonic_ms + timeout_ms
            self._is_delayed = first and delay_ms > 0
            self._has_new_since_delay = False
            self.state = State.PREPARING
            wait_ms = min(delay_ms, timeout_ms) if self._is_delayed else timeout_ms
            self._set_join_timer(now.monotonic_ms + wait_ms)
            if first and not self._is_delayed:
                self._complete_join(now, out)
                return
        self._try_complete(now, out)

    def _try_complete(self, now: Now, out: Effects) -> None:
        if self.state is not State.PREPARING or self.pending or self._is_delayed:
            return
        if all(member.joining is not None for member in self.members.values()):
            self._complete_join(now, out)

    def _set_join_timer(self, due_ms: int) -> None:
        self._join_due_ms = due_ms
        self._timers.set(due_ms, self.group_id, _JOIN)

    def _join_timed_out(self, now: Now, out: Effects) -> None:
        if self._is_delayed:
            left_ms = self._join_ends_ms - now.monotonic_ms
            if self._has_new_since_delay and left_ms > 0:
                self._has_new_since_delay = False
                delay_ms = min(self._settings.initial_rebalance_delay_ms, left_ms)
                self._set_join_timer(now.monotonic_ms + delay_ms)
                return
            self._is_delayed = False
        self._complete_join(now, out)

    def _complete_join(self, now: Now, out: Effects) -> None:
        for member in tuple(self.members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(member, out)
        leader = self.members.get(self.leader or "")
        if leader is None or leader.joining is None:
            joined = next((m for m in self.members.values() if m.joining is not None), None)
            if joined is None and self.members:
                # Only static members that have not returned: they have until their sessions end.
                self._set_join_timer(now.monotonic_ms + self.roster.longest_timeout_ms())
                return
            self.leader = joined.member_id if joined is not None else None
        self._join_due_ms = None
        self.generation = self.generation % 0x7FFFFFFF + 1
        if not self.members:
            self.state, self.protocol, self.leader = State.EMPTY, None, None
            self.empty_since_ms = now.time_ms
            out.changes.append(self._change())
            return
        self.protocol = self.roster.best_protocol()
        self.state = State.COMPLETING
        self._pending_sync = set(self.members)
        for member in self.members.values():
            if member.joining is not None:
                token, member.joining, member.is_new = member.joining, None, False
                self._reply_join(member, token, now, out)
        due_ms = now.monotonic_ms + self.roster.longest_timeout_ms()
        self._timers.set(due_ms, self.group_id, _SYNC, str(self.generation))

    # Syncing

    def sync(self, request: SyncRequest, token: Token, now: Now, out: Effects) -> None:
        """Handle a SyncGroup request.

        Raises:
            RefusedError: The request gets this error at once.
        """
        member = self.check_member(request.member)
        if request.protocol_type not in {None, self.protocol_type}:
            raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if request.protocol not in {None, self.protocol}:
            raise RefusedError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if self.state is State.PREPARING:
            raise RefusedError(ErrorCode.REBALANCE_IN_PROGRESS)
        self._pending_sync.discard(member.member_id)
        self.roster.keep_alive(member, now.monotonic_ms)
        if self.state is State.STABLE:
            self._reply_sync(member, token, out)
            return
        self._end_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, out)
        member.syncing = token
        if member.member_id == self.leader:
            self._assign(request.assignments, now, out)

    def _assign(self, assignments: dict[str, bytes], now: Now, out: Effects) -> None:
        self.roster.assign(assignments)
        self.state = State.STABLE
        out.changes.append(self._change())
        for member in self.members.values():
            if member.syncing is not None:
                token, member.syncing = member.syncing, None
                self.roster.keep_alive(member, now.monotonic_ms)
                self._reply_sync(member, token, out)

    def _reply_sync(self, member: Member, token: Token, out: Effects) -> None:
        result = SyncResult(ErrorCode.NONE, self.protocol_type, self.protocol, member.assignment)
        out.replies.append((token, result))

    def _sync_timed_out(self, now: Now, out: Effects) -> None:
        """Remove the members that joined and did not sync."""
        silent = [self.members[one] for one in self._pending_sync if one in self.members]
        if silent and self.state in {State.COMPLETING, State.STABLE}:
            for member in silent:
                self._remove(member, out)
            self._rebalance(now, out)

    # Signs of life, and their end

    def heartbeat(self, who: Identity, now: Now) -> ErrorCode:
        """Handle a Heartbeat request; O(1).

        Raises:
            RefusedError: The member is unknown or fenced, or its generation is over.
        """
        self.roster.keep_alive(self.check_member(who), now.monotonic_ms)
        preparing = self.state is State.PREPARING
        return ErrorCode.REBALANCE_IN_PROGRESS if preparing else ErrorCode.NONE

    def leave(self, member_id: str, instance_id: str | None, now: Now, out: Effects) -> None:
        """Remove a member at its request.

        Raises:
            RefusedError: It is unknown or fenced.
        """
        if not member_id and instance_id in self.roster.by_instance:
            member_id = self.roster.by_instance[instance_id].member_id
        if self.pending.pop(member_id, None) is not None:
            self._try_complete(now, out)
            return
        self._remove(self.roster.named(member_id, instance_id), out)
        self._rebalance(now, out)

    def fired(self, kind: str, key: str, now: Now, out: Effects) -> None:
        """Handle a timer of this group. One that is no longer due has no effect."""
        if kind == _JOIN:
            due_ms = self._join_due_ms
            if self.state is State.PREPARING and due_ms is not None and due_ms <= now.monotonic_ms:
                self._join_timed_out(now, out)
        elif kind == _SYNC:
            if key == str(self.generation):
                self._sync_timed_out(now, out)
        elif kind == _PENDING:
            if self.pending.get(key, now.monotonic_ms + 1) <= now.monotonic_ms:
                del self.pending[key]
                self._try_complete(now, out)
        elif kind == SESSION and (member := self.members.get(key)) is not None:
            self._session_fired(member, now, out)

    def _session_fired(self, member: Member, now: Now, out: Effects) -> None:
        if member.timer_ms > now.monotonic_ms:
            return  # a later timer is set
        member.timer_ms = NO_TIMER
        if member.deadline_ms > now.monotonic_ms:
            self.roster.set_deadline(member, member.deadline_ms)
        elif member.syncing is not None or (member.joining is not None and not member.is_new):
            self.roster.keep_alive(member, now.monotonic_ms)  # it waits for us
        else:
            self._remove(member, out)
            self._rebalance(now, out)

    def _remove(self, member: Member, out: Effects) -> None:
        self._end_join(member, ErrorCode.UNKNOWN_MEMBER_ID, out)
        self._end_sync(member, ErrorCode.UNKNOWN_MEMBER_ID, out)
        self.roster.remove(member)
        self._pending_sync.discard(member.member_id)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    @staticmethod
    def _end_join(member: Member, code: ErrorCode, out: Effects) -> None:
        if member.joining is not None:
            token, member.joining = member.joining, None
            out.replies.append((token, JoinResult(code, member.member_id)))

    @staticmethod
    def _end_sync(member: Member, code: ErrorCode, out: Effects) -> None:
        if member.syncing is not None:
            token, member.syncing = member.syncing, None
            out.replies.append((token, SyncResult(code)))

    # The durable form

    def _change(self) -> StateChange:
        state = ClassicState(
            self.generation, self.protocol_type, self.protocol, self.leader, self.empty_since_ms
        )
        return stored_group(self.group_id, state, self.roster)

    def restore(self, cursor: Cursor, now: Now) -> None:
        """Read the durable form. Every session begins again."""
        state = read_group(cursor, self.roster)
        self.generation, self.protocol_type, self.protocol, self.leader, self.empty_since_ms = state
        for member in self.members.values():
            self.roster.keep_alive(member, now.monotonic_ms)
        self.state = State.STABLE if self.members else State.EMPTY
