"""Transactions: a producer that owns a transactional id, fences older owners, ends what it began.

The protocol is the one before KIP-890's second part: partitions are added before they are written
to, and EndTxn leaves producer id and epoch as they are. Brokers whose `transaction.version` is 2
serve it all the same; we stay at the versions below, because their own would change the epoch at
every end, and a lost answer would then leave open which epoch is ours.

    AddPartitionsToTxn <= 3, EndTxn <= 4, TxnOffsetCommit <= 4, InitProducerId <= 5, Produce <= 9

Invariants:
1. Every request here can be repeated without doing it twice, and is, after a lost answer:
   InitProducerId fences the owner before, who was we; adding twice adds once; an end repeated is
   answered as the first time, and with an error when the transaction ended the other way.
2. A newer owner of the transactional id ends this one for good: `FencedError`, also for everything
   after it. Where `end` was under way then, its outcome is what the newer owner finds.
3. A request whose answer was lost may be carried out long after it was repeated, and then would end
   or begin whatever is under way in the same epoch: after one, `has_stray` says that the next
   transaction needs a newer epoch, from `init`. (KIP-890 has one for each transaction.)
4. Progress committed by `commit_offsets` is seen by others if and only if `end(commit=True)` was
   done.
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
    """What batches of a transaction carry, and sequences from 0 on for each partition."""

    producer_id: int
    producer_epoch: int


class TransactionalProducer:
    """Owns a transactional id from `init` until another owner's. Not thread-safe.

    One transaction at a time: `add_partitions`, batches through a `ProducePipeline` that was made
    with this transactional id, `commit_offsets`, `end`. All answers of the pipeline are collected
    and without error before `end(commit=True)`; else `end(commit=False)`.

    Args:
        router: Of the cluster; see `ClusterClient.transactional_producer`.
        transactional_id: Ours alone.
        timeout_ms: After which the coordinator aborts a transaction that was left open, and fences
            us; at most the brokers' `transaction.max.timeout.ms`.
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
        """Whether something may not have been added that was to be."""
        self._has_stray = False

    @property
    def has_stray(self) -> bool:
        """Whether a request without an answer may still be on its way; until `init`."""
        return self._has_stray

    @property
    def identity(self) -> ProducerIdentity:
        """Producer id and epoch of our batches; only after `init`."""
        return self._owned()

    def init(self) -> ProducerIdentity:
        """Take the transactional id: older owners are fenced, and what they left open is aborted.

        Returns when the markers of that abort are written, each of which took an offset.

        Raises:
            UsageError: Not allowed, or the timeout is longer than the brokers permit.
            UnavailableError: No coordinator did it within the budget; older owners may be fenced.
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
            _check(response, "could not take the transactional id")
            return ProducerIdentity(int(response.producer_id), int(response.producer_epoch))

        self._identity = self._run(attempt, "could not take the transactional id")
        self._has_stray = False  # a late repetition of this one would fence us
        return self._identity

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Let partitions take part in the transaction; those that do already are not sent again.

        Each gets one control record at `end`, whether anything was written to it or not.

        Raises:
            FencedError: There is a newer owner.
            UsageError: No such partition, or not allowed.
            UnavailableError: No coordinator did it within the budget; it may have been done.
        """
        owned = self._owned()
        wanted = [
            partition for partition in dict.fromkeys(partitions) if partition not in self._added
        ]
        if not wanted:
            return
        made = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        topics = by_topic(wanted, lambda partition: partition.partition)
        # Ahead of the answer: whether it was done or not, `end` may have something to end.
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
        """Commit progress inside the transaction, as offsets of a consumer group.

        Raises:
            FencedError: There is a newer owner.
            UsageError: Not allowed on the group or a topic.
            UnavailableError: No coordinator did it within the budget; it may have been done.
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
        """Commit or abort. With nothing added there is no transaction, and nothing is asked.

        It is decided when this returns; the markers follow within milliseconds, each taking an
        offset. See `await_markers`.

        Raises:
            FencedError: There is a newer owner. Whether this transaction was committed before is
                open where a first answer was lost.
            OutcomeUnknownError: The answers are lost and the budget is used up. Call it again with
                the same `commit`, or `init`, which aborts what is not committed.
            UsageError: The coordinator knows no such transaction (fact `error` INVALID_TXN_STATE).
        """
        owned = self._owned()
        if commit and self._unsure:
            raise InternalError("a transaction that something could not be added to was committed")
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
            # It was not added, then: nothing was begun.
        self._added.clear()
        self._added_groups.clear()
        self._unsure = False

    def await_markers(self) -> None:
        """Wait until the markers of what was ended last are in their logs.

        The coordinator says so; that a log is as long as expected does not: a marker that a broker
        wrote twice may stand where one is still to come.

        Raises:
            FencedError: There is a newer owner; what it found open is ended, too.
            UnavailableError: No coordinator says so within the budget.
        """
        owned = self._owned()

        def attempt(connection: Connection) -> bool:
            if DESCRIBE_TRANSACTIONS not in connection.versions:
                return False
            request = DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
            (found,) = connection.call(request).transaction_states
            _check(found, "could not look up the transaction")
            if (found.producer_id, found.producer_epoch) != owned:
                raise FencedError("another owner has taken the transactional id")
            if found.transaction_state.startswith("Prepare"):
                raise api_error(CONCURRENT_TRANSACTIONS, action="could not await the markers")
            return True

        if not self._run(attempt, "could not await the markers"):
            self.init()  # before Apache Kafka 3.0; it waits for the same

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
                "another owner has taken the transactional id",
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
    ) -> Any:  # noqa: ANN401  # whatever the attempt returns
        def watched(connection: Connection) -> Any:  # noqa: ANN401  # the same
            try:
                return attempt(connection)
            except LogmirrorError as error:
                self._has_stray |= "code" not in error.facts  # nobody has answered
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
    """Raise the first error that is a cause; partitions beside it were not attempted."""
    for code, topic, partition in sorted(codes, key=lambda one: one[0] == OPERATION_NOT_ATTEMPTED):
        raise api_error(code, action=action, topic=topic, partition=partition)
