"""Finds the batches that a Fetch returns, across the segments of one partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logmirror.broker.log.segment import DamagedRecordsError, batches_in, end_before
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.segment import FileRange, Segment, SparseIndex


class StorageError(UnavailableError):
    """The disk failed; the operation had no effect."""


class ColdSegmentError(Exception):
    """A read needs a segment whose index is not in memory."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(str(segment.path))
        self.segment = segment


class ReadSegment(NamedTuple):
    """A segment, its file and index if they are loaded, and how many bytes may be read."""

    segment: Segment
    loaded: tuple[OpenFile, SparseIndex] | None
    readable_bytes: int


def read_batches(
    segments: Iterable[ReadSegment], offset: int, before: int, left: int, *, at_least_one: bool
) -> tuple[list[FileRange], int]:
    """Find whole batches.

    Args:
        segments: The segment that holds `offset`, and those after it.
        offset: Where to begin.
        before: Batches from this offset on are left out.
        left: Limit in bytes, except for `at_least_one`.
        at_least_one: Whether to return the first batch even if it exceeds `left`.

    Returns:
        File ranges in order, and an offset that none of them reaches.

    Raises:
        ColdSegmentError: The first segment is not loaded.
        StorageError: A segment cannot be read.
        DamagedRecordsError: The records at `offset` are damaged.
    """
    found: list[FileRange] = []
    found_to = offset
    for segment, loaded, readable_bytes in segments:
        if offset >= before:
            break
        if loaded is None:
            if found:
                break
            raise ColdSegmentError(segment)
        must_have = at_least_one and not found
        limit = min(readable_bytes, loaded[1].end)
        try:
            end = end_before(segment, loaded, before, limit)
            place, reached = batches_in(segment, loaded, offset, end, left, must_have)
        except DamagedRecordsError:
            if found:
                break
            raise
        except OSError as error:
            raise StorageError(
                "segment could not be read", path=str(segment.path), cause=str(error)
            ) from error
        if place is not None:
            found.append(place)
            left -= place.size_bytes
            found_to = loaded[1].offset_after(reached, segment.next_offset)
        offset = segment.next_offset
        if reached < end or left <= 0 or limit < readable_bytes:
            break
    return found, found_to
