"""The members of a group of the classic protocol, and their durable form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.encoding import (
    get_bytes,
    put_bytes,
    put_int32,
    put_text,
)
from logmirror.broker.groups.values import RefusedError
from logmirror.wire.frames import Cursor, RemoteProtocolError, pack_uvarint

if TYPE_CHECKING:
    from logmirror.broker.groups.timers import Timers
    from logmirror.broker.groups.values import JoinRequest, Token

_MEMBER_BYTES: Final = 500
_ENTRY_BYTES: Final = 150
NO_TIMER: Final = -1
SESSION: Final = "session"
"""The kind of a member's timer; its key is the member ID."""


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One member. At most one JoinGroup and one SyncGroup of it wait at a time."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    joining: Token | None = None
    syncing: Token | None = None
    is_new: bool = False
    """It has not got a response to its first JoinGroup yet."""

    deadline_ms: int = 0
    """Without a sign of life until then it is removed."""

    timer_ms: int = NO_TIMER
    """When its next timer fires."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, roughly."""
        size = _MEMBER_BYTES + len(self.member_id) + len(self.client_id) + len(self.assignment)
        return size + sum(_ENTRY_BYTES + len(name) + len(data) for name, data in self.protocols)

    def metadata(self, protocol: str | None) -> bytes:
        """Return its subscription for a protocol."""
        return next((data for name, data in self.protocols if name == protocol), b"")

    def vote(self, candidates: set[str]) -> str:
        """Return the first of its protocols that is a candidate."""
        return next(name for name, _ in self.protocols if name in candidates)

    def updated(self, request: JoinRequest) -> None:
        """Take over what a JoinGroup request says."""
        self.protocols = request.protocols
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.client_id, self.client_host = request.client_id, request.client_host


class Roster:
    """The members of a group by ID and by instance ID, and the protocols they have in common."""

    def __init__(self, group_id: str, timers: Timers) -> None:
        self._group_id = group_id
        self._timers = timers
        self.by_id: dict[str, Member] = {}
        self.by_instance: dict[str, Member] = {}
        self._supported: Counter[str] = Counter()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def named(self, member_id: str, instance_id: str | None) -> Member:
        """Return a member.

        Raises:
            RefusedError: UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID if another member has its
                instance ID.
        """
        if instance_id is not None:
            current = self.by_instance.get(instance_id)
            if current is None:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            if current.member_id != member_id:
                raise RefusedError(ErrorCode.FENCED_INSTANCE_ID)
        member = self.by_id.get(member_id)
        if member is None:
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        return member

    def add(self, member: Member) -> None:
        """Add a member."""
        self.by_id[member.member_id] = member
        if member.instance_id is not None:
            self.by_instance[member.instance_id] = member
        self._count(member, 1)

    def remove(self, member: Member) -> None:
        """Remove a member."""
        del self.by_id[member.member_id]
        if member.instance_id is not None:
            self.by_instance.pop(member.instance_id, None)
        self._count(member, -1)

    def update(self, member: Member, request: JoinRequest) -> None:
        """Take over what a member's JoinGroup request says."""
        self._count(member, -1)
        member.updated(request)
        self._count(member, 1)

    def rename(self, member: Member, new_id: str) -> None:
        """Give a member another ID; it keeps its place in the order of members."""
        self._count(member, -1)
        member.member_id = new_id
        self.by_id = {one.member_id: one for one in self.by_id.values()}
        self._count(member, 1)

    def assign(self, assignments: dict[str, bytes]) -> None:
        """Give each member its assignment; those that have none get an empty one."""
        for member in self.by_id.values():
            self.size_bytes -= len(member.assignment)
            member.assignment = assignments.get(member.member_id, b"")
            self.size_bytes += len(member.assignment)

    def _count(self, member: Member, sign: int) -> None:
        self.size_bytes += sign * member.size_bytes
        for name in {name for name, _ in member.protocols}:
            self._supported[name] += sign
            if not self._supported[name]:
                del self._supported[name]

    def keep_alive(self, member: Member, now_ms: int) -> None:
        """Begin a member's session again; O(1): a timer that is set stays."""
        self.set_deadline(member, now_ms + member.session_timeout_ms)

    def set_deadline(self, member: Member, deadline_ms: int) -> None:
        """Set until when a member has to give a sign of life."""
        member.deadline_ms = deadline_ms
        if member.timer_ms == NO_TIMER or deadline_ms < member.timer_ms:
            member.timer_ms = deadline_ms
            self._timers.set(deadline_ms, self._group_id, SESSION, member.member_id)

    def supports_any(self, protocols: tuple[tuple[str, bytes], ...]) -> bool:
        """Whether all members support one of the protocols."""
        return any(self._supported[name] == len(self.by_id) for name, _ in protocols)

    def best_protocol(self) -> str:
        """Return the protocol of all members that most of them prefer."""
        count = len(self.by_id)
        candidates = {name for name, times in self._supported.items() if times == count}
        votes = Counter(member.vote(candidates) for member in self.by_id.values())
        return votes.most_common(1)[0][0]

    def longest_timeout_ms(self) -> int:
        """Return the longest rebalance timeout, at least 1 ms."""
        return max((one.rebalance_timeout_ms for one in self.by_id.values()), default=1)

    def subscriptions(self, protocol: str | None) -> tuple[tuple[str, str | None, bytes], ...]:
        """Return member ID, instance ID and subscription of all members."""
        return tuple(
            (one.member_id, one.instance_id, one.metadata(protocol)) for one in self.by_id.values()
        )

    def topics(self, protocol: str | None) -> set[str] | None:
        """Return the topics that consumers subscribe to; None if a subscription is unreadable."""
        topics: set[str] = set()
        for member in self.by_id.values():
            found = subscribed_topics(member.metadata(protocol))
            if found is None:
                return None
            topics |= found
        return topics

    def put(self) -> bytes:
        """Encode the members."""
        return pack_uvarint(len(self.by_id) + 1) + b"".join(map(put_member, self.by_id.values()))

    def restore(self, cursor: Cursor) -> None:
        """Add the members that `put` encoded."""
        for _ in range(cursor.count(compact=True)):
            self.add(get_member(cursor))


def put_member(member: Member) -> bytes:
    """Encode a member."""
    parts = [
        put_text(member.member_id),
        put_text(member.instance_id),
        put_text(member.client_id),
        put_text(member.client_host),
        put_int32(member.session_timeout_ms),
        put_int32(member.rebalance_timeout_ms),
        pack_uvarint(len(member.protocols) + 1),
    ]
    for name, data in member.protocols:
        parts += (put_text(name), put_bytes(data))
    parts.append(put_bytes(member.assignment))
    return b"".join(parts)


def get_member(cursor: Cursor) -> Member:
    """Read a member."""
    return Member(
        member_id=cursor.name(compact=True),
        instance_id=cursor.string(compact=True),
        client_id=cursor.name(compact=True),
        client_host=cursor.name(compact=True),
        session_timeout_ms=cursor.int32(),
        rebalance_timeout_ms=cursor.int32(),
        protocols=tuple(
            (cursor.name(compact=True), get_bytes(cursor))
            for _ in range(cursor.count(compact=True))
        ),
        assignment=get_bytes(cursor),
    )


def subscribed_topics(metadata: bytes) -> set[str] | None:
    """Return the topics of a consumer's subscription; None if it is not one.

    The layout is that of Kafka's consumer protocol: version, topics, and more that is not read.
    """
    cursor = Cursor(memoryview(metadata))
    try:
        cursor.int16()
        return {cursor.name(compact=False) for _ in range(cursor.count(compact=False))}
    except RemoteProtocolError:
        return None
