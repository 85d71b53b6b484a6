"""Transactions: the requests of producers, and of tools that inspect them.

    API                    key  versions  behaviour
    InitProducerId          22  0-5       with a transactional ID: fences the previous client
    AddPartitionsToTxn      24  0-5       durable before the response; 4-5 in batches, and with
                                          `verify_only`
    AddOffsetsToTxn         25  0-4       durable before the response
    EndTxn                  26  0-5       complete before the response, see `transaction_service`
    TxnOffsetCommit         28  0-5       version 5 adds the group to the transaction
    DescribeTransactions    65  0
    ListTransactions        66  0-1       version 2 filters by a regular expression of the client,
                                          which is not implemented

Old versions do not know PRODUCER_FENCED and TRANSACTION_ABORTABLE; they get the codes that Kafka
gives them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.acls import ResourceType
from logmirror.broker.transactions.coordinator import RefusedTransactionError, Writer
from logmirror.broker.transactions.group_offsets import Member, PendingOffset
from logmirror.broker.transactions.transaction import NO_EPOCH, NO_ID, State
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.transactions.transaction import Partition, Transaction
    from logmirror.wire.frames import RequestHeader

    Codes = dict[Partition, ErrorCode]

_FENCED_FROM: Final = {
    Api.INIT_PRODUCER_ID: 4,
    Api.ADD_PARTITIONS_TO_TXN: 2,
    Api.ADD_OFFSETS_TO_TXN: 2,
    Api.END_TXN: 2,
}
"""First version with PRODUCER_FENCED (KIP-588)."""

_V2_FROM: Final = 5
"""First version of EndTxn and TxnOffsetCommit with transaction version 2."""

_ABORTABLE_FROM: Final = 4
"""First version of TxnOffsetCommit with TRANSACTION_ABORTABLE."""

_BATCHED_FROM: Final = 4
_MAX_METADATA: Final = 4096
"""Kafka's `offset.metadata.max.bytes`."""


def _id_refusal(broker: Broker, caller: Caller, api: Api, transactional_id: str) -> ErrorCode:
    """Return the error code for a request with this ID; NONE if the client may send it."""
    kind = ResourceType.TRANSACTIONAL_ID
    return broker.authorizer.refusal(caller, api, kind, transactional_id)


def _check_id_and_group(broker: Broker, caller: Caller, api: Api, request: Message) -> None:
    """Refuse a request whose transactional ID or group the client may not use.

    Raises:
        RefusedTransactionError: It may not.
    """
    refusal = broker.authorizer.refusal
    denied = _id_refusal(broker, caller, api, request.transactional_id)
    if denied := denied or refusal(caller, api, ResourceType.GROUP, request.group_id):
        raise RefusedTransactionError(denied)


def _code(refused: RefusedTransactionError, header: RequestHeader) -> ErrorCode:
    """Return the error code that a client of this version understands."""
    is_fenced = refused.code is ErrorCode.PRODUCER_FENCED
    if is_fenced and header.version < _FENCED_FROM[Api(header.api_key)]:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return refused.code


async def init_transactions(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Handle InitProducerId with a transactional ID."""
    kind = response_kind(Api.INIT_PRODUCER_ID, header.version)
    writer, code = Writer(NO_ID, NO_EPOCH), ErrorCode.NONE
    known = Writer(request.producer_id, request.producer_epoch)
    is_known = known != writer
    if not request.transactional_id or (is_known and min(known) < 0):
        code = ErrorCode.INVALID_REQUEST
    else:
        try:
            writer = await broker.transactions.init(
                request.transactional_id,
                request.transaction_timeout_ms,
                known if is_known else None,
            )
        except RefusedTransactionError as refused:
            code = _code(refused, header)
    return kind.frame(
        header.correlation_id,
        error_code=code,
        producer_id=writer.producer_id,
        producer_epoch=writer.producer_epoch,
    )


async def add_partitions_to_txn(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle AddPartitionsToTxn: one transaction, or several from version 4 on."""
    kind = response_kind(Api.ADD_PARTITIONS_TO_TXN, header.version)
    turns = Turns()
    if header.version < _BATCHED_FROM:
        codes = await _add_partitions(
            broker,
            caller,
            header,
            request.v3_and_below_transactional_id,
            Writer(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch),
            request.v3_and_below_topics,
        )
        await turns.took(len(codes))
        topics = _topic_results(kind, codes)
        return await turns.encoded(broker, kind, header, results_by_topic_v3_and_below=topics)
    results = []
    denied = broker.authorizer.refusal(caller, Api.ADD_PARTITIONS_TO_TXN)
    for asked in () if denied else request.transactions:
        codes = await _add_partitions(
            broker,
            caller,
            header,
            asked.transactional_id,
            Writer(asked.producer_id, asked.producer_epoch),
            asked.topics,
            verify_only=asked.verify_only,
        )
        await turns.took(len(codes))
        results.append(
            kind.entity(
                "AddPartitionsToTxnResult",
                transactional_id=asked.transactional_id,
                topic_results=_topic_results(kind, codes),
            )
        )
    return await turns.encoded(
        broker, kind, header, error_code=denied, results_by_transaction=tuple(results)
    )


def _topic_results(kind: ResponseKind, codes: Codes) -> tuple[Message, ...]:
    topics: dict[str, list[Message]] = {}
    for (name, number), code in codes.items():
        topics.setdefault(name, []).append(
            kind.entity(
                "AddPartitionsToTxnPartitionResult",
                partition_index=number,
                partition_error_code=code,
            )
        )
    return tuple(
        kind.entity("AddPartitionsToTxnTopicResult", name=name, results_by_partition=tuple(results))
        for name, results in topics.items()
    )


async def _add_partitions(  # noqa: PLR0913, PLR0917  # the request's fields
    broker: Broker,
    caller: Caller,
    header: RequestHeader,
    transactional_id: str,
    writer: Writer,
    topics: Iterable[Message],
    *,
    verify_only: bool = False,
) -> Codes:
    """Add partitions, all of them or none; returns an error code for each."""
    wanted = [(topic.name, number) for topic in topics for number in topic.partitions]
    if not transactional_id:
        return dict.fromkeys(wanted, ErrorCode.INVALID_REQUEST)
    api, refusal = Api.ADD_PARTITIONS_TO_TXN, broker.authorizer.refusal
    if denied := _id_refusal(broker, caller, api, transactional_id):
        return dict.fromkeys(wanted, denied)
    wrong = {one: refusal(caller, api, ResourceType.TOPIC, one[0]) for one in wanted}
    for partition, code in wrong.items():
        if not code and not _exists(broker, partition):
            wrong[partition] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        elif not code and broker.topics.by_name[partition[0]].is_archive:
            wrong[partition] = ErrorCode.POLICY_VIOLATION
    if any(wrong.values()):
        return {one: code or ErrorCode.OPERATION_NOT_ATTEMPTED for one, code in wrong.items()}
    if verify_only:
        return {one: _verified(broker, header, transactional_id, writer, one) for one in wanted}
    code = ErrorCode.NONE
    try:
        await broker.transactions.add(transactional_id, writer, partitions=wanted)
    except RefusedTransactionError as refused:
        code = _code(refused, header)
    return dict.fromkeys(wanted, code)


def _verified(
    broker: Broker,
    header: RequestHeader,
    transactional_id: str,
    writer: Writer,
    partition: Partition,
) -> ErrorCode:
    try:
        broker.transactions.coordinator.check(transactional_id, writer, partition=partition)
    except RefusedTransactionError as refused:
        return _code(refused, header)
    return ErrorCode.NONE


def _exists(broker: Broker, partition: Partition) -> bool:
    name, number = partition
    topic = broker.topics.by_name.get(name)
    return topic is not None and 0 <= number < len(topic.logs)


async def add_offsets_to_txn(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle AddOffsetsToTxn."""
    kind = response_kind(Api.ADD_OFFSETS_TO_TXN, header.version)
    code = ErrorCode.NONE
    if not request.transactional_id:
        code = ErrorCode.INVALID_REQUEST
    elif broker.transactions.groups is None:
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    else:
        writer = Writer(request.producer_id, request.producer_epoch)
        try:
            _check_id_and_group(broker, caller, Api.ADD_OFFSETS_TO_TXN, request)
            await broker.transactions.add(
                request.transactional_id, writer, groups=(request.group_id,)
            )
        except RefusedTransactionError as refused:
            code = _code(refused, header)
    return kind.frame(header.correlation_id, error_code=code)


async def end_txn(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle EndTxn."""
    kind = response_kind(Api.END_TXN, header.version)
    writer, code = Writer(request.producer_id, request.producer_epoch), ErrorCode.NONE
    if not request.transactional_id:
        code = ErrorCode.INVALID_REQUEST
    elif denied := _id_refusal(broker, caller, Api.END_TXN, request.transactional_id):
        code = denied
    else:
        try:
            writer = await broker.transactions.end(
                request.transactional_id,
                writer,
                is_commit=request.committed,
                is_v2=header.version >= _V2_FROM,
            )
        except RefusedTransactionError as refused:
            code = _code(refused, header)
    if code is not ErrorCode.NONE:
        writer = Writer(NO_ID, NO_EPOCH)
    return kind.frame(
        header.correlation_id,
        error_code=code,
        producer_id=writer.producer_id,
        producer_epoch=writer.producer_epoch,
    )


async def txn_offset_commit(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle TxnOffsetCommit: the offsets become the group's when the transaction commits."""
    kind = response_kind(Api.TXN_OFFSET_COMMIT, header.version)
    codes: Codes = {}
    offsets: dict[Partition, PendingOffset] = {}
    for topic in request.topics:
        api, topic_type = Api.TXN_OFFSET_COMMIT, ResourceType.TOPIC
        denied = broker.authorizer.refusal(caller, api, topic_type, topic.name)
        for wanted in topic.partitions:
            partition = topic.name, wanted.partition_index
            metadata = wanted.committed_metadata or ""
            codes[partition] = denied
            if denied:
                continue
            if not _exists(broker, partition):
                codes[partition] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > _MAX_METADATA:
                codes[partition] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                offset = wanted.committed_offset, wanted.committed_leader_epoch, metadata
                offsets[partition] = PendingOffset(*offset)
    try:
        _check_id_and_group(broker, caller, Api.TXN_OFFSET_COMMIT, request)
    except RefusedTransactionError as refused:
        return await _offsets_frame(broker, header, kind, dict.fromkeys(codes, refused.code))
    try:
        await _add_offsets(broker, header, request, offsets)
    except RefusedTransactionError as refused:
        code = _offset_code(refused.code, header.version)
        codes.update(dict.fromkeys(offsets, code))
    return await _offsets_frame(broker, header, kind, codes)


async def _add_offsets(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    offsets: dict[Partition, PendingOffset],
) -> None:
    writer = Writer(request.producer_id, request.producer_epoch)
    group_id, member_id = request.group_id, request.member_id
    member = Member(request.generation_id, member_id, request.group_instance_id)
    transactions = broker.transactions
    if not request.transactional_id:
        raise RefusedTransactionError(ErrorCode.INVALID_REQUEST)
    if header.version >= _V2_FROM and transactions.groups is not None:
        await transactions.add(request.transactional_id, writer, groups=(group_id,))
    await transactions.add_offsets(request.transactional_id, writer, group_id, member, offsets)


def _offset_code(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if code is ErrorCode.TRANSACTION_ABORTABLE and version < _ABORTABLE_FROM:
        return ErrorCode.INVALID_TXN_STATE
    if code is ErrorCode.CONCURRENT_TRANSACTIONS and version < _V2_FROM:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return code


async def _offsets_frame(
    broker: Broker, header: RequestHeader, kind: ResponseKind, codes: Codes
) -> bytes:
    turns = Turns()
    topics: dict[str, list[Message]] = {}
    for (name, number), code in codes.items():
        await turns.took()
        topics.setdefault(name, []).append(
            kind.entity("TxnOffsetCommitResponsePartition", partition_index=number, error_code=code)
        )
    results = tuple(
        kind.entity("TxnOffsetCommitResponseTopic", name=name, partitions=tuple(partitions))
        for name, partitions in topics.items()
    )
    return await turns.encoded(broker, kind, header, topics=results)


async def describe_transactions(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DescribeTransactions."""
    kind = response_kind(Api.DESCRIBE_TRANSACTIONS, header.version)
    turns = Turns()
    found = []
    for transactional_id in dict.fromkeys(request.transactional_ids):
        api = Api.DESCRIBE_TRANSACTIONS
        if denied := _id_refusal(broker, caller, api, transactional_id):
            await turns.took()
            fields = {"error_code": denied, "transactional_id": transactional_id}
            found.append(kind.entity("TransactionState", **fields))
            continue
        current = broker.transactions.coordinator.get(transactional_id)
        await turns.took(1 if current is None else 1 + len(current.partitions))
        found.append(_described(broker, caller, kind, transactional_id, current))
    return await turns.encoded(broker, kind, header, transaction_states=tuple(found))


def _described(
    broker: Broker,
    caller: Caller,
    kind: ResponseKind,
    transactional_id: str,
    current: Transaction | None,
) -> Message:
    if current is None:
        is_legal = bool(transactional_id)
        code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if is_legal else ErrorCode.INVALID_REQUEST
        return kind.entity("TransactionState", error_code=code, transactional_id=transactional_id)
    topics: dict[str, list[int]] = {}
    api, refusal = Api.DESCRIBE_TRANSACTIONS, broker.authorizer.refusal
    for name, number in sorted(current.partitions):
        if refusal(caller, api, ResourceType.TOPIC, name):
            continue
        topics.setdefault(name, []).append(number)
    return kind.entity(
        "TransactionState",
        error_code=ErrorCode.NONE,
        transactional_id=transactional_id,
        transaction_state=current.state.value,
        transaction_timeout_ms=current.timeout_ms,
        transaction_start_time_ms=current.started_ms,
        producer_id=current.producer_id,
        producer_epoch=current.producer_epoch,
        topics=tuple(
            kind.entity("TopicData", topic=name, partitions=numbers)
            for name, numbers in topics.items()
        ),
    )


async def list_transactions(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle ListTransactions; without filters all transactional IDs are listed."""
    kind = response_kind(Api.LIST_TRANSACTIONS, header.version)
    turns = Turns()
    names = {state.value for state in State if state is not State.DEAD}
    unknown = [name for name in dict.fromkeys(request.state_filters) if name not in names]
    producer_ids, states = set(request.producer_id_filters), set(request.state_filters)
    min_ms, now_ms = request.duration_filter, broker.clock.now_ms()
    found = []
    for current in broker.transactions.coordinator.transactions():
        await turns.took()
        is_wanted = not producer_ids or current.producer_id in producer_ids
        if states and current.state.value not in states:
            is_wanted = False
        if min_ms >= 0 and now_ms - current.started_ms <= min_ms:
            is_wanted = False
        api = Api.LIST_TRANSACTIONS
        if is_wanted and not _id_refusal(broker, caller, api, current.transactional_id):
            found.append(
                kind.entity(
                    "TransactionState",
                    transactional_id=current.transactional_id,
                    producer_id=current.producer_id,
                    transaction_state=current.state.value,
                )
            )
    return await turns.encoded(
        broker,
        kind,
        header,
        error_code=ErrorCode.NONE,
        unknown_state_filters=tuple(unknown),
        transaction_states=tuple(found),
    )
