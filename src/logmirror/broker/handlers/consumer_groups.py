"""Groups of the consumer protocol (KIP-848), which clients use with `group.protocol=consumer`.

    API                     key  versions  behaviour
    ConsumerGroupHeartbeat   68  0-1       join, heartbeat and leave; durable before the response
    ConsumerGroupDescribe    69  0-1

`groups.consumer` has the rules. The server-side assignors are `uniform`, the default, and `range`.

Deviations from Kafka:

- A group does not change its protocol while it has members: a heartbeat to a group of the classic
  protocol gets GROUP_ID_NOT_FOUND, and a JoinGroup to a group of this one
  INCONSISTENT_GROUP_PROTOCOL. A group without members takes the protocol of the next one that
  joins, and keeps its offsets.
- A member of an unknown group gets UNKNOWN_MEMBER_ID, so that it joins again; Kafka responds
  GROUP_ID_NOT_FOUND.
- A changed topic is seen within a second of a heartbeat, and one that a regular expression begins
  to match, at the next heartbeat.
- Topics that a regular expression matches are found for each member with its own permissions. Kafka
  finds them for a group, with those of the member that caused the search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.consumer import ConsumerGroup
from logmirror.broker.groups.consumer_heartbeat import JOINING, ConsumerHeartbeat
from logmirror.broker.groups.values import RefusedError
from logmirror.broker.handlers.groups import check_group, group_refusal
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.ownership import confirmed
from logmirror.broker.security.acls import Operation, ResourceType
from logmirror.clock import new_nonce
from logmirror.wire.serve_consumer_groups import (
    DescribedGroup,
    DescribedMember,
    DescribeRequest,
    HeartbeatRequest,
    pack_describe,
    pack_heartbeat,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.groups.assignors import TopicPartition
    from logmirror.wire.frames import RequestHeader

_ANY_ID_FROM: Final = 1
"""From this version on a member makes its own ID."""


async def consumer_group_heartbeat(
    broker: Broker, header: RequestHeader, request: HeartbeatRequest, caller: Caller
) -> bytes:
    """Handle ConsumerGroupHeartbeat."""
    member_id = request.member_id
    if not member_id and header.version < _ANY_ID_FROM:
        member_id = new_nonce() + new_nonce()
    service = broker.groups
    try:
        check_group(broker, caller, Api.CONSUMER_GROUP_HEARTBEAT, request.group_id)
        _check_topics(broker, caller, request)
        wanted = ConsumerHeartbeat(
            group_id=request.group_id,
            member_id=member_id,
            member_epoch=request.member_epoch,
            instance_id=request.instance_id,
            rack_id=request.rack_id,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            topics=None if request.topics is None else tuple(request.topics),
            regex=request.regex,
            matched=_matched(broker, caller, request),
            viewer=broker.authorizer.viewer(caller),
            assignor=request.assignor,
            owned=request.owned,
            client_id=caller.client_id,
            client_host=f"/{caller.client_host}",
        )
        found, has_changes = service.change(
            lambda now, out: (
                service.coordinator.consumer_heartbeat(wanted, now, out),
                bool(out.changes),
            )
        )
        # What it shows may be a change of an earlier heartbeat, whose response did not come.
        is_news = found.assignment is not None or found.member_epoch != wanted.member_epoch
        if has_changes or is_news:
            await service.durable()
    except RefusedError as refused:
        return pack_heartbeat(
            header.correlation_id,
            error=await confirmed(broker.commits, refused.code),
            message=str(refused),
            member_id=None,
            member_epoch=0,
            interval_ms=0,
            assignment=None,
        )
    return pack_heartbeat(
        header.correlation_id,
        error=ErrorCode.NONE,
        message=None,
        member_id=found.member_id,
        member_epoch=found.member_epoch,
        interval_ms=service.coordinator.settings.heartbeat_interval_ms,
        assignment=found.assignment,
    )


def _check_topics(broker: Broker, caller: Caller, request: HeartbeatRequest) -> None:
    api, topic_type = Api.CONSUMER_GROUP_HEARTBEAT, ResourceType.TOPIC
    for name in request.topics or ():
        if denied := broker.authorizer.refusal(caller, api, topic_type, name):
            raise RefusedError(denied)


def _matched(broker: Broker, caller: Caller, request: HeartbeatRequest) -> frozenset[str]:
    """Return the topics that the member's regular expression matches and that it may describe."""
    regex = request.regex
    if regex is None:
        regex = broker.groups.coordinator.regex_of(request.group_id, request.member_id)
    if not regex or request.member_epoch < JOINING:
        return frozenset()
    found = broker.patterns.matching(regex, broker.topics.by_name, broker.topics.version)
    if not broker.authorizer.is_enabled:
        return found
    describe, topic = Operation.DESCRIBE, ResourceType.TOPIC
    return frozenset(
        name for name in found if broker.authorizer.allows(caller, describe, topic, name)
    )


async def consumer_group_describe(
    broker: Broker,
    header: RequestHeader,
    request: DescribeRequest,
    caller: Caller,
) -> bytes:
    """Handle ConsumerGroupDescribe."""
    turns = Turns()
    groups = []
    for group_id in dict.fromkeys(request.groups):
        if denied := group_refusal(broker, caller, Api.CONSUMER_GROUP_DESCRIBE, group_id):
            await turns.took()
            groups.append(DescribedGroup(denied, denied.name, group_id))
            continue
        if not group_id:
            await turns.took()
            groups.append(DescribedGroup(ErrorCode.INVALID_GROUP_ID, "no group ID", group_id))
            continue
        group = broker.groups.coordinator.groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            await turns.took()
            known = "not found" if group is None else "is not a consumer group"
            reason = f"group {group_id} {known}"
            groups.append(DescribedGroup(ErrorCode.GROUP_ID_NOT_FOUND, reason, group_id))
            continue
        found = _described(broker, caller, group, wants_operations=request.wants_operations)
        groups.append(found)
        await turns.took(1 + len(group.members))
    return pack_describe(header.correlation_id, header.version, groups)


def _described(
    broker: Broker, caller: Caller, group: ConsumerGroup, *, wants_operations: bool
) -> DescribedGroup:
    members = [
        DescribedMember(
            member_id=member.member_id,
            instance_id=member.instance_id,
            rack_id=member.rack_id,
            epoch=member.epoch,
            client_id=member.client_id,
            client_host=member.client_host,
            topics=member.topics,
            regex=member.regex or None,
            assigned=_named(broker, member.assigned),
            target=_named(broker, group.target.get(member.member_id, ())),
        )
        for member in group.members.values()
    ]
    found = DescribedGroup(
        error=ErrorCode.NONE,
        message=None,
        group_id=group.group_id,
        state=group.state.value,
        epoch=group.epoch,
        assignment_epoch=group.epoch,
        assignor=group.assignor,
        members=members,
    )
    if not wants_operations:
        return found
    allowed = broker.authorizer.operations(caller, ResourceType.GROUP, group.group_id)
    return found._replace(operations=sum(1 << operation for operation in allowed))


def _named(
    broker: Broker, partitions: Iterable[TopicPartition]
) -> dict[tuple[bytes, str], list[int]]:
    """Return partitions by topic ID and name. Those of deleted topics are left out."""
    found: dict[tuple[bytes, str], list[int]] = {}
    for topic_id, number in sorted(partitions):
        topic = broker.topics.by_id.get(topic_id)
        if topic is not None:
            found.setdefault((topic_id, topic.name), []).append(number)
    return found
