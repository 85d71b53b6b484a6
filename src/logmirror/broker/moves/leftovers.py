"""What a crash left of moves between log directories: decided by the rows of the moves.

row, and the partition is in the target     moved: the old folder is removed
row, and the partition is not there         continues: the copy is used again
row, and the partition is in the target,    moved; the row is kept until a start finds the old
  but its old directory is not given        folder
row, and the target is not given any more   forgotten, if the partition is in one place
-future, -delete without a row              removed

For a move from or to a bucket the row of the residence decides (`bucket.residences`):

move into the bucket, and the row is there  moved: the folder on the disk is removed
move into the bucket, and it is not         continues: the objects are used again, unless the chain
                                            has commits of it
move out of it, and the row is there        continues: the folder on the disk is its copy
move out of it, and it is not               moved

The name of a copy is not enough to be its partition: the copy of a move has a file with the move's
nonce (`move.mark_of`). A folder without it was put there by hand.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from logmirror.broker.moves.move import (
    DELETE,
    FUTURE,
    finish_swap,
    free_name,
    mark_of,
    source_of,
)
from logmirror.broker.place_rows import Residence
from logmirror.clock import new_nonce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log_dirs.placement import LogDirs
    from logmirror.broker.metadata import TopicRow
    from logmirror.broker.place_rows import MoveRow

_LOG: Final = logging.getLogger(__name__)
_LEFT: Final = re.compile(rf"[0-9]+\.[0-9a-f]{{32}}({FUTURE}|{DELETE})")


class Leftovers:
    """Looks at the folders of partitions at a start. Blocks.

    Args:
        dirs: The log directories.
        disk: The system calls.
        rows: The moves that were not complete.
        is_in_bucket: Whether a partition has a residence in the bucket.

    Attributes:
        has_commits: Whether the chain has commits of a residence, by `Residence.key`.
        renewed: Those that continue and have a new residence (H3), as they are now.
        left: The residences that they had.
        ended: Those that are complete, or forgotten.
        folders: What is to be removed.
        away: Partitions that have an old folder in a directory that was not given.
    """

    def __init__(
        self,
        dirs: LogDirs,
        disk: Disk,
        rows: Mapping[tuple[bytes, int], MoveRow],
        is_in_bucket: Callable[[TopicRow, int], bool] = lambda _row, _partition: False,
    ) -> None:
        self._dirs, self._disk, self._rows = dirs, disk, rows
        self._is_in_bucket = is_in_bucket
        self.has_commits: Callable[[tuple[bytes, int]], bool] = lambda _key: False
        self._unfinished: dict[tuple[bytes, int], tuple[MoveRow, Path]] = {}
        self.renewed: list[MoveRow] = []
        self.left: list[Residence] = []
        self.ended: list[tuple[bytes, int]] = []
        self.folders: list[Path] = []
        self.away: set[tuple[bytes, int]] = set()
        self._copies: set[Path] = set()

    def finish(self, row: TopicRow, partition: int) -> None:
        """Complete the move of a partition whose swap was made; before the partition is opened.

        Raises:
            OSError: A folder could not be renamed.
        """
        move = self._rows.get((row.topic_id.bytes, partition))
        if move is None:
            return
        found, is_in_bucket = (
            self._dirs.having(row.name, partition),
            self._is_in_bucket(row, partition),
        )
        target = self._dirs.by_name.get(move.target)
        if target is None:
            if is_in_bucket or len(found) == 1:
                self.ended.append((move.topic_id, move.partition))
        elif target == self._dirs.work_dir:
            self._finish_into_bucket(move, target, found, row.name, is_in_bucket=is_in_bucket)
        elif is_in_bucket:
            self._finish_out_of_bucket(move, target, target / row.name / str(partition))
        else:
            self._finish_on_disk(move, target, target / row.name / str(partition), found)

    def _finish_on_disk(self, move: MoveRow, target: Path, new: Path, found: list[Path]) -> None:
        if new not in found:
            self._continue(move, target, new)
            return
        found.remove(new)
        if found and not mark_of(new, move.nonce).exists():
            return  # put there by hand: both are left alone
        source = source_of(new, move.nonce)
        is_given = not source or source in self._dirs.by_name
        if not (found or is_given or self._has_gone(move, new.parent.name)):
            self.away.add((move.topic_id, move.partition))
            return
        for place in self._dirs.on_disk:  # a rename by an earlier start may not be durable
            if place != target:
                finish_swap(self._disk, place / new.parent.name / new.name, new, move.nonce)
        self.ended.append((move.topic_id, move.partition))
        self._disk.unlink(mark_of(new, move.nonce))

    def _finish_into_bucket(
        self, move: MoveRow, target: Path, found: list[Path], topic: str, *, is_in_bucket: bool
    ) -> None:
        """See H1 and H3 in `bucket.residences`."""
        if not is_in_bucket:
            residence = Residence(move.residence, topic, move.partition)
            if self.has_commits(residence.key):
                self.left.append(residence)
                move = move._replace(nonce=new_nonce() + new_nonce())
                self.renewed.append(move)
            self._unfinished[move.topic_id, move.partition] = move, target
            return
        if len(found) == 1:  # else one was put there by hand
            self.folders.append(free_name(self._disk, found[0], move.nonce))
        elif not found:  # a rename by an earlier start may not be durable
            for place in self._dirs.on_disk:
                free_name(self._disk, place / topic / str(move.partition), move.nonce)
        self.ended.append((move.topic_id, move.partition))

    def _has_gone(self, move: MoveRow, topic: str) -> bool:
        """Whether the old folder has another name already."""
        name = f"{move.partition}.{move.nonce}{DELETE}"
        return any((place / topic / name).exists() for place in self._dirs.on_disk)

    def _finish_out_of_bucket(self, move: MoveRow, target: Path, new: Path) -> None:
        """See H1 in `bucket.residences`: what has the partition's name is its copy at most."""
        if new.is_dir() and not mark_of(new, move.nonce).exists():
            self.ended.append((move.topic_id, move.partition))  # put there by hand
            return
        if new.is_dir():
            self._disk.rename(new, self._copy(move, new))
            self._disk.sync_folder(new.parent)
        self._continue(move, target, new)

    def _continue(self, move: MoveRow, target: Path, new: Path) -> None:
        self._copies.add(self._copy(move, new))
        self._unfinished[move.topic_id, move.partition] = move, target

    @property
    def unfinished(self) -> list[tuple[MoveRow, Path]]:
        """The moves that continue, and their targets."""
        return list(self._unfinished.values())

    def _copy(self, move: MoveRow, new: Path) -> Path:
        return new.with_name(f"{move.partition}.{move.nonce}{FUTURE}")

    def placed(self, row: TopicRow, partition: int, log_dir: Path) -> None:
        """End the move of a partition that this start has placed in the target itself.

        A partition without records has no folder, so a start may place it anywhere.
        """
        key = row.topic_id.bytes, partition
        move, target = self._unfinished.get(key, (None, None))
        if move is not None and target == log_dir:
            del self._unfinished[key]
            self._copies.discard(self._copy(move, log_dir / row.name / str(partition)))
            self.ended.append(key)

    def list_others(self, topic: str) -> None:
        """List what belongs to no move, once all partitions of the topic are finished.

        What has another name was not made by a broker, and is left alone.
        """
        for folder in [path / topic for path in self._dirs.on_disk]:
            for path in folder.iterdir() if folder.exists() else ():
                if path in self._copies or path.name.isdecimal():
                    continue
                if _LEFT.fullmatch(path.name):
                    self.folders.append(path)
                else:
                    _LOG.warning("%s: neither a partition nor a copy of one; it is ignored", path)
