"""Local copies of archive objects: files of record batches without a name, within a limit of bytes.

A copy is made once, however many readers wait for it. The least recently used ones are let go of
when the copies exceed the limit. A response in progress keeps its file, so such files, and copies
that are being made, come on top of the limit.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, BinaryIO, Final

from logmirror.broker.log.disk import OpenFile
from logmirror.broker.log.in_progress import InProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.segment_cache import SegmentCache

DEFAULT_BYTES: Final = 1024**3
_FILES_MAX: Final = 128


class LocalCopies:
    """The copies of one broker. Safe to call from several threads.

    Args:
        folder: Where the files are.
        cache: The broker's cache of segments, which lets go of a copy's file.
        max_bytes: The limit.
    """

    def __init__(self, folder: Path, cache: SegmentCache, max_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = folder
        self._cache = cache
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Segment, tuple[OpenFile, int]] = OrderedDict()
        self._making: InProgress[OpenFile] = InProgress()
        self.held_bytes = self.hits = self.misses = 0

    def open(self, segment: Segment, write: Callable[[BinaryIO], None]) -> OpenFile:
        """Return the copy of a segment, and set the segment's size; `write` makes it. Blocks."""
        return self._making.run(segment, lambda: self._opened(segment, write))

    def reused(self, segment: Segment) -> None:
        """Count a read of an open file, if it is that of a copy. Never blocks."""
        if segment in self._held:
            self.hits += 1

    def _opened(self, segment: Segment, write: Callable[[BinaryIO], None]) -> OpenFile:
        with self._lock:
            held = self._held.get(segment)
            if held is not None:
                self._held.move_to_end(segment)
                self.hits += 1
                return held[0]
            self.misses += 1
        file, size_bytes = self._made(write)
        segment.size_bytes = size_bytes
        with self._lock:
            self._held[segment] = file, size_bytes
            self.held_bytes += size_bytes
            gone = self._surplus()
        for one in gone:
            self._cache.close(one)
        return file

    def _made(self, write: Callable[[BinaryIO], None]) -> tuple[OpenFile, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as made:
            write(made)
            made.flush()
            return OpenFile(os.dup(made.fileno())), os.fstat(made.fileno()).st_size

    def _surplus(self) -> list[Segment]:
        gone = []
        while len(self._held) > 1 and (
            self.held_bytes > self._max_bytes or len(self._held) > _FILES_MAX
        ):
            segment, (_, size_bytes) = self._held.popitem(last=False)
            self.held_bytes -= size_bytes
            gone.append(segment)
        return gone
