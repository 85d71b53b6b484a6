"""Goal: the cases of MirrorMaker 2's integration tests about groups, with replicas of both kinds.

Method: librdkafka commits at the source, a mirror replicates, `logmirror.run`
translates, through the library. The numbers of the tests are those of docs/mirrormaker-parity.md.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

import logmirror
from kit.judges.clients import odd_messages, produce, rows_by_librdkafka
from kit.judges.copies import copy
from kit.judges.gaps import log_bounds
from kit.runs.inline_run import mirror_to_cluster
from kit.runs.replica_groups import consumer_of
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import all_but
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.wire.mirrormaker import decode_checkpoint, syncs_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class World:
    """A source and a destination, with mirrors of one kind."""

    def __init__(self, source: str, destination: str, folder: Path, kind: str, name: str) -> None:
        self.source, self.destination, self.name = source, destination, name
        self._config, self.kind = folder / "logmirror.json", kind
        self._mirrors: list[dict[str, Any]] = []

    def topic(self, suffix: str = "", partitions: int = 2, **more: Any) -> str:
        """Create a topic with a mirror."""
        topic = f"{self.name}{suffix}"
        create_topic(self.source, topic, partitions, {})
        servers = self.source, self.destination
        mirror = mirror_to_cluster(topic, *servers, name=f"to-{self.name}", offsets=self.kind)
        groups = {"source-alias": self.name, "include": [f"{self.name}.*"]}
        self._mirrors.append(mirror | {"name": topic, "groups": groups | more})
        self._config.write_text(json.dumps({"mirrors": self._mirrors}))
        return topic

    def fill(self, topic: str, partition: int, count: int) -> None:
        produce(self.source, topic, odd_messages(count, seed=count), partition=partition)

    def copy(self) -> None:
        for mirror in self._mirrors:
            copy(mirror)

    def commit(self, topic: str, *offsets: int) -> None:
        consumer = consumer_of(self.source, f"{self.name}-g")
        wanted = [TopicPartition(topic, *pair) for pair in enumerate(offsets)]
        consumer.commit(offsets=wanted, asynchronous=False)
        consumer.close()

    def committed(self, topic: str, partitions: int = 2) -> list[int]:
        """The committed offsets at the destination."""
        consumer = consumer_of(self.destination, f"{self.name}-g")
        wanted = [TopicPartition(topic, number) for number in range(partitions)]
        found = [one.offset for one in consumer.committed(wanted, timeout=60)]
        consumer.close()
        return found

    def translate(self) -> dict[tuple[str, int], list[int]]:
        """Run one round, as a process that begins; return the checkpoints so far."""
        logmirror.run(logmirror.load(self._config), only="groups", until_now=True)
        found: dict[tuple[str, int], list[int]] = {}
        for row in rows_by_librdkafka(self.destination, f"{self.name}.checkpoints.internal"):
            one = decode_checkpoint(row.key, row.value)
            found.setdefault((one.topic, one.partition), []).append(one.downstream)
        return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("groups")
    for name in ("source", "destination"):
        (folder / name).mkdir()
    with (
        EmbeddedBroker(folder / "source") as source,
        EmbeddedBroker(folder / "destination") as destination,
    ):
        yield source.bootstrap, destination.bootstrap


@pytest.fixture(
    params=all_but(["preserve", "translate"], "translate", reason="equal offsets need no syncs")
)
def world(request, servers, tmp_path, topic_name) -> World:
    return World(*servers, tmp_path, request.param, topic_name)


def test_mm_54_mm_58_a_partition_without_records_does_not_delay_others(world):
    topic = world.topic()
    world.fill(topic, 0, 10)
    world.copy()
    world.commit(topic, 10, 0)

    found = world.translate()

    assert found[topic, 0] == [10]
    # With new offsets nothing is known of it before the first record.
    is_known = world.kind == "preserve"
    assert found.get((topic, 1)) == ([0] if is_known else None)
    world.fill(topic, 1, 20)
    world.copy()
    world.commit(topic, 10, 20)
    found = world.translate()
    assert found[topic, 0] == [10]
    assert found[topic, 1] == ([0, 20] if is_known else [20])


def test_mm_15_a_partition_that_is_not_committed_has_no_checkpoint(world):
    topic = world.topic()
    for number in range(2):
        world.fill(topic, number, 10)
    world.copy()
    world.commit(topic, 10)

    assert world.translate() == {(topic, 0): [10]}


def test_mm_55_offsets_at_the_target_reach_the_end_also_of_a_later_topic(world):
    first = world.topic(**{"sync-group-offsets": True})
    for number in range(2):
        world.fill(first, number, 100)
    world.copy()
    world.commit(first, 100, 100)
    before = world.translate()
    assert world.committed(first) == [100, 100]

    second = world.topic("-later", **{"sync-group-offsets": True})
    for number in range(2):
        world.fill(second, number, 50)
    world.copy()
    world.commit(second, 50, 50)

    after = world.translate()
    assert world.committed(second) == [50, 50]
    assert world.committed(first) == [100, 100]
    assert {one: after[one] for one in before} == before


def test_mm_56_a_mirror_without_groups_writes_no_syncs_of_equal_offsets(servers, topic_name):
    source, destination = servers
    create_topic(source, topic_name, 1, {})
    produce(source, topic_name, odd_messages(10, seed=1))
    copy(mirror_to_cluster(topic_name, source, destination, name=f"to-{topic_name}"))

    assert log_bounds(destination, topic_name, 0) == (0, 10)
    with ClusterClient(connection_settings(source, {})) as client:
        assert syncs_topic(f"to-{topic_name}") not in client.topics()


def test_mm_59_after_a_restart_and_more_records_the_group_reaches_the_end(world):
    topic = world.topic()
    for number in range(2):
        world.fill(topic, number, 100)
    world.copy()
    world.commit(topic, 60, 100)
    before = world.translate()
    for number in range(2):
        world.fill(topic, number, 100)
    world.copy()
    again = world.translate()  # after a restart
    assert {one: places[:1] for one, places in again.items()} == before
    world.commit(topic, 200, 200)

    found = world.translate()

    for number in range(2):
        ascending = found[topic, number]
        assert ascending == sorted(set(ascending))
        *_, last = rows_by_librdkafka(world.destination, topic, partition=number)
        assert ascending[-1] == last.offset + 1


def test_mm_60_a_group_behind_the_flow_advances_and_goes_back_with_its_source(world):
    topic = world.topic()
    for number in range(2):
        world.fill(topic, number, 1000)
    world.copy()
    advancing = []
    for percent in (30, 60, 90):
        world.commit(topic, *(10 * percent,) * 2)
        advancing.append(world.translate())
    world.commit(topic, 100, 100)
    back = world.translate()
    for number in range(2):
        last = [found[topic, number][-1] for found in advancing]
        assert last == sorted(set(last))
        assert all(place <= 10 * at for place, at in zip(last, (30, 60, 90), strict=True))
        assert back[topic, number][-1] < last[0]
        assert back[topic, number][-1] <= 100
