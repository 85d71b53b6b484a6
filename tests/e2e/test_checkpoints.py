"""Goal: groups of the source are usable at the replica while the mirror runs, after any restart.

Method: librdkafka commits at the source, `logmirror run` translates, and MirrorMaker's Java client
reads the checkpoints at the target. Between Apache Kafka and the embedded broker, both ways, with
gaps in the source's offsets.
"""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException

from kit.judges.clients import rows_by_librdkafka
from kit.judges.copies import copy
from kit.judges.mirror_client import MirrorClient
from kit.runs.commands import logmirror, wait_until
from kit.runs.inline_run import InlineRun, config_text, run_now
from kit.runs.replica_groups import World, commit, committed, consumer_of, world_of
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.failpoints import GROUP_POINTS, VARIABLE
from logmirror.wire.mirrormaker import decode_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("e2e-groups")

NONE = [-1001, -1001]
INTERVAL_MS = 300
STEP = 190
"""Between two committed offsets, so that a translation with few offset syncs moves each time."""


@pytest.fixture(params=["preserve", "translate"])
def world(request, kafka_431, topic_name, tmp_path) -> Iterator[World]:
    """Preserved offsets from Apache Kafka to the embedded broker; new ones the other way."""
    with EmbeddedBroker(tmp_path / "broker") as embedded:
        servers = kafka_431.bootstrap, embedded.bootstrap
        yield world_of(tmp_path, topic_name, request.param, *servers, groups=groups(topic_name))


def groups(topic_name: str, **more: Any) -> dict[str, Any]:
    """The clusters of these tests are shared: names are those of one test."""
    return {
        "source-alias": topic_name,
        "include": [f"{topic_name}.*"],
        "interval-ms": INTERVAL_MS,
        **more,
    }


def once(world: World) -> Any:
    """Translate once."""
    return logmirror("run", "--only", "groups", "--until-now", "-c", world.config)


def with_groups(world: World, **more: Any) -> World:
    """The same with other settings of `groups`."""
    world.mirror["groups"] |= more
    world.config.write_text(config_text(world.mirror))
    return world


def beside(world: World, folder: Path, environment: Mapping[str, str] | None = None) -> InlineRun:
    """`logmirror run --only groups`, in the background."""
    return InlineRun(world.config, "--only", "groups", folder=folder, environment=environment or {})


def checkpoints(world: World, group: str) -> list[tuple[int, int, int]]:
    """Return partition, upstream and downstream of a group's checkpoints, also of aborted ones."""
    topic = f"{world.topic}.checkpoints.internal"
    config = {"isolation.level": "read_uncommitted"}
    rows = rows_by_librdkafka(world.destination, topic, config=config)
    found = [decode_checkpoint(row.key, row.value) for row in rows]
    return [(one.partition, one.upstream, one.downstream) for one in found if one.group == group]


def wait_for_checkpoints(world: World, group: str, count: int) -> None:
    def is_there() -> bool:
        with contextlib.suppress(KafkaException):  # the topic does not exist yet
            return len(checkpoints(world, group)) >= count
        return False

    wait_until(is_there, what=lambda: f"{count} checkpoints", timeout_s=60)


def end(world: World, partition: int) -> int:
    return world.rows(world.destination, partition)[-1].offset + 1


def unread(world: World, partition: int, offset: int) -> list[object]:
    """The fields of the source's records from an offset on."""
    return [row[1:] for row in world.rows(world.source, partition) if row.offset >= offset]


def replica_from(world: World, partition: int, offset: int) -> list[object]:
    return [row[1:] for row in world.rows(world.destination, partition) if row.offset >= offset]


def test_java_finds_the_position_of_a_group_in_the_replica(world):
    """Also MM-53."""
    group = f"{world.topic}-billing"
    offsets = [world.rows(world.source, number)[150].offset for number in range(2)]
    commit(world, world.source, group, *offsets)
    copied = run_now(world.config)
    assert copied.returncode == 0, copied.stderr

    with MirrorClient(world.destination) as java:
        found = java.translate_offsets(world.topic, group)
        assert world.topic in java.upstream_clusters()
        assert java.replication_hops(world.topic) == 1
        assert f"{world.topic}.checkpoints.internal" in java.checkpoint_topics()
        assert {"heartbeats", f"{world.topic}.heartbeats"} <= java.heartbeat_topics()
        [heartbeat] = java.heartbeats(f"{world.topic}.heartbeats")

    assert heartbeat[:2] == (world.topic, "standby")
    assert committed(world, world.destination, group) == NONE
    for number, offset in enumerate(offsets):
        position = found[world.topic, number].offset
        rest, expected = replica_from(world, number, position), unread(world, number, offset)
        assert rest[len(rest) - len(expected) :] == expected
        if world.mirror["destinations"][0]["offsets"] == "preserve":
            assert position == offset


def test_a_group_that_moves_is_followed_and_a_restart_repeats_nothing(world, tmp_path):
    group = f"{world.topic}-moving"
    copy(world.mirror)
    commit(world, world.source, group, 100, 100)
    with beside(world, tmp_path) as run:
        wait_for_checkpoints(world, group, 2)
        commit(world, world.source, group, 300, 300)
        wait_for_checkpoints(world, group, 4)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0
    before = checkpoints(world, group)
    assert [one[1] for one in before] == [100, 100, 300, 300]

    assert once(world).returncode == 0
    assert checkpoints(world, group) == before

    last = world.rows(world.source, 1)[-1].offset + 1
    commit(world, world.source, group, 200, last)  # a rewind, and a step
    assert once(world).returncode == 0
    first, second = checkpoints(world, group)[4:]
    assert (first[:2], second[:2]) == ((0, 200), (1, last))
    assert first[2] < before[2][2]
    assert second[2] > before[3][2]


def test_a_kill_at_any_moment_loses_no_checkpoint_and_moves_none_back(world, tmp_path):
    """Killed at each crash point in turn; after each kill, a restart translates the rest."""
    group = f"{world.topic}-killed"
    copy(world.mirror)
    for number, point in enumerate(GROUP_POINTS, 1):
        offset = number * STEP
        commit(world, world.source, group, offset, offset)
        (tmp_path / point).mkdir()
        with beside(world, tmp_path / point, {VARIABLE: point}) as run:
            assert run.wait() == -signal.SIGKILL, point

        assert once(world).returncode == 0

        found = checkpoints(world, group)
        for partition in range(2):
            mine = [one for one in found if one[0] == partition]
            assert [one[2] for one in mine] == sorted(one[2] for one in mine)
            assert mine[-1][1] == offset, point
    with MirrorClient(world.destination) as java:
        assert {one[1] for one in java.translate_offsets(world.topic, group)} == {0, 1}


def test_a_second_process_takes_over_and_the_first_one_ends(world, tmp_path):
    group = f"{world.topic}-two"
    copy(world.mirror)
    commit(world, world.source, group, 100, 100)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with beside(world, tmp_path / "first") as first:
        wait_for_checkpoints(world, group, 2)
        with beside(world, tmp_path / "second") as second:
            assert first.wait() == 69, first.text
            assert "another process translates these groups now" in first.text
            commit(world, world.source, group, 300, 300)
            wait_for_checkpoints(world, group, 4)
            assert second.alive
    assert [one[1] for one in checkpoints(world, group)] == [100, 100, 300, 300]


def test_offsets_are_committed_at_the_target_and_only_forward(world):
    idle, ahead, active = (f"{world.topic}-{name}" for name in ("idle", "ahead", "active"))
    with_groups(world, **{"sync-group-offsets": True})
    copy(world.mirror)
    for group in (idle, ahead, active):
        commit(world, world.source, group, 200, 200)
    commit(world, world.destination, ahead, end(world, 0), 1)
    member = consumer_of(world.destination, active)
    member.subscribe([world.topic])
    wait_until(
        lambda: member.poll(0.1) is None and bool(member.assignment()), what=lambda: "assignment"
    )

    assert once(world).returncode == 0

    found = {one[0]: one[2] for one in checkpoints(world, idle)}
    assert committed(world, world.destination, idle) == [found[0], found[1]]
    assert committed(world, world.destination, ahead) == [end(world, 0), found[1]]
    assert committed(world, world.destination, active) == NONE
    member.close()
    commit(world, world.source, idle, 100, 300)  # a rewind is not taken over
    assert once(world).returncode == 0
    again = committed(world, world.destination, idle)
    assert again[0] == found[0]
    assert again[1] > found[1]
    assert committed(world, world.destination, active) == [found[0], found[1]]


def test_a_recreated_replica_gets_checkpoints_that_it_has(world):
    group = f"{world.topic}-recreated"
    copy(world.mirror)
    last = [world.rows(world.source, number)[-1].offset + 1 for number in range(2)]
    commit(world, world.source, group, *last)
    assert once(world).returncode == 0
    delete_topic(world.destination, world.topic)
    assert once(world).returncode == 0  # it cannot be translated now
    assert len(checkpoints(world, group)) == 2
    create_topic(world.destination, world.topic, 2, {})

    assert once(world).returncode == 0

    assert [one[1:] for one in checkpoints(world, group)[2:]] == [(one, 0) for one in last]
    delete_topic(world.destination, world.topic)
    copy(world.mirror)
    assert once(world).returncode == 0
    found = {one[0]: one[2] for one in checkpoints(world, group)[4:]}
    assert [replica_from(world, number, found[number]) for number in range(2)] == [[], []]


def test_what_the_target_has_not_yet_is_skipped_and_named(world):
    commit(world, world.source, f"{world.topic}-early", 5, 5)

    done = once(world)

    assert done.returncode == 0, done.stderr
    assert checkpoints(world, f"{world.topic}-early") == []


def test_mirrors_without_groups_are_refused(tmp_path, topic_name):
    config = tmp_path / "logmirror.yaml"
    config.write_text(json.dumps({"mirrors": []}))
    done = logmirror("run", "--only", "groups", "--until-now", "-c", config)

    assert done.returncode == 2
