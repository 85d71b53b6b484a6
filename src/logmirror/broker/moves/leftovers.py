"""What a crash left of moves between log directories: decided by the rows of the moves.

row, and the partition is in the target     moved: the old folder is removed
row, and the partition is not there         continues: the copy is used again
row, and the target is not given any more   forgotten, if the partition is in one place
-future, -delete without a row              removed

The name of a copy is not enough to be its partition: the copy of a move has a file with the move's
nonce (`move.mark_of`). A folder without it was put there by hand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from logmirror.broker.moves.move import DELETE, FUTURE, finish_swap, mark_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log_dirs.placement import LogDirs
    from logmirror.broker.metadata import MoveRow, TopicRow

_LEFT: Final = re.compile(rf"[0-9]+\.[0-9a-f]{{32}}({FUTURE}|{DELETE})")


class Leftovers:
    """Looks at the folders of partitions at a start. Blocks.

    Args:
        dirs: The log directories.
        disk: The system calls.
        rows: The moves that were not complete.

    Attributes:
        unfinished: Those that continue, and their targets.
        ended: Those that are complete, or forgotten.
        folders: What is to be removed.
    """

    def __init__(
        self, dirs: LogDirs, disk: Disk, rows: Mapping[tuple[bytes, int], MoveRow]
    ) -> None:
        self._dirs, self._disk, self._rows = dirs, disk, rows
        self.unfinished: list[tuple[MoveRow, Path]] = []
        self.ended: list[tuple[bytes, int]] = []
        self.folders: list[Path] = []
        self._copies: set[Path] = set()

    def finish(self, row: TopicRow, partition: int) -> None:
        """Complete the move of a partition whose swap was made; before the partition is opened.

        Raises:
            OSError: A folder could not be renamed.
        """
        move = self._rows.get((row.topic_id.bytes, partition))
        if move is None:
            return
        found = self._dirs.having(row.name, partition)
        target = self._dirs.by_name.get(move.target)
        if target is None:
            if len(found) == 1:
                self.ended.append((move.topic_id, move.partition))
            return
        new = target / row.name / str(partition)
        if new in found:
            found.remove(new)
            if found and not mark_of(new, move.nonce).exists():
                return  # put there by hand: both are left alone
            for old in found:
                finish_swap(self._disk, old, new, move.nonce)
            self.ended.append((move.topic_id, move.partition))
            self.folders.append(mark_of(new, move.nonce))
        else:
            self._copies.add(new.with_name(f"{partition}.{move.nonce}{FUTURE}"))
            self.unfinished.append((move, target))

    def list_others(self, topic: str) -> None:
        """List what belongs to no move, once all partitions of the topic are finished."""
        for folder in self._dirs.folders(topic):
            for path in folder.iterdir():
                if path not in self._copies and _LEFT.fullmatch(path.name):
                    self.folders.append(path)
