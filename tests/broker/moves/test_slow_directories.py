"""Goal: producers do not wait for the disk of another log directory, and no move waits for ever.

Method: a broker process in which `os.fdatasync` of the files in one directory does not return while
a file exists. More of its partitions are flushed than a directory has threads. And one whose moves
wait 25 s for a bucket that is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from broker.moves.conftest import TwoDirs
from broker.moves.test_bucket_moves import DiskAndBucket
from broker.moves.test_requests import BATCH, NONE, fill
from kit.fakes.disk import loading
from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.partition_client import Appended
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import LogBucket

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.s3 import S3Server

PARTITIONS = 8
WAITING = '''
"""Loaded by every Python process at its start: flushes of a folder wait while a file exists."""

import os
import pathlib
import time

_folder, _waits = pathlib.Path({folder!r}), pathlib.Path({waits!r})
_fdatasync = os.fdatasync


def fdatasync(descriptor):
    path = pathlib.Path(os.readlink(f"/proc/self/fd/{{descriptor}}"))
    while _folder in path.parents and _waits.exists():
        time.sleep(0.01)
    return _fdatasync(descriptor)


os.fdatasync = fdatasync
'''


def test_a_directory_with_slow_flushes_delays_no_other(tmp_path: Path) -> None:
    slow, waits = tmp_path / "slow", tmp_path / "waits"
    code = WAITING.format(folder=str(slow), waits=str(waits))
    broker = EmbeddedBroker(
        tmp_path / "broker",
        environment=loading(tmp_path, code),
        more_log_dirs=[str(slow)],
        default_partitions=1,
    )
    try:
        dirs = TwoDirs(broker.start(), broker.log_dir, slow)
        for topic, place, count in (("late", dirs.b, PARTITIONS), ("prompt", dirs.a, 1)):
            with dirs.client() as client:
                client.move({place: {topic: tuple(range(count))}})
            create_topic(dirs.bootstrap, topic, count, {})
        waits.touch()
        producer = Producer({"bootstrap.servers": dirs.bootstrap, "acks": "all"})
        for partition in range(PARTITIONS):
            producer.produce("late", b"x", partition=partition)
        wait_until(lambda: all(sizes(dirs)), what=lambda: str(sizes(dirs)), timeout_s=60)

        with dirs.partition("prompt") as partition:
            assert partition.produce(BATCH).error == 0

        assert len(producer) == PARTITIONS  # none is acknowledged
        waits.unlink()
        assert producer.flush(60) == 0
    finally:
        broker.kill()


def sizes(dirs: TwoDirs) -> list[int]:
    """Return how much is written of each partition in the slow directory."""
    with dirs.client() as client:
        return [client.where("late", n)[str(dirs.b)].size_bytes for n in range(PARTITIONS)]


@pytest.mark.gate("it waits for two requests to the bucket, of 20 s")
def test_a_move_ends_if_its_bucket_is_away_for_too_long(
    s3_server: S3Server, tmp_path: Path
) -> None:
    """The partition stays where it is, and is moved by a request when the bucket is back."""
    code = "from logmirror.broker.moves import mover\nmover._AWAY_MS = 25_000.0\n"
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        place, disk = LogBucket(s3_server, s3_server.new_bucket(), proxy.endpoint), tmp_path / "a"
        broker = EmbeddedBroker(
            tmp_path / "broker",
            bucket=place,
            environment=loading(tmp_path, code),
            more_log_dirs=[str(disk)],
            segment_bytes=20_000,
        )
        with broker:
            dirs = DiskAndBucket(broker, disk, place.url)
            dirs.create("t")
            fill(dirs, "t", 40)
            dirs.limit(20_000)
            with dirs.client() as client:
                assert client.move_one("t", dirs.b) == NONE
            proxy.spoil(Fault("503", "", times=1_000_000))
            log = broker.log
            wait_until(lambda: "failed" in log.read_text(), what=log.read_text)
            with dirs.client() as client, dirs.partition("t") as partition:
                assert partition.produce(BATCH) == Appended(0, 4_000)
                proxy.spoil()
                dirs.limit(None)
                assert client.where("t").keys() == {str(dirs.a), str(dirs.b)}
                assert client.move_one("t", dirs.b) == NONE
                dirs.wait_in("t", dirs.b)
                assert partition.produce(BATCH) == Appended(0, 4_100)
