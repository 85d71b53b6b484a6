"""Replicas with new offsets: which record of the source each of their records is.

Offsets do not show it, so each record of the torture has a number (`feeder.number_of`).
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final

from logmirror.torture.feeder import number_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logmirror.testing.checker import Row

PROGRESS: Final = "__logmirror-progress"
"""The topic of the progress records (docs/formats/progress.md), at the destination."""


def syncs_topic(destination: str) -> str:
    """Return the topic of a destination's offset syncs, at the source."""
    return f"mm2-offset-syncs.{destination}.internal"


def with_source_offsets(copied: Iterable[Row], offsets: Mapping[int, int]) -> Iterator[Row]:
    """Yield the records of a replica with the source's offsets; -1: not a record of the source.

    Args:
        copied: The records.
        offsets: Offset at the source of each record, by number.
    """
    for row in copied:
        yield row._replace(offset=offsets.get(number_of(row), -1))


def next_offset(progress: Iterable[Row], mirror: str, partition: int) -> int:
    """Return the position in the last progress record of a flow; 0: there is none."""
    position = 0
    for row in progress:
        kind, *flow = json.loads(row.key or b"")
        if kind == "next" and (flow[0], flow[2]) == (mirror, partition):
            position = json.loads(row.value or b"")["next"]
    return position


def wrong_pairs(
    syncs: Iterable[Row], partition: int, copied: Iterable[Row], offsets: Mapping[int, int]
) -> Iterator[str]:
    """Yield the offset syncs of a partition whose two offsets belong to different records.

    Args:
        syncs: The records of MirrorMaker's topic, in its format.
        partition: The partition.
        copied: The records of the replica, with their offsets there.
        offsets: Offset at the source of each record, by number.
    """
    origins = {row.offset: offsets.get(number_of(row), -1) for row in copied}
    for row in syncs:
        (number,) = struct.unpack(">i", (row.key or b"")[-4:])
        upstream, downstream = struct.unpack(">qq", row.value or b"")
        found = origins.get(downstream)
        if number == partition and found != upstream:
            yield f"{upstream} maps to {downstream}, which holds the record of offset {found}"
