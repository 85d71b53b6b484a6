"""Goal: each rule of the coordinator, T1 to T7, on its own."""

from __future__ import annotations

import pytest

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.producer_state import ProducerState, SequencedBatch
from logmirror.broker.transactions.coordinator import (
    Coordinator,
    Limits,
    RefusedTransactionError,
    Write,
    Writer,
)
from logmirror.broker.transactions.markers import marker_epoch
from logmirror.broker.transactions.transaction import LAST_EPOCH, State, Transaction
from logmirror.errors import CorruptionError

PARTITION = "t", 0
NOW_MS = 1_000_000


class World:
    """A coordinator whose writes are durable at once."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008  # immutable
        self.coordinator = Coordinator(limits)
        self.next_id = 100

    def do(self, write: Write | None) -> Write:
        """Make a write durable."""
        assert write is not None
        self.coordinator.wrote(write)
        return write

    def init(self, known: Writer | None = None) -> Writer:
        """InitProducerId."""
        self.next_id += 1
        return self.do(self.coordinator.init("id", 1000, known, self.next_id, NOW_MS)).client

    def begin(self, writer: Writer) -> None:
        """AddPartitionsToTxn."""
        partitions = frozenset({PARTITION})
        self.do(self.coordinator.add("id", writer, NOW_MS, partitions=partitions))

    def prepare(self, writer: Writer, *, is_commit: bool = True, is_v2: bool = False) -> Writer:
        """EndTxn, up to the durable outcome."""
        self.next_id += 1
        write = self.coordinator.end(
            "id", writer, NOW_MS, is_commit=is_commit, is_v2=is_v2, new_id=self.next_id
        )
        return self.do(write).client

    def complete(self) -> None:
        """All markers are durable."""
        self.do(self.coordinator.complete("id", NOW_MS))

    @property
    def current(self) -> Transaction:
        """The durable value."""
        current = self.coordinator.get("id")
        assert current is not None
        return current

    def check_code(self, writer: Writer) -> ErrorCode:
        """Return the outcome of a check of a batch."""
        try:
            self.coordinator.check("id", writer, partition=PARTITION)
        except RefusedTransactionError as refused:
            return refused.code
        return ErrorCode.NONE


@pytest.fixture
def world() -> World:
    """A coordinator without IDs."""
    return World()


def test_t1_one_change_of_an_id_at_a_time(world):
    writer = world.init()
    write = world.coordinator.add("id", writer, NOW_MS, partitions=frozenset({PARTITION}))

    with pytest.raises(RefusedTransactionError, match="CONCURRENT_TRANSACTIONS"):
        world.init()
    assert world.check_code(writer) is ErrorCode.CONCURRENT_TRANSACTIONS
    world.do(write)
    assert world.check_code(writer) is ErrorCode.NONE


def test_t1_a_failed_write_changes_nothing(world):
    write = world.coordinator.init("id", 1000, None, 7, NOW_MS)
    world.coordinator.failed(write)
    assert world.coordinator.get("id") is None
    assert len(world.coordinator) == 0
    writer = world.init()
    world.coordinator.failed(
        world.coordinator.add("id", writer, NOW_MS, partitions=frozenset({PARTITION}))
    )
    assert world.check_code(writer) is ErrorCode.TRANSACTION_ABORTABLE


@pytest.mark.parametrize("is_v2", [False, True])
def test_t2_no_record_enters_a_transaction_that_is_prepared(world, is_v2):
    writer = world.init()
    world.begin(writer)
    after = world.prepare(writer, is_v2=is_v2)

    assert world.check_code(after) is ErrorCode.CONCURRENT_TRANSACTIONS
    world.complete()
    assert world.check_code(after) is ErrorCode.TRANSACTION_ABORTABLE


def test_t3_what_is_prepared_is_due_until_it_is_complete(world):
    writer = world.init()
    world.begin(writer)
    assert world.coordinator.due(NOW_MS).prepared == []
    world.prepare(writer)

    again = Coordinator(Limits())
    key, value = world.current.transactional_id.encode(), world.current.to_bytes()
    again.load([(key, value)])
    assert again.get("id") == world.current
    assert again.due(NOW_MS).prepared == ["id"]
    world.complete()
    assert world.coordinator.due(NOW_MS).prepared == []
    with pytest.raises(RefusedTransactionError, match="INVALID_TXN_STATE"):
        world.complete()


def test_t4_a_new_client_aborts_the_transaction_of_the_zombie_with_a_higher_epoch(world):
    zombie = world.init()
    world.begin(zombie)
    fence = world.do(world.coordinator.init("id", 1000, None, -1, NOW_MS))

    assert fence.after.state is State.PREPARE_ABORT
    assert fence.after.producer_epoch == zombie.producer_epoch + 1
    assert world.check_code(zombie) is ErrorCode.PRODUCER_FENCED
    world.complete()
    assert world.init() == Writer(zombie.producer_id, zombie.producer_epoch + 2)


def test_t4_a_timeout_aborts_with_a_higher_epoch(world):
    writer = world.init()
    world.begin(writer)
    assert world.coordinator.due(NOW_MS + 1000).overdue == []
    assert world.coordinator.due(NOW_MS + 1001).overdue == ["id"]
    assert world.coordinator.abort_overdue("id", NOW_MS + 1000) is None

    world.do(world.coordinator.abort_overdue("id", NOW_MS + 1001))
    world.complete()

    assert world.current.state is State.COMPLETE_ABORT
    assert world.check_code(writer) is ErrorCode.PRODUCER_FENCED
    with pytest.raises(RefusedTransactionError, match="PRODUCER_FENCED"):
        world.begin(writer)


def test_t5_a_client_continues_with_the_next_epoch(world):
    first = world.init()
    second = world.init(first)

    assert second == Writer(first.producer_id, first.producer_epoch + 1)
    assert world.init(first) == second
    world.init()
    for old in (first, second, Writer(first.producer_id + 1, 0)):
        with pytest.raises(RefusedTransactionError, match="PRODUCER_FENCED"):
            world.init(old)


def test_t6_with_version_2_every_end_has_a_new_epoch_and_may_be_repeated(world):
    first = world.init()
    world.begin(first)
    second = world.prepare(first, is_v2=True)

    assert second == Writer(first.producer_id, first.producer_epoch + 1)
    assert world.current.producer_epoch == second.producer_epoch
    options = {"is_v2": True, "new_id": -1}
    with pytest.raises(RefusedTransactionError, match="CONCURRENT_TRANSACTIONS"):
        world.coordinator.end("id", first, NOW_MS, is_commit=True, **options)
    world.complete()
    assert world.coordinator.end("id", first, NOW_MS, is_commit=True, **options) is None
    with pytest.raises(RefusedTransactionError, match="INVALID_TXN_STATE"):
        world.coordinator.end("id", first, NOW_MS, is_commit=False, **options)
    third = world.prepare(second, is_commit=False, is_v2=True)
    assert world.current.state is State.COMPLETE_ABORT
    assert third.producer_epoch == second.producer_epoch + 1


@pytest.mark.parametrize("is_v2", [False, True])
def test_t7_an_exhausted_producer_id_is_replaced(world, is_v2):
    writer = world.init()
    while writer.producer_epoch < LAST_EPOCH:
        writer = world.init()
    world.begin(writer)
    after = world.prepare(writer, is_v2=is_v2)
    world.complete()

    if is_v2:
        assert after == Writer(world.next_id, 0)
        assert (
            world.coordinator.end("id", writer, NOW_MS, is_commit=True, is_v2=True, new_id=-1)
            is None
        )
        world.begin(after)
    else:
        assert after == writer
        assert world.init(writer) == Writer(world.next_id, 0)
        assert world.init(writer) == Writer(world.next_id - 1, 0)


def test_ids_are_limited_and_expire():
    world = World(Limits(max_ids=1, expiration_ms=500))
    world.init()
    with pytest.raises(RefusedTransactionError, match="POLICY_VIOLATION"):
        world.coordinator.init("other", 1000, None, 7, NOW_MS)
    assert world.coordinator.due(NOW_MS + 499).expired == []
    assert world.coordinator.due(NOW_MS + 500).expired == ["id"]

    write = world.do(world.coordinator.expire("id", NOW_MS + 500))

    assert write.row == ("transaction", b"id", None)
    assert len(world.coordinator) == 0
    world.do(world.coordinator.init("other", 1000, None, 7, NOW_MS))


def test_a_marker_is_written_once(world):
    state = ProducerState()
    writer = world.init()
    for number in range(2):
        world.begin(writer)
        if number == 0:
            batch = SequencedBatch(0, 0, 0, 0, NOW_MS)
            state.stored(*writer, batch, is_transactional=True)
        world.prepare(writer)
        assert marker_epoch(state, world.current) == 0
        state.marked(*writer, 0, world.current.ended_ms)
        state.transactions.ended(writer.producer_id, 1 + number, 1 + number, is_commit=True)
        assert marker_epoch(state, world.current) is None
        world.complete()


def test_a_marker_of_another_client_with_the_same_timestamp_does_not_replace_ours(world):
    state = ProducerState()
    writer = world.init()
    world.begin(writer)
    world.prepare(writer)
    state.marked(*writer, 9, world.current.ended_ms)
    batch = SequencedBatch(0, 0, 5, 5, world.current.ended_ms)
    state.stored(*writer, batch, is_transactional=True)

    assert marker_epoch(state, world.current) == 9


@pytest.mark.parametrize("value", [b"", b"[]", b'{"format":2}', b'{"format":1,"state":"Empty"}'])
def test_a_damaged_row_is_an_error(value):
    with pytest.raises(CorruptionError, match="stored transaction is damaged"):
        Coordinator(Limits()).load([(b"id", value)])
