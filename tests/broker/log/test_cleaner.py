"""Goal: compaction follows the rules of Kafka, and keeps what stays unchanged.

Method: one test for each rule of `log/cleaner`; records are decoded by a second, plain decoder.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.fakes.faulty_disk import FaultyDisk
from kit.runs.small_logs import append_batch, fetched, flush, open_log
from logmirror.archive.chain import chain
from logmirror.broker.log.cleaner import Cleaning, Plan
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.partition_transactions import Marker
from logmirror.errors import CorruptionError
from logmirror.wire import kernels_keys
from logmirror.wire.batch_header import parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, decode_reference, encode_reference
from logmirror.wire.scan import address_of

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000


def _open(folder: Path, disk: Disk | None = None, log_start: int = 0) -> PartitionLog:
    """Open a log of which this broker wrote everything."""
    return open_log(folder, disk, segment_bytes=10**6, log_start=log_start, durable=log_start)


Pair = tuple[bytes | None, bytes | None]


def _append(
    log: PartitionLog,
    pairs: list[Pair],
    time_ms: int = 1000,
    *,
    transactional: bool = False,
    **fields: int,
) -> int:
    """Append a batch; headers and timestamps of the records differ."""
    records = [
        Record(n, time_ms + n, 0, key, value, ((b"h", b"%d" % n), (b"h", None)))
        for n, (key, value) in enumerate(pairs)
    ]
    return append_batch(log, encode_reference(records, transactional=transactional, **fields))


def _roll(log: PartitionLog) -> None:
    log.roll()
    flush(log)


def _plan(log: PartitionLog, **fields: object) -> Plan:
    sealed = [segment for segment in log.segments if segment.is_sealed]
    held = [known.batches[-1].base_offset for _, known in log.producers.items() if known.batches]
    options: dict[str, object] = {
        "folder": log.folder,
        "segments": sealed,
        "behind": log.readable_segments()[len(sealed) :],
        "dirty_from": log.log_start,
        "held": held,
        "segment_bytes": 10**6,
        "now_ms": NOW_MS,
        "delete_retention_ms": DAY_MS,
    }
    return Plan(**{**options, **fields})


def _clean(log: PartitionLog, disk: Disk | None = None, **fields: object) -> int:
    """Run one pass; returns the offset up to which the log is compacted."""
    cleaning = Cleaning(disk or Disk(), _plan(log, **fields))
    if not cleaning.prepare():
        return cleaning.upto
    for cleaned in cleaning.groups():
        assert log.replace(cleaned.old, cleaned.segment, cleaned.path)
        cleaned.finish(disk or Disk())
    return cleaning.upto


def _bytes(log: PartitionLog, offset: int | None = None) -> bytes:
    offset, found = log.log_start if offset is None else offset, b""
    while offset < log.high_watermark:
        data = fetched(log, offset)
        found += data
        offset = _headers(data)[-1].last_offset + 1
    return found


def _headers(data: bytes) -> list:
    found, position = [], 0
    while position < len(data):
        found.append(parse_header(data, position))
        position += found[-1].size_bytes
    return found


def _read(log: PartitionLog) -> list[Record]:
    return [r for r in decode_reference(_bytes(log)) if r.offset >= log.log_start]


def _check_whole(log: PartitionLog) -> None:
    """Check that the log covers every offset, and that its segments are an archive's chain."""
    headers = _headers(_bytes(log))
    ends = [0, *(header.last_offset + 1 for header in headers)]
    assert [header.base_offset for header in headers] == ends[:-1]
    assert ends[-1] == log.high_watermark
    for segment, _ in log.readable_segments():
        assert segment.damage == ()
    names = [path.name for path in log.folder.glob("*.batches")]
    chain(names, extension="batches", start=None)


def test_the_hash_is_siphash_with_128_bits():
    # The reference implementation's first, second and last vector, key 00 01 .. 0f.
    secret, out = np.frombuffer(bytes(range(16)), np.int64).copy(), np.zeros(2, np.int64)
    expected = {
        0: "a3817f04ba25a8e66df67214c7550293",
        1: "da87c1d86b99af44347659119b22fc45",
        63: "5150d1772f50834a503e069a973fbd7c",
    }
    for size, text in expected.items():
        data = np.frombuffer(bytes(range(max(size, 1))), np.uint8)
        kernels_keys.siphash_at(address_of(data), size, address_of(secret), address_of(out))
        assert out.tobytes().hex() == text


def test_the_newest_record_of_each_key_stays_unchanged(tmp_path):
    log = _open(tmp_path / "t" / "0")
    _append(log, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    _roll(log)
    _append(log, [(b"a", b"2"), (None, b"no key"), (b"d", b"")])
    _append(log, [(b"b", b"3")])
    _roll(log)
    _append(log, [(b"d", b"in the open segment")])
    flush(log)
    before = {record.offset: record for record in _read(log)}

    assert _clean(log) == 7

    assert [record.offset for record in _read(log)] == [2, 3, 4, 5, 6, 7]
    assert all(before[record.offset] == record for record in _read(log))
    _check_whole(log)
    assert sorted(path.name for path in log.folder.glob("*.batches")) == [
        f"{0:020d}-{6:020d}.batches"
    ]
    again = _open(log.folder)
    assert _read(again) == _read(log)
    assert again.log_end == 8


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_stays_what_it_was(tmp_path, codec):
    log = _open(tmp_path / "t" / "0")
    for number in range(3):
        _append(
            log,
            [(b"%d" % n, b"value" * 50) for n in range(number, number + 10)],
            time_ms=-5 if number == 1 else 1000,
            codec=codec,
        )
    _append(log, [(b"1", None), (b"2", b"x")], codec=codec)
    _roll(log)
    before = {record.offset: record for record in _read(log)}

    _clean(log)

    kept = _read(log)
    assert sorted(record.key for record in kept) == sorted(b"%d" % n for n in range(12))
    assert [before[record.offset] for record in kept] == kept
    headers = _headers(_bytes(log))
    assert {header.attributes & 7 for header in headers if header.record_count} == {codec}
    tops = [
        max(r.timestamp_ms for r in kept if h.base_offset <= r.offset <= h.last_offset)
        for h in headers
        if h.record_count
    ]
    assert [h.max_timestamp_ms for h in headers if h.record_count] == tops
    _check_whole(_open(log.folder))


def test_null_values_stay_for_their_time_and_then_go(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for codec in (Codec.NONE, Codec.ZSTD):
        _append(log, [(b"a%d" % codec, b"1"), (b"b%d" % codec, b"1")], codec=codec)
        _append(log, [(b"a%d" % codec, None), (b"c%d" % codec, b"2")], 10**12, codec=codec)
    _roll(log)
    before = {record.offset: record for record in _read(log)}

    _clean(log)
    kept = _read(log)
    assert [record.offset for record in kept] == [1, 2, 3, 5, 6, 7]
    assert [before[record.offset] for record in kept] == kept, "their timestamps too"
    flagged = [h for h in _headers(_bytes(log)) if h.attributes & 64]
    assert [h.base_timestamp_ms for h in flagged] == [NOW_MS + DAY_MS] * 2
    for now_ms in (NOW_MS + 1, NOW_MS + DAY_MS - 1):
        _clean(log, now_ms=now_ms)
        assert _read(log) == kept
    _clean(log, now_ms=NOW_MS + DAY_MS)
    assert [record.offset for record in _read(log)] == [1, 3, 5, 7]
    assert [before[record.offset] for record in _read(log)] == _read(log)
    _check_whole(log)


def test_a_full_map_compacts_in_several_passes(tmp_path):
    log = _open(tmp_path / "t" / "0")
    keys = [b"%d" % (n % 3000) for n in range(8000)]
    for start in range(0, 8000, 100):
        _append(log, [(key, b"%d" % start) for key in keys[start : start + 100]])
    _roll(log)
    _append(log, [(b"0", b"last")])
    _roll(log)

    upto, passes = 0, 0
    while upto < log.high_watermark:
        reached = _clean(log, dirty_from=upto, map_bytes=1)
        assert reached > upto
        upto, passes = reached, passes + 1

    assert passes > 3
    newest = {key: offset for offset, key in enumerate([*keys, b"0"])}
    assert [record.offset for record in _read(log)] == sorted(newest.values())
    _check_whole(log)


def test_producers_continue_after_compaction_and_restart_also_without_their_snapshot(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for number in range(4):
        for producer in (7, 8):
            writer = {"producer_id": producer, "producer_epoch": 1, "base_sequence": number * 2}
            _append(log, [(b"k", b"%d" % number), (b"l", b"x")], **writer)
    _append(log, [(b"k", b"newest"), (b"l", b"newest")])
    _roll(log)

    _clean(log)

    assert [record.offset for record in _read(log)] == [16, 17]
    empty = [h for h in _headers(_bytes(log)) if not h.record_count]
    assert [(h.producer_id, h.base_sequence) for h in empty] == [(-1, -1), (7, 6), (8, 6)]
    for is_lost in (False, True):
        again = _open(log.folder)
        for producer in (7, 8):
            known = again.producers.find_duplicate(producer, 1, 6, 2)
            assert known is not None
            assert known.base_offset == (12 if producer == 7 else 14)
            assert again.producers.find_duplicate(producer, 1, 8, 1) is None
            earlier = again.producers._producers[producer].batches  # noqa: SLF001  # how many are left
            assert len(earlier) == (1 if is_lost else 4)
        [snapshot] = log.folder.glob(".*.producers")
        snapshot.write_bytes(b"lost")
    _clean(log)
    assert [h.producer_id for h in _headers(_bytes(log)) if not h.record_count] == [-1, 7, 8]


def _mark(log: PartitionLog, producer: int, *, commit: bool) -> None:
    log.append_marker(Marker(producer, 0, commit, 0), 1000)


def _append_transactional(log: PartitionLog, producer: int, key: bytes, value: bytes) -> None:
    fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
    _append(log, [(key, value)], transactional=True, **fields)


def test_aborted_records_go_and_hide_nothing_and_markers_stay(tmp_path):
    log = _open(tmp_path / "t" / "0")
    _append(log, [(b"a", b"kept")])
    _append_transactional(log, 7, b"a", b"aborted")
    _append_transactional(log, 8, b"b", b"committed")
    _mark(log, 7, commit=False)
    _roll(log)
    _append_transactional(log, 7, b"c", b"committed")
    _append_transactional(log, 9, b"a", b"aborted later")
    _roll(log)
    _mark(log, 8, commit=True)
    _mark(log, 7, commit=True)
    _mark(log, 9, commit=False)
    flush(log)

    assert _clean(log) == 6

    headers = [h for h in _headers(_bytes(log)) if h.record_count]
    assert [h.base_offset for h in headers] == [0, 2, 3, 4, 6, 7, 8]
    assert [h.base_offset for h in headers if h.is_control] == [3, 6, 7, 8]
    _check_whole(log)


def test_nothing_of_an_undecided_transaction_or_behind_it_is_touched(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for number in range(6):
        if number == 3:
            _append_transactional(log, 7, b"k", b"undecided")
        _append(log, [(b"k", b"%d" % number)])
    _roll(log)

    assert _clean(log) == 3
    assert [record.offset for record in _read(log)] == [2, 3, 4, 5, 6]
    _mark(log, 7, commit=False)
    _roll(log)
    assert _clean(log, dirty_from=3) == 8
    assert [record.value for record in _read(log) if record.key == b"k"] == [b"5"]
    _check_whole(log)


@pytest.mark.parametrize("damage", ["bit", "missing batch"])
def test_a_damaged_segment_is_never_compacted(tmp_path, damage):
    log = _open(tmp_path / "t" / "0")
    for number in range(3):
        _append(log, [(b"k", b"%d" % number)])
    _roll(log)
    [path] = log.folder.glob("*.batches")
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
    else:
        del data[len(data) // 3 : 2 * len(data) // 3]
    path.write_bytes(data)
    log = _open(log.folder)

    with pytest.raises(CorruptionError):
        _clean(log)
    assert path.read_bytes() == data


@pytest.mark.parametrize("call", ["append", "sync"])
def test_a_pass_without_space_leaves_no_file(tmp_path, call):
    """What it has written would keep the disk full."""
    log = _open(tmp_path / "t" / "0")
    for number in range(3):
        _append(log, [(b"k", b"%d" % number)])
    _roll(log)
    before, disk = sorted(log.folder.iterdir()), FaultyDisk()
    disk.fail = lambda name: OSError(errno.ENOSPC, "no space") if name == call else None

    with pytest.raises(OSError, match="no space"):
        _clean(log, disk)
    assert call in disk.calls
    assert sorted(log.folder.iterdir()) == before


def test_a_batch_that_vanishes_from_a_compacted_segment_is_damage(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for number in range(30):
        _append(log, [(b"%d" % (number % 7), b"%d" % number)])
    _roll(log)
    _clean(log)
    [path] = log.folder.glob("*.batches")
    data = path.read_bytes()
    sizes = [header.size_bytes for header in _headers(data)]
    for number in range(len(sizes)):
        start = sum(sizes[:number])
        path.write_bytes(data[:start] + data[start + sizes[number] :])
        again = _open(log.folder)
        segment = again.segments[0]
        again._cache.loaded(segment)  # noqa: SLF001  # what the fetch handler does
        assert segment.damage, number


def test_segments_that_were_deleted_meanwhile_are_not_replaced(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for number in range(3):
        _append(log, [(b"k", b"%d" % number)])
        _roll(log)
    cleaning = Cleaning(Disk(), _plan(log))
    assert cleaning.prepare()
    groups = cleaning.groups()
    cleaned = next(groups)
    log.advance_start(1)
    log.take_deleted()

    assert not log.replace(cleaned.old, cleaned.segment, cleaned.path)
    assert [segment.first for segment in log.segments] == [1, 2, 3]


def test_a_reader_of_a_replaced_segment_finishes_and_others_get_the_new_one(tmp_path):
    log = _open(tmp_path / "t" / "0")
    for number in range(3):
        _append(log, [(b"k", b"%d" % number)])
    _roll(log)
    [found] = log.read(0, 10**6, at_least_one=True)
    old = log.segments[0]

    _clean(log)

    data = os.pread(found.file.fd, found.size_bytes, found.position)
    assert [record.offset for record in decode_reference(data)] == [0, 1, 2]
    assert old.is_deleted
    with pytest.raises(FileNotFoundError):
        log._cache.loaded(old)  # noqa: SLF001  # a fetch that waited for it
    assert [record.offset for record in _read(log)] == [2]


def test_a_segment_that_is_sealed_with_more_records_during_a_pass_is_not_damaged(tmp_path):
    log = _open(tmp_path / "t" / "0")
    writer = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    _append(log, [(b"a", b"1"), (b"a", b"2")], transactional=True, **writer)
    _roll(log)
    _append(log, [(b"b", b"3")])
    flush(log)
    plan = _plan(log)
    _append(log, [(b"b", b"4")])
    _roll(log)

    cleaning = Cleaning(Disk(), plan)

    assert not cleaning.prepare()  # the transaction is not decided in what was readable
    assert cleaning.upto == 0
