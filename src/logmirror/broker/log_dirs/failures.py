"""Decides whether a log directory on a disk has failed, and whether the broker can do without it.

One failed operation says little: a single file may be damaged. So the directory is probed: a small
file is written, flushed and removed in the broker's own folder. If that fails too, the directory is
offline until the next start of the broker. A disk without space is no failure of the directory.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from logmirror.broker.log_dirs.placement import PRIVATE
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log_dirs.placement import LogDirs

_PROBE: Final = "probe"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk that is full."""

_NO_FAILURE: Final = frozenset(
    {
        *FULL,
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),  # the process is
        *(errno.ENAMETOOLONG, errno.EFBIG),  # the request is at fault
    }
)


class LogDirError(UnavailableError):
    """A log directory failed at run time. It is offline until the next start of the broker."""


def suggests_failure(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, may be a failure of a whole log directory."""
    while isinstance(error, LogmirrorError):
        error = error.__cause__
    return isinstance(error, OSError) and error.errno not in {None, *_NO_FAILURE}


def probe(disk: Disk, log_dir: Path) -> OSError | None:
    """Write, flush and remove a small file; returns the error of a directory that failed. Blocks.

    Args:
        disk: The system calls.
        log_dir: The directory. Its private folder must exist: nothing is written to the mount
            point of a disk that is away.
    """
    path = log_dir / PRIVATE / _PROBE
    try:
        disk.write_synced(path, [b"probe"])
        disk.sync_folder(path.parent)
        disk.unlink(path)
    except OSError as error:
        return error if suggests_failure(error) else None
    return None


def failure_of(name: str, cause: BaseException, probed: OSError) -> LogDirError:
    """Return the error of a log directory whose probe failed.

    Args:
        name: Its name for clients.
        cause: What failed first.
        probed: What failed in the probe.
    """
    return LogDirError(
        "log directory failed; its partitions are offline until the broker restarts",
        hint="check the disk, repair or replace it, and restart the broker; if it cannot be "
        "repaired, restart the broker without this directory",
        log_dir=name,
        cause=str(cause),
        probe=str(probed),
    )


def end_without_database(path: Path, cause: LogmirrorError) -> UnavailableError:
    """Return why a broker whose database is in a bucket ends when it cannot write its copy.

    Args:
        path: The copy.
        cause: What failed.
    """
    return UnavailableError(
        "the broker has stopped: its copy of a database in the bucket cannot be written",
        hint="free space in the working directory or check its disk, and start the broker again, "
        "here or on another machine: nothing in the bucket is missing",
        path=str(path),
        cause=cause.facts.get("cause", str(cause)),
    )


def end_of_broker(dirs: LogDirs, vital: Collection[Path]) -> LogDirError | None:
    """Return why the broker cannot continue; None: it can.

    Args:
        dirs: The log directories.
        vital: Those with the broker's database and with the durable ends of the partitions.
    """
    names = [dirs.name_of(path) for path in dirs.offline]
    if any(path in dirs.offline for path in vital):
        reason = "the broker has stopped: a log directory with its database or durable ends failed"
    elif len(names) == len(dirs.on_disk):
        reason = "the broker has stopped: all its log directories on disks failed"
    else:
        return None
    first = next(iter(dirs.offline.values()))
    return LogDirError(
        reason,
        hint="check the disk, and start the broker again when it can be written",
        log_dirs=names,
        cause=first.facts["cause"],
    )
