"""The topics of a running broker: which there are, under which names and ids, with which logs.

Topics are created and deleted one at a time. A creation is durable before anybody is told; a
deletion is durable first, then the files go, then the name is free again (see `metadata`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from logmirror.broker.metadata import MetadataStore, TopicRow, new_uuid
from logmirror.broker.partition_log import PartitionLog
from logmirror.broker.recovery import recover
from logmirror.broker.topic_configs import TopicConfigs
from logmirror.errors import LogmirrorError, PositionError, UnavailableError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Coroutine, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.disk import Disk
    from logmirror.broker.group_commit import GroupCommit
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.segment_cache import SegmentCache

_Result = TypeVar("_Result")
_LOG: Final = logging.getLogger(__name__)
_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
MAX_TOPIC_PARTITIONS: Final = 10_000


class RefusedTopicError(Exception):
    """A topic that cannot be created or deleted; `code` is what Kafka answers."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class TopicDeletedError(PositionError):
    """The topic was deleted while somebody waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic and the logs of its partitions, by number."""

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
        raise RefusedTopicError(ErrorCode.invalid_topic_exception, reason)


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
                folder, disk=self._disk, cache=self._cache, segment_bytes=configs.segment_bytes
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
            raise RefusedTopicError(ErrorCode.topic_already_exists, "topic exists")
        if not 1 <= partition_count <= MAX_TOPIC_PARTITIONS:
            raise RefusedTopicError(
                ErrorCode.invalid_partitions, f"partitions: 1 to {MAX_TOPIC_PARTITIONS}"
            )
        if self.partition_count + partition_count > self._options.max_partitions:
            reason = f"this broker has at most {self._options.max_partitions} partitions"
            raise RefusedTopicError(ErrorCode.policy_violation, reason)
        if self._folder(name).exists():
            reason = "the log directory has a folder of that name that belongs to no topic"
            raise RefusedTopicError(ErrorCode.invalid_topic_exception, reason)
        return TopicConfigs(configs, self._options)

    async def delete(self, topic: Topic) -> None:
        """Delete a topic and its records; when this returns, both are gone for good.

        Raises:
            RefusedTopicError: Somebody else deleted it meanwhile.
            UnavailableError: The database could not be written.
        """
        await self._to_the_end(self._delete(topic))

    async def _delete(self, topic: Topic) -> None:
        async with self._changing:
            if self.by_id.get(topic.topic_id.bytes) is not topic:
                raise RefusedTopicError(ErrorCode.unknown_topic_or_partition, "no such topic")
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
