"""A disk that fails while a broker uses it, also when the tests run as root.

Where mounting is permitted it is an ext4 file system in a file, which the kernel shuts down: every
later call gets EIO, also on files that are open. Elsewhere a file takes the place of the folder, so
calls with a path get ENOTDIR; and `os.pread` is replaced in every Python process that has the
variables of `environment`, by a function that gets EIO for files which were in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from typing import TYPE_CHECKING, Final

from kit.fakes.disk import loading, succeeds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""

_WITHOUT_FLUSH: Final = 2
_IMAGE_BYTES: Final = 32 * 1024 * 1024
_UNREADABLE: Final = '''
"""Loaded by every Python process at its start: open files of a folder fail with it."""

import errno
import os
import pathlib

_away = pathlib.Path({away!r})
_pread = os.pread


def pread(descriptor, *rest):
    if _away in pathlib.Path(os.readlink(f"/proc/self/fd/{{descriptor}}")).parents:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return _pread(descriptor, *rest)


os.pread = pread
'''


class FailingDisk:
    """A folder on a disk of its own.

    Attributes:
        folder: The folder.
        is_mounted: Whether the disk is a file system of its own.
        environment: Variables for the processes that use it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._root, self._image = parent / f"{name}-disk", parent / f"{name}.ext4"
        self._root.mkdir()
        self.folder = self._root / name
        self._away = parent / f"{name}-away"
        self.is_mounted = self._make() and self._mount()
        self.environment: dict[str, str] = {}
        if not self.is_mounted:
            self.environment = loading(parent, _UNREADABLE.format(away=str(self._away)))
        self.folder.mkdir()

    def _make(self) -> bool:
        if shutil.which("mkfs.ext4") is None:
            return False
        with self._image.open("wb") as image:
            image.truncate(_IMAGE_BYTES)
        return succeeds("mkfs.ext4", "-q", "-F", str(self._image))

    def _mount(self) -> bool:
        return succeeds("mount", "-o", "loop", str(self._image), str(self._root))

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


@contextlib.contextmanager
def failing_disk(parent: Path, name: str) -> Iterator[FailingDisk]:
    """Yield such a disk, and unmount it afterwards."""
    disk = FailingDisk(parent, name)
    try:
        yield disk
    finally:
        disk.remove()
