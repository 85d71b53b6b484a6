"""A consumer that comes from one segment finds the next one here; every object is fetched once.

Method: the working folder on a store in memory, whose requests the test holds back; and a real
broker behind a proxy that counts the requests to the bucket.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_reads import BATCHES, expected, read_all, seal
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import wait_until
from logmirror.broker.bucket.files import BucketDisk
from logmirror.errors import UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


class Held:
    """A working folder of ten files of 100 bytes, whose requests wait for the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, MemoryStore()
        for number in range(10):
            self.store.objects[f"b/{number}"] = bytes(100)
        self.asked: list[str] = []
        self.may_end, self.fails = threading.Event(), False
        self.store.before = self._before
        self.disk = BucketDisk(self.store, cache_bytes=10_000)
        self.disk.connect(folder, "b")

    def _before(self, operation: str, name: str) -> None:
        if operation == "open":
            self.asked.append(name)
            assert self.may_end.wait(30)
            if self.fails:
                raise UnavailableError("away")

    def read_ahead(self, number: int) -> None:
        self.disk.read_ahead(self.folder / str(number))

    def open(self, number: int) -> int:
        file = self.disk.open_for_reading(self.folder / str(number))
        return os.fstat(file.fd).st_size

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.asked) == count, what=lambda: f"{self.asked}")


def test_a_file_that_is_fetched_ahead_is_not_fetched_again(tmp_path):
    held = Held(tmp_path)
    held.read_ahead(3)
    held.wait_for(1)
    with ThreadPoolExecutor(3) as pool:
        opened = [pool.submit(held.open, 3) for _ in range(3)]
        held.read_ahead(3)
        held.may_end.set()
        assert [one.result(30) for one in opened] == [100] * 3
    assert held.open(3) == 100
    held.read_ahead(3)
    assert held.asked == ["b/3"]
    assert (held.disk.misses, held.disk.fetched_bytes, held.disk.held_bytes) == (1, 100, 100)


def test_files_that_are_read_at_once_are_fetched_once(tmp_path):
    held = Held(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        opened = [pool.submit(held.open, 7) for _ in range(4)]
        held.wait_for(1)
        held.may_end.set()
        assert [one.result(30) for one in opened] == [100] * 4
    assert held.asked == ["b/7"]


def test_a_failure_is_reported_to_all_that_wait_and_not_kept(tmp_path):
    held = Held(tmp_path)
    held.fails = True
    held.read_ahead(3)
    held.wait_for(1)
    with ThreadPoolExecutor(2) as pool:
        opened = pool.submit(held.open, 3)
        time.sleep(0.2)  # until it waits
        held.may_end.set()
        with pytest.raises(OSError, match="away"):
            opened.result(30)
    assert held.asked == ["b/3"]
    held.fails = False
    assert held.open(3) == 100


def test_few_files_are_fetched_ahead_at_the_same_time(tmp_path):
    held = Held(tmp_path)
    for number in range(10):
        held.read_ahead(number)
    held.wait_for(4)
    held.may_end.set()
    assert held.open(9) == 100
    held.wait_for(5)


def test_files_of_other_folders_are_not_fetched(tmp_path):
    held = Held(tmp_path)
    held.disk.read_ahead(tmp_path / "other" / "3")
    held.may_end.set()
    assert held.open(0) == 100
    assert held.asked == ["b/0"]


@pytest.mark.slow
def test_the_next_segment_is_fetched_while_a_consumer_reads_the_one_before(proxied):
    found = proxied()
    topic = "ahead"
    seal(found, topic)
    found.broker.kill()
    found.broker.start()
    asked = found.proxy.asked["GetObject"]

    def got() -> int:
        return found.proxy.asked["GetObject"] - asked

    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert partition.fetch(2, max_bytes=1).error_code == 0  # not from its first record on
        time.sleep(0.5)  # another request would have arrived
        assert got() == 1
        assert partition.fetch(6, max_bytes=1).error_code == 0  # the first one of the next segment
        wait_until(lambda: got() == 3, what=lambda: f"{got()} requests")
        assert read_all(partition) == expected(topic, range(BATCHES))
    assert got() == 3
