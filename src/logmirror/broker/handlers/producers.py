"""Producer IDs, producer state and transaction markers.

    API                key  versions  behaviour
    InitProducerId      22  0-5       with a transactional ID, see `transactions`
    DescribeProducers   61  0         includes appended batches that are not durable yet
    WriteTxnMarkers     27  1         one control batch per marker and partition; durable before
                                      the response

DescribeProducers responds for each partition once, and shows at most `MAX_DESCRIBED` producers.

A marker ends the producer's transaction in the partition, if there is one. It takes one offset that
no consumer returns; a replica uses that to keep the offsets of gaps in its source. As in Kafka, a
marker is appended each time it is sent; a client that lost a response reads the log end offset.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import pooled
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.transactions import init_transactions
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.log.partition_transactions import Marker
from logmirror.broker.log.producer_state import RefusedSequenceError
from logmirror.broker.log.reading import StorageError
from logmirror.broker.security.acls import Operation, ResourceType
from logmirror.broker.topic import TopicDeletedError
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_NO_TRANSACTION: Final = -1
_NO_PRODUCER: Final = -1
MAX_DESCRIBED: Final = 20_000
"""Limit for the producers in one response: about 1 MB. A partition has at most 10,000."""

_LOGGED_REFUSALS: Final = 5
"""Refused markers of a request that are logged."""


async def init_producer_id(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle InitProducerId: an idempotent producer always gets a new ID, as in Kafka."""
    kind = response_kind(Api.INIT_PRODUCER_ID, header.version)
    reply = functools.partial(kind.frame, header.correlation_id)
    if code := _id_refusal(broker, caller, request.transactional_id):
        return reply(error_code=code, producer_id=-1, producer_epoch=-1)
    if request.transactional_id is not None:
        return await init_transactions(broker, header, request, caller)
    loop = asyncio.get_running_loop()
    try:
        work = loop.run_in_executor(broker.changers, broker.store.next_producer_id)
        producer_id = await pooled(work, broker.options.change_timeout_s)
    except LogmirrorError:
        _LOG.exception("no producer id could be reserved")
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        return reply(error_code=code, producer_id=-1, producer_epoch=-1)
    return reply(error_code=ErrorCode.NONE, producer_id=producer_id, producer_epoch=0)


def _id_refusal(broker: Broker, caller: Caller, transactional_id: str | None) -> ErrorCode:
    """Check InitProducerId. Who may write to any topic may be an idempotent producer (KIP-679)."""
    api, authorizer = Api.INIT_PRODUCER_ID, broker.authorizer
    if transactional_id is not None:
        return authorizer.refusal(caller, api, ResourceType.TRANSACTIONAL_ID, transactional_id)
    if authorizer.allows_any(caller, Operation.WRITE, ResourceType.TOPIC):
        return ErrorCode.NONE
    return authorizer.refusal(caller, api)


async def describe_producers(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DescribeProducers."""
    kind = response_kind(Api.DESCRIBE_PRODUCERS, header.version)
    topics = []
    turns = Turns()
    shown = 0
    named: dict[str, dict[int, None]] = {}
    for asked in request.topics:
        named.setdefault(asked.name, {}).update(dict.fromkeys(asked.partition_indexes))
    for name, numbers in named.items():
        partitions = []
        api, topic_type = Api.DESCRIBE_PRODUCERS, ResourceType.TOPIC
        denied = broker.authorizer.refusal(caller, api, topic_type, name)
        for number in numbers:
            code, log = (denied, None) if denied else _find_log(broker, name, number)
            shown += 0 if log is None else len(log.producers)
            if shown > MAX_DESCRIBED:
                code, log = ErrorCode.POLICY_VIOLATION, None
            producers = () if log is None else await _producer_entities(kind, log, turns)
            partitions.append(
                kind.entity(
                    "PartitionResponse",
                    partition_index=number,
                    error_code=code,
                    error_message=None if log is not None else code.name,
                    active_producers=producers,
                )
            )
        topics.append(kind.entity("TopicResponse", name=name, partitions=tuple(partitions)))
    return await turns.encoded(broker, kind, header, topics=tuple(topics))


def _find_log(broker: Broker, name: str, number: int) -> tuple[ErrorCode, PartitionLog | None]:
    topic = broker.topics.by_name.get(name)
    if topic is None or not 0 <= number < len(topic.logs):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None
    log = topic.logs[number]
    if log.failure is not None:
        return ErrorCode.KAFKA_STORAGE_ERROR, None
    return ErrorCode.NONE, log


async def _producer_entities(
    kind: ResponseKind, log: PartitionLog, turns: Turns
) -> tuple[Message, ...]:
    entities = []
    await turns.took()
    for producer_id, producer in tuple(log.producers.items()):
        await turns.took()
        start = log.producers.transactions.start_of(producer_id)
        entities.append(
            kind.entity(
                "ProducerState",
                producer_id=producer_id,
                producer_epoch=producer.epoch,
                last_sequence=producer.last_sequence,
                last_timestamp=producer.last_timestamp_ms,
                coordinator_epoch=producer.coordinator_epoch,
                current_txn_start_offset=_NO_TRANSACTION if start is None else start,
            )
        )
    return tuple(entities)


async def write_txn_markers(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle WriteTxnMarkers: appends all markers, then waits until they are durable."""
    found: dict[int, dict[str, dict[int, ErrorCode]]] = {}
    written: dict[PartitionLog, list[tuple[dict[int, ErrorCode], int]]] = {}
    turns = Turns()
    refused = 0
    denied = broker.authorizer.refusal(caller, Api.WRITE_TXN_MARKERS)
    for asked in request.markers:
        result = asked.transaction_result
        marker = Marker(asked.producer_id, asked.producer_epoch, result, asked.coordinator_epoch)
        topics = found.setdefault(marker.producer_id, {})
        for topic in asked.topics:
            codes = topics.setdefault(topic.name, {})
            for number in topic.partition_indexes:
                await turns.took()
                if denied:
                    codes[number] = denied
                    continue
                is_logged = refused < _LOGGED_REFUSALS
                codes[number], log = _append_marker(
                    broker, topic.name, number, marker, is_logged=is_logged
                )
                if log is not None:
                    written.setdefault(log, []).append((codes, number))
                else:
                    refused += 1
    for log, entries in written.items():
        failure = await _durable(broker, log)
        if failure is not None:
            for codes, number in entries:
                codes[number] = failure
    return await _markers_frame(broker, header, found)


def _append_marker(
    broker: Broker, name: str, number: int, marker: Marker, *, is_logged: bool
) -> tuple[ErrorCode, PartitionLog | None]:
    code, log = _find_log(broker, name, number)
    if log is None:
        return code, None
    if marker.producer_id == _NO_PRODUCER or marker.producer_epoch < 0:
        return ErrorCode.UNKNOWN_SERVER_ERROR, None  # the code that Kafka returns here
    try:
        log.append_marker(marker, broker.clock.now_ms())
    except RefusedSequenceError as refused:
        if is_logged:
            _LOG.info("%s-%d: refused a marker: %s", name, number, refused)
        return refused.code, None
    except StorageError as error:
        if is_logged:
            _LOG.warning("%s-%d: %s", name, number, error)
        return ErrorCode.KAFKA_STORAGE_ERROR, None
    broker.commits.schedule(log)
    return ErrorCode.NONE, log


async def _durable(broker: Broker, log: PartitionLog) -> ErrorCode | None:
    """Wait until a log is durable up to its current end; returns the error code of a failure."""
    outcome: asyncio.Future[LogmirrorError | None] = asyncio.get_running_loop().create_future()

    def done(failure: LogmirrorError | None) -> None:
        if not outcome.cancelled():  # cancelled when the client disconnects
            outcome.set_result(failure)

    log.when_durable(log.log_end, done)
    broker.commits.schedule(log)
    failure = await outcome
    if failure is None:
        return None
    gone = isinstance(failure, TopicDeletedError)
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if gone else ErrorCode.KAFKA_STORAGE_ERROR


async def _markers_frame(
    broker: Broker, header: RequestHeader, found: dict[int, dict[str, dict[int, ErrorCode]]]
) -> bytes:
    """Encode one result for each producer ID, as Kafka does, also for several markers."""
    kind = response_kind(Api.WRITE_TXN_MARKERS, header.version)
    markers = []
    turns = Turns()
    for producer_id, topics in found.items():
        results = []
        for name, codes in topics.items():
            await turns.took(len(codes))
            partitions = tuple(
                kind.entity(
                    "WritableTxnMarkerPartitionResult", partition_index=number, error_code=code
                )
                for number, code in codes.items()
            )
            results.append(
                kind.entity("WritableTxnMarkerTopicResult", name=name, partitions=partitions)
            )
        markers.append(
            kind.entity("WritableTxnMarkerResult", producer_id=producer_id, topics=tuple(results))
        )
    return await turns.encoded(broker, kind, header, markers=tuple(markers))
