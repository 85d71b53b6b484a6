"""Goal: a service in Go runs on the embedded broker unchanged.

Method: franz-go writes, shares a group with each protocol, and copies in transactions; librdkafka
reads what it wrote, and an admin client what it committed.
"""

from __future__ import annotations

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import rows_by_librdkafka
from kit.judges.franz_go import run_service

pytestmark = [
    pytest.mark.in_bucket,
    pytest.mark.timeout(600),  # the first use on a machine builds the service
]

COUNT = 480
PARTITIONS = range(4)
SOON = {"fetch.wait.max.ms": 20}
"""librdkafka finds the end of a partition after one such wait."""
EXPECTED = {
    str(partition): [f"v{number}" for number in range(partition, COUNT, len(PARTITIONS))]
    for partition in PARTITIONS
}


def _committed(broker, topic, group):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    partitions = [TopicPartition(topic, partition) for partition in PARTITIONS]
    wanted = ConsumerGroupTopicPartitions(f"{topic}-{group}", partitions)
    found = admin.list_consumer_group_offsets([wanted])[wanted.group_id].result(20)
    return [partition.offset for partition in found.topic_partitions]


def _rows(broker, topic, partition, **config):
    config |= SOON
    return list(rows_by_librdkafka(broker.bootstrap, topic, partition=partition, config=config))


@pytest.mark.statement("C11")
def test_franz_go_writes_shares_groups_and_copies_in_transactions(embedded, topic_name):
    out = f"{topic_name}-out"
    found = run_service(embedded.bootstrap, topic_name, COUNT)

    for protocol, assignor in (("classic", "cooperative-sticky"), ("consumer", "uniform")):
        first, second = found[protocol].pop("seen")
        assert (len(first), len(second)) == (2, 2)
        assert first | second == EXPECTED
        described = [protocol, assignor, "Stable", "2"]
        assert found[protocol] == {"described": described, "codecs": 4}
    assert found["committed"] == EXPECTED
    everything = [value for values in found["uncommitted"].values() for value in values]
    assert len(everything) == COUNT + found["aborted"]

    for group in ("classic", "consumer", "copy"):
        assert _committed(embedded, topic_name, group) == [COUNT // len(PARTITIONS)] * 4
    written = []
    for partition in PARTITIONS:
        numbers = range(partition, COUNT, len(PARTITIONS))
        for topic in (topic_name, out):
            rows = _rows(embedded, topic, partition)
            assert [row.key for row in rows] == [b"k%d" % number for number in numbers]
            assert [row.value for row in rows] == [b"v%d" % number for number in numbers]
            assert [row.headers for row in rows] == [
                ((b"n", b"%d" % number), (b"n", None)) for number in numbers
            ]
        rows = _rows(embedded, out, partition, **{"isolation.level": "read_uncommitted"})
        written += [row.value.decode() for row in rows]
    assert sorted(written) == sorted(everything)
    assert any(value.startswith("aborted-") for value in written)
