"""Write a file in large aligned blocks that bypass the page cache.

An archive is written once and rarely read soon. Its pages in the cache would evict more useful
ones, and creating them costs more CPU than the rest of a copy (2-7 CPU-s per GB if the machine's
memory is not backed yet, against 0.2 with direct writes). A last partial block, and every file on a
filesystem without direct writes, is written through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES: Final = 4 << 20
"""Size of one write. It is aligned in memory and in the file, as direct writes require."""

_spare: Final[list[mmap.mmap]] = []
_SPARE_MAX: Final = 2
"""Blocks kept for the next file: touching fresh memory costs more than filling it."""

_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # macOS has none


class BlockWriter:
    """Collects bytes into blocks. Use from one thread.

    Args:
        descriptor: An empty file, open for writing.
        write: The system call: takes descriptor and bytes, returns the number of bytes written.
    """

    def __init__(self, descriptor: int, write: Callable[[int, memoryview], int]) -> None:
        self._descriptor = descriptor
        self._write = write
        self._block: mmap.mmap | None = None
        self._filled = 0
        self._direct: bool | None = None
        """None: not tried yet."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`, a view of bytes. Raises OSError."""
        done = 0
        while done < len(data):
            if self._block is None:
                self._block = _spare.pop() if _spare else mmap.mmap(-1, BLOCK_BYTES)
            size_bytes = min(len(data) - done, BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + size_bytes] = data[done : done + size_bytes]
            self._filled += size_bytes
            done += size_bytes
            if self._filled == BLOCK_BYTES:
                if self._direct is None:
                    self._direct = self._set_direct(wanted=True)
                self._flush()

    def finish(self) -> None:
        """Write the rest; it is not durable yet. Raises OSError."""
        if self._filled:
            if self._direct:
                self._direct = not self._set_direct(wanted=False)
            self._flush()
        self.close()

    def close(self) -> None:
        """Release the memory; has no effect a second time."""
        block, self._block, self._filled = self._block, None, 0
        if block is not None and len(_spare) < _SPARE_MAX:
            _spare.append(block)

    def _flush(self) -> None:
        if self._block is None:
            return
        with memoryview(self._block) as block:
            done = 0
            while done < self._filled:  # a full disk may write a part only
                try:
                    done += self._write(self._descriptor, block[done : self._filled])
                except OSError as error:
                    # Some filesystems accept the flag and then reject the write.
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    self._direct = not self._set_direct(wanted=False)
        self._filled = 0

    def _set_direct(self, *, wanted: bool) -> bool:
        """Turn direct writes on or off; returns whether that worked."""
        if not _DIRECT:
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | _DIRECT if wanted else flags & ~_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return True
