"""Goal: a plan that is reviewed is the plan that is applied, and nothing else passes for one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from logmirror.errors import UsageError
from logmirror.groups.plan import plan_text, read_plan
from logmirror.reports import GroupPlan, GroupStep, NextRecord

STEP = GroupStep(
    mirror="orders",
    topic="orders",
    partition=0,
    target_topic="orders-copy",
    source_offset=12,
    target_offset=10,
    current_offset=None,
    metadata="of the client",
    reason="the replica ends 2 offsets before the group",
    read_again=None,
    next_record=NextRecord(offset=11, timestamp_ms=-1, key="order-17"),
)
PLAN = GroupPlan(
    group="billing",
    destination="standby",
    cluster_id="abc",
    source_state="Empty",
    target_state="",
    steps=(STEP,),
)


def test_a_plan_is_read_as_it_was_written():
    assert read_plan(plan_text([PLAN])) == [PLAN]


def test_a_plan_without_the_next_records_is_still_read():
    data = json.loads(plan_text([PLAN]))
    del data["groups"][0]["steps"][0]["next_record"]

    [plan] = read_plan(json.dumps(data))

    assert plan == replace(PLAN, steps=(replace(STEP, next_record=None),))


@pytest.mark.parametrize(
    "value",
    [1, {}, {"offset": "1", "timestamp_ms": 0, "key": None}, {"offset": 1, "timestamp_ms": 0},
     {"offset": 1, "timestamp_ms": 0, "key": 7}],
)  # fmt: skip
def test_a_next_record_that_is_none_is_refused(value):
    data = json.loads(plan_text([PLAN]))
    data["groups"][0]["steps"][0]["next_record"] = value
    with pytest.raises(UsageError, match="not a plan"):
        read_plan(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"version": 1}', '{"version": 1, "groups": [{}]}', "[" * 100_000],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(UsageError, match="not a plan"):
        read_plan(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_offset", "10"),
        ("target_offset", 1.5),
        ("target_offset", True),
        ("current_offset", -1),
        ("source_offset", None),
        ("partition", None),
    ],
)
def test_a_number_that_is_none_is_refused(name, value):
    data = json.loads(plan_text([PLAN]))
    data["groups"][0]["steps"][0][name] = value
    with pytest.raises(UsageError, match="not a plan"):
        read_plan(json.dumps(data))


def test_a_plan_of_a_later_version_is_refused():
    with pytest.raises(UsageError, match="another version"):
        read_plan('{"version": 2, "groups": []}')


@pytest.mark.parametrize(
    ("current", "target", "expected"),
    [(None, 10, True), (9, 10, True), (10, 10, False), (11, 10, False), (None, None, False)],
)
def test_an_offset_is_never_moved_back(current, target, expected):
    values = {field: getattr(STEP, field) for field in STEP.__dataclass_fields__}
    values |= {"current_offset": current, "target_offset": target}
    step = GroupStep(**values)
    assert step.is_committed is expected
