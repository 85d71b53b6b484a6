"""Runs the transaction coordinator on the event loop: durable state, markers, time.

The order that makes a transaction atomic:

1. Its partitions and groups are durable before a record or an offset of it is accepted.
2. Its records are durable before their response and before a commit is, also in topics that are
   flushed in the background.
3. Its outcome is durable before the first marker is written.
4. Its markers are durable before it is complete. The offsets of its groups change in the same
   commit of the coordinators' store that completes it.

A transaction that is prepared ends that way, also after a restart. A marker that was written
before the restart is not written again: the producer state has its timestamp.

EndTxn responds when the transaction is complete: a marker has its offset by then. If that takes
longer than `RESPONSE_S`, because a partition cannot be written to, it responds as Kafka does: the
outcome is certain. The next sweep tries again.

Before a response to a request that has changed nothing, the owner of a bucket makes sure that it
still is the owner, see `ownership`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.changes import LateChangeError, in_time, pooled
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.partition_transactions import Marker
from logmirror.broker.log.producer_state import RefusedSequenceError
from logmirror.broker.ownership import confirmed
from logmirror.broker.state_store import Change
from logmirror.broker.topic import TopicDeletedError
from logmirror.broker.transactions.coordinator import RefusedTransactionError, Write, Writer
from logmirror.broker.transactions.markers import marker_epoch
from logmirror.broker.transactions.transaction import KIND, NO_ID, PREPARED, State
from logmirror.errors import LogmirrorError
from logmirror.failpoints import reach

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping
    from concurrent.futures import Executor

    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.state_store import StateStore
    from logmirror.broker.topics import Topics
    from logmirror.broker.transactions.coordinator import Coordinator
    from logmirror.broker.transactions.group_offsets import GroupOffsets, Member, PendingOffset
    from logmirror.broker.transactions.transaction import Partition, Row, Transaction
    from logmirror.clock import Clock

    Decide = Callable[[int], Write | None]

_LOG: Final = logging.getLogger(__name__)
_WAIT_S: Final = 1.0
"""How long a request waits for the one before it that changes the same transactional ID."""

RESPONSE_S: Final = 5.0
"""How long a request waits for markers and for the disk."""

_MARKERS_PER_TURN: Final = 64
_INIT_ATTEMPTS: Final = 3
_UNAVAILABLE: Final = RefusedTransactionError(ErrorCode.COORDINATOR_NOT_AVAILABLE)


class TransactionService:
    """The transactions of a running broker. All methods run on the event loop."""

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts, built in one place
        self,
        coordinator: Coordinator,
        state: StateStore,
        store: MetadataStore,
        topics: Topics,
        commits: GroupCommit,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self.coordinator = coordinator
        self.groups: GroupOffsets | None = None
        """The offsets of consumer groups; None: this broker has none."""

        self._state = state
        self._store = store
        self._topics = topics
        self._commits = commits
        self._executor = executor
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[ErrorCode]] = {}
        """What changes a transactional ID, by ID."""

        self.timeout_s: float | None = None
        """How long a request waits until a change is durable; None: without a limit."""

        self._stuck: set[str] = set()
        """Transactions of which it was logged that they cannot be completed."""

    def load(self) -> None:
        """Read the stored transactions. Blocks; called before the broker listens.

        Raises:
            UnavailableError: The database cannot be read.
            CorruptionError: A value in it is damaged.
        """
        self.coordinator.load(self._state.load(KIND))

    # Requests

    async def init(self, transactional_id: str, timeout_ms: int, known: Writer | None) -> Writer:
        """Handle InitProducerId with a transactional ID; returns the client's producer ID.

        Raises:
            RefusedTransactionError: The request is refused.
        """

        def decide(new_id: int) -> Write:
            now_ms = self._clock.now_ms()
            return self.coordinator.init(transactional_id, timeout_ms, known, new_id, now_ms)

        for _ in range(_INIT_ATTEMPTS):
            write = await self._change(transactional_id, decide, may_need_id=True)
            if write is not None and write.after.state is State.EMPTY:
                return write.client
        raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)

    async def add(
        self,
        transactional_id: str,
        writer: Writer,
        *,
        partitions: Collection[Partition] = (),
        groups: Collection[str] = (),
        may_be_wrong: bool = False,
    ) -> None:
        """Handle AddPartitionsToTxn and AddOffsetsToTxn.

        Args:
            transactional_id: The ID.
            writer: The client's producer ID and epoch.
            partitions: What is added.
            groups: The same.
            may_be_wrong: Whether the caller itself makes sure that this broker is the owner.

        Raises:
            RefusedTransactionError: The request is refused.
        """

        def decide(_: int) -> Write | None:
            return self.coordinator.add(
                transactional_id,
                writer,
                self._clock.now_ms(),
                partitions=frozenset(partitions),
                groups=frozenset(groups),
            )

        write = await self._change(transactional_id, decide, may_be_wrong=may_be_wrong)
        if write is None and not may_be_wrong:
            await self._check_owner()
        reach("transaction.added")

    async def end(
        self, transactional_id: str, writer: Writer, *, is_commit: bool, is_v2: bool
    ) -> Writer:
        """Handle EndTxn; returns the producer ID and epoch with which the client continues.

        Raises:
            RefusedTransactionError: The request is refused.
        """

        def decide(new_id: int) -> Write | None:
            now_ms = self._clock.now_ms()
            options = {"is_commit": is_commit, "is_v2": is_v2}
            return self.coordinator.end(transactional_id, writer, now_ms, new_id=new_id, **options)

        if is_commit:
            await self._flush_records(transactional_id)
        write = await self._change(transactional_id, decide, may_need_id=is_v2)
        if write is None:
            current = self.coordinator.get(transactional_id)
            await self._check_owner()
            write = Write(current) if current is not None else None
        reach("transaction.completed")
        return write.client if write is not None else writer

    async def _flush_records(self, transactional_id: str) -> None:
        """Make the records of a transaction durable."""
        current = self.coordinator.get(transactional_id)
        if current is None:
            return
        flushes = []
        for partition in current.partitions:
            log = self._find_log(partition)
            known = None if log is None else log.producers.get(current.producer_id)
            if log is not None and known is not None and known.batches:
                end = known.batches[-1].last_offset + 1
                if end > log.durable:
                    flushes.append(self._commits.flushed(log, end))
        try:
            await asyncio.wait_for(asyncio.gather(*flushes), RESPONSE_S)
        except (TimeoutError, LogmirrorError) as error:
            _LOG.warning("transaction of %s cannot be committed yet: %s", transactional_id, error)
            raise _UNAVAILABLE from error

    def _find_log(self, partition: Partition) -> PartitionLog | None:
        name, number = partition
        topic = self._topics.by_name.get(name)
        return topic.logs[number] if topic is not None and number < len(topic.logs) else None

    async def add_offsets(
        self,
        transactional_id: str,
        writer: Writer,
        group_id: str,
        member: Member,
        offsets: Mapping[Partition, PendingOffset],
    ) -> None:
        """Handle TxnOffsetCommit.

        Raises:
            RefusedTransactionError: The request is refused.
        """
        if self.groups is None:
            raise _UNAVAILABLE
        try:
            self.coordinator.check(transactional_id, writer, group_id=group_id)
        except RefusedTransactionError as refused:
            raise await self._refusal(refused.code) from None
        code, rows = self.groups.add_pending(writer.producer_id, group_id, member, offsets)
        if code is not ErrorCode.NONE:
            raise await self._refusal(code)
        await self._make_durable(rows, self.timeout_s)
        reach("transaction.offsets")

    async def _make_durable(self, rows: Collection[Row], timeout_s: float | None = None) -> None:
        try:
            await in_time(self._state.write(Change(*row) for row in rows), timeout_s)
        except LateChangeError:
            raise _UNAVAILABLE from None
        except LogmirrorError as error:
            _LOG.error("transactions are not available: %s; %s", error, error.hint)
            raise _UNAVAILABLE from error

    # Changes of a transactional ID

    async def _change(
        self,
        transactional_id: str,
        decide: Decide,
        *,
        may_need_id: bool = False,
        may_be_wrong: bool = False,
    ) -> Write | None:
        """Decide, make it durable, and complete what has ended. One change of an ID at a time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WAIT_S
        new_id = NO_ID
        while True:
            running = self._tasks.get(transactional_id)
            if running is not None:
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
                await asyncio.wait([running], timeout=left_s)
            elif may_need_id and new_id == NO_ID and self.coordinator.needs_id(transactional_id):
                new_id = await self._new_id()
            else:
                break
        try:
            write = decide(new_id)
        except RefusedTransactionError as refused:
            raise refused if may_be_wrong else await self._refusal(refused.code) from None
        if write is None:
            return None
        task = self._begin(transactional_id, self._carry_out(write))
        await asyncio.wait([task], timeout=RESPONSE_S)
        if task.done():
            code = task.result()
        else:
            is_durable = self.coordinator.get(transactional_id) == write.after
            code = ErrorCode.NONE if is_durable else ErrorCode.COORDINATOR_NOT_AVAILABLE
        if code is not ErrorCode.NONE:
            raise RefusedTransactionError(code)
        return write

    async def _refusal(self, code: ErrorCode) -> RefusedTransactionError:
        return RefusedTransactionError(await confirmed(self._commits, code))

    async def _check_owner(self) -> None:
        if code := await confirmed(self._commits, ErrorCode.NONE):
            raise RefusedTransactionError(code)

    async def _new_id(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(self._executor, self._store.next_producer_id)
            return await pooled(work, self.timeout_s)
        except LogmirrorError as error:
            _LOG.exception("no producer id could be reserved")
            raise _UNAVAILABLE from error

    def _begin(
        self, transactional_id: str, change: Coroutine[None, None, ErrorCode]
    ) -> asyncio.Task[ErrorCode]:
        """Run a change to its end, also if the client disconnects meanwhile."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks[transactional_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(transactional_id))
        return task

    async def _carry_out(self, write: Write, rows: Collection[Row] = ()) -> ErrorCode:
        try:
            await self._make_durable([write.row, *rows])
        except RefusedTransactionError as refused:
            self.coordinator.failed(write)
            return refused.code
        self.coordinator.wrote(write)
        if write.after.state in PREPARED:
            reach("transaction.prepared")
            return await self._complete(write.after)
        return ErrorCode.NONE

    # The end of a transaction

    async def _complete(self, prepared: Transaction) -> ErrorCode:
        """Write the markers and complete a prepared transaction; if not now, a sweep does."""
        outcomes: list[asyncio.Future[LogmirrorError | None]] = []
        is_stuck = False
        for number, partition in enumerate(sorted(prepared.partitions)):
            if number % _MARKERS_PER_TURN == _MARKERS_PER_TURN - 1:
                await asyncio.sleep(0)
            try:
                log = self._mark(prepared, partition)
            except LogmirrorError as error:
                self._log_stuck(prepared, error)
                is_stuck = True
                continue
            if log is not None:
                outcomes.append(self._durable(log))
                reach("transaction.marked")
        for outcome in outcomes:
            failure = await outcome
            if failure is not None and not isinstance(failure, TopicDeletedError):
                self._log_stuck(prepared, failure)
                is_stuck = True
        if is_stuck:
            return ErrorCode.NONE
        reach("transaction.decided")
        self._stuck.discard(prepared.transactional_id)
        write = self.coordinator.complete(prepared.transactional_id, self._clock.now_ms())
        rows: Collection[Row] = ()
        if self.groups is not None:
            rows = self.groups.end(prepared.producer_id, is_commit=prepared.is_commit)
        return await self._carry_out(write, rows)

    def _mark(self, prepared: Transaction, partition: Partition) -> PartitionLog | None:
        """Append a marker, if it is not there; None for a partition that does not exist.

        Raises:
            LogmirrorError: The partition is offline, or cannot be written to now.
        """
        log = self._find_log(partition)
        if log is None:
            return None
        log.check_online()
        coordinator_epoch = marker_epoch(log.producers, prepared)
        if coordinator_epoch is None:
            return log
        writer = prepared.producer_id, prepared.producer_epoch
        marker = Marker(*writer, prepared.is_commit, coordinator_epoch)
        try:
            log.append_marker(marker, prepared.ended_ms)
        except RefusedSequenceError as refused:
            # A higher epoch: another client's marker has ended this producer's transaction.
            _LOG.warning("%s: marker of %s: %s", log.folder, prepared, refused)
            return None
        return log

    def _durable(self, log: PartitionLog) -> asyncio.Future[LogmirrorError | None]:
        outcome: asyncio.Future[LogmirrorError | None] = asyncio.get_running_loop().create_future()
        log.when_durable(log.log_end, functools.partial(_set_result, outcome))
        self._commits.schedule(log)
        return outcome

    def _log_stuck(self, prepared: Transaction, error: LogmirrorError) -> None:
        if prepared.transactional_id in self._stuck:
            return
        self._stuck.add(prepared.transactional_id)
        _LOG.warning(
            "transaction of %s (producer %d) cannot be completed yet: %s",
            prepared.transactional_id,
            prepared.producer_id,
            error,
        )

    # Time

    def sweep(self) -> None:
        """Abort what is overdue, complete what is prepared, remove what has expired."""
        now_ms = self._clock.now_ms()
        due = self.coordinator.due(now_ms)
        for transactional_id in due.prepared:
            prepared = self.coordinator.get(transactional_id)
            if transactional_id not in self._tasks and prepared is not None:
                self._begin(transactional_id, self._complete(prepared))
        for transactional_id in due.overdue:
            if transactional_id not in self._tasks:
                write = self.coordinator.abort_overdue(transactional_id, now_ms)
                if write is not None:
                    _LOG.info("transaction of %s aborted: timeout", transactional_id)
                    self._begin(transactional_id, self._carry_out(write))
        for transactional_id in due.expired:
            if transactional_id not in self._tasks:
                write = self.coordinator.expire(transactional_id, now_ms)
                if write is not None:
                    self._begin(transactional_id, self._carry_out(write))

    async def stop(self) -> None:
        """Wait for changes in progress, for a limited time. A restart completes the others."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=RESPONSE_S)


def _set_result(
    outcome: asyncio.Future[LogmirrorError | None], failure: LogmirrorError | None
) -> None:
    if not outcome.done():
        outcome.set_result(failure)
