"""ConsumerGroupHeartbeat (68) and ConsumerGroupDescribe (69), versions 0 and 1, for a server.

    heartbeat request     group, member, epoch, instance, rack, rebalance timeout, topic names,
                          (1: regular expression), assignor, owned partitions by topic ID
    heartbeat response    throttle, error, message, member, epoch, interval, assignment or null
    describe request      groups, whether to include authorized operations
    describe response     throttle, groups with members, assignment and target of each; (1: the
                          member's type)

Every version is flexible (KIP-482). Source: the message definitions of KIP-848.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from logmirror.wire.frames import body_cursor, pack_uvarint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from logmirror.wire.frames import Cursor

_T = TypeVar("_T")

HEARTBEAT_KEY: Final = 68
DESCRIBE_KEY: Final = 69
FIRST_VERSION: Final = 0
LAST_VERSION: Final = 1

NO_OPERATIONS: Final = -(2**31)
_REGEX_FROM: Final = 1
_MEMBER_TYPE_FROM: Final = 1
_TOPIC_ID_BYTES: Final = 16
_NO_TAGS: Final = b"\0"
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_CONSUMER_MEMBER: Final = 1
"""The member type of the consumer protocol; 0 is the classic one."""


class HeartbeatRequest(NamedTuple):
    """A ConsumerGroupHeartbeat request."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    topics: list[str] | None
    regex: str | None
    assignor: str | None
    owned: frozenset[tuple[bytes, int]] | None
    """Topic ID and partition."""


class DescribeRequest(NamedTuple):
    """A ConsumerGroupDescribe request."""

    groups: list[str]
    wants_operations: bool


class DescribedMember(NamedTuple):
    """A member in a ConsumerGroupDescribe response."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: Sequence[str]
    regex: str | None
    assigned: Mapping[tuple[bytes, str], Sequence[int]]
    """Partitions by topic ID and name."""

    target: Mapping[tuple[bytes, str], Sequence[int]]


class DescribedGroup(NamedTuple):
    """A group in a ConsumerGroupDescribe response."""

    error: int
    message: str | None
    group_id: str
    state: str = ""
    epoch: int = 0
    assignment_epoch: int = 0
    assignor: str = ""
    members: Sequence[DescribedMember] = ()
    operations: int = NO_OPERATIONS
    """A bit for each AclOperation."""


def parse_heartbeat(frame: memoryview, version: int) -> HeartbeatRequest:
    """Read a ConsumerGroupHeartbeat request.

    Raises:
        RemoteProtocolError: The bytes are not such a request.
    """
    cursor = body_cursor(frame, flexible=True)
    request = HeartbeatRequest(
        group_id=cursor.name(compact=True),
        member_id=cursor.name(compact=True),
        member_epoch=cursor.int32(),
        instance_id=cursor.string(compact=True),
        rack_id=cursor.string(compact=True),
        rebalance_timeout_ms=cursor.int32(),
        topics=_read_names(cursor),
        regex=cursor.string(compact=True) if version >= _REGEX_FROM else None,
        assignor=cursor.string(compact=True),
        owned=_read_owned(cursor),
    )
    cursor.tagged_fields()
    return request


def _read_names(cursor: Cursor) -> list[str] | None:
    count = cursor.count(compact=True)
    return None if count < 0 else [cursor.name(compact=True) for _ in range(count)]


def _read_owned(cursor: Cursor) -> frozenset[tuple[bytes, int]] | None:
    count = cursor.count(compact=True, least_bytes=_TOPIC_ID_BYTES + 2)
    if count < 0:
        return None
    owned = set()
    for _ in range(count):
        topic_id = bytes(cursor.take(_TOPIC_ID_BYTES))
        numbers = cursor.count(compact=True, least_bytes=_INT32.size)
        owned |= {(topic_id, cursor.int32()) for _ in range(numbers)}
        cursor.tagged_fields()
    return frozenset(owned)


def parse_describe(frame: memoryview, version: int) -> DescribeRequest:  # noqa: ARG001  # as the other
    """Read a ConsumerGroupDescribe request.

    Raises:
        RemoteProtocolError: The bytes are not such a request.
    """
    cursor = body_cursor(frame, flexible=True)
    request = DescribeRequest(_read_names(cursor) or [], wants_operations=cursor.int8() != 0)
    cursor.tagged_fields()
    return request


def pack_heartbeat(  # noqa: PLR0913  # the fields of a response
    correlation_id: int,
    *,
    error: int,
    message: str | None,
    member_id: str | None,
    member_epoch: int,
    interval_ms: int,
    assignment: frozenset[tuple[bytes, int]] | None,
) -> bytes:
    """Encode a ConsumerGroupHeartbeat response; returns its whole frame."""
    parts = [
        _INT32.pack(0),
        _INT16.pack(error),
        _text(message),
        _text(member_id),
        _INT32.pack(member_epoch),
        _INT32.pack(interval_ms),
    ]
    if assignment is None:
        parts.append(b"\xff")
    else:
        topics: dict[bytes, list[int]] = {}
        for topic_id, number in sorted(assignment):
            topics.setdefault(topic_id, []).append(number)
        parts += (b"\1", _array(topics.items(), _topic), _NO_TAGS)
    return _frame(correlation_id, parts)


def pack_describe(correlation_id: int, version: int, groups: Iterable[DescribedGroup]) -> bytes:
    """Encode a ConsumerGroupDescribe response; returns its whole frame."""
    packed = _array(list(groups), lambda group: _group(group, version))
    return _frame(correlation_id, [_INT32.pack(0), packed])


def _frame(correlation_id: int, parts: list[bytes]) -> bytes:
    body = b"".join((_INT32.pack(correlation_id), _NO_TAGS, *parts, _NO_TAGS))
    return _INT32.pack(len(body)) + body


def _text(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    data = value.encode()
    return pack_uvarint(len(data) + 1) + data


def _array(values: Iterable[_T], pack: Callable[[_T], bytes]) -> bytes:
    parts = [pack(value) for value in values]
    return pack_uvarint(len(parts) + 1) + b"".join(parts)


def _numbers(numbers: Sequence[int]) -> bytes:
    return pack_uvarint(len(numbers) + 1) + struct.pack(f">{len(numbers)}i", *numbers)


def _topic(topic: tuple[bytes, Sequence[int]]) -> bytes:
    topic_id, numbers = topic
    return topic_id + _numbers(numbers) + _NO_TAGS


def _named_topic(topic: tuple[tuple[bytes, str], Sequence[int]]) -> bytes:
    (topic_id, name), numbers = topic
    return topic_id + _text(name) + _numbers(numbers) + _NO_TAGS


def _group(group: DescribedGroup, version: int) -> bytes:
    return b"".join(
        (
            _INT16.pack(group.error),
            _text(group.message),
            _text(group.group_id),
            _text(group.state),
            _INT32.pack(group.epoch),
            _INT32.pack(group.assignment_epoch),
            _text(group.assignor),
            _array(group.members, lambda member: _member(member, version)),
            _INT32.pack(group.operations),
            _NO_TAGS,
        )
    )


def _member(member: DescribedMember, version: int) -> bytes:
    parts = [
        _text(member.member_id),
        _text(member.instance_id),
        _text(member.rack_id),
        _INT32.pack(member.epoch),
        _text(member.client_id),
        _text(member.client_host),
        _array(member.topics, _text),
        _text(member.regex),
        _array(member.assigned.items(), _named_topic),
        _NO_TAGS,
        _array(member.target.items(), _named_topic),
        _NO_TAGS,
    ]
    if version >= _MEMBER_TYPE_FROM:
        parts.append(bytes((_CONSUMER_MEMBER,)))
    parts.append(_NO_TAGS)
    return b"".join(parts)
