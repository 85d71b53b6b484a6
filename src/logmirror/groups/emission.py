"""Which checkpoints are due: MirrorMaker 2's rule, with nothing forgotten at a restart.

    translated positions -> `due` -> written and acknowledged -> `remember`
    records of the checkpoints topic, at the start and from other processes -> `remember`

A checkpoint is due if there is none, if the group went back at its source, or if its offset in the
replica is higher. Anything else repeats the last checkpoint, or moves it back. A last checkpoint
whose transaction was aborted is repeated once. One of a topic that was deleted does not count.

Invariants:
1. The offset of a checkpoint in the replica goes back only after the group went back at its source,
   or if the replica no longer reaches the last checkpoint (KAFKA-15905).
2. Only what the checkpoints topic has is remembered, in its order. A checkpoint whose write failed
   is still due.
"""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from logmirror.model import TopicPartition
from logmirror.wire.mirrormaker import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Position(NamedTuple):
    """Where a group is in one partition, in both clusters."""

    upstream: int
    """The committed offset at the source."""

    downstream: int
    """Its translation."""

    metadata: str
    """What was committed with the offset."""

    end: int
    """The log end offset of the replica."""

    topic_id: bytes | None = None
    """The ID of the replica's topic; None: unknown."""


class _Last(NamedTuple):
    upstream: int | None
    """None: the checkpoint could not be read, and only a committed offset is known."""

    downstream: int

    is_aborted: bool = False
    """Whether only readers of uncommitted records see it, until the log cleaner removes it."""

    is_bound: bool = False
    """Whether it is an offset that was committed at the target, and not a translation."""

    topic_id: bytes | None = None
    """The ID of the replica's topic when it was written; None: unknown."""


class LastCheckpoints:
    """The last checkpoint of each group and partition of the target."""

    def __init__(self) -> None:
        self._last: dict[str, dict[TopicPartition, _Last]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._last.values()))

    def remember(
        self,
        checkpoints: Iterable[Checkpoint],
        topic_ids: Mapping[str, bytes | None] = MappingProxyType({}),
        *,
        are_aborted: bool = False,
    ) -> None:
        """Add checkpoints that the topic has, in its order. The last of a partition counts.

        Args:
            checkpoints: The checkpoints.
            topic_ids: The IDs of their replicas' topics, as far as known.
            are_aborted: Whether their transaction was aborted.
        """
        for group, topic, partition, upstream, downstream, _ in checkpoints:
            last = _Last(upstream, downstream, are_aborted, topic_id=topic_ids.get(topic))
            self._last[group][TopicPartition(topic, partition)] = last

    def restore(self, group: str, committed: Mapping[TopicPartition, int]) -> None:
        """Set a group's lower bounds if the checkpoints topic cannot be read.

        Args:
            group: The group.
            committed: Its committed offsets at the target. Nothing below them becomes due, except
                if the group goes back at its source from now on.
        """
        for partition, offset in committed.items():
            self._last[group].setdefault(partition, _Last(None, offset, is_bound=True))

    def forget(self, topic: str) -> None:
        """Forget the checkpoints of a topic of the target, which was created again."""
        for partitions in self._last.values():
            for partition in [one for one in partitions if one.topic == topic]:
                del partitions[partition]

    def best(self, group: str, partition: TopicPartition, position: Position) -> int:
        """Return the highest offset of the target that is known to skip nothing.

        The last checkpoint may be higher than a new translation: syncs may have been deleted since.
        If the replica does not reach it, it is about records that the replica has lost.
        """
        last = self._of(group, partition, position)
        if last is None or last.is_bound or last.upstream is None:
            return position.downstream
        if last.upstream > position.upstream or last.downstream > position.end:
            return position.downstream
        return max(position.downstream, last.downstream)

    def due(self, group: str, positions: Mapping[TopicPartition, Position]) -> list[Checkpoint]:
        """Return the checkpoints to write.

        Args:
            group: The group.
            positions: By partition of the target.
        """
        known, found = self._last[group], []
        for partition, position in positions.items():
            last = self._of(group, partition, position)
            if last is not None and last.upstream is None:
                # From now on a rewind is seen as one.
                last = known[partition] = last._replace(upstream=position.upstream)
            if _is_due(position, last):
                upstream, downstream, metadata = position[:3]
                if last is not None and last.is_aborted:
                    downstream = self.best(group, partition, position)
                found.append(
                    Checkpoint(
                        group,
                        partition.topic,
                        partition.partition,
                        upstream,
                        downstream,
                        metadata,
                    )
                )
        return found

    def _of(self, group: str, partition: TopicPartition, position: Position) -> _Last | None:
        """Return the last checkpoint; None if there is none, or it is of a deleted topic."""
        last = self._last.get(group, {}).get(partition)
        if last is None or None in {last.topic_id, position.topic_id}:
            return last
        return last if last.topic_id == position.topic_id else None


def _is_due(position: Position, last: _Last | None) -> bool:
    if last is None or last.is_aborted or position.downstream > last.downstream:
        return True
    is_rewind = last.upstream is not None and position.upstream < last.upstream
    return is_rewind or last.downstream > position.end
