"""Disks that tests can fill or make read-only, also when the tests run as root.

A small disk is a tmpfs where mounting is permitted. Elsewhere `os.write` is replaced in every
Python process of the command, by a function that counts the bytes in the folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_QUOTA: Final = '''
"""Loaded by every Python process at its start: a disk of which little is left."""

import errno
import os
import pathlib

_folder = pathlib.Path({folder!r})
_write = os.write


def write(descriptor, data):
    try:
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{{descriptor}}"))
    except OSError:
        return _write(descriptor, data)
    if _folder in path.parents:
        free = int(pathlib.Path({limit!r}).read_text())
        free -= sum(found.stat().st_size for found in _folder.rglob("*") if found.is_file())
        if free <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = memoryview(data).cast("B")[:free]
    return _write(descriptor, data)


os.write = write
'''

_WITHOUT_OVERRIDE: Final = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class SmallDisk:
    """A folder with a limited size.

    Attributes:
        folder: The folder.
        environment: Variables for the processes that write there.
    """

    def __init__(self, parent: Path, size_bytes: int) -> None:
        self.folder = parent / "small-disk"
        self.folder.mkdir()
        self.environment: dict[str, str] = {}
        self._limit = parent / "limit"
        self.is_mounted = _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", self.folder)
        if not self.is_mounted:
            self._limit.write_text(str(size_bytes))
            code = _QUOTA.format(folder=str(self.folder), limit=str(self._limit))
            self.environment = loading(parent, code)

    def grow(self, size_bytes: int) -> None:
        """Increase the limit."""
        if self.is_mounted:
            assert _mount("-o", f"remount,size={size_bytes}", self.folder)
        else:
            self._limit.write_text(str(size_bytes))


def _mount(*arguments: str | Path) -> bool:
    return succeeds("mount", *arguments)


def succeeds(*command: str | Path) -> bool:
    """Run a command that may not exist, or not be permitted; returns whether it succeeded."""
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def loading(folder: Path, code: str) -> dict[str, str]:
    """Return variables with which every Python process loads some code at its start."""
    (folder / "sitecustomize.py").write_text(code)
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(folder), *before])}


@contextlib.contextmanager
def small_disk(parent: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Yield a small disk, and unmount it afterwards."""
    disk = SmallDisk(parent, size_bytes)
    try:
        yield disk
    finally:
        if disk.is_mounted:
            subprocess.run(["umount", "-l", str(disk.folder)], check=True)


def without_override(command: list[str]) -> list[str]:
    """Return the command with file permissions enforced, also when root runs the tests."""
    return [sys.executable, "-c", _WITHOUT_OVERRIDE, *command]
