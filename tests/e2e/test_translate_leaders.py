"""Replicas with new offsets in a cluster whose leaders fail and move during transactions.

Method: Apache Kafka with three brokers, which lead partitions, progress and transactions in turn.
The sequence that librdkafka reads must be the same for both topics, and each offset sync must map
the offsets of one record.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.judges.copies import copy, copying, forget_connections, wait_for_end
from kit.judges.translated import visible
from kit.runs.inline_run import mirror_to_cluster
from kit.runs.writer import writing
from kit.servers.apache import VERSIONS
from kit.servers.cluster import KafkaCluster
from logmirror.to_kafka.translate_progress import PROGRESS_TOPIC
from logmirror.wire.mirrormaker import decode_sync, syncs_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.kafka import ApacheKafka

PARTITIONS = 4
ALIAS = "led"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster(VERSIONS[-1], tmp_path / "cluster") as cluster:
        yield cluster
        forget_connections()


def wrong_pairs(source: ApacheKafka, cluster: KafkaCluster, topic: str) -> list[str]:
    """Syncs that do not map one record; fails for a partition without syncs."""
    syncs = defaultdict(list)
    for row in rows_by_librdkafka(source.bootstrap, syncs_topic(ALIAS)):
        sync = decode_sync(row.key, row.value)
        syncs[sync.partition].append(sync)
    assert {len(of_one) > 3 for of_one in syncs.values()} == {True}
    assert sorted(syncs) == list(range(PARTITIONS))
    wrong = []
    for number, of_one in syncs.items():
        here = {
            r.offset: r[1:] for r in rows_by_librdkafka(source.bootstrap, topic, partition=number)
        }
        there = {
            r.offset: r[1:] for r in rows_by_librdkafka(cluster.bootstrap, topic, partition=number)
        }
        wrong += [s for s in of_one if there.get(s.downstream, ()) != here[s.upstream]]
    return wrong


@pytest.mark.gate("a cluster of three brokers")
@pytest.mark.timeout(600)
def test_failing_and_moving_leaders_lose_and_duplicate_nothing(kafka_431, cluster, topic_name):
    source = kafka_431
    source.create_topic(topic_name, partitions=PARTITIONS)
    servers = (source.bootstrap, cluster.bootstrap)
    mirror = mirror_to_cluster(topic_name, *servers, name=ALIAS, offsets="translate")
    with (
        writing(source.bootstrap, topic_name, partitions=PARTITIONS, seed=3),
        copying(mirror),
    ):
        wait_for_end(cluster.bootstrap, topic_name, 20)
        leaders = {cluster.leader(topic_name, number) for number in range(PARTITIONS)}
        assert len(leaders | {cluster.leader(PROGRESS_TOPIC)}) > 1
        for node in cluster.brokers:
            cluster.wait_until_in_sync(topic_name, partitions=PARTITIONS)
            cluster.wait_until_in_sync(PROGRESS_TOPIC)
            cluster.restart_node(node, kill=node == cluster.leader(PROGRESS_TOPIC))
    copy(mirror)

    for number in range(PARTITIONS):
        expected = visible(source, topic_name, number)
        assert len(expected) > 100
        assert visible(cluster, topic_name, number) == expected
    assert wrong_pairs(source, cluster, topic_name) == []
