"""Committed offsets of groups.

    API            key  versions  behaviour
    OffsetCommit     8  2-9       durable before the response
    OffsetFetch      9  1-9       one group to version 7, several from version 8; waits until what
                                  it shows is durable
    OffsetDelete    47  0         durable before the response

A commit is accepted from a member of the current generation, and from any client (generation -1)
while the group has no members. Offsets belong to a topic ID: the deletion of a topic removes them.

A partition that a request names twice gets the last of its offsets. Offsets of open transactions
are not visible; with `require_stable` their partitions get UNSTABLE_OFFSET_COMMIT (KIP-447).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.consumer import ConsumerGroup
from logmirror.broker.groups.values import (
    NO_EPOCH,
    NO_EXPIRY,
    NO_OFFSET,
    CommittedOffset,
    Identity,
    RefusedError,
)
from logmirror.broker.handlers.groups import check_group, group_refusal
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.ownership import confirmed
from logmirror.broker.security.acls import ResourceType
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.groups.values import Partition
    from logmirror.wire.frames import RequestHeader

_BATCHED_FROM: Final = 8
_EPOCHS_FROM: Final = 9
"""The version of OffsetCommit with member epochs (KIP-848)."""

_Codes = dict[str, dict[int, ErrorCode]]
_LAST_MS: Final = 2**63 - 1
_NO_COMMIT: Final = CommittedOffset(b"", NO_OFFSET, NO_EPOCH, "", 0)


async def offset_commit(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle OffsetCommit."""
    kind = response_kind(Api.OFFSET_COMMIT, header.version)
    who = Identity(
        group_id=request.group_id,
        member_id=request.member_id,
        generation=request.generation_id_or_member_epoch,
        instance_id=request.group_instance_id,
        knows_epochs=header.version >= _EPOCHS_FROM,
    )
    turns = Turns()
    codes, offsets = await checked_offsets(broker, caller, Api.OFFSET_COMMIT, request.topics, turns)
    retention_ms = request.retention_time_ms
    if retention_ms is not None and retention_ms >= 0:
        offsets = {
            one: found._replace(expire_ms=min(found.commit_ms + retention_ms, _LAST_MS))
            for one, found in offsets.items()
        }
    service = broker.groups
    try:
        check_group(broker, caller, Api.OFFSET_COMMIT, request.group_id)
        service.change(lambda now, out: service.coordinator.commit(who, offsets, now, out))
        await service.durable()
    except RefusedError as refused:
        codes = _all(codes, await confirmed(broker.commits, refused.code))
    return await _codes_frame(broker, header, kind, turns, "OffsetCommitResponse", codes)


async def checked_offsets(
    broker: Broker, caller: Caller, api: Api, topics: Iterable[Message], turns: Turns
) -> tuple[_Codes, dict[Partition, CommittedOffset]]:
    """Return an error code for each partition of a commit, and the offsets that may be committed.

    Also for TxnOffsetCommit, whose entries have the same fields.
    """
    now_ms = broker.clock.now_ms()
    limit = broker.groups.coordinator.settings.offset_metadata_max_bytes
    codes: _Codes = {}
    offsets: dict[Partition, CommittedOffset] = {}
    for wanted in topics:
        topic = broker.topics.by_name.get(wanted.name)
        found = codes.setdefault(wanted.name, {})
        denied = broker.authorizer.refusal(caller, api, ResourceType.TOPIC, wanted.name)
        for one in wanted.partitions:
            await turns.took()
            number = one.partition_index
            if denied or topic is None or not 0 <= number < len(topic.logs):
                found[number] = denied or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            metadata = one.committed_metadata or ""
            if len(metadata.encode()) > limit:
                found[number] = ErrorCode.OFFSET_METADATA_TOO_LARGE
                continue
            found[number] = ErrorCode.NONE
            epoch = one.committed_leader_epoch
            offsets[wanted.name, number] = CommittedOffset(
                topic_id=topic.topic_id.bytes,
                offset=one.committed_offset,
                leader_epoch=NO_EPOCH if epoch is None else epoch,
                metadata=metadata,
                commit_ms=now_ms,
                expire_ms=NO_EXPIRY,
            )
    # Topics may have been deleted in a turn of others.
    by_id = broker.topics.by_id
    for partition in [one for one, found in offsets.items() if found.topic_id not in by_id]:
        del offsets[partition]
        codes[partition[0]][partition[1]] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return codes, offsets


def _all(codes: _Codes, code: ErrorCode) -> _Codes:
    """Return an error of the group for all partitions that exist, or that may not be seen."""
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if code is ErrorCode.GROUP_AUTHORIZATION_FAILED:
        return {topic: dict.fromkeys(found, code) for topic, found in codes.items()}
    return {
        topic: {number: unknown if one is unknown else code for number, one in found.items()}
        for topic, found in codes.items()
    }


async def _codes_frame(  # noqa: PLR0913, PLR0917  # the parts of a response
    broker: Broker,
    header: RequestHeader,
    kind: ResponseKind,
    turns: Turns,
    prefix: str,
    codes: _Codes,
    **fields: object,
) -> bytes:
    topics = []
    for name, found in codes.items():
        await turns.took(len(found))
        partitions = tuple(
            kind.entity(f"{prefix}Partition", partition_index=number, error_code=code)
            for number, code in found.items()
        )
        topics.append(kind.entity(f"{prefix}Topic", name=name, partitions=partitions))
    return await turns.encoded(broker, kind, header, topics=tuple(topics), **fields)


async def offset_delete(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle OffsetDelete."""
    kind = response_kind(Api.OFFSET_DELETE, header.version)
    turns = Turns()
    codes: _Codes = {}
    known = []
    for wanted in request.topics:
        topic = broker.topics.by_name.get(wanted.name)
        found = codes.setdefault(wanted.name, {})
        api, topic_type = Api.OFFSET_DELETE, ResourceType.TOPIC
        denied = broker.authorizer.refusal(caller, api, topic_type, wanted.name)
        for one in wanted.partitions:
            await turns.took()
            number = one.partition_index
            if denied or topic is None or not 0 <= number < len(topic.logs):
                found[number] = denied or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                found[number] = ErrorCode.NONE
                known.append((wanted.name, number))
    service = broker.groups
    try:
        check_group(broker, caller, Api.OFFSET_DELETE, request.group_id)
        deleted = service.change(
            lambda _, out: service.coordinator.delete_offsets(request.group_id, known, out)
        )
        await service.durable()
    except RefusedError as refused:
        return kind.frame(header.correlation_id, error_code=refused.code, topics=())
    for (name, number), code in deleted.items():
        codes[name][number] = code
    return await _codes_frame(broker, header, kind, turns, "OffsetDeleteResponse", codes)


async def offset_fetch(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle OffsetFetch."""
    kind = response_kind(Api.OFFSET_FETCH, header.version)
    turns = Turns()
    batched = header.version >= _BATCHED_FROM
    groups = []
    asked = {one.group_id: one for one in request.groups} if batched else {"": request}
    for wanted in asked.values():
        code = group_refusal(broker, caller, Api.OFFSET_FETCH, wanted.group_id)
        if batched and not code:
            code = _check_epoch(broker, wanted)
        stable = bool(request.require_stable)
        found = {} if code else _fetched(broker, caller, wanted, stable=stable)
        await turns.took(1 + sum(len(one) for one in found.values()))
        suffix = "s" if batched else ""
        topics = _topic_entities(kind, suffix, found)
        groups.append((wanted.group_id, code, topics))
    try:
        await broker.groups.durable()
    except RefusedError as refused:
        groups = [(group_id, refused.code, ()) for group_id, _, _ in groups]
    if not batched:
        [(_, code, topics)] = groups
        return await turns.encoded(broker, kind, header, error_code=code, topics=topics)
    entities = tuple(
        kind.entity("OffsetFetchResponseGroup", group_id=group_id, error_code=code, topics=topics)
        for group_id, code, topics in groups
    )
    return await turns.encoded(broker, kind, header, groups=entities)


_Found = dict[str, dict[int, tuple[ErrorCode, CommittedOffset]]]


def _check_epoch(broker: Broker, wanted: Message) -> ErrorCode:
    """Check the epoch of a member of the consumer protocol that asks for itself (version 9)."""
    group = broker.groups.coordinator.groups.get(wanted.group_id)
    if wanted.member_id and isinstance(group, ConsumerGroup):
        try:
            group.check_epoch(wanted.member_id, wanted.member_epoch)
        except RefusedError as refused:
            return refused.code
    return ErrorCode.NONE


def _fetched(broker: Broker, caller: Caller, wanted: Message, *, stable: bool) -> _Found:
    """Return error code and offset of a group's partitions.

    Topics that the client may not describe are refused if it names them, and else left out.
    """
    coordinator = broker.groups.coordinator
    group_id = wanted.group_id
    committed = coordinator.offsets.of_group(group_id)
    asked: Iterable[Partition] = committed
    if wanted.topics is not None:
        asked = [(one.name, number) for one in wanted.topics for number in one.partition_indexes]
    found: _Found = {} if wanted.topics is None else {one.name: {} for one in wanted.topics}
    for name, number in asked:
        api, topic_type = Api.OFFSET_FETCH, ResourceType.TOPIC
        if denied := broker.authorizer.refusal(caller, api, topic_type, name):
            if wanted.topics is not None:
                found[name][number] = denied, _NO_COMMIT
            continue
        value = ErrorCode.NONE, committed.get((name, number), _NO_COMMIT)
        if stable and coordinator.offsets.is_pending(group_id, (name, number)):
            value = ErrorCode.UNSTABLE_OFFSET_COMMIT, _NO_COMMIT
        found.setdefault(name, {})[number] = value
    return found


def _topic_entities(
    kind: ResponseKind,
    suffix: str,
    found: Mapping[str, Mapping[int, tuple[ErrorCode, CommittedOffset]]],
) -> tuple[Message, ...]:
    return tuple(
        kind.entity(
            f"OffsetFetchResponseTopic{suffix}",
            name=name,
            partitions=tuple(
                kind.entity(
                    f"OffsetFetchResponsePartition{suffix}",
                    partition_index=number,
                    committed_offset=offset.offset,
                    committed_leader_epoch=offset.leader_epoch,
                    metadata=offset.metadata,
                    error_code=code,
                )
                for number, (code, offset) in numbers.items()
            ),
        )
        for name, numbers in found.items()
    )
