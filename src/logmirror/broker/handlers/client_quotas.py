"""Client quotas (KIP-546).

    API                    key  versions  behaviour
    DescribeClientQuotas    48  0-1       quotas of the entities that a filter matches
    AlterClientQuotas       49  0-1       durable before the response; each entity for itself

Deviations from Kafka: `controller_mutation_rate` does not exist; an address is an IP address, not a
host name; an entity that a request names twice gets INVALID_REQUEST.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import LateChangeError, code_of
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.quotas.entities import (
    Entity,
    Filter,
    Quota,
    RefusedQuotaError,
    UnknownTypeError,
    check,
    entity,
)
from logmirror.broker.quotas.limits import MAX_ENTITIES, ClientQuotas
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.metadata import MetadataStore
    from logmirror.wire.frames import RequestHeader

    Change = tuple[Entity, Quota, float | None]
    Named = tuple[tuple[str, str | None], ...]
    Outcome = tuple[ErrorCode, str | None]

_LOG: Final = logging.getLogger(__name__)


def stored_quotas(store: MetadataStore) -> ClientQuotas:
    """Return the quotas that are stored."""
    return ClientQuotas(
        (Entity.from_text(text), name, value) for text, name, value in store.quotas()
    )


async def describe_client_quotas(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DescribeClientQuotas."""
    kind = response_kind(Api.DESCRIBE_CLIENT_QUOTAS, header.version)
    code, reason = broker.authorizer.refusal(caller, Api.DESCRIBE_CLIENT_QUOTAS), None
    found: dict[Entity, Mapping[str, float]] = {}
    turns = Turns()
    if not code:
        parts = [(one.entity_type, one.match_type, one.match) for one in request.components]
        try:
            wanted = Filter(parts, strict=request.strict)
        except UnknownTypeError as refused:
            code, reason = ErrorCode.UNSUPPORTED_VERSION, refused.reason
        except RefusedQuotaError as refused:
            code, reason = ErrorCode.INVALID_REQUEST, refused.reason
        else:
            for who, values in broker.quotas.all().items():
                await turns.took()
                if wanted.matches(who):
                    found[who] = values
    entries = tuple(
        kind.entity(
            "EntryData",
            entity=tuple(
                kind.entity("EntityData", entity_type=type_name, entity_name=name)
                for type_name, name in who.named()
            ),
            values=tuple(
                kind.entity("ValueData", key=key, value=value) for key, value in values.items()
            ),
        )
        for who, values in found.items()
    )
    return await turns.encoded(
        broker,
        kind,
        header,
        error_code=code,
        error_message=reason,
        entries=None if code else entries,
    )


async def alter_client_quotas(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle AlterClientQuotas."""
    kind = response_kind(Api.ALTER_CLIENT_QUOTAS, header.version)
    turns = Turns()
    denied = broker.authorizer.refusal(caller, Api.ALTER_CLIENT_QUOTAS)
    wanted: dict[Named, list[Message]] = {}
    for entry in request.entries:
        await turns.took(1 + len(entry.ops))
        named = tuple((part.entity_type, part.entity_name) for part in entry.entity)
        wanted.setdefault(named, []).append(entry)
    outcomes: list[Outcome] = [(denied, None)] * len(wanted)
    if not denied:
        change = _alter(broker, wanted, validate_only=request.validate_only)
        try:
            outcomes = await broker.changes.run(change)
        except LateChangeError as error:
            outcomes = [(code_of(error), error.message)] * len(wanted)
    results = tuple(
        kind.entity(
            "EntryData",
            error_code=code,
            error_message=reason,
            entity=tuple(
                kind.entity("EntityData", entity_type=type_name, entity_name=name)
                for type_name, name in named
            ),
        )
        for named, (code, reason) in zip(wanted, outcomes, strict=True)
    )
    return await turns.encoded(broker, kind, header, entries=results)


async def _alter(
    broker: Broker, wanted: Mapping[Named, list[Message]], *, validate_only: bool
) -> list[Outcome]:
    """Store and apply the changes that are allowed; returns the outcome of each entity."""
    known = set(broker.quotas.all())
    changes: list[Change] = []
    outcomes: list[Outcome] = []
    turns = Turns()
    for named, entries in wanted.items():
        await turns.took(1 + len(entries[0].ops))
        try:
            who = entity(named)
            new = _changes(who, entries)
        except RefusedQuotaError as refused:
            outcomes.append((ErrorCode.INVALID_REQUEST, refused.reason))
            continue
        adds = any(value is not None for _, _, value in new)
        if adds and who not in known and len(known) >= MAX_ENTITIES:
            reason = f"this broker has quotas for at most {MAX_ENTITIES} entities"
            outcomes.append((ErrorCode.POLICY_VIOLATION, reason))
            continue
        if adds:
            known.add(who)
        changes += new
        outcomes.append((ErrorCode.NONE, None))
    if validate_only or not changes:
        return outcomes
    loop = asyncio.get_running_loop()
    rows = [(who.text(), quota.value, value) for who, quota, value in changes]
    try:
        await loop.run_in_executor(broker.changers, broker.store.change_quotas, rows)
    except LogmirrorError:
        _LOG.exception("client quotas could not be changed")
        return [(code or ErrorCode.KAFKA_STORAGE_ERROR, reason) for code, reason in outcomes]
    broker.quotas.change(changes)
    _LOG.info("%d client quotas changed", len(changes))
    return outcomes


def _changes(who: Entity, entries: list[Message]) -> list[Change]:
    """Return the changes for one entity.

    Raises:
        RefusedQuotaError: One of them is not allowed.
    """
    if len(entries) > 1:
        raise RefusedQuotaError("entity is named twice")
    found: dict[str, Change] = {}
    for change in entries[0].ops:
        if change.key in found:
            raise RefusedQuotaError(f"{change.key}: named twice")
        if not change.remove:
            found[change.key] = who, check(who, change.key, change.value), change.value
        elif change.key in list(Quota):
            found[change.key] = who, Quota(change.key), None
    return list(found.values())
