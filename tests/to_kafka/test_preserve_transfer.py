"""Slices of several flows into one cluster: what is sent, and the effect of each response.

Method: scripted sources and destinations (kit.fakes), and a clock that moves only in `sleep_ms`.
"""

from collections import deque

import pytest

from kit.fakes.scripted import Log, batches, record
from kit.fakes.scripted_copies import (
    World,
    arrive_while_waiting,
    elsewhere,
    large_batches,
    lose,
    old_batches,
    refuse,
    slow_fetch,
    transactional_log,
    value,
)
from logmirror.cluster.produce_responses import ProduceResponse
from logmirror.errors import (
    OutcomeUnknownError,
    PositionError,
    PositionMovedError,
    UnavailableError,
)
from logmirror.mirror.follow import SLICE_MS
from logmirror.model import GapCause, TopicPartition
from logmirror.source.partition import STALL_MS
from logmirror.to_kafka.idempotence import SEND_DEADLINE_MS, deadline_ms
from logmirror.wire.records import encode_reference


def covered(result):
    return [(r.covered.first, r.covered.last) for r in result.receipts]


def test_every_record_is_appended_once_at_its_offset():
    world = World(Log(batches(0, 100)))

    (result,) = world.run()

    assert world.destination.values() == [(n, value(n)) for n in range(100)]
    assert (covered(result), result.error, result.next_offset) == ([(0, 99)], None, 100)
    assert [r.record_count for r in result.receipts] == [100]


def test_a_slice_ends_where_the_driver_said_also_inside_a_batch():
    world = World(Log(batches(0, 100)))

    (result,) = world.run(end=42)

    assert world.destination.values() == [(n, value(n)) for n in range(42)]
    assert covered(result) == [(0, 41)]


def test_a_slice_goes_on_inside_a_batch():
    world = World(Log(batches(0, 30)))
    world.destination.ends[0] = 13

    (result,) = world.run(13)

    assert world.destination.values() == [(n, value(n)) for n in range(13, 30)]
    assert covered(result) == [(13, 29)]


def test_a_log_that_ends_elsewhere_than_the_driver_thought_is_left_alone():
    world = World(Log(batches(0, 30)))
    world.destination.ends[0] = 7

    (result,) = world.run()

    assert isinstance(result.error, PositionMovedError)
    assert (result.error.facts["expected"], result.error.facts["found"]) == (0, 7)
    assert (world.destination.requests, result.receipts) == ([], ())


# Responses


@pytest.mark.parametrize("code", [45, 46, 59])
def test_after_a_refused_sequence_the_position_is_read_again(code):
    world = World(Log(large_batches(0, 20)))
    world.destination.instead[0] = deque([None, None, refuse(code, PositionError)])

    (result,) = world.run()

    assert isinstance(result.error, PositionMovedError)
    assert result.error.facts["code"] == code
    assert (result.error.facts["topic"], result.error.facts["partition"]) == ("t", 0)
    assert result.receipts == (), "what the driver believed about the position is wrong"


@pytest.mark.parametrize("written", [True, False])
def test_after_a_lost_response_nothing_more_is_sent_and_what_was_responded_is_kept(written):
    world = World(Log(old_batches(0, 20)), sequence_checked=False)
    world.destination.instead[0] = deque([None, None, lose(world.destination if written else None)])

    (result,) = world.run()

    assert isinstance(result.error, OutcomeUnknownError)
    assert covered(result) == [(0, 1)]
    assert len(world.destination.requests) == 3


def test_a_batch_at_another_offset_stops_the_flow_with_both_offsets():
    world = World(Log(old_batches(0, 20)), sequence_checked=False)
    world.destination.instead[0] = deque([None, elsewhere(2)])

    (result,) = world.run()

    assert type(result.error) is PositionError
    facts = result.error.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("ForeignRecord", 1, 2)
    assert (facts["topic"], facts["target_topic"], facts["mirror"]) == ("t", "copy", "m")
    assert covered(result) == [(0, 0)]
    assert len(world.destination.requests) == 2


def test_what_the_broker_knows_already_is_done():
    """Error 0 with the first base offset: a duplicate whose first response was lost."""
    world = World(Log(large_batches(0, 3)))
    destination = world.destination

    def known(where, batch):
        destination.append(where, batch)
        return ProduceResponse(where, 0, 1, 1_700_000_000_000, 0, None)

    destination.instead[0] = deque([None, known])

    (result,) = world.run()

    assert (result.error, covered(result)) == (None, [(0, 2)])


def test_one_flow_in_trouble_leaves_the_others_alone():
    world = World(*(Log(batches(0, 50)) for _ in range(4)))
    world.destination.instead[1] = deque([refuse(19)])
    world.destination.instead[2] = deque([elsewhere(7)])

    results = world.run()

    assert [type(r.error) for r in results] == [
        type(None),
        UnavailableError,
        PositionError,
        type(None),
    ]
    assert [covered(r) for r in results] == [[(0, 49)], [], [], [(0, 49)]]
    for number in (0, 3):
        assert world.destination.values(number) == [(n, value(n)) for n in range(50)]
    assert len({id(r.error) for r in results if r.error}) == 2


def test_a_source_that_fails_stops_its_own_flow():
    world = World(Log(batches(0, 50)), Log(batches(0, 50)))
    broken = world.source.logs[TopicPartition("t", 1)]
    broken.batches[4] = broken.batches[4][:-1] + b"?"

    one, other = world.run()

    assert (one.error, covered(one)) == (None, [(0, 49)])
    assert other.error.kind == "corruption"
    assert covered(other) == [(0, 4)], "the next reading covers what is in flight when a flow fails"
    assert world.destination.values(1) == [(n, value(n)) for n in range(world.destination.ends[1])]


def test_a_destination_that_cannot_be_looked_at_fails_each_flow_with_an_error_of_its_own():
    world = World(Log(batches(0, 5)), Log(batches(0, 5)))

    def fail():
        raise UnavailableError("could not look up log end offsets")

    world.destination.on_look.append(fail)

    one, other = world.run()

    assert isinstance(one.error, UnavailableError)
    assert (one.error.facts["partition"], other.error.facts["partition"]) == (0, 1)
    assert world.destination.requests == []


# Sequence check and deadline


def test_old_records_between_those_of_today_let_nothing_pass_them():
    log = Log([*large_batches(0, 10), *old_batches(10, 11), *large_batches(11, 30)])
    world = World(log)
    seen = []
    world.destination.on_send.append(lambda: seen.append(len(world.destination.responses)))

    (result,) = world.run(in_flight_max=64)

    assert (result.error, covered(result)) == (None, [(0, 29)])
    assert seen[:14] == [*range(11), 0, 0, 1]


def test_without_sequence_check_one_batch_is_in_flight():
    world = World(Log(old_batches(0, 30)), sequence_checked=False)

    (result,) = world.run()

    assert result.error is None
    assert world.destination.most_in_flight == 1
    assert len(world.destination.requests) == 30


def test_with_sequence_check_many_batches_are_in_flight():
    world = World(Log(large_batches(0, 80)))

    (result,) = world.run()

    assert result.error is None
    assert world.destination.most_in_flight == 64


def test_the_first_batch_of_a_new_partition_goes_alone():
    world = World(Log(large_batches(0, 30)), sequence_checked=False)
    seen = []
    world.destination.on_send.append(lambda: seen.append(len(world.destination.responses)))

    world.run()

    assert seen[:2] == [0, 0], "the second waited for the first"
    assert max(seen) > 5, "then sequences are checked"


def test_a_look_that_is_too_old_is_repeated_before_anything_is_sent():
    world = World(Log(large_batches(0, 3)))
    world.source.fetch = slow_fetch(world, SEND_DEADLINE_MS + 1)

    (result,) = world.run()

    assert (result.error, covered(result)) == (None, [(0, 2)])
    assert world.destination.looks == 2


def test_a_log_that_moved_while_we_were_paused_is_left_alone():
    world = World(Log(large_batches(0, 3)))
    world.source.fetch = slow_fetch(world, 60_000)
    world.destination.on_look.append(successor(world, at_look=2, end=2))

    (result,) = world.run()

    assert isinstance(result.error, PositionMovedError)
    assert (result.error.facts["expected"], result.error.facts["found"]) == (0, 2)
    assert (world.destination.requests, result.receipts) == ([], ())


def test_a_pause_between_the_check_and_the_send_sends_nothing():
    """A batch that the pipeline refuses as late was not sent: read the position again."""
    world = World(Log(old_batches(0, 3)), sequence_checked=False)

    def pause():
        world.clock.ms += deadline_ms(100_000, sequence_checked=False)

    world.destination.on_send.append(pause)

    (result,) = world.run()

    assert isinstance(result.error, PositionMovedError)
    assert (world.destination.requests, result.receipts, result.next_offset) == ([], (), 0)


def test_the_partition_without_sequence_check_sets_the_send_deadline():
    world = World(Log(batches(0, 5)), Log(batches(0, 5)))
    world.destination.states[1] = None
    deadlines = []
    send = world.destination.send

    def spy(sent, *, not_after_ms):
        deadlines.append(not_after_ms)
        send(sent, not_after_ms=not_after_ms)

    world.destination.send = spy
    world.run()

    assert deadlines == [deadline_ms(0, sequence_checked=False)], "one request of two partitions"


def successor(world, *, at_look, end):
    """Another writer has appended by the time of this reading."""

    def act():
        if world.destination.looks == at_look:
            world.destination.ends[0] = end

    return act


# Requests


def test_small_batches_of_many_partitions_share_requests():
    world = World(*(Log(batches(0, 25)) for _ in range(50)), response_batches=5)

    results = world.run(merge=True)

    assert all((r.error, covered(r)) == (None, [(0, 24)]) for r in results)
    assert [len(request) for request in world.destination.requests] == [50]


def test_a_partition_is_in_a_request_once():
    world = World(Log(batches(0, 25)), Log(batches(0, 5)), response_batches=5)

    results = world.run()

    assert all(r.error is None for r in results)
    assert world.destination.values(0) == [(n, value(n)) for n in range(25)]
    assert len(world.destination.requests) == 5
    assert max(len(request) for request in world.destination.requests) == 2


def test_a_large_batch_waits_for_no_other():
    world = World(Log(large_batches(0, 1)), Log(batches(0, 5)))

    world.run()

    assert [sorted(request) for request in world.destination.requests] == [[0], [1]]


def test_what_waits_is_sent_when_it_is_a_megabyte():
    one = [encode_reference([record(0, value=b"y" * 60_000)])]
    world = World(*(Log(list(one)) for _ in range(40)))

    world.run()

    sizes = [sum(request.values()) for request in world.destination.requests]
    assert [len(request) for request in world.destination.requests] == [18, 18, 4]
    assert all(size < (1 << 20) + 61_000 for size in sizes)


def test_the_buffer_may_be_used_again_while_small_batches_wait():
    """Partitions share one fetch buffer, so what waits must be a copy."""
    logs = [Log([encode_reference([record(0, value=b"%d" % n * 1000)])]) for n in range(10)]
    world = World(*logs)

    world.run()

    for number in range(10):
        assert world.destination.values(number) == [(0, b"%d" % number * 1000)]


# Budget and lease


def test_a_budget_ends_a_slice_and_what_was_sent_is_collected():
    world = World(Log(large_batches(0, 100)), response_batches=2)

    (result,) = world.run(budget_bytes=500_000)

    assert (result.error, covered(result)) == (None, [(0, 7)])
    assert world.destination.values()[-1][0] == 7


def test_time_ends_a_slice_and_what_was_sent_is_collected():
    world = World(Log(large_batches(0, 100)), response_batches=2)
    world.source.fetch = slow_fetch(world, SLICE_MS)

    (result,) = world.run()

    assert (result.error, covered(result)) == (None, [(0, 1)])


def test_without_a_lease_a_slice_does_not_wait_for_more():
    world = World(Log(batches(0, 5)))
    world.clock.on_sleep = lambda: pytest.fail("waited")

    (result,) = world.run()

    assert covered(result) == [(0, 4)]


@pytest.mark.parametrize("partitions", [1, 3])
def test_with_a_lease_what_arrives_is_copied_until_it_is_over(partitions):
    world = World(*(Log(batches(0, 5)) for _ in range(partitions)))
    log = world.source.logs[TopicPartition("t", partitions - 1)]
    arrive_while_waiting(world, {100: (log, 5, 9), 400: (log, 9, 30), 2000: (log, 30, 40)})

    results = world.run(window_ms=1000)

    assert [r.error for r in results] == [None] * partitions
    assert covered(results[-1]) == [(0, 29)]
    assert world.clock.ms >= 1000
    assert all(covered(r) == [(0, 4)] for r in results[:-1])


def test_an_idle_lease_sends_nothing_and_looks_at_the_source_in_one_request():
    world = World(*(Log(batches(0, 5)) for _ in range(3)))
    world.destination.ends.update(dict.fromkeys(range(3), 5))
    fetches = world.source.fetches

    results = world.run(5, 5, 5, window_ms=1000)

    assert [covered(r) for r in results] == [[], [], []]
    assert world.destination.requests == []
    assert world.source.fetches == fetches


def test_a_lease_ends_for_all_when_one_flow_has_failed():
    world = World(*(Log(batches(0, 5)) for _ in range(3)))
    world.destination.instead[0] = deque([refuse(19)])
    log = world.source.logs[TopicPartition("t", 2)]
    arrive_while_waiting(world, {100: (log, 5, 9)})

    results = world.run(window_ms=1000)

    assert [type(r.error) for r in results] == [UnavailableError, type(None), type(None)]
    assert [covered(r) for r in results] == [[], [(0, 4)], [(0, 4)]]
    assert world.clock.ms < 100


# Tail check, gaps, a truncated source


def test_what_is_not_proven_is_compared_before_anything_is_sent():
    world = World(Log(batches(0, 5)), Log(batches(0, 5)))
    world.tail_check.error = PositionError("differs", reason="ContentDiffers")

    one, other = world.run(tail_checked=False)

    assert world.tail_check.asked == [(0, 0), (1, 0)]
    assert (one.error, one.tail_checked, one.receipts) == (world.tail_check.error, False, ())
    assert (other.error, other.tail_checked, covered(other)) == (None, True, [(0, 4)])
    assert [sorted(request) for request in world.destination.requests] == [[1]]


def test_what_is_proven_is_not_compared_again():
    world = World(Log(batches(0, 5)))
    world.run()
    assert world.tail_check.asked == []


def test_a_missing_head_is_a_gap_of_the_copy():
    world = World(Log(batches(20, 30), log_start=20))
    world.tail_check.head, world.tail_check.destination = 20, world.destination

    (result,) = world.run(tail_checked=False)

    assert world.tail_check.asked == [(0, 20)]
    assert (result.error, covered(result)) == (None, [(0, 29)])
    assert result.receipts[0].gaps.compacted == 20
    assert world.destination.values() == [(n, value(n)) for n in range(20, 30)]


@pytest.mark.parametrize("response_batches", [1, 2, 10])
def test_offsets_without_a_record_are_taken_in_order_and_counted(response_batches):
    world = World(transactional_log(), response_batches=response_batches)

    (result,) = world.run()

    kept = [0, 1, 2, 3, 4, 11, 12, 14, 15]
    assert (result.error, covered(result)) == (None, [(0, 15)])
    assert [offset for offset, _ in world.destination.values()] == kept
    taken = [n for _, first, end in world.gap_writer.filled for n in range(first, end)]
    assert taken == [5, 6, 7, 8, 9, 10, 13]
    gaps = result.receipts[0].gaps
    assert (gaps.aborted, gaps.control) == (5, 2)


def test_gaps_that_are_not_allowed_stop_the_flow_in_front_of_the_first():
    world = World(transactional_log())

    (result,) = world.run(gaps="fail")

    facts = result.error.facts
    assert isinstance(result.error, PositionError)
    assert (facts["reason"], facts["offset"]) == ("HoleAtSource", 5)
    assert facts["cause"] == GapCause.ABORTED.value
    assert world.gap_writer.filled == []
    assert covered(result) in ([], [(0, 4)])
    assert all(offset < 5 for offset, _ in world.destination.values())


def test_a_gap_that_nothing_explains_stops_the_flow_unless_the_topic_is_compacted():
    gap = [*batches(0, 5), *batches(30, 35)]
    world = World(Log(list(gap)))
    (result,) = world.run()
    assert result.error.facts["reason"] == "SourceGapAboveExpected"
    assert all(offset < 5 for offset, _ in world.destination.values())
    world = World(Log(list(gap)))

    (result,) = world.run(compacted=True)

    assert (result.error, covered(result)) == (None, [(0, 34)])
    assert world.gap_writer.filled == [(0, 5, 30)]


def test_a_source_that_delivers_nothing_below_its_last_stable_offset_is_reported():
    world = World(Log(batches(0, 5)))

    (result,) = world.run(end=9)

    assert isinstance(result.error, PositionError)
    assert (result.error.facts["expected"], result.error.facts["found"]) == (9, 5)
    assert covered(result) == [(0, 4)], "what was copied is kept"
    assert STALL_MS < world.clock.ms < 2 * STALL_MS
