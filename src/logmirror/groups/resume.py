"""The records at which groups would continue in a replica, for people who review a plan.

Invariants:
1. Each different place of the replica is fetched once, and at most one batch is decoded at a time.
2. What cannot be read in time is not shown; it never fails a plan.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from logmirror.errors import LogmirrorError, UsageError
from logmirror.reports import NextRecord
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.wire.scan import KIND_DATA

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition
    from logmirror.source.partition import Fetched
    from logmirror.wire.decode import RecordDecoder

BUDGET_MS: Final = 60_000
"""How long one plan reads records; further ones are not shown."""

FETCHES: Final = 32
"""The most fetches for one record: a replica may have long runs of offsets without one."""

_FETCH_BYTES: Final = 64 << 10
"""A larger batch is fetched whole."""

KEY_CHARACTERS: Final = 40
_KEY_BYTES: Final = 4 * KEY_CHARACTERS
"""What is read of a key; UTF-8 has at most four bytes for a character."""


class ResumeReader:
    """Reads the next records of groups from one cluster. Not thread-safe.

    Args:
        client: The destination.
        decoder: May be shared with other readers of the same thread.
        clock: Time.
        budget_ms: How long all calls together may take.

    Attributes:
        left_ms: What is left of it.
    """

    def __init__(
        self,
        client: ClusterClient,
        decoder: RecordDecoder,
        clock: Clock,
        budget_ms: float = BUDGET_MS,
    ) -> None:
        self._client, self._decoder, self._clock = client, decoder, clock
        self.left_ms = budget_ms
        self._buffer = FetchBuffer(_FETCH_BYTES)
        self._known: dict[tuple[TopicPartition, int], NextRecord | None] = {}
        self._refused: set[str] = set()
        """Topics that this user may not read."""

    def at(self, partition: TopicPartition, offset: int) -> NextRecord | None:
        """Return the first visible record at or after an offset; None if it could not be read."""
        place = partition, offset
        if place not in self._known:
            began_ms = self._clock.monotonic_ms()
            self._known[place] = self._read(partition, offset, began_ms + self.left_ms)
            self.left_ms -= self._clock.monotonic_ms() - began_ms
        return self._known[place]

    def _read(self, partition: TopicPartition, offset: int, until_ms: float) -> NextRecord | None:
        log = KafkaSource(self._client, partition, topic_id=None, buffer=self._buffer)
        for _ in range(FETCHES):
            if partition.topic in self._refused or self._clock.monotonic_ms() >= until_ms:
                return None
            try:
                polled = log.poll(offset, max_wait_ms=0)
                if polled.fetched is None:
                    is_end = polled.last_stable_offset <= offset
                    return NextRecord(offset=None) if is_end else None
                if (found := self._first(polled.fetched, offset)) is not None:
                    return found
            except LogmirrorError as error:
                if isinstance(error, UsageError):
                    self._refused.add(partition.topic)
                return None
            batches = polled.fetched.batches
            offset = int(batches.last_offsets[batches.count - 1]) + 1
        return None

    def _first(self, fetched: Fetched, offset: int) -> NextRecord | None:
        batches = fetched.batches
        for at in range(fetched.start, batches.count):
            if batches.kinds[at] != KIND_DATA:
                continue
            end = int(batches.last_offsets[at]) + 1
            for rows in self._decoder.decode(fetched.buffer, batches, first=offset, end=end):
                return _record(rows.to_arrow("", 0).slice(0, 1))
        return None


def _record(row: pa.RecordBatch) -> NextRecord:
    key = row["key"][0].as_py()
    return NextRecord(
        offset=row["offset"][0].as_py(),
        timestamp_ms=row["timestamp"].cast(pa.int64())[0].as_py(),
        key=None if key is None else shortened(key),
    )


def shortened(key: bytes) -> str:
    """Return a key as one short line of text. What is not printable, or not UTF-8, is escaped."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text = decoder.decode(key[:_KEY_BYTES], final=len(key) <= _KEY_BYTES)
    is_short = len(text) <= KEY_CHARACTERS and len(key) <= _KEY_BYTES
    shown = text if is_short else f"{text[:KEY_CHARACTERS]}..."
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown
    )
