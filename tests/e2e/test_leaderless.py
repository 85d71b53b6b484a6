"""A partition without a leader holds up the others of its topic once, and then continues itself.

Method: Apache Kafka with three brokers and a topic with one partition on each. The one broker that
has a partition is killed while the topic is copied.
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
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.mark.gate("a cluster of three brokers, a minute of retries")
@pytest.mark.timeout(600)
def test_the_others_are_copied_beside_it_and_it_continues_with_its_broker(
    kafka_431, cluster, topic_name
):
    cluster.create_unreplicated(topic_name)
    numbers = range(len(cluster.brokers))
    others = [number for number in numbers if cluster.leader(topic_name, number) != LOST]
    assert len(others) == len(numbers) - 1
    ends = dict.fromkeys(numbers, 0)

    def grow(partitions, timeout_s):
        for number in partitions:
            messages = odd_messages(20, seed=ends[number])
            produce(cluster.bootstrap, topic_name, messages, partition=number)
            ends[number] += len(messages)
        for number in partitions:
            wait_for_end(
                kafka_431.bootstrap, topic_name, ends[number], partition=number, timeout_s=timeout_s
            )

    with copying(mirror_to_cluster(topic_name, cluster.bootstrap, kafka_431.bootstrap)):
        grow(numbers, timeout_s=180)
        cluster.kill_node(LOST)
        grow(others, timeout_s=180)  # the joint wait
        for _ in range(ROUNDS):
            grow(others, timeout_s=AT_ONCE_S)
        cluster.start_node(LOST)
        grow(numbers, timeout_s=180)

    assert anomalies(cluster.bootstrap, topic_name, kafka_431.bootstrap, partitions=numbers) == []
