"""Merges small sealed segments into large ones in the background; see `tiling` for the rules.

So reading history takes few requests, also of a quiet partition, which is sealed by time:

    copies of the segments -> one file -> its object created -> a commit -> the log switched over
                                                             -> the objects of the segments deleted
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.archive.chain import ArchiveObject
from logmirror.broker.bucket.commit_format import Entry, Kind
from logmirror.broker.bucket.journal import Submission
from logmirror.broker.bucket.tiling import SPAN_MS, groups
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.segment import Segment
from logmirror.errors import CorruptionError, LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.log.partition_log import PartitionLog

_LOG: Final = logging.getLogger(__name__)
_CONSIDERED: Final = 2_000
"""The newest segments of a log that are considered."""

_COPY_BYTES: Final = 4 * 1024 * 1024


class Merger:
    """Merges the segments of a log dir, one group at a time. Runs on the event loop.

    Args:
        bucket: The log dir.

    Attributes:
        merged: Segments that became part of larger ones.
        into: The larger ones.
    """

    def __init__(self, bucket: BucketLogs) -> None:
        self._bucket = bucket
        self._loop = asyncio.get_running_loop()
        self._due: dict[PartitionLog, None] = {}
        self._running: asyncio.Task[None] | None = None
        self._apart: dict[PartitionLog, set[tuple[int, int]]] = {}
        self._merging: PartitionLog | None = None
        self._left: dict[PartitionLog, set[object]] = {}
        """Logs of which nothing is merged, and who demands that: a pass, a move."""

        self.merged = self.into = 0

    def consider(self, log: PartitionLog) -> None:
        """Note a log that has a new sealed segment."""
        self._due[log] = None

    def tick(self) -> None:
        """Begin the next merge, if none is running."""
        if self._running is not None and not self._running.done():
            return
        while self._due:
            log = next(iter(self._due))
            if log.failure is None and self._bucket.is_open(log) and log not in self._left:
                end = min(log.high_watermark, self._bucket.uploaded_end(log))
                found = planned(log, end, self._apart.get(log, set()))
                if found:
                    self._merging = log
                    self._running = self._loop.create_task(self._merge(log, found))
                    return
            del self._due[log]

    async def leave(self, log: PartitionLog, holder: object, timeout_s: float) -> bool:
        """Merge nothing of a log until `take_up`; returns whether its merge in progress has ended.

        Args:
            log: The log.
            holder: Who demands it; others may, too.
            timeout_s: How long to wait for that.
        """
        self._left.setdefault(log, set()).add(holder)
        if self._running is None or self._merging is not log:
            return True
        await asyncio.wait([self._running], timeout=timeout_s)
        return self._running.done()

    def take_up(self, log: PartitionLog, holder: object) -> None:
        """End what `leave` began for a holder; the log is merged again once there is no other."""
        holders = self._left.get(log, set())
        holders.discard(holder)
        if not holders:
            self._left.pop(log, None)
            self.consider(log)

    def forget(self, log: PartitionLog) -> None:
        """Forget a log that is not in the bucket any more."""
        self._left.pop(log, None)
        self._due.pop(log, None)
        self._apart.pop(log, None)

    def stop(self) -> None:
        """Begin no further merge."""
        self._due.clear()

    async def _merge(self, log: PartitionLog, old: Sequence[Segment]) -> None:
        first, after = old[0].first, old[-1].next_offset
        path = cleaned_path(log.folder, first)
        try:
            is_near = await asyncio.wrap_future(
                self._bucket.submit_replacement(log, lambda: self._create(log, old, path))
            )
            if is_near:
                await self._prove(log, first, after)
            else:
                self._apart.setdefault(log, set()).add((first, after))
            new = Segment(log.folder, first, after, sum(one.size_bytes for one in old))
            if is_near and log.replace(old, new, path):
                self._bucket.disk.keep(new.path, new.size_bytes)
                self.merged, self.into = self.merged + len(old), self.into + 1
                await asyncio.wrap_future(self._bucket.delete_replaced(log, old))
                return
        except (LogmirrorError, OSError, KeyError) as error:  # KeyError: the topic was deleted
            _LOG.warning("%s: segments could not be merged: %s", log.folder, error)
            self._due.pop(log, None)
        path.unlink(missing_ok=True)

    def _create(self, log: PartitionLog, old: Sequence[Segment], path: Path) -> bool:
        """Create the merged object and its file; False: the records are too far apart. Blocks."""
        disk = self._bucket.disk
        oldest = newest = None
        with path.open("wb") as target:
            for segment in old:
                file, end = disk.open_for_reading(segment.path), segment.first
                for batch in scan(file, segment.first, contiguous=True):
                    end = batch.last_offset + 1
                    if batch.max_timestamp_ms >= 0:
                        oldest = min(oldest or batch.max_timestamp_ms, batch.max_timestamp_ms)
                        newest = max(newest or 0, batch.max_timestamp_ms)
                if end != segment.next_offset:
                    raise CorruptionError("segment is damaged", path=str(segment.path), offset=end)
                if (newest or 0) - (oldest or 0) > SPAN_MS:
                    return False
                position = 0
                while data := os.pread(file.fd, _COPY_BYTES, position):
                    position += target.write(data)
        self._bucket.create_replacement(log, old[0].first, old[-1].next_offset, path)
        failpoints.reach("bucket.merged")
        return True

    async def _prove(self, log: PartitionLog, first: int, after: int) -> None:
        """Write a commit, which a former owner cannot (M1)."""
        outcome: asyncio.Future[None] = self._loop.create_future()
        topic_id, partition = self._bucket.key_of(log)
        entry = Entry(Kind.MERGED, topic_id, partition, first, after)

        def finish(error: BaseException | None) -> None:
            if not outcome.done():
                if error is None:
                    outcome.set_result(None)
                else:
                    outcome.set_exception(error)

        def done(_: int, error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(finish, error)

        self._bucket.journal.submit(Submission(0, lambda: [entry], done))
        await outcome
        failpoints.reach("bucket.replaced")


def planned(log: PartitionLog, end: int, refused: Collection[tuple[int, int]]) -> list[Segment]:
    """Return the next segments of a log that become one; empty: none.

    Args:
        log: The log.
        end: Segments that end behind this offset are not merged.
        refused: Bounds of segments that are not merged.
    """
    sealed, is_cut = list[Segment](), False
    for one in log.segments:
        if not one.is_sealed or one.next_offset > end or not one.size_bytes:
            break
        if one.version:  # compacted: neither it nor what is before it (`replacing`)
            sealed, is_cut = [], True
            continue
        sealed.append(one)
    is_cut, sealed = is_cut or len(sealed) > _CONSIDERED, sealed[-_CONSIDERED:]
    named = [ArchiveObject(one.path.name, one.first, one.next_offset - 1) for one in sealed]
    sizes, target_bytes = [one.size_bytes for one in sealed], log.segment_bytes
    while target_bytes:
        found = groups(named, sizes, target_bytes)
        for group in found:
            if is_cut and group[0] == named[0]:
                continue  # its cell may begin before
            first, after = group[0].first, group[-1].last + 1
            if (first, after) not in refused:
                return [one for one in sealed if first <= one.first < after]
        target_bytes = target_bytes // 2 if found else 0  # smaller cells of those refused
    return []
