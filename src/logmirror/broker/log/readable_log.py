"""What is readable of a partition's log: everything before the high watermark (L1, L7)."""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.reading import ReadSegment, StorageError, read_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_transactions import Aborted
    from logmirror.broker.log.producer_state import ProducerState
    from logmirror.broker.log.segment import FileRange, Segment, SparseIndex
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.log.segment_list import SegmentList
    from logmirror.errors import LogmirrorError

_NO_SEGMENTS: Final[Mapping[Segment, tuple[OpenFile, SparseIndex]]] = MappingProxyType({})


class ReadableLog:
    """The reading side of `partition_log.PartitionLog`.

    Args:
        folder: `<log dir>/<topic>/<partition>`.
        cache: The open files and indexes of segments.
        segments: The segments.
        tail: The open one, if there is one.
        log_start: The log start offset.
    """

    producers: ProducerState

    def __init__(
        self,
        folder: Path,
        cache: SegmentCache,
        segments: SegmentList,
        tail: Segment | None,
        log_start: int,
    ) -> None:
        self.folder = folder
        self.failure: LogmirrorError | None = None
        self.log_start = log_start
        self._cache = cache
        self._segments = segments
        self.log_end = segments.all[-1].next_offset if segments.all else log_start
        self.high_watermark = self.log_end
        self._readable_tail = tail
        self._readable_tail_bytes = tail.size_bytes if tail else 0
        self._watchers: set[Callable[[], None]] = set()
        self.when_failed: Callable[[Exception, Path], None] = lambda _error, _folder: None
        """Called after an error of the disk; see `dir_failures`."""

    def disk_failed(self, error: Exception) -> None:
        """Report an error of the disk: the whole log directory may have failed."""
        if self.failure is None:
            self.when_failed(error, self.folder)

    def check_online(self) -> None:
        """Raise `StorageError` if the partition is offline."""
        if self.failure is not None:
            raise StorageError(
                "partition is offline", folder=str(self.folder), cause=str(self.failure)
            ) from self.failure

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments, oldest first."""
        return self._segments.all

    @property
    def last_stable_offset(self) -> int:
        """The end of the decided transactions; it moves when the high watermark does."""
        return self.producers.transactions.stable_end(self.high_watermark, self.log_start)

    def watch(self, notify: Callable[[], None]) -> None:
        """Call `notify` when high watermark or log start advance, or the partition goes offline."""
        self._watchers.add(notify)

    def unwatch(self, notify: Callable[[], None]) -> None:
        """Stop calling `notify`."""
        self._watchers.discard(notify)

    def _notify_watchers(self) -> None:
        for notify in tuple(self._watchers):
            notify()

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        pinned: Mapping[Segment, tuple[OpenFile, SparseIndex]] = _NO_SEGMENTS,
    ) -> list[FileRange]:
        """Find the whole batches from the one that holds `offset`, up to the high watermark.

        Args:
            offset: From `log_start` to `log_end`.
            max_bytes: Limit in bytes, except for `at_least_one`.
            at_least_one: Whether to return the first batch even if it exceeds `max_bytes`.
            pinned: Segments that the caller has loaded, and that the cache may have evicted since.

        Returns:
            File ranges in order; empty from the high watermark on, or if no batch fits.

        Raises:
            ColdSegmentError: The first segment is not loaded; load it in the executor and retry.
            StorageError: The partition is offline, or a segment cannot be read.
            DamagedRecordsError: The records at `offset` are damaged.
        """
        return self._read(offset, self.high_watermark, max_bytes, at_least_one, pinned)[0]

    def read_committed(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        pinned: Mapping[Segment, tuple[OpenFile, SparseIndex]] = _NO_SEGMENTS,
    ) -> tuple[list[FileRange], list[Aborted]]:
        """Like `read`, up to the last stable offset; also returns the aborted transactions."""
        stable = self.last_stable_offset
        found, end = self._read(offset, stable, max_bytes, at_least_one, pinned)
        return found, self.producers.transactions.aborted_between(offset, end)

    def _read(
        self,
        offset: int,
        before: int,
        left: int,
        at_least_one: bool,
        pinned: Mapping[Segment, tuple[OpenFile, SparseIndex]],
    ) -> tuple[list[FileRange], int]:
        """Find whole batches before an offset; returns them, and an offset that none reaches."""
        self.check_online()
        last: Segment | None = None

        def parts() -> Iterator[ReadSegment]:
            nonlocal last
            for last in self._segments.starting_at(offset):
                loaded = pinned.get(last) or self._cache.if_loaded(last)
                yield ReadSegment(last, loaded, self._readable_bytes(last))

        found = read_batches(parts(), offset, before, left, at_least_one=at_least_one)
        if last is not None and offset <= last.first and self._cache.ahead:
            self._read_ahead(last)
        return found

    def _read_ahead(self, segment: Segment) -> None:
        """Load what a consumer needs next that has come to the first record of a segment."""
        following = islice(self._segments.starting_at(segment.first), self._cache.ahead + 1)
        missing = (one for one in following if one.is_sealed and one.file is None)
        self._cache.read_ahead(islice(missing, self._cache.ahead))

    def _readable_bytes(self, segment: Segment) -> int:
        if segment.next_offset <= self.high_watermark:
            return segment.size_bytes
        return self._readable_tail_bytes if segment is self._readable_tail else 0

    def readable_segments(self) -> list[tuple[Segment, int]]:
        """Return the segments below the high watermark, each with its readable bytes.

        A sealed segment without bytes stands for lost records.
        """
        pairs = [(found, self._readable_bytes(found)) for found in self._segments.all]
        return [(found, size) for found, size in pairs if size or found.is_sealed]
