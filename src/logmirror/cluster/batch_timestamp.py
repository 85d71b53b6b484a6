"""Read the timestamp of the batch at an offset, from its header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.wire.batch_header import HEADER_SIZE, parse_header

if TYPE_CHECKING:
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition

_VIEW_BYTES: Final = 16 << 10
_BATCH_BYTES_MAX: Final = 8 << 20
"""A broker sends a batch whole. Batches above this size are not fetched again to fit."""

_DELETE_HORIZON: Final = 64
"""Attribute bit: the base timestamp is the delete horizon. See `logmirror.wire.records`."""

_LOG_APPEND: Final = 8
"""Attribute bit: the timestamp type is `LogAppendTime`."""


class BatchTimestamps:
    """Reads timestamps into a buffer that is reused. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = bytearray(_VIEW_BYTES)

    def read_ms(
        self,
        client: ClusterClient,
        partition: TopicPartition,
        offset: int,
        *,
        topic_id: bytes | None,
    ) -> int | None:
        """Return the timestamp of the first batch that ends at or after `offset`.

        Does not wait at the broker for new records.

        Args:
            client: An open client.
            partition: The partition.
            offset: A source offset.
            topic_id: The topic ID, 16 bytes. None: the cluster has no topic IDs.

        Returns:
            Milliseconds since 1970: the timestamp of the batch's first record, or the largest one
            if the header does not hold the first. None: there is no such batch, it has no
            timestamp, or it is larger than 8 MiB.

        Raises:
            LogmirrorError: See `ClusterClient.fetch`.
        """
        size, needed = 0, _VIEW_BYTES
        while size == 0 and 0 < needed <= _BATCH_BYTES_MAX:
            if needed > len(self._buffer):
                self._buffer = bytearray(needed)
            response = client.fetch(
                partition,
                offset,
                memoryview(self._buffer)[:needed],
                topic_id=topic_id,
                max_wait_ms=0,
            )
            size, needed = response.size, response.needed_bytes
        at = 0
        while at + HEADER_SIZE <= size:
            header = parse_header(self._buffer, at)
            if header.last_offset >= offset:
                is_max = header.attributes & (_LOG_APPEND | _DELETE_HORIZON)
                found_ms = header.max_timestamp_ms if is_max else header.base_timestamp_ms
                return found_ms if found_ms >= 0 else None
            at += max(header.size_bytes, HEADER_SIZE)
        return None
