"""Which segments of a log are too old or too many. The rules are Kafka's.

- R1 A segment is deleted as a whole, when its newest record is older than `retention.ms`. Records
  without a timestamp are as old as the last write to their file.
- R2 A segment is deleted when the log without it has still `retention.bytes`.
- R3 Segments are deleted from the oldest on. The first one that stays protects all after it.
- R4 The open segment is sealed before it is deleted.

The age of a segment is in memory since it was sealed or read. After a restart it is read from the
file, checksums included, but only once the first batch is old enough: the newest record is not
older than that.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.segment_cache import SegmentCache

NO_LIMIT: Final = -1
_MAX_TIMESTAMP: Final = Struct(">q")
_MAX_TIMESTAMP_AT: Final = 35
MAX_SEGMENTS: Final = 1000
"""Segments that one call considers; the caller calls again for the rest."""


class Expired(NamedTuple):
    """What retention found at the start of a log."""

    deletable: int
    """Number of segments to delete, from the oldest on."""

    unread: Segment | None
    """The segment behind them, if its age must be read first (`read_age`)."""

    due_ms: int | None
    """When the segment behind them is too old; None: there is none, or no limit of age."""


def expired(  # noqa: PLR0913  # what retention depends on
    segments: Sequence[Segment],
    *,
    size_bytes: int,
    high_watermark: int,
    retention_ms: int,
    retention_bytes: int,
    now_ms: int,
) -> Expired:
    """Return the segments to delete.

    Args:
        segments: The segments of the log, oldest first.
        size_bytes: Their size.
        high_watermark: Records from there on are not deleted.
        retention_ms: `retention.ms`.
        retention_bytes: `retention.bytes`.
        now_ms: The current time.
    """
    excess = size_bytes - retention_bytes if retention_bytes != NO_LIMIT else 0
    for count, segment in enumerate(segments[:MAX_SEGMENTS]):
        is_empty = segment.size_bytes == 0 and not segment.is_sealed
        if is_empty or segment.next_offset > high_watermark:
            return Expired(count, None, None)
        excess -= segment.size_bytes
        if retention_bytes != NO_LIMIT and excess >= 0:
            continue
        if retention_ms == NO_LIMIT:
            return Expired(count, None, None)
        newest_ms = segment.newest_ms
        if not segment.is_sealed and segment.index is not None:
            newest_ms = segment.index.max_timestamp_ms
            if newest_ms < 0:
                return Expired(count, None, None)  # it has an age when it is sealed
        if newest_ms is None:
            return Expired(count, segment, None)
        if now_ms - newest_ms <= retention_ms:
            return Expired(count, None, newest_ms + retention_ms + 1)
    return Expired(min(len(segments), MAX_SEGMENTS), None, None)


def first_time(segment: Segment, disk: Disk) -> int:
    """Return the largest timestamp of a segment's first batch, -1 without one. Blocks.

    Raises:
        OSError: The file cannot be read.
    """
    found = disk.read_start(segment.path, _MAX_TIMESTAMP_AT + _MAX_TIMESTAMP.size)
    is_whole = len(found) == _MAX_TIMESTAMP_AT + _MAX_TIMESTAMP.size
    return int(_MAX_TIMESTAMP.unpack_from(found, _MAX_TIMESTAMP_AT)[0]) if is_whole else -1


def read_age(segment: Segment, cache: SegmentCache, disk: Disk, *, older_than_ms: int) -> int:
    """Return the time of a sealed segment's newest record, and remember it. Blocks.

    If the first batch is not older than `older_than_ms`, its time is returned, and not remembered.

    Raises:
        OSError: The file cannot be read.
        CorruptionError: The file was damaged since its check.
    """
    first_ms = first_time(segment, disk)
    if first_ms >= older_than_ms:
        return first_ms
    file, index = cache.loaded(segment)
    segment.newest_ms = index.max_timestamp_ms
    if segment.newest_ms < 0:
        segment.newest_ms = int(os.fstat(file.fd).st_mtime * 1000)
    return segment.newest_ms
