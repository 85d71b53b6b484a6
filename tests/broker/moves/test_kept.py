"""Goal: a move keeps everything that belongs to a partition, and what happens to it continues.

Method: a real broker with two directories. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource

from broker.moves.test_moves import batches, contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.judges.partition_client import Appended, data_batch
from kit.runs.commands import wait_until

if TYPE_CHECKING:
    from broker.moves.conftest import TwoDirs
    from kit.judges.partition_client import PartitionClient


def settings(dirs: TwoDirs, topic: str) -> tuple[object, dict[str, tuple[str, int]]]:
    """Topic ID and configs, each with its source."""
    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    described = admin.describe_topics(TopicCollection([topic]))[topic].result(20)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    configs = admin.describe_configs([resource])[resource].result(20)
    found = {name: (one.value, one.source) for name, one in configs.items()}
    return str(described.topic_id), found


@pytest.mark.move("E61")
def test_e61_topic_id_and_configs_stay(dirs):
    dirs.create("t", retention_ms="7200000", min_insync_replicas="1", segment_bytes="300000")
    fill(dirs, "t", 3)
    before = settings(dirs, "t")
    assert before[1]["retention.ms"][0] == "7200000"
    for target in (dirs.b, dirs.a, dirs.b):
        dirs.move("t", target)
        assert settings(dirs, "t") == before
    dirs.broker.kill()
    dirs.broker.start()
    assert settings(dirs, "t") == before


@pytest.mark.move("E57")
def test_e57_segments_of_an_archive_with_several_leader_epochs_are_moved_as_they_are(dirs):
    """Only so may a log have them: the broker itself writes epoch 0, and responds with it."""
    dirs.create("t")
    dirs.broker.kill()
    folder = dirs.a / "t" / "0"
    folder.mkdir(parents=True)
    for number, epoch in enumerate([0, 3, 3, 5]):
        first = 100 * number
        content = first.to_bytes(8) + BATCH[8:12] + epoch.to_bytes(4) + BATCH[16:]
        (folder / f"{first:020d}-{first + 99:020d}.batches").write_bytes(content)
    dirs.broker.start()

    def seen(partition: PartitionClient) -> object:
        return [partition.end_of_epoch(epoch) for epoch in range(7)], batches(partition)

    with dirs.partition("t") as partition:
        before, found = seen(partition), contents(partition)
        assert [offset for offset, _ in found] == [*range(400)]
        for target in (dirs.b, dirs.a, dirs.b):
            dirs.move("t", target)
            assert seen(partition) == before
        assert partition.produce(BATCH) == Appended(0, 400)
        after = seen(partition)
        dirs.move("t", dirs.a)
        assert seen(partition) == after
    dirs.broker.kill()
    shutil.rmtree(dirs.b / "t")
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert seen(partition) == after


@pytest.mark.slow
@pytest.mark.move("E88")
@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_e88_compaction_continues_after_a_move_that_did_not_end(dirs, ends):
    settings = {"min_cleanable_dirty_ratio": "0", "segment_ms": "300"}
    dirs.create("t", cleanup_policy="compact", **settings)
    producer = Producer({"bootstrap.servers": dirs.bootstrap})
    for _ in range(2):  # a limit of 0 lets one batch pass, and the last one ends the move
        keyed(producer, 100, 100)
    with dirs.client() as client, dirs.partition("t") as partition:
        if ends == "cancelled":
            dirs.limit(0)
            assert client.move_one("t", dirs.b) == NONE
            assert client.where("t")[str(dirs.b)].is_future
            assert client.move_one("t", dirs.a) == NONE
        else:
            (dirs.b / "t").write_bytes(b"")  # in the place of the topic's folder
            assert client.move_one("t", dirs.b) == NONE
            log = dirs.broker.log
            wait_until(lambda: "failed" in log.read_text(), what=lambda: "a failed move")
        keyed(producer, 3_000, 10)
        wait_until(
            lambda: len(contents(partition)) < 1_000,
            what=lambda: f"compaction: {len(contents(partition))}",
            timeout_s=60,
        )
        dirs.limit(None)
        if ends == "failed":
            (dirs.b / "t").unlink()
        dirs.move("t", dirs.b)
        values = {value for _, value in contents(partition)}
        assert values >= {b"%d" % number for number in range(2_993, 3_000)}
        assert partition.produce(data_batch(1)).error != NONE, "it has no key"


def keyed(producer: Producer, count: int, size: int) -> None:
    """Send records with seven keys."""
    for number in range(count):
        value = b"%d" % number
        producer.produce("t", key=b"%d" % (number % 7), value=value if size < 20 else bytes(size))
    assert producer.flush(30) == 0
