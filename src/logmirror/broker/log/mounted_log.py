"""The log of a partition that is mounted from an archive: sealed segments, and no writes.

Segments are added at the end as a mirror writes on. High watermark and log end offset are the end
of the last object. A reader of committed records gets the batches of one object at a time, with the
aborted transactions of that object: their markers may be in later objects, which are read first.
A response also ends where only a claim says that a transaction was aborted: without a marker, the
reader would skip the next transaction of that producer as well.

The last stable offset is known once the last objects were read, up to `_TAIL_SEGMENTS`. Until then,
and for a transaction that begins before them, it is the high watermark; a reader of committed
records is never given more than what is decided, because its own object is resolved in any case.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.mounted_transactions import Outcome
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.partition_transactions import Aborted
from logmirror.broker.log.reading import ColdSegmentError, StorageError
from logmirror.broker.log.segment_list import SegmentList

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment import FileRange, Segment, SparseIndex
    from logmirror.broker.log.segment_cache import SegmentCache

_NO_SEGMENTS: Final[Mapping[Segment, tuple[OpenFile, SparseIndex]]] = MappingProxyType({})
_SEGMENT_BYTES: Final = 2**31 - 1
_TAIL_SEGMENTS: Final = 2


class MountedLog(PartitionLog):
    """The log of one partition of an archive.

    Args:
        folder: `<archive>/<destination>/<partition>`, for messages; its last two parts name topic
            and partition.
        disk: The system calls.
        cache: The broker's cache of segments.
        executor: For reading the archive's objects.

    Attributes:
        has_transactions: Whether the objects can hold transactions: the format is native.
    """

    def __init__(
        self, folder: Path, *, disk: Disk, cache: SegmentCache, executor: Executor
    ) -> None:
        super().__init__(folder, disk=disk, cache=cache, segment_bytes=_SEGMENT_BYTES)
        self.executor = executor
        self.has_transactions = False
        self._decided: dict[Segment, Outcome] = {}
        self._undecided: int | None = None

    def mount(self, segments: Sequence[Segment]) -> None:
        """Add the next objects, or replace all by others that cover the same offsets and more."""
        if segments and self.segments and segments[0].first == self.log_end:
            self._segments = SegmentList([*self.segments, *segments])
        else:
            known = {(one.first, one.next_offset): one for one in self.segments}
            kept = [known.pop((one.first, one.next_offset), one) for one in segments]
            for gone in known.values():
                gone.is_deleted = True
                self._cache.forget(gone)
            self._segments = SegmentList(kept)
            self._decided = {one: self._decided[one] for one in kept if one in self._decided}
        self._undecided = None
        if self.segments:
            self.log_start = self.segments[0].first
            self.log_end = self.high_watermark = self.durable = self.segments[-1].next_offset
        self._notify_watchers()

    def restore(self) -> None:
        """Serve again what was offline."""
        self.failure = None
        self._notify_watchers()

    @property
    def size_bytes(self) -> int:
        """The size of the objects that were opened, as batches."""
        return sum(one.size_bytes for one in self.segments)

    def _write(self, *_: object) -> int:
        """Refuse: nothing is written to an archive."""
        raise StorageError("partition is mounted from an archive", folder=str(self.folder))

    @property
    def last_stable_offset(self) -> int:
        """The end of the decided transactions, as far as it is known."""
        stable = self.high_watermark if self._undecided is None else self._undecided
        if not self.has_transactions:
            return stable
        ongoing: dict[int, int] = {}
        for segment in self.segments[-_TAIL_SEGMENTS:]:
            if segment.events is None:
                return stable
            for producer_id in segment.events.first_outcomes:
                ongoing.pop(producer_id, None)
            for producer_id, first in segment.events.open.items():
                ongoing.setdefault(producer_id, first)
        return min(stable, min(ongoing.values(), default=stable))

    def unread_tail(self) -> Segment | None:
        """Return an object that must be read before the last stable offset is known."""
        if self.has_transactions:
            for segment in self.segments[-_TAIL_SEGMENTS:]:
                if segment.events is None:
                    return segment
        return None

    def read_committed(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        pinned: Mapping[Segment, tuple[OpenFile, SparseIndex]] = _NO_SEGMENTS,
    ) -> tuple[list[FileRange], list[Aborted]]:
        """See `PartitionLog.read_committed`. Raises ColdSegmentError for each object it needs."""
        if not self.has_transactions:
            found = self.read(offset, max_bytes, at_least_one=at_least_one, pinned=pinned)
            return found, []
        self.check_online()
        if offset >= self.high_watermark:
            return [], []
        number = self._segments.number_of(offset)
        segment = self.segments[number]
        tail = self.unread_tail()
        if tail is not None and tail.first <= segment.first:  # a damaged one hides none before it
            raise ColdSegmentError(tail)
        known = self._outcome(number)
        stable = segment.next_offset if known.undecided is None else known.undecided
        at = bisect_right(known.breaks, offset)
        for before in (*known.breaks[at : at + 2], stable):
            end_max = min(before, stable)
            found, end = self._read(offset, end_max, max_bytes, at_least_one, pinned)
            if found:  # else only an offset gap is left; between two breaks there is a batch
                break
        aborted = [one for one in known.aborted if one.first_offset < end]
        return found, [one for one in aborted if one.last_offset >= offset]

    def _outcome(self, number: int) -> Outcome:
        segment = self.segments[number]
        known = self._decided.get(segment)
        if known is None:
            known = _outcome(segment, islice(self.segments, number + 1, None))
            if known.undecided is None:
                self._decided[segment] = known
            else:
                before = known.undecided if self._undecided is None else self._undecided
                self._undecided = min(known.undecided, before)
        return known


def _outcome(segment: Segment, following: Iterable[Segment]) -> Outcome:
    """Return the outcome of an object's transactions, from its markers and those that follow.

    Raises:
        ColdSegmentError: An object must be read first.
    """
    events = segment.events
    if events is None:
        raise ColdSegmentError(segment)
    left, aborted = dict(events.open), list(events.aborted)
    for later in following if left else ():
        if later.events is None:
            raise ColdSegmentError(later)
        outcomes = later.events.first_outcomes
        for producer_id in left.keys() & outcomes.keys():
            first = left.pop(producer_id)
            if not outcomes[producer_id]:
                end = segment.next_offset
                aborted.append(Aborted(producer_id, first, end - 1, end))
        if not left:
            break
    return Outcome(aborted, min(left.values(), default=None), events.breaks)
