"""Goal: a start that ends at any of its steps loses nothing for the next one.

Method: a log that a crash has left with work for a start; the start ends before each of the calls
that change names, and the next one is judged.
"""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING

from kit.fakes.faulty_disk import PowerLossError
from kit.runs.small_logs import PRODUCER, append, flush, open_log
from logmirror.broker.log.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
    log = open_log(folder)
    fields = {"producer_id": PRODUCER, "producer_epoch": 0, "base_sequence": 0}
    for number in range(2):
        append(log, number, **(fields if number == 0 else {}))
        log.roll()
        flush(log)
    log.advance_start(2)
    for segment in log.take_deleted():
        segment.path.unlink()
    append(log, 2)
    log.roll()
    append(log, 3)  # two open segments are left
    for end_at in itertools.count(1):
        left = tmp_path / str(end_at) / "t" / "0"
        shutil.copytree(folder, left)
        try:
            open_log(left, _Ending(end_at))
        except PowerLossError:
            again = open_log(left)
            assert again.producers.find_duplicate(PRODUCER, 0, 0, 2) is not None, end_at
            assert (again.log_start, again.log_end) == (2, 8), end_at
        else:
            break
    assert end_at > 4
