"""Goal: a consumer group continues in a replica at its next unread record, and is never moved back.

Method: stock clients consume and commit at the source, `logmirror groups` plans and commits at the
destination, and stock clients continue there. Between Apache Kafka and the embedded broker, both
ways, with gaps in the source's offsets.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from kit.judges.copies import copy
from kit.runs.replica_groups import (
    PARTITIONS,
    World,
    commit,
    committed,
    consumer_of,
    rest,
    world_of,
)
from kit.servers.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.judges.clients import Row

pytestmark = pytest.mark.xdist_group("e2e-groups")


@pytest.fixture(params=["preserve", "translate"])
def world(request, kafka_431, topic_name, tmp_path) -> Iterator[World]:
    """Preserved offsets from Apache Kafka to the embedded broker; new ones the other way."""
    with EmbeddedBroker(tmp_path / "broker") as embedded:
        yield world_of(tmp_path, topic_name, request.param, kafka_431.bootstrap, embedded.bootstrap)


def _fields(rows: list[Row]) -> list[tuple[object, ...]]:
    return [row[1:] for row in rows]


def test_a_group_continues_at_its_next_record_or_a_counted_number_before(world):
    read = {number: world.rows(world.source, number)[: 150 + 30 * number] for number in range(2)}
    offsets = [rows[-1].offset + 1 for rows in read.values()]
    commit(world, world.source, "billing", *offsets)
    copy(world.mirror)

    planned = world.run("plan", "--output", str(world.plan), "--format", "json")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert planned.stdout == world.plan.read_text()
    assert committed(world, world.destination, "billing") == [-1001, -1001]
    applied = world.run("apply", str(world.plan), "--format", "json")
    assert applied.returncode == 0, applied.stderr

    [plan] = json.loads(world.plan.read_text())["groups"]
    assert [step["source_offset"] for step in plan["steps"]] == offsets
    for step in plan["steps"]:
        number = step["partition"]
        there = world.rows(world.source, number)
        unread = there[len(read[number]) - step["read_again"] :]
        assert _fields(rest(world, "billing", number)) == _fields(unread)
        first = rest(world, "billing", number)[0]
        assert step["next_record"]["offset"] == first.offset
        assert step["next_record"]["timestamp_ms"] == first.timestamp_ms
        if world.mirror["destinations"][0]["offsets"] == "preserve":
            assert step["read_again"] == 0
            assert step["target_offset"] == step["source_offset"]
    assert [one["offset"] for one in json.loads(applied.stdout)] == committed(
        world, world.destination, "billing"
    )

    again = world.run("apply", str(world.plan))
    assert again.returncode == 0
    assert "unchanged" in again.stdout
    rolled_back = world.run("rollback", str(world.plan))
    assert rolled_back.returncode == 0, rolled_back.stdout
    assert committed(world, world.destination, "billing") == [-1001, -1001]


def test_a_group_that_is_ahead_or_has_members_at_the_destination_is_not_moved(world):
    copy(world.mirror)
    commit(world, world.source, "ahead", 10, 10)
    commit(world, world.destination, "ahead", 300, 5)
    commit(world, world.source, "active", 10, 10)
    member = consumer_of(world.destination, "active")
    member.subscribe([world.topic])
    deadline = time.monotonic() + 60
    while not member.assignment():
        assert time.monotonic() < deadline
        member.poll(0.1)
    assert world.run("plan", "--output", str(world.plan)).returncode == 0

    applied = world.run("apply", str(world.plan), "--format", "json")

    assert applied.returncode == 1
    plans = {one["group"]: one for one in json.loads(world.plan.read_text())["groups"]}
    there = [row.offset for row in world.rows(world.destination, 0) if row.offset >= 300]
    assert plans["ahead"]["steps"][0]["next_record"]["offset"] == there[0]
    outcomes = {(one["group"], one["partition"]): one for one in json.loads(applied.stdout)}
    assert committed(world, world.destination, "ahead")[0] == 300
    assert outcomes["ahead", 0]["reason"] == "the destination is ahead"
    assert outcomes["ahead", 1]["is_done"]
    for number in range(PARTITIONS):
        assert not outcomes["active", number]["is_done"]
        assert "has members at the destination" in outcomes["active", number]["reason"]
    assert committed(world, world.destination, "active") == [-1001, -1001]
    member.close()
    assert world.run("rollback", str(world.plan)).returncode == 0
    assert committed(world, world.destination, "ahead") == [300, 5]


def test_a_commit_after_the_plan_is_not_overwritten(world):
    copy(world.mirror)
    commit(world, world.source, "moving", 200, 200)
    assert world.run("plan", "--output", str(world.plan)).returncode == 0
    commit(world, world.destination, "moving", 1)

    applied = world.run("apply", str(world.plan), "--format", "json")

    assert applied.returncode == 1
    first, second = json.loads(applied.stdout)
    assert (first["offset"], first["is_done"]) == (1, False)
    assert first["reason"] == "the group has committed since the plan was made"
    assert second["is_done"]


def test_what_cannot_be_translated_is_named(world):
    commit(world, world.source, "early", 7, 7)

    listed = world.run("list", "--format", "json")
    described = world.run("describe", "early")

    [found] = json.loads(listed.stdout)
    assert (listed.returncode, found["not_known"], found["to_commit"]) == (1, 2, 0)
    assert described.returncode == 1
    assert described.stdout.count("the destination has no such partition") == PARTITIONS
    unknown = world.run("describe", "other")
    assert unknown.returncode == 2
    assert "no such group has committed offsets" in unknown.stderr
