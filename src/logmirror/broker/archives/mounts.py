"""Mounts archives: finds their topics, and follows the objects that a mirror adds.

Opening an archive lists names and reads no object. Each archive is listed again every second, and
in a bucket, where each listing of a partition is paid for, every 10 s: the names after the last
known one, and now and then the folders. A failure of the store
is logged once and retried with growing pauses; what is known is served meanwhile as far as it was
read, and everything else is KAFKA_STORAGE_ERROR, never OFFSET_OUT_OF_RANGE.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from logmirror.archive.chain import ArchiveObject, chain
from logmirror.archive.claims import latest_claim
from logmirror.archive.compactions import read_cover, resolve
from logmirror.archive.naming import NATIVE, NDJSON, partition_folder, split_name
from logmirror.broker.archives.objects import BackOff, Objects
from logmirror.broker.log.mounted_log import MountedLog
from logmirror.broker.log.segment import Segment
from logmirror.broker.topic import RefusedTopicError, check_name
from logmirror.broker.topics import MAX_TOPIC_PARTITIONS
from logmirror.errors import CorruptionError, LogmirrorError, UsageError
from logmirror.stores.listings import listed_below

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.broker.archives.copies import LocalCopies
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.options import Archive
    from logmirror.broker.topics import Topics

_LOG: Final = logging.getLogger(__name__)
_THREADS: Final = 4
_BUCKET_THREADS: Final = 16
"""Of an archive in a bucket, where a listing waits for the network."""

_PARTITION: Final = re.compile(r"0|[1-9][0-9]{0,3}")
"""A folder of a partition, below `MAX_TOPIC_PARTITIONS`."""

_LISTED_AT_ONCE: Final = 32
"""Partitions that one job lists."""

_FOLDERS_EVERY: Final = 5
"""Polls between two listings of all folders."""

_POLL_S: Final = 1.0
_BUCKET_POLL_S: Final = 10.0
_PAUSE_MAX_S: Final = 30.0

_SOME_THREADS: Final = 2
"""One of so many threads of an archive follows its growth."""

_Place = tuple[str, int, list[str] | None]
"""Topic, partition, and its names, if they are known."""

_Question = tuple[str, int, tuple[str, int] | None]
"""Topic, partition, and the last known object with the offset behind it; None: list all of it."""

_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")


class _Folder(NamedTuple):
    """A folder that has folders of partitions."""

    topic_id: uuid.UUID
    numbers: list[int]
    problem: str
    """Why it is not mounted; empty: it is."""


class _Found(NamedTuple):
    """A listing of one partition."""

    extension: str
    objects: tuple[ArchiveObject, ...]
    failure: LogmirrorError | None


@dataclass(slots=True, eq=False)
class _Partition:
    log: MountedLog
    objects: Objects | None = None


@dataclass(slots=True, eq=False)
class _Mounted:
    """One archive and what was found of it."""

    archive: Archive
    executor: ThreadPoolExecutor
    back_off: BackOff = field(default_factory=BackOff)
    topics: dict[str, dict[int, _Partition]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Why a folder is not mounted, by its name."""

    is_listed: bool = False


_LAYOUT: Final = "a topic is a folder with a folder for each partition, such as orders/0"


class Mounts:
    """The archives of one broker.

    Args:
        archives: What to mount.
        topics: The broker's topics, which get one for each folder of partitions.
        disk: The system calls.
        cache: The broker's cache of segments.
        copies: The local copies.
    """

    def __init__(  # the broker's parts
        self,
        archives: tuple[Archive, ...],
        topics: Topics,
        disk: Disk,
        cache: SegmentCache,
        *,
        copies: LocalCopies,
    ) -> None:
        self._topics = topics
        self._disk = disk
        self._cache = cache
        self.copies = copies
        self._all = [
            _Mounted(archive, ThreadPoolExecutor(_threads(archive), "logmirror-archive"))
            for archive in archives
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """List all archives once, and follow them.

        Raises:
            UsageError: Two topics have one name.
        """
        self._topics.has_unlisted_archives = True
        for mounted in self._all:
            try:
                await self._list_folders(mounted, is_start=True)
                if not mounted.topics:
                    _LOG.warning("%s: no topic yet: %s", mounted.archive.root, _LAYOUT)
            except UsageError:
                raise
            except LogmirrorError as error:
                _LOG.warning("%s: cannot be listed yet: %s", mounted.archive.root, error)
            self._tasks.append(asyncio.create_task(self._follow(mounted)))

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for mounted in self._all:
            mounted.executor.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, mounted: _Mounted) -> None:
        poll_s = _BUCKET_POLL_S if mounted.archive.local is None else _POLL_S
        pause_s, polls = poll_s, 0
        while True:
            await asyncio.sleep(pause_s)
            polls += 1
            try:
                await self._list_new(mounted)
                if polls % _FOLDERS_EVERY == 0 or not mounted.topics or not mounted.is_listed:
                    await self._list_folders(mounted, is_start=False)
                    await self._check_starts(mounted)
            except LogmirrorError as error:
                if pause_s == poll_s:
                    _LOG.warning("%s: cannot be listed: %s", mounted.archive.root, error)
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
            except Exception:  # noqa: BLE001  # a defect must not stop it for good
                _LOG.exception("%s: cannot be listed", mounted.archive.root)
                pause_s = _PAUSE_MAX_S
            else:
                pause_s = poll_s

    async def _list_folders(self, mounted: _Mounted, *, is_start: bool) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(mounted.executor, _folders, mounted.archive)
        for name, (topic_id, numbers, problem) in found.items():
            known = mounted.topics.get(name, {})
            new = [number for number in numbers if number not in known]
            if known and not new:
                continue
            if not known and not self._is_free(mounted, name, problem, is_start=is_start):
                continue
            work = mounted.archive, name, len(new)
            names = await loop.run_in_executor(mounted.executor, _names_below, *work)
            places = [(name, number, names.get(number)) for number in new]
            listings = await _in_parts(mounted, _all_listed, places)
            if not known and not self._is_free(mounted, name, problem, is_start=is_start):
                continue  # a topic of the name was created meanwhile
            partitions = mounted.topics.setdefault(name, {})
            for number, listing in zip(new, listings, strict=True):
                partitions[number] = self._partition(mounted, name, number)
                self._mount(mounted, partitions[number], name, number, listing)
            for number in range(max(partitions)):
                if number not in partitions:  # not archived: it has no records
                    partitions[number] = self._partition(mounted, name, number)
            logs = tuple(partitions[number].log for number in sorted(partitions))
            self._topics.mount(name, topic_id, logs)
        mounted.is_listed = True
        self._topics.has_unlisted_archives = not all(one.is_listed for one in self._all)

    def _is_free(self, mounted: _Mounted, name: str, problem: str, *, is_start: bool) -> bool:
        """Whether a folder can be mounted; takes what its listing found against it."""
        try:
            check_name(name)
        except RefusedTopicError as refused:
            problem = refused.reason
        if not problem and name in self._topics.by_name:
            problem = "there is a topic of this name"
            if is_start:
                raise UsageError(
                    "an archive has the name of another topic",
                    hint="delete or rename one of the two: the topic of the log directory, or the "
                    "folder of the archive",
                    archive=str(mounted.archive.root),
                    topic=name,
                )
        if problem != mounted.refused.get(name, ""):
            if problem:
                _LOG.error("%s/%s: not mounted: %s", mounted.archive.root, name, problem)
            else:
                _LOG.info("%s/%s: mounted now", mounted.archive.root, name)
            mounted.refused[name] = problem
        return not problem

    def _partition(self, mounted: _Mounted, name: str, number: int) -> _Partition:
        log = MountedLog(
            Path(mounted.archive.root) / name / str(number),
            disk=self._disk,
            cache=self._cache,
            executor=mounted.executor,
        )
        return _Partition(log)

    def _mount(
        self, mounted: _Mounted, partition: _Partition, name: str, number: int, found: _Found
    ) -> None:
        """Serve what a listing shows."""
        log, archive = partition.log, mounted.archive
        if found.failure is not None:
            failure = found.failure
            _LOG.error("%s-%d: offline: %s; %s", name, number, failure, failure.hint)
            log.take_offline(found.failure)
            return
        if log.failure is not None:
            log.restore()
        if not found.objects:
            return
        if partition.objects is None:
            partition.objects = Objects(
                archive.store,
                root=Path(archive.root),
                folder=partition_folder(name, number),
                extension=found.extension,
                local=archive.local,
                copies=self.copies,
                back_off=mounted.back_off,
                executor=mounted.executor,
                utf8=archive.utf8,
            )
            log.has_transactions = found.extension == NATIVE
        segments = []
        for one in found.objects:
            segment = Segment(log.folder, one.first, one.last + 1, 0, is_exact=False)
            segment.source = partition.objects
            segments.append(segment)
        log.mount(segments)

    async def _list_new(self, mounted: _Mounted) -> None:
        asked = []
        for name, partitions in mounted.topics.items():
            for number, partition in partitions.items():
                objects, log = partition.objects, partition.log
                known = None
                if objects is not None and not objects.is_outdated and log.failure is None:
                    known = objects.name(log.segments[-1]), log.log_end
                vanished = 0 if objects is None else objects.vanished
                asked.append((partition, vanished, (name, number, known)))
        listings = await _in_parts(
            mounted, _all_added, [question for *_, question in asked], part=_SOME_THREADS
        )
        for one, found in zip(asked, listings, strict=True):
            partition, vanished, (name, number, known) = one
            if found is None:
                continue
            if known is None and found.failure is not None and partition.log.failure is not None:
                continue  # still offline
            self._mount(mounted, partition, name, number, found)
            if known is None and found.objects and partition.objects is not None:
                partition.objects.listed(vanished)

    async def _check_starts(self, mounted: _Mounted) -> None:
        """List a partition again if its first object was deleted, as a lifecycle rule does."""
        firsts = [
            (partition.objects, partition.log.segments[0])
            for partitions in mounted.topics.values()
            for partition in partitions.values()
            if partition.objects is not None
        ]
        await _in_parts(mounted, _all_checked, firsts, part=_SOME_THREADS)


def _all_checked(_: Archive, firsts: Sequence[tuple[Objects, Segment]]) -> list[None]:
    for objects, segment in firsts:
        objects.check_there(segment)
    return []


def _folders(archive: Archive) -> dict[str, _Folder]:
    """Return ID and partitions of each folder that has folders of partitions."""
    found = {}
    for name in archive.store.folders(""):
        numbered = [one for one in archive.store.folders(name) if one.isdecimal()]
        if numbered:
            found[name] = _folder(archive, name, numbered)
    return found


def _folder(archive: Archive, name: str, numbered: list[str]) -> _Folder:
    """A claim that is damaged or too new is a result; a store that fails is an error."""
    numbers = sorted(int(one) for one in numbered if _PARTITION.fullmatch(one))
    source_id = problem = ""
    if len(numbers) < len(numbered):  # each number below the highest one would be a partition
        other = min(one for one in numbered if not _PARTITION.fullmatch(one))
        problem = f"{other[:40]} is not a partition: 0 to {MAX_TOPIC_PARTITIONS - 1}"
    else:
        try:
            claim = latest_claim(archive.store, name, numbers[0])
            source_id = claim.topic_id if claim is not None else ""
        except (CorruptionError, UsageError) as error:
            problem = f"{error}; {error.hint}"
    digest = hashlib.sha256(f"logmirror archive\0{name}\0{source_id}".encode()).digest()
    return _Folder(uuid.UUID(bytes=digest[:16], version=4), numbers, problem)


def _threads(archive: Archive) -> int:
    return _BUCKET_THREADS if archive.local is None else _THREADS


async def _in_parts(
    mounted: _Mounted,
    work: Callable[[Archive, Sequence[_Asked]], list[_Result]],
    asked: Sequence[_Asked],
    *,
    part: int = 1,
) -> list[_Result]:
    """Do some work for many partitions, in one thread of `part`; the others are for readers."""
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(_threads(mounted.archive) // part)

    async def job(some: Sequence[_Asked]) -> list[_Result]:
        async with free:
            return await loop.run_in_executor(mounted.executor, work, mounted.archive, some)

    starts = range(0, len(asked), _LISTED_AT_ONCE)
    done = await asyncio.gather(*(job(asked[at : at + _LISTED_AT_ONCE]) for at in starts))
    return [one for some in done for one in some]


def _names_below(archive: Archive, name: str, count: int) -> dict[int, list[str]]:
    """List small partitions with few requests; returns the names of those that are complete."""
    if archive.local is not None or count < 2:  # noqa: PLR2004  # one listing is one listing
        return {}
    found = listed_below(archive.store.below, name, count).folders
    return {int(inner): list(sizes) for inner, sizes in found.items() if inner.isdecimal()}


def _all_listed(archive: Archive, places: Sequence[_Place]) -> list[_Found]:
    return [_listed(archive, *place) for place in places]


def _all_added(archive: Archive, asked: Sequence[_Question]) -> list[_Found | None]:
    return [
        _listed(archive, name, number) if known is None else _added(archive, name, number, *known)
        for name, number, known in asked
    ]


def _listed(archive: Archive, name: str, number: int, names: Sequence[str] | None = None) -> _Found:
    """List a partition, or take its names as they were listed.

    A chain that is damaged is a result; a store that fails is an error.
    """
    folder = partition_folder(name, number)
    try:
        names = list(archive.store.names(folder)) if names is None else names
    except CorruptionError as error:  # something else is in its folder
        return _Found("", (), error)
    extension = next((parts[2] for parts in map(split_name, names) if parts is not None), "")
    if extension == NDJSON and archive.utf8 is None:
        return _Found(extension, (), _unknown_encoding(archive))
    try:
        try:
            cover = resolve(archive.store, folder, names, extension=extension, start=None)
        except CorruptionError:  # the listing may have missed concurrent changes
            cover = read_cover(archive.store, folder, extension=extension, start=None)
    except CorruptionError as error:
        return _Found(extension, (), error)
    return _Found(extension, cover.objects, None)


def _unknown_encoding(archive: Archive) -> UsageError:
    return UsageError(
        "NDJSON does not show how its keys and values are encoded",
        hint="give --archive-encoding base64 or utf8, as `encoding` of the mirror that wrote it",
        archive=str(archive.root),
    )


def _added(archive: Archive, name: str, number: int, after: str, log_end: int) -> _Found | None:
    """List the objects after the last known one; None if there are none."""
    names = list(archive.store.names(partition_folder(name, number), after))
    if not names:
        return None
    extension = after.partition(".")[2]
    try:
        found = chain(names, extension=extension, start=log_end)
    except CorruptionError:
        return _listed(archive, name, number)
    return _Found(extension, found.objects, None) if found.objects else None
