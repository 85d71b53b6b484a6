"""Record lag: its values, and the cost of reading them.

Method: flows are put before the real asker over scripted logs with timestamps of our choice and a
clock that moves only when the test says so; every question to the source is noted. One test runs
the whole loop.
"""

import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
    record,
    service,
)
from kit.judges.scrape import samples
from logmirror.errors import UnavailableError
from logmirror.mirror.flow_state import FlowState
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import FlowId
from logmirror.mirror.record_lag import BUDGET_MS, EVERY_MS, FAILED_MS, FIRST_MS, RecordLag
from logmirror.mirror.source_views import MirrorSpec
from logmirror.model import TimestampType
from logmirror.monitoring.metrics import Recorder
from logmirror.testing import MemoryStore
from logmirror.wire.records import encode_reference

START_MS = 1_700_000_000_000
"""Of the clock, and the timestamp of records that say nothing else."""

OLD_MS = 1_400_000_000_000


class NotedClient(ScriptedClient):
    """Distinguishes reads for the lag from copying: they never wait at the source."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.asked = []
        self.on_question = lambda: None

    def fetch(self, partition, offset, view, *, topic_id, max_wait_ms=500, **more):
        if max_wait_ms == 0:
            self.asked.append((partition.partition, offset))
            self.on_question()
        return super().fetch(
            partition, offset, view, topic_id=topic_id, max_wait_ms=max_wait_ms, **more
        )


class World:
    """Flows of one mirror into some destinations; the test moves them."""

    def __init__(self, *logs, destinations=("d",)):
        self.clock, self.recorder = SteppingClock(START_MS), Recorder()
        self.client = NotedClient(logs)
        self.observer = Observer(["m"], self.recorder, self.clock)
        self.record_lag = RecordLag(lambda _source: self.client, self.clock, self.observer)
        spec = archive_spec()
        mirror = MirrorSpec(
            name="m",
            source="source",
            topic="t",
            partitions=None,
            destinations=tuple((name, spec) for name in destinations),
            chain_start=None,
        )
        self.states = {}
        for name in destinations:
            for where, log in self.client.logs.items():
                flow = FlowId(mirror="m", destination=name, topic="t", partition=where.partition)
                state = FlowState(
                    flow=flow, destination=spec, topic_id=TOPIC_ID, compacted=False, position=0
                )
                state.observe(log.end, self.clock.monotonic_ms())
                self.states[flow] = state
        self.mirror_of = dict.fromkeys(self.states, mirror)

    def look(self, after_ms=0):
        self.clock.ms += after_ms
        self.record_lag.update(self.states, self.mirror_of)

    def move(self, position):
        for state in self.states.values():
            state.position = position
            state.pending_since_ms = self.clock.ms if state.pending else None

    def seconds(self, name="source_lag_seconds"):
        found = samples(self.recorder, clock=self.clock)
        return [round(value, 3) for (of, _), value in sorted(found.items()) if of == name]


def old_from(first, stop):
    """Records before `first` are of now, those from it on of years ago."""
    now = batches(0, first)
    return Log(
        [*now, encode_reference([record(i, timestamp_ms=OLD_MS) for i in range(first, stop)])]
    )


def test_a_flow_without_lag_causes_no_read_and_its_lag_is_0():
    world = World(Log(batches(0, 10)))
    world.move(10)
    for _ in range(100):
        world.look(1000)
    assert world.client.asked == []
    assert world.seconds() == [0]
    assert world.seconds("flow_stalled_seconds") == [0]


def test_a_flow_that_catches_up_within_a_second_causes_no_read():
    world = World(Log(batches(0, 10)))
    world.look()
    world.look(FIRST_MS - 1)
    world.move(10)
    world.look(10_000)
    assert world.client.asked == []


def test_the_age_is_that_of_the_first_record_that_is_not_copied():
    world = World(old_from(20, 25))
    world.move(20)
    world.look()
    world.look(FIRST_MS)
    assert world.client.asked == [(0, 20)]
    assert world.seconds() == [(START_MS + FIRST_MS - OLD_MS) / 1000]


def test_the_lag_grows_without_updates():
    world = World(Log(batches(0, 5)))
    world.look()
    world.look(FIRST_MS)
    world.clock.ms += 60_000
    assert world.seconds() == [(FIRST_MS + 60_000) / 1000]


def test_a_position_is_read_once_however_long_it_waits():
    world = World(Log(batches(0, 10)))
    world.look()
    for _ in range(1000):
        world.look(1000)
    assert world.client.asked == [(0, 0)]


def test_a_moving_flow_is_read_at_most_every_ten_seconds():
    world = World(Log(batches(0, 1000)))
    world.look()
    for position in range(0, 600, 5):
        world.move(position)
        world.look(250)  # half a minute in all
    assert 3 <= len(world.client.asked) <= 30_000 // EVERY_MS + 1


def test_destinations_at_the_same_position_share_the_read():
    world = World(old_from(20, 25), destinations=("d", "e", "f"))
    world.move(20)
    world.look()
    world.look(FIRST_MS)
    assert world.client.asked == [(0, 20)]
    assert world.seconds() == [(START_MS + FIRST_MS - OLD_MS) / 1000] * 3


def test_a_thousand_partitions_that_lag_take_a_small_part_of_each_pass_and_all_get_their_turn():
    world = World(*[Log(batches(0, 5))] * 1000)
    world.client.on_question = lambda: world.clock.sleep_ms(10)
    world.look()
    world.clock.ms += FIRST_MS
    for _ in range(334):
        before = len(world.client.asked)
        world.look()
        assert len(world.client.asked) - before <= BUDGET_MS // 10 + 1
    assert sorted(number for number, _ in world.client.asked) == list(range(1000))


def test_until_its_first_read_a_record_is_as_old_as_the_lag():
    world = World(old_from(0, 5))
    world.look()
    world.look(FIRST_MS - 100)
    assert world.seconds() == [(FIRST_MS - 100) / 1000]


def test_a_source_that_does_not_respond_is_not_read_for_a_minute_and_nothing_fails():
    world = World(*[Log(batches(0, 5))] * 3)

    def refuse():
        raise UnavailableError("no response")

    world.client.on_question = refuse
    world.look()
    for _ in range(FAILED_MS // 1000):
        world.look(1000)
    assert len(world.client.asked) == 1
    world.client.on_question = lambda: None
    world.look(1000)
    assert len(world.client.asked) == 4
    assert all(state.failures == 0 for state in world.states.values())


def test_a_flow_that_backs_off_is_not_read():
    world = World(Log(batches(0, 5)))
    (state,) = world.states.values()
    state.retry_at_ms = 60_000
    world.look()
    world.look(30_000)
    assert world.client.asked == []
    world.look(30_000)
    assert world.client.asked == [(0, 0)]


@pytest.mark.parametrize(("size", "questions"), [(100_000, 2), (9 << 20, 1)])
def test_a_batch_larger_than_the_buffer_is_fetched_again_unless_it_is_huge(size, questions):
    log = Log([encode_reference([record(0, value=b"x" * size, timestamp_ms=OLD_MS)])])
    world = World(log)
    world.look()
    world.look(FIRST_MS)
    assert len(world.client.asked) == questions
    oldest_ms = OLD_MS if questions == 2 else START_MS
    assert world.seconds() == [(START_MS + FIRST_MS - oldest_ms) / 1000]


def test_a_position_inside_a_batch_is_as_old_as_the_batch():
    log = Log([encode_reference([record(i, timestamp_ms=OLD_MS + i) for i in range(10)])])
    world = World(log)
    world.move(7)
    world.look()
    world.look(FIRST_MS)
    assert world.seconds() == [(START_MS + FIRST_MS - OLD_MS) / 1000]


def test_records_without_or_with_future_timestamps_are_not_older_than_the_lag():
    without = World(Log([encode_reference([record(0, timestamp_ms=-1)])]))
    future = World(Log([encode_reference([record(0, timestamp_ms=START_MS + 10**9)])]))
    for world, expected in ((without, FIRST_MS / 1000), (future, 0)):
        world.look()
        world.look(FIRST_MS)
        assert world.seconds() == [expected]


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp_type": TimestampType.LOG_APPEND_TIME, "max_timestamp_ms": OLD_MS},
        {"attribute_bits": 64, "base_timestamp_ms": START_MS * 2, "max_timestamp_ms": OLD_MS},
    ],
    ids=["log-append-time", "delete-horizon"],
)
def test_where_the_header_s_first_timestamp_is_not_that_of_a_record_its_last_one_counts(fields):
    world = World(Log([encode_reference([record(0, timestamp_ms=START_MS)], **fields)]))
    world.look()
    world.look(FIRST_MS)
    assert world.seconds() == [(START_MS + FIRST_MS - OLD_MS) / 1000]


def test_a_flow_stalls_from_when_something_waits_and_nothing_is_committed():
    world = World(Log(batches(0, 10)))
    world.look()
    world.look(30_000)
    assert world.seconds("flow_stalled_seconds") == [30]
    world.move(5)  # a commit, with more to do
    world.look(1000)
    assert world.seconds("flow_stalled_seconds") == [1]
    world.move(10)
    world.look(1000)
    assert world.seconds("flow_stalled_seconds") == [0]


def test_the_lag_of_a_stopped_mirror_continues_to_grow():
    world = World(Log(batches(0, 10)))
    world.look()
    world.states.clear()
    world.look(50_000)
    assert world.seconds() == [50]


def test_the_loop_reports_lags_and_the_status_has_them():
    clock, recorder = SteppingClock(START_MS), Recorder()
    logs = [old_from(20, 25), Log(batches(0, 20))]
    client, hasty = NotedClient(logs), NotedClient(logs)
    observer = Observer(["m"], recorder, clock)
    spec = archive_spec(max_offsets=10, max_bytes=1 << 30, max_time_ms=10**12)

    class _LeftError(Exception):
        pass

    def leave():
        if clock.ms >= 5000:
            raise _LeftError

    clock.on_sleep = leave
    more = {"clock": clock, "observer": observer, "brief_client": lambda _source: hasty}
    with (
        service(client, MemoryStore(), spec=spec, **more) as (made, _),
        pytest.raises(_LeftError),
    ):
        made.run()
    flows = observer.board.status()["flows"]
    oldest_s = (START_MS + clock.ms - OLD_MS) / 1000
    assert [(f["position"], f["lag_seconds"]) for f in flows] == [(20, oldest_s), (20, 0)]
    assert (client.asked, hasty.asked) == ([], [(0, 20)])
    found = samples(recorder, clock=clock)
    assert found["mirror_lag_seconds_max", ("m", "d")] == pytest.approx(oldest_s)
