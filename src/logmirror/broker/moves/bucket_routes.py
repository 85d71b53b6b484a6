"""The ways of a move between a disk and a bucket; the rules are in `bucket.residences`.

    into: sealed segments uploaded -> the rest copied to the working folder, and followed -> swap
          -> the open segment in the chain -> row -> old folder removed
    out:  sealed segments and the rest copied to the disk, and followed -> swap
          -> the open segment flushed -> row removed -> objects removed

The swap is as between disks: a rename on the event loop. What is appended after it is acknowledged
when the row has changed, so producers wait for a few commits. Many moves at once share these.
"""

from __future__ import annotations

import functools
import uuid
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.broker.bucket.files import FetchError
from logmirror.broker.bucket.parts import delete_object
from logmirror.broker.bucket.sealed_objects import create_producers, folder_at, read_producers
from logmirror.broker.database import GroupedChanges
from logmirror.broker.log.durable_ends import DurableEnd
from logmirror.broker.log.file_names import open_path, sealed_name, snapshot_path
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.broker.moves.move import Way, free_name, make_durable, remove_folder
from logmirror.broker.moves.routes import Route, Routes
from logmirror.broker.moves.upload import SegmentUpload, is_uploaded
from logmirror.broker.place_rows import Compacted, Residence
from logmirror.clock import new_nonce
from logmirror.errors import OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.bucket.commits import BucketCommit
    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.durable_ends import DurableEnds
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log_dirs.placement import LogDirs
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.moves.move import Copy, Move, Whole

_QUIET_S: Final = 5.0
_UPLOADED_S: Final = 5.0
_LONGEST_TAIL: Final = 1024 * 1024
"""More is not sent at once when the partition enters the bucket: producers wait for it."""


class _BucketRoute(Route):
    """What both ways have in common."""

    needs_tail = True

    def __init__(
        self,
        disk: Disk,
        ends: DurableEnds,
        commits: BucketCommit,
        store: MetadataStore,
        changes: GroupedChanges,
    ) -> None:
        super().__init__(disk)
        self._ends, self._commits, self._rows = ends, commits, store
        self._bucket, self._changes = commits.bucket, changes

    def may_swap(self, move: Move) -> bool:
        """See `Route.may_swap`: while the bucket is away, producers would wait for it."""
        del move
        return self._bucket.journal.failing_since_ms is None

    async def placed(self, move: Move) -> bool:
        """See `Route.placed`."""
        await self._commits.arrived(move.log)
        return move.is_placed

    def is_passing(self, error: Exception) -> bool:
        """See `Route.is_passing`."""
        return isinstance(error, UnavailableError | OutcomeUnknownError | FetchError)

    async def _store(self, call: Callable[..., None], *args: object) -> None:
        """Change rows; a commit has those of all moves that wait for it."""
        await self._changes.make(functools.partial(call, *args))


class IntoBucket(_BucketRoute):
    """From a disk into the bucket."""

    longest_tail = _LONGEST_TAIL

    def _residence(self, move: Move) -> Residence:
        topic = move.log.folder.parent.name
        return Residence(bytes.fromhex(move.nonce), topic, move.key[1])

    def prepare(self, move: Move) -> None:
        """See `Route.prepare`."""
        folder = move.target / move.log.folder.parent.name / move.log.folder.name
        for path in (folder, move.future):  # copies of an earlier stay or attempt
            remove_folder(path)
        self._disk.make_folder(move.future)
        move.objects = set(self._bucket.store.sizes(folder_at(self._residence(move))))
        move.names |= move.objects
        failpoints.reach("move.prepared")

    def copy_of(self, move: Move, segment: Segment) -> Copy:
        """See `Route.copy_of`."""
        if not segment.is_sealed:
            return SegmentCopy(self._disk, segment, move.future)
        name = sealed_name(segment.first, segment.next_offset)
        version = new_nonce() if name in move.objects else ""  # of a segment before compaction
        move.objects.add(sealed_name(segment.first, segment.next_offset, version))
        move.versions[segment] = version
        folder = folder_at(self._residence(move))
        return SegmentUpload(self._bucket.store, self._disk, segment, folder, version)

    def is_copied(self, move: Move, segment: Segment) -> bool:
        """See `Route.is_copied`."""
        name = sealed_name(segment.first, segment.next_offset)
        folder = folder_at(self._residence(move))
        return is_uploaded(self._bucket.store, self._disk, segment, f"{folder}/{name}")

    def make_durable(self, move: Move, whole: Whole, copy: SegmentCopy | None) -> None:
        """See `Route.make_durable`. The open segment becomes durable by the swap."""
        del copy
        store, folder = self._bucket.store, folder_at(self._residence(move))
        kept = open_path(move.future, whole.tail.first).name if whole.tail is not None else ""
        for path in move.future.iterdir():
            if path.name != kept:
                self._disk.unlink(path)
        versions = move.versions  # a segment with one is not the object without it
        current = {
            sealed_name(one.first, one.next_offset, versions.get(one, "")) for one in whole.sealed
        }
        for name in sorted(move.objects - current):
            delete_object(store, f"{folder}/{name}")
            move.objects.discard(name)  # if one of many fails, the others are not tried again
        if whole.snapshot is not None:
            state = whole.snapshot.read_bytes()
            create_producers(store, folder, whole.sealed_end, state)
        failpoints.reach("move.durable")

    def _compacted(self, move: Move, whole: Whole) -> list[Compacted]:
        """Return the segments whose objects have a version."""
        versions = move.versions
        return [
            Compacted(one.first, one.next_offset, versions[one])
            for one in whole.sealed
            if versions.get(one)
        ]

    def fits(self, copy: Copy, segment: Segment) -> bool:
        """See `Route.fits`: a segment that was sealed meanwhile is uploaded."""
        return copy.segment is segment and isinstance(copy, SegmentUpload) == segment.is_sealed

    def enter(self, move: Move) -> None:
        """See `Route.enter`."""
        log = move.log
        log.end_slot = None
        self._bucket.enter(log, uuid.UUID(bytes=move.key[0]), self._residence(move))

        async def confirm(_: int) -> None:
            failpoints.reach("move.arrived")
            whole = move.whole
            compacted = self._compacted(move, whole) if whole is not None else []
            residence = self._residence(move)
            await self._store(self._rows.enter_bucket, *move.key, residence.id, compacted)
            failpoints.reach("move.placed")
            self._ends.forget_partition(*move.key)
            move.is_placed = True

        self._commits.arrive(log, confirm)

    def finish(self, old: Path, new: Path, nonce: str) -> Path:
        """See `Route.finish`: the row is what makes the swap durable."""
        del new
        return free_name(self._disk, old, nonce)

    def left(self, move: Move) -> list[Residence]:
        """See `Route.left`."""
        return [self._residence(move)]


class OutOfBucket(_BucketRoute):
    """From the bucket to a disk."""

    def make_durable(self, move: Move, whole: Whole, copy: SegmentCopy | None) -> None:
        """See `Route.make_durable`; the producers are those of the bucket.

        They are stored with the last sealed segment, also if that was deleted meanwhile.
        """
        end, folder = whole.sealed_end, self._bucket.folder_of(move.log)
        state = read_producers(self._bucket.store, folder, end) if end else None
        if state is None and end:
            self._bucket.wait_uploaded(move.log, _UPLOADED_S)
            state = read_producers(self._bucket.store, folder, end)
        snapshot = (snapshot_path(move.future, end), state) if state is not None else None
        move.has_snapshot = snapshot is not None  # else a start rebuilds it, as in the bucket
        make_durable(self._disk, move, whole._replace(snapshot=None), copy, snapshot)

    async def quiet(self, move: Move) -> bool:
        """See `Route.quiet`."""
        if not move.is_active:  # `end` has been called, and is not called again
            return False
        return await self._commits.merger.leave(move.log, move, _QUIET_S)

    def end(self, move: Move) -> None:
        """See `Route.end`."""
        if self._bucket.is_open(move.log):
            self._commits.merger.take_up(move.log, move)

    def leave(self, move: Move) -> None:
        """See `Route.leave`."""
        log, whole = move.log, move.whole
        end = whole.sealed_end if whole is not None else 0
        log.snapshot = snapshot_path(log.folder, end) if move.has_snapshot else None
        move.residence = self._bucket.residence_of(log)
        self._bucket.leave(log)
        self._commits.merger.forget(move.log)

    def enter(self, move: Move) -> None:
        """See `Route.enter`."""
        log, residence = move.log, move.residence
        log.end_slot = slot = self._ends.slot(*move.key)

        async def confirm(end: int) -> None:
            failpoints.reach("move.arrived")
            slot.record(DurableEnd(end, log.durable_end().written_from))
            await slot.survives()  # without it, a start takes sealed segments for an archive's
            await self._store(self._rows.leave_bucket, move.key[0], residence)
            failpoints.reach("move.placed")
            move.is_placed = True

        self._commits.arrive(log, confirm)

    def finish(self, old: Path, new: Path, nonce: str) -> Path:
        """See `Route.finish`: the old folder has copies only; the objects are removed later."""
        del new
        return free_name(self._disk, old, nonce)  # another topic may have the plain name soon


class BucketRoutes(Routes):
    """The routes of a broker that has a log directory in a bucket.

    Args:
        disk: The system calls.
        dirs: The log directories.
        ends: Of the partitions on disks.
        commits: What makes the logs durable.
        store: The broker's database.
        executor: For its changes, which wait for the bucket.
        remove: Begins to remove what is left in the bucket. Blocks.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts
        self,
        disk: Disk,
        dirs: LogDirs,
        ends: DurableEnds,
        commits: BucketCommit,
        store: MetadataStore,
        executor: Executor,
        remove: Callable[[Residence], None],
    ) -> None:
        super().__init__(disk)
        parts = disk, ends, commits, store, GroupedChanges(executor)
        self._into, self._out = IntoBucket(*parts), OutOfBucket(*parts)
        self._dirs, self._remove = dirs, remove

    def of(self, move: Move) -> Route:
        """See `Routes.of`."""
        if move.way is Way.ON_DISK:
            return super().of(move)
        return self._into if move.way is Way.INTO_BUCKET else self._out

    def name_of(self, log_dir: Path) -> str:
        """See `Routes.name_of`."""
        return self._dirs.name_of(log_dir)

    def is_in_bucket(self, log_dir: Path) -> bool:
        """See `Routes.is_in_bucket`."""
        return log_dir == self._dirs.work_dir

    def remove(self, residence: Residence) -> None:
        """See `Routes.remove`."""
        self._remove(residence)
