"""Driver: reads the records of a partition as digests, in bounded memory.

Between two fetches only digests are kept: some hundred bytes for each record, whatever its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import UnavailableError
from logmirror.source.partition import STALL_MS, FetchBuffer, KafkaSource
from logmirror.to_kafka.takeover_walk import Tail
from logmirror.wire.row_digests import row_digests
from logmirror.wire.scan import KIND_ABORTED, KIND_DATA

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition
    from logmirror.source.partition import Fetched
    from logmirror.wire.decode import RecordDecoder

_WAIT_MS: Final = 500

NOTHING: Final = Tail(
    np.empty(0, np.int64),
    np.empty((0, 2), np.int64),
    np.empty((0, 2), np.int64),
    np.empty(0, bool),
    np.empty(0, bool),
    np.empty(0, np.int64),
)


class PartitionLog:
    """One partition, whose bounds are read once.

    Args:
        client: Its cluster.
        where: The partition.
        decoder: May be shared with other readers of the same thread.
        buffer: May be shared likewise.
        clock: For the deadline.
        with_aborted: Whether records of aborted transactions are read too.

    Attributes:
        start: The log start offset.
        last_stable: The last stable offset.
        end: The log end offset.
    """

    def __init__(  # noqa: PLR0913  # the log, and what reads it
        self,
        client: ClusterClient,
        where: TopicPartition,
        decoder: RecordDecoder,
        buffer: FetchBuffer,
        clock: Clock = SYSTEM_CLOCK,
        *,
        with_aborted: bool,
    ) -> None:
        self._client, self.where, self._decoder, self._clock = client, where, decoder, clock
        self._buffer, self._with_aborted = buffer, with_aborted
        self._topic_id = client.topic(where.topic).topic_id
        self.start = client.list_offsets([where], EARLIEST)[where]
        self.last_stable = client.list_offsets([where], LATEST)[where]
        self.end = client.log_ends([where])[where].end_offset

    def offset_at(self, timestamp_ms: int) -> int:
        """Return an offset at or before the first record with this timestamp."""
        if timestamp_ms < 0:
            return self.start
        found = self._client.list_offsets([self.where], timestamp_ms)[self.where]
        return max(found, self.start)

    def read(self, first: int, end: int, *, wanted: int) -> Tail:
        """Read records from `first` on, up to `end` or to the last stable offset.

        Args:
            first: The first offset.
            end: One past the last offset.
            wanted: Stop after as many committed records; those of the last fetch are all returned.

        Raises:
            PositionError: The log no longer has `first`.
            UnavailableError: The log delivered nothing in time.
        """
        log = KafkaSource(self._client, self.where, topic_id=self._topic_id, buffer=self._buffer)
        parts, count, offset = [NOTHING], 0, first
        give_up_ms = self._clock.monotonic_ms() + STALL_MS
        while offset < end and count < wanted:
            polled = log.poll(offset, max_wait_ms=_WAIT_MS)
            if polled.fetched is None:
                if polled.last_stable_offset <= offset:
                    break
                if self._clock.monotonic_ms() > give_up_ms:
                    raise UnavailableError(
                        "a log delivered no records in time",
                        topic=self.where.topic,
                        partition=self.where.partition,
                        offset=offset,
                    )
                continue
            give_up_ms = self._clock.monotonic_ms() + STALL_MS
            part = self._digested(polled.fetched, offset, end)
            parts.append(part)
            count += int((~part.is_aborted).sum())
            offset = int(polled.fetched.batches.last_offsets[-1]) + 1
        return joined(*parts)

    def _digested(self, fetched: Fetched, first: int, end: int) -> Tail:
        batches, parts = fetched.batches, [NOTHING]
        is_aborted = batches.kinds == KIND_ABORTED
        bases, lasts = batches.base_offsets[is_aborted], batches.last_offsets[is_aborted]
        if self._with_aborted:
            batches.kinds[is_aborted] = KIND_DATA
        for columns in self._decoder.decode(fetched.buffer, batches, first=first, end=end):
            offsets = columns.offsets.copy()
            digests = row_digests(columns)
            batch = np.searchsorted(bases, offsets, side="right") - 1
            inside = batch >= 0
            inside[inside] = offsets[inside] <= lasts[batch[inside]]
            parts.append(
                Tail(
                    offsets,
                    digests.records,
                    digests.keys,
                    columns.value_lengths < 0,
                    inside,
                    columns.timestamps_ms.copy(),
                )
            )
        return joined(*parts)


def joined(*parts: Tail) -> Tail:
    """Return consecutive parts as one."""
    return Tail(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
