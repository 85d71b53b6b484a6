"""Compaction of the topics with `cleanup.policy=compact`: when, one partition at a time.

A partition is compacted when the part of it that was not compacted before, its dirty part, is more
than `min.cleanable.dirty.ratio` of it, or when its first record is older than
`max.compaction.lag.ms`. Segments with a record younger than `min.compaction.lag.ms` are left out,
and so are those behind them. How it is done: `log/cleaner`.

How far a partition was compacted is stored when the files are durable. If that is lost, compaction
begins at the log start again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from logmirror.broker.log.retention import first_time, read_age
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from logmirror.broker.log.cleaner import Cleaned, Cleaning, Plan
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.topic import Topic
    from logmirror.broker.topic_configs import TopicConfigs
    from logmirror.broker.topics import Topics
    from logmirror.clock import Clock

_LOG: Final = logging.getLogger(__name__)
_ALWAYS: Final = 2**63 - 1
_RETRY_MS: Final = 600_000
"""After a failure. A damaged segment is reported as often."""

_BLOCKED_MS: Final = 15_000
"""While a transaction is not decided; Kafka's `log.cleaner.backoff.ms`."""


class Replacing(Protocol):
    """Puts compacted segments in the place of others."""

    async def begin(self, log: PartitionLog) -> None:
        """Keep anything else from replacing segments of a log, until `end`.

        Raises:
            UnavailableError: Something else does, and does not end.
        """
        ...

    async def replace(self, log: PartitionLog, cleaned: Cleaned) -> bool:
        """Replace segments, durably, and remove the old ones.

        Returns:
            False: the partition is offline, or one of them was deleted; nothing was changed.

        Raises:
            LogmirrorError, OSError: It could not be made durable.
        """
        ...

    def end(self, log: PartitionLog) -> None:
        """End what `begin` began."""
        ...


class OnDisk:
    """See `Replacing`, and the table in `log/cleaner`.

    Args:
        disk: The system calls.
        executor: For blocking work.
    """

    def __init__(self, disk: Disk, executor: Executor) -> None:
        self._disk, self._executor = disk, executor

    async def begin(self, log: PartitionLog) -> None:
        """See `Replacing.begin`. Nothing else replaces segments."""

    async def replace(self, log: PartitionLog, cleaned: Cleaned) -> bool:
        """See `Replacing.replace`."""
        loop = asyncio.get_running_loop()
        if not log.replace(cleaned.old, cleaned.segment, cleaned.path):
            await loop.run_in_executor(self._executor, self._disk.unlink, cleaned.path)
            return False
        await loop.run_in_executor(self._executor, cleaned.finish, self._disk)
        return True

    def end(self, log: PartitionLog) -> None:
        """See `Replacing.end`."""


class ByPlace:
    """See `Replacing`, for logs of which some are in a bucket.

    Args:
        commits: The logs.
        is_in_bucket: Whether a log is in the bucket.
        in_bucket: Replaces the segments of these.
        on_disk: Replaces those of the others.
    """

    def __init__(
        self,
        commits: GroupCommit,
        is_in_bucket: Callable[[PartitionLog], bool],
        in_bucket: Replacing,
        on_disk: Replacing,
    ) -> None:
        self._commits, self._is_in_bucket = commits, is_in_bucket
        self._in_bucket, self._on_disk = in_bucket, on_disk

    def _of(self, log: PartitionLog) -> Replacing:
        return self._in_bucket if self._is_in_bucket(log) else self._on_disk

    async def begin(self, log: PartitionLog) -> None:
        """See `Replacing.begin`. From then on the log is not moved (`GroupCommit.is_busy`)."""
        await self._commits.arrived(log)
        await self._of(log).begin(log)

    async def replace(self, log: PartitionLog, cleaned: Cleaned) -> bool:
        """See `Replacing.replace`."""
        return await self._of(log).replace(log, cleaned)

    def end(self, log: PartitionLog) -> None:
        """See `Replacing.end`."""
        self._of(log).end(log)


class Compactor:
    """Compacts the logs of one broker. Runs on the event loop.

    Args:
        topics: The topics.
        commits: Waits for the pass when a topic is deleted.
        cache: The cache of sealed segments.
        disk: The system calls.
        store: Where it is stored how far partitions were compacted.
        executor: For the passes; one thread is enough.
        readers: For reading the age of segments, which must not wait for a pass.
        clock: The time by which the age of records is measured.
        done: Called with a log after a pass.
        replacing: Puts compacted segments in the place of others.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts
        self,
        topics: Topics,
        commits: GroupCommit,
        cache: SegmentCache,
        disk: Disk,
        store: MetadataStore,
        executor: Executor,
        readers: Executor,
        clock: Clock,
        done: Callable[[PartitionLog], None],
        replacing: Replacing,
    ) -> None:
        self._topics = topics
        self._commits = commits
        self._cache = cache
        self._disk = disk
        self._store = store
        self._executor = executor
        self._readers = readers
        self._clock = clock
        self._done = done
        self._replacing = replacing
        self._upto = store.compacted()
        self._failed: dict[PartitionLog, int] = {}
        self._queued: dict[PartitionLog, tuple[int, TopicConfigs]] = {}
        self._ready = asyncio.Event()
        self._is_stopping = False

    async def run(self) -> None:
        """Compact what `consider` found, until `stop`."""
        while not self._is_stopping:
            await self._ready.wait()
            await self.run_once()
            self._ready.clear()

    async def run_once(self) -> None:
        """Compact what `consider` has found by now."""
        while self._queued and not self._is_stopping:
            log, (end, configs) = next(iter(self._queued.items()))
            found = self._topics.topic_of(log)
            # With other settings it is considered again, by `done`.
            if found is not None and log.failure is None and found[0].configs is configs:
                work = asyncio.ensure_future(self._compact(log, *found, end))
                self._commits.hold(log, work)
                await asyncio.wait([work])
                if work.exception() is not None:
                    _LOG.error("%s: compaction failed", log.folder, exc_info=work.exception())
                    self._failed[log] = self._clock.now_ms() + _RETRY_MS
            self._queued.pop(log, None)
            self._done(log)

    def stop(self) -> None:
        """End `run`, and the pass in progress without a result."""
        self._is_stopping = True
        self._ready.set()

    def forget(self, log: PartitionLog) -> None:
        """Forget a log that was deleted."""
        self._failed.pop(log, None)
        self._queued.pop(log, None)

    async def consider(
        self, log: PartitionLog, topic: Topic, number: int, now_ms: int
    ) -> int | None:
        """Compact a log if that is due; else return when to consider it again.

        None: when it has another sealed segment, or after the pass. The end of a transaction seals
        no segment, so a log with an ongoing one is considered again after `_BLOCKED_MS`.
        """
        failed_ms = self._failed.get(log, 0)
        if log in self._queued or failed_ms > now_ms:
            return None if log in self._queued else failed_ms
        dirty_from = max(self._upto.get((topic.topic_id.bytes, number), 0), log.log_start)
        segments, configs = self._stored(log), topic.configs
        dirty = [segment for segment in segments if segment.next_offset > dirty_from]
        if not configs.is_compacted:
            return None
        is_blocked = log.last_stable_offset < self._commits.stored_end(log)
        again_ms = now_ms + _BLOCKED_MS if is_blocked else _ALWAYS
        if not dirty:
            return again_ms if is_blocked else None
        try:
            due_ms, end = await self._due(segments, dirty, configs, now_ms)
        except (LogmirrorError, OSError) as error:
            if not any(segment.is_deleted for segment in dirty):
                _LOG.warning("%s: its segments could not be read: %s", log.folder, error)
                log.disk_failed(error)
            return now_ms + _RETRY_MS
        if due_ms > now_ms:
            due_ms = min(due_ms, again_ms)
            return due_ms if due_ms < _ALWAYS else None
        self._queued[log] = end, configs
        self._ready.set()
        return None

    async def _due(
        self, segments: list[Segment], dirty: list[Segment], configs: TopicConfigs, now_ms: int
    ) -> tuple[int, int]:
        """Return when to compact, at the earliest, and up to which offset."""
        count, later_ms = await self._old_enough(dirty, configs, now_ms)
        if not count:
            return later_ms, 0
        end = dirty[count - 1].next_offset
        dirty_bytes = sum(segment.size_bytes for segment in dirty[:count])
        total = dirty_bytes + sum(s.size_bytes for s in segments if s.next_offset <= dirty[0].first)
        if total and dirty_bytes / total > configs.min_cleanable_dirty_ratio:
            return now_ms, end
        if configs.max_compaction_lag_ms == _ALWAYS:
            return later_ms, end
        loop = asyncio.get_running_loop()
        first_ms = await loop.run_in_executor(self._readers, first_time, dirty[0], self._disk)
        return min(first_ms + configs.max_compaction_lag_ms, later_ms), end

    async def _old_enough(
        self, dirty: list[Segment], configs: TopicConfigs, now_ms: int
    ) -> tuple[int, int]:
        """Return how many segments are beyond the lag, and when there are more."""
        lag_ms = configs.min_compaction_lag_ms
        for number, segment in enumerate(dirty) if lag_ms else ():
            newest_ms = segment.newest_ms
            if newest_ms is None:
                read = functools.partial(read_age, segment, older_than_ms=_ALWAYS)
                loop = asyncio.get_running_loop()
                newest_ms = await loop.run_in_executor(self._readers, read, self._cache, self._disk)
            if newest_ms + lag_ms > now_ms:
                return number, newest_ms + lag_ms
        return len(dirty), _ALWAYS

    def _stored(self, log: PartitionLog) -> list[Segment]:
        """Return the segments at the start of a log that can be replaced.

        They end before the first transaction that is not decided, as a pass could not go beyond it.
        """
        end = min(self._commits.stored_end(log), log.last_stable_offset)
        return list(
            itertools.takewhile(lambda one: one.is_sealed and one.next_offset <= end, log.segments)
        )

    async def _in_thread(self, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401  # what `call` returns
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    async def _compact(self, log: PartitionLog, topic: Topic, number: int, end: int) -> None:
        key = topic.topic_id.bytes, number
        segments: list[Segment] = []
        started_ms = self._clock.monotonic_ms()
        try:
            await self._replacing.begin(log)
            segments = [segment for segment in self._stored(log) if segment.next_offset <= end]
            if not segments:
                return  # deleted meanwhile, or merged with later ones; `done` starts it again
            plan = self._plan(log, topic, key, segments)
            cleaning: Cleaning = await self._in_thread(_new_cleaning, self._disk, plan)
            is_complete = await self._pass(log, cleaning)
        except (LogmirrorError, OSError) as error:
            if self._is_stopping or log.failure is not None:
                return
            if any(segment.is_deleted for segment in segments):
                return  # `done` starts it again
            _LOG.error("%s: could not be compacted: %s", log.folder, error)  # it names the place
            log.disk_failed(error)
            self._failed[log] = self._clock.now_ms() + _RETRY_MS
            return
        finally:
            self._replacing.end(log)
        if not is_complete:
            return
        before, after = sum(s.size_bytes for s in segments), log.size_bytes
        took_s = (self._clock.monotonic_ms() - started_ms) / 1000
        await self._in_thread(self._store.set_compacted, *key, cleaning.upto)
        self._upto[key] = cleaning.upto
        _LOG.info(
            "%s: compacted up to offset %d in %.1f s: %d bytes, %d records removed; %d bytes now",
            *(log.folder, cleaning.upto, took_s, before, cleaning.removed, after),
        )

    def _plan(
        self, log: PartitionLog, topic: Topic, key: tuple[bytes, int], segments: list[Segment]
    ) -> dict[str, Any]:
        """Return the fields of a `Plan`."""
        producers = log.producers.items()
        behind = log.readable_segments()[len(segments) :]
        is_whole = log.durable >= log.high_watermark
        if not is_whole:  # a marker that a power loss can undo decides nothing
            behind = [(segment, size) for segment, size in behind if segment.is_sealed]
        archive_end = max((s.next_offset for s in log.segments if not s.is_exact), default=0)
        aborted = log.producers.transactions.aborted_between(archive_end, archive_end)
        return {
            "folder": log.folder,
            "segments": segments,
            "behind": behind,
            "dirty_from": max(self._upto.get(key, 0), log.log_start),
            "held": [known.batches[-1].base_offset for _, known in producers if known.batches],
            "segment_bytes": topic.configs.segment_bytes,
            "now_ms": self._clock.now_ms(),
            "archive_end": archive_end,
            "crossing": {one.last_offset for one in aborted},
            "is_whole": is_whole,
            "delete_retention_ms": topic.configs.delete_retention_ms,
            "must_stop": lambda: self._is_stopping or log.failure is not None,
        }

    async def _pass(self, log: PartitionLog, cleaning: Cleaning) -> bool:
        """Replace the segments; returns whether all were."""
        if not await self._in_thread(cleaning.prepare):
            return False
        groups = cleaning.groups()
        while (cleaned := await self._in_thread(next, groups, None)) is not None:
            try:
                if not await self._replacing.replace(log, cleaned):
                    return False
            except BaseException:
                await self._in_thread(self._disk.unlink, cleaned.path)
                raise
        return not self._is_stopping and log.failure is None


def _new_cleaning(disk: Disk, plan: dict[str, Any]) -> Cleaning:
    # The kernels take a compiler, which a broker without compacted topics does not need.
    from logmirror.broker.log import cleaner  # noqa: PLC0415  # see above

    made: Plan = cleaner.Plan(**plan)
    return cleaner.Cleaning(disk, made)
