"""The old folder of a moved partition loses its name durably, also at the second attempt."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from logmirror.broker.log.disk import Disk
from logmirror.broker.moves.move import free_name

if TYPE_CHECKING:
    from pathlib import Path

NONCE = "0" * 32


class Failing(Disk):
    """Fails at the first flush of a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[Path] = []
        self.tries = 0

    def sync_folder(self, path: Path) -> None:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EIO, "injected", str(path))
        self.flushed.append(path)
        super().sync_folder(path)


@pytest.mark.move("E73", "E76")
def test_a_rename_whose_flush_failed_is_flushed_by_the_next_attempt(tmp_path: Path) -> None:
    disk, old = Failing(), tmp_path / "t" / "0"
    old.mkdir(parents=True)
    with pytest.raises(OSError, match="injected"):
        free_name(disk, old, NONCE)
    assert not old.exists()
    gone = free_name(disk, old, NONCE)
    assert gone.is_dir()
    assert disk.flushed == [old.parent]
