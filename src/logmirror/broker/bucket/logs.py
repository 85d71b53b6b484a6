"""A log dir in a bucket: opens its partitions, seals, removes and deletes.

One thread uploads and deletes, in order. It tries again until the bucket responds: a segment's
commits stay until its object exists, so nothing depends on when that is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror import failpoints
from logmirror.broker.bucket.chain import PRODUCERS, commit_name
from logmirror.broker.bucket.database_shipping import DatabaseShipping, Snapshots, restore
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.bucket.journal import Journal
from logmirror.broker.bucket.recovery import READERS, take_over
from logmirror.broker.bucket.sealed_objects import (
    SealedObject,
    delete_topic,
    folder_of,
    producers_name,
    sealed_objects,
    upload,
)
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.file_names import open_path, sealed_path
from logmirror.broker.log.open_segments import read_open, remember
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.producer_state import ProducerState
from logmirror.broker.log.segment import Segment
from logmirror.clock import jittered_ms, new_nonce
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.tails import Stretch
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import TopicRow
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)
_COPY_BYTES: Final = 4 * 1024 * 1024
_PAUSE_S: Final = 2.0
_CLOSE_S: Final = 10.0


class _Listed(NamedTuple):
    """What the bucket holds of a partition."""

    objects: list[SealedObject]
    deleted: list[str]
    producers: bytes | None
    stretches: list[Stretch]


class BucketLogs:
    """The log dir. The constructor takes it over (`chain`).

    Args:
        store: The log dir in the bucket.
        folder: The working folder, empty.
        interval_ms: See `Journal`.
        cache_bytes: See `BucketDisk`.
        max_files: As in `Disk`.

    Raises:
        CorruptionError: A commit object is damaged or missing.
        UnavailableError: The bucket cannot be reached.
    """

    def __init__(
        self,
        store: BlobStore,
        folder: Path,
        *,
        interval_ms: int,
        cache_bytes: int,
        max_files: int | None = None,
    ) -> None:
        self._store, self._folder = store, folder
        self.disk = BucketDisk(store, cache_bytes=cache_bytes, max_files=max_files)
        self._spool = folder / ".logmirror" / "spool"
        self._spool.mkdir(parents=True)
        writer, self._recovered = take_over(store, bytes.fromhex(new_nonce()), self._spool)
        self.epoch = writer.epoch
        self._coverage = self._recovered.coverage
        self.journal = Journal(writer, self._coverage, interval_ms=interval_ms)
        self.journal.start()
        self._keys: dict[PartitionLog, Key] = {}
        self._by_key: dict[Key, PartitionLog] = {}
        self._in_bucket: dict[PartitionLog, str] = {}
        self._listed: dict[Key, _Listed | LogmirrorError] = {}
        self._pending: list[tuple[Key, str, Segment, bytes]] = []
        self._closing = threading.Event()
        self._removable: deque[int] = deque()
        self._uploads = ThreadPoolExecutor(1, "logmirror-upload")
        self.snapshots = Snapshots(self._snapshot_made)

    @property
    def logs(self) -> list[PartitionLog]:
        """The logs of all partitions."""
        return list(self._keys)

    def restored(self, path: Path) -> DatabaseShipping:
        """Write a database as the chain has it; returns where its changes go."""
        name = path.stem
        restore(path, self._recovered.databases[name])
        return DatabaseShipping(self.journal, name)

    def key_of(self, log: PartitionLog) -> Key:
        """Return topic ID and partition of a log."""
        return self._keys[log]

    def holding(self, before_ms: int, most: int) -> list[tuple[PartitionLog, int]]:
        """Return the logs that hold old commits (`Coverage.holding`)."""
        with self.journal.lock:
            held = self._coverage.holding(before_ms, most)
        for name in held.names:
            self.snapshots.due(name)
        return [(self._by_key[key], end) for key, end in held.ends.items() if key in self._by_key]

    # Opening

    def list_all(self, rows: Iterable[TopicRow]) -> None:
        """List the objects of all partitions, many at a time. Blocks; before `open_log`."""
        known = list(rows)
        ids = {row.topic_id.bytes for row in known}
        for key in self._recovered.tails:
            if key[0] not in ids:
                self._coverage.gone(key[0])
        partitions = [(row, number) for row in known for number in range(row.partition_count)]
        with ThreadPoolExecutor(READERS, "logmirror-open") as readers:
            found = readers.map(lambda one: self._list(*one), partitions)
            for (row, number), listed in zip(partitions, found, strict=True):
                self._listed[row.topic_id.bytes, number] = listed

    def _list(self, row: TopicRow, number: int) -> _Listed | LogmirrorError:
        folder, start = folder_of(row.name, row.topic_id, number), row.log_starts.get(number, 0)
        try:
            objects, deleted = sealed_objects(self._store, folder, start)
            end = objects[-1].next if objects else None
            tail = self._recovered.tails.get((row.topic_id.bytes, number))
            stretches = tail.stretches(end, start) if tail is not None else []
            begin = end if end is not None else stretches[0].first if stretches else start
            producers = self._read_producers(folder, begin) if begin else None
        except (CorruptionError, UnavailableError) as error:
            return error
        return _Listed(objects, deleted, producers, stretches)

    def _read_producers(self, folder: str, offset: int) -> bytes | None:
        name = producers_name(folder, offset)
        try:
            return self._store.read(name)
        except KeyError:
            return None
        except CorruptionError as error:  # no reason to refuse the partition
            _LOG.warning("%s: producer state is rebuilt from the log: %s", name, error)
            return None

    def open_log(
        self, row: TopicRow, number: int, folder: Path, cache: SegmentCache, segment_bytes: int
    ) -> PartitionLog:
        """Open a partition. Everything in the returned log is durable.

        Raises:
            CorruptionError: Acknowledged records are missing.
            UnavailableError: The bucket cannot be reached.
            OSError: The working folder cannot be written.
        """
        key = row.topic_id.bytes, number
        listed = self._listed.pop(key)
        if isinstance(listed, LogmirrorError):
            raise listed
        in_bucket = folder_of(row.name, row.topic_id, number)
        self.disk.connect(folder, in_bucket)
        log_start = row.log_starts.get(number, 0)
        segments = [Segment(folder, one.first, one.next, one.size_bytes) for one in listed.objects]
        begin = segments[-1].next_offset if segments else None
        with self.journal.lock:
            self._coverage.covered(key, begin or 0)
        if listed.deleted:
            self._submit(lambda: self._delete_all(in_bucket, listed.deleted))
        if segments or listed.stretches:
            folder.mkdir(parents=True, exist_ok=True)
        if begin is None:
            begin = listed.stretches[0].first if listed.stretches else log_start
        producers = self._producers(segments, begin, listed.producers)
        tail = None
        for stretch in listed.stretches:
            segment = self._rebuilt(folder, stretch, producers)
            segments.append(segment)
            if stretch.next is None:
                tail = segment
            else:
                state = producers.to_bytes(stretch.next)
                self._pending.append((key, in_bucket, segment, state))
        return PartitionLog(
            folder,
            disk=self.disk,
            cache=cache,
            segment_bytes=segment_bytes,
            segments=segments,
            tail=tail,
            log_start=max(log_start, segments[0].first) if segments else log_start,
            producers=producers,
        )

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
                self.disk.open_for_reading(segment.path), segment.first, contiguous=True
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
        found = read_open(path, None, self.disk, producers, end)
        if found.next_offset != end or found.size_bytes != found.found_bytes:
            raise CorruptionError(
                "commit objects hold damaged records", path=str(path), offset=found.next_offset
            )
        if stretch.next is not None:
            path.rename(sealed_path(folder, stretch.first, stretch.next))
            return Segment(folder, stretch.first, stretch.next, found.size_bytes)
        file_of_tail = self.disk.open_for_append(path)
        return Segment(
            folder,
            stretch.first,
            end,
            found.size_bytes,
            is_sealed=False,
            file=file_of_tail,
            index=found.index,
        )

    def admit(self, log: PartitionLog, topic: str, topic_id: uuid.UUID, number: int) -> None:
        """Connect a log with its place in the bucket."""
        key = topic_id.bytes, number
        self._keys[log], self._by_key[key] = key, log
        self._in_bucket[log] = folder_of(topic, topic_id, number)
        self.disk.connect(log.folder, self._in_bucket[log])

    def opened(self) -> None:
        """Finish the opening: remove the copies of commits, upload what was cut and not sealed."""
        self.journal.opened()
        shutil.rmtree(self._spool, ignore_errors=True)
        self._recovered.tails.clear()
        self._recovered.databases.clear()
        self.snapshots.all_due()
        pending, self._pending = self._pending, []
        for key, in_bucket, segment, producers in pending:
            self._submit_upload(key, in_bucket, segment, segment.path, producers)
        self._submit(self._remove_commits)

    # Sealing

    def seal(self, log: PartitionLog, segment: Segment, producers: bytes) -> None:
        """Upload a segment whose cut is in the chain, then remove the commits that it covers."""
        path = sealed_path(log.folder, segment.first, segment.next_offset)
        self._submit_upload(self._keys[log], self._in_bucket[log], segment, path, producers)

    def _submit_upload(
        self, key: Key, in_bucket: str, segment: Segment, path: Path, producers: bytes
    ) -> None:
        def run() -> None:
            if not segment.is_deleted:
                first, after = segment.first, segment.next_offset
                upload(self._store, in_bucket, first, after, _parts(path), producers)
                self.disk.keep(path, segment.size_bytes)
                self._forget_producers(in_bucket, after)
            with self.journal.lock:
                self._coverage.covered(key, segment.next_offset)
            self._remove_commits()

        self._submit(run)

    def _forget_producers(self, in_bucket: str, offset: int) -> None:
        place = f"{PRODUCERS}/{in_bucket}"
        newest = producers_name(in_bucket, offset).rpartition("/")[2]
        for name in list(self._store.names(place)):
            if name < newest:
                self._store.delete(f"{place}/{name}")

    def _remove_commits(self) -> None:
        with self.journal.lock:
            removable = self._coverage.take_removable()
        self._removable.extend(removable)
        while self._removable:  # in order (K1); one that fails is tried again first
            self._store.delete(commit_name(self._removable[0]))
            self._removable.popleft()
            failpoints.reach("bucket.removed")

    def _snapshot_made(self) -> None:
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # the broker is stopping
                self._submit(self._remove_commits)

    # Deleting

    def remove(self, log: PartitionLog, segments: list[Segment]) -> None:
        """Remove segments before the durable log start, oldest first. Blocks."""
        in_bucket, key = self._in_bucket[log], self._keys[log]

        def run() -> None:
            for segment in segments:
                self.disk.unlink(segment.path)
            self._delete_all(in_bucket, [segment.path.name for segment in segments])
            with self.journal.lock:
                self._coverage.covered(key, segments[-1].next_offset)
            self._remove_commits()

        self._submit(run).result()

    def _delete_all(self, in_bucket: str, names: list[str]) -> None:
        for name in names:
            self._store.delete(f"{in_bucket}/{name}")
            failpoints.reach("bucket.deleted")

    def delete_topic(self, row: TopicRow, logs: Iterable[PartitionLog]) -> None:
        """Remove the objects of a topic whose deletion is in the chain. Blocks."""
        for log in logs:
            self._by_key.pop(self._keys.pop(log, (b"", 0)), None)
            self._in_bucket.pop(log, None)
            self.disk.disconnect(log.folder)

        def run() -> None:
            delete_topic(self._store, row.name, row.topic_id, row.partition_count)
            with self.journal.lock:
                self._coverage.gone(row.topic_id.bytes)
            self._remove_commits()

        self._submit(run).result()

    # The thread

    def _submit(self, work: Callable[[], None]) -> Future[Any]:
        return self._uploads.submit(self._until_done, work)

    def _until_done(self, work: Callable[[], None]) -> None:
        for attempt in itertools.count():
            if self._closing.is_set():
                raise UnavailableError("the broker is stopping")
            try:
                work()
            except CorruptionError:
                _LOG.exception("a segment could not be sealed; its commits stay")
                raise
            except LogmirrorError as error:
                if attempt == 0:
                    _LOG.warning("the bucket cannot be changed; it is tried again: %s", error)
                self._closing.wait(jittered_ms(1000 * _PAUSE_S) / 1000)
            except Exception:
                _LOG.exception("a segment could not be sealed; its commits stay")
                raise
            else:
                return

    def close(self) -> None:
        """End the threads."""
        self.journal.close(_CLOSE_S)
        self._closing.set()
        self._uploads.shutdown(cancel_futures=True)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            yield data
