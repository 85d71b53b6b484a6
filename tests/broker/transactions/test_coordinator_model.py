"""Goal: a transaction is visible as a whole or not at all, whatever clients and crashes do.

Method: a hypothesis state machine. Clients of both transaction versions, zombies among them, act on
a few transactional IDs and partitions; writes become durable one by one; the broker crashes between
any two steps. The log side is the real producer state. A reader with read_committed judges.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.tiers import sized
from logmirror.broker.log.producer_state import (
    ProducerState,
    RefusedSequenceError,
    SequencedBatch,
)
from logmirror.broker.transactions.coordinator import (
    Coordinator,
    Limits,
    RefusedTransactionError,
    Write,
    Writer,
)
from logmirror.broker.transactions.markers import marker_epoch
from logmirror.broker.transactions.transaction import PREPARED, State

IDS = ("a", "b")
PARTITIONS = (("t", 0), ("t", 1))
TIMEOUT_MS = 1000

IDS_OF = st.sampled_from(("a", "a", "a", "b"))
CHOICES = st.integers(0, 1 << 30) | st.just(-1)
"""Which of several; the last one more often than the others."""


class Entry(NamedTuple):
    """One batch or marker of a log."""

    producer_id: int
    tag: tuple[int, int] | None
    """Client and number of its transaction; None for a marker."""


class Sent(NamedTuple):
    """A batch in flight."""

    transactional_id: str
    writer: Writer
    partition: tuple[str, int]
    sequence: int
    tag: tuple[int, int]


@dataclass
class Log:
    """A partition: its producer state is what the broker has."""

    producers: ProducerState = field(default_factory=ProducerState)
    entries: list[Entry] = field(default_factory=list)
    stable: int = 0

    def committed(self) -> list[Entry]:
        """Return what a reader with read_committed gets: Kafka's rules for clients."""
        end = self.producers.transactions.stable_end(len(self.entries), 0)
        aborted = sorted(
            self.producers.transactions.aborted_between(0, end), key=lambda one: one.first_offset
        )
        skipped: set[int] = set()
        found = []
        for offset, entry in enumerate(self.entries[:end]):
            while aborted and aborted[0].first_offset <= offset:
                skipped.add(aborted.pop(0).producer_id)
            if entry.tag is None:
                skipped.discard(entry.producer_id)
            elif entry.producer_id not in skipped:
                found.append(entry)
        return found


@dataclass
class Client:
    """A client with what it was given, and what it has seen of its transactions."""

    number: int
    transactional_id: str
    writer: Writer
    is_v2: bool
    transaction: int = 0
    sequences: dict[tuple[str, int], int] = field(default_factory=dict)
    ending: bool | None = None
    """The outcome that it has asked for. It asks for nothing else until it knows that it has it."""

    def renew(self, writer: Writer) -> None:
        """Continue with the next epoch or transaction."""
        if writer != self.writer:
            self.sequences.clear()
        self.writer = writer
        self.transaction += 1
        self.ending = None


class Transactions(RuleBasedStateMachine):
    """The coordinator, its store, the logs, and clients."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(Limits(900_000, 10_000, 10))
        self.stored: dict[bytes, bytes] = {}
        self.queue: list[tuple[Write, object]] = []
        self.logs = {partition: Log() for partition in PARTITIONS}
        self.clients: list[Client] = []
        self.fenced: set[int] = set()
        self.acked: dict[tuple[int, int], bool] = {}
        self.accepted: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
        self.late: list[Sent] = []
        self.now_ms = 1000
        self.next_id = 100

    def teardown(self) -> None:
        """Time passes until nothing is left to do; then everything must be decided."""
        for _ in range(4):
            self._finish()
            self.now_ms += 2 * TIMEOUT_MS
            self.sweep()
        self._finish()
        for log in self.logs.values():
            stable = log.producers.transactions.stable_end(len(log.entries), 0)
            assert stable == len(log.entries), "a transaction hangs"
        visible: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
        for partition, log in self.logs.items():
            for entry in log.committed():
                assert entry.tag is not None
                visible[entry.tag].append(partition)
        for tag, partitions in self.accepted.items():
            assert sorted(visible[tag]) in ([], sorted(partitions)), f"{tag} is torn"
            if tag in self.acked:
                wanted = sorted(partitions) if self.acked[tag] else []
                assert sorted(visible[tag]) == wanted, f"{tag} has another outcome"

    # What the broker does

    def _make(self, write: Write | None, done: object = None, *, waits: bool = False) -> None:
        """Hand a write to the store; the client may wait until it is durable."""
        if write is not None:
            self.queue.append((write, done))
        while waits and self.queue:
            self.flush()

    @rule()
    def flush(self) -> None:
        """One write becomes durable."""
        if not self.queue:
            return
        write, done = self.queue.pop(0)
        _, key, value = write.row
        if value is None:
            self.stored.pop(key, None)
        else:
            self.stored[key] = value
        self.coordinator.wrote(write)
        if callable(done):
            done(write)

    @rule(which=st.sampled_from(PARTITIONS), name=IDS_OF)
    def mark(self, which: tuple[str, int], name: str) -> None:
        """One marker of a prepared transaction is written."""
        current = self.coordinator.get(name)
        if current is None or current.state not in PREPARED or which not in current.partitions:
            return
        log = self.logs[which]
        epoch = marker_epoch(log.producers, current)
        if epoch is None:
            return
        writer = current.producer_id, current.producer_epoch
        log.producers.check_marker(*writer, epoch)
        log.producers.marked(*writer, epoch, current.ended_ms)
        offset = len(log.entries)
        transactions = log.producers.transactions
        transactions.ended(current.producer_id, offset, offset, is_commit=current.is_commit)
        log.entries.append(Entry(current.producer_id, None))

    @rule(name=IDS_OF)
    def complete(self, name: str) -> None:
        """A prepared transaction with all markers is completed."""
        current = self.coordinator.get(name)
        if current is None or current.state not in PREPARED:
            return
        logs = [self.logs[partition] for partition in current.partitions]
        if all(marker_epoch(log.producers, current) is None for log in logs):
            try:
                self._make(self.coordinator.complete(name, self.now_ms))
            except RefusedTransactionError:
                return

    @rule()
    def sweep(self) -> None:
        """What is due by time."""
        due = self.coordinator.due(self.now_ms)
        for name in due.overdue:
            self._make(self.coordinator.abort_overdue(name, self.now_ms))
        for name in due.expired:
            self._make(self.coordinator.expire(name, self.now_ms))

    @rule()
    def finish(self) -> None:
        """Everything that was begun ends."""
        self._finish()

    def _finish(self) -> None:
        """Everything that is prepared ends."""
        for _ in range(4):
            while self.queue:
                self.flush()
            for name in IDS:
                for partition in PARTITIONS:
                    self.mark(partition, name)
                self.complete(name)

    @rule(lost=st.integers(0, 100))
    def crash(self, lost: int) -> None:
        """The broker ends and starts again; some writes had become durable, in order."""
        for _ in range(lost % (len(self.queue) + 1)):
            self.flush()
        self.queue.clear()
        self.coordinator = Coordinator(Limits(900_000, 10_000, 10))
        self.coordinator.load(self.stored.items())
        for log in self.logs.values():
            data = log.producers.to_bytes(7)
            log.producers = ProducerState.from_bytes(data, 7)
            assert log.producers.to_bytes(7) == data

    @rule(step_ms=st.integers(1, 2 * TIMEOUT_MS))
    def wait(self, step_ms: int) -> None:
        """Time passes."""
        self.now_ms += step_ms

    # What clients do

    @rule(name=IDS_OF, is_v2=st.booleans(), waits=st.booleans())
    def start(self, name: str, is_v2: bool, waits: bool) -> None:
        """A new client initializes its transactions, and every older one is a zombie."""

        def started(write: Write) -> None:
            if write.after.state is State.EMPTY:
                self.fenced |= {one.number for one in self.clients if one.transactional_id == name}
                self.clients.append(Client(len(self.clients), name, write.client, is_v2))

        self.next_id += 1
        try:
            write = self.coordinator.init(name, TIMEOUT_MS, None, self.next_id, self.now_ms)
        except RefusedTransactionError:
            return
        self._make(write, started, waits=waits)

    def _client(self, which: int) -> Client | None:
        return self.clients[which % len(self.clients)] if self.clients else None

    @rule(which=CHOICES)
    def start_again(self, which: int) -> None:
        """A client increments its epoch (KIP-360); its open transaction is lost."""
        client = self._client(which)
        if client is None:
            return

        def started(write: Write) -> None:
            if write.after.state is State.EMPTY:
                assert client.number not in self.fenced, "a zombie got an epoch"
                client.renew(write.client)

        self.next_id += 1
        now_ms, name = self.now_ms, client.transactional_id
        try:
            write = self.coordinator.init(name, TIMEOUT_MS, client.writer, self.next_id, now_ms)
        except RefusedTransactionError:
            return
        self._make(write, started)

    @rule(which=CHOICES, partition=st.sampled_from(PARTITIONS), joins=st.booleans())
    def add(self, which: int, partition: tuple[str, int], joins: bool) -> None:
        """A client adds a partition to its transaction, and may wait for the response."""
        client = self._client(which)
        if client is None or client.ending is not None:
            return
        name, added = client.transactional_id, frozenset({partition})
        try:
            write = self.coordinator.add(name, client.writer, self.now_ms, partitions=added)
        except RefusedTransactionError:
            return
        assert client.number not in self.fenced, "a zombie added a partition"
        self._make(write, waits=joins)

    @rule(which=CHOICES, partition=st.sampled_from(PARTITIONS), is_late=st.booleans())
    def produce(self, which: int, partition: tuple[str, int], is_late: bool) -> None:
        """A client sends a batch of one record, which may arrive late.

        Clients of version 1 are not protected from late batches: that is what version 2 is for.
        """
        client = self._client(which)
        if client is None or client.ending is not None:
            return
        sequence = client.sequences.get(partition, 0)
        client.sequences[partition] = sequence + 1
        tag = client.number, client.transaction
        batch = Sent(client.transactional_id, client.writer, partition, sequence, tag)
        if is_late and client.is_v2:
            self.late.append(batch)
        elif not self._arrived(batch):
            client.sequences[partition] = sequence

    @rule(which=CHOICES)
    def arrive(self, which: int) -> None:
        """A late batch arrives."""
        if self.late:
            self._arrived(self.late.pop(which % len(self.late)))

    def _arrived(self, batch: Sent) -> bool:
        log, writer = self.logs[batch.partition], batch.writer
        try:
            self.coordinator.check(batch.transactional_id, writer, partition=batch.partition)
            found = log.producers.find_duplicate(*writer, batch.sequence, 1, is_transactional=True)
        except (RefusedTransactionError, RefusedSequenceError):
            return False
        assert batch.tag[0] not in self.fenced, "a zombie wrote"
        assert found is None
        offset = len(log.entries)
        stored = SequencedBatch(batch.sequence, batch.sequence, offset, offset, self.now_ms)
        log.producers.stored(*writer, stored, is_transactional=True)
        log.entries.append(Entry(writer.producer_id, batch.tag))
        self.accepted[batch.tag].append(batch.partition)
        return True

    @rule(which=CHOICES, is_commit=st.booleans(), is_lost=st.booleans(), waits=st.booleans())
    def end(self, which: int, is_commit: bool, is_lost: bool, waits: bool) -> None:
        """A client ends its transaction. If the response is lost, it may repeat the request."""
        client = self._client(which)
        if client is None:
            return
        if client.ending is not None:
            is_commit = client.ending
        tag = client.number, client.transaction

        def ended(writer: Writer) -> None:
            assert self.acked.setdefault(tag, is_commit) == is_commit
            if not is_lost:
                client.renew(writer if client.is_v2 else client.writer)

        self.next_id += 1
        try:
            write = self.coordinator.end(
                client.transactional_id,
                client.writer,
                self.now_ms,
                is_commit=is_commit,
                is_v2=client.is_v2,
                new_id=self.next_id,
            )
        except RefusedTransactionError:
            return
        client.ending = is_commit
        if write is not None:
            self._make(write, lambda write: ended(write.client), waits=waits)
            return
        current = self.coordinator.get(client.transactional_id)
        assert current is not None
        if client.is_v2 or self.acked.get(tag) is not None:
            ended(Write(current).client)

    # What must hold at any time

    @invariant()
    def the_last_stable_offset_never_moves_back(self) -> None:
        """Of no partition."""
        for log in self.logs.values():
            stable = log.producers.transactions.stable_end(len(log.entries), 0)
            assert stable >= log.stable
            log.stable = stable

    @invariant()
    def nothing_of_an_open_or_aborted_transaction_is_visible(self) -> None:
        """A reader gets a record only after its commit was decided."""
        for log in self.logs.values():
            for entry in log.committed():
                assert entry.tag is not None
                assert self.acked.get(entry.tag), "a record is visible without its commit"


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(
    max_examples=sized(400, 1500, 10_000), stateful_step_count=50, deadline=None
)
