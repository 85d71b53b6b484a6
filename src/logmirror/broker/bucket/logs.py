"""A log dir in a bucket: opens its partitions, seals, removes and deletes.

`Uploads` tries again until the bucket responds: a segment's commits stay until its object exists,
so nothing depends on when that is.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from logmirror import failpoints
from logmirror.broker.bucket import bundles
from logmirror.broker.bucket.bundles import BUNDLES, Bundler
from logmirror.broker.bucket.chain import COMMITS, PRODUCERS, commit_name
from logmirror.broker.bucket.database_shipping import (
    DatabaseShipping,
    Snapshots,
    check_size,
    restore,
)
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.bucket.heartbeats import Heart
from logmirror.broker.bucket.index_uploads import IndexUploads
from logmirror.broker.bucket.journal import Journal
from logmirror.broker.bucket.opening import Opening
from logmirror.broker.bucket.parts import delete_object
from logmirror.broker.bucket.recovery import DatabaseEntries, take_over
from logmirror.broker.bucket.sealed_objects import (
    create_object,
    create_producers,
    folder_at,
    pieces_of,
    producers_name,
    upload,
)
from logmirror.broker.bucket.stop_deadline import StopDeadline
from logmirror.broker.bucket.tiling import INDEXED_BYTES
from logmirror.broker.bucket.topic_deletion import ResidenceRemoval, TopicDeletion
from logmirror.broker.bucket.uploads import Uploads
from logmirror.broker.log.file_names import sealed_path
from logmirror.broker.log.segment import Segment
from logmirror.broker.place_rows import Residence
from logmirror.clock import new_nonce
from logmirror.errors import UnavailableError
from logmirror.stores.request_counts import counts_of

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from logmirror.broker.bucket.bundles import Bundle
    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.chain_writer import ChainWriter
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment_cache import SegmentCache
    from logmirror.broker.metadata import TopicRow
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)
_CLOSE_S: Final = 2.0
_SAY_S: Final = 2.0


class BucketLogs:
    """The log dir. The constructor takes it over (`chain`).

    Args:
        store: The log dir in the bucket.
        folder: The working folder, empty.
        interval_ms: See `Journal`.
        cache_bytes: See `BucketDisk`.
        max_files: As in `Disk`.
        behind: As in `ChainWriter.take_over`.

    Raises:
        FencedError: The chain does not end with the number `behind`.
        CorruptionError: A commit object is damaged or missing.
        UnavailableError: The bucket cannot be reached.
    """

    def __init__(  # noqa: PLR0913  # the settings of a bucket
        self,
        store: BlobStore,
        folder: Path,
        *,
        interval_ms: int,
        cache_bytes: int,
        max_files: int | None = None,
        behind: int | None = None,
    ) -> None:
        self._store, self._folder = store, folder
        self.requests = counts_of(store)
        self.disk = BucketDisk(
            store,
            cache_bytes=cache_bytes,
            max_files=max_files,
            free_bytes=lambda: shutil.disk_usage(folder).free,
        )
        self._spool = folder / ".logmirror" / "spool"
        self._spool.mkdir(parents=True, exist_ok=True)
        self._heart: Heart | None = None
        try:
            writer, self._recovered = take_over(
                store,
                bytes.fromhex(new_nonce()),
                self._spool,
                behind=behind,
                when_fenced=self._show_life,
            )
        except BaseException:
            if self._heart is not None:
                self._heart.stop()
            raise
        self._owner, self.epoch = writer, writer.epoch
        self._coverage = self._recovered.coverage
        self.journal = Journal(writer, self._coverage, interval_ms=interval_ms)
        self._uploads = Uploads()
        self._bundler = Bundler()
        for one in self._recovered.bundles:
            self._bundler.exists(one)
        self.journal.when_created = self._bundle
        self.journal.start()
        self._keys: dict[PartitionLog, Key] = {}
        self._topic_keys: dict[PartitionLog, Key] = {}
        self._by_key: dict[Key, PartitionLog] = {}
        self._in_bucket: dict[PartitionLog, str] = {}
        self._indexes = IndexUploads(store, self._uploads, self._keys, self._by_key)
        self.disk.when_without_index = self._indexes.again
        self._opening = Opening(store, self.disk, writer, self._recovered)
        self._pending: list[tuple[Key, str, Segment, bytes]] = []
        self._removable = deque(writer.left_over)
        self._deadline = StopDeadline(self._give_up, folder)
        self.sealed_objects = self.sealed_bytes = 0
        self.snapshots = Snapshots(self._remove_soon)
        self.when_uploaded: Callable[[Key], None] = lambda _: None
        """Called in the thread of the uploads after each segment."""

    def _show_life(self, owner: ChainWriter) -> None:
        self._heart = Heart(self._store, owner.epoch)
        self._heart.start()

    @property
    def logs(self) -> list[PartitionLog]:
        """The logs of all partitions."""
        return list(self._keys)

    def restored(self, path: Path) -> DatabaseShipping:
        """Write a database as the chain has it; returns where its changes go.

        Raises:
            FencedError: Another owner has taken over, and has removed parts of it meanwhile.
            CorruptionError: A change cannot be applied.
        """
        name = path.stem
        with self._owner.opening():
            restore(path, self._recovered.databases[name])
        return DatabaseShipping(self.journal, name)

    @property
    def store(self) -> BlobStore:
        """The log dir."""
        return self._store

    def folder_of(self, log: PartitionLog) -> str:
        """Return the folder of a log's objects."""
        return self._in_bucket[log]

    def residence_of(self, log: PartitionLog) -> Residence:
        """Return the residence of a log."""
        residence_id, number = self._keys[log]
        return Residence(residence_id, log.folder.parent.name, number)

    def has_commits(self, key: Key) -> bool:
        """Whether the chain has records of a partition; before `opened`."""
        return key in self._recovered.tails

    def has_database(self, name: str) -> bool:
        """Whether the chain has a database; before it is `restored`."""
        return name in self._recovered.databases

    def adopt(self, name: str, whole: bytes) -> None:
        """Take over a database. Blocks until it is in the chain; before it is `restored`.

        Raises:
            UnavailableError: It is too large.
        """
        check_size(len(whole))
        self.journal.begin_shipping(name, whole, is_snapshot=True).result()
        self._recovered.databases[name] = DatabaseEntries(whole)

    def key_of(self, log: PartitionLog) -> Key:
        """Return what the chain has in the place of topic ID and partition of a log."""
        return self._keys[log]

    def topic_key_of(self, log: PartitionLog) -> Key:
        """Return topic ID and partition of a log."""
        return self._topic_keys[log]

    def chain_state(self) -> tuple[int, dict[str, int]]:
        """Return how many commits a start would read, and `Coverage.since_snapshot`."""
        with self.journal.lock:
            return len(self._coverage), self._coverage.since_snapshot()

    def holding(self, before_ms: int, most: int) -> list[tuple[PartitionLog, int]]:
        """Return the logs that hold old commits (`Coverage.holding`)."""
        with self.journal.lock:
            held = self._coverage.holding(before_ms, most)
        for name in held.names:
            self.snapshots.due(name)
        return [(self._by_key[key], end) for key, end in held.ends.items() if key in self._by_key]

    # Opening

    def list_all(self, rows: Iterable[TopicRow], *, explicit: bool = False) -> None:
        """List the objects of all partitions, many at a time. Blocks; before `open_log`.

        Args:
            rows: All topics.
            explicit: Only those with a residence are in the bucket.
        """
        found = [
            (row, number)
            for row in rows
            for number in range(row.partition_count)
            if not explicit or number in row.residences
        ]
        keys = {row.residence(number).key for row, number in found}
        for key in self._recovered.tails:
            if key not in keys:
                self._coverage.left(key)
        self._opening.list_all(found)

    def open_log(
        self, row: TopicRow, number: int, folder: Path, cache: SegmentCache, segment_bytes: int
    ) -> PartitionLog:
        """Open a partition; raises as `Opening.open_log` does."""
        residence = row.residence(number)
        in_bucket = folder_at(residence)
        self.disk.connect(folder, in_bucket)
        found = self._opening.open_log(row, number, folder, cache, segment_bytes)
        with self.journal.lock:
            self._coverage.covered(residence.key, found.sealed_end)
        if found.deleted:
            self._uploads.submit(residence.key, lambda: self._delete_all(in_bucket, found.deleted))
        self._pending += [(residence.key, in_bucket, *one) for one in found.unsealed]
        return found.log

    def admit(
        self,
        log: PartitionLog,
        topic: str,
        topic_id: uuid.UUID,
        number: int,
        residence: bytes | None = None,
    ) -> None:
        """Connect a log with its residence; None: it was created here."""
        found = Residence(residence or topic_id.bytes, topic, number)
        self._keys[log], self._by_key[found.key] = found.key, log
        self._topic_keys[log] = topic_id.bytes, number
        self._in_bucket[log] = folder_at(found)
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
        self._remove_soon()

    # Sealing

    def seal(self, log: PartitionLog, segment: Segment, producers: bytes) -> None:
        """Upload a segment whose cut is in the chain, then remove the commits that it covers."""
        path = sealed_path(log.folder, segment.first, segment.next_offset)
        self._submit_upload(self._keys[log], self._in_bucket[log], segment, path, producers)

    def _submit_upload(
        self, key: Key, in_bucket: str, segment: Segment, path: Path, producers: bytes
    ) -> None:
        index = segment.index

        def run() -> None:
            first, after = segment.first, segment.next_offset
            if segment.is_deleted:  # a start behind it still needs the producers
                create_producers(self._store, in_bucket, after, producers)
            else:
                upload(self._store, in_bucket, first, after, pieces_of(path), producers)
                if segment.size_bytes >= INDEXED_BYTES:
                    found = index or segment.indexed(self.disk.open_for_reading(path))
                    self._indexes.submit(key, f"{in_bucket}/{path.name}", segment, found)
                self.sealed_objects += 1
                self.sealed_bytes += segment.size_bytes
                self.disk.keep(path, segment.size_bytes)
            self._uploads.submit(
                (PRODUCERS, *key),
                lambda: self._forget_producers(in_bucket, after),
                covers_earlier=True,
            )
            with self.journal.lock:
                self._coverage.covered(key, after)
            self.when_uploaded(key)
            self._remove_soon()

        self._uploads.submit(key, run)

    def log_of(self, key: Key) -> PartitionLog | None:
        """Return the log of a key of the chain; None: it is not here any more, or not open yet."""
        return self._by_key.get(key)

    def uploaded_end(self, log: PartitionLog) -> int:
        """Return the offset before which all records are in sealed objects, or deleted."""
        with self.journal.lock:
            return self._coverage.end(self._keys[log]) if log in self._keys else 0

    def wait_uploaded(self, log: PartitionLog, timeout_s: float) -> None:
        """Wait until the sealed segments of a log are uploaded, or cannot be. Blocks.

        Raises:
            UnavailableError: It takes too long, or the broker stops.
        """
        done = self._uploads.submit(self._keys[log], lambda: None)
        try:
            done.result(timeout_s)
        except TimeoutError:
            raise UnavailableError("segments are not in the bucket yet") from None
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001  # of an upload, which has reported it
            _LOG.warning("%s: a segment could not be uploaded before a move: %s", log.folder, error)

    def _forget_producers(self, in_bucket: str, offset: int) -> None:
        place = f"{PRODUCERS}/{in_bucket}"
        newest = producers_name(in_bucket, offset).rpartition("/")[2]
        for name in list(self._store.names(place)):
            if name < newest:
                self._store.delete(f"{place}/{name}")

    def _remove_soon(self) -> None:
        self._uploads.submit(COMMITS, self._remove_commits, covers_earlier=True)

    def _remove_commits(self) -> None:
        with self.journal.lock:
            removable = self._coverage.take_removable()
        self._removable.extend(removable)
        while self._removable:  # in order (K1); one that fails is tried again first
            self._store.delete(commit_name(self._removable[0]))
            self._removable.popleft()
            failpoints.reach("bucket.removed")
        with self.journal.lock:
            oldest = self._coverage.oldest
        for bundle in self._bundler.take_deletable(oldest):
            self._store.delete(bundle.name)

    def _bundle(self, sequence: int, data: bytes) -> None:
        due = self._bundler.add(sequence, data)
        if due is not None:
            self._uploads.submit(BUNDLES, lambda: self._create_bundle(*due), covers_earlier=True)

    def _create_bundle(self, bundle: Bundle, data: bytes) -> None:
        with self.journal.lock:
            is_needed = bundle.last >= self._coverage.oldest
        if is_needed:
            bundles.create(self._store, bundle, data)
            self._bundler.exists(bundle)

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
            self._remove_soon()

        self._uploads.submit(key, run).result()

    def _delete_all(self, in_bucket: str, names: list[str]) -> None:
        for name in names:
            delete_object(self._store, f"{in_bucket}/{name}")
            failpoints.reach("bucket.deleted")

    def delete_topic(
        self, row: TopicRow, logs: Iterable[PartitionLog], when_done: Callable[[], None]
    ) -> None:
        """Remove the objects of a topic whose deletion is in the chain; in the thread."""
        for log in logs:
            self.leave(log)
        with self.journal.lock:
            self._coverage.gone(row.topic_id.bytes)
        TopicDeletion(self._store, row, self._uploads, when_done)
        self._remove_soon()

    # Moves

    def enter(self, log: PartitionLog, topic_id: uuid.UUID, residence: Residence) -> None:
        """Take over a log whose sealed segments are objects here."""
        self.admit(log, residence.topic, topic_id, residence.partition, residence.id)
        sealed = [one for one in log.segments if one.is_sealed]
        with self.journal.lock:
            self._coverage.covered(residence.key, sealed[-1].next_offset if sealed else 0)

    def leave(self, log: PartitionLog) -> None:
        """Let go of a log that was deleted, or is not here any more."""
        self._by_key.pop(self._keys.pop(log, (b"", 0)), None)
        self._in_bucket.pop(log, None)
        self._topic_keys.pop(log, None)
        self.disk.disconnect(log.folder)

    def remove_residence(self, residence: Residence, when_done: Callable[[], None]) -> None:
        """Remove what a partition has here that has left, as the chain says; in the thread."""
        with self.journal.lock:
            self._coverage.left(residence.key)
        ResidenceRemoval(self._store, residence, self._uploads, when_done)
        self._remove_soon()

    # Replacing

    def is_open(self, log: PartitionLog) -> bool:
        """Whether a log is one of this log dir, and its topic is not deleted."""
        return log in self._keys

    def submit_replacement(self, log: PartitionLog, work: Callable[[], Any]) -> Future[Any]:
        """Do work on objects that replace others of a log; repeated while the bucket is away.

        Its failure ends no upload of the log, and no later replacement: a segment that could not
        be fetched may be there the next time.
        """
        return self._uploads.submit(("merge", *self._keys[log]), work, fails_alone=True)

    def create_replacement(
        self, log: PartitionLog, first: int, after: int, path: Path, version: str = ""
    ) -> None:
        """Create the object of segments that become one. Blocks; in the thread."""
        folder = self._in_bucket[log]
        create_object(self._store, folder, first, after, pieces_of(path), version=version)
        made = Segment(log.folder, first, after, path.stat().st_size, version=version)
        if made.size_bytes >= INDEXED_BYTES:
            index = made.indexed(self.disk.open_for_reading(path))
            self._indexes.submit(self._keys[log], f"{folder}/{made.path.name}", made, index)

    def delete_replaced(self, log: PartitionLog, old: Sequence[Segment]) -> Future[Any]:
        """Delete segments that became one, the oldest first."""
        in_bucket = self._in_bucket[log]

        def run() -> None:
            for segment in old:
                if segment.path.exists():
                    self.disk.unlink(segment.path)
            self._delete_all(in_bucket, [segment.path.name for segment in old])

        return self.submit_replacement(log, run)

    # The end

    def begin_stop(self) -> None:
        """Bound the time until `close` has ended."""
        self._deadline.begin()

    def _give_up(self) -> None:
        self.journal.close(0)
        self._uploads.close(0)

    def close(self) -> None:
        """End the threads."""
        self.journal.close(_CLOSE_S)
        self._uploads.close(_CLOSE_S)
        if self._heart is not None:
            self._heart.stop()
            if not self.journal.is_fenced:
                self._heart.say_stopped(self.journal.end, _SAY_S)
        self._deadline.cancel()
