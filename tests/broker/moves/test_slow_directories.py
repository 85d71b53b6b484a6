"""Goal: producers do not wait for the disk of another log directory.

Method: a broker process in which `os.fdatasync` of the files in one directory does not return while
a file exists. More of its partitions are flushed than a directory has threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Producer

from broker.moves.conftest import TwoDirs
from broker.moves.test_requests import BATCH
from kit.fakes.disk import loading
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from pathlib import Path

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
