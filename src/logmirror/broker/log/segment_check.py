"""Checks a sealed segment before it is first served: every checksum, every offset.

Disks change bytes. A sealed segment is read once in each process, in a worker thread, when its
first record is requested. That takes about 3 us for each batch, beside reading the file. What is
wrong is logged once, and refused to every reader; the rest is served.

Verified: checksum, structure, ascending offsets within the range of the file's name. In a segment
that this broker wrote also that no offset is missing, and that the leader epoch is 0, which Kafka's
checksum does not cover. A segment that was sealed by this process is checked when it is read again
from its file: until then its index is in memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.batch_scan import find_intact, scan
from logmirror.broker.log.mounted_transactions import TransactionEvents
from logmirror.broker.log.segment import Damage, Segment, SparseIndex
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from logmirror.broker.log.batch_scan import StoredBatch
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
    index, damage, events = _check(segment, file, segment.size_bytes)
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
    segment.events, segment.damage, segment.is_checked = events, damage, True
    return index


def is_sound(segment: Segment, file: OpenFile, size_bytes: int) -> bool:
    """Whether each batch of a file is as it was written. Blocks."""
    return not _check(segment, file, size_bytes)[1]


def _check(
    segment: Segment, file: OpenFile, size: int
) -> tuple[SparseIndex, tuple[Damage, ...], TransactionEvents | None]:
    index, damage = SparseIndex(), list[Damage]()
    position, expected = 0, segment.first
    events = TransactionEvents() if segment.source is not None else None
    while position < size:
        # The first batch of an object may begin before it, if the copy began inside that batch.
        first = expected if segment.is_exact or position else 0
        for batch in scan(file, first, contiguous=segment.is_exact, start=position):
            if batch.end > size or not expected <= batch.last_offset < segment.next_offset:
                break
            index.add(batch.base_offset, batch.position, batch.max_timestamp_ms)
            if events is not None:
                _add(events, batch)
            expected, position = batch.last_offset + 1, batch.end
        if position < size:
            count = len(damage) + 1
            found = _next_intact(segment, file, (position, size), expected, count)
            damage.append(Damage(position, found[0], expected, found[1]))
            position, expected = found
    if segment.is_exact and expected != segment.next_offset:
        damage.append(Damage(size, size, expected, segment.next_offset))
    return index, tuple(damage), events


def _add(events: TransactionEvents, batch: StoredBatch) -> None:
    if batch.is_commit is not None:
        events.ended(batch.producer_id, batch.last_offset, is_commit=batch.is_commit)
    elif batch.is_transactional and batch.coordinator_epoch is None:
        events.wrote(batch.producer_id, batch.base_offset)


def _next_intact(
    segment: Segment, file: OpenFile, span: tuple[int, int], expected: int, count: int
) -> tuple[int, int]:
    """Return position and base offset of the next intact batch, or the segment's end."""
    end = span[1], segment.next_offset
    if count >= MAX_DAMAGE:
        return end
    epoch = 0 if segment.is_exact else None
    try:
        found = find_intact(file, span[0] + 1, end[0], above=expected, epoch=epoch)
    except CorruptionError:
        return end
    if found is None or found.last_offset >= segment.next_offset:
        return end
    return found.position, found.base_offset
