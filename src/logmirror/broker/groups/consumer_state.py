"""The durable form of a group of the consumer protocol: one row for it and one for each member.

group          key: group ID           value: version | type | epoch, target by member, topics
group-member   key: group, member ID   value: version | member

The last field of both is missing where ACLs were not enforced and in what older versions wrote: the
topics that some members may describe, and whose permissions apply to a member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.groups.encoding import (
    VERSION,
    get_texts,
    put_int32,
    put_int64,
    put_text,
    put_texts,
)
from logmirror.broker.groups.members import NO_TIMER
from logmirror.broker.groups.values import GROUP, GROUP_MEMBER, StateChange
from logmirror.wire.frames import Cursor, pack_uvarint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.broker.groups.assignors import TopicPartition

CONSUMER: Final = b"\1"
"""The type of the group, after the version."""

_TOPIC_ID_BYTES: Final = 16
ENTRY_BYTES: Final = 150
"""Of a name or a partition in memory, roughly."""


class TopicInfo(NamedTuple):
    """A topic that exists."""

    topic_id: bytes
    partition_count: int


class Matcher(NamedTuple):
    """What decides which topics a member subscribes to besides those that it names."""

    regex: str
    viewer: str
    """Whose permissions apply; empty: those of everybody."""


@dataclass(slots=True, eq=False, kw_only=True)
class ConsumerMember:
    """One member."""

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = 0
    topics: tuple[str, ...] = ()
    regex: str = ""
    """A regular expression for further topics."""

    viewer: str = ""
    """Whose permissions decide which topics it sees; empty: those of everybody."""

    assignor: str | None = None
    epoch: int = 0
    previous_epoch: int = -1
    assigned: set[TopicPartition] = field(default_factory=set)
    revoking: set[TopicPartition] = field(default_factory=set)
    """It still has to confirm that it has given these up."""

    deadline_ms: int = 0
    timer_ms: int = NO_TIMER
    revoke_due_ms: int | None = None

    @property
    def matcher(self) -> Matcher:
        """What decides which topics it subscribes to besides those that it names."""
        return Matcher(self.regex, self.viewer)

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, roughly."""
        names = sum(ENTRY_BYTES + len(topic) for topic in (*self.topics, self.regex))
        return names + ENTRY_BYTES * (5 + len(self.assigned) + len(self.revoking))


def _put_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    topics: dict[bytes, list[int]] = {}
    for topic, number in sorted(partitions):
        topics.setdefault(topic, []).append(number)
    parts = [pack_uvarint(len(topics) + 1)]
    for topic, numbers in topics.items():
        parts += (topic, pack_uvarint(len(numbers) + 1), *map(put_int32, numbers))
    return b"".join(parts)


def _get_partitions(cursor: Cursor) -> set[TopicPartition]:
    found = set()
    for _ in range(cursor.count(compact=True)):
        topic = bytes(cursor.take(_TOPIC_ID_BYTES))
        found |= {(topic, cursor.int32()) for _ in range(cursor.count(compact=True))}
    return found


def stored_group(  # noqa: PLR0913, PLR0917  # the fields of a group
    group_id: str,
    epoch: int,
    assignor: str,
    empty_since_ms: int,
    target: Mapping[str, frozenset[TopicPartition]],
    catalog: Mapping[str, TopicInfo],
    matched: Mapping[Matcher, frozenset[str]],
) -> StateChange:
    """Return the durable form of a group, without its members."""
    parts = [
        bytes((VERSION,)) + CONSUMER,
        put_int32(epoch),
        put_text(assignor),
        put_int64(empty_since_ms),
        pack_uvarint(len(target) + 1),
    ]
    for member_id, share in target.items():
        parts += (put_text(member_id), _put_partitions(share))
    parts.append(pack_uvarint(len(catalog) + 1))
    for name, info in catalog.items():
        parts += (put_text(name), info.topic_id, put_int32(info.partition_count))
    everybody = {one.regex: names for one, names in matched.items() if not one.viewer}
    parts.append(pack_uvarint(len(everybody) + 1))
    for regex, names in everybody.items():
        parts += (put_text(regex), put_texts(sorted(names)))
    if len(everybody) < len(matched):
        parts.append(pack_uvarint(len(matched) - len(everybody) + 1))
        for one, names in matched.items():
            if one.viewer:
                parts += (*map(put_text, one), put_texts(sorted(names)))
    return StateChange(GROUP, group_id.encode(), b"".join(parts))


class StoredGroup(NamedTuple):
    """What is stored of a group besides its members."""

    epoch: int
    assignor: str
    empty_since_ms: int
    target: dict[str, frozenset[TopicPartition]]
    catalog: dict[str, TopicInfo]
    matched: dict[Matcher, frozenset[str]]


def read_group(cursor: Cursor) -> StoredGroup:
    """Read a group, after its version and type."""
    epoch, assignor = cursor.int32(), cursor.name(compact=True)
    empty_since_ms = cursor.int64()
    target: dict[str, frozenset[TopicPartition]] = {}
    for _ in range(cursor.count(compact=True)):
        member_id = cursor.name(compact=True)
        target[member_id] = frozenset(_get_partitions(cursor))
    catalog = {}
    for _ in range(cursor.count(compact=True)):
        name = cursor.name(compact=True)
        catalog[name] = TopicInfo(bytes(cursor.take(_TOPIC_ID_BYTES)), cursor.int32())
    matched = {}
    for _ in range(cursor.count(compact=True)):
        matcher = Matcher(cursor.name(compact=True), "")
        matched[matcher] = frozenset(get_texts(cursor))
    for _ in range(cursor.count(compact=True) if cursor.remaining else 0):
        matcher = Matcher(cursor.name(compact=True), cursor.name(compact=True))
        matched[matcher] = frozenset(get_texts(cursor))
    return StoredGroup(epoch, assignor, empty_since_ms, target, catalog, matched)


def member_key(group_id: str, member_id: str) -> bytes:
    """Return the key of a member."""
    return put_text(group_id) + put_text(member_id)


def read_member_key(key: bytes) -> tuple[str, str]:
    """Return group and member."""
    cursor = Cursor(memoryview(key))
    return cursor.name(compact=True), cursor.name(compact=True)


def stored_member(group_id: str, member: ConsumerMember) -> StateChange:
    """Return the durable form of a member."""
    value = b"".join(
        (
            bytes((VERSION,)),
            put_text(member.instance_id),
            put_text(member.rack_id),
            put_text(member.client_id),
            put_text(member.client_host),
            put_int32(member.rebalance_timeout_ms),
            put_texts(member.topics),
            put_text(member.regex),
            put_text(member.assignor),
            put_int32(member.epoch),
            put_int32(member.previous_epoch),
            _put_partitions(member.assigned),
            _put_partitions(member.revoking),
            put_text(member.viewer) if member.viewer else b"",
        )
    )
    return StateChange(GROUP_MEMBER, member_key(group_id, member.member_id), value)


def removed_member(group_id: str, member_id: str) -> StateChange:
    """Return the change that removes a member."""
    return StateChange(GROUP_MEMBER, member_key(group_id, member_id), None)


def read_member(member: ConsumerMember, cursor: Cursor) -> ConsumerMember:
    """Read a member, after its version."""
    member.instance_id = cursor.string(compact=True)
    member.rack_id = cursor.string(compact=True)
    member.client_id = cursor.name(compact=True)
    member.client_host = cursor.name(compact=True)
    member.rebalance_timeout_ms = cursor.int32()
    member.topics = tuple(get_texts(cursor))
    member.regex = cursor.name(compact=True)
    member.assignor = cursor.string(compact=True)
    member.epoch = cursor.int32()
    member.previous_epoch = cursor.int32()
    member.assigned = _get_partitions(cursor)
    member.revoking = _get_partitions(cursor)
    member.viewer = cursor.name(compact=True) if cursor.remaining else ""
    return member
