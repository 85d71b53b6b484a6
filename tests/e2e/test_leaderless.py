"""A partition without a leader holds up the others of its topic once, and then continues itself.

At a start it holds up none. Method: Apache Kafka with three brokers and a topic with one partition
on each. The one broker that has a partition is killed while the topic is copied, or before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.copies import anomalies, copying, forget_connections, wait_for_end
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.apache import VERSIONS
from kit.servers.cluster import KafkaCluster

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kit.servers.kafka import ApacheKafka
    from logmirror.testing import Anomaly

LOST = 1
"""A node; it has partition 0 alone."""

ROUNDS = 4
AT_ONCE_S = 30
"""Half of what the retries of one joint request last."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster(VERSIONS[-1], tmp_path / "cluster") as cluster:
        yield cluster
        forget_connections()


class Growing:
    """A topic that grows, and its copy."""

    def __init__(self, cluster: KafkaCluster, target: str, topic: str) -> None:
        cluster.create_unreplicated(topic)
        self.cluster, self.target, self.topic = cluster, target, topic
        self.numbers = range(len(cluster.brokers))
        self.others = [n for n in self.numbers if cluster.leader(topic, n) != LOST]
        assert len(self.others) == len(self.numbers) - 1
        self.ends = dict.fromkeys(self.numbers, 0)

    def copying(self) -> AbstractContextManager[threading.Thread]:
        return copying(mirror_to_cluster(self.topic, self.cluster.bootstrap, self.target))

    def grow(self, partitions: Iterable[int]) -> None:
        for number in partitions:
            messages = odd_messages(20, seed=self.ends[number])
            produce(self.cluster.bootstrap, self.topic, messages, partition=number)
            self.ends[number] += len(messages)

    def wait(self, partitions: Iterable[int], timeout_s: float) -> None:
        for number in partitions:
            wait_for_end(
                self.target, self.topic, self.ends[number], partition=number, timeout_s=timeout_s
            )

    def anomalies(self) -> list[Anomaly]:
        return anomalies(self.cluster.bootstrap, self.topic, self.target, partitions=self.numbers)


@pytest.fixture
def world(cluster: KafkaCluster, kafka_431: ApacheKafka, topic_name: str) -> Growing:
    return Growing(cluster, kafka_431.bootstrap, topic_name)


@pytest.mark.gate("a cluster of three brokers, a minute of retries")
@pytest.mark.timeout(600)
def test_the_others_are_copied_beside_it_and_it_continues_with_its_broker(cluster, world):
    with world.copying():
        world.grow(world.numbers)
        world.wait(world.numbers, timeout_s=180)
        cluster.kill_node(LOST)
        world.grow(world.others)
        world.wait(world.others, timeout_s=180)  # the joint wait
        for _ in range(ROUNDS):
            world.grow(world.others)
            world.wait(world.others, timeout_s=AT_ONCE_S)
        cluster.start_node(LOST)
        world.grow(world.numbers)
        world.wait(world.numbers, timeout_s=180)

    assert world.anomalies() == []


@pytest.mark.gate("a cluster of three brokers")
@pytest.mark.timeout(600)
def test_a_mirror_that_starts_without_it_copies_the_others_and_it_with_its_broker(cluster, world):
    world.grow(world.numbers)
    cluster.kill_node(LOST)
    with world.copying():
        world.wait(world.others, timeout_s=AT_ONCE_S)
        cluster.start_node(LOST)
        world.wait(world.numbers, timeout_s=180)

    assert world.anomalies() == []
