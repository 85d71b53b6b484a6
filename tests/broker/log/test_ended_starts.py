"""Goal: a start that ends at any of its steps loses nothing for the next one.

Method: a log that a crash has left with work for a start; the start ends before each of the calls
that change names, and the next one is judged.
"""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING

from kit.fakes.faulty_disk import PowerLossError
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

PRODUCER = 8


def _open(folder: Path, disk: Disk | None = None) -> PartitionLog:
    disk = disk or Disk()
    return recover(folder, disk=disk, cache=SegmentCache(disk), segment_bytes=10_000)


def _append(log: PartitionLog, number: int, **fields: int) -> None:
    records = [Record(n, 1000 + number, 0, None, b"%d" % n, ()) for n in range(2)]
    batch = memoryview(bytearray(encode_reference(records, **fields)))
    log.append(batch, check_batch(batch, max_bytes=10**6))


def _flush(log: PartitionLog) -> None:
    job = log.begin_sync()
    assert job is not None
    job.run()
    log.finish_sync(job, None)


class _Ending(Disk):
    """Ends before one of the calls that change names."""

    def __init__(self, end_at: int) -> None:
        super().__init__()
        self._left = end_at

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            raise PowerLossError

    def write_synced(self, path: Path, parts: Iterable[bytes]) -> None:
        self._count()
        super().write_synced(path, parts)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


def test_no_crash_of_a_start_that_seals_loses_a_producer_whose_records_were_deleted(tmp_path):
    """Only a snapshot has its state: the old one stays until the new one is at a sealed end."""
    folder = tmp_path / "t" / "0"
    log = _open(folder)
    fields = {"producer_id": PRODUCER, "producer_epoch": 0, "base_sequence": 0}
    for number in range(2):
        _append(log, number, **(fields if number == 0 else {}))
        log.roll()
        _flush(log)
    log.advance_start(2)
    for segment in log.take_deleted():
        segment.path.unlink()
    _append(log, 2)
    log.roll()
    _append(log, 3)  # two open segments are left
    for end_at in itertools.count(1):
        left = tmp_path / str(end_at) / "t" / "0"
        shutil.copytree(folder, left)
        try:
            _open(left, _Ending(end_at))
        except PowerLossError:
            again = _open(left)
            assert again.producers.find_duplicate(PRODUCER, 0, 0, 2) is not None, end_at
            assert (again.log_start, again.log_end) == (2, 8), end_at
        else:
            break
    assert end_at > 4
