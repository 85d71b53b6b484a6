"""A partition and its replica in a simulation of consumer groups, and the mirror between them.

Only what groups need is simulated of a record: which offset it has on which side. The mirror copies
in steps, and writes offset syncs with the product's rule and writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.cluster.offset_syncs import OffsetSyncWriter, Run, SyncRule, thinned
from logmirror.model import TimestampType, TopicPartition
from logmirror.wire.mirrormaker import encode_sync, encode_sync_key, topic_id_header
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from logmirror.clock import Chooser
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.simulation.schedule import Schedule
    from logmirror.simulation.topics import Topics

ALIAS: Final = "west"
"""The name of the target."""

SYNCS: Final = f"mm2-offset-syncs.{ALIAS}.internal"
GAP: Final = -1
"""At an offset without a record: a marker, an aborted or a compacted record."""


class MirroredPartition:
    """A partition of the source and its replica.

    Args:
        schedule: The scheduler.
        chooser: Draws the random choices.
        topic: The source's topic.
        keeps: Whether the replica keeps the source's offsets.
        source: The topics of the source.
        target: The topics of the target.
        shows_id: Whether its syncs have the ID of the replica's topic.

    Attributes:
        records: For each source offset, the offset or `GAP`.
        replica: For each offset of the replica, the source offset of its record, or `GAP`.
        generation: How many times the replica's topic was created.
        reset_ms: When the replica last lost records.
        first_sync: The first offset sync since then.
    """

    def __init__(  # noqa: PLR0913  # where it is, and how it is copied
        self,
        schedule: Schedule,
        chooser: Chooser,
        topic: str,
        *,
        keeps: bool,
        source: Topics,
        target: Topics,
        shows_id: bool,
    ) -> None:
        self._schedule, self._chooser = schedule, chooser
        self._source, self._target = source, target
        self.keeps, self._shows_id = keeps, shows_id
        self.partition = TopicPartition(topic, 0)
        self.copy = TopicPartition(topic if keeps else f"copy.{topic}", 0)
        self.records: list[int] = []
        self.replica: list[int] = []
        self.generation, self.reset_ms = 0, -1
        self.first_sync: tuple[int, int] | None = None
        self._copied_to = 0
        self._grown: list[tuple[int, int]] = []
        self._lag_max = chooser.choice((0, 1, 3, 8))
        self._rule = SyncRule(self._lag_max)
        source.create(topic)
        self.create()

    @property
    def end(self) -> int:
        """The log end offset of the source."""
        return len(self.records)

    @property
    def exists(self) -> bool:
        """Whether the replica's topic exists."""
        return self.copy.topic in self._target.logs

    def lowest_end(self, since_ms: int) -> int:
        """The lowest log end offset of the replica since a time, if it has lost no records."""
        ends = [end for at_ms, end in self._grown if at_ms >= since_ms]
        return min([len(self.replica), *ends])

    @property
    def topic_id(self) -> bytes | None:
        """The ID of the replica's topic, as syncs show it."""
        return self._target.ids.get(self.copy.topic) if self._shows_id else None

    @property
    def start(self) -> int:
        """The log start offset of the replica."""
        return self._target.logs[self.copy.topic].start

    @property
    def is_behind(self) -> bool:
        """Whether the source has offsets that were not copied."""
        return self._copied_to < len(self.records)

    # -- changes ---------------------------------------------------------------------------------

    def write(self) -> None:
        """Write a batch at the source: records, or a transaction that is committed or aborted."""
        count, draw = self._chooser.randint(1, 6), self._chooser.random()
        first = len(self.records)
        if draw < 0.15:  # noqa: PLR2004  # probability
            self.records += [GAP] * (count + 1)
            return
        self.records += range(first, first + count)
        if draw < 0.5:  # noqa: PLR2004  # the same
            self.records.append(GAP)  # its marker

    def compact(self) -> None:
        """Remove records at the source that are not at its end."""
        for offset in range(len(self.records) - 3):
            if self._chooser.random() < 0.2:  # noqa: PLR2004  # probability
                self.records[offset] = GAP

    def delete(self) -> None:
        """Delete the replica's topic."""
        self._target.logs.pop(self.copy.topic, None)
        self.replica, self._copied_to = [], 0
        self._lose_records()

    def create(self) -> None:
        """Create the replica's topic."""
        self._target.replace(self.copy.topic)
        self.replica, self._copied_to = [], 0
        self.generation += 1
        self._lose_records()

    def truncate(self) -> None:
        """Lose the last records of a replica that keeps offsets, as an unclean election does."""
        if self.keeps and self.exists and self.replica:
            end = self._chooser.randrange(
                max(self.start, len(self.replica) - 12), len(self.replica)
            )
            del self.replica[end:]
            self._copied_to = end
            self._lose_records()
            self._target.logs[self.copy.topic].elect()

    def trim(self) -> None:
        """Delete the first records of the replica, as retention does."""
        if self.exists and self.replica:
            log = self._target.logs[self.copy.topic]
            log.start = self._chooser.randrange(
                log.start, min(log.start + 8, len(self.replica)) + 1
            )

    def _lose_records(self) -> None:
        self._rule = SyncRule(self._lag_max)
        self.reset_ms = self._schedule.monotonic_ms()
        self._show()

    def _show(self) -> None:
        if self.exists:
            self._target.logs[self.copy.topic].end = len(self.replica)

    # -- the mirror ------------------------------------------------------------------------------

    def copy_more(self, most: int) -> list[tuple[int, int]]:
        """Copy up to `most` offsets, and return the offset syncs that are due.

        The first sync of a replica that has lost records is written at once and never lost:
        MirrorMaker's records do not show which of two replicas of one name a sync is about.
        """
        if not self.exists:
            return []
        self._grown.append((self._schedule.monotonic_ms(), len(self.replica)))
        is_new, until = not self.replica, min(self._copied_to + most, len(self.records))
        runs: list[Run] = []
        for offset in range(self._copied_to, until):
            record = self.records[offset]
            if self.keeps:
                self.replica.append(record)
            elif record != GAP:
                self.replica.append(record)
                self._extend(runs, record)
        self._copied_to = until
        if runs:
            self.replica += [GAP] * self._chooser.choice((1, 1, 1, 3))  # markers, aborted records
        self._show()
        pairs = self._rule.due(runs)
        if is_new and pairs:
            self.first_sync = pairs.pop(0)
            self.write_sync(self.first_sync)
        return thinned(pairs)

    def _extend(self, runs: list[Run], upstream: int) -> None:
        downstream = len(self.replica) - 1
        if runs and runs[-1].upstream + runs[-1].count == upstream:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
        else:
            runs.append(Run(upstream, downstream, 1))

    def flush(self) -> list[tuple[int, int]]:
        """Return the sync of the last record, if it was not due."""
        return [] if self.keeps else self._rule.flush()

    def restart(self) -> None:
        """Forget which sync was the last, as a restarted mirror does."""
        self._rule = SyncRule(self._lag_max)

    def write_sync(self, pair: tuple[int, int]) -> None:
        """Write an offset sync; the topic is created if it is missing."""
        self._source.create(SYNCS)
        key, now_ms = encode_sync_key(self.partition), self._schedule.now_ms()
        headers = topic_id_header(self.topic_id)
        record = Record(0, now_ms, TimestampType.CREATE_TIME, key, encode_sync(*pair), headers)
        self._source.append(SYNCS, encode_reference([record], leader_epoch=-1))


def mirror(
    pairs: list[MirroredPartition], pipeline: ProducePipeline, schedule: Schedule, chooser: Chooser
) -> None:
    """Copy one step of each partition, and write its syncs; some are lost."""
    writer = OffsetSyncWriter(pipeline, ALIAS, schedule, mirror="orders")
    for pair in pairs:
        if chooser.random() < 0.1:  # noqa: PLR2004  # probability
            pair.restart()
        due = pair.copy_more(chooser.choice((2, 5, 9, 20)))
        if chooser.random() < 0.3:  # noqa: PLR2004  # the same
            due += pair.flush()
        writer.write(pair.partition, due, pair.topic_id)
    writer.finish()
