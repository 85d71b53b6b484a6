"""Produce (key 0, versions 3-12): appends record batches.

Batches are checked, assigned offsets and written when the request arrives. The response is sent
when the last of them is durable, for acks=1 as for acks=all: there is one replica. With acks=0
there is no response; the records become durable all the same. In a topic that is flushed in the
background (`flush_rule`), the response is sent when the batches are written, and the transactional
ones are durable; at the limit of unflushed bytes, batches wait before they are written, and their
connection with them.

A transactional batch must belong to the producer's transaction (T2 in `transactions.coordinator`).
That is checked again when the batch is appended, after everything that takes time. From version 12
on, the request itself adds its partitions to the transaction (KIP-890, part 2).

A large batch, or one that decompresses to more than 256 KiB, is checked in a worker thread. A
request with many batches lets other clients have their turn in between.

Deviations from Kafka:

- The request's timeout is not used: a response before the flush could only mean "unknown", which
  the client's own timeout means already.
- A batch with the log-append-time bit is refused for every topic. Kafka refuses it for topics with
  `message.timestamp.type=LogAppendTime`; for others it clears the bit, which silently changes the
  timestamps of the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.batch_check import (
    QUICK_BODY_BYTES,
    BatchFacts,
    RefusedBatchError,
    RefusedBodyError,
    check_batch,
    is_quick,
    is_transactional,
    stamp,
    writer_of,
)
from logmirror.broker.log.producer_state import RefusedSequenceError
from logmirror.broker.log.reading import StorageError
from logmirror.broker.ownership import confirm_refusals
from logmirror.broker.security.acls import ResourceType
from logmirror.broker.topic import TopicDeletedError
from logmirror.broker.transactions.coordinator import RefusedTransactionError, Writer
from logmirror.errors import OutcomeUnknownError
from logmirror.failpoints import reach
from logmirror.wire.serve_produce import (
    Produced,
    ProduceRequest,
    pack_produce_response,
    parse_produce,
)
from logmirror.wire.throttle_time import set_throttle_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.topic import Topic
    from logmirror.broker.transactions.transaction import Partition

    Checked = BatchFacts | RefusedBatchError
    Check = Callable[[], Checked]
    Step = Check | asyncio.Future[None] | None
    Steps = Generator[Step, Checked | None, None]
    Place = tuple[list[Produced], int]
    from logmirror.errors import LogmirrorError
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_LEGAL_ACKS: Final = (-1, 0, 1)
_ADDS_PARTITIONS_FROM: Final = 12
_ABORTABLE_FROM: Final = 11
_TURN_BATCHES: Final = 64
_TURN_BYTES: Final = 8 * 1024 * 1024
"""Batches and bytes that are appended before other clients have their turn."""

_LOGGED_REFUSALS: Final = 5
"""Refused batches of a request that are logged."""


class ProduceResponse:
    """The response to one Produce request, which waits for the disk.

    Attributes:
        frame: The response frame. None until complete; empty for acks=0.
        topics: The responses by topic and partition.
        doubtful: Where in it refusals are that an owner that was replaced may be wrong about.
        rest: Appends the remaining batches, if there are any. The request's frame must stay valid
            until it ends, and no later request of the connection may begin.
    """

    __slots__ = (
        "_acks",
        "_header",
        "_on_complete",
        "_refused",
        "_throttle_ms",
        "_waiting",
        "doubtful",
        "frame",
        "rest",
        "topics",
    )

    def __init__(self, header: RequestHeader, acks: int, on_complete: Callable[[], None]) -> None:
        self._header = header
        self._acks = acks
        self._on_complete = on_complete
        self.topics: list[tuple[str, list[Produced]]] = []
        self.doubtful: list[Place] = []
        self._waiting = 1
        self._refused = 0
        self._throttle_ms = 0
        self.frame: bytearray | None = None
        self.rest: Coroutine[None, None, None] | None = None

    def refused(self, log: PartitionLog, error: Exception) -> None:
        """Log a refused batch, unless many were logged."""
        self._refused += 1
        if self._refused <= _LOGGED_REFUSALS:
            _LOG.info("%s: refused a batch: %s", log.folder, error)

    def add_topic(self, name: str) -> list[Produced]:
        """Add a topic; returns the list for the responses of its partitions."""
        responses: list[Produced] = []
        self.topics.append((name, responses))
        return responses

    def wait_for(self, responses: list[Produced]) -> Callable[[LogmirrorError | None], None]:
        """Wait for the partition that was added last; returns the callback for its outcome."""
        self._waiting += 1
        place = responses, len(responses) - 1

        def outcome(failure: LogmirrorError | None) -> None:
            if failure is not None:
                _refuse(place, _code_of(failure))
            self.release()

        return outcome

    def release(self) -> None:
        """Count one outcome; the last one encodes the frame."""
        self._waiting -= 1
        if self._waiting:
            return
        if self._acks == 0:
            self.frame = bytearray()
        else:
            _, version, correlation_id = self._header
            self.frame = pack_produce_response(version, correlation_id, self.topics)
            self.throttle(self._throttle_ms)
        self._on_complete()

    def throttle(self, delay_ms: int) -> None:
        """Set the throttle time of the response, complete or not."""
        self._throttle_ms = delay_ms
        if delay_ms and self.frame:
            set_throttle_time(self.frame, Api.PRODUCE, self._header.version, delay_ms)


_STORAGE: Final = ErrorCode.KAFKA_STORAGE_ERROR
_OWNER_WAIT_S: Final = 20.0
"""How long the bucket may take to show who owns it; clients wait for 30 s or longer."""


def _refuse(place: Place, code: ErrorCode) -> None:
    """Set the response of a partition that was added before to a refusal."""
    responses, number = place
    responses[number] = Produced(responses[number].partition, code, -1, -1)


def _code_of(failure: LogmirrorError) -> ErrorCode:
    """Return the code for an appended batch that does not become durable, or not in time.

    One that is late gets REQUEST_TIMED_OUT, as in Kafka: its client knows that the batch may be
    stored. After KAFKA_STORAGE_ERROR clients assume that it is not.
    """
    if isinstance(failure, TopicDeletedError):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    is_late = isinstance(failure, OutcomeUnknownError)
    return ErrorCode.REQUEST_TIMED_OUT if is_late else _STORAGE


def produce(
    broker: Broker,
    header: RequestHeader,
    frame: memoryview,
    caller: Caller,
    on_complete: Callable[[], None],
) -> ProduceResponse:
    """Handle Produce.

    Args:
        broker: The broker.
        header: The request's header.
        frame: The request. Batch headers are changed in place; only the response's `rest` keeps a
            reference to it.
        caller: Who sent it.
        on_complete: Called once when the response's `frame` is set, possibly before this returns.

    Raises:
        RemoteProtocolError: The frame is not a Produce request.
    """
    began_s = broker.traffic.now_s()

    def completed() -> None:
        broker.traffic.responded(Api.PRODUCE, began_s)
        broker.traffic.produced(response.topics, broker.topics.by_name)
        on_complete()

    request = parse_produce(frame, header.version)
    response = ProduceResponse(header, request.acks, completed)
    steps = _appending(broker, request, caller, response)
    if header.version >= _ADDS_PARTITIONS_FROM and request.transactional_id is not None:
        response.rest = _joining(broker, request, caller, steps)
        return response
    for check in steps:
        response.rest = _rest(broker, steps, check)
        break
    return response


async def _joining(broker: Broker, request: ProduceRequest, caller: Caller, steps: Steps) -> None:
    """Add the partitions of a request to its transaction, then append the batches."""
    wanted: dict[Writer, set[Partition]] = {}
    refused = _refusal(broker, request, caller)
    for name, partitions in request.topics:
        topic = broker.topics.by_name.get(name)
        if refused or broker.authorizer.refusal(caller, Api.PRODUCE, ResourceType.TOPIC, name):
            continue  # each batch is refused below
        for number, records in partitions:
            exists = topic is not None and 0 <= number < len(topic.logs) and not topic.is_archive
            if exists and records is not None and is_transactional(records):
                writer = Writer(*writer_of(records))
                wanted.setdefault(writer, set()).add((name, number))
    for writer, added in wanted.items():
        # A refusal is repeated for each batch, when it is checked.
        with contextlib.suppress(RefusedTransactionError):
            await broker.transactions.add(
                str(request.transactional_id), writer, partitions=added, may_be_wrong=True
            )
    for check in steps:
        await _rest(broker, steps, check)


async def _rest(broker: Broker, steps: Steps, check: Step) -> None:
    """Run the remaining steps: checks in worker threads, everything else on the event loop."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            if check is None:
                await asyncio.sleep(0)
                check = next(steps)
            elif isinstance(check, asyncio.Future):
                await check
                check = next(steps)
            else:
                check = steps.send(await loop.run_in_executor(broker.checkers, check))
    except StopIteration:
        return


def _appending(
    broker: Broker, request: ProduceRequest, caller: Caller, response: ProduceResponse
) -> Steps:
    """Append the batches one by one.

    Yields a check to run in a worker thread, whose result it expects; a future to wait for; or None
    to let other clients have their turn.
    """
    refused = _refusal(broker, request, caller)
    count = size_bytes = 0
    for name, partitions in request.topics:
        responses = response.add_topic(name)
        denied = broker.authorizer.refusal(caller, Api.PRODUCE, ResourceType.TOPIC, name)
        for number, records in partitions:
            topic = broker.topics.by_name.get(name)
            if refusal := refused or denied:
                responses.append(Produced(number, refusal, -1, -1))
            elif topic is None or not 0 <= number < len(topic.logs):
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                responses.append(Produced(number, code, -1, -1))
            elif topic.is_archive:
                responses.append(Produced(number, ErrorCode.POLICY_VIOLATION, -1, -1))
            else:
                yield from _appended(broker, topic, number, records, request, response)
            count += 1
            size_bytes += len(records) if records is not None else 0
            if count >= _TURN_BATCHES or size_bytes >= _TURN_BYTES:
                count = size_bytes = 0
                yield None
    if response.doubtful:
        doubtful = response.doubtful
        yield asyncio.ensure_future(
            confirm_refusals(broker.commits, doubtful, _refuse, _OWNER_WAIT_S)
        )
    response.release()


def _appended(  # noqa: PLR0913, PLR0917  # one partition of a request
    broker: Broker,
    topic: Topic,
    number: int,
    records: memoryview | None,
    request: ProduceRequest,
    response: ProduceResponse,
) -> Steps:
    """Append one batch, as a part of `_appending`."""
    log, responses = topic.logs[number], response.topics[-1][1]
    while broker.commits.must_wait(log):
        yield broker.commits.room(log)
    max_bytes, has_keys = topic.configs.max_message_bytes, topic.configs.is_compacted
    checked = _quickly_checked(records, max_bytes, needs_keys=has_keys)
    if checked is None:
        checked = yield functools.partial(_checked, records, max_bytes, needs_keys=has_keys)
        assert checked is not None  # noqa: S101  # the result that `_rest` sends
    is_sound = isinstance(checked, BatchFacts)
    if isinstance(checked, BatchFacts) and checked.is_transactional:
        checked = _in_transaction(broker, topic, number, request, checked)
    is_refused = _append(broker, topic, number, records, checked, response, responses)
    if is_refused and is_sound and broker.commits.may_be_replaced(log):
        response.doubtful.append((responses, len(responses) - 1))


def _in_transaction(
    broker: Broker, topic: Topic, number: int, request: ProduceRequest, facts: BatchFacts
) -> Checked:
    """Check that a batch belongs to the transaction of its producer; it is appended next."""
    log, partition = topic.logs[number], (topic.name, number)
    writer = Writer(facts.producer_id, facts.producer_epoch)
    with contextlib.suppress(RefusedSequenceError):
        sequence = facts.base_sequence, facts.record_count
        if log.producers.find_duplicate(*writer, *sequence, is_transactional=True) is not None:
            return facts
    try:
        broker.transactions.coordinator.check(
            str(request.transactional_id), writer, partition=partition
        )
    except RefusedTransactionError as refused:
        return RefusedBatchError(_translated(refused.code, request.version), refused.code.name)
    own = facts.producer_id
    is_unknown = log.producers.get(own) is None and log.producers.transactions.start_of(own) is None
    if request.version >= _ADDS_PARTITIONS_FROM and is_unknown and facts.base_sequence != 0:
        # With transaction version 2, each transaction has an epoch of its own and begins with
        # sequence 0. That batch was refused, and its producer will send it again.
        code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        return RefusedBatchError(code, code.name)
    return facts


def _translated(code: ErrorCode, version: int) -> ErrorCode:
    """Return the code that a producer of this version understands, as Kafka does."""
    if code is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if code is ErrorCode.CONCURRENT_TRANSACTIONS and version < _ADDS_PARTITIONS_FROM:
        return ErrorCode.NOT_ENOUGH_REPLICAS
    if code is ErrorCode.TRANSACTION_ABORTABLE and version < _ABORTABLE_FROM:
        return ErrorCode.INVALID_TXN_STATE
    return code


def _quickly_checked(
    records: memoryview | None, max_bytes: int, *, needs_keys: bool
) -> Checked | None:
    """Check a batch if that takes about a millisecond, else return None."""
    if not is_quick(records):
        return None
    try:
        return check_batch(
            records, max_bytes=max_bytes, max_body_bytes=QUICK_BODY_BYTES, needs_keys=needs_keys
        )
    except RefusedBodyError:
        return None
    except RefusedBatchError as refused:
        return refused


def _checked(records: memoryview | None, max_bytes: int, *, needs_keys: bool) -> Checked:
    try:
        return check_batch(records, max_bytes=max_bytes, needs_keys=needs_keys)
    except RefusedBatchError as refused:
        return refused


def _refusal(broker: Broker, request: ProduceRequest, caller: Caller) -> ErrorCode | None:
    """Return the error code of an invalid request, for all its partitions; None if it is valid."""
    if request.acks not in _LEGAL_ACKS:
        return ErrorCode.INVALID_REQUIRED_ACKS
    if request.transactional_id is not None:
        kind, name = ResourceType.TRANSACTIONAL_ID, request.transactional_id
        return broker.authorizer.refusal(caller, Api.PRODUCE, kind, name) or None
    for _, partitions in request.topics:
        for _, records in partitions:
            if is_transactional(records):
                return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return None


def _append(  # noqa: PLR0913, PLR0917  # one partition of a request
    broker: Broker,
    topic: Topic,
    number: int,
    records: memoryview | None,
    checked: Checked,
    response: ProduceResponse,
    responses: list[Produced],
) -> bool:
    """Append a batch; returns whether it was refused, and not because of the disk."""
    log = topic.logs[number]
    append_time_ms = -1
    try:
        if isinstance(log.failure, TopicDeletedError):
            responses.append(Produced(number, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1))
            return False
        log.check_online()
        if isinstance(checked, RefusedBatchError):
            raise checked
        facts = checked
        assert records is not None  # noqa: S101  # checked
        known = None
        if facts.producer_id >= 0:
            writer = facts.producer_id, facts.producer_epoch
            sequence = facts.base_sequence, facts.record_count
            known = log.producers.find_duplicate(
                *writer, *sequence, is_transactional=facts.is_transactional
            )
        if known is None:
            if topic.configs.is_log_append_time:
                append_time_ms = broker.clock.now_ms()
                facts = stamp(records, facts, append_time_ms)
            base_offset = log.append(records, facts)
            if facts.is_transactional:
                reach("transaction.appended")
            end = log.log_end
        else:
            # A duplicate. It waits with the first attempt, if that is not durable yet. As in Kafka,
            # the timestamp in the response, that of the stored records, marks it as a duplicate.
            base_offset, end = known.base_offset, known.last_offset + 1
            append_time_ms = known.timestamp_ms
    except (RefusedBatchError, RefusedSequenceError) as refused:
        response.refused(log, refused)
        responses.append(Produced(number, refused.code, -1, -1))
        return True
    except StorageError as error:
        _LOG.warning("%s-%d: %s", topic.name, number, error)
        responses.append(Produced(number, _STORAGE, -1, -1))
        return False
    responses.append(Produced(number, 0, base_offset, log.log_start, append_time_ms))
    # A commit of the transaction may follow after a restart, which knows nothing of lost records.
    when = log.when_durable if facts.is_transactional else log.when_acknowledged
    when(end, response.wait_for(responses))
    broker.commits.schedule(log)
    return False
