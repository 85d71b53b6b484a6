"""DeleteRecords (key 21, versions 0-2): advances the log start offset of partitions.

Sealed segments that end before the new log start are removed. A segment that contains it and the
open segment stay; records before the log start are not served from them. A partition that is named
twice gets one response, for the highest of its offsets. A topic without `delete` in its
`cleanup.policy` gets POLICY_VIOLATION, as in Kafka.

Deviation from Kafka: the new log start is durable before the response, so that no crash brings a
record back. Apache Kafka writes it once a minute.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import code_of
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.acls import ResourceType
from logmirror.broker.topic import RefusedTopicError
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.topic import Topic
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_ALL: Final = -1
_NOT_KNOWN: Final = -1


async def delete_records(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DeleteRecords."""
    kind = response_kind(Api.DELETE_RECORDS, header.version)
    topics = []
    turns = Turns()
    named: dict[str, dict[int, int]] = {}
    for asked in request.topics:
        offsets = named.setdefault(asked.name, {})
        for found in asked.partitions:
            number, offset = found.partition_index, found.offset
            before = offsets.get(number, offset)
            offsets[number] = _ALL if _ALL in (before, offset) else max(before, offset)
    for name, offsets in named.items():
        topic = broker.topics.by_name.get(name)
        wanted = list(offsets.items())
        await turns.took(1 + len(wanted))
        codes, starts = _check(topic, wanted)
        if denied := broker.authorizer.refusal(
            caller, Api.DELETE_RECORDS, ResourceType.TOPIC, name
        ):
            codes, starts = [denied] * len(wanted), {}
        failure = await _move(broker, topic, starts)
        partitions = []
        for (number, _), code in zip(wanted, codes, strict=True):
            final = code or failure
            reached = topic is not None and final == ErrorCode.NONE
            partitions.append(
                kind.entity(
                    "DeleteRecordsPartitionResult",
                    partition_index=number,
                    low_watermark=topic.logs[number].log_start if topic and reached else _NOT_KNOWN,
                    error_code=final,
                )
            )
        topics.append(
            kind.entity("DeleteRecordsTopicResult", name=name, partitions=tuple(partitions))
        )
    return await turns.encoded(broker, kind, header, topics=tuple(topics))


def _check(
    topic: Topic | None, wanted: list[tuple[int, int]]
) -> tuple[list[ErrorCode], dict[int, int]]:
    """Return each partition's error code, and the new log starts of those without an error."""
    codes: list[ErrorCode] = []
    starts: dict[int, int] = {}
    for number, offset in wanted:
        if topic is None or not 0 <= number < len(topic.logs):
            codes.append(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            continue
        log = topic.logs[number]
        start = log.high_watermark if offset == _ALL else offset
        if not topic.configs.is_deleting:
            codes.append(ErrorCode.POLICY_VIOLATION)
        elif log.failure is not None:
            codes.append(ErrorCode.KAFKA_STORAGE_ERROR)
        elif not 0 <= start <= log.high_watermark:
            codes.append(ErrorCode.OFFSET_OUT_OF_RANGE)
        else:
            codes.append(ErrorCode.NONE)
            starts[number] = start
    return codes, starts


async def _move(broker: Broker, topic: Topic | None, starts: dict[int, int]) -> ErrorCode:
    if topic is None or not starts:
        return ErrorCode.NONE
    try:
        await broker.topics.delete_records(topic, starts)
    except RefusedTopicError as refused:
        return refused.code
    except LogmirrorError as error:
        _LOG.exception("%s: records could not be deleted", topic.name)
        return code_of(error)
    return ErrorCode.NONE
