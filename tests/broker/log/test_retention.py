"""Goal: retention deletes what is old or too much, in order, and nothing else.

Method: the rules on logs with known timestamps, compared with a plain model; segments whose index
is not in memory; and a log that seals its open segment by age, deletes everything, and loses power
before each of its system calls in turn.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.fakes.faulty_disk import FaultyDisk, PowerLossError
from kit.runs.small_logs import append_batch, expected, flush, open_log, values
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.retention import Expired, expired, read_age
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from logmirror.broker.log.partition_log import PartitionLog


def _append(log: PartitionLog, number: int, *times_ms: int, **fields: int) -> None:
    times_ms = times_ms or (1000, 1000)
    records = [
        Record(n, time_ms, 0, None, b"%02d-%d" % (number, n), ())
        for n, time_ms in enumerate(times_ms)
    ]
    append_batch(log, encode_reference(records, **fields))


def _segments(folder: Path, *times_ms: int | tuple[int, ...]) -> PartitionLog:
    """Return a log with a sealed segment for each timestamp, and an empty open one."""
    log = open_log(folder, segment_bytes=10**6)
    for number, found in enumerate(times_ms):
        _append(log, number, *(found if isinstance(found, tuple) else (found,)))
        log.roll()
        flush(log)
    return log


def _expired(log: PartitionLog, *, ms: int = -1, size: int = -1, now_ms: int = 10_000) -> Expired:
    return expired(
        log.segments,
        size_bytes=log.size_bytes,
        high_watermark=log.high_watermark,
        retention_ms=ms,
        retention_bytes=size,
        now_ms=now_ms,
    )


def test_age_is_that_of_the_newest_record_and_a_young_segment_protects_those_after_it(tmp_path):
    log = _segments(tmp_path / "t" / "0", 1000, (500, 3000, 100), 2000, 9000)

    assert _expired(log, ms=9001) == (0, None, 1000 + 9001 + 1)
    assert _expired(log, ms=9000) == (0, None, 10_001)  # exactly as old as allowed
    assert _expired(log, ms=8999).deletable == 1
    assert _expired(log, ms=7000) == (1, None, 10_001)
    assert _expired(log, ms=6999).deletable == 3
    assert _expired(log, ms=0).deletable == 4
    assert _expired(log) == (0, None, None)


@settings(max_examples=200)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(-5, 100)), max_size=12),
    limits=st.tuples(st.integers(-1, 110), st.integers(-1, 400)),
    durable=st.integers(0, 14),
)
def test_as_a_plain_model_says(rows, limits, durable):
    retention_ms, retention_bytes = limits
    segments = []
    for number, (size_bytes, age) in enumerate(rows):
        segment = Segment(Path("t"), number, number + 1, size_bytes)
        segment.newest_ms = 1000 - age
        segments.append(segment)

    found = expired(
        segments,
        size_bytes=sum(size_bytes for size_bytes, _ in rows),
        high_watermark=durable,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        now_ms=1000,
    )

    left, deleted = list(rows), 0
    while left and deleted < durable:
        is_old = retention_ms >= 0 and left[0][1] > retention_ms
        is_too_much = retention_bytes >= 0 and sum(size for size, _ in left[1:]) >= retention_bytes
        if not is_old and not is_too_much:
            break
        del left[0]
        deleted += 1
    assert found.deletable == deleted


def test_size_counts_whole_segments_and_the_open_one(tmp_path):
    log = _segments(tmp_path / "t" / "0", 1, 2, 3)
    one = log.segments[0].size_bytes
    assert log.size_bytes == 3 * one

    assert [_expired(log, size=size).deletable for size in (3 * one, 2 * one + 1, 2 * one)] == [
        *(0, 0, 1)
    ]
    _append(log, 3, 4)
    assert _expired(log, size=2 * one).deletable == 2  # its record is not durable, but counts
    assert _expired(log, size=0).deletable == 3
    log.advance_start(2)
    log.take_deleted()
    assert log.size_bytes == 2 * one
    again = open_log(tmp_path / "t" / "0")
    files = [*again.folder.glob("*.batches"), *again.folder.glob(".*.open")]
    assert again.size_bytes == sum(path.stat().st_size for path in files)


def test_after_a_restart_ages_are_read_from_the_files_and_only_if_they_may_be_due(tmp_path):
    folder = tmp_path / "t" / "0"
    _segments(folder, (1000, 5000), 2000)
    disk = Disk()
    cache = SegmentCache(disk)
    log = recover(folder, disk=disk, cache=cache, segment_bytes=10**6)
    first = log.segments[0]

    assert _expired(log, ms=4000) == (0, first, None)
    assert read_age(first, cache, disk, older_than_ms=5000) == 5000
    assert first.newest_ms is None, "the first batch was young enough"
    assert read_age(first, cache, disk, older_than_ms=5001) == 5000
    assert first.newest_ms == 5000
    assert _expired(log, ms=4000) == (1, log.segments[1], None)


def test_records_without_a_timestamp_are_as_old_as_the_last_write(tmp_path):
    folder = tmp_path / "t" / "0"
    _segments(folder, -1)
    [path] = folder.glob("*.batches")
    os.utime(path, (50, 50))
    disk = Disk()
    log = open_log(folder)

    assert _expired(log, ms=100).unread is log.segments[0]
    assert read_age(log.segments[0], SegmentCache(disk), disk, older_than_ms=0) == 50_000


def test_a_flipped_timestamp_does_not_make_a_segment_old(tmp_path):
    folder = tmp_path / "t" / "0"
    _segments(folder, 9_000)
    [path] = folder.glob("*.batches")
    data = bytearray(path.read_bytes())
    data[35:43] = (1).to_bytes(8)
    path.write_bytes(data)
    disk = Disk()
    log = open_log(folder, disk)

    newest_ms = read_age(log.segments[0], SegmentCache(disk), disk, older_than_ms=5_000)

    assert newest_ms == int(path.stat().st_mtime * 1000)


def test_an_open_segment_is_sealed_on_request_and_the_log_continues(tmp_path):
    folder = tmp_path / "t" / "0"
    log = open_log(folder)
    log.roll()
    assert not folder.exists(), "there was nothing to seal"
    _append(log, 0)
    log.roll()
    log.roll()
    flush(log)
    _append(log, 1)
    flush(log)

    assert sorted(path.name for path in folder.glob("*.batches")) == [f"{0:020d}-{1:020d}.batches"]
    assert values(log) == values(open_log(folder)) == expected(range(2))


def _workload(disk: Disk, folder: Path, starts: list[int], acked: list[int]) -> None:
    log = open_log(folder, disk)
    for number in range(12):
        _append(log, number, producer_id=8, producer_epoch=0, base_sequence=number * 2)
        flush(log)
        acked[0] = log.high_watermark
        if number % 4 == 3:
            log.roll()
            flush(log)
            count = _expired(log, ms=0).deletable
            assert count
            starts[0] = log.segments[count - 1].next_offset
            log.advance_start(starts[0])
            for segment in log.take_deleted():
                disk.unlink(segment.path)
            disk.sync_folder(folder)


def test_power_loss_before_any_call_restores_nothing_and_loses_nothing(tmp_path):
    whole = FaultyDisk()
    _workload(whole, tmp_path / "whole" / "0", [0], [0])
    for until in range(len(whole.calls)):
        chance = random.Random(until)
        disk = FaultyDisk(power_until=until)
        folder, left = tmp_path / f"before-{until}" / "0", tmp_path / f"after-{until}" / "0"
        starts, acked = [0], [0]
        with pytest.raises(PowerLossError):
            _workload(disk, folder, starts, acked)
        keep, some = partial(chance.randint, 0), partial(chance.choice, (True, False))
        disk.after_power_loss(folder, left, keep=keep, some=some)

        files = Disk()
        log = recover(
            left,
            disk=files,
            cache=SegmentCache(files),
            segment_bytes=300,
            log_start=starts[0],
        )

        assert log.log_start == starts[0]
        assert log.log_end >= max(acked[0], starts[0])
        assert values(log) == expected(range(24))[log.log_start : log.log_end]
        if log.log_end:
            assert dict(log.producers.items())[8].last_sequence == log.log_end - 1
