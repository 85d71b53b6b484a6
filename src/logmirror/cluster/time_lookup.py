"""The first committed record since a time.

ListOffsets counts transaction markers and aborted records, whose times say nothing about the
committed records after them: a marker has the time at which a transaction ended, and the markers of
a replica have the time of its copy. The lookup therefore reads on from what ListOffsets found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.errors import UnavailableError
from logmirror.wire.record_times import record_times
from logmirror.wire.scan import KIND_DATA, Batches, BatchScanner

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition

_BUFFER_BYTES: Final = 1 << 20
_UNPACKED_MAX: Final = 256 << 20
"""Limit for the records of one batch, decompressed."""

_STALL_MS: Final = 60_000
"""How long a broker may return nothing below an end that it has reported."""


def first_committed_since(
    client: ClusterClient, partition: TopicPartition, offsets: range, time_ms: int, clock: Clock
) -> int | None:
    """Return the offset of the first committed record with at least this timestamp; None: none.

    Args:
        client: The cluster.
        partition: The partition.
        offsets: Where to look: from what ListOffsets found, at most to the last stable offset.
        time_ms: Milliseconds since 1970.
        clock: For the deadline.

    Raises:
        CorruptionError: A batch is damaged.
        UnavailableError: The cluster did not respond, or returned nothing for a minute.
        PositionError: The log no longer has these offsets.
    """
    view, scanner = memoryview(bytearray(_BUFFER_BYTES)), BatchScanner()
    offset, moved_ms = offsets.start, clock.monotonic_ms()
    while offset < offsets.stop:
        response = client.fetch(partition, offset, view, topic_id=None)
        if response.needed_bytes:
            view = memoryview(bytearray(response.needed_bytes))
            continue
        batches = scanner.scan(view, response.size, aborted=response.aborted)
        if batches.count == 0:
            if clock.monotonic_ms() - moved_ms > _STALL_MS:
                raise UnavailableError(
                    "the broker returns no records below the last stable offset that it reported",
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=offset,
                    end=offsets.stop,
                )
            continue
        found = first_since(view, batches, range(offset, offsets.stop), time_ms)
        if found is not None:
            return found
        offset, moved_ms = int(batches.last_offsets[-1]) + 1, clock.monotonic_ms()
    return None


def first_since(view: memoryview, batches: Batches, offsets: range, time_ms: int) -> int | None:
    """Return the offset of the first committed record of a response with at least this timestamp.

    Args:
        view: The response.
        batches: Its batches.
        offsets: Where to look.
        time_ms: Milliseconds since 1970.

    Returns:
        None if there is none.

    Raises:
        CorruptionError: A batch cannot be decompressed.
    """
    is_late = (batches.kinds == KIND_DATA) & (batches.max_timestamps_ms >= time_ms)
    is_late &= (batches.last_offsets >= offsets.start) & (batches.base_offsets < offsets.stop)
    for at in is_late.nonzero()[0].tolist():
        begin, size = int(batches.positions[at]), int(batches.sizes[at])
        batch = bytes(view[begin : begin + size])
        for found_ms, offset in record_times(batch, max_body_bytes=_UNPACKED_MAX):
            if found_ms >= time_ms and offset in offsets:
                return offset
    return None
