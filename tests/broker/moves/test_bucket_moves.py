"""Moves between a disk and a bucket: the tests of moves between disks, and what only a bucket has.

Method: the bucket is on Versity's S3 gateway. A kill removes everything that the broker has on its
machine beside the log directory on the disk. The names of tests are those of the statements.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from broker.bucket.test_faults import FAULTS, drawn
from broker.moves.conftest import TwoDirs
from broker.moves.test_empty_batches import test_e40_batches_without_records_are_copied
from broker.moves.test_moves import (
    contents,
    lookups,
    test_e35_records_that_are_deleted_during_a_move_stay_deleted,
    test_e38_a_compacted_partition_keeps_its_gaps,
    test_e40_every_codec_and_batches_of_any_size_are_copied,
    test_e51_producers_and_consumers_notice_nothing,
    test_e53_a_transaction_and_sequences_survive_the_swap,
    test_e66_retention_and_settings_apply_during_a_move,
    test_e85_kills_at_random_moments_lose_nothing,
    test_e88_compaction_continues_during_a_move,
)
from broker.moves.test_requests import BATCH, NONE, fill
from broker.moves.test_tools import Plan, described, sizes
from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.partition_client import EARLIEST, Appended, data_batch
from kit.runs.bucket_load import PARTITIONS, Load, Reading, stored
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import LogBucket
from kit.tiers import all_but, sized
from logmirror.failpoints import MOVE_POINTS, PLACE_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import S3Server

__all__ = [  # the same tests, with `dirs` of this module
    "test_e35_records_that_are_deleted_during_a_move_stay_deleted",
    "test_e38_a_compacted_partition_keeps_its_gaps",
    "test_e40_batches_without_records_are_copied",
    "test_e40_every_codec_and_batches_of_any_size_are_copied",
    "test_e51_producers_and_consumers_notice_nothing",
    "test_e53_a_transaction_and_sequences_survive_the_swap",
    "test_e66_retention_and_settings_apply_during_a_move",
    "test_e85_kills_at_random_moments_lose_nothing",
    "test_e88_compaction_continues_during_a_move",
]
POINTS = [*MOVE_POINTS, *PLACE_POINTS]
STEPS = [f"{target} {one}" for target in "ba" for one in POINTS]
"""The target, and where the broker is killed."""

FEW = ("b move.copied", "b move.arrived", "b move.placed", "a move.arrived", "a move.placed")


class DiskAndBucket(TwoDirs):
    """A broker with `a` on a disk and `b` in a bucket, in which every partition begins in `a`."""

    @property
    def place(self) -> LogBucket:
        """The bucket."""
        assert self.broker.bucket is not None
        return self.broker.bucket

    def names(self, topic: str) -> list[str]:
        """Every folder of a topic's partitions on the disk, and those that have objects."""
        found = {path.parent for path in self.place.matching(f"{topic}@*/*/*.batches")}
        on_disk = [f"a/{path.name}" for path in self.a.glob(f"{topic}/*")]
        return sorted([*on_disk, *(f"b/{path.name}" for path in found)])


@pytest.fixture
def dirs(tmp_path: Path, s3_server: S3Server) -> Iterator[DiskAndBucket]:
    place = LogBucket(s3_server, s3_server.new_bucket())
    disk = tmp_path / "a"
    with EmbeddedBroker(
        tmp_path / "broker", bucket=place, more_log_dirs=[str(disk)], segment_bytes=20_000
    ) as broker:
        yield DiskAndBucket(broker, disk, place.url)  # type: ignore[arg-type]  # a name, as `a`


def delete(dirs: DiskAndBucket, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    admin.delete_topics([topic])[topic].result(20)


@pytest.mark.move("E23", "E31", "E43", "E56", "E57", "E61", "E98")
def test_e31_a_partition_goes_to_the_bucket_and_back(dirs):
    for topic in ("t", "empty"):
        create_topic(dirs.bootstrap, topic, 1, {})
        dirs.wait_in(topic, dirs.a)
    fill(dirs, "t", 40)
    with dirs.partition("t") as partition:
        before, asked = contents(partition), lookups(partition)
        for number, target in enumerate([dirs.b, dirs.a, dirs.b], 40):
            dirs.move("t", target)
            dirs.move("empty", target)
            assert contents(partition) == before
            assert lookups(partition) == asked
            assert partition.produce(BATCH) == Appended(0, 100 * number)
            before, asked = contents(partition), lookups(partition)
            dirs.wait_clean("t", f"{'a' if target == dirs.a else 'b'}/0")
        dirs.broker.kill()
        shutil.rmtree(dirs.a / "t", ignore_errors=True)
        dirs.broker.start()
    with dirs.partition("t") as partition, dirs.partition("empty") as empty:
        assert contents(partition) == before
        assert lookups(partition) == asked
        assert empty.produce(BATCH) == Appended(0, 0)
    dirs.wait_in("t", dirs.b)
    dirs.wait_in("empty", dirs.b)


@pytest.mark.move("E53")
def test_a_producer_state_that_is_missing_in_the_bucket_stops_no_move(dirs):
    """Its upload may not have begun; a start rebuilds it from the segments."""
    dirs.create("t")
    fill(dirs, "t", 30)
    duplicate = data_batch(2, producer_id=77, epoch=0, sequence=0)
    with dirs.partition("t") as partition:
        assert partition.produce(duplicate) == Appended(0, 3_000)
        before = contents(partition)
        dirs.move("t", dirs.b)
        states = dirs.place.matching(".logmirror/broker/producers/t@*/*/*")
        assert states
        for path in states:
            path.unlink()
        dirs.move("t", dirs.a)
        dirs.move("t", dirs.b)
        dirs.broker.kill()
        dirs.broker.start()
    with dirs.partition("t") as partition:
        assert contents(partition) == before
        assert partition.produce(duplicate) == Appended(0, 3_000)


@pytest.mark.slow
@pytest.mark.move("E67", "E69", "E71", "E72", "E73", "E74", "E76", "E85")
@pytest.mark.parametrize("step", all_but(STEPS, *FEW, reason="the other steps"))
def test_e72_a_kill_at_each_step_loses_nothing_and_the_move_is_completed(dirs, step):
    target, _, point = step.partition(" ")
    dirs.create("t")
    fill(dirs, "t", 20)
    to, end = getattr(dirs, target), 2_000
    with dirs.partition("t") as partition:
        if target == "a":
            dirs.move("t", dirs.b)
            dirs.wait_clean("t", "b/0")
        before = contents(partition)
    dirs.broker.kill()
    dirs.broker.crash_at = point
    dirs.broker.start()
    with dirs.client() as client, contextlib.suppress(EOFError):  # killed before the response
        assert client.move_one("t", to) == NONE
    wait_until(lambda: not dirs.broker.alive, what=lambda: f"a kill at {point}")
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert contents(partition) == before
        assert partition.produce(BATCH) == Appended(0, end)
    dirs.wait_in("t", to)
    dirs.wait_clean("t", f"{target}/0")
    with dirs.partition("t") as partition:
        assert [offset for offset, _ in contents(partition)] == [*range(end + 100)]


@pytest.mark.move("E72", "E85")
def test_a_move_with_commits_in_the_chain_is_resumed_as_another_residence(dirs):
    """H3: they may hold records that were not acknowledged, and count as left behind."""
    dirs.create("t")
    fill(dirs, "t", 20)
    dirs.broker.kill()
    dirs.broker.crash_at = "move.arrived"
    dirs.broker.start()
    with dirs.partition("t") as partition:  # the start has sealed what there was
        assert partition.produce(BATCH) == Appended(0, 2_000)
    with dirs.client() as client, contextlib.suppress(EOFError):  # killed before the response
        assert client.move_one("t", dirs.b) == NONE
    wait_until(lambda: not dirs.broker.alive, what=lambda: "a kill at move.arrived")
    dirs.broker.kill()
    folders = lambda: {path.parent.parent for path in dirs.place.matching("t@*/*/*.batches")}  # noqa: E731  # short
    before = folders()
    assert len(before) == 1
    dirs.broker.start()
    dirs.wait_in("t", dirs.b)
    dirs.wait_clean("t", "b/0")
    wait_until(lambda: not folders() & before, what=lambda: f"{folders()}")
    assert len(folders()) == 1
    with dirs.partition("t") as partition:
        assert partition.produce(BATCH) == Appended(0, 2_100)
        expected = contents(partition)
        assert len(expected) == 2_200
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert contents(partition) == expected


@pytest.mark.move("E20", "E86")
@pytest.mark.parametrize("ends", ["cancelled", "deleted"])
def test_a_move_into_the_bucket_that_does_not_end_leaves_no_object(dirs, ends):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(20_000)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: "b/0" in dirs.names("t"), what=lambda: "an object")
        if ends == "cancelled":
            assert client.move_one("t", dirs.a) == NONE
            dirs.wait_clean("t", "a/0")
            assert partition.produce(BATCH) == Appended(0, 6_000)
        else:
            delete(dirs, "t")
            dirs.wait_clean("t")


def test_a_topic_that_was_moved_leaves_nothing_when_it_is_deleted(dirs):
    dirs.create("t", 2)
    fill(dirs, "t")
    dirs.move("t", dirs.b)
    dirs.wait_clean("t", "b/0")
    delete(dirs, "t")
    dirs.wait_clean("t")
    create_topic(dirs.bootstrap, "t", 1, {})
    with dirs.partition("t") as partition:
        assert partition.produce(BATCH) == Appended(0, 0)
        dirs.move("t", dirs.b)
        assert len(contents(partition)) == 100


def test_a_new_partition_is_on_the_disk_unless_the_bucket_is_asked_for(dirs):
    create_topic(dirs.bootstrap, "t", 3, {})
    with dirs.client() as client:
        for topic in ("u", "without"):
            assert client.move_one(topic, dirs.b) == 3
            create_topic(dirs.bootstrap, topic, 1, {})
        assert [[*client.where("t", n)] for n in range(3)] == [[str(dirs.a)]] * 3
        assert [*client.where("u")] == [str(dirs.b)]
    with dirs.partition("u") as partition:
        assert partition.produce(BATCH) == Appended(0, 0)
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("u") as partition, dirs.client() as client:
        assert len(contents(partition)) == 100
        assert [*client.where("u")] == [str(dirs.b)]
    dirs.move("without", dirs.a)
    with dirs.partition("without") as partition:
        assert partition.produce(BATCH) == Appended(0, 0)


def test_a_machine_that_burns_down_loses_only_what_was_on_its_disk(dirs):
    """The bucket alone serves what was moved there; the rest is offline, not empty."""
    for topic in ("moved", "stays"):
        dirs.create(topic)
        fill(dirs, topic, 30)
    dirs.move("moved", dirs.b)
    with dirs.partition("moved") as partition:
        before = contents(partition)
        assert partition.produce(BATCH) == Appended(0, 3_000)
    dirs.broker.kill()
    with EmbeddedBroker(dirs.a.parent / "elsewhere", bucket=dirs.place) as other:
        there = dirs._replace(broker=other)
        with there.partition("moved") as partition, there.partition("stays") as lost:
            assert contents(partition)[:3_000] == before
            assert len(contents(partition)) == 3_100
            assert lost.list_offset(EARLIEST)[0] == 56  # KAFKA_STORAGE_ERROR
            assert lost.produce(BATCH).error == 56
        create_topic(other.bootstrap, "new", 1, {})
        with there.partition("new") as partition:
            assert partition.produce(BATCH) == Appended(0, 0)
        other.kill()
    dirs.broker.start()  # with the disk
    with dirs.partition("stays") as partition, dirs.partition("new") as new:
        assert len(contents(partition)) == 3_000
        assert len(contents(new)) == 100


def test_a_disk_that_is_missing_is_not_taken_for_an_empty_one(dirs, tmp_path):
    dirs.create("t")
    fill(dirs, "t", 3)
    dirs.broker.kill()
    dirs.a.rename(tmp_path / "away")
    with pytest.raises(RuntimeError, match="a log directory on a disk is missing"):
        dirs.broker.start()
    shutil.rmtree(dirs.a)
    (tmp_path / "away").rename(dirs.a)
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert len(contents(partition)) == 300


def test_a_broker_in_a_bucket_gets_a_disk(s3_server, tmp_path):
    """What was created there stays there, and can be moved to the disk."""
    place = LogBucket(s3_server, s3_server.new_bucket())
    with EmbeddedBroker(tmp_path / "one", bucket=place, segment_bytes=20_000) as broker:
        found = DiskAndBucket(broker, tmp_path / "a", place.url)  # type: ignore[arg-type]  # as above
        create_topic(broker.bootstrap, "t", 2, {})
        fill(found, "t", 30)
        with found.partition("t") as partition:
            before = contents(partition)
        broker.kill()
    settings: dict[str, Any] = {"more_log_dirs": [str(tmp_path / "a")], "segment_bytes": 20_000}
    with EmbeddedBroker(tmp_path / "two", bucket=place, **settings) as broker:
        found = found._replace(broker=broker)
        with found.partition("t") as partition:
            assert contents(partition) == before
            found.wait_in("t", found.b)
            found.move("t", found.a)
            assert contents(partition) == before
            assert partition.produce(BATCH) == Appended(0, 3_000)
            found.wait_clean("t", "a/0")
            found.wait_in("t", found.b, 1)
        broker.kill()
        broker.start()
        with found.partition("t") as partition:
            assert len(contents(partition)) == 3_100
            found.move("t", found.b)
            assert len(contents(partition)) == 3_100


def test_a_broker_on_a_disk_gets_a_bucket(s3_server, tmp_path):
    """Its partitions, users, groups and settings stay, and it does not start without the bucket."""
    disk = tmp_path / "a"
    settings: dict[str, Any] = {"segment_bytes": 20_000}
    with EmbeddedBroker(tmp_path / "one", more_log_dirs=[str(disk)], **settings) as alone:
        dirs = TwoDirs(alone, alone.log_dir, disk)
        dirs.create("t", 2)
        fill(dirs, "t", 30)
        consumer = Consumer({"bootstrap.servers": alone.bootstrap, "group.id": "g"})
        consumer.commit(offsets=[TopicPartition("t", 0, 1_234)], asynchronous=False)
        consumer.close()
        with dirs.partition("t") as partition:
            before = contents(partition)
        alone.kill()
    place = LogBucket(s3_server, s3_server.new_bucket())
    settings["more_log_dirs"] = [str(alone.log_dir), str(disk)]
    with EmbeddedBroker(tmp_path / "two", bucket=place, **settings) as broker:
        found = DiskAndBucket(broker, alone.log_dir, place.url)  # type: ignore[arg-type]  # a name
        with found.partition("t") as partition:
            assert contents(partition) == before
            found.wait_in("t", alone.log_dir)
            found.move("t", place.url)
            assert contents(partition) == before
            assert partition.produce(BATCH) == Appended(0, 3_000)
        broker.kill()
        with pytest.raises(RuntimeError, match="without the one that has the broker's database"):
            alone.start()
        broker.start()
        with found.partition("t") as partition:
            assert len(contents(partition)) == 3_100
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
        [offset] = consumer.committed([TopicPartition("t", 0)], 20)
        assert offset.offset == 1_234
        consumer.close()


@pytest.mark.slow
@pytest.mark.move("E96", "E97", "E98")
def test_e97_the_tools_move_into_the_bucket_and_cancel(apache_tools, dirs, tmp_path):
    dirs.create("t", 2)
    fill(dirs, "t")
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b)
    begun = plan.run("--execute", "--replica-alter-log-dirs-throttle", "1")
    assert f"Successfully started moving log directory to {dirs.b} for replica t-0" in (
        line.rpartition(" with broker 1")[0] for line in begun
    )
    assert "Reassignment of replica t-0-1 is still in progress." in plan.run("--verify")
    back = f"Successfully started moving log directory to {dirs.a} for replica t-0 with broker 1 "
    assert back in plan.run("--cancel")
    wait_until(
        lambda: not any(name.startswith("b") for name in dirs.names("t")),
        what=lambda: f"no object: {dirs.names('t')}",
    )
    plan.run("--execute")
    dirs.wait_in("t", dirs.b)
    assert "Reassignment of replica t-0-1 completed successfully." in plan.run("--verify")
    found = described(apache_tools, dirs.bootstrap)
    assert found.keys() == {str(dirs.a), dirs.b}
    assert sizes(found[dirs.b]).keys() == {"t-0", "t-1"}

    plan = Plan(apache_tools, dirs, tmp_path / "back.json", dirs.a)
    begun = plan.run("--execute", "--replica-alter-log-dirs-throttle", "1")
    for number in (0, 1):
        text = f"Successfully started moving log directory to {dirs.a} for replica t-{number}"
        assert f"{text} with broker 1 " in begun
    assert "Reassignment of replica t-0-1 is still in progress." in plan.run("--verify")
    dirs.limit(None)
    for number in (0, 1):
        dirs.wait_in("t", dirs.a, number)
    found = plan.run("--verify")
    for number in (0, 1):
        assert f"Reassignment of replica t-{number}-1 completed successfully." in found
    with dirs.partition("t") as partition:
        assert [offset for offset, _ in contents(partition)] == [*range(6_000)]
    dirs.wait_clean("t", "a/0", "a/1")


def move_all(found: DiskAndBucket, target: str | Path) -> None:
    """Request moves; again, if the last ones are not complete in the bucket after 5 s."""
    wanted = {target: {"t": tuple(range(PARTITIONS))}}
    with found.client() as client:
        wait_until(
            lambda: set(client.move(wanted).values()) == {NONE},
            what=lambda: f"moves to {target}",
            timeout_s=60,
        )


@pytest.mark.slow
@pytest.mark.thinned
@pytest.mark.move("E85")
@pytest.mark.parametrize("seed", range(sized(1, 3, 20)))
def test_e85_faults_of_the_bucket_and_kills_lose_or_repeat_nothing(s3_server, tmp_path, seed):
    """Requests that fail, are late, or whose response is lost or cut, in any order."""
    chance = random.Random(seed)
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        place = LogBucket(s3_server, s3_server.new_bucket(), proxy.endpoint)
        settings: dict[str, Any] = {"more_log_dirs": [str(tmp_path / "a")]}
        with EmbeddedBroker(
            tmp_path / "broker", bucket=place, segment_bytes=300_000, **settings
        ) as broker:
            found = DiskAndBucket(broker, tmp_path / "a", place.url)  # type: ignore[arg-type]  # as above
            found.create("t", PARTITIONS)
            with (
                Reading(broker.bootstrap, "t") as reading,
                Load(broker.bootstrap, "t", **{"enable.idempotence": True}) as load,
            ):
                load.wait_for(300)
                proxy.spoil_some(drawn(FAULTS, seed))
                for number in range(sized(3, 4, 8)):
                    target = (found.b, found.a)[number % 2]
                    move_all(found, target)
                    time.sleep(chance.random() * chance.choice([0.1, 1]))
                    if number % 2:
                        broker.kill()
                        broker.start()
                    for partition in range(PARTITIONS):
                        found.wait_in("t", target, partition)
                    load.wait_for(100)
                load.stop()
                assert load.flush() == 0
                reading.wait_for(load.sent)
            assert load.failures == reading.errors == []
            assert stored(broker, "t") == load.acked == reading.found()
            assert len(set(load.acked.values())) == len(load.acked) == load.sent
            assert proxy.spoiled


@pytest.mark.slow
def test_a_move_waits_for_a_bucket_that_is_away(s3_server, tmp_path):
    """Meanwhile the partition on the disk is written and read; the move continues by itself."""

    def delete(path: str) -> None:
        bucket, _, key = path.partition("/")
        s3_server.client().delete_object(Bucket=bucket, Key=key)

    with S3Proxy(s3_server.endpoint, delete) as proxy:
        place = LogBucket(s3_server, s3_server.new_bucket(), proxy.endpoint)
        disk = tmp_path / "a"
        settings: dict[str, Any] = {"more_log_dirs": [str(disk)], "segment_bytes": 20_000}
        with EmbeddedBroker(tmp_path / "broker", bucket=place, **settings) as broker:
            found = DiskAndBucket(broker, disk, place.url)  # type: ignore[arg-type]  # as above
            found.create("t")
            fill(found, "t")
            found.limit(20_000)
            with found.client() as client, found.partition("t") as partition:
                assert client.move_one("t", found.b) == NONE
                wait_until(lambda: "b/0" in found.names("t"), what=lambda: "an object")
                found.limit(None)
                proxy.spoil(Fault("503", "", times=1_000_000))
                for number in range(20):
                    assert partition.produce(BATCH) == Appended(0, 6_000 + 100 * number)
                    time.sleep(0.2)
                assert len(contents(partition)) == 8_000
                assert not client.where("t")[str(found.a)].is_future
                proxy.spoil()
                found.wait_in("t", found.b)
                assert len(contents(partition)) == 8_000
                assert partition.produce(BATCH) == Appended(0, 8_000)
