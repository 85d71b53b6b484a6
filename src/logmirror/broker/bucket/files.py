"""The working folder of a log dir in a bucket: its files are copies, fetched when they are missing.

A sealed segment may be removed from it once its object exists. Beyond a limit the files that were
not opened for longest are removed; responses in progress keep theirs. A file is fetched once, by
the first that needs it; others wait for it and get its error.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from logmirror.broker.bucket.parts import Parts
from logmirror.broker.bucket.tiling import INDEXED_BYTES
from logmirror.broker.log.disk import Disk, OpenFile
from logmirror.broker.log.in_progress import InProgress
from logmirror.broker.log.segment_cache import AHEAD
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.log.segment import Segment, SparseIndex
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)
_COPY_BYTES: Final = 4 * 1024 * 1024
_AGAIN_MS: Final = 60_000
"""A segment that is read again within this time is fetched whole (P3 in `parts`)."""

_PLACES: Final = 1_000
"""Segments whose last read is remembered."""


class BucketDisk(Disk):
    """System calls in the working folder; opens what is only in the bucket, too.

    Args:
        store: The log dir.
        cache_bytes: Limit for the files whose objects exist.
        max_files: As in `Disk`.
        free_bytes: Returns how much is free on the disk. The files take half of what is free
            without them at most, so that open segments have the other half.

    Attributes:
        hits: Reads of files that were here.
        misses: Files that were not, and were fetched, or a part of them.
        fetched_bytes: The bytes of those.
        when_evicted: Called with the path of a file that was removed because of the limit. In any
            thread.
        when_without_index: Called with the folder, the name of a segment whose index is missing in
            the bucket, and its file. In any thread.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        cache_bytes: int,
        max_files: int | None = None,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        super().__init__(max_files=max_files)
        self._store, self._cache_bytes, self._free_bytes = store, cache_bytes, free_bytes
        self._lock = threading.Lock()
        self._folders: dict[Path, str] = {}
        self._kept: OrderedDict[Path, int] = OrderedDict()
        self._fetching: InProgress[OpenFile] = InProgress()
        self._parts = Parts(store)
        self._read_at_ms: OrderedDict[Path, int] = OrderedDict()
        self.held_bytes = 0
        self.hits = self.misses = self.fetched_bytes = 0
        self.when_evicted: Callable[[Path], None] = lambda _: None
        self.when_without_index: Callable[[Path, str, OpenFile], None] = lambda *_: None

    def connect(self, folder: Path, in_bucket: str) -> None:
        """Fetch the missing files of a partition's folder from a folder of the bucket."""
        self._folders[folder] = in_bucket

    def disconnect(self, folder: Path) -> None:
        """Forget the folder of a partition that is not in the bucket any more, and its files."""
        with self._lock:
            self._folders.pop(folder, None)
            for path in [path for path in self._kept if path.parent == folder]:
                self.held_bytes -= self._kept.pop(path)

    def keep(self, path: Path, size_bytes: int) -> None:
        """Note a file whose object exists; remove files beyond the limit."""
        removed = []
        free = self._free_bytes()
        with self._lock:
            self.held_bytes += size_bytes - self._kept.pop(path, 0)
            self._kept[path] = size_bytes
            limit = self._limit(free)
            while self.held_bytes > limit and len(self._kept) > 1:
                oldest, size = self._kept.popitem(last=False)
                self.held_bytes -= size
                removed.append(oldest)
        for oldest in removed:
            oldest.unlink(missing_ok=True)
            self.when_evicted(oldest)

    def has_room(self, segment: Segment) -> bool:
        """Whether segments of this size can be loaded ahead without evicting each other."""
        if segment.folder not in self._folders:
            return True
        return (AHEAD + 1) * segment.size_bytes <= self._limit(self._free_bytes())

    def _limit(self, free_bytes: int) -> int:
        return min(self._cache_bytes, (free_bytes + self.held_bytes) // 2)

    def unlink(self, path: Path) -> None:
        """See `Disk.unlink`."""
        with self._lock:
            self.held_bytes -= self._kept.pop(path, 0)
        super().unlink(path)

    def open_for_reading(self, path: Path) -> OpenFile:
        """See `Disk.open_for_reading`; fetches the file if it is missing."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
        try:
            file = super().open_for_reading(path)
        except FileNotFoundError:
            if path.parent not in self._folders:
                raise
            return self._fetched(path)
        if path.parent in self._folders:  # others are on disks
            self.hits += 1
        return file

    def reused(self, folder: Path) -> None:
        """See `Disk.reused`."""
        if folder in self._folders:
            self.hits += 1

    def part(
        self, segment: Segment, offset: int, size_bytes: int
    ) -> tuple[OpenFile, SparseIndex] | None:
        """Return a part of a large segment that is not here; None: it must be opened, as a whole.

        That is so if it was read just before (P3 in `parts`). See `SegmentCache.loaded_at`.

        Raises:
            OSError: The bucket could not be read.
        """
        path = segment.path
        if segment.size_bytes < INDEXED_BYTES or path.parent not in self._folders or path.exists():
            return None
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        with self._lock:
            is_again = now_ms - self._read_at_ms.pop(path, -_AGAIN_MS) < _AGAIN_MS
            self._read_at_ms[path] = now_ms
            while len(self._read_at_ms) > _PLACES:
                self._read_at_ms.popitem(last=False)
            if is_again or path in self._fetching:
                return None
        try:
            found = self._parts.read(segment, self._name(path), offset, size_bytes)
        except LogmirrorError as error:
            raise _failed(path, error) from error
        if found is None:
            return None
        file, index, fetched = found
        self.misses += 1
        self.fetched_bytes += fetched
        return file, index

    def read_start(self, path: Path, size_bytes: int) -> bytes:
        """See `Disk.read_start`; fetches these bytes only."""
        if path.exists() or path.parent not in self._folders:
            return super().read_start(path, size_bytes)
        try:
            with self._store.open(self._name(path)) as source:
                return source.read(size_bytes)
        except (LogmirrorError, KeyError) as error:
            raise _failed(path, error) from error

    def _name(self, path: Path) -> str:
        return f"{self._folders[path.parent]}/{path.name}"

    def _fetched(self, path: Path) -> OpenFile:
        """Open a file that was missing; wait for the fetch in progress, if there is one."""
        # It ends: each request to the store has a deadline.
        return self._fetching.run(path, lambda: self._opened(path))

    def _opened(self, path: Path) -> OpenFile:
        """Open a file that another thread may have fetched, or removed, since it was missing."""
        try:
            return super().open_for_reading(path)
        except FileNotFoundError:
            return self._fetch(path)

    def _fetch(self, path: Path) -> OpenFile:
        size, part = 0, path.with_name(f".{secrets.token_hex(8)}.fetched")
        in_bucket = self._folders.get(path.parent)
        name = f"{in_bucket}/{path.name}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._store.open(name) as source, part.open("wb") as target:
                while data := source.read(_COPY_BYTES):
                    size += target.write(data)
            file = super().open_for_reading(part)
            with self._lock:
                if self._folders.get(path.parent) != in_bucket:  # of a topic of the same name now
                    raise FileNotFoundError(errno.ENOENT, "partition was deleted", str(path))
                part.replace(path)
        except (LogmirrorError, KeyError) as error:
            raise _failed(path, error) from error
        finally:
            part.unlink(missing_ok=True)
        self.misses += 1
        self.fetched_bytes += size
        self.keep(path, size)
        if name in self._parts.without_index:
            self._parts.without_index.discard(name)
            self.when_without_index(path.parent, name, file)
        return file


class FetchError(OSError):
    """A file could not be fetched from the bucket."""


def _failed(path: Path, error: Exception) -> FetchError:
    _LOG.warning("%s: could not be fetched from the bucket: %s", path, error)
    return FetchError(errno.EIO, f"could not be fetched from the bucket: {error}", os.fspath(path))
