"""Opens the partitions of a log dir in a bucket: sealed objects, then the bytes in the chain."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.bucket.files import FetchError
from logmirror.broker.bucket.recovery import READERS
from logmirror.broker.bucket.sealed_objects import (
    SealedObject,
    folder_at,
    read_producers,
    sealed_objects,
)
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.file_names import open_path, sealed_path
from logmirror.broker.log.open_segments import read_open, remember
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.producer_state import ProducerState
from logmirror.broker.log.segment import Segment
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.stores.listings import listed_below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.chain_writer import ChainWriter
    from logmirror.broker.bucket.files import BucketDisk
    from logmirror.broker.bucket.recovery import Recovered
    from logmirror.broker.bucket.tails import Stretch
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import TopicRow
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)


class _Listed(NamedTuple):
    """What the bucket holds of a partition."""

    objects: list[SealedObject]
    deleted: list[str]
    producers: bytes | None
    stretches: list[Stretch]


class Opened(NamedTuple):
    """A partition that was opened."""

    log: PartitionLog
    sealed_end: int
    """The end of its objects."""

    deleted: list[str]
    """Names of objects that can be deleted."""

    unsealed: list[tuple[Segment, bytes]]
    """Segments whose cut is in the chain, and which have no object yet; producers at their ends."""


class Opening:
    """Opens partitions. Its methods block.

    Args:
        store: The log dir.
        disk: The working folder.
        owner: The owner of the chain.
        recovered: What the chain holds.
    """

    def __init__(
        self, store: BlobStore, disk: BucketDisk, owner: ChainWriter, recovered: Recovered
    ) -> None:
        self._store, self._disk, self._owner = store, disk, owner
        self._recovered = recovered
        self._listed: dict[Key, _Listed | CorruptionError] = {}

    def list_all(self, partitions: Sequence[tuple[TopicRow, int]]) -> None:
        """List the objects of partitions, many at a time.

        Raises:
            FencedError: Another owner has taken over, and something would be deleted. It may be
                what that one has made, and what this one knows no row of.
            UnavailableError: The bucket cannot be reached. A partition that this start left out
                would be offline when it is back.
        """
        topics: dict[str, list[str]] = {}
        for row, number in partitions:
            topic, _, partition = folder_at(row.residence(number)).rpartition("/")
            topics.setdefault(topic, []).append(partition)
        sizes: dict[str, dict[str, int]] = {}
        with ThreadPoolExecutor(READERS, "logmirror-open") as readers:
            for some in readers.map(lambda one: self._sizes(*one), topics.items()):
                sizes |= some
            found = readers.map(lambda one: self._list(one[0], one[1], sizes), partitions)
            for (row, number), listed in zip(partitions, found, strict=True):
                self._listed[row.residence(number).key] = listed
        if any(isinstance(one, _Listed) and one.deleted for one in self._listed.values()):
            self._owner.check()

    def _sizes(self, topic: str, partitions: list[str]) -> dict[str, dict[str, int]]:
        """List small partitions of a topic with few requests; returns those that are complete."""
        if len(partitions) == 1:
            return {}
        try:
            listing = listed_below(self._store.below, topic, len(partitions))
        except (CorruptionError, UnavailableError):
            return {}  # that of each partition says what is wrong
        found = {one: listing.sizes(one) for one in partitions}
        return {f"{topic}/{one}": sizes for one, sizes in found.items() if sizes is not None}

    def _list(
        self, row: TopicRow, number: int, sizes: Mapping[str, dict[str, int]]
    ) -> _Listed | CorruptionError:
        residence, start = row.residence(number), row.log_starts.get(number, 0)
        folder = folder_at(residence)
        try:
            with self._owner.opening():
                compacted = row.compacted.get(number, ())
                known = sizes.get(folder)
                found = self._store.sizes(folder) if known is None else known
                objects, deleted = sealed_objects(found, folder, start, compacted)
                end = objects[-1].next if objects else None
                tail = self._recovered.tails.get(residence.key)
                stretches = tail.stretches(end, start) if tail is not None else []
            count, producers = self._producers_before(folder, end, start, stretches)
        except CorruptionError as error:
            return error
        return _Listed(objects, deleted, producers, stretches[count:])

    def _producers_before(
        self, folder: str, end: int | None, start: int, stretches: Sequence[Stretch]
    ) -> tuple[int, bytes | None]:
        """Return the newest producer state that is stored before the first record.

        A segment whose records were all deleted is needed as long as the state at its end is not.

        Returns:
            How many stretches are not needed, and the state before the next one.
        """
        count = sum(one.is_before(start) for one in stretches)
        kept = stretches[count:]
        begin = end if end is not None else kept[0].first if kept else start
        found = read_producers(self._store, folder, begin) if begin else None
        while found is None and count:
            count -= 1
            begin = stretches[count].first
            found = read_producers(self._store, folder, begin) if begin else None
        return count, found

    def open_log(
        self, row: TopicRow, number: int, folder: Path, cache: SegmentCache, segment_bytes: int
    ) -> Opened:
        """Open a partition. Everything in the returned log is durable.

        Raises:
            CorruptionError: Acknowledged records are missing.
            UnavailableError: The bucket cannot be reached.
            OSError: The working folder cannot be written, or a segment cannot be fetched.
        """
        listed = self._listed.pop(row.residence(number).key)
        if isinstance(listed, CorruptionError):
            raise listed
        log_start = row.log_starts.get(number, 0)
        segments = [
            Segment(folder, one.first, one.next, one.size_bytes, version=one.version)
            for one in listed.objects
        ]
        begin = segments[-1].next_offset if segments else None
        sealed_end = begin or 0
        if segments or listed.stretches:
            folder.mkdir(parents=True, exist_ok=True)
        if begin is None:
            begin = listed.stretches[0].first if listed.stretches else log_start
        try:
            producers = self._producers(segments, begin, listed.producers)
        except FetchError as error:
            if isinstance(error.__cause__, UnavailableError):
                raise error.__cause__ from error
            raise
        tail, unsealed = None, []
        for stretch in listed.stretches:
            segment = self._rebuilt(folder, stretch, producers)
            if stretch.is_before(log_start):
                segment.path.unlink()
                segment.is_deleted = True
            else:
                segments.append(segment)
            if stretch.next is None:
                tail = segment
            else:
                unsealed.append((segment, producers.to_bytes(stretch.next)))
        log = PartitionLog(
            folder,
            disk=self._disk,
            cache=cache,
            segment_bytes=segment_bytes,
            segments=segments,
            tail=tail,
            log_start=max(log_start, segments[0].first) if segments else log_start,
            producers=producers,
        )
        return Opened(log, sealed_end, listed.deleted, unsealed)

    def _producers(
        self, segments: list[Segment], begin: int, stored: bytes | None
    ) -> ProducerState:
        """Return the producer state before an offset: stored, or from the segments."""
        if stored is not None:
            try:
                return ProducerState.from_bytes(stored, begin)
            except CorruptionError as error:
                _LOG.warning("producer state is rebuilt from the log: %s", error)
        producers = ProducerState()
        for segment in segments:
            for batch in scan(
                self._disk.open_for_reading(segment.path), segment.first, contiguous=True
            ):
                remember(producers, batch)
        return producers

    def _rebuilt(self, folder: Path, stretch: Stretch, producers: ProducerState) -> Segment:
        """Write a segment's file from its pieces."""
        path = open_path(folder, stretch.first)
        with path.open("xb") as file:
            for piece in stretch.pieces:
                with piece.file.open("rb") as source:
                    source.seek(piece.position)
                    file.write(source.read(piece.size_bytes))
        end = stretch.pieces[-1].next
        found = read_open(path, None, self._disk, producers, end)
        if found.next_offset != end or found.size_bytes != found.found_bytes:
            raise CorruptionError(
                "commit objects hold damaged records", path=str(path), offset=found.next_offset
            )
        if stretch.next is not None:
            path.rename(sealed_path(folder, stretch.first, stretch.next))
            return Segment(folder, stretch.first, stretch.next, found.size_bytes)
        file_of_tail = self._disk.open_for_append(path)
        return Segment(
            folder,
            stretch.first,
            end,
            found.size_bytes,
            is_sealed=False,
            file=file_of_tail,
            index=found.index,
        )
