"""The transaction coordinator: which request may change a transaction, and how.

It decides, and does nothing else. A decision is a `Write`, the next value of a transactional ID, or
an error. The caller makes the write durable and calls `wrote`; only then it has an effect.

- T1 One write of an ID is in progress at a time; meanwhile, requests get CONCURRENT_TRANSACTIONS.
- T2 Records of a transaction are accepted only while it is ongoing and durable, from its producer
  ID and epoch, for partitions that were added to it (KIP-890, part 1).
- T3 A prepared transaction has its outcome. Its markers and offsets follow, also after a restart.
- T4 InitProducerId aborts an ongoing transaction, with a higher epoch: the previous client is a
  zombie, and is fenced. A timeout does the same.
- T5 A client that states its producer ID and epoch continues with the next epoch (KIP-360). If it
  repeats that request, it gets the same epoch again.
- T6 With transaction version 2 (KIP-890, part 2) every end increments the epoch, so that no late
  record can enter the next transaction. A client that repeats EndTxn gets the same epoch again.
- T7 An exhausted producer ID is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.transactions.transaction import (
    COMPLETE,
    IDLE,
    KIND,
    LAST_EPOCH,
    NO_EPOCH,
    NO_ID,
    PREPARED,
    Partition,
    Row,
    State,
    Transaction,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NO_PARTITIONS: Final[frozenset[Partition]] = frozenset()
NO_GROUPS: Final[frozenset[str]] = frozenset()


class Writer(NamedTuple):
    """The producer ID and epoch that a client states."""

    producer_id: int
    producer_epoch: int


class Limits(NamedTuple):
    """The coordinator's settings."""

    max_timeout_ms: int = 900_000
    """Kafka's `transaction.max.timeout.ms`."""

    expiration_ms: int = 604_800_000
    """Kafka's `transactional.id.expiration.ms`."""

    max_ids: int = 100_000
    """Limit for the transactional IDs; each takes about 1 KB."""


class Write(NamedTuple):
    """The next value of a transactional ID, to be made durable."""

    after: Transaction

    @property
    def row(self) -> Row:
        """The row of the coordinators' store."""
        is_dead = self.after.state is State.DEAD
        key = self.after.transactional_id.encode()
        return KIND, key, None if is_dead else self.after.to_bytes()

    @property
    def client(self) -> Writer:
        """The producer ID and epoch with which the client continues."""
        if self.after.next_id != NO_ID:
            return Writer(self.after.next_id, 0)
        return Writer(self.after.producer_id, self.after.producer_epoch)


class Due(NamedTuple):
    """What time has made necessary: transactional IDs."""

    overdue: list[str]
    """Their transaction has exceeded its timeout."""

    prepared: list[str]
    """Their transaction is to be completed."""

    expired: list[str]
    """They were not used for too long."""


class RefusedTransactionError(Exception):
    """The request is refused. `code` is Kafka's error code for it."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class _Entry:
    current: Transaction | None = None
    """The durable value; None: the ID is new."""
    writing: Transaction | None = None
    """The value that is being made durable."""


class Coordinator:
    """The transactional IDs of one broker.

    Args:
        limits: The settings.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._at_rest: dict[str, None] = {}
        """IDs without a transaction, the one that changed first at the beginning."""

        self._busy: dict[str, None] = {}
        """IDs with a transaction that is not complete."""

    # What is stored

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Read the stored transactions, before the first request.

        Raises:
            CorruptionError: A row is damaged.
        """
        found = [Transaction.from_bytes(key.decode(), value) for key, value in rows]
        for transaction in sorted(found, key=lambda one: one.updated_ms):
            self._entries[transaction.transactional_id] = _Entry(transaction)
            self._file(transaction)

    def _file(self, current: Transaction) -> None:
        """Put an ID where `due` finds it."""
        self._at_rest.pop(current.transactional_id, None)
        self._busy.pop(current.transactional_id, None)
        if current.state is not State.DEAD:
            place = self._at_rest if current.state in IDLE else self._busy
            place[current.transactional_id] = None

    def wrote(self, write: Write) -> None:
        """Record that a write is durable."""
        entry = self._entries[write.after.transactional_id]
        entry.current, entry.writing = write.after, None
        self._file(write.after)
        if write.after.state is State.DEAD:
            del self._entries[write.after.transactional_id]

    def failed(self, write: Write) -> None:
        """Record that a write failed. No later one succeeds until the broker restarts."""
        entry = self._entries[write.after.transactional_id]
        entry.writing = None
        if entry.current is None:
            del self._entries[write.after.transactional_id]

    def _write(self, after: Transaction) -> Write:
        self._entries.setdefault(after.transactional_id, _Entry()).writing = after
        return Write(after)

    # What is known

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, transactional_id: str) -> Transaction | None:
        """Return the durable value of an ID."""
        entry = self._entries.get(transactional_id)
        return entry.current if entry is not None else None

    def transactions(self) -> Iterator[Transaction]:
        """Yield the durable value of each ID."""
        for entry in tuple(self._entries.values()):
            if entry.current is not None:
                yield entry.current

    def needs_id(self, transactional_id: str) -> bool:
        """Whether the next decision on this ID may need a new producer ID."""
        current = self.get(transactional_id)
        return current is None or current.is_exhausted

    # Requests

    def init(
        self,
        transactional_id: str,
        timeout_ms: int,
        known: Writer | None,
        new_id: int,
        now_ms: int,
    ) -> Write:
        """Decide InitProducerId.

        Args:
            transactional_id: The ID, not empty.
            timeout_ms: The transaction timeout.
            known: What the client states of itself (KIP-360), or None.
            new_id: An unused producer ID if `needs_id`, else -1.
            now_ms: The time.

        Returns:
            A write of an idle state: the client's producer ID and epoch. A write of PrepareAbort:
            the previous transaction must end first, then the request is decided again.

        Raises:
            RefusedTransactionError: The request is refused.
        """
        if not 0 < timeout_ms <= self._limits.max_timeout_ms:
            raise RefusedTransactionError(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        if transactional_id not in self._entries:
            return self._new(transactional_id, timeout_ms, new_id, now_ms)
        before = self._idle(transactional_id)
        if known is not None and not _may_continue(before, known):
            raise RefusedTransactionError(ErrorCode.PRODUCER_FENCED)
        if before.state in PREPARED:
            raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if before.state is State.ONGOING:
            return self._write(_fenced(before, now_ms))
        after = _initialized(before, known, new_id)
        return self._write(
            replace(
                after, state=State.EMPTY, timeout_ms=timeout_ms, started_ms=-1, updated_ms=now_ms
            )
        )

    def _new(self, transactional_id: str, timeout_ms: int, new_id: int, now_ms: int) -> Write:
        if len(self._entries) >= self._limits.max_ids:
            raise RefusedTransactionError(ErrorCode.POLICY_VIOLATION)
        return self._write(
            Transaction(
                transactional_id=transactional_id,
                producer_id=new_id,
                producer_epoch=0,
                timeout_ms=timeout_ms,
                updated_ms=now_ms,
            )
        )

    def _idle(self, transactional_id: str) -> Transaction:
        """Return the value of an ID that no write changes (T1)."""
        entry = self._entries.get(transactional_id)
        if entry is None:
            raise RefusedTransactionError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if entry.current is None or entry.writing is not None:
            raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
        return entry.current

    def add(
        self,
        transactional_id: str,
        writer: Writer,
        now_ms: int,
        *,
        partitions: frozenset[Partition] = NO_PARTITIONS,
        groups: frozenset[str] = NO_GROUPS,
    ) -> Write | None:
        """Decide AddPartitionsToTxn or AddOffsetsToTxn; None: they were added before.

        Raises:
            RefusedTransactionError: The request is refused.
        """
        before = self._idle(transactional_id)
        _check_writer(before, writer)
        if before.state in PREPARED:
            raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if before.state is not State.ONGOING:
            before = replace(before, state=State.ONGOING, started_ms=now_ms)
        elif partitions <= before.partitions and groups <= before.groups:
            return None
        partitions, groups = before.partitions | partitions, before.groups | groups
        return self._write(replace(before, partitions=partitions, groups=groups, updated_ms=now_ms))

    def end(  # noqa: PLR0913  # the request's fields
        self,
        transactional_id: str,
        writer: Writer,
        now_ms: int,
        *,
        is_commit: bool,
        is_v2: bool,
        new_id: int,
    ) -> Write | None:
        """Decide EndTxn; None: it has ended that way before.

        Args:
            transactional_id: The ID.
            writer: The client's producer ID and epoch.
            now_ms: The time.
            is_commit: Whether to commit.
            is_v2: Whether the client uses transaction version 2 (T6).
            new_id: An unused producer ID if `needs_id`, else -1.

        Raises:
            RefusedTransactionError: The request is refused.
        """
        before = self._idle(transactional_id)
        is_again = is_v2 and _has_ended(before, writer)
        if not is_again:
            _check_writer(before, writer)
        if before.state is State.ONGOING:
            after = _prepared(before, now_ms, is_commit=is_commit, is_v2=is_v2, new_id=new_id)
            return self._write(after)
        is_same = before.state is not State.EMPTY and before.is_commit == is_commit
        is_next = is_v2 and not is_again  # the end of a transaction that has not begun
        if before.state in PREPARED and (is_same or is_next):
            raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if is_next and not is_commit:
            # Only the epoch is incremented (T6).
            after = _prepared(before, now_ms, is_commit=False, is_v2=True, new_id=new_id)
            return self._write(_completed(after, now_ms))
        if not is_same or is_next:
            raise RefusedTransactionError(ErrorCode.INVALID_TXN_STATE)
        return None

    # Time

    def due(self, now_ms: int) -> Due:
        """Return what is to be done now."""
        found = Due([], [], [])
        for transactional_id in self._busy:
            entry = self._entries[transactional_id]
            if entry.current is None or entry.writing is not None:
                continue
            if entry.current.state in PREPARED:
                found.prepared.append(transactional_id)
            elif _is_overdue(entry.current, now_ms):
                found.overdue.append(transactional_id)
        for transactional_id in self._at_rest:
            entry = self._entries[transactional_id]
            if entry.current is None or not self._is_expired(entry.current, now_ms):
                break
            if entry.writing is None:
                found.expired.append(transactional_id)
        return found

    def abort_overdue(self, transactional_id: str, now_ms: int) -> Write | None:
        """Decide on a transaction that may have exceeded its timeout (T4).

        Raises:
            RefusedTransactionError: The ID is being changed, or is gone.
        """
        before = self._idle(transactional_id)
        return self._write(_fenced(before, now_ms)) if _is_overdue(before, now_ms) else None

    def complete(self, transactional_id: str, now_ms: int) -> Write:
        """Decide that a prepared transaction is complete: its markers are durable (T3).

        Raises:
            RefusedTransactionError: It is not prepared.
        """
        before = self._idle(transactional_id)
        if before.state not in PREPARED:
            raise RefusedTransactionError(ErrorCode.INVALID_TXN_STATE)
        return self._write(_completed(before, now_ms))

    def expire(self, transactional_id: str, now_ms: int) -> Write | None:
        """Decide on an ID that may have been idle for too long.

        Raises:
            RefusedTransactionError: The ID is being changed, or is gone.
        """
        before = self._idle(transactional_id)
        if not self._is_expired(before, now_ms):
            return None
        return self._write(replace(before, state=State.DEAD))

    def _is_expired(self, current: Transaction, now_ms: int) -> bool:
        is_old = current.updated_ms + self._limits.expiration_ms <= now_ms
        return current.state in IDLE and is_old

    # Records and offsets

    def check(
        self,
        transactional_id: str,
        writer: Writer,
        *,
        partition: Partition | None = None,
        group_id: str | None = None,
    ) -> None:
        """Check that a record batch, or offsets of a group, belong to the transaction (T2).

        Raises:
            RefusedTransactionError: They do not: TRANSACTION_ABORTABLE if they were not added.
        """
        entry = self._entries.get(transactional_id, _NO_ENTRY)
        if entry.current is None:
            raise RefusedTransactionError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        _check_writer(entry.current, writer)
        is_ending = entry.writing is not None and entry.writing.state is not State.ONGOING
        if is_ending or entry.current.state in PREPARED:
            raise RefusedTransactionError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if not _holds(entry.current, partition, group_id):
            will_hold = entry.writing is not None and _holds(entry.writing, partition, group_id)
            raise RefusedTransactionError(
                ErrorCode.CONCURRENT_TRANSACTIONS if will_hold else ErrorCode.TRANSACTION_ABORTABLE
            )


_NO_ENTRY: Final = _Entry()


def _holds(transaction: Transaction, partition: Partition | None, group_id: str | None) -> bool:
    if transaction.state is not State.ONGOING:
        return False
    has_partition = partition is None or partition in transaction.partitions
    return has_partition and (group_id is None or group_id in transaction.groups)


def _check_writer(current: Transaction, writer: Writer) -> None:
    if writer.producer_id != current.producer_id:
        raise RefusedTransactionError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    if writer.producer_epoch != current.producer_epoch:
        raise RefusedTransactionError(ErrorCode.PRODUCER_FENCED)


def _may_continue(before: Transaction, known: Writer) -> bool:
    """Whether a client has this producer ID, or had the one that this one replaced (T7)."""
    was_exhausted = known.producer_epoch >= LAST_EPOCH
    is_previous = known.producer_id == before.previous_id and was_exhausted
    return known.producer_id == before.producer_id or is_previous


def _initialized(before: Transaction, known: Writer | None, new_id: int) -> Transaction:
    """Return the next producer ID and epoch of an idle ID (T5, T7)."""
    if known is not None and known != (before.producer_id, before.producer_epoch):
        if known.producer_epoch != before.last_epoch:
            raise RefusedTransactionError(ErrorCode.PRODUCER_FENCED)
        return before
    last_epoch = NO_EPOCH if known is None else before.producer_epoch
    if before.is_exhausted:
        rotated = replace(before, producer_id=new_id, previous_id=before.producer_id)
        return replace(rotated, producer_epoch=0, last_epoch=last_epoch)
    return replace(before, producer_epoch=before.producer_epoch + 1, last_epoch=last_epoch)


def _fenced(before: Transaction, now_ms: int) -> Transaction:
    """Return the abort of an ongoing transaction with a higher epoch (T4)."""
    higher = replace(before, producer_epoch=before.producer_epoch + 1, last_epoch=NO_EPOCH)
    return _ended(higher, now_ms, is_commit=False)


def _prepared(
    before: Transaction, now_ms: int, *, is_commit: bool, is_v2: bool, new_id: int
) -> Transaction:
    """Return the end of a transaction on behalf of its client (T6, T7)."""
    if is_v2:
        next_id = new_id if before.is_exhausted else NO_ID
        epoch = before.producer_epoch
        before = replace(before, producer_epoch=epoch + 1, last_epoch=epoch, next_id=next_id)
    return _ended(before, now_ms, is_commit=is_commit)


def _ended(before: Transaction, now_ms: int, *, is_commit: bool) -> Transaction:
    state = State.PREPARE_COMMIT if is_commit else State.PREPARE_ABORT
    ended_ms = max(now_ms, before.ended_ms + 1)
    return replace(before, state=state, updated_ms=now_ms, ended_ms=ended_ms)


def _completed(before: Transaction, now_ms: int) -> Transaction:
    state = State.COMPLETE_COMMIT if before.is_commit else State.COMPLETE_ABORT
    after = replace(
        before, state=state, partitions=NO_PARTITIONS, groups=NO_GROUPS, updated_ms=now_ms
    )
    if before.next_id == NO_ID:
        return after
    rotated = replace(after, producer_id=before.next_id, previous_id=before.producer_id)
    return replace(rotated, producer_epoch=0, next_id=NO_ID)


def _has_ended(before: Transaction, writer: Writer) -> bool:
    """Whether the last EndTxn of transaction version 2 had this producer ID and epoch (T6)."""
    if before.state not in PREPARED | COMPLETE or writer.producer_epoch != before.last_epoch:
        return False
    if writer.producer_id == before.producer_id:
        return before.producer_epoch == writer.producer_epoch + 1
    return writer.producer_id == before.previous_id and before.producer_epoch == 0


def _is_overdue(current: Transaction, now_ms: int) -> bool:
    return current.state is State.ONGOING and current.started_ms + current.timeout_ms < now_ms
