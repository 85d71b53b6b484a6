"""An LRU cache of sealed segments: their open files and their indexes.

It bounds file descriptors and memory for any number of partitions and segments. A response in
progress holds its own reference to the file, so eviction does not affect it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.segment_check import load

if TYPE_CHECKING:
    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment, SparseIndex

DEFAULT_LOADED_SEGMENTS: Final = 256
"""With segments of 64 MiB: at most 25 MiB of indexes and 256 file descriptors."""


class SegmentCache:
    """The loaded sealed segments of one broker. Safe to call from several threads."""

    def __init__(self, disk: Disk, *, max_loaded: int = DEFAULT_LOADED_SEGMENTS) -> None:
        self._disk = disk
        self._max_loaded = max_loaded
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Segment, None] = OrderedDict()

    def loaded(self, segment: Segment) -> tuple[OpenFile, SparseIndex]:
        """Return a segment's file and index; opens and builds them if they are not loaded.

        Blocks: a cold segment is checked when it is first loaded (`segment_check`), and indexed
        from the headers of its batches afterwards.

        Raises:
            OSError: The file cannot be opened or read.
            CorruptionError: The file was damaged since its check.
        """
        found = self.if_loaded(segment)
        if found is None:
            # Without the lock: two threads may load the same segment, which only wastes work.
            file = self._disk.open_for_reading(segment.path)
            found = file, load(segment, file)
            self._keep(segment, *found)
        return found

    def if_loaded(self, segment: Segment) -> tuple[OpenFile, SparseIndex] | None:
        """Return a segment's file and index if they are loaded. Never blocks."""
        with self._lock:
            file, index = segment.file, segment.index
            if file is None or index is None:
                return None
            if segment in self._loaded:
                self._loaded.move_to_end(segment)
            return file, index

    def sealed(self, segment: Segment) -> None:
        """Add a segment that was just sealed."""
        if segment.file is not None and segment.index is not None:
            self._keep(segment, segment.file, segment.index)

    def forget(self, segment: Segment) -> None:
        """Remove a deleted segment."""
        with self._lock:
            self._loaded.pop(segment, None)
            segment.file = segment.index = None

    def _keep(self, segment: Segment, file: OpenFile, index: SparseIndex) -> None:
        with self._lock:
            segment.file, segment.index = file, index
            self._loaded[segment] = None
            self._loaded.move_to_end(segment)
            while len(self._loaded) > self._max_loaded:
                oldest, _ = self._loaded.popitem(last=False)
                oldest.file = oldest.index = None
