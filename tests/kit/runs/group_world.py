"""A coordinator in virtual time."""

from __future__ import annotations

from typing import Any

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.consumer_heartbeat import ConsumerHeartbeat
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.coordinator import GroupCoordinator
from logmirror.broker.groups.values import (
    CommittedOffset,
    Effects,
    GroupSettings,
    Identity,
    JoinRequest,
    JoinResult,
    Now,
    RefusedError,
    SyncRequest,
    SyncResult,
)

TOPIC_ID = bytes(range(16))
TOPICS = {"orders": TOPIC_ID}


class World:
    """A coordinator, its clock, its durable state, and the responses so far, by token."""

    def __init__(self, **settings: Any) -> None:
        self.settings = GroupSettings(**settings)
        self.now_ms = 0
        self.stored: dict[tuple[str, bytes], bytes] = {}
        self.replies: dict[Any, Any] = {}
        self.topics = {"orders": TopicInfo(TOPIC_ID, 6)}
        self.coordinator = GroupCoordinator(self.settings, self.topics.get)
        self._ids = 0

    @property
    def now(self) -> Now:
        return Now(self.now_ms, 1_700_000_000_000 + self.now_ms)

    def call(self, action: Any, *arguments: Any, **options: Any) -> Any:
        """Call the coordinator; its changes become durable, its responses arrive."""
        out = Effects()
        try:
            return action(*arguments, self.now, out, **options)
        finally:
            self.take(out)

    def take(self, out: Effects) -> None:
        """Perform effects."""
        for kind, key, value in out.changes:
            if value is None:
                self.stored.pop((kind, key), None)
            else:
                self.stored[kind, key] = value
        for token, result in out.replies:
            assert token not in self.replies, "two responses for one request"
            self.replies[token] = result

    def advance(self, duration_ms: int) -> None:
        """Let time pass; timers fire when they are due."""
        end_ms = self.now_ms + duration_ms
        while (due_ms := self.coordinator.next_due_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.call(self.coordinator.fire_due)
        self.now_ms = end_ms

    def restart(self) -> None:
        """A new coordinator with the durable state; requests in progress are lost."""
        self.coordinator = GroupCoordinator(self.settings, self.topics.get)
        out = Effects()
        out.changes += self.coordinator.load(self.rows, TOPICS, self.now)
        self.take(out)

    def rows(self, kind: str) -> list[tuple[bytes, bytes]]:
        """Return the durable state of a kind, as the store does."""
        return sorted((key, value) for (one, key), value in self.stored.items() if one == kind)

    # Requests

    def join(self, member_id: str = "", *, token: Any = None, **fields: Any) -> Any:
        """Send JoinGroup; returns its response, or its token if it has none yet."""
        self._ids += 1
        token = token or f"join-{self._ids}"
        request = JoinRequest(
            **{
                "group_id": "g",
                "member_id": member_id,
                "instance_id": None,
                "protocol_type": "consumer",
                "protocols": (("range", b"\0\0\0\0\0\1\0\6orders"),),
                "session_timeout_ms": 10_000,
                "rebalance_timeout_ms": 20_000,
                "client_id": "client",
                "client_host": "/127.0.0.1",
                "new_member_id": f"member-{self._ids}",
                "requires_known_id": False,
                **fields,
            }
        )
        try:
            self.call(self.coordinator.join, request, token)
        except RefusedError as refused:
            return JoinResult(refused.code, member_id)
        return self.replies.get(token, token)

    def sync(self, joined: Any, token: Any = None, group: str = "g", **assignments: bytes) -> Any:
        """Send SyncGroup of a member that joined."""
        self._ids += 1
        token = token or f"sync-{self._ids}"
        who = Identity(group, joined.member_id, joined.generation)
        shares = {name.replace("_", "-"): data for name, data in assignments.items()}
        try:
            self.call(self.coordinator.sync, SyncRequest(who, None, None, shares), token)
        except RefusedError as refused:
            return SyncResult(refused.code)
        return self.replies.get(token, token)

    def heartbeat(self, joined: Any) -> ErrorCode:
        """Send Heartbeat."""
        who = Identity("g", joined.member_id, joined.generation)
        try:
            return self.coordinator.heartbeat(who, self.now)
        except RefusedError as refused:
            return refused.code

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        """Send LeaveGroup."""
        members = [(member_id, instance_id)]
        [code] = self.call(self.coordinator.leave, "g", members)
        return code

    def commit(self, joined: Any = None, offset: int = 1, partition: int = 0, **more: Any) -> Any:
        """Commit an offset of a partition of `orders`; returns the error code."""
        who = Identity("g", "", -1)
        if joined is not None:
            who = Identity("g", joined.member_id, joined.generation)
        found = CommittedOffset(TOPIC_ID, offset, 0, "", self.now.time_ms)
        try:
            self.call(self.coordinator.commit, who, {("orders", partition): found}, **more)
        except RefusedError as refused:
            return refused.code
        return ErrorCode.NONE

    def committed(self, partition: int = 0) -> int:
        """Return the committed offset; -1 for none."""
        found = self.coordinator.offsets.of_group("g").get(("orders", partition))
        return -1 if found is None else found.offset

    def beat(self, member_id: str, epoch: int = 0, **fields: Any) -> Any:
        """Send ConsumerGroupHeartbeat; returns its result, or the error code."""
        joins = epoch == 0
        request = ConsumerHeartbeat(
            **{
                "group_id": "g",
                "member_id": member_id,
                "member_epoch": epoch,
                "instance_id": None,
                "rack_id": None,
                "rebalance_timeout_ms": 20_000 if joins else -1,
                "topics": ("orders",) if joins else None,
                "regex": None,
                "matched": frozenset(),
                "viewer": "",
                "assignor": None,
                "owned": frozenset() if joins else None,
                "client_id": "client",
                "client_host": "/127.0.0.1",
                **fields,
            }
        )
        try:
            return self.call(self.coordinator.consumer_heartbeat, request)
        except RefusedError as refused:
            return refused.code

    def group(self) -> Any:
        """Return the group."""
        return self.coordinator.groups["g"]

    def stable(self, count: int = 1, **fields: Any) -> list[Any]:
        """Return the JoinGroup results of the members of a stable group."""
        results = [self.join(**fields)]
        for _ in range(1, count):
            newest = self.join(**fields)
            found = [self.join(one.member_id, **fields) for one in results]
            results = [
                self.replies[one] if isinstance(one, str) else one for one in (*found, newest)
            ]
        for one in results[1:]:
            self.sync(one)
        self.sync(results[0])
        return results
