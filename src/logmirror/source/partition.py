"""Executor: one partition's batches, fetched into one reused buffer and scanned.

A batch is handed on only after its CRC-32C, its structure and its place in the log were checked;
from there on its bytes are trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import EARLIEST
from logmirror.errors import LogmirrorError, PositionError
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.cluster.client import ClusterClient, FetchResult
    from logmirror.model import TopicPartition
    from logmirror.wire.scan import Batches

FETCH_BYTES: Final = 4 << 20
"""Asked for at once. Larger answers fall out of the cache between socket, check and file."""

STALL_MS: Final = 30_000
"""How long a source may deliver nothing below an offset that it has called stable."""


class Polled(NamedTuple):
    """One look at the source: what came, if anything did, and how far it may be copied now."""

    fetched: Fetched | None
    last_stable_offset: int
    """The last stable offset at that moment."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One scanned response. The buffer is used again by the next fetch."""

    buffer: memoryview
    batches: Batches
    start: int
    """The first batch that reaches the offset asked for; earlier ones were only delivered."""


class FetchBuffer:
    """A buffer that grows when one batch does not fit, and is kept for the next partition."""

    def __init__(self, size_bytes: int = FETCH_BYTES) -> None:
        self.view = memoryview(bytearray(size_bytes))

    def grow(self, size_bytes: int) -> None:
        """Hold at least this many bytes; what was held is gone."""
        if size_bytes > len(self.view):
            self.view = memoryview(bytearray(size_bytes))


class KafkaSource:
    """One partition of a cluster, read from any offset, up to the last stable offset."""

    def __init__(
        self,
        client: ClusterClient,
        partition: TopicPartition,
        *,
        topic_id: bytes | None,
        buffer: FetchBuffer | None = None,
        scanner: BatchScanner | None = None,
    ) -> None:
        self._client = client
        self._partition = partition
        self._topic_id = topic_id
        self._buffer = buffer or FetchBuffer()
        self._scanner = scanner or BatchScanner()
        self._polled_to = -1  # where the last batch of the last `poll` ended

    def read(self, offset: int, end: int) -> Iterator[Fetched]:
        """Yield responses until one reaches `end`; each is valid until the next is asked for.

        Args:
            offset: The first offset wanted. The first batch may begin before it.
            end: One past the last offset wanted; the last batch may reach beyond it.

        Raises:
            PositionError: The source no longer has `offset`, is another incarnation of the topic,
                ends below `end`, or serves an offset below the expected one (R1).
            CorruptionError: A batch does not match its checksum or its own header.
            UsageError: A batch is of message format 0 or 1.
            UnavailableError: The source did not answer in time.
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
            offset = int(batches.last_offsets[batches.count - 1]) + 1
            if offset < end:
                self._ask_ahead(offset)
            yield Fetched(self._buffer.view, batches, start)

    def log_start(self) -> int:
        """The first offset that the source still has."""
        return self._client.list_offsets([self._partition], EARLIEST)[self._partition]

    def poll(self, offset: int, *, max_wait_ms: int, limit: int = 0) -> Polled:
        """Fetch once from `offset`; waits for `max_wait_ms` at most where nothing is there.

        What was fetched is valid until the next call. Where more is there below `limit`, it is
        asked for already. See `read` for errors.
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
        next_offset = self._polled_to = int(batches.last_offsets[batches.count - 1]) + 1
        if next_offset < min(limit, last_stable_offset):
            self._ask_ahead(next_offset)
        return Polled(Fetched(self._buffer.view, batches, start), last_stable_offset)

    def _first_wanted(self, batches: Batches, offset: int, *, inside: bool) -> int:
        """The first batch that reaches `offset`; earlier ones were only delivered.

        `inside`: it may begin before `offset`. Where a batch has just ended, none may: batches keep
        their bounds for life, the cleaner's work included.
        """
        start = int(np.searchsorted(batches.last_offsets, offset))
        if start < batches.count and (inside or int(batches.base_offsets[start]) >= offset):
            return start
        if batches.count == 0:
            return 0
        raise PositionError(
            "the source served an offset below the expected one",
            hint="the source's log was cut and written again (unclean leader election, or a "
            "restored disk). What is copied is kept; compare it with the source.",
            reason="SourceWentBackwards",
            topic=self._partition.topic,
            partition=self._partition.partition,
            expected=offset,
            got=int(batches.base_offsets[min(start, batches.count - 1)]),
        )

    def _ask_ahead(self, offset: int) -> None:
        size = len(self._buffer.view)
        self._client.fetch_ahead(self._partition, offset, size, topic_id=self._topic_id)

    def _fetch(self, offset: int, max_wait_ms: int = 500) -> FetchResult:
        while True:
            response = self._client.fetch(
                self._partition,
                offset,
                self._buffer.view,
                topic_id=self._topic_id,
                max_wait_ms=max_wait_ms,
            )
            if not response.needed_bytes:
                return response
            self._buffer.grow(response.needed_bytes)  # one batch is larger than the buffer

    def _scan(self, response: FetchResult) -> Batches:
        try:
            return self._scanner.scan(self._buffer.view, response.size, aborted=response.aborted)
        except LogmirrorError as error:
            raise error.add_facts(
                topic=self._partition.topic, partition=self._partition.partition
            ) from None

    def _log_ends_early(self, end: int, found: int) -> PositionError:
        return PositionError(
            "the source ends below an offset that it had called stable",
            hint="the source's log was cut (unclean leader election, or a restored disk). What is "
            "copied is kept; compare it with the source before anything else.",
            topic=self._partition.topic,
            partition=self._partition.partition,
            reason="SourceWentBackwards",
            expected=end,
            got=found,
        )
