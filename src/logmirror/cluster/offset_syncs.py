"""Offset syncs: pairs of a source and a destination offset, as MirrorMaker 2 writes them.

MirrorMaker's checkpoint task, its `RemoteClusterUtils` and other readers of the topic use them to
translate consumer group offsets. `wire.mirrormaker` has the bytes.

    offsets: translate    `to_kafka` writes them, with each transaction
    offsets: preserve     `groups` writes them, round by round, if the mirror has `groups`

Invariants:
1. Only pairs of records that the replica keeps are written, in ascending order for each writer.
2. No record is a tombstone: MirrorMaker's readers fail on one.
3. A sync has the ID of the replica's topic in a header, where records were translated into it. So
   syncs of a topic that was deleted are not taken for those of the one created since.
4. A failed write does no harm. Replication does not depend on syncs, and a reader without a pair
   translates to an earlier offset, never to a later one.
5. A topic that has refused a write is left alone for a minute, then longer, up to ten minutes.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from logmirror.cluster.new_topics import await_leader
from logmirror.errors import LogmirrorError, UsageError
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.checksum import crc32c
from logmirror.wire.mirrormaker import encode_sync, encode_sync_key, syncs_topic, topic_id_header
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline

_LOG = logging.getLogger("logmirror.mirror")

OFFSET_LAG_MAX: Final = 100
"""MirrorMaker's default of `offset.lag.max`."""

SYNCS_MAX: Final = 10
"""The most syncs per transaction; MirrorMaker has as many in flight. Readers keep a sparse index of
64, and compaction keeps the last one."""

_IN_FLIGHT_MAX: Final = 10

_BATCH_RECORDS: Final = 1_000
"""The most syncs in one batch; one with the longest name has some 300 bytes."""

_READY_MS: Final = 10_000
"""How long to wait for the leader of the topic."""

RETRY_MS: Final = (60_000, 600_000)
"""How long no sync is written after a first refusal, and the longest such time."""

_T = TypeVar("_T")


class Run(NamedTuple):
    """Records with contiguous offsets on both clusters."""

    upstream: int
    downstream: int
    count: int  # type: ignore[assignment]  # hides a method of tuple that is not used


class SyncRule:
    """Decides when a sync is written, as MirrorMaker's source task does record by record.

    A record's pair is due when it is the first, when the downstream offset is `lag_max` or more
    behind the one after the last sync's, when upstream offsets were skipped or went back, or when
    downstream offsets went back. `flush` returns the last pair if it was not due.

    Args:
        lag_max: `offset.lag.max`, 0 or more.
    """

    def __init__(self, lag_max: int = OFFSET_LAG_MAX) -> None:
        self._lag_max = lag_max
        self._previous = (-1, -1)
        self._last_downstream = -1
        self._delayed: tuple[int, int] | None = None

    def due(self, runs: Iterable[Run]) -> list[tuple[int, int]]:
        """Add runs that were written, in order; return the pairs that are due."""
        found: list[tuple[int, int]] = []
        for run in runs:
            if run.count:
                shift = run.upstream - run.downstream
                found += [(at + shift, at) for at in self.downstream_due(run)]
        return found

    def flush(self) -> list[tuple[int, int]]:
        """Return the newest pair if it was not due, so that translation reaches the last record."""
        delayed, self._delayed = self._delayed, None
        return [] if delayed is None else [delayed]

    def downstream_due(self, run: Run) -> range:
        """Add a run that was written; return the downstream offsets of the pairs that are due.

        The same as `due` for a run of any length, without making the pairs.
        """
        up, down, count = run
        previous_up, previous_down = self._previous
        self._previous = last = (up + count - 1, down + count - 1)
        step = self._lag_max + 1
        first = max(self._last_downstream + step, down)
        if self._last_downstream < 0 or up - previous_up != 1 or down < previous_down:
            first = down
        found = range(first, down + count, step)
        if found:
            self._last_downstream = found[-1]
        self._delayed = last if not found or found[-1] != last[1] else None
        return found


def thinned(pairs: Sequence[_T], most: int = SYNCS_MAX) -> list[_T]:
    """At most `most` of the pairs, evenly spread, including the first and the last."""
    if len(pairs) <= most:
        return list(pairs)
    return [pairs[at * (len(pairs) - 1) // (most - 1)] for at in range(most)]


class Pause:
    """The time in which nothing is written to a topic that has refused a write."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._duration_ms, self._until_ms = 0, 0

    @property
    def is_over(self) -> bool:
        """Whether syncs may be written, for the first time or again."""
        return self._clock.monotonic_ms() >= self._until_ms

    @property
    def is_retry(self) -> bool:
        """Whether the topic has refused the last write."""
        return self._duration_ms > 0

    def begin(self) -> None:
        """Begin the next pause, which is longer, unless one has begun."""
        if self.is_over:
            first_ms, longest_ms = RETRY_MS
            self._duration_ms = min(2 * self._duration_ms or first_ms, longest_ms)
            self._until_ms = self._clock.monotonic_ms() + self._duration_ms

    def end(self) -> None:
        """The topic has accepted a write."""
        self._duration_ms, self._until_ms = 0, 0


def create_sync_topic(
    source: ClusterClient,
    alias: str,
    clock: Clock,
    *,
    mirror: str,
    level: int = logging.WARNING,
) -> bool:
    """Create the topic for syncs; log an event if it cannot be created.

    Returns whether there is such a topic. This waits for its leader, as long as `_READY_MS` and a
    request. If the leader does not respond by then, the next write fails, and does no harm.

    Args:
        source: The source cluster.
        alias: The name of the destination.
        clock: For the wait.
        mirror: The name of the mirror, for the log event.
        level: The level of that event.

    Raises:
        UnavailableError: The source did not respond.
        OutcomeUnknownError: The source did not respond, and may have created the topic.
    """
    topic = syncs_topic(alias)
    if topic is None:
        _LOG.log(
            level,
            "offset syncs disabled: the destination's name is not valid in a topic name",
            extra={"facts": {"mirror": mirror, "destination": alias}},
        )
        return False
    try:
        source.admin.create_topic(topic, partition_count=1, configs={"cleanup.policy": "compact"})
    except UsageError as error:
        if error.facts.get("error") != "TOPIC_ALREADY_EXISTS" and not _is_visible(source, topic):
            _LOG.log(
                level,
                "offset syncs paused: the source refused to create their topic",
                extra={
                    "facts": {
                        **error.facts,
                        "mirror": mirror,
                        "destination": alias,
                        "topic": topic,
                        "error": error.message,
                    }
                },
            )
            return False
    with contextlib.suppress(LogmirrorError):
        await_leader(source, TopicPartition(topic, 0), clock, timeout_ms=_READY_MS)
    return True


def _is_visible(source: ClusterClient, topic: str) -> bool:
    try:
        source.topic(topic)
    except UsageError:
        return False
    return True


class OffsetSyncWriter:
    """Writes the syncs of one destination into the source cluster. Not thread-safe.

    Args:
        pipeline: To the source; nothing else is in flight on it.
        alias: The name of the destination.
        clock: For the records' timestamps.
        mirror: The name of the mirror, for log events.
        create: Creates the topic if it is missing; called before a retry.
    """

    def __init__(
        self,
        pipeline: ProducePipeline,
        alias: str,
        clock: Clock,
        *,
        mirror: str,
        create: Callable[[], object] = lambda: None,
    ) -> None:
        self._pipeline, self._clock, self._create = pipeline, clock, create
        self._pause = Pause(clock)
        self._about = {"mirror": mirror, "destination": alias}
        topic = syncs_topic(alias)
        self._where = None if topic is None else TopicPartition(topic, 0)

    def write(
        self,
        partition: TopicPartition,
        pairs: Sequence[tuple[int, int]],
        topic_id: bytes | None = None,
    ) -> None:
        """Send syncs of a source partition without waiting for the response.

        They are skipped if too many are in flight, or for a time after the topic has refused a
        write.

        Args:
            partition: The source's partition.
            pairs: Upstream and downstream offsets.
            topic_id: The ID of the replica's topic, as far as known.
        """
        self._collect(block=False)
        most = 1 if self._pause.is_retry else _IN_FLIGHT_MAX
        if self._where is None or not pairs or self._pipeline.in_flight() >= most:
            return
        if not self._pause.is_over:
            return
        if self._pause.is_retry:
            with contextlib.suppress(LogmirrorError):
                self._create()
        key = encode_sync_key(partition)
        self._pipeline.send([(self._where, self._batch([(key, pair) for pair in pairs], topic_id))])

    def write_and_wait(self, syncs: Mapping[TopicPartition, Sequence[tuple[int, int]]]) -> None:
        """Write the syncs of several partitions; nothing else is in flight.

        Raises:
            UsageError: The topic is missing, or refuses writes of this user.
            LogmirrorError: Syncs may have been written.
        """
        keyed = [(encode_sync_key(one), pair) for one, pairs in syncs.items() for pair in pairs]
        for first in range(0, len(keyed) if self._where else 0, _BATCH_RECORDS):
            batch = self._batch(keyed[first : first + _BATCH_RECORDS])
            self._pipeline.send([(cast("TopicPartition", self._where), batch)])
            while self._pipeline.in_flight():
                for response in self._pipeline.collect(block=True):
                    if response.error is not None:
                        raise response.error

    def _batch(
        self, syncs: Sequence[tuple[bytes, tuple[int, int]]], topic_id: bytes | None = None
    ) -> memoryview:
        now_ms, headers = self._clock.now_ms(), topic_id_header(topic_id)
        records = [
            Record(at, now_ms, TimestampType.CREATE_TIME, key, encode_sync(*pair), headers)
            for at, (key, pair) in enumerate(syncs)
        ]
        return memoryview(bytearray(encode_reference(records, leader_epoch=-1, checksum=crc32c)))

    def finish(self) -> None:
        """Wait for the syncs in flight."""
        while self._pipeline.in_flight():
            self._collect(block=True)

    def _collect(self, *, block: bool) -> None:
        for response in self._pipeline.collect(block=block):
            if response.error is not None:
                self._log_failure(response.error)
            elif self._pause.is_retry:
                self._pause.end()
                _LOG.info("offset syncs resumed", extra={"facts": self._about})

    def _log_failure(self, error: LogmirrorError) -> None:
        facts = {"facts": {**error.facts, **self._about, "error": error.message}}
        if isinstance(error, UsageError):
            if not self._pause.is_retry:
                _LOG.warning("offset syncs paused: the source refused a write", extra=facts)
            self._pause.begin()
        else:
            _LOG.info("offset sync not written", extra=facts)
