"""The names of the files of a partition's folder.

<first>-<last>.batches   a sealed segment: durable, never changed
<first>-<last>.<version>.batches
                         a compacted segment of a log dir in a bucket (`bucket.replacing`)
.<first>.open            the open segment
.<next>.producers        the producer state before offset <next>
.<first>.cleaned         a compacted segment that is being written, see `cleaner`
.<first>.cut             what recovery cut off the log from offset <first> on; never read again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.archive.naming import NATIVE, format_name
from logmirror.model import OffsetRange

if TYPE_CHECKING:
    from pathlib import Path


def open_path(folder: Path, first: int) -> Path:
    """Return the path of the open segment that begins at `first`."""
    return folder / f".{first:020d}.open"


def first_of(path: Path) -> int:
    """Return the first offset in the name of an open segment or of cut-off bytes."""
    return int(path.name[1:21])


def cut_path(folder: Path, first: int) -> Path:
    """Return the path of the bytes that recovery cut off at `first`."""
    return folder / f".{first:020d}.cut"


def cleaned_path(folder: Path, first: int) -> Path:
    """Return the path of a compacted segment that begins at `first`, while it is written."""
    return folder / f".{first:020d}.cleaned"


def snapshot_path(folder: Path, next_offset: int) -> Path:
    """Return the path of the producer snapshot at `next_offset`."""
    return folder / f".{next_offset:020d}.producers"


def sealed_path(folder: Path, first: int, next_offset: int, version: str = "") -> Path:
    """Return the path of a sealed segment."""
    return folder / sealed_name(first, next_offset, version)


def sealed_name(first: int, next_offset: int, version: str = "") -> str:
    """Return the name of a sealed segment, or of its object in a bucket."""
    extension = f"{version}.{NATIVE}" if version else NATIVE
    return format_name(OffsetRange(first=first, last=next_offset - 1), extension)
