"""Goal: acknowledged records survive every crash; others survive whole or not at all.

Method: a log on a disk that loses power before each of its system calls in turn, and keeps or loses
unflushed bytes at random. After recovery every acknowledged record is at its offset, and the log
continues. Then single calls fail: exactly the waiting requests fail.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.fakes.faulty_disk import FaultyDisk, PowerLossError
from kit.runs.small_logs import (
    PRODUCER,
    SEGMENT_BYTES,
    append,
    expected,
    flush,
    open_log,
    values,
    workload,
)
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.file_names import first_of
from logmirror.broker.log.open_segments import DamagedLogError
from logmirror.broker.log.reading import ColdSegmentError, StorageError
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from logmirror.broker.log.partition_log import PartitionLog

_UNTIL_POWER_LOSS = 12


def test_records_are_readable_when_they_are_durable_and_not_before(tmp_path):
    log = open_log(tmp_path / "t" / "0")
    outcomes: list[LogmirrorError | None] = []
    append(log, 0)
    log.when_durable(log.log_end, outcomes.append)

    assert (log.log_end, log.high_watermark) == (2, 0)
    assert log.read(0, 1000, at_least_one=True) == []
    assert outcomes == []

    flush(log)

    assert (log.high_watermark, outcomes) == (2, [None])
    assert values(log) == expected(range(1))


def test_batches_appended_during_a_flush_wait_for_the_next_one(tmp_path):
    log = open_log(tmp_path / "t" / "0")
    append(log, 0)
    job = log.begin_sync()
    assert job is not None
    append(log, 1)

    assert log.begin_sync() is None
    job.run()
    log.finish_sync(job, None)

    assert log.high_watermark == 2
    assert values(log) == expected(range(1))
    flush(log)
    assert values(log) == expected(range(2))


def test_full_segments_become_archive_objects_that_tile_the_log(tmp_path):
    log = open_log(tmp_path / "t" / "0")
    acked: list[int] = []
    workload(log, acked)

    names = sorted(path.name for path in (tmp_path / "t" / "0").iterdir())

    sealed = [name for name in names if name.endswith(".batches")]
    assert len(sealed) > 3
    position = 0
    for name in sealed:
        first, last = int(name[:20]), int(name[21:41])
        assert first == position
        position = last + 1
        records = decode_reference((tmp_path / "t" / "0" / name).read_bytes())
        assert [record.offset for record in records] == list(range(first, last + 1))
    assert [n for n in names if n.endswith(".open")] == [f".{position:020d}.open"]
    assert [n for n in names if n.endswith(".producers")] == [f".{position:020d}.producers"]
    assert acked == list(range(24))


@pytest.mark.statement("N6", "N7", "T8", "T9", "C8")
@pytest.mark.parametrize("max_bytes", [0, 1, 100, 300, 1000, 10**6])
def test_a_read_has_whole_batches_up_to_its_limit_and_at_least_one(tmp_path, max_bytes):
    log = open_log(tmp_path / "t" / "0")
    workload(log, [])
    one = log.high_watermark // 24

    for offset in range(log.high_watermark):
        ranges = log.read(offset, max_bytes, at_least_one=True)
        data = b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)
        offsets = [record.offset for record in decode_reference(data)]
        assert offsets[0] <= offset <= offsets[one - 1]
        assert len(data) <= max_bytes or len(offsets) == one
        assert len(log.read(offset, max_bytes, at_least_one=False)) == (
            len(ranges) if len(data) <= max_bytes else 0
        )


def test_a_restart_keeps_records_and_producer_state(tmp_path):
    log = open_log(tmp_path / "t" / "0")
    workload(log, [])

    again = open_log(tmp_path / "t" / "0")

    assert (again.log_start, again.high_watermark, again.log_end) == (0, 48, 48)
    assert values(again) == expected(range(24))
    repeated = again.producers.find_duplicate(PRODUCER, 0, 46, 2)
    assert repeated is not None
    assert repeated.base_offset == 46
    assert again.producers.find_duplicate(PRODUCER, 0, 48, 1) is None


def test_producers_come_from_the_log_when_their_snapshot_is_damaged(tmp_path):
    log = open_log(tmp_path / "t" / "0")
    workload(log, [])
    [snapshot] = (tmp_path / "t" / "0").glob(".*.producers")
    snapshot.write_bytes(snapshot.read_bytes()[:-1])

    again = open_log(tmp_path / "t" / "0")

    for number in range(19, 24):
        repeated = again.producers.find_duplicate(PRODUCER, 0, number * 2, 2)
        assert repeated is not None
        assert repeated.base_offset == number * 2


def _count_calls(folder: Path) -> int:
    disk = FaultyDisk()
    workload(open_log(folder, disk), [], _UNTIL_POWER_LOSS)
    return len(disk.calls)


@pytest.mark.statement("T2", "C2")
def test_power_loss_before_any_call_loses_nothing_that_was_acknowledged(tmp_path):
    calls = _count_calls(tmp_path / "dry" / "t" / "0")
    assert calls > 30
    for power_until in range(calls):
        for seed in range(3):
            _lose_power(tmp_path / f"{power_until}-{seed}", power_until, seed)


def _lose_power(root: Path, power_until: int, seed: int) -> None:
    disk = FaultyDisk(power_until)
    folder, left = root / "t" / "0", root / "after" / "0"
    acked: list[int] = []
    with pytest.raises(PowerLossError):
        workload(open_log(folder, disk), acked, _UNTIL_POWER_LOSS)
    chance = random.Random(seed)
    choose = (lambda n: n, lambda _: 0, lambda n: chance.randint(0, n))[seed]
    disk.after_power_loss(folder, left, keep=choose, some=lambda: chance.random() < 0.5)

    log = open_log(left)

    found = values(log)
    assert len(found) >= 2 * len(acked)
    assert found == expected(range(len(found) // 2))
    number = len(found) // 2
    assert append(log, number) == number * 2
    flush(log)
    assert values(open_log(left)) == expected(range(number + 1))


@pytest.mark.parametrize("damage", ["cut off", "half written", "garbage", "zeros"])
def test_a_torn_end_is_cut_off_at_the_first_bad_batch_and_kept_aside(tmp_path, damage, caplog):
    folder = tmp_path / "t" / "0"
    log = open_log(folder, segment_bytes=10**6)
    workload(log, [])
    path = folder / f".{0:020d}.open"
    data = bytearray(path.read_bytes())
    size = len(data) // 24
    if damage == "cut off":
        del data[-1:]
    elif damage == "half written":
        data[-size // 2 :] = bytes(size // 2)  # a page that was not written before a power loss
    else:
        data += os.urandom(500) if damage == "garbage" else bytes(500)
    path.write_bytes(data)

    again = open_log(folder, segment_bytes=10**6)

    kept = 24 if damage in ("garbage", "zeros") else 23
    assert values(again) == expected(range(kept))
    assert path.stat().st_size == kept * size
    assert (folder / f".{kept * 2:020d}.cut").read_bytes() == data[kept * size :]
    assert f"the log ends at offset {kept * 2}" in caplog.text
    assert append(again, kept) == kept * 2


def test_a_batch_from_elsewhere_in_the_open_segment_ends_the_log(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    append(log, 0)
    flush(log)
    path = folder / f".{0:020d}.open"
    path.write_bytes(path.read_bytes() * 2)  # right checksums, but offset 0 twice

    assert values(open_log(folder)) == expected(range(1))


def test_a_gap_before_the_open_segment_is_damage_and_nothing_is_touched(tmp_path):
    folder = tmp_path / "t" / "0"
    workload(open_log(folder), [])
    sealed = sorted(folder.glob("*.batches"))
    sealed[-1].unlink()
    before = sorted(path.name for path in folder.iterdir() if path.suffix != ".producers")

    with pytest.raises(DamagedLogError) as raised:
        open_log(folder)

    assert raised.value.facts["offset"] < first_of(Path(str(raised.value.facts["path"])))
    after = sorted(path.name for path in folder.iterdir() if path.suffix != ".producers")
    assert after == before


def test_a_log_may_begin_with_objects_of_an_archive_that_has_gaps(tmp_path):
    folder = tmp_path / "t" / "0"
    folder.mkdir(parents=True)
    first = encode_reference([Record(105, 1, 0, None, b"a", ()), Record(109, 2, 0, None, b"b", ())])
    second = encode_reference([Record(120, 3, 0, None, b"c", ())])
    (folder / f"{100:020d}-{110:020d}.batches").write_bytes(first)
    (folder / f"{111:020d}-{130:020d}.batches").write_bytes(second)

    log = open_log(folder)

    assert (log.log_start, log.high_watermark) == (100, 131)
    assert [record.offset for record in _read_available(log, 100)] == [105, 109]
    assert [record.offset for record in _read_available(log, 110)] == [120]
    assert [record.offset for record in _read_available(log, 121)] == []
    assert append(log, 0) == 131


def _read_available(log: PartitionLog, offset: int) -> list[Record]:
    while True:
        try:
            ranges = log.read(offset, 50, at_least_one=True)
        except ColdSegmentError as cold:
            log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
        else:
            break
    data = b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)
    return decode_reference(data)


@pytest.mark.statement("T1", "T11", "C1", "C9")
@pytest.mark.parametrize("call", ["sync", "sync_folder", "link", "unlink", "write_synced"])
def test_a_failed_flush_fails_waiting_requests_and_takes_the_partition_offline(tmp_path, call):
    disk = FaultyDisk()
    log = open_log(tmp_path / "t" / "0", disk)
    outcomes: list[tuple[int, LogmirrorError | None]] = []
    for number in range(6):  # the first flush makes the folder, the second one seals
        append(log, number)
        log.when_durable(
            log.log_end, lambda failure, number=number: outcomes.append((number, failure))
        )
        if number == 1:
            flush(log)
    job = log.begin_sync()
    assert job is not None
    assert job.seals
    disk.fail = lambda name: OSError(errno.EIO, "bad disk") if name == call else None
    with pytest.raises(OSError, match="bad disk") as raised:
        job.run()
    disk.fail = lambda _: None
    append(log, 6)
    log.when_durable(log.log_end, lambda failure: outcomes.append((6, failure)))

    log.finish_sync(job, raised.value)

    assert [(number, failure is None) for number, failure in outcomes] == [
        (number, number < 2) for number in range(7)
    ]
    assert log.high_watermark == 4
    with pytest.raises(StorageError):
        append(log, 7)
    with pytest.raises(StorageError):
        log.read(0, 100, at_least_one=True)
    assert log.begin_sync() is None
    again = open_log(tmp_path / "t" / "0")
    assert values(again)[:4] == expected(range(2))


@pytest.mark.parametrize("call", ["append", "create"])
def test_a_full_disk_refuses_the_batch_and_nothing_else_happens(tmp_path, call):
    disk = FaultyDisk()
    log = open_log(tmp_path / "t" / "0", disk)
    append(log, 0)
    append(log, 1)
    append(log, 2)
    disk.fail = lambda name: OSError(errno.ENOSPC, "no space") if name == call else None
    end = log.log_end

    for number in range(3, 9):
        with pytest.raises(StorageError, match="no space"):
            append(log, number)
    disk.fail = lambda _: None

    assert append(log, 50) == end
    flush(log)
    assert log.high_watermark == end + 2
    assert values(open_log(tmp_path / "t" / "0")) == values(log)


def test_a_half_written_batch_is_cut_off_again(tmp_path):
    class HalfDisk(Disk):
        half = False

        def append(self, file, data):
            if self.half:
                super().append(file, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "no space")
            super().append(file, data)

    disk = HalfDisk()
    log = open_log(tmp_path / "t" / "0", disk)
    append(log, 0)
    disk.half = True
    with pytest.raises(StorageError):
        append(log, 1)
    disk.half = False

    assert append(log, 1) == 2
    flush(log)
    assert values(log) == expected(range(2))
    assert values(open_log(tmp_path / "t" / "0")) == expected(range(2))


def test_a_half_written_batch_that_cannot_be_cut_off_ends_the_partition(tmp_path):
    disk = FaultyDisk()
    log = open_log(tmp_path / "t" / "0", disk)
    outcomes: list[LogmirrorError | None] = []
    append(log, 0)
    log.when_durable(log.log_end, outcomes.append)
    disk.fail = lambda name: OSError(errno.EIO, "bad disk") if name != "create" else None

    with pytest.raises(StorageError):
        append(log, 1)

    assert isinstance(log.failure, UnavailableError)
    assert outcomes == [log.failure]


def test_only_so_many_segments_are_kept_open(tmp_path):
    disk = Disk()
    cache = SegmentCache(disk, max_loaded=2)
    log = recover(tmp_path / "t" / "0", disk=disk, cache=cache, segment_bytes=SEGMENT_BYTES)
    workload(log, [])

    assert values(log) == expected(range(24))
    segments = [segment for segment, _ in log.readable_segments()]
    assert sum(segment.file is not None for segment in segments) <= 3


@pytest.mark.parametrize("call", ["append", "sync", "create", "truncate"])
def test_an_error_of_the_disk_is_reported_for_its_directory(tmp_path, call):
    disk = FaultyDisk()
    reported: list[tuple[Exception, Path]] = []
    log = open_log(tmp_path / "t" / "0", disk)
    log.when_failed = lambda error, folder: reported.append((error, folder))
    if call != "create":
        append(log, 0)
    failing = {call, "append"} if call == "truncate" else {call}
    disk.fail = lambda name: OSError(errno.EIO, call) if name in failing else None

    if call == "sync":
        job = log.begin_sync()
        assert job is not None
        with pytest.raises(OSError, match="sync") as raised:
            job.run()
        log.finish_sync(job, raised.value)
    else:
        with pytest.raises(StorageError):
            append(log, 1)

    assert {folder for _, folder in reported} == {log.folder}
    assert {error.args for error, _ in reported} == {(errno.EIO, call)}
