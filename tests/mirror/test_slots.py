"""The slot pool: what a lane can always get, whatever the others hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.mirror.slots import SlotPool


def test_a_single_lane_gets_all_slots():
    assert SlotPool(1).take("a", 8, total=4) == 4


def test_a_lane_gets_no_more_than_it_can_use():
    assert SlotPool(1).take("a", 2, total=4) == 2


def test_lanes_that_hold_everything_they_can_leave_one_slot_for_each_other_lane():
    pool = SlotPool(3)
    assert pool.take("halted", 99, total=4) == 2
    assert pool.take("halted too", 99, total=4) == 1
    assert pool.take("calm", 99, total=4) == 1


def test_slots_that_were_given_back_are_available():
    pool = SlotPool(2)
    assert pool.take("a", 9, total=3) == 2
    pool.give_back("a")
    assert pool.take("b", 9, total=3) == 2


def test_a_single_slot_is_given_to_slow_lanes_too():
    pool = SlotPool(2)
    assert pool.take("slow", 9, total=1, is_slow=True) == 1
    pool.give_back("slow")
    assert pool.take("slow", 9, total=1, is_slow=True) == 1


def test_a_slow_lane_gets_a_slot_beside_a_calm_one():
    pool = SlotPool(3)
    assert pool.take("calm", 9, total=2) == 1
    assert pool.take("slow", 9, total=2, is_slow=True) == 1


def test_with_fewer_slots_than_lanes_slow_lanes_do_not_get_the_last_one():
    pool = SlotPool(3)
    assert pool.take("slow", 9, total=2, is_slow=True) == 1
    assert pool.take("slow too", 9, total=2, is_slow=True) == 0
    assert pool.take("calm", 9, total=2) == 1
    assert pool.take("calm too", 9, total=2) == 0


@pytest.mark.parametrize("lanes", [1, 2, 5])
@given(data=st.data())
def test_with_enough_slots_each_lane_can_always_take_one(lanes, data):
    total = data.draw(st.integers(lanes, lanes + 4))
    pool, held = SlotPool(lanes), {}
    for _ in range(data.draw(st.integers(0, 20))):
        name = data.draw(st.integers(0, lanes - 1))
        if name in held:
            pool.give_back(name)
            del held[name]
            continue
        held[name] = pool.take(name, data.draw(st.integers(1, 10)), total)
        assert held[name] >= 1
        assert sum(held.values()) <= total
