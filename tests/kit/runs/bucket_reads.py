"""What a consumer makes of a log: all records, or those of committed transactions."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import decode_reference, marker_type

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKERS: Final = {MarkerType.COMMIT: b"committed", MarkerType.ABORT: b"aborted"}
"""What stands for a transaction marker among values of records."""

_NONE: Final = -1


class Batch(NamedTuple):
    """A batch of a log."""

    end: int
    producer_id: int
    """Of a transactional batch; else -1."""

    marker: MarkerType | None
    records: dict[int, bytes]
    """Values by offset."""


@lru_cache(maxsize=10_000)
def batches(data: bytes) -> tuple[Batch, ...]:
    """Return the batches of a file range."""
    found, position = [], 0
    while position < len(data):
        header = parse_header(data, position)
        kind = marker_type(data, header) if header.is_control else None
        if kind is not None:
            records = {header.base_offset: MARKERS[kind]}
        else:
            whole = data[position : position + header.size_bytes]
            records = {one.offset: one.value or b"" for one in decode_reference(whole)}
        writer = header.producer_id if header.is_transactional else _NONE
        found.append(Batch(header.last_offset + 1, writer, kind, records))
        position += header.size_bytes
    return tuple(found)


def everything(read: Iterable[Batch]) -> dict[int, bytes]:
    """Return the records of a Fetch response, and what stands for markers."""
    return {at: value for batch in read for at, value in batch.records.items()}


def committed(read: Iterable[Batch], aborted: Iterable[tuple[int, int]]) -> dict[int, bytes]:
    """Return what a consumer with read_committed makes of a Fetch response.

    Args:
        read: The batches, up to the last stable offset.
        aborted: Producer ID and first offset of each aborted transaction.
    """
    waiting = sorted(aborted, key=lambda one: one[1])
    active: set[int] = set()
    found: dict[int, bytes] = {}
    for batch in read:
        while waiting and waiting[0][1] < batch.end:
            active.add(waiting.pop(0)[0])
        if batch.marker is MarkerType.ABORT:
            active.discard(batch.producer_id)
        elif batch.marker is None and batch.producer_id not in active:
            found |= batch.records
    return found
