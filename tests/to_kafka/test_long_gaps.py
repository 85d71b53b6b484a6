"""Gaps and heads that take longer than a slice: it ends in time, and the next one continues there.

Method: the product's gap writer and tail check against a scripted destination, where each request
takes a fixed time of a clock that moves only then.
"""

from dataclasses import dataclass, field

import pytest

from kit.fakes.scripted import Log, batches
from kit.fakes.scripted_copies import World, transactional_log, value
from logmirror.cluster.offsets import LogEnd
from logmirror.cluster.produce_responses import ProduceResponse
from logmirror.cluster.transactions import ProducerIdentity
from logmirror.mirror.follow import LONG_MS, SLICE_MS
from logmirror.to_kafka.gap_writer import MARKERS_MAX, TRANSACTIONS_MAX, GapWriter
from logmirror.to_kafka.preserve_transfer import TURN_MS
from logmirror.to_kafka.tail_check import PADDING_RECORDS, TailCheck
from logmirror.wire.batch_header import parse_header
from logmirror.wire.decode import RecordDecoder

LONG = 10_000_000
STEP_MS = 20
"""How long the scripted destination takes for a request that writes."""

SLACK_MS = 2 * TURN_MS + 10 * STEP_MS


@dataclass
class Cluster:
    """What gap writer and tail check send to a destination; `world.destination` holds the ends."""

    world: World
    permits_markers: bool = True
    on_step: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    """The number of offsets that each request took."""

    heads: list = field(default_factory=list)
    """Log start offsets after each DeleteRecords."""

    def __post_init__(self):
        self.admin = self

    def take(self, partition, count):
        self.world.clock.sleep_ms(STEP_MS)
        self.world.destination.ends[partition.partition] += count
        self.steps.append(count)
        for act in self.on_step:
            act()

    def end(self, partition):
        return self.world.destination.ends[partition.partition]

    def log_ends(self, partitions):
        return {each: LogEnd(self.end(each), 0) for each in partitions}

    def has_leases(self):
        return False

    def may_write_markers(self):
        return self.permits_markers

    def write_txn_markers(self, markers, *, send_until_ms):
        assert send_until_ms is None
        for partition, each in markers.items():
            assert len(each) <= MARKERS_MAX
            self.take(partition, len(each))
        return dict.fromkeys(markers)

    def transactional_producer(self, transactional_id, *, timeout_ms):
        del transactional_id, timeout_ms
        return EmptyTransactions(self)

    def list_offsets(self, partitions, _at):
        return {each: max(self.heads, default=0) for each in partitions}

    def delete_records(self, before):
        ((partition, offset),) = before.items()
        assert offset == self.end(partition)
        self.heads.append(offset)

    def send(self, sent, *, not_after_ms):
        ((partition, view),) = sent
        assert self.world.clock.monotonic_ms() < not_after_ms
        header = parse_header(bytes(view), 0)
        self.response = ProduceResponse(partition, 0, self.end(partition), -1, 0, None)
        self.take(partition, header.last_offset_delta + 1)

    def collect(self, *, block):
        assert block
        return [self.response]


@dataclass
class EmptyTransactions:
    """One transactional ID; the marker is in the log when the transaction ends."""

    cluster: Cluster
    has_stray = False
    partition = None

    def init(self):
        return ProducerIdentity(1, 0)

    def add_partitions(self, partitions):
        (self.partition,) = partitions

    def end(self, *, commit):
        assert not commit
        self.cluster.take(self.partition, 1)

    def await_markers(self):
        pass


def world_with_gap(first, end, **options):
    """A compacted source without the offsets first..end-1, and the destination."""
    world = World(Log([*batches(0, first), *batches(end, end + 5)]))
    cluster = Cluster(world, **options)
    world.gap_writer = GapWriter(cluster, world.clock)
    return world, cluster


def slices(world, *, until, **fields):
    """Run slices as the driver does, each where the one before has ended; yield their results."""
    position, checked = 0, fields.get("tail_checked", True)
    while position < until:
        begun_ms = world.clock.ms
        (result,) = world.run(position, **{**fields, "tail_checked": checked})
        assert result.error is None
        assert result.next_offset > position
        assert world.destination.ends[0] == result.next_offset
        assert world.clock.ms - begun_ms <= SLICE_MS + SLACK_MS, "the slice ends in time"
        (receipt,) = result.receipts
        assert (receipt.covered.first, receipt.covered.last) == (position, result.next_offset - 1)
        position, checked = result.next_offset, checked or result.tail_checked
        yield result


def test_a_gap_of_ten_million_offsets_is_filled_over_many_slices():
    world, cluster = world_with_gap(5, 5 + LONG)

    results = list(slices(world, until=LONG + 10, compacted=True))

    assert len(results) > 100
    assert sum(cluster.steps) == LONG
    assert sum(r.receipts[0].gaps.compacted for r in results) == LONG
    assert world.destination.ends[0] == LONG + 10, "the log end is exact"
    wanted = [*range(5), *range(LONG + 5, LONG + 10)]
    assert world.destination.values() == [(n, value(n)) for n in wanted]


def test_a_gap_of_empty_transactions_is_filled_over_many_slices():
    count = 1_000
    world, cluster = world_with_gap(5, 5 + count, permits_markers=False)

    # Each takes 20 ms, so a step takes longer than a turn.
    results = list(slices_of_long_steps(world, until=count + 10))

    assert len(results) > 5
    assert len(cluster.steps) == count
    wanted = [*range(5), *range(count + 5, count + 10)]
    assert world.destination.values() == [(n, value(n)) for n in wanted]


def slices_of_long_steps(world, *, until):
    position = 0
    while position < until:
        begun_ms = world.clock.ms
        (result,) = world.run(position, compacted=True)
        assert result.error is None
        assert world.clock.ms - begun_ms <= SLICE_MS + TRANSACTIONS_MAX * STEP_MS + SLACK_MS
        assert result.next_offset > position
        position = result.next_offset
        yield result


def test_a_head_of_ten_million_offsets_is_filled_over_several_slices():
    world = World(Log(batches(LONG, LONG + 5), log_start=LONG))
    cluster = Cluster(world)
    cluster.on_step.append(lambda: world.clock.sleep_ms(180))
    world.tail_check = TailCheck(cluster, cluster, RecordDecoder(), world.clock)

    results = list(slices(world, until=LONG + 5, tail_checked=False))

    assert len(results) > 1
    assert [r.tail_checked for r in results] == [r.next_offset >= LONG for r in results]
    assert not results[0].tail_checked
    assert cluster.steps == [PADDING_RECORDS] * (LONG // PADDING_RECORDS)
    assert cluster.heads[-1] == LONG
    assert sum(r.receipts[0].gaps.compacted for r in results) == LONG
    assert world.destination.values() == [(n, value(n)) for n in range(LONG, LONG + 5)]


@pytest.mark.parametrize("head", [False, True])
def test_a_stop_in_the_middle_ends_the_slice_within_one_turn(head):
    if head:
        world = World(Log(batches(LONG, LONG + 5), log_start=LONG))
        cluster = Cluster(world)
        cluster.on_step.append(lambda: world.clock.sleep_ms(500))
        world.tail_check = TailCheck(cluster, cluster, RecordDecoder(), world.clock)
    else:
        world, cluster = world_with_gap(5, 5 + LONG)
    stopped = []

    def stop():
        if world.clock.ms >= LONG_MS // 2 and not stopped:
            stopped.append(world.clock.ms)
            world.window.end()

    cluster.on_step.append(stop)

    (result,) = world.run(window_ms=LONG_MS, compacted=True, tail_checked=not head)

    assert result.error is None
    assert stopped[0] >= LONG_MS // 2
    assert world.clock.ms - stopped[0] <= SLACK_MS
    assert 0 < result.next_offset < LONG
    assert world.destination.ends[0] == result.next_offset
    assert result.tail_checked is not head


@pytest.mark.parametrize("response_batches", [1, 2, 10])
def test_a_gap_continues_inside_aborted_batches(response_batches):
    world = World(transactional_log(), response_batches=response_batches)
    world.gap_writer.step, world.gap_writer.step_ms = 1, TURN_MS

    results = list(slices(world, until=16))

    taken = [n for _, first, end in world.gap_writer.filled for n in range(first, end)]
    assert taken == [5, 6, 7, 8, 9, 10, 13]
    assert len(world.gap_writer.filled) == len(taken), "one in each turn"
    assert sum(r.receipts[0].gaps.aborted for r in results) == 5
    assert sum(r.receipts[0].gaps.control for r in results) == 2
    kept = [0, 1, 2, 3, 4, 11, 12, 14, 15]
    assert world.destination.values() == [(n, value(n)) for n in kept]


def test_a_long_gap_does_not_hold_up_other_partitions():
    world = World(
        Log([*batches(0, 5), *batches(LONG, LONG + 5)]), *(Log(batches(0, 100)) for _ in range(3))
    )
    world.gap_writer = GapWriter(Cluster(world), world.clock)

    results = world.run(compacted=True)

    assert [result.error for result in results] == [None] * 4
    assert [result.next_offset for result in results[1:]] == [100] * 3
    assert 5 < results[0].next_offset < LONG
    assert world.clock.ms <= SLICE_MS + SLACK_MS
