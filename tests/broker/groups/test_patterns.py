"""Goal: a subscription by regular expression matches what Kafka's does, and stalls no broker."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.patterns import TopicPatterns
from logmirror.broker.groups.values import RefusedError

TOPICS = ["orders", "orders-eu", "payments", "orders.dlq"]


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        ("orders", {"orders"}),
        ("orders.*", {"orders", "orders-eu", "orders.dlq"}),
        ("^(orders|payments)$", {"orders", "payments"}),
        ("rders", set()),
        ("[a-z]+", {"orders", "payments"}),
        ("", set()),
    ],
)
def test_the_whole_name_must_match(regex, expected):
    assert TopicPatterns().matching(regex, TOPICS, 1) == expected


@pytest.mark.parametrize(
    "regex", ["a(", r"(?=a)a", r"(a)\1", "(?:" * 2000, "(((a{100}){100}){10})"]
)
def test_what_re2_refuses_gets_the_error_of_kafka(regex):
    with pytest.raises(RefusedError, match="not a regular expression of RE2") as refused:
        TopicPatterns().matching(regex, TOPICS, 1)

    assert refused.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION


def test_no_expression_takes_more_than_linear_time():
    name = "a" * 249
    patterns = TopicPatterns()
    began = time.process_time()

    assert patterns.matching("(a+)+b", [name], 1) == set()

    assert time.process_time() - began < 1  # by backtracking: 2^249 steps


@given(
    versions=st.lists(
        st.frozensets(st.sampled_from(["a", "ab", "b", "ba", "c"])), min_size=1, max_size=6
    )
)
def test_after_any_changes_the_topics_are_those_of_a_fresh_start(versions):
    patterns = TopicPatterns()
    for number, names in enumerate(versions):
        for regex in ("a.*", ".*b", "c"):
            fresh = TopicPatterns().matching(regex, names, 0)
            assert patterns.matching(regex, names, number) == fresh


def test_many_expressions_are_forgotten_and_evaluated_again():
    patterns = TopicPatterns()
    for number in range(1_500):
        patterns.matching(f"orders{number}", TOPICS, 1)

    assert patterns.matching("orders", TOPICS, 1) == {"orders"}
