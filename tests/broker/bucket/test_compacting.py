"""Goal: compaction in a bucket loses nothing that counts, and nothing that it removed comes back.

Method: the parts of a broker on a store in memory, for what can happen between two of its steps;
then a real broker on a real S3 server, which is killed at each step. `test_simulated` and
`test_pairs` have the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from broker.bucket.test_logs import FOLDER, TOPIC, Machine, batch, row
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.runs.commands import wait_until
from logmirror.broker.bucket import replacing
from logmirror.broker.bucket.merging import planned
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.bucket.sealed_objects import object_name, sealed_objects
from logmirror.broker.compaction import Compactor
from logmirror.broker.log.cleaner import Cleaned
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.segment import Segment
from logmirror.broker.metadata import MetadataStore, TopicRow
from logmirror.broker.place_rows import Compacted
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.failpoints import COMPACT_POINTS
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.bucket_broker import BucketBroker

TIMEOUT_S = 60
SEGMENTS = 12
KEYS = 20


class Parts:
    """A partition of `SEGMENTS` segments of one record each, whose objects exist."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.store, self.folder = store, folder
        folder.mkdir()
        self.database = MetadataStore(folder / "broker.sqlite")
        self.database.create_topic(row())
        self.machine = Machine(store, folder / "work", row())
        [self.log] = self.machine.logs
        self.executor = ThreadPoolExecutor(1)
        self.replacing = InBucket(self.machine.commits, self.database, self.executor)

    async def write(self) -> None:
        for number in range(SEGMENTS):
            await self.machine.append(0, b"%d" % number)
            self.log.roll()
        await self.machine.flush()
        self.machine.bucket._uploads.submit((TOPIC.bytes, 0), lambda: None).result()  # noqa: SLF001  # waits for the objects

    async def replace(self, first: int, end: int) -> bool:
        """Replace segments by one with the same records."""
        cleaned = self.cleaned(first, end)
        try:
            await self.replacing.begin(self.log)
            return await self.replacing.replace(self.log, cleaned)
        finally:
            self.replacing.end(self.log)

    def cleaned(self, first: int, end: int) -> Cleaned:
        """Write that one."""
        old = [one for one in self.log.segments if first <= one.first < end and one.is_sealed]
        folder = self.log.folder
        path = cleaned_path(folder, old[0].first)
        path.write_bytes(b"".join(one.path.read_bytes() for one in old))
        new = Segment(folder, old[0].first, old[-1].next_offset, path.stat().st_size)
        return Cleaned(path=path, segment=new, old=tuple(old))

    def rows(self) -> list[tuple[int, int]]:
        return [one[:2] for one in self.row().compacted.get(0, ())]

    def row(self) -> TopicRow:
        [found] = self.database.topics()
        return found

    def names(self) -> list[str]:
        """The partition's objects, once those that were replaced are deleted."""
        self.machine.bucket.submit_replacement(self.log, lambda: None).result()
        return sorted(name for name in self.store.objects if name.startswith(FOLDER))

    def content(self) -> bytes:
        return content(self.machine)

    def close(self) -> None:
        self.machine.close()
        self.database.close()
        self.executor.shutdown()


def content(machine: Machine) -> bytes:
    files = [machine.bucket.disk.open_for_reading(one.path) for one in machine.logs[0].segments]
    return b"".join(os.pread(file.fd, 1 << 20, 0) for file in files)


async def written(folder: Path) -> Parts:
    parts = Parts(folder, MemoryStore())
    await parts.write()
    return parts


def opened_again(parts: Parts, folder: Path) -> bytes:
    """Return what another machine finds."""
    topic = parts.row()
    parts.close()
    machine = Machine(parts.store, folder, topic)
    found = content(machine)
    machine.close()
    return found


def test_a_compacted_segment_takes_the_place_of_others(tmp_path):
    async def act() -> None:
        parts = await written(tmp_path / "one")
        before = parts.content()
        assert await parts.replace(2, 6)
        assert await parts.replace(7, 9)
        assert await parts.replace(2, 9)
        assert parts.rows() == [(2, 9)]
        [version] = [one.version for one in parts.log.segments if one.version]
        plain = [object_name(FOLDER, n, n + 1) for n in (0, 1, 9, 10, 11)]
        assert parts.names() == sorted([*plain, object_name(FOLDER, 2, 9, version)])
        assert parts.content() == before
        assert opened_again(parts, tmp_path / "two") == before

    asyncio.run(act())


def test_records_that_are_deleted_during_a_pass_leave_all_as_it_was(tmp_path):
    async def act() -> None:
        parts = await written(tmp_path / "one")
        assert await parts.replace(4, 6)
        add = parts.database.add_compacted

        def delete_and_add(*args: Any) -> None:
            add(*args)
            parts.database.set_log_starts("t", {0: 3})
            parts.log.advance_start(3)
            deleted = parts.log.take_deleted()
            parts.machine.bucket.remove(parts.log, deleted)

        parts.database.add_compacted = delete_and_add
        assert not await parts.replace(0, 8)
        assert parts.rows() == [(4, 6)]
        assert not [name for name in parts.names() if "00-0000000000000000000" in name]
        after = parts.content()
        assert opened_again(parts, tmp_path / "two") == after

    asyncio.run(act())


def test_a_change_of_unknown_outcome_is_right_either_way(tmp_path):
    """The row is in the chain, the log knows nothing of it: nothing of the log is merged then."""

    async def act() -> None:
        parts = await written(tmp_path / "one")
        before = parts.content()
        add = parts.database.add_compacted

        def add_and_fail(*args: Any) -> None:
            add(*args)
            raise UnavailableError("not known")

        parts.database.add_compacted = add_and_fail
        with pytest.raises(UnavailableError):
            await parts.replace(0, 3)
        merger = parts.machine.commits.merger
        merger.consider(parts.log)
        merger.tick()
        await asyncio.sleep(0.2)
        assert merger.into == 0
        assert parts.content() == before
        assert opened_again(parts, tmp_path / "two") == before

    asyncio.run(act())


def test_a_pass_whose_upload_fails_leaves_no_file(tmp_path):
    """It would take space until the partition is compacted the next time."""

    async def act() -> None:
        parts = await written(tmp_path / "one")
        before, cleaned = sorted(parts.log.folder.iterdir()), parts.cleaned(2, 6)
        compactor: Any = Compactor.__new__(Compactor)
        compactor._executor, compactor._replacing = parts.executor, parts.replacing  # noqa: SLF001  # all that a pass needs
        compactor._disk = parts.machine.bucket.disk  # noqa: SLF001  # the same
        cleaning = SimpleNamespace(prepare=lambda: True, groups=lambda: iter([cleaned]))

        def fail(_: str, name: str) -> None:
            if name.startswith(FOLDER):
                raise CorruptionError("refused")

        parts.store.before = fail
        await parts.replacing.begin(parts.log)
        with pytest.raises(CorruptionError, match="refused"):
            await compactor._pass(parts.log, cleaning)  # noqa: SLF001  # without its beginning
        parts.replacing.end(parts.log)
        assert sorted(parts.log.folder.iterdir()) == before
        parts.close()

    asyncio.run(act())


def test_an_upload_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "LIMIT_S", 0.2)

    def refuse(operation: str, _: str) -> None:
        if operation == "publish":
            raise UnavailableError("away")

    async def act() -> None:
        parts = await written(tmp_path / "one")
        before = parts.names()
        parts.store.before = refuse
        with pytest.raises(UnavailableError, match="in time"):
            await parts.replace(0, 3)
        parts.store.before = lambda *_: None
        assert parts.names() == before
        assert parts.rows() == []
        assert await parts.replace(0, 3)
        assert parts.rows() == [(0, 3)]
        parts.close()

    asyncio.run(act())


def test_a_pass_does_not_wait_for_a_merge_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "LIMIT_S", 0.2)

    async def act() -> None:
        parts = await written(tmp_path / "one")
        may_end = threading.Event()
        parts.machine.bucket.submit_replacement(parts.log, lambda: may_end.wait(30))
        merger = parts.machine.commits.merger
        merger.consider(parts.log)
        merger.tick()
        with pytest.raises(UnavailableError, match="being merged"):
            await parts.replace(0, 3)
        may_end.set()
        assert await merger.leave(parts.log, parts.replacing, 30)
        assert merger.into == 1
        parts.close()

    asyncio.run(act())


def test_segments_are_merged_only_behind_the_last_compacted_one(tmp_path):
    async def act() -> None:
        parts = await written(tmp_path / "one")
        assert [one.first for one in planned(parts.log, SEGMENTS, ())] == list(range(8))
        assert planned(parts.log, 7, ()) == []
        assert await parts.replace(1, 3)
        assert planned(parts.log, SEGMENTS, ()) == []  # 3 to 7 begin in a cell that 0 is in
        for number in range(3 * SEGMENTS):
            await parts.machine.append(0, b"%d" % number)
            parts.log.roll()
        await parts.machine.flush()
        found = planned(parts.log, 4 * SEGMENTS, ())
        assert found[0].first in {8, 16, 32}  # whole cells
        parts.close()

    asyncio.run(act())


def test_only_compacted_objects_with_a_row_count():
    store, version, other = MemoryStore(), "a" * 16, "b" * 16
    for name in [object_name(FOLDER, n, n + 1) for n in range(6)]:
        store.objects[name] = bytes(batch(b"x"))
    for bounds in ((1, 4, version), (1, 4, other), (3, 6, other), (3, 6, "")):
        store.objects[object_name(FOLDER, *bounds)] = b"y"
    rows = [Compacted(1, 4, version)]

    def names(log_start: int = 0) -> tuple[list[str], int]:
        objects, deleted = sealed_objects(store.sizes(FOLDER), FOLDER, log_start, rows)
        found = [object_name("", one.first, one.next, one.version)[1:] for one in objects]
        assert sorted(found + deleted) == sorted(name[len(FOLDER) + 1 :] for name in store.objects)
        return [f"{int(name[:20])}-{int(name[21:41]) + 1}{name[41:]}" for name in found], len(
            deleted
        )

    kept = ["0-1.batches", f"1-4.{version}.batches", "4-5.batches", "5-6.batches"]
    assert names() == (kept, 6)
    assert names(2) == (kept[1:], 7)
    assert names(4) == (kept[2:], 8)
    del store.objects[object_name(FOLDER, 1, 4, version)]
    assert names(4) == (kept[2:], 7)
    with pytest.raises(CorruptionError) as caught:
        names()
    assert version in str(caught.value)


def compact(broker: BucketBroker, topic_name: str) -> None:
    """Change the topic: it is compacted from now on."""
    resource = ConfigResource(ResourceType.TOPIC, topic_name)
    for name, value in {
        "min.cleanable.dirty.ratio": "0",
        "delete.retention.ms": "0",
        "segment.ms": "500",
        "cleanup.policy": "compact",
    }.items():
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource.add_incremental_config(entry)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)


def newest(messages: list[Message]) -> dict[bytes | None, bytes | None]:
    return {message.key: message.value for message in messages}


def check(
    broker: BucketBroker, topic_name: str, wanted: dict[bytes | None, bytes | None], most: int
) -> None:
    """Wait until at most so many records are left; they are the newest of their keys."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
        found = {row_.key: row_.value for row_ in rows}
        assert {key: value for key, value in found.items() if value is not None} == {
            key: value for key, value in wanted.items() if value is not None
        }
        if len(rows) <= most:
            return
        assert time.monotonic() < deadline, f"{len(rows)} records"
        time.sleep(0.2)


@pytest.mark.parametrize("point", [*COMPACT_POINTS, "bucket.deleted"])
def test_a_crash_at_each_step_loses_nothing_and_revives_nothing(
    machines, s3_server, bucket, topic_name, point
):
    first = machines(crash_at=f"{point}#2").start()
    admin = AdminClient({"bootstrap.servers": first.bootstrap})
    admin.create_topics([NewTopic(topic_name, 1, 1)])[topic_name].result(TIMEOUT_S)
    sent = [Message(b"%d" % (n % KEYS), b"%d" % n * 300) for n in range(900)]
    sent += [Message(b"%d" % key, None) for key in range(0, KEYS, 4)]
    sent += [Message(b"0", b"after"), Message(b"other", b"x" * 99_000)]
    produce(first.bootstrap, topic_name, sent, config={"batch.num.messages": 10})
    compact(first, topic_name)
    assert first.wait(TIMEOUT_S) == -9

    root = s3_server.files(bucket)
    second = machines().start()
    check(second, topic_name, newest(sent), KEYS + 2)
    again = [Message(b"1", None), Message(b"2", b"new"), Message(b"other", b"y" * 99_000)]
    produce(second.bootstrap, topic_name, again)
    check(second, topic_name, newest([*sent, *again]), KEYS + 2)
    second.kill()

    third = machines().start()
    check(third, topic_name, newest([*sent, *again]), KEYS + 2)

    def left() -> list[str]:
        return sorted(path.name for path in root.rglob("*.batches"))

    def are_apart() -> bool:
        """Whether no object is left that another one replaced."""
        bounds = [(int(name[:20]), int(name[21:41])) for name in left()]
        return all(one[1] < two[0] for one, two in itertools.pairwise(bounds))

    wait_until(are_apart, what=lambda: f"objects: {left()}")
    assert any(name.count(".") == 2 for name in left())
    assert third.stop() == 0
