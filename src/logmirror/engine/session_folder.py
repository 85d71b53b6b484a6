"""The temporary directory of a Spark session, which the next start removes if it was left behind.

The session holds a lock on a file in it. A process ID would not do: containers may share `/tmp` and
not their process IDs, and then each would remove the live directories of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "logmirror-spark-"
_LOCK: Final = "lock"
_ATTEMPTS_MAX: Final = 10


class SessionFolder:
    """A new private directory. Removes those of sessions that have ended without removing theirs.

    Raises:
        OSError: The directory for temporary files cannot be written.
    """

    def __init__(self) -> None:
        _sweep()
        self.path, self._lock = _new_folder()

    def remove(self) -> None:
        """Delete it with all its content."""
        # Under another name first: Python workers may still be ending, and create files by path.
        gone = self.path.with_name(f"{self.path.name}-gone")
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path.rename(gone), ignore_errors=True)
        os.close(self._lock)


def _new_folder() -> tuple[Path, int]:
    for _ in range(_ATTEMPTS_MAX):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another process has removed the directory before it was locked
    raise FileExistsError(tempfile.gettempdir())


def _sweep() -> None:
    """Remove the directories that no process holds.

    Those without the file are left alone: their owner is about to create it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
