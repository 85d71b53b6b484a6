"""The logs of partitions: opened at a start, made for new partitions, in their log directories."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.durable_ends import DurableEnd, DurableEnds
from logmirror.broker.log.flush_rule import FlushRule
from logmirror.broker.log.open_segments import DamagedLogError
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.producer_limit import ProducerLimit
from logmirror.broker.log.recovery import recover
from logmirror.broker.log_dirs.placement import LogDirs, PlaceError, ends_path
from logmirror.broker.moves.leftovers import Leftovers
from logmirror.broker.topic_configs import TopicConfigs
from logmirror.errors import LogmirrorError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.durable_ends import EndSlot
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import MetadataStore, TopicRow
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.place_rows import MoveRow

_LOG: Final = logging.getLogger(__name__)


class Partitions:
    """Opens and makes the logs of partitions.

    Args:
        options: The broker's settings.
        store: The broker's database.
        disk: The system calls.
        cache: Of the logs.
        bucket: The log directory in a bucket, if there is one.

    Raises:
        UsageError: The directory with the durable ends was not given.
    """

    def __init__(
        self,
        options: BrokerOptions,
        store: MetadataStore,
        disk: Disk,
        cache: SegmentCache,
        bucket: BucketLogs | None,
    ) -> None:
        self._options, self._store = options, store
        self._disk, self._cache, self._bucket = disk, cache, bucket
        self.dirs = LogDirs(options.disk_dirs, bucket=options.bucket, work_dir=options.log_dir)
        if bucket is not None and options.disk_dirs:
            store.place_explicitly()
        self._is_explicit = bucket is not None and store.is_placed_explicitly
        self.ends = DurableEnds(self._ends_path(), disk)
        if self._is_explicit and options.disk_dirs:
            store.note_disks()
        if len(self.dirs.paths) > 1:
            store.note_several_dirs()
        self._producers = ProducerLimit(options.max_producers)
        self.when_failed: Callable[..., None] = lambda _error, *_paths: None
        """Called after an error of a disk, with paths in the log directories; see `suspect` in
        `dir_failures`."""

        self._leftovers: Leftovers | None = None
        self._away: set[tuple[bytes, int]] = set()
        self._older: dict[tuple[bytes, int], DurableEnd] = {}
        self._new_ends: list[tuple[EndSlot, DurableEnd]] = []
        self._synced: set[Path] = set()

    def _ends_path(self) -> Path:
        """Return the path of the durable ends: on a disk, if a log directory is."""
        dirs = self._options.disk_dirs
        path = ends_path(dirs or self._options.log_dirs)
        if self._is_explicit and dirs and self._store.has_disks and not path.exists():
            raise UsageError(
                "a log directory on a disk is missing",
                hint="give all directories that the broker had. If the disk is lost: start the "
                "broker with the bucket alone, and it serves the partitions that are there",
                given=[str(one) for one in dirs],
            )
        return path

    def is_in_bucket(self, row: TopicRow, partition: int) -> bool:
        """Whether a partition is in the bucket."""
        is_there = not self._is_explicit or partition in row.residences
        return self._bucket is not None and is_there

    # At a start

    def begin(self, rows: list[TopicRow]) -> None:
        """Prepare to open all topics. Blocks."""
        dirs, moves = self.dirs, self._store.moves()
        self._leftovers = Leftovers(dirs, self._disk, moves, self.is_in_bucket)
        if self._bucket is not None:
            self._leftovers.has_commits = self._bucket.has_commits
            self._bucket.list_all(rows, explicit=self._is_explicit)
        self.ends.keep_only([row.topic_id for row in rows])
        for row in rows if self._bucket is not None else ():
            for number in row.residences:
                self.ends.forget_partition(row.topic_id.bytes, number)
        older = self._store.older_durable_ends()
        self._older = {at: DurableEnd(*end) for at, end in older.items()}

    def opened(self, row: TopicRow) -> list[PartitionLog]:
        """Open the partitions of a topic. Blocks. One that cannot be opened is offline.

        Raises:
            UnavailableError: The bucket cannot be read.
        """
        logs: list[PartitionLog] = []
        for number in range(row.partition_count):
            if self.is_in_bucket(row, number):
                logs.append(self._opened(row, number, None))
                continue
            slot = self.ends.slot(row.topic_id.bytes, number)
            known = [slot.end, self._older.get((row.topic_id.bytes, number))]
            durable = max((end for end in known if end is not None), default=None)
            log = self._opened(row, number, durable)
            end = log.durable_end() if log.failure is None else durable
            if end is not None and end.offset and end != slot.end:
                self._new_ends.append((slot, end))
            logs.append(log)
        if self._leftovers is not None:
            self._leftovers.list_others(row.name)
        return logs

    def _opened(self, row: TopicRow, partition: int, durable: DurableEnd | None) -> PartitionLog:
        configs = TopicConfigs(row.configs, self._options)
        folder = self.dirs.paths[0] / row.name / str(partition)
        try:
            if self._leftovers is not None:
                self._leftovers.finish(row, partition)
            if self._bucket is not None and self.is_in_bucket(row, partition):
                folder = self.dirs.in_bucket(row.name, partition)
                return self._bucket.open_log(
                    row, partition, folder, self._cache, configs.segment_bytes
                )
            folder = self.dirs.find(row.name, partition)
            if self._leftovers is not None:
                self._leftovers.placed(row, partition, folder.parent.parent)
            return recover(
                folder,
                disk=self._disk,
                cache=self._cache,
                segment_bytes=configs.segment_bytes,
                log_start=row.log_starts.get(partition, 0),
                durable=durable,
                accept_loss=f"{row.name}-{partition}" in self._options.accept_data_loss,
                synced=self._synced,
            )
        except (DamagedLogError, PlaceError) as error:
            _LOG.error("%s-%d: offline: %s; %s", row.name, partition, error, error.hint)
            return self._offline(folder, configs, error)
        except (LogmirrorError, OSError) as error:
            if isinstance(error, UnavailableError) and self.is_in_bucket(row, partition):
                raise  # it would be offline when the bucket is back
            _LOG.exception("%s-%d: offline: the log could not be opened", row.name, partition)
            failure = error if isinstance(error, LogmirrorError) else None
            failure = failure or UnavailableError("log could not be opened", cause=str(error))
            return self._offline(folder, configs, failure)

    def _offline(
        self, folder: Path, configs: TopicConfigs, failure: LogmirrorError
    ) -> PartitionLog:
        log = self.empty_log(folder, configs)
        log.take_offline(failure)
        return log

    def finish(self) -> None:
        """Store what the start has found. Blocks."""
        if (found := self._leftovers) is not None:
            self._store.change_moves(found.renewed, found.ended, found.left)
            self._away = found.away
        self.ends.record_all(self._new_ends)
        self._store.drop_older_durable_ends()
        self._new_ends, self._older = [], {}

    def left_over(self) -> tuple[list[tuple[MoveRow, Path]], list[Path]]:
        """Return the moves that continue, with their targets, and the folders to be removed."""
        found, self._leftovers = self._leftovers, None
        return (found.unfinished, found.folders) if found is not None else ([], [])

    def left_of(self, topic_id: bytes) -> set[int]:
        """Return the partitions that have an old folder in a directory that was not given."""
        return {number for one, number in self._away if one == topic_id}

    # New partitions

    @contextlib.contextmanager
    def placing(
        self, row: TopicRow, numbers: Iterable[int]
    ) -> Iterator[tuple[list[Path], Mapping[int, bytes]]]:
        """Find places for new partitions; yields their folders, and the residences to be stored.

        If that fails, they are not placed.
        """
        numbers = list(numbers)
        folders = [self.dirs.place(row.name, number) for number in numbers]
        residences = {
            number: row.topic_id.bytes
            for number, folder in zip(numbers, folders, strict=True)
            if self._is_explicit and self.dirs.is_in_bucket(folder)
        }
        try:
            yield folders, residences
        except BaseException:
            self.dirs.remove(folders)
            raise

    def empty_log(self, folder: Path, configs: TopicConfigs) -> PartitionLog:
        """Return a log without records."""
        return PartitionLog(
            folder, disk=self._disk, cache=self._cache, segment_bytes=configs.segment_bytes
        )

    def share(
        self,
        row: TopicRow,
        numbers: Iterable[int],
        logs: list[PartitionLog],
        configs: TopicConfigs,
    ) -> None:
        """Connect logs with what the partitions share."""
        rule = self.flush_rule(configs)
        for number, log in zip(numbers, logs, strict=True):
            log.producers.share(self._producers)
            if self._bucket is not None and self.is_in_bucket(row, number):
                residence = row.residence(number)
                self._bucket.admit(log, row.name, row.topic_id, number, residence.id)
            else:
                log.end_slot = self.ends.slot(row.topic_id.bytes, number)
            log.flush_rule = rule
            log.when_failed = self.when_failed
            failure = self.dirs.offline.get(log.folder.parent.parent)
            if failure is not None:  # it failed while the partition was created
                log.take_offline(failure.copy())

    def flush_rule(self, configs: TopicConfigs) -> FlushRule:
        """Return when a log with these settings is flushed."""
        limit = self._options.flush_bytes
        return FlushRule(messages=configs.flush_messages, bytes=limit, age_ms=configs.flush_ms)
