"""The topics of a running broker: which there are, under which names and ids, with which logs.

Topics are changed one at a time. A change is durable before anybody is told; a deletion, of a topic
or of records, is durable first, and then the files go (see `metadata`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.recovery import recover
from logmirror.broker.metadata import MetadataStore, TopicRow, new_uuid
from logmirror.broker.topic_configs import TopicConfigs
from logmirror.errors import LogmirrorError, PositionError, UnavailableError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.options import BrokerOptions

_Result = TypeVar("_Result")
_LOG: Final = logging.getLogger(__name__)
_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
MAX_TOPIC_PARTITIONS: Final = 10_000


class RefusedTopicError(Exception):
    """A topic that cannot be created, changed or deleted; `code` is what Kafka answers."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class TopicDeletedError(PositionError):
    """The topic was deleted while somebody waited for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Topic:
    """A topic and the logs of its partitions, by number; `Topics` alone changes it."""

    name: str
    topic_id: uuid.UUID
    configs: TopicConfigs
    logs: tuple[PartitionLog, ...]


def check_name(name: str) -> None:
    """Refuse what Kafka refuses, and names that begin with a dot: ours are hidden like that."""
    if not _LEGAL_NAME.fullmatch(name):
        reason = (
            "a topic name has 1 to 249 letters, digits, dots, dashes and underscores, "
            "and does not begin with a dot"
        )
        raise RefusedTopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)


class Topics:
    """All topics. Methods are called on the event loop; what blocks runs in `executor`."""

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts, built in one place
        self,
        options: BrokerOptions,
        store: MetadataStore,
        executor: Executor,
        disk: Disk,
        cache: SegmentCache,
        commits: GroupCommit,
    ) -> None:
        self._commits = commits
        self._options = options
        self._store = store
        self._executor = executor
        self._disk = disk
        self._cache = cache
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Future[Any]] = set()
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[bytes, Topic] = {}

    @property
    def partition_count(self) -> int:
        """Partitions of all topics together."""
        return sum(len(topic.logs) for topic in self.by_name.values())

    def load(self) -> None:
        """Open everything that is stored; blocking, before the broker listens.

        A partition that cannot be opened is offline, the others are not its concern.
        """
        for row in self._store.deleting():
            self._remove_files(row.name)
            self._store.end_deletion(row.name)
        for row in self._store.topics():
            self._admit(
                row, [self._recovered(row, number) for number in range(row.partition_count)]
            )

    def _recovered(self, row: TopicRow, partition: int) -> PartitionLog:
        folder = self._folder(row.name) / str(partition)
        configs = TopicConfigs(row.configs, self._options)
        try:
            return recover(
                folder,
                disk=self._disk,
                cache=self._cache,
                segment_bytes=configs.segment_bytes,
                log_start=row.log_starts.get(partition, 0),
            )
        except (LogmirrorError, OSError) as error:
            _LOG.exception("%s-%d: offline, its log could not be opened", row.name, partition)
            log = self._empty_log(folder, configs)
            failure = error if isinstance(error, LogmirrorError) else None
            log.take_offline(
                failure or UnavailableError("log could not be opened", cause=str(error))
            )
            return log

    def _empty_log(self, folder: Path, configs: TopicConfigs) -> PartitionLog:
        return PartitionLog(
            folder, disk=self._disk, cache=self._cache, segment_bytes=configs.segment_bytes
        )

    def _folder(self, name: str) -> Path:
        return self._options.log_dir / name

    def _admit(self, row: TopicRow, logs: list[PartitionLog]) -> Topic:
        topic = Topic(
            name=row.name,
            topic_id=row.topic_id,
            configs=TopicConfigs(row.configs, self._options),
            logs=tuple(logs),
        )
        self.by_name[row.name] = topic
        self.by_id[row.topic_id.bytes] = topic
        return topic

    async def create(
        self, name: str, partition_count: int, configs: Mapping[str, str], *, dry_run: bool = False
    ) -> Topic | None:
        """Create a topic; None for a dry run that would have worked.

        Raises:
            RefusedTopicError: It is there already, or something about it is not allowed.
            UnavailableError: The database could not be written.
        """
        return await self._to_the_end(self._create(name, partition_count, configs, dry_run))

    async def _to_the_end(self, change: Coroutine[Any, Any, _Result]) -> _Result:
        """Carry a change out whole, also when the client that asked for it goes away meanwhile.

        Cancelled between the database and memory it would leave a topic that is there and is not.
        """
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _create(
        self, name: str, partition_count: int, configs: Mapping[str, str], dry_run: bool
    ) -> Topic | None:
        async with self._changing:
            count = self._options.default_partitions if partition_count == -1 else partition_count
            checked = self._check_new(name, count, configs)
            if dry_run:
                return None
            row = TopicRow(
                name=name, topic_id=new_uuid(), partition_count=count, configs=dict(configs)
            )
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, self._store.create_topic, row)
            folder = self._folder(name)
            logs = [self._empty_log(folder / str(number), checked) for number in range(count)]
            _LOG.info("created topic %s with %d partitions", name, count)
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
        if self._folder(name).exists():
            reason = "the log directory has a folder of that name that belongs to no topic"
            raise RefusedTopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        return TopicConfigs(configs, self._options)

    def _check_room(self, more: int) -> None:
        if self.partition_count + more > self._options.max_partitions:
            reason = f"this broker has at most {self._options.max_partitions} partitions"
            raise RefusedTopicError(ErrorCode.POLICY_VIOLATION, reason)

    def _check_there(self, topic: Topic) -> None:
        """Refuse a topic that somebody deleted while the change waited for its turn."""
        if self.by_id.get(topic.topic_id.bytes) is not topic:
            raise RefusedTopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")

    async def add_partitions(self, topic: Topic, count: int, *, dry_run: bool) -> None:
        """Give a topic more partitions, `count` in the end.

        Raises:
            RefusedTopicError: The number is not allowed.
            UnavailableError: The database could not be written.
        """
        await self._to_the_end(self._add_partitions(topic, count, dry_run))

    async def _add_partitions(self, topic: Topic, count: int, dry_run: bool) -> None:
        async with self._changing:
            self._check_there(topic)
            before = len(topic.logs)
            if not before < count <= MAX_TOPIC_PARTITIONS:
                reason = f"topic has {before} partitions; more, and at most {MAX_TOPIC_PARTITIONS}"
                raise RefusedTopicError(ErrorCode.INVALID_PARTITIONS, reason)
            self._check_room(count - before)
            if dry_run:
                return
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                self._executor, self._store.set_partition_count, topic.name, count
            )
            folder = self._folder(topic.name)
            topic.logs += tuple(
                self._empty_log(folder / str(number), topic.configs)
                for number in range(before, count)
            )
            _LOG.info("topic %s has %d partitions", topic.name, count)

    async def set_configs(
        self,
        topic: Topic,
        changed: Callable[[TopicConfigs], Mapping[str, str]],
        *,
        dry_run: bool,
    ) -> None:
        """Change a topic's settings; what is appended from then on follows them.

        Args:
            topic: Whose.
            changed: Makes the new settings of those there are, which may be others than a moment
                ago. It may raise what `TopicConfigs` does.
            dry_run: Only look whether it would work.

        Raises:
            RefusedConfigError: A setting or its value is not offered.
            RefusedTopicError: Somebody deleted the topic meanwhile.
            UnavailableError: The database could not be written.
        """
        await self._to_the_end(self._set_configs(topic, changed, dry_run))

    async def _set_configs(
        self,
        topic: Topic,
        changed: Callable[[TopicConfigs], Mapping[str, str]],
        dry_run: bool,
    ) -> None:
        async with self._changing:
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
            _LOG.info("topic %s has settings %s", topic.name, dict(configs.values))

    async def delete_records(self, topic: Topic, starts: Mapping[int, int]) -> None:
        """Let partitions begin later, for good; when this returns, the files below are gone, too.

        Args:
            topic: Whose.
            starts: By partition, the first offset that stays; not beyond its watermark. Where the
                log begins later already, nothing happens.

        Raises:
            RefusedTopicError: Somebody deleted the topic meanwhile.
            UnavailableError: The database could not be written.
        """
        await self._to_the_end(self._delete_records(topic, starts))

    async def _delete_records(self, topic: Topic, starts: Mapping[int, int]) -> None:
        async with self._changing:
            self._check_there(topic)
            later = {n: start for n, start in starts.items() if start > topic.logs[n].log_start}
            if later:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(
                    self._executor, self._store.set_log_starts, topic.name, later
                )
            for number, start in later.items():
                topic.logs[number].advance_start(start)
                self._commits.remove_deleted(topic.logs[number])
        for number in later:
            await self._commits.wait_removed(topic.logs[number])

    async def delete(self, topic: Topic) -> None:
        """Delete a topic and its records; when this returns, both are gone for good.

        Raises:
            RefusedTopicError: Somebody else deleted it meanwhile.
            UnavailableError: The database could not be written.
        """
        await self._to_the_end(self._delete(topic))

    async def _delete(self, topic: Topic) -> None:
        async with self._changing:
            self._check_there(topic)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, self._store.begin_deletion, topic.name)
            del self.by_name[topic.name], self.by_id[topic.topic_id.bytes]
            for log in topic.logs:
                log.take_offline(TopicDeletedError("topic was deleted", topic=topic.name))
            for log in topic.logs:
                await self._commits.settle(log)
            await loop.run_in_executor(self._executor, self._remove_files, topic.name)
            await loop.run_in_executor(self._executor, self._store.end_deletion, topic.name)
            _LOG.info("deleted topic %s", topic.name)

    def _remove_files(self, name: str) -> None:
        folder = self._folder(name)
        if folder.exists():
            shutil.rmtree(folder)
            self._disk.sync_folder(folder.parent)
