"""The old folder of a moved partition loses its name durably, also at the second attempt."""

from __future__ import annotations

import errno
import uuid
from typing import TYPE_CHECKING

import pytest

from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import LogDirs
from logmirror.broker.metadata import TopicRow
from logmirror.broker.moves.leftovers import Leftovers
from logmirror.broker.moves.move import free_name
from logmirror.broker.place_rows import MoveRow

if TYPE_CHECKING:
    from pathlib import Path

NONCE = "0" * 32


class Failing(Disk):
    """Fails at some flushes of folders, from the first one on."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.flushed: list[Path] = []
        self.failures = failures

    def sync_folder(self, path: Path) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EIO, "injected", str(path))
        self.flushed.append(path)
        super().sync_folder(path)


@pytest.mark.move("E73", "E76")
def test_a_rename_whose_flush_failed_is_flushed_by_the_next_attempt(tmp_path: Path) -> None:
    disk, old = Failing(1), tmp_path / "t" / "0"
    old.mkdir(parents=True)
    with pytest.raises(OSError, match="injected"):
        free_name(disk, old, NONCE)
    assert not old.exists()
    gone = free_name(disk, old, NONCE)
    assert gone.is_dir()
    assert disk.flushed == [old.parent]


@pytest.mark.move("E73", "E76")
@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_a_start_flushes_the_rename_that_an_earlier_one_has_made(
    tmp_path: Path, is_in_bucket: bool
) -> None:
    disk, row = Failing(0), TopicRow(name="t", topic_id=uuid.uuid4(), partition_count=1, configs={})
    gone = tmp_path / "a" / "t" / f"0.{NONCE}-delete"
    for folder in (gone, tmp_path / "b" / "t" / "0"):
        folder.mkdir(parents=True)
    if is_in_bucket:
        (tmp_path / "b" / "t" / "0").rmdir()
    dirs = LogDirs([tmp_path / "a", tmp_path / "b"], bucket="s3://x", work_dir=tmp_path / "w")
    target = "s3://x" if is_in_bucket else str(tmp_path / "b")
    key = row.topic_id.bytes, 0
    found = Leftovers(dirs, disk, {key: MoveRow(*key, target, NONCE)}, lambda *_: is_in_bucket)
    found.finish(row, 0)
    assert gone.parent in disk.flushed
    assert found.ended == [key]
