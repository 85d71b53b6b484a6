"""A working directory without space: the broker ends, and another machine has everything."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kit.fakes.disk import SmallDisk, small_disk
from kit.runs.bucket_load import create
from kit.runs.commands import wait_until

if TYPE_CHECKING:
    from kit.servers.bucket_broker import BucketBroker

pytestmark = pytest.mark.slow
LONG = "x" * 4_000
"""So that each change needs a page of the disk."""


def fill(disk: SmallDisk, broker: BucketBroker) -> None:
    """Let no file grow any more."""
    if disk.is_mounted:
        with (
            (disk.folder / "filler").open("wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(4_096))
    else:
        sizes = [path.stat().st_size for path in broker.work_dir.rglob("*.sqlite-wal")]
        assert broker.log.stat().st_size < min(sizes)
        process = broker._process  # noqa: SLF001  # of which no other test needs the ID
        assert process is not None
        pid, limit = process.popen.pid, resource.RLIMIT_FSIZE
        resource.prlimit(pid, limit, (min(sizes), resource.prlimit(pid, limit)[1]))


@pytest.mark.parametrize("changed", ["groups", "topics"])
def test_a_database_without_space_ends_the_broker_and_loses_nothing(machines, tmp_path, changed):
    acked: list[int] = []

    def committed(error: object, partitions: list[TopicPartition]) -> None:
        if error is None and partitions[0].error is None:
            acked.append(partitions[0].offset)

    broker, other = machines(), machines()
    with small_disk(tmp_path, 8_000_000) as disk:
        broker.work_dir = disk.folder / "work"
        broker.start()
        create(broker, "t")
        common = {"bootstrap.servers": f"{broker.bootstrap},{other.bootstrap}", "log_level": 0}
        admin = AdminClient(common)
        reader = Consumer(
            {
                **common,
                "group.id": "readers",
                "enable.auto.commit": False,
                "on_commit": committed,
            }
        )
        reader.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
        fill(disk, broker)

        def change(number: int) -> bool:
            if changed == "groups":
                at = TopicPartition("t", 0, number, LONG)
                reader.commit(offsets=[at], asynchronous=True)
                reader.poll(0.1)
            else:
                admin.create_topics([NewTopic(f"n{number}", 50, 1)], request_timeout=1)
                reader.poll(0.1)
            return not broker.alive

        numbers = iter(range(2, 10_000))
        wait_until(lambda: change(next(numbers)), what=lambda: broker.log.read_text()[-4_000:])

        assert broker.wait() == 75
        shown = " ".join(broker.log.read_text().split())
        assert "its copy of a database in the bucket cannot be written" in shown
        assert "start the broker again" in shown
        other.start()
        assert reader.committed([TopicPartition("t", 0)], 20)[0].offset >= max(acked, default=1)
        # In another partition: the client repeats what has failed before.
        reader.commit(offsets=[TopicPartition("t", 1, 7)], asynchronous=False)
        assert reader.committed([TopicPartition("t", 1)], 20)[0].offset == 7
        admin.create_topics([NewTopic("later", 1, 1)])["later"].result(30)
        reader.close()
