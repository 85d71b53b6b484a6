"""Goal: what a start reads and keeps does not depend on how many sealed segments a log has.

Method: logs of few and of many segments are opened, after a clean stop and after a crash. An audit
hook of the interpreter notes every file that is opened meanwhile.
"""

from __future__ import annotations

import sys
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.fakes.faulty_disk import FaultyDisk
from kit.runs.small_logs import append_batch, flush, open_log
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog

FEW, MANY = 4, 80
SEGMENT_BYTES = 1000
"""Less than two batches, so that each batch fills a segment."""

MAX_SEGMENT_BYTES = 400
"""What a sealed segment may take in memory after a start: a few numbers, no path, no index."""

_opened: list[list[str]] = []
"""The files that were opened since each recording began."""


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _opened and event == "open":
        _opened[-1].append(Path(str(arguments[0])).name)


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_note)  # stays until the process ends, hence once


@contextmanager
def _recorded() -> Iterator[list[str]]:
    _opened.append([])
    try:
        yield _opened[-1]
    finally:
        _opened.clear()


class _NoSync(Disk):
    """A disk that writes without flushing, so that many segments are written quickly."""

    def sync(self, file: OpenFile) -> None:
        """Do nothing."""

    def sync_folder(self, path: Path) -> None:
        """Do nothing."""


def _open(folder: Path, durable: int, disk: Disk | None = None) -> PartitionLog:
    return open_log(folder, disk, segment_bytes=SEGMENT_BYTES, durable=durable)


def _append(log: PartitionLog) -> None:
    record = Record(0, 1000, 0, None, b"v" * SEGMENT_BYTES, ())
    producer = {"producer_id": 8, "producer_epoch": 0, "base_sequence": log.log_end}
    append_batch(log, encode_reference([record], **producer))


def _written(folder: Path, sealed: int) -> None:
    """Write that many sealed segments, and an open one with one record."""
    log = _open(folder, 0, _NoSync())
    for _ in range(sealed + 1):
        _append(log)
        flush(log)
    assert len(list(folder.glob("*.batches"))) == sealed


def _opened_at_start(folder: Path, sealed: int, *, is_clean: bool) -> list[str]:
    _written(folder, sealed)
    with _recorded() as names:
        log = _open(folder, sealed + 1 if is_clean else sealed)
    assert (log.log_start, log.log_end) == (0, sealed + 1)
    return names


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_start_opens_no_sealed_segment_and_as_many_files_for_any_number_of_them(
    tmp_path, is_clean
):
    few = _opened_at_start(tmp_path / "t" / "0", FEW, is_clean=is_clean)
    many = _opened_at_start(tmp_path / "t" / "1", MANY, is_clean=is_clean)

    assert not [name for name in many if name.endswith(".batches")]
    assert f".{MANY:020d}.open" in many
    assert len(many) == len(few)


def test_the_first_and_the_last_record_need_one_segment_each(tmp_path):
    folder = tmp_path / "t" / "0"
    _written(folder, MANY)
    disk = Disk()
    cache, end = SegmentCache(disk), DurableEnd(MANY + 1, 0)
    log = recover(folder, disk=disk, cache=cache, segment_bytes=SEGMENT_BYTES, durable=end)

    with _recorded() as names:
        assert log.read(MANY, 10_000, at_least_one=True)
        with pytest.raises(ColdSegmentError) as cold:
            log.read(0, 10_000, at_least_one=True)
        cache.loaded(cold.value.segment)
        assert log.read(0, 10_000, at_least_one=True)

    assert names == [f"{0:020d}-{0:020d}.batches"]


def test_a_sealed_segment_takes_little_memory(tmp_path):
    _written(tmp_path / "t" / "0", FEW)
    _written(tmp_path / "t" / "1", MANY)
    _open(tmp_path / "t" / "0", FEW + 1)  # what is loaded once
    tracemalloc.start()
    try:
        few = _open(tmp_path / "t" / "0", FEW + 1)
        of_few, _ = tracemalloc.get_traced_memory()
        many = _open(tmp_path / "t" / "1", MANY + 1)
        of_both, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (len(few.segments), len(many.segments)) == (FEW + 1, MANY + 1)
    assert of_both - 2 * of_few < (MANY - FEW) * MAX_SEGMENT_BYTES


def test_a_flush_that_seals_several_segments_leaves_one_producer_snapshot(tmp_path):
    folder = tmp_path / "t" / "0"
    log = _open(folder, 0)
    for _ in range(5):
        _append(log)
    flush(log)

    assert len(list(folder.glob("*.batches"))) == 4
    assert [path.name for path in folder.glob(".*.producers")] == [f".{4:020d}.producers"]


def _flushes(folder: Path, durable: int, synced: set[Path]) -> list[str]:
    disk = FaultyDisk()
    cache, end = SegmentCache(disk), DurableEnd(durable, 0)
    size = SEGMENT_BYTES
    recover(folder, disk=disk, cache=cache, segment_bytes=size, durable=end, synced=synced)
    return disk.calls


def test_a_start_flushes_what_is_in_doubt_and_the_folders_above_partitions_once(tmp_path):
    for number in range(3):
        _written(tmp_path / "t" / str(number), FEW)
    synced: set[Path] = set()
    snapshot, own = "rewrite", "sync_folder"

    whole = _flushes(tmp_path / "t" / "0", FEW + 1, synced)
    assert whole == [snapshot, own, "sync_folder", "sync_folder"]
    assert synced == {tmp_path / "t", tmp_path}
    assert _flushes(tmp_path / "t" / "1", FEW + 1, synced) == [snapshot, own]
    assert _flushes(tmp_path / "t" / "2", FEW, synced) == [snapshot, "rewrite", own]
