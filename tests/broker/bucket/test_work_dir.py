"""Goal: what a killed broker has left on its machine is never served, and copies have a limit.

Method: real brokers on a real bucket. Their working folders outlive them, and are used again: at
once, after another machine was the owner, and by two brokers at the same time. Content is compared
by partition, offset and value. Files that were removed and are still open count, too.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, produce
from kit.judges.partition_client import EARLIEST, PartitionClient
from kit.runs.bucket_load import Load, create, stored
from kit.runs.commands import wait_until
from kit.tiers import sized
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.bucket_broker import BucketBroker
    from kit.servers.embedded import EmbeddedBroker

pytestmark = pytest.mark.slow
KILLS = sized(2, 6, 20)
DELETED = 500
SEGMENTS = 20
SEGMENT_BYTES = 100_000
LIMIT = 4 * SEGMENT_BYTES


def write(broker: BucketBroker, topic: str, what: str, count: int) -> None:
    """Produce to the first partition; each record of a test has a value of its own."""
    values = [b"%s %d " % (what.encode(), n) + b"." * 1_000 for n in range(count)]
    produce(broker.bootstrap, topic, [Message(value=one) for one in values], partition=0)


def left(broker: BucketBroker, topic: str) -> bytes:
    """What is in the working folder of a topic."""
    files = (path for path in (broker.work_dir / "logmirror-work" / topic).rglob("*"))
    return b"".join(path.read_bytes() for path in files if path.is_file())


def log_start(broker: BucketBroker, topic: str) -> int:
    with PartitionClient(broker.bootstrap, topic) as partition:
        return partition.list_offset(EARLIEST)[2]


@pytest.mark.thinned
def test_a_broker_starts_again_with_its_own_folder_and_serves_each_record_once(machines):
    broker = machines().start()
    create(broker, "t")
    chance = random.Random(6)
    with Load(broker.bootstrap, "t", **{"enable.idempotence": True}) as load:
        for _ in range(KILLS):
            load.wait_for(chance.randint(100, 2_000))
            broker.kill(burns=False)
            assert left(broker, "t")
            broker.start()
        load.wait_for(100)
    assert load.flush() == 0
    assert load.failures == []
    for _ in range(2):
        found = stored(broker, "t")
        assert found == load.placed(found)
        assert len(set(found.values())) == len(found) == load.sent
        broker.kill(burns=False)
        broker.start()


def test_a_folder_from_before_another_owner_brings_nothing_back(machines, s3_server):
    """Its records were deleted, their topic was created again, or they never were in the bucket."""
    first, second = machines("--no-flush-on-ack").start(), machines()
    for topic in ("t", "again"):
        create(first, topic)
        write(first, topic, f"old {topic}", 1_000)
        with PartitionClient(first.bootstrap, topic) as partition:
            assert partition.delete_records(1) == (0, 1)  # that flushes
    s3_server.kill()
    try:
        write(first, "t", "lost", 50)
        first.kill(burns=False)
    finally:
        s3_server.start()
    assert b"lost 49" in left(first, "t")
    assert b"old again" in left(first, "again")

    second.start()
    admin = AdminClient({"bootstrap.servers": second.bootstrap})
    admin.delete_records([TopicPartition("t", 0, DELETED)])[TopicPartition("t", 0)].result(20)
    admin.delete_topics(["again"])["again"].result(20)
    create(second, "again")
    write(second, "again", "new", 300)
    write(second, "t", "instead", 100)
    wanted = {"t": stored(second, "t", {0: DELETED}), "again": stored(second, "again")}
    assert wanted["again"].keys() == {(0, offset) for offset in range(300)}
    assert not [value for value in wanted["t"].values() if b"lost" in (value or b"")]
    second.kill()

    assert b"lost 49" in left(first, "t")
    first.start()
    found = {"t": stored(first, "t", {0: DELETED}), "again": stored(first, "again")}
    assert found == wanted
    assert (log_start(first, "t"), log_start(first, "again")) == (DELETED, 0)
    write(first, "again", "newer", 10)
    assert stored(first, "again").items() > wanted["again"].items()


def test_a_folder_has_one_broker_and_the_owner_is_not_disturbed(machines):
    first, second = machines().start(), machines()
    create(first, "t")
    write(first, "t", "before", 300)
    second.work_dir = first.work_dir
    with pytest.raises(RuntimeError, match="working directory is in use by another broker"):
        second.start()

    assert second.wait() == 2
    write(first, "t", "after", 300)
    found = stored(first, "t")
    assert len(set(found.values())) == len(found) == 600
    assert first.alive
    assert "fenced" not in first.log.read_text()
    first.kill(burns=False)
    second.start()  # the lock of a killed broker is gone
    assert stored(second, "t") == found


def removed_files(broker: EmbeddedBroker) -> Iterator[int]:
    """The sizes of the files without a name that a broker has open in its working folder."""
    for link in Path(f"/proc/{broker.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = str(link.readlink())
            if name.startswith(str(broker.log_dir)) and name.endswith(" (deleted)"):
                yield link.stat().st_size


def space(broker: EmbeddedBroker) -> int:
    """How much sealed segments take in the working folder, with or without a name."""
    sizes = list(removed_files(broker))
    for path in broker.log_dir.rglob("*.batches"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(path.stat().st_size)
    return sum(sizes)


def test_files_that_are_removed_take_no_space_when_they_were_written_or_read(proxied):
    found, topic = proxied(cache_bytes=LIMIT), "t"
    broker = found.broker
    found.create_topic(topic, {"segment.bytes": str(SEGMENT_BYTES)})
    values = [random.Random(number).randbytes(SEGMENT_BYTES - 100) for number in range(SEGMENTS)]

    def wait_for_limit() -> None:
        wait_until(
            lambda: space(broker) <= LIMIT,
            what=lambda: f"{space(broker)} bytes, {sum(removed_files(broker))} of removed files",
        )

    with PartitionClient(broker.bootstrap, topic) as partition:
        for offset, value in enumerate(values):
            batch = encode_reference([Record(0, 1_000, 0, None, value, ())])
            assert partition.produce(batch) == (0, offset)
    wait_until(
        lambda: len(found.matching(f"{topic}@*/0/*.batches")) == SEGMENTS - 1,
        what=lambda: "the objects",
    )
    wait_for_limit()
    with PartitionClient(broker.bootstrap, topic) as partition:
        for offset, value in enumerate(values):
            [record] = decode_reference(partition.fetch(offset, max_bytes=1).records)
            assert (record.offset, record.value) == (offset, value)
    wait_for_limit()
