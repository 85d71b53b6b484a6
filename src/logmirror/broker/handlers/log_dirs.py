"""Log directories, and where the replicas of partitions are.

    API                          key  versions  behaviour
    DescribeLogDirs               35  1-5       as in Kafka, see below
    AlterPartitionReassignments   45  0-1       accepts the replica that there is, and does nothing;
                                                any other is refused
    ListPartitionReassignments    46  0         none is ever in progress

DescribeLogDirs (KIP-113, KIP-827): each log directory is in the response, under the name with which
the broker was started, made absolute. One that cannot be read gets KAFKA_STORAGE_ERROR. A partition
that is offline, and one of a mounted archive, is in none. A log directory in a bucket has no total
and no usable bytes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.topic import Topic
    from logmirror.wire.frames import RequestHeader

_UNKNOWN: Final = -1


async def describe_log_dirs(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DescribeLogDirs."""
    kind = response_kind(Api.DESCRIBE_LOG_DIRS, header.version)
    turns = Turns()
    if code := broker.authorizer.refusal(caller, Api.DESCRIBE_LOG_DIRS):
        return await turns.encoded(broker, kind, header, error_code=code, results=())
    found: dict[str, dict[str, list[Message]]] = {name: {} for name in log_dir_names(broker)}
    for topic, numbers in _asked(broker, request):
        for number in numbers:
            await turns.took()
            place = _place_of(broker, topic, number)
            if place is not None:
                found[place].setdefault(topic.name, []).append(_partition(kind, topic, number))
    loop = asyncio.get_running_loop()
    volumes = await loop.run_in_executor(broker.executor, _volumes, broker)
    results = []
    for name, topics in found.items():
        code, total, usable = volumes[name]
        shown = () if code else topics.items()
        results.append(
            kind.entity(
                "DescribeLogDirsResult",
                error_code=code,
                log_dir=name,
                topics=tuple(
                    kind.entity("DescribeLogDirsTopic", name=topic, partitions=tuple(partitions))
                    for topic, partitions in shown
                ),
                total_bytes=total,
                usable_bytes=usable,
                is_cordoned=False,
            )
        )
    return await turns.encoded(
        broker, kind, header, error_code=ErrorCode.NONE, results=tuple(results)
    )


def log_dir_names(broker: Broker) -> list[str]:
    """Return the log directories as clients name them: absolute, symbolic links not resolved."""
    if broker.options.bucket:
        return [broker.options.bucket]
    return [_name(path) for path in broker.options.log_dirs]


def _name(path: Path) -> str:
    return str(Path.cwd() / path)


def _asked(broker: Broker, request: Message) -> Iterator[tuple[Topic, list[int]]]:
    """Yield the topics of a request that exist, each once, with partitions that exist."""
    known = broker.topics.by_name
    if request.topics is None:
        for topic in known.values():
            yield topic, list(range(len(topic.logs)))
        return
    wanted: dict[str, set[int]] = {}
    for asked in request.topics:
        wanted.setdefault(asked.topic, set()).update(asked.partitions)
    for name, numbers in wanted.items():
        found = known.get(name)
        if found is not None:
            yield found, sorted(number for number in numbers if 0 <= number < len(found.logs))


def _place_of(broker: Broker, topic: Topic, number: int) -> str | None:
    log = topic.logs[number] if number < len(topic.logs) else None  # it may shrink meanwhile
    if log is None or log.failure is not None or topic.is_archive:
        return None
    return broker.options.bucket or _name(log.folder.parent.parent)


def _partition(kind: ResponseKind, topic: Topic, number: int) -> Message:
    return kind.entity(
        "DescribeLogDirsPartition",
        partition_index=number,
        partition_size=topic.logs[number].size_bytes,
        offset_lag=0,
        is_future_key=False,
    )


def _volumes(broker: Broker) -> dict[str, tuple[ErrorCode, int, int]]:
    """Return the error, the size and the usable bytes of each log directory. Blocks."""
    if broker.options.bucket:
        return {broker.options.bucket: (ErrorCode.NONE, _UNKNOWN, _UNKNOWN)}
    found = {}
    for path in broker.options.log_dirs:
        try:
            volume = os.statvfs(path)
        except OSError:
            found[_name(path)] = ErrorCode.KAFKA_STORAGE_ERROR, _UNKNOWN, _UNKNOWN
        else:
            size = volume.f_frsize
            found[_name(path)] = ErrorCode.NONE, size * volume.f_blocks, size * volume.f_bavail
    return found


async def alter_partition_reassignments(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle AlterPartitionReassignments."""
    kind = response_kind(Api.ALTER_PARTITION_REASSIGNMENTS, header.version)
    turns = Turns()
    denied = broker.authorizer.refusal(caller, Api.ALTER_PARTITION_REASSIGNMENTS)
    responses = []
    for topic in () if denied else request.topics:
        known = broker.topics.by_name.get(topic.name)
        count = len(known.logs) if known is not None else 0
        partitions = []
        for wanted in topic.partitions:
            await turns.took()
            code, reason = _reassigned(broker, count, wanted)
            partitions.append(
                kind.entity(
                    "ReassignablePartitionResponse",
                    partition_index=wanted.partition_index,
                    error_code=code,
                    error_message=reason,
                )
            )
        responses.append(
            kind.entity("ReassignableTopicResponse", name=topic.name, partitions=tuple(partitions))
        )
    return await turns.encoded(
        broker,
        kind,
        header,
        allow_replication_factor_change=getattr(request, "allow_replication_factor_change", True),
        error_code=denied,
        error_message=denied.name if denied else None,
        responses=tuple(responses),
    )


def _reassigned(broker: Broker, count: int, wanted: Message) -> tuple[ErrorCode, str | None]:
    """Return the code for a partition of a topic with `count` partitions; 0: it does not exist."""
    if not 0 <= wanted.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such partition"
    if wanted.replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None
    if list(wanted.replicas) != [broker.options.node_id]:
        reason = f"the only replica is on broker {broker.options.node_id}"
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason
    return ErrorCode.NONE, None


def list_partition_reassignments(
    broker: Broker, header: RequestHeader, _request: Message, caller: Caller
) -> bytes:
    """Handle ListPartitionReassignments."""
    kind = response_kind(Api.LIST_PARTITION_REASSIGNMENTS, header.version)
    denied = broker.authorizer.refusal(caller, Api.LIST_PARTITION_REASSIGNMENTS)
    return kind.frame(
        header.correlation_id,
        error_code=denied,
        error_message=denied.name if denied else None,
        topics=(),
    )
