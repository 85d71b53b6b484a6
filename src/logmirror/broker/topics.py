"""The topics of a running broker, by name and by topic ID, with the logs of their partitions.

Changes are made one at a time, and are durable before they are reported. A deletion, of a topic or
of records, is made durable first; then the files are removed (see `metadata`). What a deleted topic
has in a bucket is removed in the background: it may be thousands of objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from logmirror.broker.changes import Changes, in_time
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.durable_ends import BackgroundFlush
from logmirror.broker.metadata import MetadataStore, TopicRow, new_uuid
from logmirror.broker.moves.move import Move
from logmirror.broker.partitions import Partitions
from logmirror.broker.topic import RefusedTopicError, Topic, TopicDeletedError, check_name
from logmirror.broker.topic_configs import TopicConfigs
from logmirror.broker.topic_removal import TopicRemoval
from logmirror.errors import UsageError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.moves.mover import Moves
    from logmirror.broker.options import BrokerOptions
    from logmirror.errors import LogmirrorError

_LOG: Final = logging.getLogger(__name__)
MAX_TOPIC_PARTITIONS: Final = 10_000
ARCHIVE_CONFIGS: Final = {"cleanup.policy": "compact"}
"""Settings of topics of archives. Offsets may be missing, as in a compacted topic, and a mirror
takes `compact` as the cause. Nothing is compacted or deleted."""


class Topics:
    """All topics. Methods run on the event loop; blocking work runs in `executor`."""

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts, built in one place
        self,
        options: BrokerOptions,
        store: MetadataStore,
        executor: Executor,
        disk: Disk,
        cache: SegmentCache,
        commits: GroupCommit,
        bucket: BucketLogs | None = None,
    ) -> None:
        self._commits = commits
        self._bucket = bucket
        self._options = options
        self.partitions = Partitions(options, store, disk, cache, bucket)
        self.dirs = self.partitions.dirs
        self.moves: Moves | None = None
        """Those between log directories; None if the only one is in a bucket."""
        self._store = store
        self._executor = executor
        self._disk = disk
        self._ends_flush = BackgroundFlush(self.partitions.ends)
        self._changes = Changes(options.change_timeout_s)
        self.removal = TopicRemoval(store, executor, disk, self.dirs, bucket)
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[bytes, Topic] = {}
        self.version = 0
        """Grows with each topic that is created or deleted."""

        self.when_deleted: Callable[[str], None] = lambda _: None
        """Called with the name of each deleted topic."""

        self.when_added: Callable[[str, bytes], None] = lambda *_: None
        """Called with name and ID of each topic that is created or mounted."""

        self.has_unlisted_archives = False
        """Whether a name that is not known may be that of a topic of an archive."""

    @property
    def partition_count(self) -> int:
        """Partitions of all topics together."""
        return sum(len(topic.logs) for topic in self.by_name.values())

    def watch(self, when_failed: Callable[..., None]) -> None:
        """Report errors of the disks to a function; called before `load`. See `dir_failures`."""
        self.partitions.when_failed = self.partitions.ends.when_failed = when_failed

    def disk_failed(self, error: Exception) -> None:
        """Report an error of a disk; which one is not known."""
        self.partitions.when_failed(error)

    def lose(self, log_dir: Path, failure: LogmirrorError) -> None:
        """Take the partitions of a log directory that failed offline, and end its moves."""
        for topic in self.by_name.values():
            for log in topic.logs:
                if log.folder.parent.parent == log_dir and log.failure is None:
                    self._commits.take_offline(log, failure.copy())
        if self.moves is not None:
            self.moves.lose(log_dir, failure)

    def load(self) -> None:
        """Open all topics and finish interrupted deletions. Blocks; runs before the broker listens.

        A partition that cannot be opened is offline; the others are not affected.
        """
        rows = self._store.topics()
        names = {row.name for row in rows}
        for row in self._store.deleting():
            self.removal.remove(row, is_free=row.name not in names)
        self._check_accepted(rows)
        self.partitions.begin(rows)
        for row in rows:
            self._admit(row, self.partitions.opened(row))
            for log in self.by_name[row.name].logs:
                self._commits.touch(log)
        self.partitions.finish()
        self.removal.remove_residences()

    def follow(self, moves: Moves) -> None:
        """Continue the moves between log directories, now that all partitions are open."""
        self.moves = moves
        moves.when_moved, moves.when_failed = self.dirs.moved, self.partitions.when_failed
        unfinished, folders = self.partitions.left_over()
        moves.open(
            [
                Move(row[:2], self.by_id[row.topic_id].logs[row.partition], target, row.nonce)
                for row, target in unfinished
            ],
            folders,
        )

    def _check_accepted(self, rows: list[TopicRow]) -> None:
        known = {f"{row.name}-{n}" for row in rows for n in range(row.partition_count)}
        if unknown := set(self._options.accept_data_loss) - known:
            raise UsageError(
                "no such partition",
                hint="write --accept-data-loss TOPIC-PARTITION, with the names of the broker's log",
                partitions=sorted(unknown),
            )

    async def close(self) -> None:
        """End the moves in progress, which the next start continues, and flush the durable ends."""
        if self.moves is not None:
            await self.moves.close()
        await self._ends_flush.close()

    async def _new_logs(self, folders: list[Path], configs: TopicConfigs) -> list[PartitionLog]:
        """Return logs without records; thousands of them take a while, so a worker makes them."""

        def make() -> list[PartitionLog]:
            return [self.partitions.empty_log(folder, configs) for folder in folders]

        return await asyncio.get_running_loop().run_in_executor(self._executor, make)

    def topic_of(self, log: PartitionLog) -> tuple[Topic, int] | None:
        """Return the topic and the partition number of a log; None if it was deleted."""
        topic, number = self.by_name.get(log.folder.parent.name), int(log.folder.name)
        if topic is None or log not in topic.logs[number : number + 1]:
            return None
        return topic, number

    def _admit(self, row: TopicRow, logs: list[PartitionLog]) -> Topic:
        configs = TopicConfigs(row.configs, self._options)
        self.partitions.share(row, range(len(logs)), logs, configs)
        topic = Topic(
            name=row.name,
            topic_id=row.topic_id,
            configs=configs,
            logs=tuple(logs),
        )
        self._add(topic)
        return topic

    def _add(self, topic: Topic) -> None:
        self.by_name[topic.name] = topic
        self.by_id[topic.topic_id.bytes] = topic
        self.version += 1
        self.when_added(topic.name, topic.topic_id.bytes)

    async def create_missing(self) -> None:
        """Create the topics that the options name and that do not exist.

        Raises:
            UsageError: One is not allowed.
            UnavailableError: The database could not be written.
        """
        for name, partition_count in self._options.topics:
            try:
                if name not in self.by_name:
                    await self.create(name, partition_count, {})
            except RefusedTopicError as refused:
                raise UsageError(
                    "topic cannot be created", topic=name, reason=refused.reason
                ) from refused

    async def create(
        self, name: str, partition_count: int, configs: Mapping[str, str], *, dry_run: bool = False
    ) -> Topic | None:
        """Create a topic; returns None for a successful dry run.

        Raises:
            RefusedTopicError: The topic exists, or its name, count or settings are not allowed.
            UnavailableError: The database could not be written.
        """
        return await self._changes.run(self._create(name, partition_count, configs, dry_run))

    async def _create(
        self, name: str, partition_count: int, configs: Mapping[str, str], dry_run: bool
    ) -> Topic | None:
        count = self._options.default_partitions if partition_count == -1 else partition_count
        checked = self._check_new(name, count, configs)
        if dry_run:
            return None
        row = TopicRow(name=name, topic_id=new_uuid(), partition_count=count, configs=dict(configs))
        loop = asyncio.get_running_loop()
        with self.partitions.placing(row, range(count)) as (folders, residences):
            row = replace(row, residences=residences)
            await loop.run_in_executor(self._executor, self._store.create_topic, row)
        logs = await self._new_logs(folders, checked)
        _LOG.info("topic %s created with %d partitions", name, count)
        return self._admit(row, logs)

    def _check_new(
        self, name: str, partition_count: int, configs: Mapping[str, str]
    ) -> TopicConfigs:
        check_name(name)
        if name in self.by_name:
            raise RefusedTopicError(ErrorCode.TOPIC_ALREADY_EXISTS, "topic exists")
        if not 1 <= partition_count <= MAX_TOPIC_PARTITIONS:
            raise RefusedTopicError(
                ErrorCode.INVALID_PARTITIONS, f"partitions: 1 to {MAX_TOPIC_PARTITIONS}"
            )
        self._check_room(partition_count)
        if name in self.removal.left_behind:
            reason = (
                "files of a deleted topic of this name are left; "
                "the next start with all log directories removes them"
            )
            raise RefusedTopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        if self.dirs.folders(name):
            reason = "the log directory holds a folder of this name that belongs to no topic"
            raise RefusedTopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        return TopicConfigs(configs, self._options)

    def _check_room(self, more: int) -> None:
        if not self.dirs.has_room:
            reason = "all log directories are offline or cordoned (cordoned.log.dirs)"
            raise RefusedTopicError(ErrorCode.INVALID_REPLICATION_FACTOR, reason)
        if self.partition_count + more > self._options.max_partitions:
            reason = f"this broker allows at most {self._options.max_partitions} partitions"
            raise RefusedTopicError(ErrorCode.POLICY_VIOLATION, reason)

    def _check_there(self, topic: Topic) -> None:
        """Refuse a topic that was deleted while the change waited."""
        if self.by_id.get(topic.topic_id.bytes) is not topic:
            raise RefusedTopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
        if topic.is_archive:
            reason = "the topic is mounted from an archive, read-only"
            raise RefusedTopicError(ErrorCode.POLICY_VIOLATION, reason)

    def mount(self, name: str, topic_id: uuid.UUID, logs: tuple[PartitionLog, ...]) -> None:
        """Add a topic of an archive, or add partitions to one."""
        topic = self.by_name.get(name)
        if topic is not None:
            topic.logs = logs
            self.version += 1
        else:
            configs = TopicConfigs(ARCHIVE_CONFIGS, self._options)
            topic = Topic(name=name, topic_id=topic_id, configs=configs, logs=logs, is_archive=True)
            self._add(topic)

    async def add_partitions(self, topic: Topic, count: int, *, dry_run: bool) -> None:
        """Increase a topic's partition count to `count`.

        Raises:
            RefusedTopicError: The count is not allowed.
            UnavailableError: The database could not be written.
        """
        await self._changes.run(self._add_partitions(topic, count, dry_run))

    async def _add_partitions(self, topic: Topic, count: int, dry_run: bool) -> None:
        self._check_there(topic)
        before = len(topic.logs)
        if not before < count <= MAX_TOPIC_PARTITIONS:
            reason = f"partitions: {before + 1} to {MAX_TOPIC_PARTITIONS}"
            raise RefusedTopicError(ErrorCode.INVALID_PARTITIONS, reason)
        self._check_room(count - before)
        if dry_run:
            return
        loop = asyncio.get_running_loop()
        row = TopicRow(name=topic.name, topic_id=topic.topic_id, partition_count=count, configs={})
        with self.partitions.placing(row, range(before, count)) as (folders, residences):
            row = replace(row, residences=residences)
            await loop.run_in_executor(
                self._executor, self._store.set_partition_count, topic.name, count, residences
            )
        logs = await self._new_logs(folders, topic.configs)
        self.partitions.share(row, range(before, count), logs, topic.configs)
        topic.logs += tuple(logs)
        _LOG.info("topic %s: partitions increased to %d", topic.name, count)

    async def set_configs(
        self,
        topic: Topic,
        changed: Callable[[TopicConfigs], Mapping[str, str]],
        *,
        dry_run: bool,
    ) -> None:
        """Change a topic's settings. They apply to later appends.

        Args:
            topic: The topic.
            changed: Returns the new values for the current settings, which an earlier request may
                have changed. May raise RefusedConfigError.
            dry_run: Only validate.

        Raises:
            RefusedConfigError: A setting or its value is not supported.
            RefusedTopicError: The topic was deleted meanwhile.
            UnavailableError: The database could not be written.
        """
        await self._changes.run(self._set_configs(topic, changed, dry_run))

    async def _set_configs(
        self,
        topic: Topic,
        changed: Callable[[TopicConfigs], Mapping[str, str]],
        dry_run: bool,
    ) -> None:
        self._check_there(topic)
        configs = TopicConfigs(changed(topic.configs), self._options)
        if dry_run:
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._executor, self._store.set_configs, topic.name, configs.values
        )
        topic.configs = configs
        for log in topic.logs:
            log.segment_bytes = configs.segment_bytes
            self._commits.touch(log)
            log.flush_rule = self.partitions.flush_rule(configs)
            self._commits.rule_changed(log)
        _LOG.info("topic %s: settings changed to %s", topic.name, dict(configs.values))

    async def delete_records(
        self, topic: Topic, starts: Mapping[int, int], configs: TopicConfigs | None = None
    ) -> None:
        """Advance log start offsets and remove the files before them.

        Args:
            topic: The topic.
            starts: New log start offset by partition, at most its high watermark. A partition whose
                log start is higher already does not change.
            configs: The settings that demand it, if they do.

        Raises:
            RefusedTopicError: The topic was deleted meanwhile, or it has other settings.
            UnavailableError: The database could not be written.
        """
        began_s = asyncio.get_running_loop().time()
        logs = await self._changes.run(self._delete_records(topic, starts, configs))
        removal = asyncio.ensure_future(self._removed(logs))
        await in_time(removal, self._changes.left_s(began_s))

    async def _removed(self, logs: Iterable[PartitionLog]) -> None:
        for log in logs:
            await self._commits.wait_removed(log)

    async def _delete_records(
        self, topic: Topic, starts: Mapping[int, int], configs: TopicConfigs | None
    ) -> list[PartitionLog]:
        self._check_there(topic)
        if configs is not None and topic.configs is not configs:
            raise RefusedTopicError(ErrorCode.POLICY_VIOLATION, "its settings were changed")
        later = {n: start for n, start in starts.items() if start > topic.logs[n].log_start}
        for log, start in [(topic.logs[number], start) for number, start in later.items()]:
            if start > log.durable:  # a power loss must not leave a log that ends before it
                await self._commits.flushed(log, start)
        if later:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                self._executor, self._store.set_log_starts, topic.name, later
            )
        for number, start in later.items():
            topic.logs[number].advance_start(start)
            self._commits.remove_deleted(topic.logs[number])
        return [topic.logs[number] for number in later]

    def _is_away(self, log: PartitionLog) -> bool:
        """Whether the directory of a log has failed: the next start removes its files."""
        return log.folder.parent.parent in self.dirs.offline

    async def delete(self, topic: Topic) -> None:
        """Delete a topic, its records and its files.

        Raises:
            RefusedTopicError: The topic was deleted meanwhile by another request.
            UnavailableError: The database could not be written.
        """
        await self._changes.run(self._delete(topic))

    async def _delete(self, topic: Topic) -> None:
        self._check_there(topic)
        loop = asyncio.get_running_loop()
        id_, left = topic.topic_id, self.partitions.left_of(topic.topic_id.bytes)
        begin = self.removal.begin
        async with self.moves.held(topic.logs) if self.moves else contextlib.nullcontext():
            placed = {*left, *await self.removal.sync_names(topic.name, topic.logs)}
            await loop.run_in_executor(self._executor, begin, topic.name, id_, topic.logs, placed)
            del self.by_name[topic.name], self.by_id[topic.topic_id.bytes]
            self.version += 1
            self.when_deleted(topic.name)
            for log in topic.logs:
                log.take_offline(TopicDeletedError("topic was deleted", topic=topic.name))
                log.producers.clear()
                self._commits.touch(log)
            folders = [log.folder for log in topic.logs]
            if self.moves is not None:
                folders += await self.moves.forget(topic.logs)
        for log in topic.logs:
            await self._commits.quiesce(log, self._is_away)
        self.partitions.ends.forget(topic.topic_id.bytes, len(topic.logs))
        self.dirs.remove(log.folder for log in topic.logs)
        row = TopicRow(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_count=len(topic.logs),
            configs={},
        )
        try:
            remove = self.removal.remove
            await loop.run_in_executor(self._executor, remove, row, topic.logs, folders, left)
        except OSError as error:
            self.removal.left_behind.add(topic.name)
            self.disk_failed(error)
            raise
        _LOG.info("topic %s deleted", topic.name)
