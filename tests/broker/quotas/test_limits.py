"""Goal: a client that waits as long as it is asked to stays below its quota, and loses none of it.

Method: random requests at random times, with the bound in the head of `quotas.limits` computed
again from the history. Which quota applies is compared with Kafka's list of levels.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.quotas.entities import DEFAULT, Entity, Quota
from logmirror.broker.quotas.limits import (
    BURST_S,
    MAX_BUCKETS,
    MAX_DELAY_S,
    Bucket,
    ClientQuotas,
)

RATES = st.floats(0.001, 1e12)
SHARES = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 3000)), min_size=1, max_size=60)
"""Cost in seconds of the rate, and for how many milliseconds the client pauses by itself."""


@given(RATES, SHARES)
def test_a_client_that_waits_stays_below_its_quota_in_every_interval(rate, shares):
    bucket, now_ms = Bucket(rate, 0), 0.0
    history = []
    for share, pause_ms in shares:
        history.append((now_ms, share * rate))
        now_ms += bucket.charge(share * rate, rate, now_ms) + pause_ms

    for first, last in itertools.combinations_with_replacement(range(len(history)), 2):
        interval_s = (history[last][0] - history[first][0]) / 1000
        used = sum(amount for _, amount in history[first : last + 1])
        allowed = rate * (interval_s + BURST_S) + history[last][1]
        assert used <= allowed * (1 + 1e-9)


@given(RATES, st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_a_client_below_its_quota_never_waits(rate, shares):
    bucket, now_ms = Bucket(rate, 0), 0.0
    for share in shares:  # what it uses, it has waited for
        now_ms += share * 1000 + 0.001
        assert bucket.charge(share * rate, rate, now_ms) == 0


@given(RATES, st.floats(0, 1e15), st.floats(1e-9, 1e15), st.floats(-1e6, 1e6))
def test_a_delay_is_bounded_whatever_is_used_and_however_the_quota_changes(
    rate, amount, other, step_ms
):
    bucket = Bucket(rate, 0)
    for charged in (bucket.charge(amount, rate, 0), bucket.charge(amount, other, step_ms)):
        assert 0 <= charged <= MAX_DELAY_S * 1000


@given(RATES, st.floats(0, 250))
def test_after_the_delay_nothing_is_owed(rate, share):
    bucket = Bucket(rate, 0)
    delay_ms = bucket.charge(share * rate, rate, 0)
    assert bucket.charge(0, rate, delay_ms) == 0
    if delay_ms > 2:
        earlier = Bucket(rate, 0)
        earlier.charge(share * rate, rate, 0)
        assert earlier.charge(0, rate, delay_ms - 2) > 0


LEVELS = [
    Entity("u", "c"),
    Entity("u", DEFAULT),
    Entity("u"),
    Entity(DEFAULT, "c"),
    Entity(DEFAULT, DEFAULT),
    Entity(DEFAULT),
    Entity(None, "c"),
    Entity(None, DEFAULT),
]
"""Kafka's order: the first one that exists applies."""


@given(st.sets(st.sampled_from(range(len(LEVELS)))))
def test_the_most_specific_quota_applies(present):
    stored = [(LEVELS[level], "producer_byte_rate", level + 1) for level in present]
    found = ClientQuotas(stored).rate(Quota.PRODUCE, "u", "c")

    if not present:
        assert found is None
        return
    level = min(present)
    shared_by = Entity(
        *(None if part is None else own for part, own in zip(LEVELS[level], "uc", strict=False))
    )
    assert found == (shared_by, level + 1)


def test_a_quota_of_a_user_is_shared_and_a_default_is_for_each():
    quotas = ClientQuotas([(Entity("u"), "producer_byte_rate", 100)])
    assert quotas.charge(Quota.PRODUCE, "u", "one", 100, 0) == 0
    assert quotas.charge(Quota.PRODUCE, "u", "two", 50, 0) == 500
    assert quotas.charge(Quota.PRODUCE, "other", "one", 1000, 0) == 0
    assert quotas.charge(Quota.FETCH, "u", "one", 1000, 0) == 0

    quotas = ClientQuotas([(Entity(None, DEFAULT), "producer_byte_rate", 100)])
    assert quotas.charge(Quota.PRODUCE, "u", "one", 150, 0) == 500
    assert quotas.charge(Quota.PRODUCE, "u", "two", 100, 0) == 0
    assert quotas.charge(Quota.PRODUCE, "other", "one", 0, 0) == 500


def test_a_percentage_is_of_one_thread():
    quotas = ClientQuotas([(Entity("u"), "request_percentage", 5)])
    assert quotas.charge(Quota.REQUEST, "u", "", 50, 0) == 0  # milliseconds: those of a second
    assert quotas.charge(Quota.REQUEST, "u", "", 1, 0) == 20


def test_a_quota_that_is_removed_leaves_no_delay():
    quotas = ClientQuotas([(Entity("u"), "producer_byte_rate", 100)])
    assert quotas.charge(Quota.PRODUCE, "u", "", 1000, 0) > 0
    quotas.change([(Entity("u"), Quota.PRODUCE, None)])
    assert not quotas.has_requests
    assert quotas.charge(Quota.PRODUCE, "u", "", 1000, 0) == 0
    quotas.change([(Entity("u"), Quota.PRODUCE, 100)])
    assert quotas.charge(Quota.PRODUCE, "u", "", 100, 0) == 0


def test_a_limited_client_fetches_what_a_second_allows():
    quotas = ClientQuotas([(Entity(None, "c"), "consumer_byte_rate", 1000)])
    assert quotas.fetch_limit("u", "c") == 1000
    assert quotas.fetch_limit("u", "d") is None


def test_connections_of_an_address_are_refused_above_their_rate():
    quotas = ClientQuotas(
        [
            (Entity(ip=DEFAULT), "connection_creation_rate", 1),
            (Entity(ip="10.0.0.1"), "connection_creation_rate", 3),
        ]
    )
    assert (quotas.has_requests, quotas.has_connections) == (False, True)
    assert [quotas.may_connect("10.0.0.1", 0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [quotas.may_connect("10.0.0.2", 0) for _ in range(3)] == [True, True, False]
    assert quotas.may_connect("10.0.0.2", 1000)


def test_memory_is_bounded_and_the_idle_are_forgotten_first():
    quotas = ClientQuotas([(Entity(None, DEFAULT), "producer_byte_rate", 100)])
    for number in range(MAX_BUCKETS):
        quotas.charge(Quota.PRODUCE, "u", f"client-{number}", 150, 0)
    assert quotas.charge(Quota.PRODUCE, "u", "client-0", 0, 0) == 500
    for number in range(MAX_BUCKETS - 1):
        quotas.charge(Quota.PRODUCE, "u", f"other-{number}", 1, 0)

    assert quotas.charge(Quota.PRODUCE, "u", "client-0", 0, 0) == 500
    assert quotas.charge(Quota.PRODUCE, "u", "client-1", 0, 0) == 0


def test_a_long_client_id_takes_no_more_memory_than_its_beginning():
    quotas = ClientQuotas([(Entity(None, DEFAULT), "producer_byte_rate", 100)])
    shared_by, _ = quotas.rate(Quota.PRODUCE, "u", "x" * 30_000)
    assert shared_by == Entity(None, "x" * 255)


@pytest.mark.parametrize("client_id", ["", "x" * 300])
def test_any_client_id_has_the_default(client_id):
    quotas = ClientQuotas([(Entity("u", DEFAULT), "producer_byte_rate", 100)])
    assert quotas.charge(Quota.PRODUCE, "u", client_id, 200, 0) == 1000
    assert quotas.charge(Quota.PRODUCE, "u", client_id, 0, 0) == 1000
