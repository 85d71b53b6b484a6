"""Goal: a lookup by timestamp in an archive reads few objects, and finds the first that reaches it.

Method: the largest timestamps of many objects, drawn so that the rule of `mounted_times` holds; the
result is that of a search from the first one on, and the reads are counted.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.log.mounted_times import NEAR, NO_TIME, first_reaching, newest_objects


@st.composite
def disordered(draw: st.DrawFn) -> list[int]:
    """Times of which each next NEAR - 1 reach the highest before; objects without time between."""
    times, highest, below = [], draw(st.integers(0, 50)), 0
    for _ in range(draw(st.integers(0, 60))):
        if draw(st.integers(0, 4)) == 0:
            times.append(NO_TIME)
        elif below < NEAR - 1 and draw(st.booleans()):
            times.append(draw(st.integers(0, highest)))
            below += times[-1] < highest
        else:
            highest += draw(st.integers(0, 9))
            times.append(highest)
            below = 0
    return times


def by_hand(times, wanted):
    return next((n for n, time in enumerate(times) if time >= wanted), len(times))


@given(disordered(), st.integers(0, 400))
def test_the_first_object_that_reaches_a_time_is_found(times, wanted):
    assert first_reaching(len(times), times.__getitem__, wanted) == by_hand(times, wanted)


@given(st.lists(st.integers(NO_TIME, 50), max_size=NEAR), st.integers(0, 60))
def test_few_objects_are_searched_whatever_their_order(times, wanted):
    assert first_reaching(len(times), times.__getitem__, wanted) == by_hand(times, wanted)


@given(disordered())
def test_the_largest_time_is_in_the_newest_objects(times):
    newest = newest_objects(len(times), times.__getitem__)
    assert max(times[newest:], default=NO_TIME) == max(times, default=NO_TIME)


def test_few_of_many_objects_are_read():
    read = set()

    def newest_ms(number):
        read.add(number)
        return number * 1000

    for wanted in (0, 1, 3_333_500, 9_999_000, 20_000_000):
        read.clear()
        expected = min(10_000, -(-wanted // 1000))
        assert first_reaching(10_000, newest_ms, wanted) == expected
        assert len(read) <= 14 + NEAR
    read.clear()
    assert newest_objects(10_000, newest_ms) == 10_000 - NEAR
    assert len(read) == NEAR
