"""Goal: without `flush-on-ack`, records are acknowledged and readable at once, then flushed.

Method: the statements on readable buffers (S and B of docs/broker-statements.md) that apply to a
disk, each as a test of a log in the background mode. `FaultyDisk` drops what was not flushed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kit.fakes.faulty_disk import FaultyDisk
from kit.runs.small_logs import append, batch_of, expected, flush, open_log, read, values
from logmirror.broker.log.disk import Disk, OpenFile
from logmirror.broker.log.flush_rule import FlushRule
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.partition_log import PartitionLog, StorageError
from logmirror.broker.log.partition_transactions import Marker
from logmirror.broker.topic_configs import NEVER
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from logmirror.errors import LogmirrorError

BACKGROUND = FlushRule(messages=NEVER)
SIZE = len(batch_of(0))
BIG = 10**6


def _open(
    folder: Path, disk: Disk | None = None, *, segment_bytes: int = BIG, durable: int | None = None
) -> PartitionLog:
    log = open_log(folder, disk, segment_bytes=segment_bytes, durable=durable)
    log.flush_rule = BACKGROUND
    return log


@pytest.fixture
def log(tmp_path: Path) -> PartitionLog:
    """Ten batches of two records, none of them flushed."""
    log = _open(tmp_path / "t" / "0")
    for number in range(10):
        append(log, number)
    return log


def _bytes(log: PartitionLog, offset: int, max_bytes: int) -> bytes:
    ranges = log.read(offset, max_bytes, at_least_one=True)
    return b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)


def _bases(log: PartitionLog, offset: int, max_bytes: int) -> list[int]:
    return [record.offset for record in decode_reference(_bytes(log, offset, max_bytes))][::2]


def test_s01_every_assigned_offset_is_readable_after_its_append_and_before_any_flush(tmp_path):
    log = _open(tmp_path / "t" / "0")
    acknowledged: list[object] = []
    for number in range(12):
        append(log, number)
        log.when_acknowledged(log.log_end, acknowledged.append)
        assert acknowledged == [None] * (number + 1)
        for offset in range(log.log_end):
            assert read(log, offset)[0].value == b"%02d-%d" % (offset // 2, offset % 2)
    assert log.durable == 0


def test_s02_reading_changes_nothing(log):
    first = [_bytes(log, offset, 500) for offset in range(20)]
    assert [_bytes(log, offset, 500) for offset in range(20)] == first
    assert (log.unflushed.size_bytes, log.log_end, log.durable) == (10 * SIZE, 20, 0)


@pytest.mark.parametrize("max_bytes", [1, SIZE, 2 * SIZE + 5, 5 * SIZE, BIG])
def test_s03_a_read_has_the_first_batch_and_those_behind_it_that_fit(log, max_bytes):
    for offset in range(20):
        first = offset // 2 * 2
        count = max(1, min(max_bytes // SIZE, 10 - offset // 2))
        assert _bases(log, offset, max_bytes) == list(range(first, first + 2 * count, 2))


@pytest.mark.statement("N6")
def test_s04_without_a_limit_to_spend_a_read_has_one_batch(log):
    assert _bases(log, 4, 0) == [4]


def test_s05_the_limit_decides_how_many_batches(log):
    assert _bases(log, 0, 1) == [0]
    assert _bases(log, 0, 2 * SIZE) == [0, 2]
    assert _bases(log, 0, BIG) == list(range(0, 20, 2))


def test_s06_a_read_at_the_end_is_empty(log):
    assert log.read(20, BIG, at_least_one=True) == []


def test_s07_a_read_inside_a_batch_begins_with_that_batch(log):
    assert _bases(log, 7, BIG)[0] == 6


@pytest.mark.statement("N1", "T5", "C5")
@pytest.mark.parametrize("fails", [False, True])
def test_s09_what_is_being_flushed_stays_readable(tmp_path, fails):
    disk = FaultyDisk()
    log = _open(tmp_path / "t" / "0", disk, segment_bytes=3 * SIZE)
    for number in range(10):
        append(log, number)
    job = log.begin_sync()
    assert job is not None
    append(log, 10)
    for offset in range(22):  # each while the flush lasts and a newer batch is there
        assert _bases(log, offset, 1) == [offset // 2 * 2]
    assert values(log) == expected(range(11))
    disk.fail = lambda call: OSError(errno.EIO, "bad disk") if fails and call == "sync" else None
    error = None
    try:
        job.run()
    except OSError as raised:
        error = raised
    assert values(log) == expected(range(11))
    log.finish_sync(job, error)

    if not fails:
        assert (log.durable, log.high_watermark) == (20, 22)
        assert values(log) == expected(range(11))
        return
    with pytest.raises(StorageError):
        log.read(0, BIG, at_least_one=True)
    again = _open(tmp_path / "t" / "0", segment_bytes=3 * SIZE, durable=0)
    assert values(again) == expected(range(11))


def test_s11_all_offsets_are_readable_after_many_segments(tmp_path):
    log = _open(tmp_path / "t" / "0", segment_bytes=4 * SIZE)
    for number in range(30):
        append(log, number)
        if number % 3 == 2:
            flush(log)
        assert values(log) == expected(range(number + 1))


def test_s14_the_high_watermark_is_the_next_offset_flushed_or_not(log):
    assert log.high_watermark == log.log_end == 20
    flush(log)
    assert log.high_watermark == log.log_end == log.durable == 20
    append(log, 10)
    assert (log.high_watermark, log.log_end, log.durable) == (22, 22, 20)


def test_b03_a_topic_that_flushes_on_ack_never_shows_what_is_not_flushed(log):
    log.flush_rule = FlushRule()
    acknowledged: list[object] = []
    append(log, 10)
    log.when_acknowledged(log.log_end, acknowledged.append)

    assert (log.high_watermark, acknowledged) == (20, [])  # what was readable stays so
    assert values(log) == expected(range(10))
    flush(log)
    assert (log.high_watermark, acknowledged) == (22, [None])
    assert values(log) == expected(range(11))


def test_an_open_transaction_is_never_shown_to_readers_of_committed_records(log):
    seen: list[tuple[int, int]] = []
    log.watch(lambda: seen.append((log.high_watermark, log.last_stable_offset)))
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
    append(log, 10, **producer)
    log.append_marker(Marker(7, 0, is_commit=True, coordinator_epoch=0), 1000)

    assert seen == [(22, 20), (23, 23)]


@pytest.mark.parametrize("seed", range(20))
def test_b05_a_power_loss_takes_away_what_was_not_flushed_and_nothing_else(tmp_path, seed):
    chance = random.Random(seed)
    folder, left = tmp_path / "t" / "0", tmp_path / "after" / "0"
    disk = FaultyDisk()
    log = _open(folder, disk, segment_bytes=5 * SIZE)
    for number in range(chance.randrange(1, 30)):
        append(log, number)
        if chance.random() < 0.2:
            flush(log)
    acknowledged, durable = log.high_watermark, log.durable
    keep, some = (lambda n: chance.randint(0, n)), (lambda: chance.random() < 0.5)
    disk.after_power_loss(folder, left, keep=keep, some=some)

    after = _open(left, segment_bytes=5 * SIZE, durable=durable)

    assert durable <= after.high_watermark <= acknowledged
    assert after.high_watermark == after.log_end == after.durable
    assert values(after) == expected(range(after.log_end // 2))


def test_acknowledged_records_are_really_lost_if_power_fails_before_the_flush(tmp_path):
    folder, left = tmp_path / "t" / "0", tmp_path / "after" / "0"
    disk = FaultyDisk()
    log = _open(folder, disk)
    append(log, 0)
    flush(log)
    append(log, 1)
    assert log.high_watermark == 4
    disk.after_power_loss(folder, left, keep=lambda _: 0, some=lambda: True)

    assert _open(left, durable=2).high_watermark == 2


def test_the_high_watermark_never_moves_back_when_the_rule_changes(tmp_path):
    chance = random.Random(1)
    log = _open(tmp_path / "t" / "0", segment_bytes=5 * SIZE)
    jobs, watermarks = [], [0]
    for number in range(200):
        log.flush_rule = chance.choice((BACKGROUND, FlushRule()))
        append(log, number)
        if chance.random() < 0.3 and (job := log.begin_sync()) is not None:
            jobs.append(job)
        if jobs and chance.random() < 0.3:
            jobs[0].run()
            log.finish_sync(jobs.pop(0), None)
        watermarks.append(log.high_watermark)
        assert log.durable <= log.high_watermark <= log.log_end
        if number % 20 == 0:
            assert values(log) == expected(range(log.high_watermark // 2))
    assert watermarks == sorted(watermarks)


class SlowDisk(Disk):
    """A disk whose flushes wait, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_flush = threading.Event()
        self.error: OSError | None = None
        self.syncs = 0

    def sync(self, file: OpenFile) -> None:
        assert self.may_flush.wait(60)
        self.syncs += 1
        if self.error is not None:
            raise self.error
        super().sync(file)


def _with_commits(
    act: Callable[[GroupCommit, SlowDisk], Awaitable[None]], max_unflushed_bytes: int = BIG
) -> None:
    async def run() -> None:
        disk = SlowDisk()
        with ThreadPoolExecutor(2) as executor:
            try:
                await act(
                    GroupCommit(lambda _: executor, disk, max_unflushed_bytes=max_unflushed_bytes),
                    disk,
                )
            finally:
                disk.may_flush.set()

    asyncio.run(run())


async def _durable(log: PartitionLog, end: int) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while log.durable < end and log.failure is None:  # no event: nothing but the flush happens
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


@pytest.mark.statement("T7")
def test_a_quiet_partition_is_flushed_without_a_further_append(tmp_path):
    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        disk.may_flush.set()
        log = _open(tmp_path / "t" / "0", disk)
        log.flush_rule = FlushRule(messages=NEVER, age_ms=30)
        append(log, 0)
        commits.schedule(log)
        await asyncio.sleep(0.005)
        assert log.durable == 0
        await _durable(log, 2)

    _with_commits(act)


def test_the_age_is_that_of_the_oldest_record(tmp_path):
    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        disk.may_flush.set()
        log = _open(tmp_path / "t" / "0", disk)
        log.flush_rule = FlushRule(messages=NEVER, age_ms=50)
        began = asyncio.get_running_loop().time()
        number = 0
        while log.durable == 0:  # an append every few ms must not put the flush off
            append(log, number)
            commits.schedule(log)
            number += 1
            await asyncio.sleep(0.005)
            assert asyncio.get_running_loop().time() - began < 20
        assert number < 200
        assert disk.syncs == 1
        await commits.drain()
        assert log.durable == log.log_end

    _with_commits(act)


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (FlushRule(messages=NEVER, bytes=4 * SIZE), 4),
        (FlushRule(messages=10), 5),
    ],
)
def test_a_flush_begins_by_bytes_or_by_the_number_of_offsets(tmp_path, rule, count):
    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        disk.may_flush.set()
        log = _open(tmp_path / "t" / "0", disk)
        log.flush_rule = rule
        for number in range(count):
            await asyncio.sleep(0.02)
            assert (disk.syncs, log.durable) == (0, 0)
            append(log, number)
            commits.schedule(log)
        await _durable(log, 2 * count)

    _with_commits(act)


def test_a_request_that_needs_durable_records_gets_them_at_once(tmp_path):
    """A transaction marker, or a deletion of records."""

    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        disk.may_flush.set()
        log = _open(tmp_path / "t" / "0", disk)
        append(log, 0)
        await asyncio.wait_for(commits.flushed(log, 2), 20)
        assert log.durable == 2

    _with_commits(act)


@pytest.mark.statement("N2", "T6", "C6")
def test_a_failed_flush_keeps_the_bytes_and_reports_to_all_that_wait(tmp_path):
    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        log = _open(tmp_path / "t" / "0", disk)
        outcomes: list[LogmirrorError | None] = []
        for number in range(5):
            append(log, number)
            log.when_durable(log.log_end, outcomes.append)
            commits.schedule(log)
        room = asyncio.ensure_future(commits.room(log))
        await asyncio.sleep(0.01)
        assert outcomes == []
        disk.error = OSError(errno.EIO, "bad disk")
        disk.may_flush.set()
        await asyncio.wait_for(room, 20)
        assert len(outcomes) == 5
        assert None not in outcomes
        assert log.failure is not None
        assert commits.unflushed.size_bytes == 0

    _with_commits(act, max_unflushed_bytes=3 * SIZE)
    assert values(_open(tmp_path / "t" / "0", durable=0)) == expected(range(5))


def test_at_the_limit_of_unflushed_bytes_every_log_is_flushed_and_producers_wait(tmp_path):
    async def act(commits: GroupCommit, disk: SlowDisk) -> None:
        logs = [_open(tmp_path / "t" / str(number), disk) for number in range(3)]
        for number in range(2):
            for log in logs:
                assert not commits.unflushed.is_reached
                append(log, number)
                commits.schedule(log)
        assert commits.unflushed.is_reached
        room = commits.room(log)
        await asyncio.sleep(0.05)
        assert not room.done()
        disk.may_flush.set()
        await asyncio.wait_for(room, 20)
        for log in logs:
            await _durable(log, 4)

    _with_commits(act, max_unflushed_bytes=6 * SIZE)
