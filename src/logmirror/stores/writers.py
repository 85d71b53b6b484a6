"""The writers of a directory: their locks, and the staged objects that dead ones left.

    <root>/.logmirror/staged/<writer>/<label>   objects under construction
    <root>/.logmirror/writers/<writer>          locked (flock) while that writer is alive

A writer of this host is dead if its lock can be taken. A lock may not be visible across hosts, so a
writer of another host must also have changed nothing for `FOREIGN_LEFTOVER_AGE_MS`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError
from logmirror.stores.directory import os_errors
from logmirror.stores.locks import open_lock, try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.clock import Clock
    from logmirror.stores.directory import Directory

_STAGED: Final = re.compile(r".*\.[0-9a-f]{16}")
"""The name of a staged object. Anything else in its folder was put there by others, and is kept."""

FOREIGN_LEFTOVER_AGE_MS: Final = 7 * 24 * 3600 * 1000
"""Staged files of other hosts are kept this long. It equals the time that claims are kept, which is
longer than a process can be paused and still publish."""


class Writers:
    """The writers of one directory.

    Args:
        directory: The directory.
        writer_id: The writer ID of this process: `<host>.` and a suffix.
        clock: Measures the age of leftovers.
    """

    def __init__(self, directory: Directory, writer_id: str, clock: Clock) -> None:
        self._directory, self._writer_id, self._clock = directory, writer_id, clock

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold this writer's lock until the block ends; the system releases it if the process dies.

        Raises:
            UsageError: Another process holds the lock of this writer ID.
        """
        path = self._directory.writer_lock(self._writer_id)
        with os_errors("lock a writer's name", path):
            descriptor = self._directory.in_folder(path.parent, lambda: open_lock(path))
            if not try_lock(descriptor):
                os.close(descriptor)
                raise UsageError("this writer is already running", writer=self._writer_id)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def sweep(self) -> int:
        """Remove the staged objects of dead writers; returns how many."""
        staged = self._directory.staged_root
        count = 0
        with os_errors("sweep leftovers", staged):
            try:
                folders = sorted(staged.iterdir())
            except FileNotFoundError:
                return 0
            for folder in folders:
                is_folder = folder.is_dir() and not folder.is_symlink()
                if is_folder and folder.name != self._writer_id and self._may_sweep(folder):
                    count += self._sweep_writer(folder)
        return count

    def _may_sweep(self, folder: Path) -> bool:
        if folder.name.partition(".")[0] == self._writer_id.partition(".")[0]:
            return True
        try:
            age_ms = self._clock.now_ms() - folder.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return False
        return age_ms > FOREIGN_LEFTOVER_AGE_MS

    def _sweep_writer(self, folder: Path) -> int:
        lock = self._directory.writer_lock(folder.name)
        descriptor = self._directory.in_folder(lock.parent, lambda: open_lock(lock))
        count = 0
        try:
            if not try_lock(descriptor):
                return 0
            # Another process may sweep the same folder: missing files are ignored.
            with contextlib.suppress(FileNotFoundError):
                for path in folder.iterdir():
                    if _STAGED.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                        count += 1
                if not _remove_if_empty(folder):
                    return count
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return count


def _remove_if_empty(folder: Path) -> bool:
    """Remove a folder; False if it is not empty.

    A worker may outlive its driver, or the folder holds files of others.
    """
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
