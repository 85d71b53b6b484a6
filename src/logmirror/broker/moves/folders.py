"""Folders in a target directory that have the name of the partition already."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from logmirror.broker.log_dirs.placement import has_records
from logmirror.broker.moves.move import DELETE
from logmirror.clock import new_nonce

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.partition_log import PartitionLog


def log_dir_of(log: PartitionLog) -> Path:
    """Return the log directory that a partition is in."""
    return log.folder.parent.parent


def taken(places: Mapping[PartitionLog, Path]) -> dict[PartitionLog, bool]:
    """Return the logs whose place exists; True: it is a folder without records. Blocks."""
    return {log: _is_empty(place) for log, place in places.items() if place.exists()}


def _is_empty(place: Path) -> bool:
    try:
        return place.is_dir() and not has_records(place)
    except OSError:
        return False


def free_place(disk: Disk, log: PartitionLog, place: Path) -> Path:
    """Rename a folder without records, so that the partition's name is free; return its new path.

    Runs on the event loop, so no partition gets this folder meanwhile. As long as the topic of
    `log` is not deleted, no other partition has this name.

    Raises:
        OSError: It was not possible, or a partition may use the folder.
    """
    if log.failure is not None or log.folder == place:
        raise FileExistsError(errno.EEXIST, "a partition may use the folder", str(place))
    gone = place.with_name(f"{place.name}.{new_nonce()}{new_nonce()}{DELETE}")
    disk.rename(place, gone)
    return gone
