"""Creates and locks the log directories of a broker."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import PRIVATE
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOG: Final = logging.getLogger(__name__)


@contextlib.contextmanager
def held_dir(log_dir: Path) -> Iterator[Path]:
    """Create and lock the log directory; yields the broker's private folder in it.

    Raises:
        UsageError: It is not writable, or in use by another broker.
    """
    private = log_dir / PRIVATE
    try:
        _make_durable(private)
        lock = os.open(private / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(
            "log directory is not writable",
            hint="give a writable directory with --log-dir",
            path=str(log_dir),
            cause=str(error),
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                "log directory is in use by another broker",
                hint="stop that broker, or give another directory with --log-dir",
                path=str(log_dir),
            ) from error
        yield private
    finally:
        os.close(lock)


def _make_durable(folder: Path) -> None:
    """Create a folder and its parents, and make their names durable."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # The last two also if they exist: a crash may have prevented it before.
    for parent in dict.fromkeys((*(path.parent for path in missing), *folder.parents[:2])):
        try:
            Disk().sync_folder(parent)
        except PermissionError as error:
            _LOG.warning("%s: could not be made durable: %s", parent, error)
