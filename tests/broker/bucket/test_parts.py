"""Goal: a read of a segment that is only in the bucket costs a part of it, and is never wrong.

Method: a segment of batches of many sizes on a store in memory. What is read is compared with its
bytes, whichever offset and size are asked for, and whatever is damaged; then a real broker on a
real S3 server behind a proxy that counts the requests and spoils objects.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_logs import FOLDER, TOPIC, Machine, row
from kit.fakes.s3_proxy import Fault
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import wait_until
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.bucket.parts import INDEXES, LEAST_BYTES, decode, encode
from logmirror.broker.bucket.sealed_objects import object_name
from logmirror.broker.bucket.tiling import INDEXED_BYTES
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.disk import OpenFile
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.segment import DamagedRecordsError, SparseIndex
from logmirror.broker.log.segment_cache import AHEAD
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from logmirror.broker.log.segment import FileRange, Segment

BATCHES = 300
MIB = 1024 * 1024
WAIT_S = 60


class Cold:
    """A partition of one large segment, and a small one behind it, that are only in the bucket."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.machine = Machine(self.store, folder, row())
        [self.log] = self.machine.logs
        self.asked: list[tuple[str, str]] = []

    async def write(self) -> None:
        chance = random.Random(1)
        for _ in range(BATCHES):
            await self.machine.append(0, chance.randbytes(chance.choice((10, 1_000, 90_000))))
        self.log.roll()
        await self.machine.append(0, b"behind")
        self.log.roll()
        await self.machine.flush()
        self.machine.bucket._uploads.submit((TOPIC.bytes, 0), lambda: None).result()  # noqa: SLF001  # waits for the objects
        self.content = self.store.objects[object_name(FOLDER, 0, BATCHES)]
        path = self.log.segments[0].path
        file = OpenFile(os.open(path, os.O_RDONLY))
        batches = scan(file, 0, contiguous=True)
        self.bounds = {one.base_offset: (one.position, one.end) for one in batches}
        self.forget()
        self.store.before = lambda operation, name: self.asked.append((operation, name))

    @property
    def segment(self) -> Segment:
        return self.log.segments[0]

    def forget(self) -> None:
        """Remove what is here of the segments."""
        disk = self.machine.bucket.disk
        for one in self.log.segments:
            if one.is_sealed and one.path.exists():
                disk.unlink(one.path)
            self.machine.cache.forget(one)
            one.is_checked, one.damage = False, ()
        disk._read_at_ms.clear()  # noqa: SLF001  # as after a minute
        self.asked.clear()

    def read(self, offset: int, limit: int) -> list[FileRange]:
        with pytest.raises(ColdSegmentError) as cold:
            self.log.read(offset, limit, at_least_one=True)
        loaded = self.machine.cache.loaded_at(cold.value.segment, offset, limit)
        return self.log.read(offset, limit, at_least_one=True, pinned={cold.value.segment: loaded})

    def is_here(self) -> bool:
        return self.segment.path.exists()


def run(folder: Path, act: Callable[[Cold], Coroutine[None, None, None]]) -> None:
    async def inside() -> None:
        cold = Cold(folder)
        await cold.write()
        try:
            await act(cold)
        finally:
            cold.machine.close()

    asyncio.run(inside())


def bytes_of(ranges: list[FileRange]) -> bytes:
    found = [os.pread(one.file.fd, one.size_bytes, one.position) for one in ranges]
    assert [len(one) for one in found] == [one.size_bytes for one in ranges]
    return b"".join(found)


def test_whatever_is_asked_for_it_gets_the_segments_bytes(tmp_path):
    async def act(cold: Cold) -> None:
        assert len(cold.content) > 2 * INDEXED_BYTES
        chance, index = random.Random(2), f"{INDEXES}/{object_name(FOLDER, 0, BATCHES)}"
        for number in range(300):
            cold.forget()
            offset = chance.choice((0, BATCHES - 1, chance.randrange(BATCHES)))
            limit = chance.choice((1, 50_000, MIB, 3 * MIB, 50 * MIB))
            ranges = cold.read(offset, limit)
            found = bytes_of(ranges)
            start, end = cold.bounds[offset]
            assert found == cold.content[start : start + len(found)]
            assert len(ranges) == 1
            assert len(found) <= max(limit, end - start)
            assert len(found) >= min(limit, LEAST_BYTES, len(cold.content) - start) - 110_000
            assert start + len(found) in {end for _, end in cold.bounds.values()}
            assert not cold.is_here()
            assert ("open", object_name(FOLDER, 0, BATCHES)) not in cold.asked
            assert (("read", index) in cold.asked) == (number == 0), "an index is fetched once"

    run(tmp_path, act)


def test_who_reads_again_gets_the_whole_and_it_is_fetched_once(tmp_path):
    async def act(cold: Cold) -> None:
        disk = cold.machine.bucket.disk
        before = disk.fetched_bytes
        cold.read(100, 1000)
        assert not cold.is_here()
        assert LEAST_BYTES <= disk.fetched_bytes - before < LEAST_BYTES + 200_000
        cold.read(120, 1000)
        assert cold.is_here()
        assert bytes_of(cold.log.read(0, 1 << 40, at_least_one=True)) == cold.content
        assert [one for one in cold.asked if one[0] == "open"] == [
            ("open", object_name(FOLDER, 0, BATCHES))
        ]

    run(tmp_path, act)


def test_a_consumer_that_begins_at_its_start_finds_the_rest_soon(tmp_path):
    async def act(cold: Cold) -> None:
        cold.machine.cache.ahead = AHEAD
        cold.read(0, 1000)
        wait_until(cold.is_here, what=lambda: "the segment")

    run(tmp_path, act)


@pytest.mark.parametrize("what", ["no index", "damaged index", "short index", "other index"])
def test_an_index_is_only_a_copy(tmp_path, what):
    async def act(cold: Cold) -> None:
        name = f"{INDEXES}/{object_name(FOLDER, 0, BATCHES)}"
        whole = cold.store.objects[name]
        index = decode(whole)
        if what == "other index":
            index.positions[40] += 1
            index.positions[41] += 1
            cold.store.objects[name] = encode(index)
        elif what == "no index":
            del cold.store.objects[name]
        else:
            data = bytearray(cold.store.objects[name])
            data[50] ^= 1
            cold.store.objects[name] = bytes(data if what == "damaged index" else data[:11])
        offset = index.offsets[40]
        found = bytes_of(cold.read(offset, 200_000))
        start = cold.bounds[offset][0]
        assert found == cold.content[start : start + len(found)]
        assert cold.is_here()
        if what == "no index":
            wait_until(lambda: name in cold.store.objects, what=lambda: "the index")
            assert cold.store.objects[name] == whole
            cold.forget()
            cold.read(offset, 200_000)
            assert not cold.is_here()  # a part is enough again

    run(tmp_path, act)


def test_damage_is_reported_as_always(tmp_path):
    async def act(cold: Cold) -> None:
        name, (start, end) = object_name(FOLDER, 0, BATCHES), cold.bounds[150]
        data = bytearray(cold.content)
        data[end - 1] ^= 1
        cold.store.objects[name] = bytes(data)
        with pytest.raises(DamagedRecordsError):
            cold.read(150, 1000)
        assert cold.segment.damage[0].position == start
        cold.forget()
        offset = 30  # the part ends before
        assert bytes_of(cold.read(offset, 1000)) in cold.content
        cold.store.objects[name] = cold.content[:-1]
        cold.forget()
        with pytest.raises(DamagedRecordsError):
            cold.read(BATCHES - 1, 1000)

    run(tmp_path, act)


def test_a_part_that_is_read_while_its_topic_is_deleted_makes_no_folder(tmp_path):
    """Another topic could not have that name."""

    async def act(cold: Cold) -> None:
        folder, deleted = cold.log.folder.parent, list[str]()

        def delete(operation: str, name: str) -> None:
            if operation == "read_range":
                shutil.rmtree(folder)
                deleted.append(name)

        cold.store.before = delete
        assert bytes_of(cold.read(150, 1000)) in cold.content
        assert deleted == [object_name(FOLDER, 0, BATCHES)]
        assert not folder.exists()

    run(tmp_path, act)


def test_an_outage_is_an_error_of_storage(tmp_path):
    async def act(cold: Cold) -> None:
        def fail(*_: str) -> None:
            raise UnavailableError("away")

        cold.store.before = fail
        with pytest.raises(OSError, match="away"):
            cold.read(150, 1000)
        cold.store.before = lambda *_: None
        cold.forget()
        assert bytes_of(cold.read(150, 1000)) in cold.content

    run(tmp_path, act)


def test_small_segments_have_no_index_and_each_index_has_a_segment(tmp_path):
    async def act(cold: Cold) -> None:
        indexed = [name for name in cold.store.objects if name.startswith(INDEXES)]
        assert indexed == [f"{INDEXES}/{object_name(FOLDER, 0, BATCHES)}"]
        cold.log.advance_start(BATCHES)
        cold.machine.bucket.remove(cold.log, cold.log.take_deleted())
        assert not [name for name in cold.store.objects if name.startswith(INDEXES)]

    run(tmp_path, act)


@pytest.mark.parametrize("how", ["topic deleted", "partition left"])
def test_a_segment_that_is_uploaded_while_the_others_are_removed_leaves_no_index(tmp_path, how):
    begun, goes_on, removed = threading.Event(), threading.Event(), threading.Event()

    def hold(_: str, name: str) -> None:
        if name.startswith(FOLDER) and not begun.is_set():
            begun.set()
            assert goes_on.wait(WAIT_S)

    async def act() -> None:
        cold = Cold(tmp_path)
        machine, bucket, log = cold.machine, cold.machine.bucket, cold.log
        cold.store.before = hold
        await machine.append(0, bytes(INDEXED_BYTES))
        log.roll()
        await machine.flush()
        assert begun.wait(WAIT_S)
        if how == "topic deleted":
            bucket.delete_topic(row(), [log], removed.set)
        else:
            residence = bucket.residence_of(log)
            bucket.leave(log)
            bucket.remove_residence(residence, removed.set)
        goes_on.set()
        assert removed.wait(WAIT_S)
        bucket._uploads.submit("last", lambda: None).result(WAIT_S)  # noqa: SLF001  # waits for what is before
        assert [name for name in cold.store.objects if FOLDER in name] == []
        machine.close()

    asyncio.run(act())


def test_what_replaces_segments_does_not_wait_for_its_index(tmp_path):
    async def act(cold: Cold) -> None:
        bucket, path = cold.machine.bucket, cold.segment.path
        refused = []

        def refuse(operation: str, name: str) -> None:
            if operation == "create" and name.startswith(INDEXES):
                refused.append(name)
                raise UnavailableError("no index now")

        cold.machine.cache.loaded(cold.segment)
        cold.store.before = refuse
        bucket.submit_replacement(
            cold.log, lambda: bucket.create_replacement(cold.log, 0, BATCHES, path, "0" * 16)
        ).result(30)
        made = object_name(FOLDER, 0, BATCHES, "0" * 16)
        assert cold.store.objects[made] == cold.content
        wait_until(lambda: len(refused) > 1, what=lambda: "a repetition", timeout_s=30)
        assert {*refused} == {f"{INDEXES}/{made}"}
        cold.store.before = lambda *_: None
        wait_until(lambda: refused[0] in cold.store.objects, what=lambda: "the index")

    run(tmp_path, act)


def test_the_bytes_of_an_index_are_its_own():
    index = SparseIndex()
    for number in range(5):
        index.add(10 * number, 20_000 * number, number - 2)
    found = decode(encode(index))
    for name in ("offsets", "positions", "timestamps_ms", "max_timestamp_ms"):
        assert getattr(found, name) == getattr(index, name)
    for data in (b"", encode(index)[:-1], encode(index) + b"x", encode(SparseIndex())):
        with pytest.raises(CorruptionError):
            decode(data)


@pytest.mark.slow
def test_a_client_that_reads_one_old_record_costs_a_part(proxied, topic_name):
    found = proxied()
    bootstrap = found.broker.bootstrap
    create_topic(bootstrap, topic_name, 1, {"segment.bytes": str(8 * MIB)})
    sent = [Message(b"%d" % n, random.Random(n).randbytes(20_000)) for n in range(900)]
    produce(bootstrap, topic_name, sent, config={"batch.num.messages": 3})
    indexes = found.files / INDEXES

    def indexed() -> list[str]:
        found = [name for _, _, names in os.walk(indexes) for name in names]  # folders may vanish
        return sorted(name for name in found if name.endswith(".batches"))

    wait_until(lambda: len(indexed()) == 2, what=lambda: f"indexes: {indexed()}")
    found.broker.kill()
    found.broker.start()
    asked = found.proxy.asked["GetObject"]
    with PartitionClient(bootstrap, topic_name) as partition:
        response = partition.fetch(200, max_bytes=10_000)
        assert response.error_code == 0
        assert found.proxy.asked["GetObject"] == asked + 2  # the index, and a part
        spoiled = found.proxy.spoiled
        found.proxy.spoil(Fault("503", "GetObject", times=1_000, part="/indexes/"))
        response = partition.fetch(10, max_bytes=10_000)  # of the same segment
        assert response.error_code == 0
        assert found.proxy.asked["GetObject"] > asked + 2
        assert found.proxy.spoiled == spoiled, "the index is fetched again"
        found.proxy.spoil()
    rows = list(rows_by_librdkafka(bootstrap, topic_name))
    assert [(row.offset, row.key, row.value) for row in rows] == [
        (n, message.key, message.value) for n, message in enumerate(sent)
    ]
    delete_topic(bootstrap, topic_name)
    wait_until(lambda: not indexed(), what=lambda: f"indexes: {indexed()}")
