"""Access control lists.

    API            key  versions  behaviour
    DescribeAcls    29  1-3       ACLs that match a filter, by resource
    CreateAcls      30  1-3       durable before the response
    DeleteAcls      31  1-3       ACLs that match any of the filters; durable before the response

Without super users, ACLs are not enforced, and each of these gets SECURITY_DISABLED, as from an
Apache Kafka broker without an authorizer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import LateChangeError, code_of
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.acls import (
    CLUSTER_NAME,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from logmirror.broker.security.authorization import MAX_ACLS
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_ANY: Final = 1
_MAX_NAME: Final = 1000
MAX_FILTERS: Final = 200
"""Limit for the filters of one DeleteAcls; each is compared with every ACL."""

_DISABLED: Final = "no authorizer: the broker was started without a super user"


def _refusal(broker: Broker, caller: Caller, api: Api) -> tuple[ErrorCode, str | None]:
    if not broker.authorizer.is_enabled:
        return ErrorCode.SECURITY_DISABLED, _DISABLED
    return broker.authorizer.refusal(caller, api), None


async def describe_acls(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DescribeAcls."""
    kind = response_kind(Api.DESCRIBE_ACLS, header.version)
    code, reason = _refusal(broker, caller, Api.DESCRIBE_ACLS)
    wanted = _filter(request)
    if not code and not _is_filter(wanted):
        code, reason = ErrorCode.INVALID_REQUEST, "unknown value in the filter"
    by_resource: dict[tuple[int, int, str], list[Message]] = {}
    turns = Turns()
    for acl in () if code else sorted(broker.authorizer.acls):
        await turns.took()
        if wanted.matches(acl):
            by_resource.setdefault(acl[:3], []).append(
                kind.entity(
                    "AclDescription",
                    principal=acl.principal,
                    host=acl.host,
                    operation=acl.operation,
                    permission_type=acl.permission,
                )
            )
    resources = tuple(
        kind.entity(
            "DescribeAclsResource",
            resource_type=resource_type,
            resource_name=name,
            pattern_type=pattern_type,
            acls=tuple(found),
        )
        for (resource_type, pattern_type, name), found in by_resource.items()
    )
    return await turns.encoded(
        broker, kind, header, error_code=code, error_message=reason, resources=resources
    )


def _filter(entry: Message) -> AclFilter:
    return AclFilter(
        entry.resource_type_filter,
        entry.pattern_type_filter,
        entry.resource_name_filter,
        entry.principal_filter,
        entry.host_filter,
        entry.operation,
        entry.permission_type,
    )


def _is_filter(wanted: AclFilter) -> bool:
    return (
        wanted.resource_type in (_ANY, *ResourceType)
        and wanted.pattern_type in list(PatternType)
        and wanted.operation in (_ANY, *Operation)
        and wanted.permission in (_ANY, *Permission)
    )


async def create_acls(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle CreateAcls."""
    kind = response_kind(Api.CREATE_ACLS, header.version)
    refused = _refusal(broker, caller, Api.CREATE_ACLS)
    turns = Turns()
    known = broker.authorizer.acls
    added: dict[Acl, None] = {}
    outcomes: list[tuple[ErrorCode, str | None]] = []
    for creation in request.creations:
        await turns.took()
        acl = Acl(
            creation.resource_type,
            creation.resource_pattern_type,
            creation.resource_name,
            creation.principal,
            creation.host,
            creation.operation,
            creation.permission_type,
        )
        reason = _fault(acl)
        if refused[0]:
            outcomes.append(refused)
        elif reason:
            outcomes.append((ErrorCode.INVALID_REQUEST, reason))
        elif acl not in known and acl not in added and len(known) + len(added) >= MAX_ACLS:
            reason = f"this broker has at most {MAX_ACLS} ACLs"
            outcomes.append((ErrorCode.POLICY_VIOLATION, reason))
        else:
            added[acl] = None
            outcomes.append((ErrorCode.NONE, None))
    failure = await _change(broker, list(added), [])
    results = tuple(
        kind.entity("AclCreationResult", error_code=code or failure, error_message=reason)
        for code, reason in outcomes
    )
    return await turns.encoded(broker, kind, header, results=results)


def _fault(acl: Acl) -> str | None:
    """Return why an ACL cannot be; None if it can."""
    is_known = (
        acl.resource_type in list(ResourceType)
        and acl.pattern_type in (PatternType.LITERAL, PatternType.PREFIXED)
        and acl.operation in list(Operation)
        and acl.permission in list(Permission)
    )
    kind, _, name = acl.principal.partition(":")
    if not is_known:
        return "unknown type, pattern, operation or permission"
    if acl.resource_type == ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
        return f"the only name of the cluster resource is {CLUSTER_NAME}"
    if not acl.resource_name or not acl.host:
        return "empty resource name or host"
    if not kind or not name:
        return "a principal is written TYPE:NAME"
    if max(map(len, (acl.resource_name, acl.principal, acl.host))) > _MAX_NAME:
        return "name is too long"
    return None


async def _change(broker: Broker, added: list[Acl], removed: list[Acl]) -> ErrorCode:
    if not added and not removed:
        return ErrorCode.NONE
    try:
        return await broker.changes.run(_apply(broker, added, removed))
    except LateChangeError as error:
        return code_of(error)


async def _apply(broker: Broker, added: list[Acl], removed: list[Acl]) -> ErrorCode:
    loop = asyncio.get_running_loop()
    try:
        change = broker.security.change_acls
        await loop.run_in_executor(broker.changers, change, added, removed)
    except LogmirrorError:
        _LOG.exception("ACLs could not be changed")
        return ErrorCode.KAFKA_STORAGE_ERROR
    broker.authorizer.changed(added, removed)
    _LOG.info("%d ACLs added, %d removed", len(added), len(removed))
    return ErrorCode.NONE


async def delete_acls(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DeleteAcls. An ACL that several filters match is listed for the first of them."""
    kind = response_kind(Api.DELETE_ACLS, header.version)
    refused = _refusal(broker, caller, Api.DELETE_ACLS)
    turns = Turns()
    removed: dict[Acl, None] = {}
    outcomes: list[tuple[ErrorCode, str | None, list[Acl]]] = []
    known = sorted(broker.authorizer.acls)
    for number, entry in enumerate(request.filters):
        wanted = _filter(entry)
        found: list[Acl] = []
        outcome = refused
        if not refused[0] and not _is_filter(wanted):
            outcome = ErrorCode.INVALID_REQUEST, "unknown value in the filter"
        if number >= MAX_FILTERS:
            outcome = ErrorCode.POLICY_VIOLATION, f"at most {MAX_FILTERS} filters in one request"
        for acl in () if outcome[0] else known:
            await turns.took()
            if wanted.matches(acl) and acl not in removed:
                removed[acl] = None
                found.append(acl)
        outcomes.append((*outcome, found))
    failure = await _change(broker, [], list(removed))
    results = []
    for code, reason, found in outcomes:
        await turns.took(1 + len(found))
        matching = tuple(
            kind.entity(
                "DeleteAclsMatchingAcl",
                error_code=failure,
                error_message=None,
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in found
        )
        results.append(
            kind.entity(
                "DeleteAclsFilterResult",
                error_code=code,
                error_message=reason,
                matching_acls=matching,
            )
        )
    return await turns.encoded(broker, kind, header, filter_results=tuple(results))
