"""Which objects of a mounted log a lookup by timestamp reads: few, not all from the first on.

A binary search finds an object that reaches the timestamp, behind one that does not. Records may be
out of order, so the `NEAR` objects before it are read, too. The first object that reaches the
timestamp is found if of any `NEAR` objects in a row one has a record that is as new as all records
before them. Objects without timestamps do not count. A log of up to `NEAR` objects is read whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.broker.log.segment import Segment
    from logmirror.broker.log.segment_cache import SegmentCache

NEAR: Final = 16
NO_TIME: Final = -1


def first_reaching(count: int, newest_ms: Callable[[int], int], wanted_ms: int) -> int:
    """Return the number of the first object that reaches a timestamp; `count` if none does.

    Args:
        count: Number of objects.
        newest_ms: Returns the largest timestamp of an object; `NO_TIME` if it has none.
        wanted_ms: The timestamp, at least 0.
    """
    low, found = 0, count
    while low < found:
        middle = (low + found) // 2
        at = middle
        while at >= low and newest_ms(at) == NO_TIME:
            at -= 1
        if at >= low and newest_ms(at) >= wanted_ms:
            found = at
        else:
            low = middle + 1
    near, at = 0, found
    while near < NEAR and at:
        at -= 1
        newest = newest_ms(at)
        if newest >= wanted_ms:
            found, near = at, 0
        elif newest != NO_TIME:
            near += 1
    return found


def newest_objects(count: int, newest_ms: Callable[[int], int]) -> int:
    """Return the number of the object from which on the largest timestamp of all is found."""
    near, at = 0, count
    while near < NEAR and at:
        at -= 1
        near += newest_ms(at) != NO_TIME
    return at


def newest_time(cache: SegmentCache, segments: Sequence[Segment]) -> Callable[[int], int]:
    """Return the function that reads the largest timestamp of an object, once. Blocks.

    It raises as `SegmentCache.loaded` does, and DamagedRecordsError.
    """

    def newest_ms(number: int) -> int:
        segment = segments[number]
        if segment.newest_ms is None and segment.source is not None:
            segment.newest_ms = segment.source.newest_ms(segment)
        if segment.newest_ms is None:
            _, index = cache.loaded(segment)
            segment.check_intact(segment.first)
            segment.newest_ms = max(NO_TIME, index.max_timestamp_ms)
        return segment.newest_ms

    return newest_ms
