"""Driver and executor: a replica that ends below the source's log start offset.

It may be continued only if it holds nothing but padding: else the records in between are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.cluster.client import EARLIEST
from logmirror.errors import PositionError
from logmirror.wire.batch_header import HEADER_SIZE, parse_header

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition

_VIEW_BYTES: Final = 16 << 10
_BATCH_BYTES_MAX: Final = 8 << 20
"""A broker sends a batch whole. The executor checks replicas with larger ones."""


def check_trimmed(
    client: ClusterClient, where: TopicPartition, end: int, source_start: int, padding: int
) -> None:
    """Check a replica that ends at `end`, below `source_start`, before a start.

    Two requests at most. The executor checks again, and deletes padding that a crash has left.

    Args:
        client: The destination's cluster.
        where: The partition there.
        end: Its log end offset.
        source_start: The source's log start offset.
        padding: The producer ID of padding.

    Raises:
        PositionError: The replica holds records, and the source no longer has the next one.
    """
    start = client.list_offsets([where], EARLIEST, read_committed=False)[where]
    if start < end and _last_producer(client, where, end) not in (None, padding):
        raise trimmed_error(end, start, source_start)


def trimmed_error(end: int, start: int, source_start: int) -> PositionError:
    """Return the error of a replica with the offsets `start` to `end` - 1."""
    return PositionError(
        "the source no longer has the next record: retention or DeleteRecords removed it",
        hint="the source has deleted the records between position and source_start. The copied "
        "records are kept; to copy the remaining ones, use another destination topic.",
        reason="SourceTrimmed",
        position=end,
        log_start=start,
        source_start=source_start,
    )


def _last_producer(client: ClusterClient, where: TopicPartition, end: int) -> int | None:
    """Return the producer ID of the last batch; None if the batch cannot be read now."""
    size, needed, buffer = 0, _VIEW_BYTES, bytearray()
    while size == 0 and 0 < needed <= _BATCH_BYTES_MAX:
        buffer = bytearray(needed)
        view = memoryview(buffer)
        try:
            response = client.fetch(
                where, end - 1, view, topic_id=None, max_wait_ms=0, read_committed=False
            )
        except PositionError:
            return None  # the log has just moved: another mirror writes padding
        size, needed = response.size, response.needed_bytes
    at = 0
    while at + HEADER_SIZE <= size:
        header = parse_header(buffer, at)
        if header.last_offset >= end - 1:
            return header.producer_id
        at += max(header.size_bytes, HEADER_SIZE)
    return None
