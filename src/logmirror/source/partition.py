"""Executor: read one partition of the source: fetch into a reused buffer, scan, check.

A batch is passed on only after its CRC-32C, its structure and its offset were checked. Later stages
trust its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import LogmirrorError, PositionError
from logmirror.mirror.histories import diverged
from logmirror.source.gaps import beyond_the_end
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.cluster.client import ClusterClient, FetchResult
    from logmirror.model import TopicPartition
    from logmirror.wire.scan import Batches

FETCH_BYTES: Final = 4 << 20
"""Maximum size of a fetch. Larger responses exceed the CPU cache between socket, check and file."""

STALL_MS: Final = 30_000
"""Longest time without records below the last stable offset that the source reported earlier."""


class Polled(NamedTuple):
    """The result of one fetch."""

    fetched: Fetched | None
    """The batches; None: no new ones."""

    last_stable_offset: int
    """The last stable offset at the time of the fetch."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One scanned fetch response. The next fetch overwrites the buffer."""

    buffer: memoryview
    batches: Batches
    start: int
    """Index of the first batch that contains the requested offset or a later one."""


class FetchBuffer:
    """A fetch buffer that grows if one batch does not fit. Reused for the next partition."""

    def __init__(self, size_bytes: int = FETCH_BYTES) -> None:
        self.view = memoryview(bytearray(size_bytes))

    def grow(self, size_bytes: int) -> None:
        """Grow to at least this many bytes. The content is discarded."""
        if size_bytes > len(self.view):
            self.view = memoryview(bytearray(size_bytes))


class KafkaSource:
    """One partition of a cluster, read from any offset, up to the last stable offset.

    Each fetch that continues a batch names the batch's leader epoch, so that a source that has lost
    this batch sends no others in its place (KIP-320).

    Args:
        client: The cluster.
        partition: The partition.
        topic_id: The topic's ID, 16 bytes; None: not checked.
        buffer: A buffer to share with other partitions.
        scanner: A scanner to share with other partitions.
        position: Where a reader continues that has read a batch before; -1: none has.
        leader_epoch: The leader epoch of that batch; -1: unknown.
        compacted: Whether the log cleaner may have removed all batches of an epoch.
    """

    def __init__(  # noqa: PLR0913  # what is read, what reads it, and what was read before
        self,
        client: ClusterClient,
        partition: TopicPartition,
        *,
        topic_id: bytes | None,
        buffer: FetchBuffer | None = None,
        scanner: BatchScanner | None = None,
        position: int = -1,
        leader_epoch: int = -1,
        compacted: bool = False,
    ) -> None:
        self._client = client
        self._partition = partition
        self._topic_id = topic_id
        self._buffer = buffer or FetchBuffer()
        self._scanner = scanner or BatchScanner()
        self._polled_to = -1  # where the last batch of the last `poll` ended
        self._compacted = compacted
        self._epoch_at, self._last_epoch = position, leader_epoch  # of the batch that ended there

    def read(self, offset: int, end: int) -> Iterator[Fetched]:
        """Yield fetch responses up to `end`. Each is valid until the next one is requested.

        Args:
            offset: The first offset to read. The first batch may begin before it.
            end: One past the last offset to read. The last batch may end after it.

        Raises:
            PositionError: The source no longer has `offset`, ends below `end`, serves an offset
                below the expected one (R1), or its topic was recreated.
            CorruptionError: A batch does not match its checksum or its own header.
            UsageError: A batch is of message format 0 or 1.
            UnavailableError: The source did not respond in time.
        """
        give_up_ms = SYSTEM_CLOCK.monotonic_ms() + STALL_MS
        begun = offset
        while offset < end:
            response = self._fetch(offset)
            failpoints.reach("fetch.answered")
            batches = self._scan(response)
            start = self._first_wanted(batches, offset, inside=offset == begun)
            if start == batches.count:
                if response.high_watermark < end:
                    raise self._log_ends_early(end, response.high_watermark)
                if SYSTEM_CLOCK.monotonic_ms() > give_up_ms:
                    raise self._log_ends_early(end, offset)
                continue
            give_up_ms = SYSTEM_CLOCK.monotonic_ms() + STALL_MS
            offset = self._ends_at(batches)
            if offset < end:
                self._fetch_ahead(offset)
            yield Fetched(self._buffer.view, batches, start)

    def log_start(self) -> int:
        """Read the log start offset."""
        return self._client.list_offsets([self._partition], EARLIEST)[self._partition]

    def poll(self, offset: int, *, max_wait_ms: int, limit: int = 0) -> Polled:
        """Fetch once from `offset`.

        The fetched batches are valid until the next call. See `read` for errors.

        Args:
            offset: The first offset to read.
            max_wait_ms: How long the broker waits for new records, in milliseconds.
            limit: If the log has more records below this offset, the next fetch is sent already.
        """
        response = self._fetch(offset, max_wait_ms)
        failpoints.reach("fetch.answered")
        batches = self._scan(response)
        start = self._first_wanted(batches, offset, inside=offset != self._polled_to)
        last_stable_offset = response.last_stable_offset
        if last_stable_offset < 0:
            last_stable_offset = response.high_watermark
        if start == batches.count:
            return Polled(None, last_stable_offset)
        next_offset = self._polled_to = self._ends_at(batches)
        if next_offset < min(limit, last_stable_offset):
            self._fetch_ahead(next_offset)
        return Polled(Fetched(self._buffer.view, batches, start), last_stable_offset)

    def _first_wanted(self, batches: Batches, offset: int, *, inside: bool) -> int:
        """Return the index of the first batch that contains `offset` or a later one.

        `inside`: the batch may begin before `offset`. After the end of a previous batch it may not:
        batches never change their bounds, not even by log cleaning.
        """
        start = int(np.searchsorted(batches.last_offsets, offset))
        if start < batches.count and (inside or int(batches.base_offsets[start]) >= offset):
            return start
        if batches.count == 0:
            return 0
        raise PositionError(
            "the source served an offset below the expected one",
            hint="the source's log was truncated and written again (unclean leader election, or a "
            "restored disk). The copy is kept; compare it with the source.",
            reason="SourceWentBackwards",
            topic=self._partition.topic,
            partition=self._partition.partition,
            expected=offset,
            got=int(batches.base_offsets[min(start, batches.count - 1)]),
        )

    def _ends_at(self, batches: Batches) -> int:
        """Return where the last batch ends, and remember its leader epoch."""
        last = batches.count - 1
        self._epoch_at = int(batches.last_offsets[last]) + 1
        self._last_epoch = int(batches.leader_epochs[last])
        return self._epoch_at

    def _epoch_before(self, offset: int) -> int:
        """Return the leader epoch of the batch that ends at `offset`; -1: unknown."""
        return self._last_epoch if offset == self._epoch_at else -1

    def _fetch_ahead(self, offset: int) -> None:
        size = len(self._buffer.view)
        self._client.fetch_ahead(
            self._partition,
            offset,
            size,
            topic_id=self._topic_id,
            last_epoch=self._epoch_before(offset),
        )

    def _fetch(self, offset: int, max_wait_ms: int = 500) -> FetchResult:
        last_epoch = self._epoch_before(offset)
        while True:
            try:
                response = self._client.fetch(
                    self._partition,
                    offset,
                    self._buffer.view,
                    topic_id=self._topic_id,
                    max_wait_ms=max_wait_ms,
                    last_epoch=last_epoch,
                )
            except PositionError as error:
                raise _with_reason(error, offset) from None
            if response.diverging is not None:
                raise diverged(
                    self._partition,
                    offset,
                    last_epoch,
                    response.diverging,
                    compacted=self._compacted,
                )
            if not response.needed_bytes:
                return response
            self._buffer.grow(response.needed_bytes)  # one batch is larger than the buffer

    def _scan(self, response: FetchResult) -> Batches:
        try:
            found = self._scanner.scan(self._buffer.view, response.size, aborted=response.aborted)
            if found.count and found.last_offsets[-1] >= response.high_watermark:
                self._check_end(found)
        except LogmirrorError as error:
            raise error.add_facts(
                topic=self._partition.topic, partition=self._partition.partition
            ) from None
        return found

    def _check_end(self, batches: Batches) -> None:
        """Raise CorruptionError if the last batch ends beyond the high watermark.

        A batch's base offset is not covered by its checksum. A broker reads the high watermark
        before the batches, so the one in a response may lag behind them: the present one decides.
        """
        partition = self._partition
        end = self._client.list_offsets([partition], LATEST, read_committed=False)[partition]
        if batches.last_offsets[-1] >= end:
            raise beyond_the_end(batches, end)

    def _log_ends_early(self, end: int, found: int) -> PositionError:
        return PositionError(
            "the source ends below a last stable offset that it reported before",
            hint="the source's log was truncated (unclean leader election, or a restored disk). "
            "The copy is kept; compare it with the source before anything else.",
            topic=self._partition.topic,
            partition=self._partition.partition,
            reason="SourceWentBackwards",
            expected=end,
            got=found,
        )


def _with_reason(error: PositionError, offset: int) -> PositionError:
    """Add the reason why an offset is not in the log: the same that a start would report."""
    facts: dict[str, Any] = error.facts
    if facts.get("log_end_offset", offset) < offset:
        error.add_facts(reason="SourceWentBackwards", expected=offset, got=facts["log_end_offset"])
    elif facts.get("log_start_offset", offset) > offset:
        error.add_facts(
            reason="SourceTrimmed", position=offset, log_start=facts["log_start_offset"]
        )
    return error
