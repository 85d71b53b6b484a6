"""How many batches are at wrong offsets when something comes between a reading and the data.

Method: a scripted destination, whose log takes one more offset (a transaction marker that comes
late, or a record of another client) after the last reading of its end and before the next batch.
"""

import pytest

from kit.fakes.scripted import Log, batches
from kit.fakes.scripted_copies import (
    World,
    arrive_while_waiting,
    large_batches,
    slow_fetch,
    value,
)
from logmirror.errors import PositionError
from logmirror.to_kafka.idempotence import SEND_DEADLINE_MS
from logmirror.to_kafka.partition_writer import IN_FLIGHT_MAX


def misplaced(world):
    """Return the offsets of records that are not where the source has them."""
    return [offset for offset, found in world.destination.values() if found[:12] != place(offset)]


def place(offset):
    return value(offset).ljust(12, b"x")


def append_another(world, *, before):
    """The log takes an offset before the batch with this first offset is appended."""
    destination = world.destination
    append = destination.append

    def late(where, batch):
        if destination.ends[0] == before:
            destination.ends[0] += 1
        return append(where, batch)

    destination.append = late


def assert_one_is_misplaced(world, result, at):
    facts = result.error.facts
    assert type(result.error) is PositionError
    assert (facts["reason"], facts["expected"], facts["found"]) == ("ForeignRecord", at, at + 1)
    assert misplaced(world) == [at + 1]
    assert facts["misplaced_batches"] == 1
    assert result.next_offset == at


def test_one_batch_after_a_start():
    world = World(Log(large_batches(0, 80)))
    append_another(world, before=0)

    (result,) = world.run()

    assert_one_is_misplaced(world, result, 0)


@pytest.mark.parametrize("response_batches", [3, 200])
def test_one_batch_after_a_gap(response_batches):
    """A transaction marker that is written twice, the second time after the log end was read."""
    world = World(
        Log([*large_batches(0, 70), *large_batches(71, 150)]), response_batches=response_batches
    )
    append_another(world, before=71)

    (result,) = world.run(compacted=True)

    assert world.gap_writer.filled == [(0, 70, 71)]
    assert_one_is_misplaced(world, result, 71)


def test_one_batch_after_the_log_end_was_read_again():
    world = World(Log(large_batches(0, 80)), response_batches=200)
    world.source.fetch = slow_fetch(world, SEND_DEADLINE_MS + 1)
    append_another(world, before=0)

    (result,) = world.run(in_flight_max=IN_FLIGHT_MAX)

    assert world.destination.looks == 2
    assert_one_is_misplaced(world, result, 0)


def test_one_batch_after_a_pause():
    world = World(Log(large_batches(0, 10)), response_batches=200)
    log = next(iter(world.source.logs.values()))
    arrive_while_waiting(world, {2 * SEND_DEADLINE_MS: (log, 10, 400)})
    append_another(world, before=10)

    (result,) = world.run(window_ms=3 * SEND_DEADLINE_MS)

    facts = result.error.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("ForeignRecord", 10, 11)
    assert len(world.destination.logs[0]) == 11


def test_batches_in_flight_behind_a_record_of_another_client_are_counted():
    """Nothing keeps it out in the middle of a stream: brokers do not compare offsets."""
    world = World(Log(large_batches(0, 300)), response_batches=300)
    append_another(world, before=200)

    (result,) = world.run()

    facts = result.error.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("ForeignRecord", 200, 201)
    assert facts["misplaced_batches"] == len(misplaced(world)) == IN_FLIGHT_MAX
    assert misplaced(world) == list(range(201, 201 + IN_FLIGHT_MAX))


def test_a_slice_that_continues_another_begins_with_its_window():
    world = World(Log(large_batches(0, 300)), response_batches=200)
    (first,) = world.run(end=150)
    world.destination.most_in_flight = 0

    (second,) = world.run(150, end=215, in_flight_max=first.in_flight_max)

    assert first.in_flight_max == second.in_flight_max == IN_FLIGHT_MAX
    assert world.destination.most_in_flight == IN_FLIGHT_MAX
    assert misplaced(world) == []


def test_the_window_is_open_after_a_few_responses():
    """Here each response arrives alone; over a link, several of one round trip open it faster."""
    world = World(Log(large_batches(0, 200)), response_batches=200)
    seen = []
    world.destination.on_send.append(lambda: seen.append(len(world.destination.responses)))

    (result,) = world.run()

    assert result.error is None
    assert [seen.index(n) for n in (1, 3, 7, 15, 31, 63)] == [2, 5, 10, 19, 36, 69]


def test_small_batches_of_many_partitions_still_share_requests():
    world = World(*(Log(batches(0, 5)) for _ in range(50)), response_batches=5)

    results = world.run()

    assert all(result.error is None for result in results)
    assert len(world.destination.requests) == 1
