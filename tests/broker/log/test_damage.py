"""Goal: damage in a log is recognised, named and never served, and no offset is used twice.

Method: logs are written and flushed, then bits are flipped in their files, or files are cut. The
durable end is given to recovery as the broker's database would.
"""

from __future__ import annotations

import errno
import functools
import os
import random
from typing import TYPE_CHECKING

import pytest

from kit.fakes.faulty_disk import FaultyDisk, PowerLossError
from kit.runs.commands import wait_until
from kit.runs.small_logs import (
    SEGMENT_BYTES,
    append,
    batch_of,
    expected,
    flush,
    open_log,
    read,
    values,
    workload,
)
from logmirror.broker.log.batch_scan import find_intact
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.open_segments import DamagedLogError
from logmirror.broker.log.reading import ColdSegmentError, StorageError
from logmirror.broker.log.recovery import KEPT_CUTS, recover
from logmirror.broker.log.segment import DamagedRecordsError, Segment
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.log.segment_check import load
from logmirror.errors import CorruptionError
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

BIG = 10**6
_open = functools.partial(open_log, segment_bytes=BIG)


def _tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _written(folder: Path, segment_bytes: int = BIG) -> PartitionLog:
    log = _open(folder, segment_bytes=segment_bytes)
    workload(log, [])
    return log


@pytest.mark.parametrize("number", [0, 2, 12, 22])
def test_a_flipped_bit_with_intact_batches_behind_it_is_damage_also_after_a_crash(
    tmp_path, number, caplog
):
    folder = tmp_path / "orders" / "3"
    _written(folder)
    path = folder / f".{0:020d}.open"
    size = path.stat().st_size // 24
    _flip(path, 8 * (number * size + size // 2))
    before = _tree(folder)

    for _ in range(2):
        with pytest.raises(DamagedLogError) as raised:
            _open(folder)
        assert _tree(folder) == before
    facts = raised.value.facts
    assert facts["path"] == str(path)
    assert (facts["position"], facts["offset"]) == (number * size, number * 2)
    assert "--accept-data-loss orders-3" in raised.value.hint


def test_after_a_clean_stop_any_flipped_bit_of_the_open_segment_is_damage(tmp_path):
    folder = tmp_path / "t" / "0"
    log = _open(folder)
    for number in range(2):
        append(log, number)
    flush(log)
    path = folder / f".{0:020d}.open"
    whole = path.read_bytes()

    for bit in _bits(whole):
        _flip(path, bit)
        before = path.read_bytes()
        with pytest.raises(DamagedLogError):
            _open(folder, durable=4)
        assert path.read_bytes() == before
        path.write_bytes(whole)
    assert values(_open(folder, durable=4)) == expected(range(2))


@pytest.mark.parametrize("left", ["half", "whole batches", "nothing", "no file", "no folder"])
def test_missing_acknowledged_bytes_are_damage(tmp_path, left):
    folder = tmp_path / "t" / "0"
    _written(folder)
    path = folder / f".{0:020d}.open"
    data = path.read_bytes()
    if left == "no folder":
        path.unlink()
        folder.rmdir()
    elif left == "no file":
        path.unlink()
    else:
        kept = {"half": len(data) - 5, "whole batches": len(data) // 24 * 20, "nothing": 0}[left]
        path.write_bytes(data[:kept])

    with pytest.raises(DamagedLogError) as raised:
        _open(folder, durable=48)

    assert raised.value.facts["durable_end"] == 48
    log = _open(folder, durable=48, accept_loss=True)
    kept_batches = {"half": 23, "whole batches": 20}.get(left, 0)
    assert _values_up_to_damage(log) == expected(range(kept_batches))
    assert append(log, 99) > 48


def _values_up_to_damage(log: PartitionLog) -> list[bytes | None]:
    found: list[bytes | None] = []
    while True:
        try:
            records = _read_some(log, len(found))
        except DamagedRecordsError:
            return found
        assert records, "the damage was passed over"
        found += [record.value for record in records]


def _read_some(log: PartitionLog, offset: int) -> list[Record]:
    while True:
        try:
            ranges = log.read(offset, 1000, at_least_one=True)
        except ColdSegmentError as cold:
            log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
            continue
        data = b"".join(os.pread(r.file.fd, r.size_bytes, r.position) for r in ranges)
        return [record for record in decode_reference(data) if record.offset >= offset]


def test_a_restored_file_brings_the_partition_back(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder)
    path = folder / f".{0:020d}.open"
    backup = path.read_bytes()
    _flip(path, 8 * 900)
    with pytest.raises(DamagedLogError):
        _open(folder, durable=48)

    path.write_bytes(backup)

    log = _open(folder, durable=48)
    assert values(log) == expected(range(24))
    assert append(log, 24) == 48


@pytest.mark.parametrize("durable", [None, 48])
def test_accepted_damage_is_refused_and_the_rest_is_served_at_its_offsets(tmp_path, durable):
    folder = tmp_path / "t" / "0"
    _written(folder)
    path = folder / f".{0:020d}.open"
    whole = path.read_bytes()
    size = len(whole) // 24
    _flip(path, 8 * (10 * size + 70))
    damaged = path.read_bytes()

    log = _open(folder, durable=durable, accept_loss=True)

    assert _values_up_to_damage(log) == expected(range(10))
    with pytest.raises(DamagedRecordsError) as raised:
        log.read(21, 1000, at_least_one=True)
    assert raised.value.facts["next_offset"] == 22
    values = [record.value for record in read(log, 22)]
    assert values == expected(range(11, 24))
    end = log.log_end
    assert end == 48  # all that follows the damage is intact
    assert append(log, 99) == end
    flush(log)
    assert [path.read_bytes() for path in folder.glob("*.batches")] == [damaged]  # every byte kept
    again = _open(folder, durable=end + 2)  # without the option
    assert [record.value for record in _read_some(again, end)] == expected(range(99, 100))
    with pytest.raises(DamagedRecordsError):
        _read_some(again, 20)


def test_accepted_damage_at_the_end_never_gives_its_offsets_out_again(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder)
    path = folder / f".{0:020d}.open"
    size = path.stat().st_size // 24
    _flip(path, 8 * (5 * size + 70))  # recognised by the batches behind it
    path.write_bytes(path.read_bytes()[: -size - 1])  # what was acknowledged here is unknown

    log = _open(folder, durable=4, accept_loss=True)

    assert log.log_end > 48 + 2
    assert append(log, 99) == log.log_end - 2


def _bits(data: bytes) -> list[int]:
    """Every bit of the first header, and some of the rest."""
    return [*range(8 * 61), *range(8 * 61, 8 * len(data), 13)]


def test_every_flipped_bit_of_a_sealed_segment_is_found(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)
    path = sorted(folder.glob("*.batches"))[1]
    whole = path.read_bytes()
    first, last = int(path.name[:20]), int(path.name[21:41])

    for bit in _bits(whole):
        _flip(path, bit)
        segment = Segment(folder, first, last + 1, len(whole))
        load(segment, Disk().open_for_reading(path))
        assert len(segment.damage) == 1, f"bit {bit}"
        position = segment.damage[0].position
        assert position <= bit // 8 < segment.damage[0].end, f"bit {bit}"
        path.write_bytes(whole)


def test_sealed_segments_with_one_flipped_bit_are_never_served_wrong(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)
    path = sorted(folder.glob("*.batches"))[1]
    whole = path.read_bytes()
    first, last = int(path.name[:20]), int(path.name[21:41])

    for bit in range(0, 8 * len(whole), 61):
        _flip(path, bit)
        log = _open(folder, durable=48)
        found = {}
        for offset in range(first, last + 1):
            try:
                found[offset] = _read_some(log, offset)[0].value
            except DamagedRecordsError:
                continue
        assert len(found) < last + 1 - first, f"bit {bit} was not noticed"
        assert all(found[o] == b"%02d-%d" % (o // 2, o % 2) for o in found), f"bit {bit}"
        assert [r.value for r in read(log, last + 1)] == expected(range((last + 1) // 2, 24))
        path.write_bytes(whole)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_sealed_segment_cut_at_a_batch_is_damage_at_its_end(tmp_path, kept):
    folder = tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)
    path = min(folder.glob("*.batches"))
    data = path.read_bytes()
    batches = (int(path.name[21:41]) + 1) // 2
    path.write_bytes(data[: len(data) // batches * kept])

    log = _open(folder, durable=48)

    assert _values_up_to_damage(log) == expected(range(kept))


def test_a_check_is_made_once_and_reported_once(tmp_path, caplog):
    folder = tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)
    path = min(folder.glob("*.batches"))
    _flip(path, 8 * 70)
    disk = Disk()
    cache = SegmentCache(disk, max_loaded=1)
    log = recover(folder, disk=disk, cache=cache, segment_bytes=SEGMENT_BYTES)

    for _ in range(3):
        with pytest.raises(DamagedRecordsError):
            _read_some(log, 0)
        assert _read_some(log, 47)
        cache.loaded(log.readable_segments()[1][0])  # evicts the first one

    assert caplog.text.count("are not served") == 1


def test_segments_of_a_directory_are_checked_ahead_of_a_sequential_consumer(tmp_path):
    disk, folder = Disk(), tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)
    cache = SegmentCache(disk, ahead=2)
    log = recover(folder, disk=disk, cache=cache, segment_bytes=SEGMENT_BYTES)

    assert _read_some(log, 0)
    wait_until(lambda: all(one.file for one in log.segments[:3]), what=lambda: "the third")
    assert [one.is_checked for one in log.segments[:4]] == [True, True, True, False]


@pytest.mark.parametrize("is_seen_by_all", [True, False])
def test_a_file_that_shrinks_while_it_is_scanned_ends_the_scan(
    tmp_path, monkeypatch, is_seen_by_all
):
    folder = tmp_path / "t" / "0"
    _written(folder)
    whole, whole_into, header = os.pread, os.preadv, 70  # and not its batch
    if is_seen_by_all:
        monkeypatch.setattr(os, "pread", lambda fd, size, at: whole(fd, min(size, header), at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: whole_into(fd, [into[0][:header]], at))

    with pytest.raises(DamagedLogError):
        _open(folder, durable=48)


@pytest.mark.parametrize("durable", [True, False])
def test_a_name_that_was_not_durable_ends_the_log_before_it(tmp_path, durable):
    """Of two new names in a folder, a power loss may leave the second one only."""
    folder = tmp_path / "t" / "0"
    log = _open(folder)
    append(log, 0)
    log.roll()
    flush(log)
    end = log.log_end
    append(log, 1)
    log.roll()
    append(log, 2)
    middle, last = sorted(folder.glob(".*.open"))
    middle.unlink()

    if not durable:
        with pytest.raises(DamagedLogError, match="damaged or missing") as found:
            _open(folder)
        assert found.value.facts["offset"] == end
    again = _open(folder, durable=end) if durable else _open(folder, accept_loss=True)

    assert again.log_end == end
    for number in range(1, 9):
        append(again, number)
        again.roll()
    flush(again)
    assert [path.name for path in folder.glob("*.cut")] == [last.name.replace("open", "cut")]


def test_torn_bytes_are_kept_aside_and_only_the_newest(tmp_path):
    folder = tmp_path / "t" / "0"
    for number in range(KEPT_CUTS + 2):
        log = _open(folder)
        append(log, number)
        flush(log)
        with (folder / f".{0:020d}.open").open("ab") as file:
            file.write(b"torn %d" % number)
    _open(folder)

    cuts = {path.name: path.read_bytes() for path in folder.glob(".*.cut")}
    assert cuts == {
        f".{2 * number + 2:020d}.cut": b"torn %d" % number for number in range(2, KEPT_CUTS + 2)
    }


def test_a_search_through_bytes_that_all_look_like_batches_ends(tmp_path):
    header = bytearray(encode_reference([Record(9, 0, 0, None, b"", ())])[:61])
    header[8:12] = (4_000_000).to_bytes(4, "big")
    path = tmp_path / "file"
    path.write_bytes(bytes(header) * 100_000)

    with pytest.raises(CorruptionError):
        find_intact(Disk().open_for_reading(path), 1, path.stat().st_size, above=0, epoch=None)


def test_a_segment_of_an_older_version_is_opened_and_served(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder, SEGMENT_BYTES)

    log = _open(folder, segment_bytes=SEGMENT_BYTES)  # no durable end is recorded

    assert values(log) == expected(range(24))
    assert log.durable_end() == DurableEnd(48, log.readable_segments()[-1][0].first)


@pytest.mark.parametrize("keeps", [False, True])
def test_records_acknowledged_after_a_failed_flush_and_a_restart_survive_a_power_loss(
    tmp_path, keeps
):
    flushes = _flushes(tmp_path / "dry" / "0")
    for failing in range(flushes):
        root = tmp_path / f"{failing}"
        folder, left = root / "t" / "0", root / "after" / "0"
        disk = FaultyDisk()
        log = _open(folder, disk, segment_bytes=SEGMENT_BYTES)
        acked = _until_failure(log, disk, failing)
        recorded = log.high_watermark

        again = _open(folder, disk, segment_bytes=SEGMENT_BYTES, durable=recorded)
        end = again.log_end
        for number in range(end // 2, end // 2 + 4):
            append(again, number)
        flush(again)  # acknowledges them
        chance = random.Random(failing)
        disk.after_power_loss(folder, left, keep=lambda n: n if keeps else 0, some=_some(chance))

        after = _open(left, segment_bytes=SEGMENT_BYTES, durable=recorded)
        assert after.log_end >= acked
        assert values(after) == expected(range(end // 2 + 4))


def _some(chance: random.Random) -> Callable[[], bool]:
    return lambda: chance.random() < 0.5


def _flushes(folder: Path) -> int:
    disk = FaultyDisk()
    _until_failure(_open(folder, disk, segment_bytes=SEGMENT_BYTES), disk, 10**6)
    return disk.calls.count("sync")


def _until_failure(log: PartitionLog, disk: FaultyDisk, failing: int) -> int:
    """Append and flush until the given sync fails; returns the acknowledged end."""

    def fail(call: str) -> OSError | None:
        if call == "sync" and disk.calls.count("sync") > failing:
            return OSError(errno.EIO, "bad disk")
        return None

    disk.fail = fail
    for number in range(12):
        append(log, number)
        job = log.begin_sync() if number % 2 else None
        if job is not None:
            try:
                job.run()
            except OSError as error:
                log.finish_sync(job, error)
                break
            log.finish_sync(job, None)
    disk.fail = lambda _: None
    return log.high_watermark


def test_power_loss_during_recovery_loses_nothing(tmp_path):
    for until in range(40):
        folder, left = tmp_path / f"{until}" / "0", tmp_path / f"{until}-after" / "0"
        disk = FaultyDisk()
        log = _open(folder, disk, segment_bytes=SEGMENT_BYTES)
        for number in range(9):
            append(log, number)
            if number == 4:
                flush(log)
        path = max(folder.glob(".*.open"))
        with path.open("ab") as file:
            file.write(b"torn")
        disk._power_until = len(disk.calls) + until  # noqa: SLF001  # a power loss in recovery
        try:
            _open(folder, disk, segment_bytes=SEGMENT_BYTES, durable=10)
        except PowerLossError:
            pass
        else:
            break
        chance = random.Random(until)
        disk.after_power_loss(
            folder, left, keep=functools.partial(chance.randint, 0), some=_some(chance)
        )
        after = _open(left, segment_bytes=SEGMENT_BYTES, durable=10)
        found = values(after)
        assert len(found) >= 10
        assert found == expected(range(len(found) // 2))
    else:
        pytest.fail("recovery never ended")


def test_at_the_limit_of_files_a_batch_is_refused_and_the_partition_stays_online(tmp_path):
    log = recover(
        tmp_path / "t" / "0",
        disk=Disk(max_files=0),
        cache=SegmentCache(Disk()),
        segment_bytes=BIG,
    )

    with pytest.raises(StorageError, match="Too many open files"):
        append(log, 0)

    assert log.failure is None
    assert batch_of(0)
