"""Idempotent and transactional producers of a bucket's owners, and the rules for them.

A producer sends to one owner after the other, as their steps decide, also to one that was replaced.
As a Kafka client does, it sends a batch without a successful response again: with its sequence,
before all later ones, and at most five batches after the first of them. A transaction ends with a
marker that is written again until it is durable, as the coordinator does.

- C1 The log has each batch at most once, and those of a producer in the order of their sequences.
- C2 All successful responses for a batch have the offset of the first one, and it is readable.
- C3 An owner that was not replaced returns no error after which a producer cannot continue.
- C4 In the end each batch has a successful response, and each transaction has ended.
- C5 The last stable offset never goes back, and is never behind the first offset of an open
  transaction. In the end it is the high watermark.
- C6 A consumer with read_committed gets everything before the last stable offset, except for the
  records of aborted transactions.

C2 to C4 need records that are flushed before they are acknowledged. Otherwise a producer may get
OUT_OF_ORDER_SEQUENCE_NUMBER: it gives up what it has sent, and begins a new epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kit.runs.bucket_reads import MARKERS
from kit.runs.bucket_requests import mark, produce
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.partition_transactions import Marker
from logmirror.broker.log.producer_state import REMEMBERED_BATCHES, SEQUENCE_MASK
from logmirror.model import TimestampType
from logmirror.testing.checker import History, Truth
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.runs.bucket_brokers import Owner, Report, Sink
    from logmirror.errors import LogmirrorError
    from logmirror.wire.serve_produce import Produced

WRITERS: Final = ((0, False), (1, False), (0, True), (0, True))
"""Partition of each producer, and whether it has transactions. Partition 0 flushes on ack."""

_RETRIABLE: Final = frozenset({ErrorCode.REQUEST_TIMED_OUT, ErrorCode.KAFKA_STORAGE_ERROR})
_OUT_OF_ORDER: Final = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
_FIRST_SEQUENCE: Final = SEQUENCE_MASK - 6
"""Of the first epoch: sequences wrap soon. A producer without state may begin with any one."""

_FIRST_MS: Final = 1_000
_FIRST_ID: Final = 1_000


@dataclass(eq=False, slots=True)
class Transaction:
    """A transaction; `is_commit` is None while it is open."""

    is_commit: bool | None = None
    ended_ms: int = 0


@dataclass(eq=False, slots=True)
class _Batch:
    """A batch of a producer; `number` counts those of its epoch."""

    number: int
    sequence: int
    values: list[bytes]
    offset: int | None = None
    owner: int = 0
    """That stored it last."""


class Writer:
    """A producer.

    Args:
        clients: All producers.
        producer_id: Its ID.
        number: Its partition.
        is_transactional: Whether it has transactions.
    """

    def __init__(
        self, clients: Clients, producer_id: int, number: int, *, is_transactional: bool
    ) -> None:
        self._clients, self.producer_id, self.number = clients, producer_id, number
        self.is_transactional = is_transactional
        self._epoch = self._count = 0
        self._sequence = _FIRST_SEQUENCE
        self._unfinished: list[_Batch] = []
        self._transaction: Transaction | None = None
        self._owner: Owner | None = None
        self._connection = 0
        self._is_broken = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing waits for a response, and no transaction for its end."""
        return not self._unfinished and self._transaction is None

    def _connect(self, owner: Owner) -> None:
        """Send everything without a response again, if the owner or the connection is new."""
        if self._owner is owner and not self._is_broken:
            return
        self._owner, self._is_broken = owner, False
        self._connection += 1
        for batch in tuple(self._unfinished):
            if batch in self._unfinished:
                self._produce(owner, batch)
        self._mark(owner)

    def _lose_connection(self) -> None:
        self._connection += 1
        self._is_broken = True

    def send(self, owner: Owner, count: int, *, is_lost: bool) -> None:
        """Send a new batch, if the producer may.

        Args:
            owner: Receives it.
            count: Number of records.
            is_lost: Whether the connection breaks before the response.
        """
        self._connect(owner)
        first = self._unfinished[0].number if self._unfinished else self._count
        is_ending = self._transaction is not None and self._transaction.is_commit is not None
        if not is_ending and self._count - first < REMEMBERED_BATCHES:
            if self.is_transactional and self._transaction is None:
                self._transaction = Transaction()
            values = self._clients.new_values(self, count, self._transaction)
            batch = _Batch(self._count, self._sequence, values)
            self._count += 1
            self._sequence = (self._sequence + count) & SEQUENCE_MASK
            self._unfinished.append(batch)
            self._produce(owner, batch)
        if is_lost:
            self._lose_connection()

    def _produce(self, owner: Owner, batch: _Batch) -> None:
        connection = self._connection
        kind = TimestampType.CREATE_TIME
        data = encode_reference(
            [Record(at, _FIRST_MS, kind, None, one, ()) for at, one in enumerate(batch.values)],
            producer_id=self.producer_id,
            producer_epoch=self._epoch,
            base_sequence=batch.sequence,
            transactional=self.is_transactional,
        )

        def done(produced: Produced) -> None:
            self._responded(owner, connection, batch, produced)

        produce(owner, self.number, data, batch.values, done)

    def _responded(self, owner: Owner, connection: int, batch: _Batch, produced: Produced) -> None:
        code, is_durable = produced.error, owner.is_flushed[self.number]
        self._clients.happened[ErrorCode(code).name] += 1
        if code == 0:
            self._clients.stored(owner, self.number, batch, produced)
        elif code == _OUT_OF_ORDER:
            if is_durable and not self._clients.is_replaced(owner):
                self._clients.found(owner, self.number, f"out of order: {batch}")
        elif code not in _RETRIABLE:
            self._clients.found(owner, self.number, f"error {code} for {batch}")
        if connection != self._connection or batch not in self._unfinished:
            return
        if code == 0:
            self._unfinished.remove(batch)
        elif code == _OUT_OF_ORDER and not is_durable:
            self._give_up()
        else:
            self._is_broken = True

    def _give_up(self) -> None:
        """Begin a new epoch."""
        self._unfinished.clear()
        self._epoch += 1
        self._sequence = self._count = 0
        self._lose_connection()

    # Transactions

    def end(self, owner: Owner, *, is_commit: bool, is_lost: bool) -> None:
        """End the transaction, if there is one; it is aborted if it has batches without response.

        Args:
            owner: Writes the marker.
            is_commit: Whether to commit.
            is_lost: Whether the connection breaks before the response.
        """
        self._connect(owner)
        transaction = self._transaction
        if transaction is not None and transaction.is_commit is None:
            if self._unfinished:
                is_commit = False
                self._give_up()
            transaction.is_commit, transaction.ended_ms = is_commit, self._clients.next_ms()
            self._mark(owner)
        if is_lost:
            self._lose_connection()

    def _mark(self, owner: Owner) -> None:
        transaction, connection = self._transaction, self._connection
        if transaction is None or transaction.is_commit is None:
            return

        def done(failure: LogmirrorError | None) -> None:
            if connection != self._connection or transaction is not self._transaction:
                return
            if failure is not None:
                self._is_broken = True
            else:
                self._transaction = None
                self._clients.happened["committed" if transaction.is_commit else "aborted"] += 1

        marker = Marker(self.producer_id, self._epoch, transaction.is_commit, 0)
        mark(owner, self.number, marker, transaction.ended_ms, done)

    def finish(self, owner: Owner) -> None:
        """Send everything again that has no response, or else end the transaction."""
        if self._unfinished:
            self._is_broken = True
            self._connect(owner)
        else:
            self.end(owner, is_commit=True, is_lost=False)


class Clients:
    """All producers, and what is wrong with what they got.

    Args:
        sink: Knows the values.
        is_replaced: Whether another owner has taken the bucket over.
        problems: Receives what is wrong.

    Attributes:
        all: The producers.
        happened: How often something happened that a run is for.
    """

    def __init__(
        self, sink: Sink, is_replaced: Callable[[Owner], bool], problems: Callable[[str], None]
    ) -> None:
        self._sink, self.is_replaced, self._problems = sink, is_replaced, problems
        self.all = [
            Writer(self, _FIRST_ID + at, number, is_transactional=is_transactional)
            for at, (number, is_transactional) in enumerate(WRITERS)
        ]
        self._writers: dict[bytes, tuple[Writer, Transaction | None]] = {}
        self._stables: dict[int, History] = {}
        self._ended_ms = _FIRST_MS
        self.happened: Counter[str] = Counter()

    def next_ms(self) -> int:
        """Return the time at which a transaction ends: another one each time."""
        self._ended_ms += 1
        return self._ended_ms

    def new_values(self, writer: Writer, count: int, within: Transaction | None) -> list[bytes]:
        """Return the values of a new batch."""
        values = [self._sink.new_value() for _ in range(count)]
        self._writers.update((one, (writer, within)) for one in values)
        return values

    def found(self, owner: Owner, number: int, problem: str) -> None:
        """Note what is wrong."""
        self._problems(f"partition {number}, owner {owner.number}: {problem}")

    def stored(self, owner: Owner, number: int, batch: _Batch, produced: Produced) -> None:
        """Note a successful response (C2)."""
        base = produced.base_offset
        if produced.append_time_ms >= 0:
            is_same = batch.owner == owner.number
            self.happened["duplicate" if is_same else "duplicate of another owner"] += 1
        else:
            batch.owner = owner.number
        for offset, value in enumerate(batch.values, base):
            if offset >= owner.logs[number].log_start:
                self._sink.acked(owner, number, offset, value)
        if owner.is_flushed[number]:
            if batch.offset not in {None, base}:
                self.found(owner, number, f"another response had {batch.offset}, not {base}")
            batch.offset = base

    def read(self, owner: Owner, number: int, report: Report, now: int, began: int) -> None:
        """Note what consumers got (C1, C5, C6).

        Args:
            owner: From which owner.
            number: The partition.
            report: What the owner says, and what was read.
            now: The turn.
            began: The turn at which the owner began to take the bucket over.
        """
        if owner.is_flushed[number]:
            stables = self._stables.setdefault(number, History())
            stables.reported(f"owner {owner.number}", report.stable, at_ms=now, began_ms=began)
        if report.records is None:
            return
        last: dict[Writer, bytes] = {}
        for offset, value in sorted(report.records.items()):
            writer, _ = self._writers.get(value, (None, None))
            if writer is not None and value <= last.get(writer, b""):
                self.found(owner, number, f"{value!r} at {offset} is behind {last[writer]!r}")
            if writer is not None:
                last[writer] = value
        if report.committed is not None:
            self._read_committed(owner, number, report, report.records, report.committed)

    def _read_committed(
        self,
        owner: Owner,
        number: int,
        report: Report,
        records: Mapping[int, bytes],
        found: Mapping[int, bytes],
    ) -> None:
        expected = {}
        for offset, value in records.items():
            _, within = self._writers.get(value, (None, None))
            if offset >= report.stable or value in MARKERS.values():
                continue
            if within is not None and within.is_commit is None:
                self.found(owner, number, f"{offset} is before {report.stable}, and undecided")
            if within is None or within.is_commit:
                expected[offset] = value
        if found != expected:
            self.found(owner, number, f"committed are {expected}, read were {found}")

    def judge(self, last: Owner) -> list[str]:
        """Return what is wrong in the end, when the producers have finished (C4, C5)."""
        for writer in self.all:
            if not writer.is_finished:
                self.found(last, writer.number, f"producer {writer.producer_id} is not finished")
        for number, log in enumerate(last.logs):
            if log.last_stable_offset != log.high_watermark:
                self.found(last, number, f"last stable offset: {log.last_stable_offset}")
        found = [
            one for stables in self._stables.values() for one in stables.judge(Truth(rows=()), ())
        ]
        return [f"last stable offset: {one.code}: {one.example}" for one in found]
