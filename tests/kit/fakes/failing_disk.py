"""A disk that fails while a broker uses it, also when the tests run as root.

Where mounting is permitted it is an ext4 file system in a file, which the kernel shuts down: every
later call gets EIO, also on files that are open. Elsewhere a file takes the place of the folder:
calls with a path get ENOTDIR, and open files stay usable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""

_WITHOUT_FLUSH: Final = 2
_IMAGE_BYTES: Final = 32 * 1024 * 1024


class FailingDisk:
    """A folder on a disk of its own.

    Attributes:
        folder: The folder.
        is_mounted: Whether the disk is a file system of its own.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._root, self._image = parent / f"{name}-disk", parent / f"{name}.ext4"
        self._root.mkdir()
        self.folder = self._root / name
        self._away = parent / f"{name}-away"
        self.is_mounted = self._make() and self._mount()
        self.folder.mkdir()

    def _make(self) -> bool:
        if shutil.which("mkfs.ext4") is None:
            return False
        with self._image.open("wb") as image:
            image.truncate(_IMAGE_BYTES)
        return _succeeds("mkfs.ext4", "-q", "-F", str(self._image))

    def _mount(self) -> bool:
        return _succeeds("mount", "-o", "loop", str(self._image), str(self._root))

    def fail(self) -> None:
        """Let every later call fail."""
        if not self.is_mounted:
            self.folder.rename(self._away)
            self.folder.touch()
            return
        os.sync()
        folder = os.open(self._root, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(folder)

    def repair(self) -> None:
        """Let it work again, when no process uses it."""
        if not self.is_mounted:
            self.folder.unlink()
            self._away.rename(self.folder)
            return
        self.remove()
        assert self._mount()

    def remove(self) -> None:
        """Unmount it."""
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self._root)], check=True)


def _succeeds(*command: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


@contextlib.contextmanager
def failing_disk(parent: Path, name: str) -> Iterator[FailingDisk]:
    """Yield such a disk, and unmount it afterwards."""
    disk = FailingDisk(parent, name)
    try:
        yield disk
    finally:
        disk.remove()
