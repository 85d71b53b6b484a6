"""Object names, which are the archive's index.

    orders/0/00000000000000000100-00000000000000000199.parquet
    |folder  |first, 20 digits    |last, 20 digits     |extension

Twenty digits hold every offset, and the fixed width makes the order of names the order of offsets.
`first` is the previous object's `last` plus one, so an offset gap of the source is covered by the
object after it, and the names alone show the position, a missing range and an overlap. A name that
differs from its own parsed and formatted form is not an object name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from logmirror.errors import CorruptionError
from logmirror.model import OFFSET_MAX, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Collection

NATIVE: Final = "batches"
"""Extension of native objects: record batches as the source served them."""

PARQUET: Final = "parquet"
"""Extension of Parquet files with the columns of Spark's Kafka source."""

NDJSON: Final = "ndjson"
"""Extension of NDJSON objects: one JSON object per record and line."""

_FORMATS: Final = frozenset({NATIVE, PARQUET, NDJSON})
_PARTITION: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.([a-z0-9]+(?:\.[a-z0-9]+)*)")


def partition_folder(destination: str, partition: int) -> str:
    """Return the folder that holds a partition's objects, relative to the store's root."""
    return f"{destination}/{partition}"


def format_name(covered: OffsetRange, extension: str) -> str:
    """Return the name of the object that covers a range.

    Args:
        covered: The source offsets covered, both ends inclusive.
        extension: The format without a leading dot, for example `parquet`.
    """
    return f"{covered.first:020d}-{covered.last:020d}.{extension}"


def split_name(name: str) -> tuple[int, int, str] | None:
    """Return first offset, last offset and extension, or None if it is not an object name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2])
    if not first <= last <= OFFSET_MAX:
        return None
    return first, last, match[3]


def parse_name(name: str) -> tuple[OffsetRange, str] | None:
    """Return the covered offsets and the extension, or None if it is not an object name."""
    parts = split_name(name)
    if parts is None:
        return None
    return OffsetRange(first=parts[0], last=parts[1]), parts[2]


def parse_object_name(name: str) -> tuple[OffsetRange, str]:
    """Return the covered offsets and the extension of an object of a known format.

    Raises:
        CorruptionError: It is not the name of such an object.
    """
    parsed = parse_name(name)
    if parsed is None or parsed[1] not in _FORMATS:
        raise CorruptionError("not the name of an object", name=name)
    return parsed


def is_object_of(destinations: Collection[str], path: str) -> bool:
    """Return whether a path is that of an object which one of these destinations may hold.

    Args:
        destinations: Names of destinations.
        path: `<destination>/<partition>/<name>`, relative to the store's root.
    """
    folder, _, name = path.rpartition("/")
    destination, _, partition = folder.rpartition("/")
    parts = split_name(name)
    return (
        destination in destinations
        and _PARTITION.fullmatch(partition) is not None
        and parts is not None
        and parts[2] in _FORMATS
    )


def partition_of(folder: str) -> int:
    """Return the partition of a folder: `<destination>/<partition>`."""
    return int(folder.rpartition("/")[2])
