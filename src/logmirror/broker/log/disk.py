"""The system calls of a log, in one class so that a test can make any of them fail.

Every call raises `OSError` as the system does; `partition_log` decides what a failure means.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_REWRITE_BYTES: Final = 4 * 1024 * 1024


def _flush(file: OpenFile) -> None:
    """Make a file's bytes and its size durable.

    macOS has no `fdatasync`, and its `fsync` leaves bytes in the drive's cache.
    """
    if sys.platform == "darwin":
        fcntl.fcntl(file.fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(file.fd)


class OpenFile:
    """A file descriptor that closes with its last reference.

    A response in progress keeps a segment readable after the segment was deleted or evicted from
    the cache of open files.
    """

    __slots__ = ("__weakref__", "fd")
    _open: ClassVar[set[int]] = set()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._open.add(fd)

    def __del__(self) -> None:
        self._open.discard(self.fd)
        os.close(self.fd)

    @classmethod
    def count(cls) -> int:
        """Return the number of such descriptors in this process."""
        return len(cls._open)


class Disk:
    """The real disk.

    Args:
        max_files: Limit for `OpenFile.count`. At the limit no open segment is created or opened, so
            that connections and flushes still get descriptors. None: the system's limit only.
    """

    def __init__(self, *, max_files: int | None = None) -> None:
        self.max_files = max_files

    def _check_room(self, path: Path) -> None:
        if self.max_files is not None and OpenFile.count() >= self.max_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    def make_folder(self, path: Path) -> None:
        """Create a partition's folder and that of its topic; no error if they exist.

        The log directory is not created: it is missing when its disk is away.
        """
        path.parent.mkdir(exist_ok=True)
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> OpenFile:
        """Create a file that must not exist yet, for appending and reading."""
        self._check_room(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return OpenFile(os.open(path, flags, 0o644))

    def open_for_append(self, path: Path) -> OpenFile:
        """Open an existing file for appending and reading."""
        self._check_room(path)
        return OpenFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))

    def open_for_update(self, path: Path) -> OpenFile:
        """Open an existing file for `write_at`."""
        return OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def open_for_reading(self, path: Path) -> OpenFile:
        """Open an existing file for reading."""
        return OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def reused(self, folder: Path) -> None:
        """Note that an open file of a partition's folder is read again. Never blocks."""

    def read_start(self, path: Path, size_bytes: int) -> bytes:
        """Read the first bytes of a file."""
        file = self.open_for_reading(path)
        return os.pread(file.fd, size_bytes, 0)

    def append(self, file: OpenFile, data: memoryview) -> None:
        """Append all of `data`. After an error, an unknown part of it is in the file."""
        written = os.write(file.fd, data)
        while written < len(data):
            written += os.write(file.fd, data[written:])

    def write_at(self, file: OpenFile, position: int, data: bytes) -> None:
        """Write all of `data` at a position of a file that is not open for appending."""
        written = os.pwrite(file.fd, data, position)
        while written < len(data):
            written += os.pwrite(file.fd, data[written:], position + written)

    def truncate(self, file: OpenFile, size_bytes: int) -> None:
        """Truncate a file to `size_bytes`."""
        os.ftruncate(file.fd, size_bytes)

    def sync(self, file: OpenFile) -> None:
        """Make a file's bytes and its size durable."""
        _flush(file)

    def rewrite(self, path: Path, start: int, end: int) -> None:
        """Write the bytes from `start` to `end` again, unchanged, and make the file durable.

        After a failed flush, Linux may keep bytes in the page cache that are not on the disk and
        not marked as to be written: they can be read, and a second flush reports success without
        writing them. Only writing them again makes them durable.
        """
        file = OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # O_APPEND would ignore positions
        position = start
        while position < end:
            data = os.pread(file.fd, min(_REWRITE_BYTES, end - position), position)
            if not data:
                raise OSError(errno.EIO, "file is shorter than it was", str(path))
            position += os.pwrite(file.fd, data, position)
        _flush(file)

    def write_synced(self, path: Path, parts: Iterable[bytes]) -> None:
        """Write a small file and make its bytes durable; its name becomes so by `sync_folder`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = OpenFile(os.open(path, flags, 0o644))
        for part in parts:
            self.append(file, memoryview(part))
        _flush(file)

    def link(self, source: Path, target: Path) -> None:
        """Give `source` the second name `target`; FileExistsError if it exists."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; replaces `target` if it exists."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a name; no error if it does not exist."""
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        os.fsync(file.fd)
