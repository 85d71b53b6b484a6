"""Object names, which are the archive's index.

    orders/0/00000000000000000100-00000000000000000199.parquet
    |folder  |first, 20 digits    |last, 20 digits     |extension

Twenty digits hold every offset, and a fixed width makes the order of names the order of offsets,
so a sorted listing needs no parsing to be read. `first` is the `last` of the object before plus
one, so a hole belongs to the object after it and the names alone tell the position, a gap, an
overlap. A name that does not reproduce itself through parsing and formatting is not ours.
"""

from __future__ import annotations

import re
from typing import Final

from logmirror.model import OFFSET_MAX, OffsetRange

NATIVE: Final = "batches"
"""Extension of record batches as the source served them."""

PARQUET: Final = "parquet"
"""Extension of Parquet files with the columns of Spark's Kafka source."""

NDJSON: Final = "ndjson"
"""Extension of one JSON object per record and line."""

_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.([a-z0-9]+(?:\.[a-z0-9]+)*)")


def partition_folder(destination: str, partition: int) -> str:
    """Return the folder that holds a partition's objects, relative to the store's root."""
    return f"{destination}/{partition}"


def format_name(covered: OffsetRange, extension: str) -> str:
    """Return the object name for records that cover `covered`.

    Args:
        covered: The source offsets accounted for, both ends included.
        extension: The format without a leading dot, for example `parquet`.
    """
    return f"{covered.first:020d}-{covered.last:020d}.{extension}"


def split_name(name: str) -> tuple[int, int, str] | None:
    """Return first offset, last offset and extension, or None if the name is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2])
    if not first <= last <= OFFSET_MAX:
        return None
    return first, last, match[3]


def parse_name(name: str) -> tuple[OffsetRange, str] | None:
    """Return the covered offsets and the extension, or None if the name is not ours."""
    parts = split_name(name)
    if parts is None:
        return None
    return OffsetRange(first=parts[0], last=parts[1]), parts[2]
