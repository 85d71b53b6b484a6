"""Commits that cannot be made whole, or are given up: nothing is behind them, and nothing waits."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from broker.bucket.test_chain import TOPIC, data
from broker.bucket.test_logs import Machine, row
from logmirror.broker.bucket import chain, commits
from logmirror.broker.bucket.chain import COMMITS, Coverage
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commit_format import Entry, Kind, decode
from logmirror.broker.bucket.journal import MAX_OBJECT_BYTES, Journal, Submission
from logmirror.broker.log import segment as segment_files
from logmirror.errors import OutcomeUnknownError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

LOST = 2
"""The read of a file that fails."""


@pytest.mark.parametrize("is_stored", [False, True])
def test_behind_a_commit_that_a_stop_gives_up_nothing_is_written(is_stored):
    """It would have the number of that one, whose records would be missing before it."""

    class Flaky(MemoryStore):
        failures = 0

        def create(self, name: str, data: bytes) -> None:
            if self.failures == 0 or (is_stored and name not in self.objects):
                super().create(name, data)
            if self.failures:
                self.failures -= 1
                raise OutcomeUnknownError("no response")

    owner = ChainWriter(store := Flaky(), b"12345678")
    owner.take_over()
    journal = Journal(owner, Coverage(), interval_ms=0)
    paused, stopped = threading.Event(), threading.Event()
    journal.pause = lambda _: paused.set() or stopped.wait(20)
    outcomes: list[BaseException | None] = []
    for number in range(2):
        read = partial(list, [data(number, number + 1)])
        journal.submit(Submission(MAX_OBJECT_BYTES, read, lambda _, one: outcomes.append(one)))
    store.failures = 2
    journal.start()
    assert paused.wait(20)
    journal.close(0)
    stopped.set()
    journal.close(20)
    assert [type(one) for one in outcomes] == [UnavailableError] * 2
    assert not journal.is_fenced
    ends = [decode(one).entries[0].next for one in store.objects.values()]
    assert ends == [0, *[1] * is_stored]


def test_behind_bytes_that_cannot_be_read_nothing_is_committed(tmp_path, monkeypatch):
    """A start would refuse the partition, with what was acknowledged before them."""
    store, reads = MemoryStore(), []

    def pread(fd: int, size: int, position: int) -> bytes:
        reads.append(position)
        if len(reads) == LOST:
            raise OSError(errno.EIO, "bad block")
        return os.pread(fd, size, position)

    async def write() -> None:
        machine = Machine(store, tmp_path / "one", row())
        await machine.append(0, b"acknowledged")
        await machine.flush()
        monkeypatch.setattr(commits, "os", SimpleNamespace(pread=pread))
        for number in range(3):
            await machine.append(0, bytes([number]) * 5_000_000)
        with pytest.raises(UnavailableError, match="flushed"):
            await machine.flush()
        machine.close()

    async def read() -> int:
        machine = Machine(store, tmp_path / "two", row())
        machine.close()
        return machine.logs[0].log_end

    asyncio.run(write())
    assert asyncio.run(read()) == LOST
    assert len(reads) == LOST


def test_an_open_segment_that_cannot_be_read_holds_up_no_other_partition(tmp_path, monkeypatch):
    def pread(fd: int, size: int, position: int) -> bytes:
        if position:
            raise OSError(errno.EIO, "bad block")
        return os.pread(fd, size, position)

    async def write() -> None:
        machine = Machine(MemoryStore(), tmp_path / "one", row(2))
        await machine.append(0, b"acknowledged")
        await machine.flush()
        monkeypatch.setattr(segment_files, "os", SimpleNamespace(pread=pread))
        await machine.append(0, b"lost")
        await machine.append(1, b"kept")
        one, other = machine.logs
        await asyncio.wait_for(machine.commits.flushed(other, 1), 20)
        with pytest.raises(UnavailableError, match="flushed"):
            await asyncio.wait_for(machine.commits.flushed(one, 2), 20)
        machine.close()

    asyncio.run(write())


def test_commits_whose_removal_a_crash_has_interrupted_are_removed_by_the_next_start(tmp_path):
    class Crashing(MemoryStore):
        is_away = True

        def delete(self, name: str) -> None:
            if self.is_away and name.startswith(COMMITS):
                raise UnavailableError("the crash comes before it is back")
            super().delete(name)

    store = Crashing()

    def left() -> list[bytes]:
        return [data for name, data in store.objects.items() if name.startswith(COMMITS)]

    def kept() -> int:
        return sum(b"sealed" in data for data in left())

    async def run(name: str, sealed: int) -> None:
        machine = Machine(store, tmp_path / name, row())
        for _ in range(3):
            await machine.append(0, b"sealed")
            await machine.flush()
        machine.logs[0].roll()
        await machine.append(0, b"open")
        await machine.flush()
        for _ in range(2_000):
            if machine.bucket.chain_state()[0] == 1 and kept() == sealed:
                break
            await asyncio.sleep(0.01)
        await machine.append(0, b"open")
        await machine.flush()
        machine.close()

    asyncio.run(run("one", 3))
    assert kept() == 3
    store.is_away = False
    asyncio.run(run("two", 0))
    assert kept() == 0
    assert sum(decode(data).is_fence for data in left()) == 2


def test_the_commits_that_an_offline_partition_keeps_are_not_all_walked_each_second(monkeypatch):
    monkeypatch.setattr(chain, "MOST_WALKED", 2)
    coverage = Coverage()
    for number in range(3):
        coverage.add(number, [Entry(Kind.DATA, TOPIC, number, 0, 1, b"x")], 0)
    assert coverage.holding(1, most=10) == ({(TOPIC, 0): 1, (TOPIC, 1): 1}, set())
    coverage.covered((TOPIC, 0), 1)
    assert coverage.take_removable() == [0]
    assert coverage.holding(1, most=10) == ({(TOPIC, 1): 1, (TOPIC, 2): 1}, set())
