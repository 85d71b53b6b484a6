"""The planner turns positions and watermarks into slices.

Method: draw flow states, ask for one tick, look at the slices. Time is an argument, so nothing here
waits. What slices do when they run is shown in test_transfer.py and test_service.py.
"""

import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.fakes.scripted import archive_spec
from logmirror.cluster.properties import connection_settings
from logmirror.mirror.flow_state import DAY_MS, SLICE_BYTES, FlowState, next_daily_ms
from logmirror.mirror.plan import plan
from logmirror.mirror.ports import FlowId, GapSummary, KafkaSpec, Receipt, SliceResult
from logmirror.model import OffsetRange, Trigger

WALL_MS = 1_700_000_000_000


def limits(**changes):
    return archive_spec(**{"max_time_ms": 60_000, "max_offsets": 1000, **changes})


def flow_state(*, position=0, end=100, spec=None, partition=0, **fields):
    state = FlowState(
        flow=FlowId(mirror="m", destination="d", topic="t", partition=partition),
        destination=spec or limits(),
        topic_id=None,
        compacted=False,
        position=position,
        bytes_per_offset=fields.pop("bytes_per_offset", 10.0),
        **fields,
    )
    state.observe(end, 0)
    return state


def tick(*states, now_ms=0, wall_ms=WALL_MS, slots=2, explicit=False):
    """Plan as a tick does: then daily flushes are scheduled."""
    planned = plan(states, slots=slots, now_ms=now_ms, wall_ms=wall_ms, explicit=explicit)
    flows = {each.slice.flow for each in planned}
    for state in states:
        state.schedule_daily(wall_ms, is_planned=state.flow in flows)
    return [each.slice for each in planned]


def test_a_plan_changes_nothing():
    spec = limits(daily_at_utc_s=0)
    state = flow_state(spec=spec, next_daily_ms=WALL_MS - 1)
    before = copy.deepcopy(state)
    plans = [plan([state], slots=2, now_ms=0, wall_ms=WALL_MS) for _ in range(2)]
    assert plans[0] == plans[1] != []
    assert state == before


@pytest.mark.mirror_v3("FS-18", "FS-21")
def test_nothing_pending_plans_nothing():
    assert tick(flow_state(position=100, end=100), explicit=True) == []


def test_a_flow_into_a_cluster_has_an_empty_slice_once_its_source_was_polled():
    spec = KafkaSpec(cluster=connection_settings("a:9092", {}), topic="t")
    state = flow_state(end=-1, spec=spec)
    assert tick(state) == []
    state.observe(0, 0)
    assert [(each.first, each.end) for each in tick(state)] == [(0, 0)]
    assert tick(state, explicit=True) == []


@pytest.mark.mirror_v3("FS-02")
def test_records_wait_until_a_trigger_is_due():
    state = flow_state()
    assert tick(state, now_ms=59_999) == []
    [slice_] = tick(state, now_ms=60_000)
    assert (slice_.first, slice_.end, slice_.tail) == (0, 100, Trigger.MAX_TIME)


def test_enough_offsets_are_due_at_once_and_leave_their_tail():
    [slice_] = tick(flow_state(end=1000))
    assert (slice_.end, slice_.tail) == (1000, None)
    assert tick(flow_state(end=999)) == []


def test_expected_bytes_are_due_at_once():
    assert tick(flow_state(end=900, bytes_per_offset=1200.0))
    assert tick(flow_state(end=900, bytes_per_offset=1100.0)) == []


def test_a_flow_of_unknown_size_is_probed_once():
    [slice_] = tick(flow_state(bytes_per_offset=None))
    assert slice_.tail is None


def result_of(state, slice_, *, receipts=(), rest_bytes=0, next_offset=None):
    return SliceResult(
        slice=slice_,
        receipts=receipts,
        rest_bytes=rest_bytes,
        next_offset=slice_.end if next_offset is None else next_offset,
    )


def test_a_gap_up_to_the_log_s_end_is_not_read_again_before_more_follows_or_max_time():
    """The slice found no record that ends the gap: until one follows, no object is filled."""
    state = flow_state(end=1000)
    [slice_] = tick(state)
    state.advance(result_of(state, slice_, rest_bytes=50, next_offset=1000), 0, 1)
    assert tick(state, now_ms=1000) == []
    state.observe(1049, 2000)
    assert tick(state, now_ms=2000) == []
    state.observe(1050, 3000)
    [slice_] = tick(state, now_ms=3000)
    assert (slice_.first, slice_.end, slice_.tail) == (0, 1050, None)
    state.advance(result_of(state, slice_, rest_bytes=50, next_offset=1050), 0, 3001)
    assert tick(state, now_ms=4000) == []
    [slice_] = tick(state, now_ms=60_000)
    assert slice_.tail is Trigger.MAX_TIME


def test_a_slice_that_filled_no_object_is_not_probed_again():
    state = flow_state(bytes_per_offset=None)
    [slice_] = tick(state)
    state.advance(result_of(state, slice_, rest_bytes=5000), 0, 0)
    assert tick(state, now_ms=1) == []
    state.observe(900, 2)  # 50 bytes an offset: far below the limit still
    assert tick(state, now_ms=2) == []


def test_the_age_counts_from_the_first_record_that_waits_not_from_the_start():
    state = flow_state(position=0, end=0)
    state.observe(10, 500_000)
    assert tick(state, now_ms=559_999) == []
    assert tick(state, now_ms=560_000)[0].tail is Trigger.MAX_TIME


def test_after_an_object_the_age_starts_again():
    state = flow_state(end=100)
    [slice_] = tick(state, now_ms=60_000)
    receipt = Receipt(
        covered=OffsetRange(first=0, last=49),
        record_count=50,
        payload_bytes=500,
        object_bytes=1,
        digest="",
        trigger=Trigger.MAX_BYTES,
        gaps=GapSummary(),
        elapsed_ms=1,
    )
    state.advance(result_of(state, slice_, receipts=(receipt,)), 50, 60_000)
    assert tick(state, now_ms=119_999) == []
    assert tick(state, now_ms=120_000)[0].first == 50


def test_explicit_writes_every_tail():
    assert [s.tail for s in tick(flow_state(), flow_state(partition=1), explicit=True)] == [
        Trigger.EXPLICIT,
        Trigger.EXPLICIT,
    ]


def test_a_target_bounds_the_slice():
    [slice_] = tick(flow_state(end=100, target=70), explicit=True)
    assert slice_.end == 70


def test_a_flow_that_backs_off_has_no_slice():
    assert tick(flow_state(retry_at_ms=10), now_ms=9, explicit=True) == []
    stale = flow_state()
    stale.outdated()
    assert tick(stale, now_ms=9, explicit=True) == []


@pytest.mark.parametrize(
    ("at_s", "wall_ms", "expected_ms"),
    [
        (3600, 10 * DAY_MS, 10 * DAY_MS + 3_600_000),
        (3600, 10 * DAY_MS + 3_600_000, 11 * DAY_MS + 3_600_000),
        (0, 10 * DAY_MS - 1, 10 * DAY_MS),
    ],
)
@pytest.mark.mirror_v3("FS-10")
def test_daily_is_the_next_such_moment(at_s, wall_ms, expected_ms):
    assert next_daily_ms(at_s, wall_ms) == expected_ms


@pytest.mark.mirror_v3("FS-08", "FS-09")
def test_daily_flushes_what_waits_once_a_day():
    spec = limits(max_time_ms=10 * DAY_MS, max_bytes=1 << 40, max_offsets=1 << 40, daily_at_utc_s=0)
    due_ms = 20_000 * DAY_MS
    state = flow_state(spec=spec, next_daily_ms=due_ms)
    assert tick(state, wall_ms=due_ms - 1) == []
    assert tick(state, wall_ms=due_ms)[0].tail is Trigger.DAILY
    assert tick(state, wall_ms=due_ms + 1) == []
    idle = flow_state(position=100, spec=spec, next_daily_ms=due_ms)
    assert tick(idle, wall_ms=due_ms + 5) == []
    idle.observe(200, 0)
    assert tick(idle, wall_ms=due_ms + 10) == [], "a day that passed idle flushes nothing later"


@pytest.mark.mirror_v3("FS-11")
def test_daily_flushes_once_after_several_days():
    spec = limits(max_time_ms=10 * DAY_MS, max_bytes=1 << 40, max_offsets=1 << 40, daily_at_utc_s=0)
    due_ms = 20_000 * DAY_MS
    state = flow_state(spec=spec, next_daily_ms=due_ms)
    assert tick(state, wall_ms=due_ms + 3 * DAY_MS + 5)[0].tail is Trigger.DAILY
    assert tick(state, wall_ms=due_ms + 3 * DAY_MS + 6) == []
    assert tick(state, wall_ms=due_ms + 4 * DAY_MS)[0].tail is Trigger.DAILY


def test_a_long_backlog_uses_idle_slots_with_staged_slices_in_a_row():
    state = flow_state(end=10_000_000, bytes_per_offset=1024.0)
    slices = tick(state, slots=4)
    assert len(slices) == 4
    assert [s.staged for s in slices] == [False, True, True, True]
    assert all(a.end == b.first for a, b in pairwise(slices))
    assert all(s.tail for s in slices), "a boundary that another slice follows must be written"


def test_no_idle_slot_no_parallel_backfill():
    many = [flow_state(end=10_000_000, partition=n) for n in range(4)]
    assert not any(s.staged for s in tick(*many, slots=2))


@given(
    position=st.integers(0, 10_000),
    backlog=st.integers(0, 50_000_000),
    weight=st.floats(1, 5000),
    slots=st.integers(1, 8),
    max_offsets=st.integers(1, 2_000_000),
)
def test_slices_of_a_flow_are_contiguous_from_its_position_and_end_within_the_log(
    position, backlog, weight, slots, max_offsets
):
    spec = limits(max_time_ms=1, max_bytes=1 << 26, max_offsets=max_offsets)
    state = flow_state(
        position=position, end=position + backlog, spec=spec, bytes_per_offset=weight
    )
    slices = tick(state, slots=slots, now_ms=2)
    assert bool(slices) == bool(backlog)
    expected = position
    for slice_ in slices:
        assert slice_.first == expected < slice_.end <= position + backlog
        assert slice_.staged == (slice_.first > position)
        expected = slice_.end
    if len(slices) > 1:
        width = slices[0].end - slices[0].first
        assert width * weight <= SLICE_BYTES + weight


def test_flows_at_the_same_place_count_as_one_and_get_the_same_parts():
    """So that what is read for one of them is read for all."""
    far = 8 * SLICE_BYTES
    native, rows = (
        flow_state(
            end=far, spec=limits(max_offsets=far, location=location), bytes_per_offset=weight
        )
        for location, weight in (("a", 1.0), ("b", 0.5))
    )
    slices = tick(native, rows, slots=4)
    assert len(slices) == 8, "each has four parts, in four slots"
    assert sorted((s.first, s.end) for s in slices[:4]) == [(s.first, s.end) for s in slices[4:]]
    behind = flow_state(end=far, position=5, spec=limits(max_offsets=far), bytes_per_offset=1.0)
    slices = tick(native, behind, slots=4)
    assert len({s.first for s in slices}) == len(slices) == 4, "what reads elsewhere shares nothing"
