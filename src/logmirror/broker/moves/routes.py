"""What differs between the ways of a move: here from one disk to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.log_dirs.placement import absolute
from logmirror.broker.moves.copying import SegmentCopy, is_copied
from logmirror.broker.moves.move import Way, finish_swap, make_durable, prepare

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.moves.move import Copy, Move, Whole
    from logmirror.broker.place_rows import Residence


class Route:
    """From one disk to another.

    Args:
        disk: The system calls.
    """

    longest_tail: int | None = None
    """An open segment of more bytes is sealed before the log is followed; None: never."""

    needs_tail = False
    """Whether an open segment is begun if there is none: what arrives is flushed with it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    # These block.

    def prepare(self, move: Move) -> None:
        """Make the place of the copy, and note what an earlier start has copied."""
        prepare(self._disk, move)

    def copy_of(self, move: Move, segment: Segment) -> Copy:
        """Begin the copy of a segment."""
        return SegmentCopy(self._disk, segment, move.future)

    def is_copied(self, move: Move, segment: Segment) -> bool:
        """Whether an earlier start has copied a sealed segment, which has one of `Move.names`."""
        return is_copied(self._disk, segment, move.future)

    def make_durable(self, move: Move, whole: Whole, copy: SegmentCopy | None) -> None:
        """Remove what does not belong to the copy, and make the rest durable."""
        make_durable(self._disk, move, whole, copy)

    def finish(self, old: Path, new: Path, nonce: str) -> Path:
        """Make a swap durable, and take the name from the old folder; returns its new one."""
        return finish_swap(self._disk, old, new, nonce)

    # These run on the event loop.

    def fits(self, copy: Copy, segment: Segment) -> bool:
        """Whether a copy that was begun can be continued as that of a segment."""
        return copy.segment is segment

    async def quiet(self, move: Move) -> bool:
        """Keep others from replacing segments until `end`; whether none of them does."""
        del move
        return True

    def may_swap(self, move: Move) -> bool:
        """Whether nothing outside of the log is in the way of a swap."""
        del move
        return True

    def leave(self, move: Move) -> None:
        """Take the log from its old place; before it is in the new one."""

    def enter(self, move: Move) -> None:
        """Give the log to its new place."""

    async def placed(self, move: Move) -> bool:
        """Wait until a start would find the partition in the new place; False: it may not."""
        del move
        return True

    def end(self, move: Move) -> None:
        """The move is not in progress any more, or begins again."""

    def left(self, move: Move) -> list[Residence]:
        """Return what is to be removed from a bucket if the move is cancelled."""
        del move
        return []

    def is_passing(self, error: Exception) -> bool:
        """Whether an error may pass: the move tries again."""
        del error
        return False


class Routes:
    """The routes of a broker whose log directories are on disks.

    Args:
        disk: The system calls.
    """

    def __init__(self, disk: Disk) -> None:
        self._on_disk = Route(disk)

    def of(self, move: Move) -> Route:
        """Return the route of a move."""
        del move
        return self._on_disk

    def way_of(self, folder: Path, target: Path) -> Way:
        """Return the way from the folder of a partition to a log directory."""
        if self.is_in_bucket(target):
            return Way.INTO_BUCKET
        return Way.OUT_OF_BUCKET if self.is_in_bucket(folder.parent.parent) else Way.ON_DISK

    def name_of(self, log_dir: Path) -> str:
        """Return the name of a log directory."""
        return absolute(log_dir)

    def shown(self, folder: Path) -> str:
        """Return the path of a partition for messages: in a bucket, with its name."""
        log_dir, topic = folder.parent.parent, folder.parent.name
        if not self.is_in_bucket(log_dir):
            return str(folder)
        return f"{self.name_of(log_dir)}/{topic}/{folder.name}"

    def is_in_bucket(self, log_dir: Path) -> bool:
        """Whether a log directory is the working folder of a bucket."""
        del log_dir
        return False

    def remove(self, residence: Residence) -> None:
        """Begin to remove what is left in a bucket. Blocks."""
