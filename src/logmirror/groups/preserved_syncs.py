"""Offset syncs of replicas that keep offsets: pairs of an offset with itself.

The translation of logmirror needs none. MirrorMaker 2's checkpoint connector and other readers of
the topic do: they translate nothing without a pair.

Invariants:
1. A pair is below the high watermark of its replica, and never beyond a record that it has.
2. The pairs of a partition ascend, also after a restart: what the topic has is read before anything
   is written. A lower pair makes MirrorMaker's readers forget all that they know. It is written
   only if the replica no longer reaches the last pair, was created again, or if the last pair is of
   a replica with new offsets.
3. A failure does no harm: groups are translated without syncs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.cluster.client import LATEST
from logmirror.cluster.offset_syncs import (
    OffsetSyncWriter,
    Pause,
    Run,
    SyncRule,
    create_sync_topic,
    thinned,
)
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, UsageError
from logmirror.groups.replicas import SyncReader
from logmirror.wire.mirrormaker import syncs_topic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.groups.translation import Log
    from logmirror.model import TopicPartition
    from logmirror.wire.decode import RecordDecoder

_LOG = logging.getLogger("logmirror.groups")

PARTITIONS_MAX: Final = 1_000
"""The most partitions of one round; those that waited longest come first."""


class _Written(NamedTuple):
    """The syncs of one partition, as far as they were written."""

    rule: SyncRule
    next: int
    """One past the last pair."""


class PreservedSyncs:
    """Writes the syncs of one destination into the source cluster. Not thread-safe.

    Args:
        source: The source.
        target: The destination.
        alias: The name of the destination.
        mirror: The name of a mirror, for log events.
        decoder: May be shared with other readers of the same thread.
        clock: For the records' timestamps.
    """

    def __init__(  # noqa: PLR0913  # two clusters, and what is known of them
        self,
        source: ClusterClient,
        target: ClusterClient,
        *,
        alias: str,
        mirror: str,
        decoder: RecordDecoder,
        clock: Clock,
    ) -> None:
        self._source, self._target, self._decoder, self._clock = source, target, decoder, clock
        self._alias, self._mirror = alias, mirror
        self._pipeline: ProducePipeline | None = None
        self._written: dict[TopicPartition, _Written] = {}
        self._rounds: dict[TopicPartition, int] = {}
        """The last round of each partition."""

        self._round = 0
        self._pause = Pause(clock)

    def close(self) -> None:
        """Close what this opened. The next `write` reads first what the topic has."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None
        self._written.clear()

    def forget(self, partition: TopicPartition) -> None:
        """Begin again at the log start offset: the replica was created again."""
        self._written.pop(partition, None)

    def write(
        self,
        replicas: Mapping[TopicPartition, TopicPartition],
        logs: Mapping[TopicPartition, Log],
    ) -> None:
        """Write the syncs that are due since the last call. Failures are logged.

        Args:
            replicas: The partition of the destination for each partition of the source.
            logs: The bounds of the partitions of the destination that exist.
        """
        if not self._pause.is_over:
            return
        self._round += 1
        try:
            self._write(replicas, logs)
        except LogmirrorError as error:
            self.close()
            facts = {"mirror": self._mirror, "destination": self._alias, "error": error.message}
            extra = {"facts": {**error.facts, **facts}}
            if isinstance(error, UsageError) and not isinstance(error, NotFoundError):
                if not self._pause.is_retry:
                    _LOG.warning("offset syncs paused: the source refused them", extra=extra)
                self._pause.begin()
            else:
                _LOG.info("offset syncs not written; retried", extra=extra)

    def _write(
        self,
        replicas: Mapping[TopicPartition, TopicPartition],
        logs: Mapping[TopicPartition, Log],
    ) -> None:
        moved = [one for one, target in replicas.items() if self._has_moved(one, logs.get(target))]
        if not moved:
            return
        if self._pipeline is None:
            self._begin()
            if self._pipeline is None:
                return
        moved.sort(key=lambda one: self._rounds.get(one, 0))
        moved = moved[:PARTITIONS_MAX]
        self._rounds |= dict.fromkeys(moved, self._round)
        try:
            ends = self._target.list_offsets(
                [replicas[one] for one in moved], LATEST, read_committed=False
            )
        except UsageError:
            return  # a topic was deleted since the log ends were read
        due = {one: self._due(one, logs[replicas[one]], ends[replicas[one]]) for one in moved}
        writer = OffsetSyncWriter(self._pipeline, self._alias, self._clock, mirror=self._mirror)
        writer.write_and_wait(due)
        self._pause.end()

    def _has_moved(self, partition: TopicPartition, log: Log | None) -> bool:
        if log is None or log.start == log.end:
            return False
        written = self._written.get(partition)
        return written is None or written.next != log.end

    def _begin(self) -> None:
        level = logging.DEBUG if self._pause.is_retry else logging.WARNING
        if not create_sync_topic(
            self._source, self._alias, self._clock, mirror=self._mirror, level=level
        ):
            self._pause.begin()
            return
        reader = SyncReader(self._source, syncs_topic(self._alias), self._decoder)
        reader.refresh()
        for partition, index in reader.indexes.items():
            last = index.last
            if last.upstream == last.downstream:
                rule = SyncRule()
                rule.downstream_due(Run(*last, 1))
                self._written[partition] = _Written(rule, last.upstream + 1)
        self._pipeline = self._source.pipeline()

    def _due(
        self, partition: TopicPartition, log: Log, high_watermark: int
    ) -> list[tuple[int, int]]:
        written = self._written.get(partition)
        if written is None or log.end < written.next:
            rule, first = SyncRule(), log.start
        else:
            rule, first = written.rule, max(written.next, log.start)
        end = min(high_watermark, log.end)
        if first >= end:
            return []
        offsets = thinned(rule.downstream_due(Run(first, first, end - first)))
        self._written[partition] = _Written(rule, end)
        return [(offset, offset) for offset in offsets] + rule.flush()
