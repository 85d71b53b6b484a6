"""An LRU cache of sealed segments: their open files and their indexes.

It bounds file descriptors and memory for any number of partitions and segments. A response in
progress holds its own reference to the file, so eviction does not affect it; `is_full` reports when
responses hold too many. An index outlives its file: reopening a file is cheap, building an index
reads the headers of all batches.

What a sequential consumer reads next is loaded ahead, in threads: so it does not wait while a
segment is fetched from a bucket, checked, or converted.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.in_progress import InProgress
from logmirror.broker.log.segment_check import load
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import Segment, SparseIndex

DEFAULT_LOADED_SEGMENTS: Final = 256
"""Open files."""

_FILES_IN_ALL: Final = 4
"""How many times that many files are open, with those that only responses in progress hold."""

MAX_INDEX_ENTRIES: Final = 2_000_000
"""Entries of all indexes, 24 bytes each: 46 MiB, which is 480 segments of 64 MiB."""

AHEAD: Final = 2
"""How many segments of a partition are loaded ahead of a sequential consumer."""

_AHEAD_AT_ONCE: Final = 4
"""Segments of log dirs that are loaded ahead at the same time; others wait for their read."""

_AHEAD_OF_ARCHIVE: Final = 2
"""The same for each archive, apart, because its store may hang. Conversions use whole cores."""


class SegmentCache:
    """The loaded sealed segments of one broker. Safe to call from several threads.

    Args:
        disk: The system calls.
        max_loaded: Limit for the files.
        max_index_entries: Limit for the indexes.
        parts: Returns a part of a segment that is not here, or None; see `loaded_at`.
        ahead: How many segments of a partition are loaded ahead.
        has_room: Whether there is space for loading a segment ahead.
    """

    def __init__(  # noqa: PLR0913  # two of them are of a log dir in a bucket
        self,
        disk: Disk,
        *,
        max_loaded: int = DEFAULT_LOADED_SEGMENTS,
        max_index_entries: int = MAX_INDEX_ENTRIES,
        parts: Callable[[Segment, int, int], tuple[OpenFile, SparseIndex] | None] | None = None,
        ahead: int = 0,
        has_room: Callable[[Segment], bool] = lambda _: True,
    ) -> None:
        self._disk, self._parts, self._has_room = disk, parts, has_room
        self.ahead = min(ahead, max_loaded // 4)  # what is loaded ahead must not be evicted by it
        self._max_loaded = max_loaded
        self._max_index_entries = max_index_entries
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Segment, None] = OrderedDict()
        self._indexes: OrderedDict[Segment, int] = OrderedDict()
        self._index_entries = 0
        self._files: weakref.WeakSet[OpenFile] = weakref.WeakSet()
        self._loading: InProgress[tuple[OpenFile, SparseIndex]] = InProgress()
        self._loading_ahead: set[Segment] = set()

    @property
    def is_full(self) -> bool:
        """Whether responses in progress hold so many files that no more should be opened."""
        return len(self._files) >= _FILES_IN_ALL * self._max_loaded

    def loaded(self, segment: Segment) -> tuple[OpenFile, SparseIndex]:
        """Return a segment's file and index; opens and builds them if they are not loaded.

        Blocks: a cold segment is checked when it is first loaded (`segment_check`), and indexed
        from the headers of its batches afterwards.

        Raises:
            OSError: The file cannot be opened or read.
            CorruptionError: The file was damaged since its check.
        """
        found = self.if_loaded(segment)
        return found or self._loading.run(segment, lambda: self._load(segment))

    def _load(self, segment: Segment) -> tuple[OpenFile, SparseIndex]:
        found = self.if_loaded(segment)
        if found is None:
            file, index = self._opened(segment), segment.index
            if index is None or not segment.is_checked:
                index = load(segment, file)
            found = file, index
            self._keep(segment, *found)
        return found

    def loaded_at(
        self, segment: Segment, offset: int, size_bytes: int
    ) -> tuple[OpenFile, SparseIndex]:
        """Like `loaded`, or a part from an offset on (`SparseIndex.end`), if that is cheaper.

        Args:
            segment: The segment.
            offset: An offset in it.
            size_bytes: How much is wanted.
        """
        found = self.if_loaded(segment)
        is_coming = segment in self._loading or segment in self._loading_ahead
        if found is None and self._parts is not None and not is_coming:
            found = self._parts(segment, offset, size_bytes)
            if found is not None:
                with self._lock:
                    self._files.add(found[0])
        return found or self.loaded(segment)

    def read_ahead(self, segments: Iterable[Segment]) -> None:
        """Load sealed segments of a partition that will be read soon, in threads. Never blocks."""
        for segment in segments:
            with self._lock:
                is_here = segment.file is not None and segment.index is not None
                is_coming = segment in self._loading_ahead or segment in self._loading
                if is_here or is_coming or not _is_loaded_ahead(segment):
                    continue
                if not self._may_load_ahead(segment) or not self._has_room(segment):
                    return
                self._loading_ahead.add(segment)
            thread = threading.Thread(
                target=self._load_ahead, args=(segment,), name="logmirror-read-ahead", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no thread is free: the read that needs the segment loads it
                with self._lock:
                    self._loading_ahead.discard(segment)

    def _may_load_ahead(self, segment: Segment) -> bool:
        place = _archive(segment)
        most = _AHEAD_AT_ONCE if place is None else _AHEAD_OF_ARCHIVE
        return sum(_archive(one) is place for one in self._loading_ahead) < most

    def _load_ahead(self, segment: Segment) -> None:
        try:
            self.loaded(segment)
        except (LogmirrorError, OSError):
            pass  # the read that needs the segment tries again, and reports it
        finally:
            with self._lock:
                self._loading_ahead.discard(segment)

    def _opened(self, segment: Segment) -> OpenFile:
        if segment.source is not None:
            return segment.source.open(segment)
        path = segment.path
        try:
            file = self._disk.open_for_reading(path)
        except FileNotFoundError:
            if segment.path == path:
                raise
            file = self._disk.open_for_reading(segment.path)  # it was moved meanwhile
        with self._lock:
            if segment.is_deleted:  # the path may be that of the segment that replaced it
                raise FileNotFoundError(errno.ENOENT, "segment was deleted", str(segment.path))
        return file

    def replace(self, old: Sequence[Segment], source: Path, target: Path) -> None:
        """Rename a file that replaces segments, and remove these, whose files were not opened yet.

        Raises:
            OSError: The file could not be renamed; nothing was changed.
        """
        with self._lock:
            self._disk.rename(source, target)
            for segment in old:
                segment.is_deleted = True
        for segment in old:
            self.forget(segment)

    def if_loaded(self, segment: Segment) -> tuple[OpenFile, SparseIndex] | None:
        """Return a segment's file and index if they are loaded. Never blocks."""
        with self._lock:
            file, index = segment.file, segment.index
            if file is None or index is None:
                return None
            is_kept = segment in self._loaded
            if is_kept:
                self._loaded.move_to_end(segment)
                self._indexes.move_to_end(segment)
        if is_kept and segment.source is not None:
            segment.source.reused(segment)
        elif is_kept:
            self._disk.reused(segment.folder)
        return file, index

    def close(self, segment: Segment) -> None:
        """Let go of a segment's file; its index is kept."""
        with self._lock:
            self._loaded.pop(segment, None)
            segment.file = None

    def let_go(self, path: Path) -> None:
        """Let go of a file whose name was removed, which takes space while it is open."""
        files = []  # closed without the lock: that frees the space
        with self._lock:
            for segment in [one for one in self._loaded if one.path == path]:
                del self._loaded[segment]
                files.append(segment.file)
                segment.file = None

    def sealed(self, segment: Segment) -> None:
        """Add a segment that was just sealed."""
        file, index = segment.file, segment.index
        if file is not None and index is not None:
            self._keep(segment, file, index)

    def forget(self, segment: Segment) -> None:
        """Remove a deleted segment."""
        with self._lock:
            self._loaded.pop(segment, None)
            self._index_entries -= self._indexes.pop(segment, 0)
            segment.file = segment.index = None

    def _keep(self, segment: Segment, file: OpenFile, index: SparseIndex) -> None:
        with self._lock:
            self._files.add(file)
            if segment.is_deleted:
                segment.file = segment.index = None
                return
            segment.file, segment.index = file, index
            if index.max_timestamp_ms >= 0:
                segment.newest_ms = index.max_timestamp_ms
            self._loaded[segment] = None
            self._loaded.move_to_end(segment)
            self._index_entries += len(index.offsets) - self._indexes.get(segment, 0)
            self._indexes[segment] = len(index.offsets)
            self._indexes.move_to_end(segment)
            if segment.source is None and not os.fstat(file.fd).st_nlink:
                del self._loaded[segment]  # its name was removed since it was opened
                segment.file = None
            while len(self._loaded) > self._max_loaded:
                oldest, _ = self._loaded.popitem(last=False)
                oldest.file = None
            while self._index_entries > self._max_index_entries and len(self._indexes) > 1:
                oldest, entries = self._indexes.popitem(last=False)
                self._index_entries -= entries
                self._loaded.pop(oldest, None)
                oldest.file = oldest.index = None


def _is_loaded_ahead(segment: Segment) -> bool:
    return segment.source is None or segment.source.is_loaded_ahead


def _archive(segment: Segment) -> Executor | None:
    """What all segments of an archive have in common; None: of a log dir."""
    return None if segment.source is None else segment.source.executor
