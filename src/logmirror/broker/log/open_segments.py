"""Reads the open segments of a partition, and decides what is torn and what is damaged.

Torn bytes were written and not flushed when the broker or the machine stopped. No producer got a
response for them, so the log may end before them. Damaged bytes were durable, and changed since.
Bytes are damaged if one of these holds:

- D1 They are before the recorded durable end (`durable_ends`). After `kill -9` and a clean stop
  that is the end of what was acknowledged.
- D2 An intact batch with a higher offset follows in the same file. A process that dies leaves a
  part of its last write and nothing behind it.
- D3 The file ends early, and D1 holds.

Otherwise they are torn. Open segments behind a segment that is not sealed prove nothing: their
records were never acknowledged (L2 in `partition_log`).

Three cases are decided wrongly, all after a power loss only. A change in the batches of the last
`FLUSH_S`, with nothing intact behind it, passes for a torn write. A later unflushed batch that is
on disk, with an earlier one that is not, passes for damage: nothing is lost, and the partition
waits for the user. So does a later open segment without the one before, if no durable end of the
partition was recorded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.broker.log.batch_scan import StoredBatch, find_intact, scan
from logmirror.broker.log.file_names import first_of
from logmirror.broker.log.producer_state import SequencedBatch
from logmirror.broker.log.segment import SparseIndex
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.producer_state import ProducerState


class DamagedLogError(CorruptionError):
    """Acknowledged records are damaged or missing; the partition is not opened.

    Facts: `path`, `position` in bytes, `offset`: the first one that is affected, and
    `durable_end`: records before it were acknowledged.
    """


def damaged(
    folder: Path, path: Path, position: int, offset: int, durable_end: int
) -> DamagedLogError:
    """Return the error for a path in a partition's folder."""
    partition = f"{folder.parent.name}-{folder.name}"
    return DamagedLogError(
        "acknowledged records are damaged or missing",
        hint="nothing was changed. Restore the file from a backup and restart the broker, or give "
        f"up these records: start it once with --accept-data-loss {partition}",
        path=str(path),
        position=position,
        offset=offset,
        durable_end=durable_end,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """What an open segment's file holds.

    Attributes:
        path: The file.
        first: Its first offset.
        next_offset: The end of its intact prefix.
        size_bytes: Size of that prefix.
        found_bytes: Size of the file.
        durable_bytes: Size of the part that is before the recorded durable end.
        later_end: The end of the last intact batch behind bytes that are not valid; None without.
        later_bytes: Where that batch ends; `size_bytes` without.
        index: The index of the intact prefix.
        following: The first offset of the next open segment; None: this is the last one.
        snapshot: The producer state before `following`; empty for the last one.
    """

    path: Path
    first: int
    next_offset: int
    size_bytes: int
    found_bytes: int
    durable_bytes: int
    later_end: int | None
    later_bytes: int
    index: SparseIndex
    following: int | None
    snapshot: bytes

    @property
    def is_whole(self) -> bool:
        """Whether the next open segment continues this one."""
        return self.found_bytes == self.size_bytes and self.next_offset == self.following

    def is_damaged(self, durable_end: int) -> bool:
        """Whether acknowledged records are damaged or missing: D1, D2 and D3."""
        is_short = self.next_offset < durable_end and not self.is_whole
        return is_short or self.later_end is not None


def read_open(
    path: Path, following: int | None, disk: Disk, producers: ProducerState, durable_end: int
) -> OpenSegment:
    """Read one open segment; changes nothing but `producers`, which it brings up to date.

    Args:
        path: The segment's file.
        following: The first offset of the next open segment, or None.
        disk: The system calls.
        producers: The producer state at the segment's start.
        durable_end: The recorded durable end.

    Raises:
        OSError: The file cannot be read.
        DamagedLogError: What follows invalid bytes cannot be decided.
    """
    first = first_of(path)
    file = disk.open_for_reading(path)
    found_bytes = os.fstat(file.fd).st_size
    index, durable_bytes = SparseIndex(), 0
    next_offset, end = first, 0
    for batch in scan(file, first, contiguous=True):
        index.add(batch.base_offset, batch.position, batch.max_timestamp_ms)
        next_offset, end = batch.last_offset + 1, batch.end
        if next_offset <= durable_end:
            durable_bytes = end
        remember(producers, batch)
    later_end, later_bytes = None, end
    while later_bytes < found_bytes:
        above = next_offset if later_end is None else later_end
        try:
            found = find_intact(file, later_bytes + 1, found_bytes, above=above)
        except CorruptionError as error:
            raise damaged(path.parent, path, later_bytes, above, durable_end) from error
        if found is None:
            break
        before = later_bytes
        for batch in scan(file, found.base_offset, contiguous=True, start=found.position):
            later_end, later_bytes = batch.last_offset + 1, batch.end
            remember(producers, batch)
        if later_bytes == before:  # the disk does not return the same bytes twice
            raise damaged(path.parent, path, later_bytes, above, durable_end)
    return OpenSegment(
        path=path,
        first=first,
        next_offset=next_offset,
        size_bytes=end,
        found_bytes=found_bytes,
        durable_bytes=durable_bytes,
        later_end=later_end,
        later_bytes=later_bytes,
        index=index,
        following=following,
        snapshot=b"" if following is None else producers.to_bytes(following),
    )


def remember(producers: ProducerState, batch: StoredBatch) -> None:
    """Record a stored batch in the producer state."""
    if batch.producer_id < 0:
        return
    writer, timestamp_ms = (batch.producer_id, batch.producer_epoch), batch.max_timestamp_ms
    if batch.coordinator_epoch is not None:
        producers.marked(*writer, batch.coordinator_epoch, timestamp_ms)
        if batch.is_commit is not None:
            ended = producers.transactions.ended
            offset = batch.base_offset
            ended(batch.producer_id, offset, offset, is_commit=batch.is_commit)
    elif batch.base_sequence >= 0:
        first, last = batch.base_sequence, batch.last_sequence
        stored = SequencedBatch(first, last, batch.base_offset, batch.last_offset, timestamp_ms)
        producers.stored(*writer, stored, is_transactional=batch.is_transactional)
