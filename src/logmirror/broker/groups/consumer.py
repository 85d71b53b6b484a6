"""A group of the consumer protocol (KIP-848): the coordinator assigns, members follow one by one.

- The group epoch grows when a member joins, leaves or changes its subscription, and when topics
  change. Each epoch has a target: who shall have which partitions.
- A member learns its next step in the response to its heartbeat. It first gives up what it shall no
  longer have, at its old epoch. When it has confirmed that, it moves to the group's epoch and gets
  what it shall have, as far as it is free. A partition is free when no member has it or still has
  to give it up, so that it never has two owners.
- A member that does not give up partitions within its rebalance timeout, or is silent for the
  session timeout, is removed; it is then fenced by its epoch.
- A static member that leaves for a moment (epoch -2) keeps its partitions for its successor.

A member's state is durable before the response that it belongs to.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, TopicPartition
from logmirror.broker.groups.consumer_heartbeat import (
    JOINING,
    LEAVING,
    LEAVING_FOR_A_MOMENT,
    UNCHANGED,
    ConsumerHeartbeat,
    ConsumerResult,
)
from logmirror.broker.groups.consumer_state import (
    ENTRY_BYTES,
    ConsumerMember,
    Matcher,
    TopicInfo,
    read_group,
    removed_member,
    stored_group,
    stored_member,
)
from logmirror.broker.groups.members import NO_TIMER, SESSION
from logmirror.broker.groups.values import Effects, Identity, Now, RefusedError, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.groups.timers import Timers
    from logmirror.broker.groups.values import GroupSettings, StateChange
    from logmirror.wire.frames import Cursor

_REVOKE: Final = "revoke"
_CATALOG_MS: Final = 1_000
"""How often a group looks whether its topics have changed."""


class ConsumerGroup:
    """One group.

    Args:
        group_id: Its ID.
        settings: Limits and timeouts.
        timers: Of all groups.
        find_topic: Returns a topic that exists, by name.
    """

    type: Final = "consumer"
    protocol_type: Final = "consumer"
    pending: Final = ()

    def __init__(
        self,
        group_id: str,
        settings: GroupSettings,
        timers: Timers,
        find_topic: Callable[[str], TopicInfo | None],
    ) -> None:
        self.group_id = group_id
        self._settings = settings
        self._timers = timers
        self._find_topic = find_topic
        self.epoch = 0
        self.assignor = DEFAULT_ASSIGNOR
        self.target: dict[str, frozenset[TopicPartition]] = {}
        self.members: dict[str, ConsumerMember] = {}
        self._static: dict[str, str] = {}
        self._owners: dict[TopicPartition, str] = {}
        self._subscribed: Counter[str] = Counter()
        """How many members subscribe to a topic."""

        self._matched: dict[Matcher, frozenset[str]] = {}
        """Topics by the regular expression of members and by who may describe them."""

        self._catalog: dict[str, TopicInfo] = {}
        self._catalog_due_ms = 0
        self.empty_since_ms = 0
        self.check_due_ms = 0
        self.counted_bytes = 0
        """What the table of groups has counted of `size_bytes`."""

        self.size_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no members."""
        return not self.members

    @property
    def state(self) -> State:
        """Its state, by Kafka's names."""
        if not self.members:
            return State.EMPTY
        done = all(self._is_done(member) for member in self.members.values())
        return State.STABLE if done else State.RECONCILING

    def _is_done(self, member: ConsumerMember) -> bool:
        at_epoch = member.epoch == self.epoch and not member.revoking
        return at_epoch and member.assigned == self.target.get(member.member_id, frozenset())

    def topics(self) -> set[str]:
        """Return the topics that members subscribe to."""
        return set(self._subscribed).union(*self._matched.values())

    def check_commit(
        self,
        who: Identity,
        now: Now,  # noqa: ARG002  # as the other protocol, where a commit is a sign of life
        *,
        in_transaction: bool,
    ) -> None:
        """Check whether offsets of this member, or of no member, may be committed now.

        Raises:
            RefusedError: They may not. UNSUPPORTED_VERSION: OffsetCommit of version 8 or lower, of
                a member, as in Kafka. In a transaction, an epoch that is not the member's is
                ILLEGAL_GENERATION: producers do not handle STALE_MEMBER_EPOCH.
        """
        if who.generation < 0 and (self.is_empty or (in_transaction and not who.member_id)):
            return
        if not in_transaction and who.member_id in self.members and not who.knows_epochs:
            raise RefusedError(ErrorCode.UNSUPPORTED_VERSION)
        try:
            self.check_epoch(who.member_id, who.generation)
        except RefusedError as refused:
            if in_transaction and refused.code is ErrorCode.STALE_MEMBER_EPOCH:
                raise RefusedError(ErrorCode.ILLEGAL_GENERATION) from None
            raise

    def check_epoch(self, member_id: str, epoch: int) -> None:
        """Check a member and its epoch.

        Raises:
            RefusedError: UNKNOWN_MEMBER_ID or STALE_MEMBER_EPOCH.
        """
        member = self.members.get(member_id)
        if member is None:
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        if member.epoch != epoch:
            raise RefusedError(ErrorCode.STALE_MEMBER_EPOCH)

    # Heartbeats

    def heartbeat(self, request: ConsumerHeartbeat, now: Now, out: Effects) -> ConsumerResult:
        """Handle a heartbeat; also joins and leaves.

        Raises:
            RefusedError: The member is unknown or fenced, or may not join.
        """
        if request.member_epoch in {LEAVING, LEAVING_FOR_A_MOMENT}:
            return self._leave(request, now, out)
        member, is_new = self._member(request, now, out)
        before = (member.epoch, set(member.assigned), set(member.revoking))
        has_changed = self._subscribe(member, request) or is_new
        if has_changed or now.monotonic_ms >= self._catalog_due_ms:
            has_changed = self._read_catalog(now) or has_changed
        if has_changed:
            self._next_epoch(out)
        self._reconcile(member, request.owned, now)
        self._keep_alive(member, now)
        after = (member.epoch, member.assigned, member.revoking)
        if before != after or has_changed or request.member_epoch == JOINING:
            out.changes.append(stored_member(self.group_id, member))
            self._recount()
        states_all = request.member_epoch == JOINING or request.is_full
        assignment = frozenset(member.assigned) if states_all or before[1] != after[1] else None
        return ConsumerResult(member.member_id, member.epoch, assignment)

    def _member(
        self, request: ConsumerHeartbeat, now: Now, out: Effects
    ) -> tuple[ConsumerMember, bool]:
        """Return the member of a request, and whether it has just joined."""
        member = self.members.get(request.member_id)
        if request.member_epoch == JOINING:
            return self._joined(member, request, now, out)
        self._check_instance(request)
        if member is None:
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        if request.member_epoch != member.epoch:
            # It may have missed the response that moved it to its epoch.
            missed = request.member_epoch == member.previous_epoch
            if not missed or request.owned is None or not request.owned <= member.assigned:
                raise RefusedError(ErrorCode.FENCED_MEMBER_EPOCH)
        return member, False

    def _check_instance(self, request: ConsumerHeartbeat) -> None:
        if request.instance_id is not None:
            current = self._static.get(request.instance_id)
            if current is None:
                raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
            if current != request.member_id:
                raise RefusedError(ErrorCode.FENCED_INSTANCE_ID)

    def _joined(
        self,
        member: ConsumerMember | None,
        request: ConsumerHeartbeat,
        now: Now,
        out: Effects,
    ) -> tuple[ConsumerMember, bool]:
        """Add a member, or take one back that has lost its state: it owns nothing then."""
        if member is not None:
            self._release(member)
            return member, False
        static_id = self._static.get(request.instance_id or "")
        if static_id is not None:
            return self._successor(self.members[static_id], request, out), False
        if len(self.members) >= self._settings.max_members:
            raise RefusedError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        member = ConsumerMember(member_id=request.member_id, instance_id=request.instance_id)
        self._add(member)
        self._keep_alive(member, now)
        return member, True

    def _successor(
        self, old: ConsumerMember, request: ConsumerHeartbeat, out: Effects
    ) -> ConsumerMember:
        """A static member has returned under another ID: it takes over the partitions."""
        if old.epoch != LEAVING_FOR_A_MOMENT:
            raise RefusedError(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"instance {old.instance_id} is in use by another member",
            )
        out.changes.append(removed_member(self.group_id, old.member_id))
        target = self.target.pop(old.member_id, frozenset())
        self._drop(old)
        old.member_id, old.timer_ms = request.member_id, NO_TIMER
        old.epoch, old.previous_epoch = JOINING, -1
        self._add(old)
        self.target[old.member_id] = target
        out.changes.append(self._change())
        return old

    def _subscribe(self, member: ConsumerMember, request: ConsumerHeartbeat) -> bool:
        """Take over what a request says; returns whether the target depends on it."""
        before = self._subscription(member)
        if request.topics is not None:
            self._count_topics(member, -1)
            member.topics = tuple(sorted(set(request.topics)))
            self._count_topics(member, 1)
        if request.regex is not None:
            member.regex = request.regex
        member.viewer = request.viewer if member.regex else ""
        if member.regex:
            self._matched[member.matcher] = request.matched
        if member.matcher != before[1]:
            self._drop_unused()
        if request.assignor is not None:
            member.assignor = request.assignor
        if request.rebalance_timeout_ms != UNCHANGED:
            member.rebalance_timeout_ms = request.rebalance_timeout_ms
        if request.rack_id is not None:
            member.rack_id = request.rack_id
        member.client_id, member.client_host = request.client_id, request.client_host
        return before != self._subscription(member)

    def _subscription(self, member: ConsumerMember) -> tuple[object, ...]:
        return member.topics, member.matcher, self._matched.get(member.matcher), member.assignor

    def _drop_unused(self) -> None:
        """Forget the topics of regular expressions that no member has."""
        used = {member.matcher for member in self.members.values()}
        self._matched = {one: names for one, names in self._matched.items() if one in used}

    def _leave(self, request: ConsumerHeartbeat, now: Now, out: Effects) -> ConsumerResult:
        self._check_instance(request)
        member = self.members.get(request.member_id)
        if member is None:
            raise RefusedError(ErrorCode.UNKNOWN_MEMBER_ID)
        if request.member_epoch == LEAVING_FOR_A_MOMENT:
            self._release(member, only=member.revoking)
            member.epoch = LEAVING_FOR_A_MOMENT
            out.changes.append(stored_member(self.group_id, member))
        else:
            self._remove(member, now, out)
        return ConsumerResult(request.member_id, request.member_epoch)

    # Targets

    def _read_catalog(self, now: Now) -> bool:
        """Look at the topics; returns whether the subscribed ones have changed."""
        self._catalog_due_ms = now.monotonic_ms + _CATALOG_MS
        found = {topic: self._find_topic(topic) for topic in self.topics()}
        catalog = {topic: info for topic, info in found.items() if info is not None}
        has_changed = catalog != self._catalog
        self._catalog = catalog
        return has_changed

    def _next_epoch(self, out: Effects) -> None:
        """Begin a new epoch with a new target."""
        self.epoch += 1
        votes = Counter(one.assignor for one in self.members.values() if one.assignor is not None)
        self.assignor = votes.most_common(1)[0][0] if votes else DEFAULT_ASSIGNOR
        ids = {topic: info.topic_id for topic, info in self._catalog.items()}
        shares = ASSIGNORS[self.assignor](
            {
                member.member_id: frozenset(
                    ids[topic]
                    for topic in self._matched.get(member.matcher, frozenset()).union(member.topics)
                    if topic in ids
                )
                for member in self.members.values()
            },
            {info.topic_id: info.partition_count for info in self._catalog.values()},
            {one: set(share) for one, share in self.target.items()},
        )
        self.target = {member_id: frozenset(share) for member_id, share in shares.items()}
        out.changes.append(self._change())

    def _reconcile(
        self, member: ConsumerMember, owned: frozenset[TopicPartition] | None, now: Now
    ) -> None:
        """Take the member's next step towards its target."""
        if member.revoking:
            if owned is None or owned & member.revoking:
                return
            self._release(member, only=member.revoking)
        target = self.target.get(member.member_id, frozenset())
        if surplus := member.assigned - target:
            member.assigned -= surplus
            member.revoking = surplus
            if owned is None or owned & surplus:
                member.revoke_due_ms = now.monotonic_ms + member.rebalance_timeout_ms
                self._timers.set(member.revoke_due_ms, self.group_id, _REVOKE, member.member_id)
                return
            self._release(member, only=surplus)
        for partition in target - member.assigned:
            if partition not in self._owners:
                self._owners[partition] = member.member_id
                member.assigned.add(partition)
        if member.epoch != self.epoch:
            member.previous_epoch, member.epoch = member.epoch, self.epoch

    def _release(self, member: ConsumerMember, only: set[TopicPartition] | None = None) -> None:
        """Free partitions of a member: those it has given up, or all."""
        for partition in only if only is not None else member.assigned | member.revoking:
            self._owners.pop(partition, None)
        if only is None:
            member.assigned = set()
        member.revoking = set()
        member.revoke_due_ms = None

    # Members

    def _count_topics(self, member: ConsumerMember, sign: int) -> None:
        for topic in member.topics:
            self._subscribed[topic] += sign
            if not self._subscribed[topic]:
                del self._subscribed[topic]

    def _add(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member
        self._count_topics(member, 1)
        if member.instance_id is not None:
            self._static[member.instance_id] = member.member_id
        for partition in member.assigned | member.revoking:
            self._owners[partition] = member.member_id

    def _drop(self, member: ConsumerMember) -> None:
        del self.members[member.member_id]
        self._count_topics(member, -1)
        if member.instance_id is not None:
            self._static.pop(member.instance_id, None)

    def _remove(self, member: ConsumerMember, now: Now, out: Effects) -> None:
        self._release(member)
        self._drop(member)
        self._drop_unused()
        self.target.pop(member.member_id, None)
        out.changes.append(removed_member(self.group_id, member.member_id))
        if not self.members:
            self.empty_since_ms = now.time_ms
        self._read_catalog(now)
        self._next_epoch(out)
        self._recount()

    def _recount(self) -> None:
        self.size_bytes = sum(member.size_bytes for member in self.members.values())
        self.size_bytes += sum(ENTRY_BYTES * len(names) for names in self._matched.values())

    def _change(self) -> StateChange:
        return stored_group(
            self.group_id,
            self.epoch,
            self.assignor,
            self.empty_since_ms,
            self.target,
            self._catalog,
            self._matched,
        )

    def restore(self, cursor: Cursor) -> None:
        """Read the durable form; `restore_member` adds the members."""
        found = read_group(cursor)
        self.epoch, self.assignor, self.empty_since_ms = (
            found.epoch,
            found.assignor,
            found.empty_since_ms,
        )
        self.target, self._catalog, self._matched = found.target, found.catalog, found.matched

    def restore_member(self, member: ConsumerMember, now: Now) -> None:
        """Add a member from the durable state."""
        self._add(member)
        self._keep_alive(member, now)
        if member.revoking:
            member.revoke_due_ms = now.monotonic_ms + member.rebalance_timeout_ms
            self._timers.set(member.revoke_due_ms, self.group_id, _REVOKE, member.member_id)
        self._recount()

    # Time

    def _keep_alive(self, member: ConsumerMember, now: Now) -> None:
        member.deadline_ms = now.monotonic_ms + self._settings.session_timeout_ms
        if member.timer_ms == NO_TIMER:
            member.timer_ms = member.deadline_ms
            self._timers.set(member.timer_ms, self.group_id, SESSION, member.member_id)

    def fired(self, kind: str, key: str, now: Now, out: Effects) -> None:
        """Handle a timer of this group. One that is no longer due has no effect."""
        member = self.members.get(key)
        if member is None:
            return
        if kind == _REVOKE:
            due_ms = member.revoke_due_ms
            if due_ms is not None and due_ms <= now.monotonic_ms:
                self._remove(member, now, out)
        elif kind == SESSION and member.timer_ms <= now.monotonic_ms:
            member.timer_ms = NO_TIMER
            if member.deadline_ms <= now.monotonic_ms:
                self._remove(member, now, out)
            else:
                member.timer_ms = member.deadline_ms
                self._timers.set(member.timer_ms, self.group_id, SESSION, key)
