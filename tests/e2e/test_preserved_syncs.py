"""MirrorMaker 2 translates groups of a replica that keeps offsets, with logmirror's offset syncs.

Method: groups are translated once by `logmirror run`; then MirrorMaker's own stores read the topics
of both clusters and translate every offset, and its checkpoint connector translates the groups.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import odd_messages, produce, rows_by_librdkafka
from kit.judges.copies import copy
from kit.judges.gaps import log_bounds
from kit.judges.mirror_translation import MirrorTranslation
from kit.judges.mirrormaker import CHECKPOINTS, Checkpoint, MirrorMakerTools, checkpoints
from kit.runs.commands import logmirror, wait_until
from kit.runs.replica_groups import World, commit, world_of
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.model import TopicPartition
from logmirror.wire.mirrormaker import decode_sync, syncs_topic

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = ("start", "middle", "behind", "end")


def replicated(folder: Path, topic_name: str, *servers: str) -> tuple[World, list[list[int]]]:
    """A replica that keeps offsets, and the committed offsets of `GROUPS` by partition."""
    groups = {"source-alias": topic_name, "include": [f"{topic_name}.*"]}
    world = world_of(folder, topic_name, "preserve", *servers, groups=groups)
    copy(world.mirror)
    ends = [log_bounds(world.source, topic_name, number)[1] for number in range(2)]
    offsets = [[0, 0], [end // 2 for end in ends], [end - 7 for end in ends], ends]
    for group, wanted in zip(GROUPS, offsets, strict=True):
        commit(world, world.source, f"{topic_name}-{group}", *wanted)
    translate(world)
    return world, offsets


def translate(world: World) -> None:
    done = logmirror("run", "--only", "groups", "--until-now", "-c", world.config)
    assert done.returncode == 0, done.stderr
    assert not re.search("offset syncs (paused|disabled)", done.stderr)


def syncs(world: World, partition: int) -> list[int]:
    rows = rows_by_librdkafka(world.source, syncs_topic("standby"))
    found = [decode_sync(row.key, row.value) for row in rows]
    mine = [one for one in found if (one.topic, one.partition) == (world.topic, partition)]
    assert all(one.upstream == one.downstream for one in mine)
    return [one.upstream for one in mine]


def task(world: World) -> dict[str, object]:
    """The configuration of MirrorMaker's checkpoint task."""
    return {
        "name": "checkpoints",
        "connector.class": "org.apache.kafka.connect.mirror.MirrorCheckpointConnector",
        "source.cluster.alias": world.topic,
        "target.cluster.alias": "standby",
        "source.cluster.bootstrap.servers": world.source,
        "target.cluster.bootstrap.servers": world.destination,
        "task.assigned.groups": f"{world.topic}-start",
    }


def test_mirrormaker_translates_every_offset_and_skips_none(
    kafka_431, kafka_392, topic_name, tmp_path
):
    world, _ = replicated(tmp_path, topic_name, kafka_431.bootstrap, kafka_392.bootstrap)
    before = [syncs(world, number) for number in range(2)]
    for number in range(2):
        produce(world.source, topic_name, odd_messages(300, seed=number), partition=number)
    copy(world.mirror)
    translate(world)

    with MirrorTranslation() as java:
        assert java.read_topics(task(world))  # and the checkpoints that logmirror wrote
        for number in range(2):
            found = syncs(world, number)
            start, end = log_bounds(world.destination, topic_name, number)
            assert found[: len(before[number])] == before[number]
            assert (found[0], found[-1]) == (start, end - 1)
            assert found == sorted(set(found))
            where = TopicPartition(topic_name, number)
            theirs = java.translated(where, range(start, end + 1))
            assert all(their is not None and their >= start for their in theirs)
            assert all(their <= at for at, their in enumerate(theirs, start) if their)
            assert theirs[-1] == end


@pytest.mark.gate("MirrorMaker's whole start; its stores judge in `make test`")
def test_mirrormakers_connector_translates_groups(kafka_431, kafka_392, topic_name, tmp_path):
    world, offsets = replicated(tmp_path, topic_name, kafka_431.bootstrap, kafka_392.bootstrap)
    worker = MirrorMakerTools("4.3.1").start_checkpoints(
        world.source,
        world.destination,
        alias="standby",
        topic=topic_name,
        groups=f"{topic_name}.*",
        folder=tmp_path / "connect",
    )
    found: dict[tuple[str, int], Checkpoint] = {}

    def are_there() -> bool:
        if CHECKPOINTS not in topics(world.destination):
            return False
        all_of_them = checkpoints(world.destination)
        found.update({(c.group, c.partition): c for c in all_of_them if c.topic == topic_name})
        return len(found) == 2 * len(GROUPS)

    try:
        wait_until(are_there, what=lambda: f"checkpoints: {found}", timeout_s=120)
    finally:
        worker.end(kill=True)
    for group, wanted in zip(GROUPS, offsets, strict=True):
        for number, offset in enumerate(wanted):
            one = found[f"{topic_name}-{group}", number]
            assert one.upstream == offset
            assert one.downstream <= offset
            if group in {"start", "end"}:
                assert one.downstream == offset


def topics(server: str) -> list[str]:
    with ClusterClient(connection_settings(server, {})) as client:
        return client.topics()
