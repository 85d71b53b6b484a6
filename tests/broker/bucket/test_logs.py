"""Partitions of a log dir in a store in memory: what is opened, refused, split and kept."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from logmirror.broker.bucket.chain import COMMITS
from logmirror.broker.bucket.commit_format import decode
from logmirror.broker.bucket.commits import BucketCommit
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.bucket.sealed_objects import folder_of, object_name, producers_name
from logmirror.broker.log import segment_cache
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.file_names import sealed_path
from logmirror.broker.log.producer_state import ProducerState
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import TopicRow
from logmirror.errors import CorruptionError
from logmirror.stores import listings
from logmirror.testing.memory_store import MemoryStore
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import SparseIndex

TOPIC = uuid.UUID(int=77)
FOLDER = folder_of("t", TOPIC, 0)
SEGMENTS = 10_000
SEALS = 4
MOST_REQUESTS = 20


def row(partitions: int = 1, **starts: int) -> TopicRow:
    return TopicRow(
        name="t",
        topic_id=TOPIC,
        partition_count=partitions,
        configs={},
        log_starts={int(name[1:]): start for name, start in starts.items()},
    )


def batch(value: bytes) -> memoryview:
    return memoryview(bytearray(encode_reference([Record(0, 0, 0, None, value, ())])))


class Machine:
    """The logs of a log dir, open on an event loop."""

    def __init__(
        self, store: MemoryStore, folder: Path, topic: TopicRow, *, max_commits: int = 1_000
    ) -> None:
        self.bucket = BucketLogs(store, folder, interval_ms=1, cache_bytes=1 << 30)
        self._executor = ThreadPoolExecutor(1)
        self.commits = BucketCommit(
            lambda _: self._executor,
            self.bucket,
            interval_ms=1,
            timeout_ms=1_000,
            max_unflushed_bytes=1 << 30,
            tail_age_ms=1 << 40,
            max_commits=max_commits,
            max_seals_per_s=SEALS,
        )
        self.bucket.list_all([topic])
        self.logs: list[PartitionLog] = []
        self.cache = SegmentCache(self.bucket.disk, parts=self.bucket.disk.part)
        for number in range(topic.partition_count):
            place = folder / "t" / str(number)
            log = self.bucket.open_log(topic, number, place, self.cache, 1 << 30)
            self.bucket.admit(log, "t", TOPIC, number)
            self.logs.append(log)
        self.commits.opened()

    async def append(self, number: int, value: bytes) -> None:
        log, data = self.logs[number], batch(value)
        log.append(data, check_batch(data, max_bytes=1 << 26))
        self.commits.schedule(log)

    async def flush(self) -> None:
        for log in self.logs:
            await self.commits.flushed(log, log.log_end)

    def close(self) -> None:
        self.bucket.close()
        self._executor.shutdown()


def bytes_of(log: PartitionLog) -> bytes:
    found = log.read(log.log_start, 1 << 40, at_least_one=True)
    return b"".join(os.pread(one.file.fd, one.size_bytes, one.position) for one in found)


def test_a_large_backlog_is_split_at_batches_and_comes_back(tmp_path):
    store = MemoryStore()

    async def write() -> list[bytes]:
        machine = Machine(store, tmp_path / "one", row(2))
        for number in range(30):
            await machine.append(number % 2, bytes([number]) * 1_000_000)
        await machine.append(0, b"small")
        await machine.flush()
        machine.close()
        return [bytes_of(log) for log in machine.logs]

    async def read() -> list[bytes]:
        machine = Machine(store, tmp_path / "two", row(2))
        machine.close()
        assert [log.high_watermark for log in machine.logs] == [16, 15]
        return [bytes_of(log) for log in machine.logs]

    assert asyncio.run(write()) == asyncio.run(read())
    sizes = [len(data) for name, data in store.objects.items() if name.startswith(COMMITS)]
    assert max(sizes) < 9_000_000
    commits = [decode(store.objects[name]) for name in store.objects if name.startswith(COMMITS)]
    assert sum(len(commit.entries) for commit in commits) > 6


def test_segments_with_old_commits_are_sealed_at_a_limited_rate(tmp_path):
    """Requests per second have a limit that does not depend on the number of partitions."""

    async def seal() -> list[set[int]]:
        machine = Machine(MemoryStore(), tmp_path, row(3 * SEALS), max_commits=0)
        for number in reversed(range(3 * SEALS)):
            await machine.append(number, b"x")
            await machine.flush()
        await machine.append(0, b"newer")  # partition 0 holds the newest commit, and an old one
        await machine.flush()
        found = []
        for _ in range(4):
            machine.commits._tick()  # noqa: SLF001  # once per second
            await machine.flush()
            found.append({at for at, log in enumerate(machine.logs) if len(log.segments) > 1})
        machine.close()
        return found

    highest = 3 * SEALS
    first, second, third, last = asyncio.run(seal())
    assert first == set(range(highest - SEALS, highest))  # those that hold the oldest commits
    assert second == set(range(highest - 2 * SEALS, highest))
    assert third == last == set(range(highest))


def test_ten_thousand_segments_are_opened_by_their_names(tmp_path):
    store = MemoryStore()
    body = bytes(batch(b"x"))
    for first in range(SEGMENTS):
        store.objects[object_name(FOLDER, first, first + 1)] = body
    asked: list[tuple[str, str]] = []

    async def open_all() -> PartitionLog:
        machine = Machine(store, tmp_path / "one", row())
        machine.close()
        return machine.logs[0]

    store.before = lambda operation, name: asked.append((operation, name))
    state = ProducerState().to_bytes(SEGMENTS)
    store.objects[f".logmirror/broker/producers/{FOLDER}/{SEGMENTS:020d}"] = state
    log = asyncio.run(open_all())
    assert len(log.segments) == SEGMENTS == log.high_watermark
    of_segments = [operation for operation, name in asked if name.startswith(FOLDER)]
    assert of_segments == ["names"], "they are listed once, and none is read"
    assert len(asked) < MOST_REQUESTS


def test_small_partitions_of_a_topic_are_listed_together(tmp_path, monkeypatch):
    """More names than 3 requests for 48 partitions return: those behind them are listed alone."""
    monkeypatch.setattr(listings, "_NAMES_PER_REQUEST", 40)
    store, count = MemoryStore(), 48
    body = bytes(batch(b"x"))
    for number in range(0, count, 2):
        for first in range(6):
            name = object_name(folder_of("t", TOPIC, number), first, first + 1)
            store.objects[name] = body
    asked: list[tuple[str, str]] = []

    async def open_all() -> list[int]:
        machine = Machine(store, tmp_path / "one", row(count))
        machine.close()
        return [len(log.segments) for log in machine.logs]

    store.before = lambda operation, name: asked.append((operation, name))
    assert asyncio.run(open_all()) == [6, 0] * (count // 2)
    topic = FOLDER.rpartition("/")[0]
    assert asked.count(("below", topic)) == 1
    alone = {name.rpartition("/")[2] for op, name in asked if op == "names" and topic in name}
    listed = sorted(map(str, range(0, count, 2)))[: 120 // 6 - 1]
    assert alone == {str(number) for number in range(count)} - set(listed)


def test_a_missing_producer_state_is_read_from_the_log(tmp_path):
    store = MemoryStore()

    async def write() -> None:
        machine = Machine(store, tmp_path / "one", row())
        await machine.append(0, b"a")
        machine.logs[0].roll()
        await machine.flush()
        await machine.append(0, b"b")
        await machine.flush()
        key = TOPIC.bytes, 0
        machine.bucket._uploads.submit(key, lambda: None).result()  # noqa: SLF001  # waits for the object
        machine.close()

    async def read() -> bytes:
        machine = Machine(store, tmp_path / "two", row())
        machine.close()
        return b"".join(path.read_bytes() for path in (tmp_path / "two/t/0").iterdir())

    asyncio.run(write())
    for name in [name for name in store.objects if "/producers/" in name]:
        del store.objects[name]
    found = asyncio.run(read())
    assert found.count(b"a") >= 1
    assert found.count(b"b") >= 1


@pytest.mark.parametrize("uploaded", range(4), ids="{} segments".format)
def test_producers_of_segments_that_were_deleted_before_their_upload_are_known(tmp_path, uploaded):
    """The broker ends when the states of some of three segments are uploaded."""
    store, left, turn = MemoryStore(), MemoryStore(), threading.Semaphore(0)

    async def delete() -> None:
        machine = Machine(store, tmp_path / "one", row())
        [log] = machine.logs
        key, uploads = (TOPIC.bytes, 0), machine.bucket._uploads  # noqa: SLF001  # its thread
        done = []
        for number in range(3):
            uploads.submit(key, turn.acquire)
            records = [Record(0, 0, 0, None, b"value", ())]
            whole = encode_reference(records, producer_id=number, producer_epoch=0, base_sequence=0)
            data = memoryview(bytearray(whole))
            log.append(data, check_batch(data, max_bytes=1_000))
            log.roll()
            await machine.flush()
            done.append(uploads.submit(key, lambda: None))
        log.advance_start(3)
        machine.commits.remove_deleted(log)
        for one in done[:uploaded]:
            turn.release()
            await asyncio.wrap_future(one)
        left.objects |= store.objects
        turn.release(3)
        await machine.commits.wait_removed(log)
        machine.close()

    async def read(folder: Path) -> tuple[PartitionLog, bytes]:
        machine = Machine(left, folder, row(p0=3))
        uploads = machine.bucket._uploads  # noqa: SLF001  # waits for it
        uploads.submit((TOPIC.bytes, 0), lambda: None).result()
        machine.close()
        assert [path for path in (folder / "t/0").glob("*") if path.suffix == ".batches"] == []
        return machine.logs[0], left.read(producers_name(FOLDER, 3))

    asyncio.run(delete())
    for name in ("two", "three"):
        log, stored = asyncio.run(read(tmp_path / name))
        assert not list(left.names(FOLDER))
        assert (log.log_start, log.log_end, log.segments) == (3, 3, [])
        assert [number for number, _ in log.producers.items()] == [0, 1, 2]
        assert stored == log.producers.to_bytes(3)


def test_producers_are_known_if_the_chain_has_a_part_of_a_deleted_segment(tmp_path):
    """A commit has its end and the begin of the next one; the commit before it was removed."""
    store, may_upload = MemoryStore(), threading.Event()

    def append(log: PartitionLog, number: int) -> None:
        records = [Record(0, 0, 0, None, b"value", ())]
        whole = encode_reference(records, producer_id=number, producer_epoch=0, base_sequence=0)
        data = memoryview(bytearray(whole))
        log.append(data, check_batch(data, max_bytes=1_000))

    async def delete() -> None:
        machine = Machine(store, tmp_path / "one", row())
        [log] = machine.logs
        machine.bucket._uploads.submit((TOPIC.bytes, 0), may_upload.wait)  # noqa: SLF001  # its thread
        append(log, 0)
        await machine.flush()
        append(log, 1)
        log.roll()
        append(log, 2)
        await machine.flush()
        log.advance_start(2)
        machine.commits.remove_deleted(log)
        may_upload.set()
        await machine.commits.wait_removed(log)
        machine.bucket._uploads.submit("commits", lambda: None).result()  # noqa: SLF001  # as above
        machine.close()

    async def read() -> PartitionLog:
        machine = Machine(store, tmp_path / "two", row(p0=2))
        machine.close()
        return machine.logs[0]

    asyncio.run(delete())
    log = asyncio.run(read())
    assert (log.log_start, log.log_end) == (2, 3)
    assert [number for number, _ in log.producers.items()] == [0, 1, 2]


@pytest.mark.parametrize("lost", ["object", "first object"])
def test_a_missing_object_is_an_error_and_not_a_shorter_log(tmp_path, lost):
    store = MemoryStore()
    for first in range(3):
        store.objects[object_name(FOLDER, first, first + 1)] = bytes(batch(b"x"))
    del store.objects[object_name(FOLDER, 1, 2) if lost == "object" else object_name(FOLDER, 0, 1)]

    async def open_all() -> None:
        Machine(store, tmp_path / "one", row())

    with pytest.raises(CorruptionError):
        asyncio.run(open_all())


@pytest.mark.statement("T12", "C10")
def test_a_changed_commit_is_named(tmp_path):
    store = MemoryStore()

    async def write() -> None:
        machine = Machine(store, tmp_path / "one", row())
        await machine.append(0, b"a")
        await machine.flush()
        machine.close()

    asyncio.run(write())
    name = f"{COMMITS}/{1:020d}"
    data = bytearray(store.objects[name])
    data[-1] ^= 1
    store.objects[name] = bytes(data)
    store.objects[f"{COMMITS}/{2:020d}"] = store.objects[f"{COMMITS}/{0:020d}"]
    with pytest.raises(CorruptionError) as caught:
        asyncio.run(write())
    assert caught.value.facts["name"] == name


def test_the_working_folder_has_a_limit(tmp_path):
    store = MemoryStore()
    for number in range(5):
        store.objects[f"b/{number}"] = bytes(100)
    disk = BucketDisk(store, cache_bytes=250)
    disk.connect(tmp_path, "b")
    opened = [disk.open_for_reading(tmp_path / str(number)) for number in range(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    assert [os.fstat(file.fd).st_size for file in opened] == [100] * 5
    disk.open_for_reading(tmp_path / "3")
    disk.open_for_reading(tmp_path / "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3"]
    assert (disk.hits, disk.misses, disk.held_bytes) == (1, 6, 200)
    with pytest.raises(OSError, match="could not be fetched"):
        disk.open_for_reading(tmp_path / "missing")


def test_copies_leave_open_segments_half_of_the_disk(tmp_path):
    store, others = MemoryStore(), [0]
    for number in range(9):
        store.objects[f"b/{number}"] = bytes(100)

    def free() -> int:
        return 1_000 - others[-1] - sum(path.stat().st_size for path in tmp_path.iterdir())

    disk = BucketDisk(store, cache_bytes=1 << 40, free_bytes=free)
    disk.connect(tmp_path, "b")
    found = []
    for number, size in enumerate([0, 0, 0, 0, 0, 0, 400, 600, 700]):
        others.append(size)
        disk.open_for_reading(tmp_path / str(number))
        rooms = [disk.has_room(Segment(tmp_path, 0, 1, size)) for size in (66, 67, 167)]
        found.append(("".join(sorted(path.name for path in tmp_path.iterdir())), rooms))
    kept = ["0", "01", "012", "0123", "01234", "12345", "456", "67", "8"]
    assert [names for names, _ in found] == kept
    ample, scarce, none = [True, True, False], [True, False, False], [False] * 3
    assert [rooms for _, rooms in found] == [*[ample] * 7, scarce, none]
    assert disk.has_room(Segment(tmp_path / "on a disk", 0, 1, 1 << 30))


def test_a_log_dir_keeps_few_copies_on_a_full_disk(tmp_path, monkeypatch):
    asked = []

    def usage(path: Path) -> object:
        asked.append(path)
        return SimpleNamespace(free=0)

    async def write() -> None:
        machine = Machine(MemoryStore(), tmp_path / "one", row())
        monkeypatch.setattr(shutil, "disk_usage", usage)
        for number in range(3):
            await machine.append(0, b"%d" % number)
            machine.logs[0].roll()
            await machine.flush()
        machine.bucket.wait_uploaded(machine.logs[0], 30)
        machine.close()

    asyncio.run(write())
    [kept] = (tmp_path / "one/t/0").glob("*.batches")
    assert kept == sealed_path(tmp_path / "one/t/0", 2, 3)
    assert asked == [tmp_path / "one"] * 3


class Evicting:
    """Segments of a record each, of which the working folder keeps the last one."""

    def __init__(self, folder: Path) -> None:
        store, self.segments = MemoryStore(), []
        for offset in range(2):
            data = encode_reference([Record(offset, 0, 0, None, b"value", ())])
            self.segments.append(Segment(folder, offset, offset + 1, len(data)))
            store.objects[f"b/{self.segments[-1].path.name}"] = data
        disk = BucketDisk(store, cache_bytes=1)
        disk.connect(folder, "b")
        self.cache = SegmentCache(disk, ahead=2, has_room=disk.has_room)
        disk.when_evicted = self.cache.let_go


def test_a_file_that_is_evicted_is_closed_behind_the_responses_that_send_it(tmp_path):
    made = Evicting(tmp_path)
    first, second = made.segments
    sent, index = made.cache.loaded(first)
    is_open = weakref.ref(sent)
    made.cache.loaded(second)
    assert not first.path.exists()
    assert os.fstat(sent.fd).st_size == first.size_bytes
    assert (first.file, first.index) == (None, index)
    del sent
    assert is_open() is None
    assert second.file is not None


def test_a_file_that_is_evicted_while_it_is_checked_is_not_kept_open(tmp_path, monkeypatch):
    made, load = Evicting(tmp_path), segment_cache.load
    first, second = made.segments

    def evicting(segment: Segment, file: OpenFile) -> SparseIndex:
        if segment is first:
            made.cache.loaded(second)
        return load(segment, file)

    monkeypatch.setattr(segment_cache, "load", evicting)
    file, index = made.cache.loaded(first)
    assert os.fstat(file.fd).st_size == first.size_bytes
    assert (first.file, first.index) == (None, index)
    assert made.cache.if_loaded(first) is None
    assert made.cache.loaded(first)[0] is first.file is not None


def test_what_would_evict_what_is_read_is_not_loaded_ahead(tmp_path):
    made = Evicting(tmp_path)
    made.cache.read_ahead(made.segments)
    assert not made.cache._loading_ahead  # noqa: SLF001  # what is begun
    assert [path for path in tmp_path.iterdir() if path.suffix == ".batches"] == []
