"""Members of consumer groups, and the groups themselves.

    API               key  versions  behaviour
    FindCoordinator    10  0-6       this broker, for groups and transactions
    JoinGroup          11  0-9       waits until the rebalance ends
    Heartbeat          12  0-4
    LeaveGroup         13  0-5
    SyncGroup          14  0-5       waits for the leader; the assignment is durable before it
    DescribeGroups     15  0-6
    ListGroups         16  0-5       filters by state and type
    DeleteGroups       42  0-2       groups without members; durable before the response

`groups.classic` has the rules of the classic protocol. Group and member state survives a crash: the
members and the generation of the last completed rebalance are restored, and each session begins
again. A member of a later generation joins again.

Deviations from Kafka:

- `group.initial.rebalance.delay.ms` is 0 by default, so that a first consumer gets its partitions
  at once.
- A group has at most 1,000 members by default; Kafka has no limit. There are limits for the groups
  and for what all members store; beyond them a request gets POLICY_VIOLATION.
- A second JoinGroup or SyncGroup of a member that still waits ends the first one with
  REBALANCE_IN_PROGRESS. Kafka never responds to it.
- After a failed write of the group state, requests get COORDINATOR_NOT_AVAILABLE until the broker
  restarts.
- So do requests that an owner of a bucket would refuse by the members that it knows, if another
  broker may have replaced it: for that one they may be right.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.classic import ClassicGroup
from logmirror.broker.groups.values import (
    Identity,
    JoinRequest,
    JoinResult,
    RefusedError,
    State,
    SyncRequest,
    SyncResult,
)
from logmirror.broker.handlers.admin import address_of
from logmirror.broker.handlers.turns import ENTRIES_PER_TURN, Turns
from logmirror.broker.ownership import NEEDS_OWNER, confirmed
from logmirror.broker.security.acls import ResourceType
from logmirror.clock import new_nonce
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

    Outcome = JoinResult | SyncResult | ErrorCode
    Later = asyncio.Future[bytes] | Coroutine[None, None, bytes]

_NULL_PROTOCOL_FROM: Final = 7
_NO_NODE: Final = -1
_KEY_TYPES: Final = {0: ResourceType.GROUP, 1: ResourceType.TRANSACTIONAL_ID}

_MEMBER_ID_REQUIRED_FROM: Final = 4
_SKIP_ASSIGNMENT_FROM: Final = 9
_MEMBERS_FROM: Final = 3
_NOT_FOUND_FROM: Final = 6


def find_coordinator(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle FindCoordinator: this broker coordinates all groups and transactions."""
    kind = response_kind(Api.FIND_COORDINATOR, header.version)
    found: dict[str, object] = {
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "node_id": broker.options.node_id,
        **address_of(caller),
    }
    if (request.key_type or 0) not in _KEY_TYPES:
        found = {
            "error_code": ErrorCode.INVALID_REQUEST,
            "error_message": "key type must be 0 (group) or 1 (transaction)",
            "node_id": _NO_NODE,
            "host": "",
            "port": _NO_NODE,
        }
    resource_type = _KEY_TYPES.get(request.key_type or 0, ResourceType.GROUP)

    def outcome(key: str) -> dict[str, object]:
        denied = broker.authorizer.refusal(caller, Api.FIND_COORDINATOR, resource_type, key)
        if not denied:
            return found
        nowhere = {"node_id": _NO_NODE, "host": "", "port": _NO_NODE}
        return {"error_code": denied, "error_message": denied.name, **nowhere}

    keys = dict.fromkeys(request.coordinator_keys or ())
    coordinators = tuple(kind.entity("Coordinator", key=key, **outcome(key)) for key in keys)
    one = outcome(request.key or "")
    return kind.frame(header.correlation_id, coordinators=coordinators, **one)


def group_refusal(broker: Broker, caller: Caller, api: Api, group_id: str) -> ErrorCode:
    """Return the error code for a request on this group; NONE if the client may send it."""
    return broker.authorizer.refusal(caller, api, ResourceType.GROUP, group_id)


def check_group(broker: Broker, caller: Caller, api: Api, group_id: str) -> None:
    """Refuse a request on a group that needs a permission which the client does not have.

    Raises:
        RefusedError: It has not.
    """
    if denied := group_refusal(broker, caller, api, group_id):
        raise RefusedError(denied)


def _refusal(
    broker: Broker, code: ErrorCode, pack: Callable[[ErrorCode], bytes]
) -> bytes | Coroutine[None, None, bytes]:
    """Return the response with a refusal, or with what `confirmed` makes of it."""

    async def later() -> bytes:
        return pack(await confirmed(broker.commits, code))

    may_be_replaced = broker.options.bucket is not None
    return later() if may_be_replaced and code in NEEDS_OWNER else pack(code)


def join_group(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes | Later:
    """Handle JoinGroup."""
    timeout_ms = request.session_timeout_ms
    rebalance_ms = request.rebalance_timeout_ms
    instance_id = request.group_instance_id
    wanted = JoinRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=instance_id,
        protocol_type=request.protocol_type,
        protocols=tuple((one.name, one.metadata) for one in request.protocols),
        session_timeout_ms=timeout_ms,
        # Version 0 has none: the session timeout is both, as in Kafka.
        rebalance_timeout_ms=max(1, timeout_ms if header.version == 0 else rebalance_ms),
        client_id=caller.client_id,
        client_host=f"/{caller.client_host}",
        new_member_id="" if request.member_id else _new_id(instance_id or caller.client_id),
        requires_known_id=header.version >= _MEMBER_ID_REQUIRED_FROM,
        may_skip_assignment=header.version >= _SKIP_ASSIGNMENT_FROM,
    )
    service = broker.groups
    pack = functools.partial(_joined, header, request.member_id)
    try:
        check_group(broker, caller, Api.JOIN_GROUP, request.group_id)
        return service.delayed(functools.partial(service.coordinator.join, wanted), pack)
    except RefusedError as refused:
        return _refusal(broker, refused.code, pack)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{new_nonce()}{new_nonce()}"


def _joined(header: RequestHeader, member_id: str, found: Outcome) -> bytes:
    result = JoinResult(found, member_id) if isinstance(found, ErrorCode) else found
    assert isinstance(result, JoinResult)  # noqa: S101  # what a JoinGroup gets
    kind = response_kind(Api.JOIN_GROUP, header.version)
    members = tuple(
        kind.entity(
            "JoinGroupResponseMember", member_id=one, group_instance_id=instance, metadata=data
        )
        for one, instance, data in result.members
    )
    return kind.frame(
        header.correlation_id,
        error_code=result.error,
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol or (None if header.version >= _NULL_PROTOCOL_FROM else ""),
        leader=result.leader,
        skip_assignment=result.skips_assignment,
        member_id=result.member_id,
        members=members,
    )


def sync_group(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes | Later:
    """Handle SyncGroup."""
    wanted = SyncRequest(
        member=_identity(request),
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
        assignments={one.member_id: one.assignment for one in request.assignments},
    )
    service = broker.groups
    pack = functools.partial(_synced, header)
    try:
        check_group(broker, caller, Api.SYNC_GROUP, request.group_id)
        return service.delayed(functools.partial(service.coordinator.sync, wanted), pack)
    except RefusedError as refused:
        return _refusal(broker, refused.code, pack)


def _synced(header: RequestHeader, found: Outcome) -> bytes:
    result = SyncResult(found) if isinstance(found, ErrorCode) else found
    assert isinstance(result, SyncResult)  # noqa: S101  # what a SyncGroup gets
    return response_kind(Api.SYNC_GROUP, header.version).frame(
        header.correlation_id,
        error_code=result.error,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        assignment=result.assignment,
    )


def _identity(request: Message) -> Identity:
    return Identity(
        group_id=request.group_id,
        member_id=request.member_id,
        generation=request.generation_id,
        instance_id=request.group_instance_id,
    )


def heartbeat(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes | Later:
    """Handle Heartbeat."""
    who = _identity(request)
    service = broker.groups
    kind = response_kind(Api.HEARTBEAT, header.version)

    def pack(code: ErrorCode) -> bytes:
        return kind.frame(header.correlation_id, error_code=code)

    try:
        check_group(broker, caller, Api.HEARTBEAT, request.group_id)
        return pack(service.change(lambda now, _: service.coordinator.heartbeat(who, now)))
    except RefusedError as refused:
        return _refusal(broker, refused.code, pack)


async def leave_group(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle LeaveGroup."""
    kind = response_kind(Api.LEAVE_GROUP, header.version)
    members = [(one.member_id, one.group_instance_id) for one in request.members or ()]
    if header.version < _MEMBERS_FROM:
        members = [(request.member_id, None)]
    service = broker.groups
    turns = Turns()
    codes: list[ErrorCode] = []
    try:
        check_group(broker, caller, Api.LEAVE_GROUP, request.group_id)
        for place in range(0, max(1, len(members)), ENTRIES_PER_TURN):
            some = members[place : place + ENTRIES_PER_TURN]
            leave = functools.partial(service.coordinator.leave, request.group_id, some)
            codes += service.change(leave)
            await turns.took(len(some))
        await service.durable()
    except RefusedError as refused:
        return kind.frame(header.correlation_id, error_code=refused.code, members=())
    entities = tuple(
        kind.entity(
            "MemberResponse", member_id=member_id, group_instance_id=instance_id, error_code=code
        )
        for (member_id, instance_id), code in zip(members, codes, strict=True)
    )
    code = codes[0] if header.version < _MEMBERS_FROM else ErrorCode.NONE
    return kind.frame(header.correlation_id, error_code=code, members=entities)


# Groups


async def describe_groups(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DescribeGroups."""
    kind = response_kind(Api.DESCRIBE_GROUPS, header.version)
    turns = Turns()
    groups = []
    for group_id in dict.fromkeys(request.groups):
        if denied := group_refusal(broker, caller, Api.DESCRIBE_GROUPS, group_id):
            groups.append(_refused(kind, group_id, denied))
            await turns.took()
            continue
        operations = None
        if request.include_authorized_operations:
            operations = broker.authorizer.operations(caller, ResourceType.GROUP, group_id)
        found = broker.groups.coordinator.groups.get(group_id)
        group = found if isinstance(found, ClassicGroup) else None
        await turns.took(1 if group is None else 1 + len(group.members))
        groups.append(_described(kind, header.version, group_id, group, operations))
    return await turns.encoded(broker, kind, header, groups=tuple(groups))


def _refused(kind: ResponseKind, group_id: str, code: ErrorCode) -> Message:
    return kind.entity(
        "DescribedGroup",
        error_code=code,
        error_message=code.name,
        group_id=group_id,
        group_state="",
        protocol_type="",
        protocol_data="",
        members=(),
        authorized_operations=None,
    )


def _described(
    kind: ResponseKind,
    version: int,
    group_id: str,
    group: ClassicGroup | None,
    operations: set[int] | None,
) -> Message:
    if group is None:
        is_error = version >= _NOT_FOUND_FROM
        return kind.entity(
            "DescribedGroup",
            error_code=ErrorCode.GROUP_ID_NOT_FOUND if is_error else ErrorCode.NONE,
            error_message=f"group {group_id} not found" if is_error else None,
            group_id=group_id,
            group_state=State.DEAD.value,
            protocol_type="",
            protocol_data="",
            members=(),
            authorized_operations=operations,
        )
    is_stable = group.state is State.STABLE
    members = tuple(
        kind.entity(
            "DescribedGroupMember",
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            member_metadata=member.metadata(group.protocol) if is_stable else b"",
            member_assignment=member.assignment if is_stable else b"",
        )
        for member in group.members.values()
    )
    return kind.entity(
        "DescribedGroup",
        error_code=ErrorCode.NONE,
        error_message=None,
        group_id=group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type,
        protocol_data=(group.protocol or "") if is_stable else "",
        members=members,
        authorized_operations=operations,
    )


async def list_groups(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle ListGroups."""
    kind = response_kind(Api.LIST_GROUPS, header.version)
    states = {state.lower() for state in request.states_filter or ()}
    types = {one.lower() for one in request.types_filter or ()}
    turns = Turns()
    groups = []
    sees_few = broker.authorizer.refusal(caller, Api.LIST_GROUPS)
    for group in tuple(broker.groups.coordinator.groups.values()):
        await turns.took()
        state = group.state.value
        if (states and state.lower() not in states) or (types and group.type not in types):
            continue
        if sees_few and group_refusal(broker, caller, Api.LIST_GROUPS, group.group_id):
            continue
        groups.append(
            kind.entity(
                "ListedGroup",
                group_id=group.group_id,
                protocol_type=group.protocol_type,
                group_state=state,
                group_type=group.type,
            )
        )
    return await turns.encoded(
        broker, kind, header, error_code=ErrorCode.NONE, groups=tuple(groups)
    )


async def delete_groups(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DeleteGroups."""
    kind = response_kind(Api.DELETE_GROUPS, header.version)
    service = broker.groups
    turns = Turns()
    codes = {}
    for group_id in dict.fromkeys(request.groups_names):
        await turns.took()
        try:
            check_group(broker, caller, Api.DELETE_GROUPS, group_id)
            delete = functools.partial(service.coordinator.delete, group_id)
            codes[group_id] = service.change(delete)
        except RefusedError as refused:
            codes[group_id] = refused.code
    try:
        await service.durable()
    except RefusedError as refused:
        codes = dict.fromkeys(codes, refused.code)
    results = tuple(
        kind.entity("DeletableGroupResult", group_id=group_id, error_code=code)
        for group_id, code in codes.items()
    )
    return await turns.encoded(broker, kind, header, results=results)
