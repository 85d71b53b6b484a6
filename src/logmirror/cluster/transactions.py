"""Transactions: a producer that owns a transactional ID and fences older owners.

The protocol is the one before KIP-890's second part: partitions are added before they are written
to, and EndTxn keeps producer ID and epoch. Brokers with `transaction.version` 2 support it as well.
The versions below are the limit: later ones change the epoch at every end, so that a lost response
would leave the current epoch unknown.

    AddPartitionsToTxn <= 3, EndTxn <= 4, TxnOffsetCommit <= 4, InitProducerId <= 5, Produce <= 9

Invariants:
1. Every request here is idempotent, and is repeated after a lost response: InitProducerId fences
the
   previous owner, which was this producer; adding twice adds once; a repeated end gets the response
   of the first, or an error if the transaction ended the other way.
2. A newer owner of the transactional ID fences this producer permanently: `FencedError`, also for
   every later call. The newer owner reads the outcome of an `end` that was in flight.
3. A request whose response was lost may be processed long after its repetition, and would then end
   or begin what is open in the same epoch. So after one `has_stray` is set, and the next
   transaction needs a newer epoch, from `init`. (With KIP-890 each transaction has its own epoch.)
4. Offsets committed by `commit_offsets` become visible if and only if `end(commit=True)` succeeded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    DescribeTransactionsRequest,
)
from kafka.protocol.producer import (  # type: ignore[import-untyped]  # ships no py.typed
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from logmirror.cluster.coordinators import GROUP, TRANSACTION, Coordinator
from logmirror.cluster.router import by_topic
from logmirror.errors import (
    FencedError,
    InternalError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.wire.messages import (
    CONCURRENT_TRANSACTIONS,
    DESCRIBE_TRANSACTIONS,
    INVALID_TXN_STATE,
    OPERATION_NOT_ATTEMPTED,
    api_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.groups import GroupOffset
    from logmirror.cluster.router import Router
    from logmirror.model import TopicPartition

_INIT_VERSION_MAX: Final = 5
_ADD_PARTITIONS_VERSION_MAX: Final = 3
_END_VERSION_MAX: Final = 4
_OFFSET_COMMIT_VERSION_MAX: Final = 4


class ProducerIdentity(NamedTuple):
    """Producer ID and epoch of a transaction's batches; sequences begin at 0 per partition."""

    producer_id: int
    producer_epoch: int


class TransactionalProducer:
    """Owns a transactional ID from `init` until another owner's `init`. Not thread-safe.

    One transaction at a time: `add_partitions`, batches through a `ProducePipeline` with this
    transactional ID, `commit_offsets`, `end`. Before `end(commit=True)` all responses of the
    pipeline must be collected, without an error; otherwise call `end(commit=False)`.

    Args:
        router: The cluster; see `ClusterClient.transactional_producer`.
        transactional_id: An ID that no other flow uses.
        timeout_ms: Time after which the coordinator aborts an open transaction and fences this
            producer; at most the brokers' `transaction.max.timeout.ms`.
    """

    def __init__(self, router: Router, transactional_id: str, *, timeout_ms: int) -> None:
        self.transactional_id = transactional_id
        self._router = router
        self._timeout_ms = timeout_ms
        self._coordinator = Coordinator(router, transactional_id, TRANSACTION)
        self._groups: dict[str, Coordinator] = {}
        self._identity: ProducerIdentity | None = None
        self._fenced = False
        self._added: set[TopicPartition] = set()
        self._added_groups: set[str] = set()
        self._unsure = False
        """Whether a partition or group may be missing from the transaction."""
        self._has_stray = False

    @property
    def has_stray(self) -> bool:
        """Whether a request without a response may still be processed; reset by `init`."""
        return self._has_stray

    @property
    def identity(self) -> ProducerIdentity:
        """Producer ID and epoch for batches; only after `init`."""
        return self._owned()

    def init(self) -> ProducerIdentity:
        """Acquire the transactional ID: fence older owners, and abort their open transaction.

        Returns when the markers of that abort are written, each of which takes an offset.

        Raises:
            UsageError: Not allowed, or the timeout is longer than the brokers permit.
            UnavailableError: No coordinator responded within the budget; older owners may be
            fenced.
        """
        self._identity = None
        self._fenced = False
        self._added.clear()
        self._added_groups.clear()
        self._unsure = False

        def attempt(connection: Connection) -> ProducerIdentity:
            request = InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
            )
            response = connection.call(request, high=_INIT_VERSION_MAX)
            _check(response, "could not acquire the transactional ID")
            return ProducerIdentity(int(response.producer_id), int(response.producer_epoch))

        self._identity = self._run(attempt, "could not acquire the transactional ID")
        self._has_stray = False  # a late repetition of this request would fence this producer
        return self._identity

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the transaction; those added before are not sent again.

        Each gets one control record at `end`, even if no record was written to it.

        Raises:
            FencedError: There is a newer owner.
            UsageError: No such partition, or not allowed.
            UnavailableError: No coordinator responded within the budget; they may have been added.
        """
        owned = self._owned()
        wanted = [
            partition for partition in dict.fromkeys(partitions) if partition not in self._added
        ]
        if not wanted:
            return
        made = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        topics = by_topic(wanted, lambda partition: partition.partition)
        # Before the response: in either case `end` may have a transaction to end.
        self._added.update(wanted)
        unsure, self._unsure = self._unsure, True

        def attempt(connection: Connection) -> None:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=owned.producer_id,
                v3_and_below_producer_epoch=owned.producer_epoch,
                v3_and_below_topics=[
                    made(name=name, partitions=numbers) for name, numbers in topics.items()
                ],
            )
            response = connection.call(request, high=_ADD_PARTITIONS_VERSION_MAX)
            codes = [
                (entry.partition_error_code, topic.name, entry.partition_index)
                for topic in response.results_by_topic_v3_and_below
                for entry in topic.results_by_partition
                if entry.partition_error_code
            ]
            _raise_cause(codes, "could not add partitions to the transaction")

        try:
            self._run(attempt, "could not add partitions to the transaction")
        except UsageError:
            self._added.difference_update(wanted)  # a refusal adds none of them
            self._unsure = unsure
            raise
        self._unsure = unsure

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, GroupOffset]) -> None:
        """Commit offsets of a consumer group as part of the transaction.

        Raises:
            FencedError: There is a newer owner.
            UsageError: Not allowed on the group or a topic.
            UnavailableError: No coordinator responded within the budget; it may have been done.
        """
        owned = self._owned()
        if group not in self._added_groups:
            unsure, self._unsure = self._unsure, True

            def add(connection: Connection) -> None:
                request = AddOffsetsToTxnRequest(
                    transactional_id=self.transactional_id,
                    producer_id=owned.producer_id,
                    producer_epoch=owned.producer_epoch,
                    group_id=group,
                )
                _check(connection.call(request), "could not add offsets to the transaction")

            self._run(add, "could not add offsets to the transaction", group=group)
            self._added_groups.add(group)
            self._unsure = unsure
        coordinator = self._groups.setdefault(group, Coordinator(self._router, group, GROUP))

        def commit(connection: Connection) -> None:
            request = self._offset_commit(owned, group, offsets)
            response = connection.call(request, high=_OFFSET_COMMIT_VERSION_MAX)
            codes = [
                (entry.error_code, topic.name, entry.partition_index)
                for topic in response.topics
                for entry in topic.partitions
                if entry.error_code
            ]
            _raise_cause(codes, "could not commit offsets")

        self._run(commit, "could not commit offsets", coordinator, group=group)

    def end(self, *, commit: bool) -> None:
        """Commit or abort. Without added partitions or groups no request is sent.

        The outcome is final when this returns. The markers follow within milliseconds, each taking
        an offset; see `await_markers`.

        Raises:
            FencedError: There is a newer owner. If an earlier response was lost, the transaction
            may
                have been committed.
            OutcomeUnknownError: Responses were lost until the budget was used up. Call it again
            with
                the same `commit`, or call `init`, which aborts an uncommitted transaction.
            UsageError: The coordinator has no such transaction (fact `error` INVALID_TXN_STATE).
        """
        owned = self._owned()
        if commit and self._unsure:
            raise InternalError("commit of a transaction with a partition that was not added")
        if not (self._added or self._added_groups or self._unsure):
            return

        def attempt(connection: Connection) -> None:
            request = EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=owned.producer_id,
                producer_epoch=owned.producer_epoch,
                committed=commit,
            )
            response = connection.call(request, high=_END_VERSION_MAX)
            _check(response, "could not end the transaction")

        try:
            self._run(attempt, "could not end the transaction", commit=commit)
        except UnavailableError as error:
            raise OutcomeUnknownError(error.message, hint=error.hint, **error.facts) from error
        except UsageError as error:
            if commit or not self._unsure or error.facts.get("code") != INVALID_TXN_STATE:
                raise
            # Nothing was added, so no transaction was begun.
        self._added.clear()
        self._added_groups.clear()
        self._unsure = False

    def await_markers(self) -> None:
        """Wait until the markers of the last ended transaction are in their logs.

        The coordinator reports it. The log end alone proves nothing: a marker that a broker wrote
        twice may be at the offset of one that is still to come.

        Raises:
            FencedError: There is a newer owner; the transaction is ended as well.
            UnavailableError: No coordinator reported it within the budget.
        """
        owned = self._owned()

        def attempt(connection: Connection) -> bool:
            if DESCRIBE_TRANSACTIONS not in connection.versions:
                return False
            request = DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
            (found,) = connection.call(request).transaction_states
            _check(found, "could not describe the transaction")
            if (found.producer_id, found.producer_epoch) != owned:
                raise FencedError("another producer has acquired the transactional ID")
            if found.transaction_state.startswith("Prepare"):
                raise api_error(CONCURRENT_TRANSACTIONS, action="could not await the markers")
            return True

        if not self._run(attempt, "could not await the markers"):
            self.init()  # before Apache Kafka 3.0; it waits for the markers as well

    def _offset_commit(
        self, owned: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, GroupOffset]
    ) -> Any:  # noqa: ANN401  # untyped library
        made = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        topics = by_topic(
            offsets,
            lambda partition: made.TxnOffsetCommitRequestPartition(
                partition_index=partition.partition,
                committed_offset=offsets[partition].offset,
                committed_leader_epoch=offsets[partition].leader_epoch,
                committed_metadata=offsets[partition].metadata,
            ),
        )
        return TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group,
            producer_id=owned.producer_id,
            producer_epoch=owned.producer_epoch,
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=[made(name=name, partitions=entries) for name, entries in topics.items()],
        )

    def _owned(self) -> ProducerIdentity:
        if self._fenced:
            raise FencedError(
                "another producer has acquired the transactional ID",
                transactional_id=self.transactional_id,
            )
        if self._identity is None:
            raise InternalError("a transactional producer was used before init")
        return self._identity

    def _run(
        self,
        attempt: Callable[[Connection], Any],
        action: str,
        coordinator: Coordinator | None = None,
        **facts: object,
    ) -> Any:  # noqa: ANN401  # the attempt's result
        def watched(connection: Connection) -> Any:  # noqa: ANN401  # the same
            try:
                return attempt(connection)
            except LogmirrorError as error:
                self._has_stray |= "code" not in error.facts  # no response
                raise

        try:
            return (coordinator or self._coordinator).run(
                watched, action, transactional_id=self.transactional_id, **facts
            )
        except FencedError:
            self._fenced = True
            raise


def _check(response: Any, action: str) -> None:  # noqa: ANN401  # untyped library
    if response.error_code:
        raise api_error(response.error_code, action=action)


def _raise_cause(codes: list[tuple[int, str, int]], action: str) -> None:
    """Raise the first error that is a cause; other partitions were not attempted."""
    for code, topic, partition in sorted(codes, key=lambda one: one[0] == OPERATION_NOT_ATTEMPTED):
        raise api_error(code, action=action, topic=topic, partition=partition)
