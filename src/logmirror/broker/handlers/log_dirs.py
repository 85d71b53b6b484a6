"""Log directories, and where the replicas of partitions are.

    API                          key  versions  behaviour
    AlterReplicaLogDirs           34  1-2       begins, redirects and cancels moves (`moves.mover`)
    DescribeLogDirs               35  1-5       as in Kafka, see below
    AlterPartitionReassignments   45  0-1       accepts the replica that there is, and does nothing;
                                                any other is refused
    ListPartitionReassignments    46  0         none is ever in progress

AlterReplicaLogDirs (KIP-113) decides as Kafka does, with two differences: a request for the target
of a move that has failed begins it again, and one for the directory of the partition cancels a move
also if that directory is cordoned. Nothing is copied before the response.

DescribeLogDirs (KIP-113, KIP-827): each log directory is in the response, under the name with which
the broker was started, made absolute. One that is offline, or cannot be read, gets
KAFKA_STORAGE_ERROR. A partition
that is offline, and one of a mounted archive, is in none. A log directory in a bucket has no total
and no usable bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import LateChangeError, in_time
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.own_thread import in_own_thread
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.moves.move import MoveRequest
    from logmirror.broker.topic import Topic
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_UNKNOWN: Final = -1
_OFFLINE: Final = ErrorCode.KAFKA_STORAGE_ERROR, _UNKNOWN, _UNKNOWN
_VOLUME_S: Final = 5.0
_MAX_NAME: Final = 255
_MOVE_SUFFIX: Final = len("-future") + 32
"""Of the folder of a move in Kafka. Here it is shorter; the limit is Kafka's."""


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
            for place, fields in _replicas(broker, topic, number):
                partition = kind.entity(
                    "DescribeLogDirsPartition", partition_index=number, **fields
                )
                found[place].setdefault(topic.name, []).append(partition)
    volumes = await _volumes(broker)
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
                is_cordoned=name in broker.topics.dirs.cordoned,
            )
        )
    return await turns.encoded(
        broker, kind, header, error_code=ErrorCode.NONE, results=tuple(results)
    )


def log_dir_names(broker: Broker) -> list[str]:
    """Return the names of the log directories."""
    return list(broker.topics.dirs.by_name)


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


def _replicas(
    broker: Broker, topic: Topic, number: int
) -> Iterator[tuple[str, dict[str, int | bool]]]:
    """Yield the log directory and the fields of a partition, and of the copy of its move."""
    log = topic.logs[number] if number < len(topic.logs) else None  # it may shrink meanwhile
    if log is None or log.failure is not None or topic.is_archive:
        return
    dirs = broker.topics.dirs
    place = dirs.name_of(log.folder.parent.parent)
    yield place, {"partition_size": log.size_bytes, "offset_lag": 0, "is_future_key": False}
    move = broker.topics.moves.of(log) if broker.topics.moves is not None else None
    if move is not None and move.is_shown:
        fields = {"partition_size": move.copied_bytes, "offset_lag": move.lag}
        yield dirs.name_of(move.target), {**fields, "is_future_key": True}


async def _volumes(broker: Broker) -> dict[str, tuple[ErrorCode, int, int]]:
    """Return the error, the size and the usable bytes of each log directory.

    One that does not respond within `_VOLUME_S` counts as one that cannot be read.
    """
    dirs = broker.topics.dirs
    asked = {
        dirs.name_of(path): _asked_volume(broker, path)
        for path in dirs.on_disk
        if path not in dirs.offline
    }
    if asked:
        await asyncio.wait(asked.values(), timeout=_VOLUME_S)
    found = {name: one.result() if one.done() else _OFFLINE for name, one in asked.items()}
    found |= {dirs.name_of(path): _OFFLINE for path in dirs.offline}
    if dirs.bucket:
        found[dirs.bucket] = ErrorCode.NONE, _UNKNOWN, _UNKNOWN
    return found


def _asked_volume(broker: Broker, path: Path) -> asyncio.Future[tuple[ErrorCode, int, int]]:
    """Ask for those of one directory. A disk that hangs is asked once."""
    asked = broker.volumes.get(path)
    if asked is None:
        asked = broker.volumes[path] = in_own_thread(functools.partial(_volume, path), "volume")
        asked.add_done_callback(lambda _: broker.volumes.pop(path, None))
    return asked


def _volume(path: Path) -> tuple[ErrorCode, int, int]:
    """Return these of one directory. Blocks."""
    try:
        volume = os.statvfs(path)
    except OSError:
        return _OFFLINE
    size = volume.f_frsize
    return ErrorCode.NONE, size * volume.f_blocks, size * volume.f_bavail


async def alter_replica_log_dirs(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle AlterReplicaLogDirs."""
    kind = response_kind(Api.ALTER_REPLICA_LOG_DIRS, header.version)
    turns = Turns()
    wanted: dict[str, dict[int, str]] = {}
    for one in request.dirs:
        for topic in one.topics:
            wanted.setdefault(topic.name, {}).update(dict.fromkeys(topic.partitions, one.path))
    denied = broker.authorizer.refusal(caller, Api.ALTER_REPLICA_LOG_DIRS)
    codes: dict[str, dict[int, ErrorCode]] = {
        name: dict.fromkeys(places, denied) for name, places in wanted.items()
    }
    if not denied:
        await _move_in_time(broker, wanted, codes, turns)
    results = []
    for name, found in codes.items():
        await turns.took(len(found))
        partitions = [
            kind.entity(
                "AlterReplicaLogDirPartitionResult", partition_index=number, error_code=code
            )
            for number, code in found.items()
        ]
        results.append(
            kind.entity(
                "AlterReplicaLogDirTopicResult", topic_name=name, partitions=tuple(partitions)
            )
        )
    return await turns.encoded(broker, kind, header, results=tuple(results))


async def _move_in_time(
    broker: Broker,
    wanted: dict[str, dict[int, str]],
    codes: dict[str, dict[int, ErrorCode]],
    turns: Turns,
) -> None:
    """Decide and store in turn; the database may be in a bucket that is away for long."""

    async def move() -> dict[str, dict[int, ErrorCode]]:
        found = {name: dict(places) for name, places in codes.items()}
        async with _turn(broker):
            await _move_all(broker, wanted, found, turns)
        return found

    try:
        decided = await in_time(asyncio.ensure_future(move()), broker.options.change_timeout_s)
    except LateChangeError:
        late = ErrorCode.REQUEST_TIMED_OUT
        decided = {name: dict.fromkeys(places, late) for name, places in wanted.items()}
    codes.update(decided)


def _turn(broker: Broker) -> contextlib.AbstractAsyncContextManager[None]:
    return contextlib.nullcontext() if broker.topics.moves is None else broker.topics.moves.turn


async def _move_all(
    broker: Broker,
    wanted: dict[str, dict[int, str]],
    codes: dict[str, dict[int, ErrorCode]],
    turns: Turns,
) -> None:
    volumes = await _volumes(broker)
    offline = {name for name, (code, _, _) in volumes.items() if code}
    changes = []
    for name, places in wanted.items():
        for number, place in places.items():
            await turns.took()
            code, change = _decided(broker, name, number, place, offline)
            codes[name][number] = code
            if change is not None:
                changes.append((name, number, change))
    if broker.topics.moves is None or not changes:
        return
    try:
        refused = await broker.topics.moves.change([change for _, _, change in changes])
    except LogmirrorError:
        _LOG.exception("moves could not be stored")
        refused = {log for _, _, (_, log, _) in changes}
    for name, number, (_, log, target) in changes:
        if log in refused:
            _LOG.warning(
                "%s-%d cannot be moved to %s: it is offline, its last move is not complete, the "
                "database cannot be written, or the directory has a folder of this partition",
                *(name, number, target),
            )
            codes[name][number] = ErrorCode.KAFKA_STORAGE_ERROR


def _decided(  # noqa: PLR0911  # one response for each case, in Kafka's order
    broker: Broker, name: str, number: int, place: str, offline: set[str]
) -> tuple[ErrorCode, MoveRequest | None]:
    """Return the response for a partition, and the move to begin, to redirect or to cancel."""
    if len(f"{name}-{number}.") + _MOVE_SUFFIX > _MAX_NAME:
        return ErrorCode.INVALID_TOPIC_EXCEPTION, None
    if place not in log_dir_names(broker):
        return ErrorCode.LOG_DIR_NOT_FOUND, None
    if place in offline:
        return ErrorCode.KAFKA_STORAGE_ERROR, None
    topic, dirs = broker.topics.by_name.get(name), broker.topics.dirs
    if place in dirs.cordoned and not _is_in(broker, topic, number, place):
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, None
    if topic is None or not 0 <= number < len(topic.logs):
        dirs.prefer(name, number, place)
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None
    log = topic.logs[number]
    if topic.is_archive:
        return ErrorCode.POLICY_VIOLATION, None
    if log.failure is not None:
        return ErrorCode.KAFKA_STORAGE_ERROR, None
    move = broker.topics.moves.of(log) if broker.topics.moves is not None else None
    is_there = broker.topics.moves is None or dirs.by_name[place] == log.folder.parent.parent
    if is_there and move is None:
        return ErrorCode.NONE, None
    goes_there = move is not None and move.is_active and move.target == dirs.by_name[place]
    if offline and not is_there and not goes_there:
        return ErrorCode.KAFKA_STORAGE_ERROR, None
    return ErrorCode.NONE, ((topic.topic_id.bytes, number), log, dirs.by_name[place])


def _is_in(broker: Broker, topic: Topic | None, number: int, place: str) -> bool:
    """Whether a partition is in a log directory: a request for it only cancels a move."""
    if topic is None or not 0 <= number < len(topic.logs) or topic.is_archive:
        return False
    return broker.topics.dirs.by_name[place] == topic.logs[number].folder.parent.parent


async def alter_partition_reassignments(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle AlterPartitionReassignments.

    Without permission each partition gets the error too, as in Apache Kafka: its tool counts them.
    """
    kind = response_kind(Api.ALTER_PARTITION_REASSIGNMENTS, header.version)
    turns = Turns()
    denied = broker.authorizer.refusal(caller, Api.ALTER_PARTITION_REASSIGNMENTS)
    responses = []
    for topic in request.topics:
        known = broker.topics.by_name.get(topic.name)
        count = len(known.logs) if known is not None else 0
        partitions = []
        for wanted in topic.partitions:
            await turns.took()
            refusal = (denied, denied.name) if denied else None
            code, reason = refusal or _reassigned(broker, count, wanted)
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
