"""The system calls that order durability, separate so that tests can crash between any two."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Syscalls:
    """The system calls of a filesystem store; each either succeeds or has no effect."""

    def make_directory(self, path: Path) -> None:
        """Create one directory; FileExistsError if it exists."""
        path.mkdir()

    def open_new(self, path: Path) -> int:
        """Open a new file for writing; FileExistsError if the name is taken.

        Its mode is what the process's umask leaves, as that of folders.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append to an open file; returns the number of bytes written."""
        return os.write(descriptor, data)

    def sync_data(self, descriptor: int) -> None:
        """Make a file's bytes and length durable."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Give `source` the second name `target`; FileExistsError if it is taken."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
