"""A consumer that comes from one segment finds the next ones here; every object is fetched once.

Method: a partition's log over a working folder and a store in memory, whose requests the test holds
back; and a real broker behind a proxy that counts the requests to the bucket.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_reads import BATCHES, expected, objects, read_all, seal
from broker.test_cold_segments import TOPIC, fetch_frame, fetched
from kit.fakes import s3_proxy
from kit.fakes.s3_proxy import Fault
from kit.judges.clients import Message, produce
from kit.judges.partition_client import PartitionClient
from kit.judges.raw_client import RawClient
from kit.runs.commands import wait_until
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.file_names import sealed_path
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import AHEAD, SegmentCache
from logmirror.errors import UnavailableError
from logmirror.testing.memory_store import MemoryStore
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEGMENTS = 10


class Held:
    """A log of ten sealed segments, 0 to 9, of a record each; requests for them wait."""

    def __init__(self, folder: Path, *, ahead: int = AHEAD) -> None:
        self.store, segments = MemoryStore(), []
        for offset in range(SEGMENTS):
            data = encode_reference([Record(offset, 1000, 0, None, b"value", ())])
            path = sealed_path(folder, offset, offset + 1)
            self.store.objects[f"b/{path.name}"] = data
            segments.append(Segment(folder, offset, offset + 1, len(data)))
        self.asked: list[int] = []
        self.may_end, self.fails = threading.Event(), False
        self.store.before = self._before
        self.disk = BucketDisk(self.store, cache_bytes=10_000)
        self.disk.connect(folder, "b")
        self.cache = SegmentCache(self.disk, ahead=ahead)
        self.log = PartitionLog(
            folder, disk=self.disk, cache=self.cache, segment_bytes=1000, segments=segments
        )

    def _before(self, operation: str, name: str) -> None:
        if operation == "open":
            self.asked.append(int(name.partition("/")[2].partition("-")[0]))
            assert self.may_end.wait(30)
            if self.fails:
                raise UnavailableError("away")

    def ahead(self, *numbers: int) -> None:
        self.cache.read_ahead(self.segment(number) for number in numbers)

    def segment(self, number: int) -> Segment:
        return self.log.segments[number]

    def load(self, number: int) -> int:
        return self.cache.loaded(self.segment(number))[1].offsets[0]

    def read(self, offset: int, max_bytes: int = 10) -> None:
        """Read like the fetch handler."""
        while True:
            try:
                assert self.log.read(offset, max_bytes, at_least_one=True)
            except ColdSegmentError as cold:
                self.cache.loaded(cold.segment)
            else:
                return

    def wait_for(self, *numbers: int) -> None:
        wait_until(lambda: sorted(self.asked) == sorted(numbers), what=lambda: f"{self.asked}")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """A log whose requests end with the test."""
    made = Held(tmp_path)
    yield made
    made.may_end.set()


def test_what_follows_is_fetched_when_a_consumer_begins_a_segment(held):
    held.may_end.set()
    held.read(3)
    held.wait_for(3, 4, 5)
    held.read(4)
    held.wait_for(3, 4, 5, 6)
    wait_until(lambda: held.segment(6).file is not None, what=lambda: "segment 6")
    held.read(5, max_bytes=10_000)  # to the end of what is here, which is the segment before 7
    held.wait_for(3, 4, 5, 6, 7, 8)


def test_nothing_is_fetched_ahead_of_a_consumer_that_begins_inside_a_segment(tmp_path):
    records = [Record(offset, 1000, 0, None, b"value", ()) for offset in range(2)]
    held = Held(tmp_path)
    held.may_end.set()
    data = b"".join(encode_reference([one]) for one in records)
    path = sealed_path(tmp_path, 0, 2)
    held.store.objects[f"b/{path.name}"] = data
    segments = [Segment(tmp_path, 0, 2, len(data)), *held.log.segments[2:]]
    held.log = PartitionLog(
        tmp_path, disk=held.disk, cache=held.cache, segment_bytes=1000, segments=segments
    )
    held.read(1)
    time.sleep(0.3)  # another request would have arrived
    assert held.asked == [0]


def test_a_cache_that_reads_nothing_ahead_fetches_what_is_read(tmp_path):
    held = Held(tmp_path, ahead=0)
    held.may_end.set()
    held.read(3)
    time.sleep(0.3)  # as above
    assert held.asked == [3]


def test_a_segment_that_is_loaded_ahead_is_not_fetched_again(held):
    held.ahead(3)
    held.wait_for(3)
    with ThreadPoolExecutor(3) as pool:
        loaded = [pool.submit(held.load, 3) for _ in range(3)]
        held.ahead(3)
        held.may_end.set()
        assert [one.result(30) for one in loaded] == [3] * 3
    assert held.load(3) == 3
    held.ahead(3)
    assert held.asked == [3]
    size = held.segment(3).size_bytes
    assert (held.disk.misses, held.disk.fetched_bytes, held.disk.held_bytes) == (1, size, size)


def test_a_segment_that_is_read_by_many_at_once_is_fetched_once(held):
    with ThreadPoolExecutor(4) as pool:
        loaded = [pool.submit(held.load, 7) for _ in range(4)]
        held.wait_for(7)
        held.may_end.set()
        assert [one.result(30) for one in loaded] == [7] * 4
    assert held.asked == [7]


def test_a_failure_is_reported_to_all_that_wait_and_not_kept(held):
    held.fails = True
    held.ahead(3)
    held.wait_for(3)
    with ThreadPoolExecutor(2) as pool:
        loaded = pool.submit(held.load, 3)
        time.sleep(0.2)  # until it waits
        held.may_end.set()
        with pytest.raises(OSError, match="away"):
            loaded.result(30)
    assert held.asked == [3]
    held.fails = False
    assert held.load(3) == 3


def test_few_segments_are_loaded_ahead_at_the_same_time(held):
    held.ahead(*range(SEGMENTS))
    held.wait_for(0, 1, 2, 3)
    held.may_end.set()
    assert held.load(9) == 9
    held.wait_for(0, 1, 2, 3, 9)


def test_an_archive_whose_store_hangs_keeps_nothing_else_from_being_loaded_ahead(held):
    class Source:
        def __init__(self, *, is_loaded_ahead: bool = True) -> None:
            self.executor, self.is_loaded_ahead = object(), is_loaded_ahead

        def open(self, _segment: Segment) -> None:
            assert held.may_end.wait(30)
            raise UnavailableError("away")

    hanging, other = Source(), Source()
    for number in (0, 1, 2):
        held.segment(number).source = hanging
    held.segment(3).source = other
    held.segment(4).source = Source(is_loaded_ahead=False)
    held.ahead(0, 1, 2)
    held.ahead(3)
    held.ahead(4, 5, 6, 7, 8, 9)
    begun = {held.segment(number) for number in (0, 1, 3, 5, 6, 7, 8)}
    assert held.cache._loading_ahead == begun  # noqa: SLF001  # what is begun


def test_what_is_loaded_ahead_does_not_evict_what_is_read():
    assert [SegmentCache(BucketDisk(MemoryStore(), cache_bytes=1), max_loaded=loaded, ahead=2).ahead
            for loaded in (1, 4, 8, 256)] == [0, 1, 2, 2]  # fmt: skip


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


@pytest.mark.slow
def test_a_fetch_gets_records_of_a_partition_while_the_bucket_holds_back_another(
    proxied, monkeypatch
):
    monkeypatch.setattr(s3_proxy, "SILENCE_S", 20)
    found = proxied()
    found.create_topic(TOPIC, {"segment.bytes": "1024"}, partitions=2)
    for number in range(3):
        produce(found.broker.bootstrap, TOPIC, [Message(b"", b"%d" % number * 900)])
    wait_until(lambda: objects(found, TOPIC), what=lambda: "an object of partition 0")
    produce(found.broker.bootstrap, TOPIC, [Message(b"", b"here")], partition=1)
    found.broker.kill()
    found.broker.start()
    found.proxy.spoil(Fault("silence", "GetObject", times=1_000, part="/0/"))
    with RawClient(found.broker.port, timeout_s=60) as client:

        def ask(*codes: int) -> list[int]:
            client.send_frame(fetch_frame(dict.fromkeys(range(2), 0), max_wait_ms=500))
            partitions = fetched(client.receive_frame(), codes)
            return [number for number, one in partitions.items() if one.records]

        for _ in range(10):
            assert ask(ErrorCode.NONE) == [1]
        assert found.proxy.spoiled == 1, "the request for the other one is still in progress"
        found.proxy.spoil()
        codes = ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR  # when that request has failed
        wait_until(lambda: 0 in ask(*codes), what=lambda: "partition 0")
