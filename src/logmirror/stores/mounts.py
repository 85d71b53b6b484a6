"""Which file system contains a directory, without touching that file system."""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePath
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")


def mount_point(root: str) -> str:
    """Return the mount point that contains a path, as far as the system knows.

    Symbolic links are not followed: reading one could wait for a file system that does not respond.

    Args:
        root: Absolute path; need not exist.

    Returns:
        An absolute path. Empty on systems without `/proc`.
    """
    containing = {str(parent) for parent in (PurePath(root), *PurePath(root).parents)}
    return max((mount for mount in _mount_points() if mount in containing), key=len, default="")


@functools.cache
def _mount_points() -> tuple[str, ...]:
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ()
    return tuple(_unescaped(line.split(" ")[4]) for line in lines)


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
