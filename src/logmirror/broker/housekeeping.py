"""Housekeeping: seals open segments by age, deletes what exceeds its retention, and compacts.

A log is considered when its settings or its open segment change, and when something of it is due.
What is due is in a heap, so that the work does not depend on how many partitions there are. Records
are deleted as DeleteRecords does it: the log start offset is durable before a file is removed.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.reading import StorageError
from logmirror.broker.log.retention import NO_LIMIT, expired, read_age
from logmirror.broker.topic import RefusedTopicError
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from logmirror.broker.compaction import Compactor
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.topic import Topic
    from logmirror.broker.topic_configs import TopicConfigs
    from logmirror.broker.topics import Topics
    from logmirror.clock import Clock

_LOG: Final = logging.getLogger(__name__)
_TICK_S: Final = 1.0
_TURN_LOGS: Final = 64
"""Logs that are considered before clients have their turn."""

_SPARE_ENTRIES: Final = 1000
"""Entries of the heap that no longer count, before it is rebuilt."""

_RETRY_MS: Final = 60_000
"""After a failure of the disk or the database."""


class _Known:
    """What was found when a log was considered last."""

    __slots__ = ("configs", "due", "stored_end", "tail", "tail_since_ms")

    def __init__(self) -> None:
        self.due: tuple[int, int] | None = None
        self.configs: TopicConfigs | None = None
        self.tail: Segment | None = None
        self.tail_since_ms = 0
        self.stored_end = 0


class Housekeeping:
    """Keeps the logs of one broker within their limits. Runs on the event loop.

    Args:
        topics: The topics.
        commits: Flushes and removes; knows which logs have changed.
        cache: The cache of sealed segments.
        disk: The system calls.
        executor: For blocking work.
        clock: The time by which the age of records is measured.

    Attributes:
        compactor: Compacts what is due; None: nothing is compacted.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts
        self,
        topics: Topics,
        commits: GroupCommit,
        cache: SegmentCache,
        disk: Disk,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._commits = commits
        self._cache = cache
        self._disk = disk
        self._executor = executor
        self._clock = clock
        self._known: dict[PartitionLog, _Known] = {}
        self._heap: list[tuple[int, int]] = []
        self._due: dict[tuple[int, int], PartitionLog] = {}
        self._pushed = 0
        self._is_first = True
        self.compactor: Compactor | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Do what is due, once a second, until `stop`."""
        while not self._stopping.is_set():
            try:
                await self.tick()
            except Exception:  # noqa: BLE001  # a defect must not stop it for good
                _LOG.exception("housekeeping failed; it is tried again")
            try:
                await asyncio.wait_for(self._stopping.wait(), _TICK_S)
            except TimeoutError:
                continue

    def stop(self) -> None:
        """End `run` after the step in progress."""
        self._stopping.set()

    async def tick(self) -> None:
        """Consider the logs that have changed, and those that are due."""
        now_ms = self._clock.now_ms()
        logs = {log for log in self._commits.take_touched() if self._has_changed(log)}
        while self._heap and self._heap[0][0] <= now_ms:
            due = heapq.heappop(self._heap)
            if due in self._due:
                logs.add(self._due[due])
        starts: dict[tuple[Topic, TopicConfigs], dict[int, int]] = defaultdict(dict)
        for number, log in enumerate(logs, 1):
            if self._stopping.is_set():
                return
            found = self._topics.topic_of(log)
            if found is None or log.failure is not None:
                self._forget(log)
                continue
            configs = found[0].configs
            start = await self._consider(log, *found, now_ms)
            if start > log.log_start:
                starts[found[0], configs][found[1]] = start
            if number % _TURN_LOGS == 0:
                await asyncio.sleep(0)
        self._is_first = False
        for (topic, configs), wanted in starts.items():
            await self._delete(topic, wanted, configs)

    def _has_changed(self, log: PartitionLog) -> bool:
        known, found = self._known.get(log), self._topics.topic_of(log)
        if known is None or found is None:
            return True
        configs = found[0].configs
        has_size = configs.is_deleting and configs.retention_bytes != NO_LIMIT
        is_same = known.configs is configs and known.tail is log.tail
        return has_size or not is_same or known.stored_end != self._commits.stored_end(log)

    def reconsider(self, log: PartitionLog) -> None:
        """Consider a log at the next tick."""
        known = self._known.get(log)
        if known is not None:
            known.configs = None
        self._commits.touch(log)

    async def _consider(self, log: PartitionLog, topic: Topic, number: int, now_ms: int) -> int:
        """Do what is due, except deleting; return the log start that retention demands."""
        configs = topic.configs
        known = self._known.setdefault(log, _Known())
        stored_end = self._commits.stored_end(log)  # what is stored meanwhile is considered again
        roll_ms = self._roll(log, known, configs, now_ms)
        start, expiry_ms = log.log_start, None
        if configs.is_deleting:
            start, expiry_ms = await self._expired(log, configs, now_ms)
        compact_ms = None
        if configs.is_compacted and self.compactor is not None:
            compact_ms = await self.compactor.consider(log, topic, number, now_ms)
        known.configs, known.tail, known.stored_end = configs, log.tail, stored_end
        self._schedule(
            log, known, [at for at in (roll_ms, expiry_ms, compact_ms) if at is not None]
        )
        return start

    def _roll(
        self, log: PartitionLog, known: _Known, configs: TopicConfigs, now_ms: int
    ) -> int | None:
        """Seal the open segment if it is old; returns when it is, or None if there is none."""
        tail = log.tail
        if tail is None:
            return None
        if tail is not known.tail or not known.tail_since_ms:
            known.tail_since_ms = now_ms
            if self._is_first and tail.index is not None:
                first_ms = tail.index.timestamps_ms[0]
                known.tail_since_ms = min(now_ms, first_ms) if first_ms >= 0 else now_ms
        due_ms = known.tail_since_ms + configs.segment_ms
        return due_ms if now_ms < due_ms else self._seal(log, now_ms)

    def _seal(self, log: PartitionLog, now_ms: int) -> int | None:
        try:
            log.roll()
        except StorageError as error:
            _LOG.warning("%s: open segment could not be sealed: %s", log.folder, error)
            return now_ms + _RETRY_MS
        self._commits.schedule(log)
        return None

    async def _expired(
        self, log: PartitionLog, configs: TopicConfigs, now_ms: int
    ) -> tuple[int, int | None]:
        """Return the log start that retention demands, and when to consider the log again."""
        while True:
            found = expired(
                log.segments,
                size_bytes=log.size_bytes,
                high_watermark=log.high_watermark,
                retention_ms=configs.retention_ms,
                retention_bytes=configs.retention_bytes,
                now_ms=now_ms,
            )
            if found.unread is None:
                break
            due_ms = await self._read_age(log, found.unread, configs.retention_ms, now_ms)
            if due_ms is not None:
                found = found._replace(due_ms=due_ms)
                break
        count, due_ms = found.deletable, found.due_ms
        if count and not log.segments[count - 1].is_sealed and log.tail is log.segments[count - 1]:
            count, due_ms = count - 1, self._seal(log, now_ms) or now_ms
        return (log.segments[count - 1].next_offset if count else log.log_start), due_ms

    async def _read_age(
        self, log: PartitionLog, segment: Segment, retention_ms: int, now_ms: int
    ) -> int | None:
        """Read how old a segment is; returns when to consider it again, None: now."""
        loop = asyncio.get_running_loop()
        oldest_ms = now_ms - retention_ms
        try:
            newest_ms = await loop.run_in_executor(
                self._executor,
                lambda: read_age(segment, self._cache, self._disk, older_than_ms=oldest_ms),
            )
        except (LogmirrorError, OSError) as error:
            if segment.is_deleted and log.failure is None:
                return None
            _LOG.warning("%s: its age could not be read: %s", segment.path, error)
            log.disk_failed(error)
            return now_ms + _RETRY_MS
        return None if segment.newest_ms is not None else newest_ms + retention_ms + 1

    async def _delete(self, topic: Topic, starts: dict[int, int], configs: TopicConfigs) -> None:
        try:
            await self._topics.delete_records(topic, starts, configs)
        except RefusedTopicError:
            return  # the topic was deleted meanwhile, or its settings were changed
        except LogmirrorError as error:
            _LOG.warning("%s: old records could not be deleted: %s", topic.name, error)
            again_ms = self._clock.now_ms() + _RETRY_MS
            for number in starts:
                log = topic.logs[number]
                self._schedule(log, self._known.setdefault(log, _Known()), [again_ms])
            return
        for number, start in starts.items():
            log = topic.logs[number]
            self.reconsider(log)  # there may be more
            _LOG.info("%s-%d: retention deleted the records before %d", topic.name, number, start)

    def _schedule(self, log: PartitionLog, known: _Known, times_ms: list[int]) -> None:
        """Consider a log again at the earliest of some times, and not at the one before."""
        if known.due is not None:
            self._due.pop(known.due, None)
            known.due = None
        if not times_ms:
            return
        self._pushed += 1
        known.due = min(times_ms), self._pushed
        self._due[known.due] = log
        heapq.heappush(self._heap, known.due)
        if len(self._heap) > _SPARE_ENTRIES + 2 * len(self._due):
            self._heap = sorted(self._due)

    def _forget(self, log: PartitionLog) -> None:
        known = self._known.pop(log, None)
        if self.compactor is not None:
            self.compactor.forget(log)
        if known is not None and known.due is not None:
            self._due.pop(known.due, None)
