"""Checks a sealed segment before it is first served: every checksum, every offset.

Disks change bytes. A sealed segment is read once in each process, in a worker thread, when its
first record is requested. A kernel verifies the batches, so the cost is that of reading the file.
What is wrong is logged once, and refused to every reader; the rest is served.

Verified: checksum, structure, ascending offsets within the range of the file's name. In a segment
that this broker wrote also that no offset is missing, and that the leader epoch is 0, which Kafka's
checksum does not cover. A segment that was sealed by this process is checked when it is read again
from its file: until then its index is in memory.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.broker.log.batch_scan import WINDOW_BYTES, find_intact
from logmirror.broker.log.segment import Damage, Segment, SparseIndex
from logmirror.errors import CorruptionError, UsageError
from logmirror.wire.scan import Batches, BatchScanner

if TYPE_CHECKING:
    from logmirror.broker.log.disk import OpenFile

_LOG: Final = logging.getLogger(__name__)
MAX_DAMAGE: Final = 64
"""Limit for the damaged places of one segment. The last one extends to the segment's end."""


def load(segment: Segment, file: OpenFile) -> SparseIndex:
    """Return the index of a sealed segment; checks it first, if that was not done. Blocks.

    Raises:
        OSError: The file cannot be read.
    """
    if segment.is_checked:
        return segment.indexed(file)
    index, damage = _check(segment, file)
    for found in damage:
        _LOG.error(
            "%s: damaged at byte %d: offsets %d to %d are not served; restore the file from a "
            "backup and restart the broker, or move consumers to offset %d",
            segment.path,
            found.position,
            found.first_offset,
            found.next_offset - 1,
            found.next_offset,
        )
    segment.damage, segment.is_checked = damage, True
    return index


def _check(segment: Segment, file: OpenFile) -> tuple[SparseIndex, tuple[Damage, ...]]:
    index, damage = SparseIndex(), list[Damage]()
    scanner, size = BatchScanner(), segment.size_bytes
    position = needed = 0
    expected = segment.first
    while position < size:
        wanted = min(max(WINDOW_BYTES, needed), size - position)
        window = os.pread(file.fd, wanted, position)
        batches = _listed(scanner, window)
        count = _count_right(segment, batches, expected, is_first=position == 0)
        if count:
            columns = (batches.base_offsets, batches.positions + position)
            index.add_all(*(c[:count] for c in (*columns, batches.max_timestamps_ms)))
            expected = int(batches.last_offsets[count - 1]) + 1
            consumed = int(batches.positions[count - 1] + batches.sizes[count - 1])
            position, needed = position + consumed, 0
            continue
        if len(window) == wanted and wanted < batches.needed_bytes <= size - position:
            needed = batches.needed_bytes
            continue
        found = _next_intact(segment, file, position, expected, len(damage) + 1)
        damage.append(Damage(position, found[0], expected, found[1]))
        position, expected = found
    if segment.is_exact and expected != segment.next_offset:
        damage.append(Damage(size, size, expected, segment.next_offset))
    return index, tuple(damage)


def _listed(scanner: BatchScanner, window: bytes) -> Batches:
    """List the valid batches at the start of a window."""
    try:
        return scanner.scan(window, len(window))
    except (CorruptionError, UsageError) as error:  # UsageError: the magic byte is 0 or 1
        return scanner.scan(window, int(str(error.facts["position"])))


def _count_right(segment: Segment, batches: Batches, expected: int, *, is_first: bool) -> int:
    """Return how many of the batches have offsets that are possible at their place."""
    if not len(batches):
        return 0
    right = batches.last_offsets < segment.next_offset
    if segment.is_exact:
        ends = np.concatenate(([expected], batches.last_offsets[:-1] + 1))
        right &= (batches.base_offsets == ends) & (batches.leader_epochs == 0)
    else:
        # The first batch of an object may begin before it, if the copy began inside that batch.
        right[0] &= (batches.last_offsets if is_first else batches.base_offsets)[0] >= expected
    return len(batches) if right.all() else int(np.argmin(right))


def _next_intact(
    segment: Segment, file: OpenFile, position: int, expected: int, count: int
) -> tuple[int, int]:
    """Return position and base offset of the next intact batch, or the segment's end."""
    end = segment.size_bytes, segment.next_offset
    if count >= MAX_DAMAGE:
        return end
    epoch = 0 if segment.is_exact else None
    try:
        found = find_intact(file, position + 1, end[0], above=expected, epoch=epoch)
    except CorruptionError:
        return end
    if found is None or found.last_offset >= segment.next_offset:
        return end
    return found.position, found.base_offset
