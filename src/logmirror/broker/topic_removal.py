"""Removes what deleted topics have: their folders on disks, and their objects in a bucket.

A deletion is in the database until nothing is left of the topic on a disk and in the bucket. Until
then each start comes here again.

The folder of a partition may be away: in a log directory that failed, or was not given. So a
deletion has a list of partitions, if the broker had several directories: at first of all that have
a folder. Each folder that is found loses its name, and its partition leaves the list. Only then are
files removed. So a crash at any point, and a start without a directory, forgets no folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Final

from logmirror.broker.moves.move import DELETE, remove_folder
from logmirror.broker.own_thread import in_own_thread

if TYPE_CHECKING:
    import uuid
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.bucket.logs import BucketLogs
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log_dirs.placement import LogDirs
    from logmirror.broker.metadata import MetadataStore, TopicRow
    from logmirror.broker.place_rows import Residence

_LOOK_S: Final = 0.2
_SYNC_S: Final = 10.0
"""How long a deletion waits until the names of folders are durable."""


class TopicRemoval:
    """What removes. Its methods block, except `sync_names`, and are safe from several threads.

    Args:
        store: The broker's database.
        executor: For what blocks, and for changes of the database from the threads of the bucket.
        disk: The system calls.
        dirs: The log directories.
        bucket: The one in a bucket, if there is one.

    Attributes:
        left_behind: Deleted topics whose files could not all be removed. A start with their
            directories removes all that have these names, so no topic of such a name is created
            until then.
    """

    def __init__(
        self,
        store: MetadataStore,
        executor: Executor,
        disk: Disk,
        dirs: LogDirs,
        bucket: BucketLogs | None,
    ) -> None:
        self._store, self._executor = store, executor
        self._disk, self._dirs, self._bucket = disk, dirs, bucket
        self._removing: set[Residence] = set()
        self.left_behind: set[str] = set()

    async def sync_names(self, topic: str, logs: Sequence[PartitionLog]) -> set[int]:
        """Make durable which partitions have a folder: a listed folder must be found some day.

        It waits up to `_SYNC_S`, and for no directory that has failed. A folder may be removed
        meanwhile. A directory that cannot be flushed is found by its next flush.

        Returns:
            The partitions that have a folder.
        """
        if not self._has_list:
            return set()
        flushes = {
            folder.parent: in_own_thread(functools.partial(self._sync_name, folder), "sync-names")
            for folder in self._dirs.folders(topic)
            if folder.parent != self._dirs.work_dir
        }
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _SYNC_S
        placed = await loop.run_in_executor(self._executor, self._placed, logs)
        for log_dir, flush in flushes.items():
            while not flush.done() and log_dir not in self._dirs.offline:
                if loop.time() >= deadline_s:
                    return placed
                await asyncio.wait([flush], timeout=_LOOK_S)
        return placed

    def begin(
        self, name: str, topic_id: uuid.UUID, logs: Sequence[PartitionLog], left: Collection[int]
    ) -> None:
        """Store that a topic is deleted. Blocks.

        Args:
            name: The topic's name.
            topic_id: Its ID.
            logs: Its logs.
            left: Partitions with a folder that may be away.
        """
        if self._has_list:
            after = {*left, *self._placed(logs)}
            self._list(topic_id, self._store.deleted_partitions(topic_id.bytes), after)
        self._store.begin_deletion(name)

    @property
    def _has_list(self) -> bool:
        """Whether a directory of the broker may be away."""
        return bool(self._dirs.on_disk) and self._store.has_several_dirs

    def _sync_name(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            self._disk.sync_folder(folder)
            self._disk.sync_folder(folder.parent)

    def _placed(self, logs: Sequence[PartitionLog]) -> set[int]:
        return {number for number, log in enumerate(logs) if self._has_folder(log)}

    def _has_folder(self, log: PartitionLog) -> bool:
        """Whether a partition has a folder on a disk, also if that is away."""
        found = self._dirs.having(log.folder.parent.name, int(log.folder.name))
        return bool(found) or (log.failure is not None and _has_end(log))

    def remove(
        self,
        row: TopicRow,
        logs: Sequence[PartitionLog] = (),
        places: Sequence[Path] = (),
        left: Collection[int] = (),
        *,
        is_free: bool = True,
    ) -> None:
        """Remove what a deleted topic has. Blocks.

        The deletion is forgotten, in the end, when nothing is left on a disk.

        Args:
            row: The topic.
            logs: Its logs, if they are open.
            places: Their folders, and the old ones that moves could not remove.
            left: Partitions with an old folder that is away.
            is_free: False: there is another topic of this name. It was created when no file of the
                deleted one was left, so all files are its own.
        """
        self._note_left(row, places)
        listed = self._listed(row) if is_free else set[int]()
        folders = self._dirs.folders(row.name) if is_free else []
        on_disk = [folder for folder in folders if folder.parent != self._dirs.work_dir]
        try:
            if listed:
                freed = self._freed(on_disk, row.topic_id) | self._arrived(logs)
                listed = (listed - freed) | {*left}
                self._store.set_deleted_partitions(row.topic_id.bytes, listed)
            if listed:
                self.left_behind.add(row.name)
            self._remove_folders(on_disk)
        except OSError:
            self.left_behind.add(row.name)
            raise
        finally:
            self._note_left(row, places)  # a directory may have failed meanwhile
            if row.name in self.left_behind:
                self._list(row.topic_id, listed, listed | set(self._left(logs, places)))
            if self._bucket is not None:
                here = [log for log in logs if self._bucket.is_open(log)]
                self._bucket.delete_topic(row, here, lambda: self._forget(row))
                self.remove_residences(row.name)
        self._remove_folders(one for one in folders if one.parent == self._dirs.work_dir)
        if self._bucket is None and row.name not in self.left_behind:
            self._store.end_deletion(row.topic_id)

    def _listed(self, row: TopicRow) -> set[int]:
        """Return the partitions on the list; what is in the bucket is known by its rows."""
        return self._store.deleted_partitions(row.topic_id.bytes) if self._dirs.on_disk else set()

    def _arrived(self, logs: Sequence[PartitionLog]) -> set[int]:
        """Return the partitions in the bucket: a move has ended since `begin` (`Moves.forget`).

        An old folder that it could not remove is one of the places (`_left`).
        """
        return {n for n, log in enumerate(logs) if log.folder.parent.parent == self._dirs.work_dir}

    def _freed(self, folders: Iterable[Path], topic_id: uuid.UUID) -> set[int]:
        """Take the names of all partitions from their folders.

        Returns:
            Which partitions were found, with their names or without.
        """
        end = f".{topic_id.hex}{DELETE}"
        found = set[int]()
        for folder in folders:
            for path in [path for path in folder.iterdir() if path.name.isdecimal()]:
                self._disk.rename(path, path.with_name(path.name + end))
            self._disk.sync_folder(folder)  # an earlier attempt may not be durable
            names = [path.name for path in folder.iterdir()]
            found |= {int(name.removesuffix(end)) for name in names if name.endswith(end)}
        return found

    def _list(self, topic_id: uuid.UUID, before: set[int], after: set[int]) -> None:
        if after != before:
            self._store.set_deleted_partitions(topic_id.bytes, after)

    def _left(self, logs: Sequence[PartitionLog], places: Sequence[Path]) -> Iterator[int]:
        """Yield the partitions whose folders on disks were not removed."""
        for folder in places:
            log_dir, number = folder.parent.parent, int(folder.name)
            if log_dir == self._dirs.work_dir:
                continue
            has_folder = folder != logs[number].folder or _has_end(logs[number])
            if has_folder and (log_dir in self._dirs.offline or _may_exist(folder)):
                yield number

    def _remove_folders(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            remove_folder(folder)  # a move may be removing what it has left in it
            self._disk.sync_folder(folder.parent)

    def _note_left(self, row: TopicRow, places: Sequence[Path]) -> None:
        if any(folder.parent.parent in self._dirs.offline for folder in places):
            self.left_behind.add(row.name)

    def _forget(self, row: TopicRow) -> None:
        if row.name in self.left_behind:
            return
        with contextlib.suppress(RuntimeError):  # the broker stops; the next start comes here again
            self._executor.submit(self._store.end_deletion, row.topic_id)

    def remove_residences(self, topic: str | None = None) -> None:
        """Begin to remove what has left the bucket, of one topic or of all. Blocks."""
        for residence in self._store.left_partitions() if self._bucket is not None else ():
            if topic in {None, residence.topic}:
                self.remove_residence(residence)

    def remove_residence(self, residence: Residence) -> None:
        """Begin to remove the objects of a partition that has left the bucket."""
        if self._bucket is None or residence in self._removing:
            return
        self._removing.add(residence)

        def end() -> None:
            self._store.end_removal(residence)
            self._removing.discard(residence)

        def forget() -> None:
            with contextlib.suppress(RuntimeError):  # as above
                self._executor.submit(end)

        self._bucket.remove_residence(residence, forget)


def _has_end(log: PartitionLog) -> bool:
    """Whether a partition has a durable end: one without records may have no folder."""
    end = log.end_slot.end if log.end_slot is not None else None
    return end is not None and end.offset > 0


def _may_exist(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return True
