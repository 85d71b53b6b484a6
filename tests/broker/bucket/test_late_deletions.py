"""Goal: an owner that was paused while it deletes something takes nothing from the next one.

Method: two brokers on one bucket of a real S3 server. A proxy holds a request of the first one
back: the commit of the deletion, or the first object's. The broker is paused by SIGSTOP, another
one takes over and writes; then the request arrives, and the first one wakes. What the second one
serves is compared record by record, and so is what a third one finds in the bucket alone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, PartitionClient
from kit.runs.commands import wait_until
from kit.servers.kafka import create_topic
from kit.tiers import all_but
from logmirror.broker.bucket.chain import COMMITS
from logmirror.broker.bucket.commit_format import Commit, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.servers.bucket_broker import BucketBroker

TIMEOUT_S = 60
OUT_OF_RANGE = 1
RECORDS = 600
START = 350
"""Where DeleteRecords leaves the log start; within a segment."""

RETENTION = ("--override", "log.retention.bytes=250000")
"""Of the first broker only: it begins to delete when it has started."""

Records = dict[int, bytes | None]


def produce(broker: BucketBroker, name: str) -> Records:
    """Write `RECORDS`; returns them."""
    settings = {"bootstrap.servers": broker.bootstrap, "batch.num.messages": 5, "log_level": 0}
    producer, acked = Producer(settings), Records()
    for number in range(RECORDS):
        producer.produce(
            "t",
            f"{name} {number} ".encode() + b"x" * 1_000,
            on_delivery=lambda _, m: acked.update({m.offset(): m.value()}),
        )
    assert producer.flush(TIMEOUT_S) == 0
    assert len(acked) == RECORDS
    return acked


def start_of(broker: BucketBroker) -> int:
    with PartitionClient(broker.bootstrap, "t") as partition:
        return int(partition.list_offset(EARLIEST)[2])


def read(broker: BucketBroker) -> Records:
    """Everything from the log start on; each offset once."""
    rows = list(rows_by_librdkafka(broker.bootstrap, "t", start=start_of(broker)))
    found = {row.offset: row.value for row in rows}
    assert len(found) == len(rows)
    return found


def from_offset(records: Records, start: int) -> Records:
    return {offset: value for offset, value in records.items() if offset >= start}


def is_out_of_range(broker: BucketBroker, offset: int) -> bool:
    with PartitionClient(broker.bootstrap, "t") as partition:
        return int(partition.fetch(offset).error_code) == OUT_OF_RANGE


def objects(root: Path) -> set[Path]:
    """The sealed segments in the bucket."""
    return set(root.rglob("t@*/**/*.batches"))


def first_offset(path: Path) -> int:
    return int(path.name[:20])


def check_chain(root: Path) -> None:
    """No owner has written a commit behind those of a later one."""
    commits = list[Commit]()
    for path in root.rglob(f"{COMMITS}/*"):
        with contextlib.suppress(FileNotFoundError):  # the owner has removed it
            commits.append(decode(path.read_bytes()))
    epochs = [one.epoch for one in sorted(commits, key=lambda one: one.sequence)]
    assert len(set(epochs)) > 1
    assert epochs == sorted(epochs)


class Deletion(NamedTuple):
    """What the first broker deletes, and how it begins."""

    commit: bytes
    begin: Callable[[AdminClient], object]
    options: tuple[str, ...] = ()
    is_of_topic: bool = False


DELETIONS = {
    "retention": Deletion(b"INTO log_starts", lambda _: None, RETENTION),
    "DeleteRecords": Deletion(
        b"INTO log_starts", lambda admin: admin.delete_records([TopicPartition("t", 0, START)])
    ),
    "topic": Deletion(
        b"DELETE FROM topics", lambda admin: admin.delete_topics(["t"]), is_of_topic=True
    ),
}
CASES = [f"{moment} {kind}" for moment in ("before", "behind") for kind in DELETIONS]
"""Before or behind the commit of the deletion."""

FEW = ("before DeleteRecords", "behind topic")


@pytest.mark.slow
@pytest.mark.statement("T13")
@pytest.mark.parametrize("case", all_but(CASES, *FEW, reason="the same steps"))
def test_a_paused_owner_that_deletes_takes_nothing_from_the_next_one(
    machines, s3_server, bucket, case
):
    moment, _, kind = case.partition(" ")
    deletion, root, is_durable = DELETIONS[kind], s3_server.files(bucket), moment == "behind"
    before = machines().start()
    create_topic(before.bootstrap, "t", 1, {})
    records = produce(before, "first")
    wait_until(lambda: len(objects(root)) >= 5, what=lambda: f"{objects(root)}")
    before.kill()
    held = (b".batches", {"DeleteObject"}) if is_durable else (deletion.commit, {"PutObject"})
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        first, second = machines(*deletion.options, endpoint=proxy.endpoint), machines()
        with proxy.holding(*held):
            first.start()
            admin = AdminClient({"bootstrap.servers": first.bootstrap, "log_level": 0})
            begun = deletion.begin(admin)
            wait_until(lambda: proxy.held > 0, what=lambda: "a request that is held")
            first.pause()
            second.start()
            here = objects(root)
            records = taken_over(second, records, deletion, is_durable=is_durable)
            wait_until(lambda: len(objects(root) - here) >= 5, what=lambda: f"{objects(root)}")
            here = objects(root)
        first.resume()
        assert first.wait() == 69
        del begun
    check_chain(root)
    assert read(second) == records
    if not is_durable:
        assert here <= objects(root)
    records |= produce(second, "third")
    assert read(second) == records
    second.kill()
    again = machines().start()
    assert read(again) == records
    assert again.stop() == 0


@pytest.mark.slow
def test_a_kill_between_the_deletions_of_retention_brings_nothing_back(machines, s3_server, bucket):
    """The deletion of the second object is held back: one is gone, and two are still there."""
    root = s3_server.files(bucket)
    before = machines().start()
    create_topic(before.bootstrap, "t", 1, {})
    records = produce(before, "first")
    wait_until(lambda: len(objects(root)) == 6, what=lambda: f"{objects(root)}")
    before.kill()
    here = sorted(objects(root))
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        killed = machines(*RETENTION, endpoint=proxy.endpoint)
        with proxy.holding(here[1].name.encode(), {"DeleteObject"}):
            killed.start()
            wait_until(lambda: proxy.held > 0, what=lambda: "a request that is held")
            start = start_of(killed)
            assert set(here) - objects(root) == {here[0]}
            assert start == first_offset(here[3])
            killed.kill()
            records = from_offset(records, start)
            second = machines().start()
            assert start_of(second) == start
            assert read(second) == records
            assert is_out_of_range(second, start - 1)
            wait_until(
                lambda: all(first_offset(one) >= start for one in objects(root)),
                what=lambda: f"the others' deletion: {objects(root)}",
            )
    records |= produce(second, "second")  # what was held may arrive now
    second.kill()
    third = machines().start()
    assert start_of(third) == start
    assert read(third) == records
    assert is_out_of_range(third, 0)
    assert third.stop() == 0


def taken_over(
    broker: BucketBroker, records: Records, deletion: Deletion, *, is_durable: bool
) -> Records:
    """Check what the second broker has taken over, and write more; returns what it serves."""
    if is_durable and deletion.is_of_topic:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        assert "t" not in admin.list_topics(timeout=TIMEOUT_S).topics
        create_topic(broker.bootstrap, "t", 1, {})
        records = {}
    else:
        start = start_of(broker)
        assert (start > 0) == is_durable
        records = from_offset(records, start)
        assert read(broker) == records
    return records | produce(broker, "second")
