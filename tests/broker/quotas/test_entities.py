"""Goal: entities, values and filters are accepted and refused as by Apache Kafka's controller."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.quotas.entities import (
    DEFAULT,
    Entity,
    Filter,
    Match,
    RefusedQuotaError,
    UnknownTypeError,
    check,
    entity,
)

ALICE = Entity("alice")
NAMES = st.none() | st.text(min_size=1, max_size=20)


@given(st.dictionaries(st.sampled_from(["user", "client-id"]), NAMES, min_size=1))
def test_an_entity_is_kept_as_it_was_named(named):
    found = entity(named.items())
    assert dict(found.named()) == named
    assert Entity.from_text(found.text()) == found


def test_an_address_is_kept_in_its_canonical_form():
    assert entity([("ip", "0:0:0:0:0:0:0:1")]) == Entity(ip="::1")
    assert entity([("ip", None)]) == Entity(ip=DEFAULT)
    assert Filter([("ip", Match.EXACT, "0::1")], strict=True).matches(Entity(ip="::1"))


@pytest.mark.parametrize(
    "named",
    [
        [],
        [("user", "")],
        [("user", "x" * 256)],
        [("group", "x")],
        [("user", "a"), ("user", "b")],
        [("ip", "10.0.0.1"), ("user", "a")],
        [("ip", "not an address")],
    ],
)
def test_an_entity_that_cannot_be_is_refused(named):
    with pytest.raises(RefusedQuotaError):
        entity(named)


@pytest.mark.parametrize(
    ("who", "key", "value"),
    [
        (ALICE, "producer_byte_rate", 1.0),
        (ALICE, "consumer_byte_rate", 2.0**62),
        (ALICE, "request_percentage", 0.5),
        (Entity(ip="::1"), "connection_creation_rate", 2.0**31 - 1),
    ],
)
def test_a_quota_that_can_be_is_accepted(who, key, value):
    assert check(who, key, value) == key


@pytest.mark.parametrize(
    ("who", "key", "value"),
    [
        (ALICE, "producer_byte_rate", 0.0),
        (ALICE, "producer_byte_rate", -1.0),
        (ALICE, "producer_byte_rate", 1.5),
        (ALICE, "producer_byte_rate", 2.0**63),
        (ALICE, "producer_byte_rate", math.nan),
        (ALICE, "request_percentage", math.inf),
        (ALICE, "request_percentage", 1e300),
        (ALICE, "controller_mutation_rate", 1.0),
        (ALICE, "connection_creation_rate", 1.0),
        (ALICE, "", 1.0),
        (Entity(ip="::1"), "producer_byte_rate", 1.0),
        (Entity(ip="::1"), "connection_creation_rate", 2.0**31),
    ],
)
def test_a_quota_that_cannot_be_is_refused(who, key, value):
    with pytest.raises(RefusedQuotaError):
        check(who, key, value)


BOTH, USER, USERS, CLIENT = Entity("u", "c"), Entity("u"), Entity(DEFAULT), Entity(None, "c")


@pytest.mark.parametrize(
    ("components", "strict", "found"),
    [
        ([], False, [BOTH, USER, USERS, CLIENT]),
        ([], True, []),
        ([("user", Match.EXACT, "u")], False, [BOTH, USER]),
        ([("user", Match.EXACT, "u")], True, [USER]),
        ([("user", Match.DEFAULT, None)], True, [USERS]),
        ([("user", Match.ANY, None)], True, [USER, USERS]),
        ([("user", Match.ANY, None)], False, [BOTH, USER, USERS]),
        ([("user", Match.ANY, None), ("client-id", Match.ANY, None)], True, [BOTH]),
        ([("client-id", Match.EXACT, "d")], False, []),
        ([("ip", Match.ANY, None)], False, []),
    ],
)
def test_a_filter_finds_what_it_names(components, strict, found):
    wanted = Filter(components, strict=strict)
    assert [who for who in (BOTH, USER, USERS, CLIENT) if wanted.matches(who)] == found


@pytest.mark.parametrize(
    "components",
    [
        [("user", 3, None)],
        [("user", Match.EXACT, None)],
        [("user", Match.DEFAULT, "u")],
        [("user", Match.ANY, "u")],
        [("", Match.ANY, None)],
        [("user", Match.ANY, None), ("user", Match.ANY, None)],
        [("user", Match.ANY, None), ("ip", Match.ANY, None)],
        [("ip", Match.EXACT, "here")],
    ],
)
def test_a_filter_that_contradicts_itself_is_refused(components):
    with pytest.raises(RefusedQuotaError) as refused:
        Filter(components, strict=False)
    assert not isinstance(refused.value, UnknownTypeError)


def test_a_filter_of_an_unknown_type_has_an_error_of_its_own():
    with pytest.raises(UnknownTypeError):
        Filter([("group", Match.ANY, None)], strict=False)
