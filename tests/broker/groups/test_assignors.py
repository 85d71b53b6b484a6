"""Goal: every partition has one owner, shares are balanced, and little moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.groups.assignors import ASSIGNORS, assign_range, assign_uniform

TOPICS = (b"a", b"b", b"c")
counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9))
members = st.dictionaries(
    st.sampled_from("uvwxyz"), st.frozensets(st.sampled_from(TOPICS)), min_size=1
)


@pytest.mark.parametrize("name", ASSIGNORS)
@given(subscriptions=members, before=members, partition_counts=counts)
def test_every_partition_of_a_subscribed_topic_has_one_owner(
    name, subscriptions, before, partition_counts
):
    assign = ASSIGNORS[name]
    current = assign(before, partition_counts, {})

    shares = assign(subscriptions, partition_counts, current)

    given_out = sorted(one for share in shares.values() for one in share)
    wanted = set().union(*subscriptions.values())
    assert given_out == sorted(
        (topic, number)
        for topic, count in partition_counts.items()
        for number in range(count)
        if topic in wanted
    )
    assert all(topic in subscriptions[one] for one, share in shares.items() for topic, _ in share)


@given(before=st.integers(1, 6), after=st.integers(1, 6), partition_counts=counts)
def test_uniform_balances_equal_subscriptions_and_moves_little(before, after, partition_counts):
    topics = frozenset(TOPICS)
    first = assign_uniform(dict.fromkeys("uvwxyz"[:before], topics), partition_counts, {})

    then = assign_uniform(dict.fromkeys("uvwxyz"[:after], topics), partition_counts, first)

    sizes = [len(share) for share in then.values()]
    assert max(sizes) - min(sizes) <= 1
    moved = sum(len(first.get(name, set()) - then.get(name, set())) for name in first)
    total = sum(partition_counts.values())
    fair = total // after
    gone = sum(len(share) for name, share in first.items() if name not in then)
    surplus = sum(max(0, len(share) - fair) for name, share in first.items() if name in then)
    assert moved <= gone + surplus
    if before == after:
        assert then == first


def test_range_is_contiguous_in_the_order_of_names():
    topics = frozenset({b"a"})

    shares = assign_range({"m2": topics, "m1": topics, "m3": frozenset()}, {b"a": 5}, {})

    assert shares == {
        "m1": {(b"a", 0), (b"a", 1), (b"a", 2)},
        "m2": {(b"a", 3), (b"a", 4)},
        "m3": set(),
    }
