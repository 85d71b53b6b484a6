"""One move, and the folders that it makes and removes."""

from __future__ import annotations

import enum
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias

from logmirror import failpoints
from logmirror.broker.log.file_names import open_path, sealed_name
from logmirror.broker.log_dirs.placement import absolute
from logmirror.errors import InternalError

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.shadow import Shadow
    from logmirror.broker.moves.copying import SegmentCopy
    from logmirror.broker.moves.upload import SegmentUpload
    from logmirror.broker.place_rows import Residence
    from logmirror.errors import LogmirrorError

Copy: TypeAlias = "SegmentCopy | SegmentUpload"
FUTURE: Final = "-future"
DELETE: Final = "-delete"
_MARK: Final = ".move"
"""Of a file that shows of which move a folder is the copy. From one disk to another, it has the
name of the log directory that the partition leaves."""

_TRIES: Final = 100
"""To remove a folder from which others remove files."""

MoveRequest = tuple[tuple[bytes, int], "PartitionLog", "Path"]
"""Topic ID and partition, the log, and its log directory; where it is: no move, or none any more.
"""


class MoveState(enum.Enum):
    """Where a move is."""

    COPYING = "copying"
    FOLLOWING = "following"
    MOVED = "moved"
    FAILED = "failed"
    CANCELLED = "cancelled"


_NEXT: Final = {
    MoveState.COPYING: {
        MoveState.COPYING,  # again, after an error that may pass, or at the next start
        MoveState.FOLLOWING,  # it has caught up
        MoveState.FAILED,
        MoveState.CANCELLED,  # also by a move to yet another directory, and with its topic
    },
    MoveState.FOLLOWING: {
        MoveState.COPYING,  # the log has other files than the copy
        MoveState.MOVED,  # the swap
        MoveState.FAILED,
        MoveState.CANCELLED,
    },
    MoveState.MOVED: set[MoveState](),
    MoveState.FAILED: {MoveState.CANCELLED},
    MoveState.CANCELLED: {MoveState.FAILED},  # the cancellation could not be stored
}
"""The states that may follow a state. A move that begins is a new one: `COPYING`."""


class Way(enum.Enum):
    """Where a move leads."""

    ON_DISK = "from one disk to another"
    INTO_BUCKET = "from a disk into a bucket"
    OUT_OF_BUCKET = "from a bucket to a disk"


class Whole(NamedTuple):
    """All files of a partition. Segments are equal only if they are the same."""

    sealed: list[Segment]
    tail: Segment | None
    snapshot: Path | None

    @classmethod
    def of(cls, log: PartitionLog) -> Self:
        """Return the files of a log."""
        sealed = [segment for segment in log.segments if segment.is_sealed]
        return cls(sealed, log.open_segment, log.snapshot)

    @property
    def sealed_end(self) -> int:
        """The offset behind the sealed segments."""
        if self.tail is not None:
            return self.tail.first
        return self.sealed[-1].next_offset if self.sealed else 0


class Trouble(NamedTuple):
    """Errors of a move that may pass, without a copied segment in between.

    That other steps succeed shows nothing: the copy of a segment begins again after each error, and
    most of its steps do not need the bucket.
    """

    since_ms: float
    last_ms: float
    copied: int
    """How many segments were copied by then."""

    def again(self, now_ms: float, copied: int, limit_ms: float) -> Trouble:
        """Add an error; after a copied segment, or a long time without errors, it is the first."""
        is_new = copied > self.copied or now_ms - self.last_ms > limit_ms
        return Trouble(now_ms if is_new else self.since_ms, now_ms, copied)


@dataclass(slots=True, eq=False)
class Move:
    """One move.

    Attributes:
        key: Topic ID and partition.
        log: The partition's log.
        target: The log directory.
        nonce: Of the folder's name.
        failure: Why it failed.
        copied: The sealed segments in the copy.
        names: The names of sealed segments that were in its folder at the start.
        whole: What the copy holds, while it follows.
        next_offset: The log end offset of the copy, as far as it is known.
    """

    key: tuple[bytes, int]
    log: PartitionLog
    target: Path
    nonce: str
    _state: MoveState = field(default=MoveState.COPYING, init=False)
    failure: LogmirrorError | None = None
    copied: set[Segment] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    next_offset: int = 0
    failed_bytes: int = 0
    """What was copied when it failed."""

    followed_bytes: int = 0
    """The size of the log up to `next_offset`, since it follows."""

    is_prepared: bool = False
    is_durable: bool = False
    """Following: everything that was copied before is durable."""

    way: Way = Way.ON_DISK
    """Set when it is begun; see `routes`."""

    copy: Copy | None = None
    """Of the segment that is being copied, or followed."""

    behind: asyncio.Future[None] | None = None
    """Makes what was copied durable, beside the next step."""

    finishing: Segment | None = None
    """The segment that it completes."""

    position: int = 0
    """How much of it is copied, as of `next_offset`; its own changes during a step."""

    objects: set[str] = field(default_factory=set)
    """Into a bucket: the names of objects in its residence."""

    versions: dict[Segment, str] = field(default_factory=dict)
    """Into a bucket: those in the names of objects, see `bucket.replacing`."""

    residence: Residence | None = None
    """Out of a bucket: what it has left."""

    has_snapshot: bool = False
    """Out of a bucket: the copy has a producer snapshot."""

    rolls: int = 0
    """How often the open segment was sealed, because it was large."""

    is_placed: bool = False
    """From or into a bucket: the row says that the partition is in the new place."""

    trouble: Trouble | None = None
    """The last error that may pass."""

    shadow: Shadow | None = None
    whole: Whole | None = None
    cleaning: asyncio.Task[None] | None = None

    def may_wait(self, now_ms: float, limit_ms: float) -> bool:
        """Note an error that may pass; whether that may take longer."""
        copied = len(self.copied)
        before = self.trouble or Trouble(now_ms, now_ms, copied)
        self.trouble = before.again(now_ms, copied, limit_ms)
        return now_ms - self.trouble.since_ms < limit_ms

    @property
    def state(self) -> MoveState:
        """Where the move is."""
        return self._state

    def enter(self, state: MoveState, failure: LogmirrorError | None = None) -> None:
        """Enter a state. The only place where it changes.

        Args:
            state: The next state.
            failure: Why, if it is `FAILED`.

        Raises:
            InternalError: The present state cannot be followed by this one. Nothing is changed.
        """
        if state not in _NEXT[self._state]:
            raise InternalError(
                "a move cannot enter this state", state=self._state.value, wanted=state.value
            )
        if failure is not None:
            is_followed = self._state is MoveState.FOLLOWING
            self.failed_bytes = self.followed_bytes if is_followed else self.copied_bytes
            self.failure = failure
        self._state = state

    @property
    def future(self) -> Path:
        """The folder of the copy."""
        folder = self.log.folder
        return self.target / folder.parent.name / f"{folder.name}.{self.nonce}{FUTURE}"

    @property
    def copied_bytes(self) -> int:
        """The size of what the copy has of the log. Safe from any thread."""
        log, copied, copy, finishing = self.log, self.copied, self.copy, self.finishing
        if self.state is MoveState.FAILED:
            return self.failed_bytes
        if self.state is MoveState.FOLLOWING:
            return log.size_bytes
        done = sum(
            segment.size_bytes
            for segment in tuple(log.segments)
            if segment in copied or segment is finishing
        )
        return done + (self.position if copy is not None else 0)

    @property
    def left_bytes(self) -> int:
        """The size of what the copy does not have yet. Safe from any thread."""
        return max(0, self.log.size_bytes - self.copied_bytes)

    @property
    def lag(self) -> int:
        """How many offsets the copy is behind the log."""
        return 0 if self.state is MoveState.FOLLOWING else self.log.log_end - self.next_offset

    @property
    def is_shown(self) -> bool:
        """Whether its copy is one that may become the partition."""
        return self.is_active or self.state is MoveState.FAILED

    @property
    def is_active(self) -> bool:
        """Whether it is in progress."""
        return self.state in {MoveState.COPYING, MoveState.FOLLOWING}


def prepare(disk: Disk, move: Move) -> None:
    """Make the folder of the copy. Blocks."""
    future = move.future
    disk.make_folder(future)
    for path in future.iterdir():
        if path.name.startswith("."):
            disk.unlink(path)
            failpoints.reach("move.emptied")
        else:
            move.names.add(path.name)
    old = move.log.folder
    is_there = move.way is Way.ON_DISK and old.exists()  # else it has no records yet
    source = absolute(old.parent.parent) if is_there else ""
    disk.write_synced(mark_of(future, move.nonce), [os.fsencode(source)])
    failpoints.reach("move.prepared")


def mark_of(folder: Path, nonce: str) -> Path:
    """Return the file in a folder that shows that it is, or was, the copy of a move."""
    return folder / f".{nonce}{_MARK}"


def source_of(folder: Path, nonce: str) -> str:
    """Return the name of the log directory that a partition has left; empty if it is not known."""
    mark = mark_of(folder, nonce)
    return os.fsdecode(mark.read_bytes()) if mark.exists() else ""


def make_durable(
    disk: Disk,
    move: Move,
    whole: Whole,
    copy: SegmentCopy | None,
    snapshot: tuple[Path, bytes] | None = None,
) -> None:
    """Remove what does not belong to the copy, and make the rest durable. Blocks.

    Args:
        disk: The system calls.
        move: The move.
        whole: What the copy holds.
        copy: Of the open segment.
        snapshot: The producer snapshot, if it is not that of `whole`.
    """
    future = move.future
    if whole.snapshot is not None:
        snapshot = future / whole.snapshot.name, whole.snapshot.read_bytes()
    kept = {sealed_name(segment.first, segment.next_offset) for segment in whole.sealed}
    kept.add(mark_of(future, move.nonce).name)
    if whole.tail is not None:
        kept.add(open_path(future, whole.tail.first).name)
    if snapshot is not None:
        kept.add(snapshot[0].name)
    for path in future.iterdir():
        if path.name not in kept:
            disk.unlink(path)
            failpoints.reach("move.dropped")
    if snapshot is not None:
        disk.write_synced(snapshot[0], [snapshot[1]])
    if copy is not None:
        copy.sync()
    for folder in (future, future.parent, move.target):
        disk.sync_folder(folder)
    failpoints.reach("move.durable")


def finish_swap(disk: Disk, old: Path, new: Path, nonce: str) -> Path:
    """Make a swap durable, and take the name from the old folder; returns its new one. Blocks."""
    disk.sync_folder(new.parent)
    disk.sync_folder(new.parent.parent)
    return free_name(disk, old, nonce)


def free_name(disk: Disk, old: Path, nonce: str) -> Path:
    """Take the name from the folder of a partition that is not there any more. Blocks.

    Returns:
        Its new name.
    """
    gone = old.with_name(f"{old.name}.{nonce}{DELETE}")
    failpoints.reach("move.named")
    if old.exists():
        disk.rename(old, gone)
    if gone.exists():  # also if an earlier attempt could not make that durable
        disk.sync_folder(gone.parent)
    failpoints.reach("move.freed")
    return gone


def remove_folder(path: Path) -> None:
    """Remove a copy, or what was copied, under a name that no start takes for a partition's."""
    for left in reversed(range(_TRIES)):
        try:
            if path.is_dir():
                _remove_files(path)
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # of a file in it, which another thread has removed
            if not left:
                raise
        else:
            return


def _remove_files(folder: Path) -> None:
    """Remove the files one by one, so that a failpoint is between them."""
    for path in folder.iterdir():
        if not path.is_dir():
            path.unlink(missing_ok=True)
            failpoints.reach("move.removed")
