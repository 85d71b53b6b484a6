"""Which replicas move to balance log directories: few, each once, and never to the worse.

Method: examples with numbers that one can follow, and properties of any directories.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logmirror.app.balance import Volume, balance
from logmirror.model import TopicPartition


def volume(name, *sizes, fixed=0, free=None):
    replicas = {TopicPartition(name, number): size for number, size in enumerate(sizes)}
    return Volume(name, replicas, fixed, free)


def moved(*volumes):
    return [(step.source, step.target, step.size_bytes) for step in balance(volumes)]


def loads(volumes, steps):
    found = {one.name: one.fixed_bytes + sum(one.replicas.values()) for one in volumes}
    for step in steps:
        found[step.source] -= step.size_bytes
        found[step.target] += step.size_bytes
    return found


def test_the_replica_nearest_to_half_of_the_difference_moves():
    assert moved(volume("a", 10, 50, 20, 20), volume("b")) == [("a", "b", 50)]
    assert moved(volume("a", 70, 20, 10), volume("b")) == [("a", "b", 70)]
    assert moved(volume("a", 30, 30, 30), volume("b"), volume("c")) == [
        ("a", "b", 30),
        ("a", "c", 30),
    ]


def test_what_is_even_enough_is_left_alone():
    assert moved(volume("a", 54), volume("b", 50)) == []
    assert moved(volume("a", 5, 55), volume("b", 50)) == [("a", "b", 5)]
    assert moved(volume("a"), volume("b")) == moved() == moved(volume("a", 5)) == []


def test_a_replica_that_would_only_exchange_the_roles_stays():
    assert moved(volume("a", 100), volume("b")) == []
    assert moved(volume("a", 95), volume("b", 1)) == []


def test_a_target_needs_space_and_the_next_one_is_taken():
    assert moved(volume("a", 50, 50), volume("b", free=49), volume("c", fixed=1, free=50)) == [
        ("a", "c", 50)
    ]
    assert moved(volume("a", 20, 20, 20, 20), volume("b", free=39)) == [("a", "b", 20)]


def test_what_may_not_move_counts_and_stays():
    assert moved(volume("a", 10, fixed=90), volume("b", 20)) == [("a", "b", 10)]
    assert moved(volume("a", fixed=90), volume("b", 20)) == []


VOLUMES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1_000), max_size=12),
        st.integers(0, 1_000),
        st.none() | st.integers(0, 2_000),
    ),
    max_size=5,
).map(
    lambda drawn: [
        volume(f"d{number}", *sizes, fixed=fixed, free=free)
        for number, (sizes, fixed, free) in enumerate(drawn)
    ]
)


@given(VOLUMES)
def test_moves_never_make_the_fullest_directory_fuller_and_each_replica_moves_once(volumes):
    steps = balance(volumes)

    keys = [step.replica for step in steps]
    assert len(set(keys)) == len(keys)
    for count, step in enumerate(steps):
        before, after = loads(volumes, steps[:count]), loads(volumes, steps[: count + 1])
        assert step.source == max(before, key=lambda name: (before[name], name))
        assert max(after.values()) <= max(before.values())
        assert after[step.source] < before[step.source] > after[step.target]
        assert sum(after.values()) == sum(before.values())
    for one in volumes:
        arrived = sum(step.size_bytes for step in steps if step.target == one.name)
        assert one.free_bytes is None or arrived <= one.free_bytes
        for step in steps:
            if step.source == one.name:
                assert one.replicas[step.replica] == step.size_bytes > 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(2, 4))
def test_many_small_replicas_are_spread_evenly(sizes, count):
    volumes = [volume("a", *sizes), *(volume(f"b{number}") for number in range(1, count))]
    found = loads(volumes, balance(volumes))
    assert max(found.values()) - min(found.values()) <= max(
        0.1 * sum(sizes) / count, max(sizes) / 0.9
    )
