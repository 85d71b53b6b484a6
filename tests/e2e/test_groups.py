"""Goal: a consumer group continues in a replica at its next unread record, and is never moved back.

Method: stock clients consume and commit at the source, `logmirror groups` plans and commits at the
destination, and stock clients continue there. Between Apache Kafka and the embedded broker, both
ways, with gaps in the source's offsets.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition

from kit.judges.clients import Row, odd_messages, produce, rows_by_librdkafka
from kit.judges.copies import copy
from kit.judges.gaps import write_transactions
from kit.runs.commands import logmirror
from kit.runs.inline_run import config_text, mirror_to_cluster
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTITIONS = 2


class World(NamedTuple):
    """A topic with a group at the source, and its replica."""

    source: str
    destination: str
    topic: str
    config: Path
    plan: Path
    mirror: dict[str, Any]

    def run(self, *arguments: str) -> Any:
        """Run `logmirror groups ...`."""
        return logmirror("groups", *arguments, "-c", self.config)

    def rows(self, server: str, partition: int) -> list[Row]:
        """Return the committed records of a partition."""
        return list(rows_by_librdkafka(server, self.topic, partition=partition))


@pytest.fixture(params=["preserve", "translate"])
def world(request, kafka_431, topic_name, tmp_path) -> Iterator[World]:
    """Preserved offsets from Apache Kafka to the embedded broker; new ones the other way."""
    with EmbeddedBroker(tmp_path / "broker") as embedded:
        yield _world(tmp_path, topic_name, request.param, kafka_431.bootstrap, embedded.bootstrap)


def _world(folder: Path, topic_name: str, offsets: str, *servers: str) -> World:
    source, destination = servers if offsets == "preserve" else reversed(servers)
    create_topic(source, topic_name, PARTITIONS, {})
    for partition in range(PARTITIONS):
        write_transactions(source, topic_name, partition)
        produce(source, topic_name, odd_messages(400, seed=partition), partition=partition)
    mirror = mirror_to_cluster(topic_name, source, destination, name="standby", offsets=offsets)
    config, plan = folder / "logmirror.yaml", folder / "plan.json"
    config.write_text(config_text(mirror))
    return World(source, destination, topic_name, config, plan, mirror)


def _consumer(server: str, group: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": server,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
    )


def _commit(world: World, server: str, group: str, *offsets: int) -> None:
    """Commit an offset of each partition, without joining the group."""
    consumer = _consumer(server, group)
    wanted = [TopicPartition(world.topic, *pair) for pair in enumerate(offsets)]
    consumer.commit(offsets=wanted, asynchronous=False)
    consumer.close()


def _committed(world: World, server: str, group: str) -> list[int]:
    consumer = _consumer(server, group)
    wanted = [TopicPartition(world.topic, number) for number in range(PARTITIONS)]
    found = [one.offset for one in consumer.committed(wanted, timeout=20)]
    consumer.close()
    return found


def _rest(world: World, group: str, partition: int) -> list[Row]:
    """Return what the group still reads of a partition at the destination."""
    [start] = [_committed(world, world.destination, group)[partition]]
    return [row for row in world.rows(world.destination, partition) if row.offset >= start]


def _fields(rows: list[Row]) -> list[tuple[object, ...]]:
    return [row[1:] for row in rows]


def test_a_group_continues_at_its_next_record_or_a_counted_number_before(world):
    read = {number: world.rows(world.source, number)[: 150 + 30 * number] for number in range(2)}
    offsets = [rows[-1].offset + 1 for rows in read.values()]
    _commit(world, world.source, "billing", *offsets)
    copy(world.mirror)

    planned = world.run("plan", "--output", str(world.plan))
    assert planned.returncode == 0, planned.stderr
    assert _committed(world, world.destination, "billing") == [-1001, -1001]
    applied = world.run("apply", str(world.plan), "--format", "json")
    assert applied.returncode == 0, applied.stderr

    [plan] = json.loads(world.plan.read_text())["groups"]
    assert [step["source_offset"] for step in plan["steps"]] == offsets
    for step in plan["steps"]:
        number = step["partition"]
        there = world.rows(world.source, number)
        unread = there[len(read[number]) - step["read_again"] :]
        assert _fields(_rest(world, "billing", number)) == _fields(unread)
        if world.mirror["destinations"][0]["offsets"] == "preserve":
            assert step["read_again"] == 0
            assert step["target_offset"] == step["source_offset"]
    assert [one["offset"] for one in json.loads(applied.stdout)] == _committed(
        world, world.destination, "billing"
    )

    again = world.run("apply", str(world.plan))
    assert again.returncode == 0
    assert "unchanged" in again.stdout
    rolled_back = world.run("rollback", str(world.plan))
    assert rolled_back.returncode == 0, rolled_back.stdout
    assert _committed(world, world.destination, "billing") == [-1001, -1001]


def test_a_group_that_is_ahead_or_has_members_at_the_destination_is_not_moved(world):
    copy(world.mirror)
    _commit(world, world.source, "ahead", 10, 10)
    _commit(world, world.destination, "ahead", 300, 5)
    _commit(world, world.source, "active", 10, 10)
    member = _consumer(world.destination, "active")
    member.subscribe([world.topic])
    deadline = time.monotonic() + 60
    while not member.assignment():
        assert time.monotonic() < deadline
        member.poll(0.1)
    assert world.run("plan", "--output", str(world.plan)).returncode == 0

    applied = world.run("apply", str(world.plan), "--format", "json")

    assert applied.returncode == 1
    outcomes = {(one["group"], one["partition"]): one for one in json.loads(applied.stdout)}
    assert _committed(world, world.destination, "ahead")[0] == 300
    assert outcomes["ahead", 0]["reason"] == "the destination is ahead"
    assert outcomes["ahead", 1]["is_done"]
    for number in range(PARTITIONS):
        assert not outcomes["active", number]["is_done"]
        assert "has members at the destination" in outcomes["active", number]["reason"]
    assert _committed(world, world.destination, "active") == [-1001, -1001]
    member.close()
    assert world.run("rollback", str(world.plan)).returncode == 0
    assert _committed(world, world.destination, "ahead") == [300, 5]


def test_a_commit_after_the_plan_is_not_overwritten(world):
    copy(world.mirror)
    _commit(world, world.source, "moving", 200, 200)
    assert world.run("plan", "--output", str(world.plan)).returncode == 0
    _commit(world, world.destination, "moving", 1)

    applied = world.run("apply", str(world.plan), "--format", "json")

    assert applied.returncode == 1
    first, second = json.loads(applied.stdout)
    assert (first["offset"], first["is_done"]) == (1, False)
    assert first["reason"] == "the group has committed since the plan was made"
    assert second["is_done"]


def test_what_cannot_be_translated_is_named(world):
    _commit(world, world.source, "early", 7, 7)

    listed = world.run("list", "--format", "json")
    described = world.run("describe", "early")

    [found] = json.loads(listed.stdout)
    assert (listed.returncode, found["not_known"], found["to_commit"]) == (1, 2, 0)
    assert described.returncode == 1
    assert described.stdout.count("the destination has no such partition") == PARTITIONS
    unknown = world.run("describe", "other")
    assert unknown.returncode == 2
    assert "no such group has committed offsets" in unknown.stderr
