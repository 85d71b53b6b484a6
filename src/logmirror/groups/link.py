"""One source and one target: translates the groups of the source, round by round.

    committed offsets -> offset syncs -> log ends -> checkpoints -> offsets at the target

Invariants:
1. Offset syncs are read before the log ends of the replicas: no pair is beyond its log.
2. A group that did not change costs one request and no translation, unless its translation can have
   become better.
3. A group that cannot be read does not delay the others.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logmirror.cluster.groups import GroupOffset
from logmirror.errors import LogmirrorError
from logmirror.groups.checkpoint_topics import CheckpointTopics
from logmirror.groups.emission import Position
from logmirror.groups.replicas import (
    CONSUMERS,
    NO_EPOCH,
    Replica,
    SyncReader,
    described,
    logs,
    translation,
)
from logmirror.groups.target_sync import TargetSync
from logmirror.groups.way_back import WayBack
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import syncs_topic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import ReadOffsets
    from logmirror.groups.link_spec import LinkSpec, ReplicaSpec
    from logmirror.groups.target_sync import TargetRound
    from logmirror.groups.translation import Log
    from logmirror.model import TopicPartition
    from logmirror.wire.mirrormaker import Checkpoint

_LOG = logging.getLogger("logmirror.groups")


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round has done."""

    groups: int = 0
    """Groups with committed offsets of mirrored partitions."""

    inexact: int = 0
    """Those of them that read records again, or have a partition that is not translated."""

    failed: dict[str, LogmirrorError] = field(default_factory=dict)
    """Groups whose offsets could not be read."""

    checkpoints: int = 0
    """Checkpoints that were written."""

    at_target: TargetRound | None = None
    """The commits at the target; None: there are none."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """One group, as it was read."""

    read: ReadOffsets
    replicas: list[tuple[Replica, GroupOffset]]
    wanted: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    """The offsets for the target."""

    reason: str = ""
    """Why a partition is not translated exactly; empty if all are."""


class Link:
    """Translates the groups of one source for one target. Not thread-safe.

    Args:
        spec: What to translate.
        source: The source, with a short budget: a group that cannot be read is skipped.
        target: The target.
        clock: Time.
    """

    def __init__(
        self, spec: LinkSpec, source: ClusterClient, target: ClusterClient, clock: Clock
    ) -> None:
        self._source, self._target = source, target
        self._include = re.compile("|".join(f"(?:{one})" for one in spec.include))
        self._exclude = re.compile("|".join(f"(?:{one})" for one in spec.exclude))
        self._by_topic: dict[str, list[ReplicaSpec]] = defaultdict(list)
        for replica in spec.replicas:
            self._by_topic[replica.topic].append(replica)
        decoder = RecordDecoder()
        translates = any(one.written.offsets == "translate" for one in spec.replicas)
        topic = syncs_topic(spec.destination) if translates else None
        self._syncs = SyncReader(source, topic, decoder)
        self._offsets = source.groups.followed()
        self._topics = CheckpointTopics(
            target,
            source_alias=spec.source_alias,
            target_alias=spec.destination,
            transactional_id=spec.transactional_id,
            topics={one.written.topic for one in spec.replicas},
            decoder=decoder,
            clock=clock,
        )
        self._target_sync = TargetSync(target) if spec.commits else None
        self._way_back = WayBack(source, spec.destination)
        self._known: dict[str, _Known] = {}
        self._targets: set[TopicPartition] = set()
        self._logs: dict[TopicPartition, Log] = {}
        self._topic_ids: dict[str, bytes | None] = {}

    def close(self) -> None:
        """Close what this opened; the clients stay open."""
        self._topics.close()

    def round(self) -> Round:
        """Read, translate and write once.

        Raises:
            FencedError: Another process translates these groups now. This one must end.
            LogmirrorError: The source or the target failed; call it again later.
        """
        done = Round()
        self._begin()
        self._way_back.check()
        changed = self._read_groups(done)
        is_new = self._syncs.refresh()
        is_new |= self._read_logs(changed)
        if is_new:
            changed = {group: one for group, one in self._known.items() if one.reason} | changed
        due: list[Checkpoint] = []
        for group, one in changed.items():
            due += self._translate(group, one)
        self._topics.write(due)
        self._known |= changed
        done.checkpoints = len(due)
        for one in self._known.values():
            if one.replicas:
                done.groups += 1
                done.inexact += bool(one.reason)
        if self._target_sync is not None:
            wanted = {group: one.wanted for group, one in self._known.items() if one.wanted}
            done.at_target = self._target_sync.round(wanted)
        return done

    def _begin(self) -> None:
        if self._topics.is_begun:
            if self._topics.follow():
                self._known.clear()  # another process has written: compare all again
            return
        self._known.clear()
        self._topics.begin()
        if (error := self._topics.unreadable) is not None:
            facts = {**error.facts, "error": error.message, "hint": "permit Read on the topic"}
            _LOG.warning(
                "the checkpoints topic cannot be read; the offsets that groups have committed at "
                "the target are the lower bound",
                extra={"facts": facts},
            )

    # -- reading -----------------------------------------------------------------------------------

    def _read_groups(self, done: Round) -> dict[str, _Known]:
        """Return the groups that changed, and forget those that are gone."""
        names = [
            listing.group
            for listing in self._source.groups.listed()
            if listing.protocol_type in CONSUMERS
            and self._include.fullmatch(listing.group)
            and not self._exclude.fullmatch(listing.group)
        ]
        self._offsets.retain(names)
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        changed: dict[str, _Known] = {}
        for group in names:
            try:
                read = self._offsets.read(group)
            except LogmirrorError as error:
                done.failed[group] = error
                continue
            before = self._known.get(group)
            if before is None or before.read is not read:
                changed[group] = _Known(read=read, replicas=self._mirrored(read))
        return changed

    def _mirrored(self, read: ReadOffsets) -> list[tuple[Replica, GroupOffset]]:
        return [
            (Replica(spec.mirror, partition, spec.written), committed)
            for partition, committed in read.offsets.items()
            for spec in self._by_topic.get(partition.topic, ())
            if spec.partitions is None or partition.partition in spec.partitions
        ]

    def _read_logs(self, changed: Mapping[str, _Known]) -> bool:
        """Read the bounds of the replicas; return whether one has changed."""
        for one in changed.values():
            self._targets.update(replica.target for replica, _ in one.replicas)
        topics = described(self._target, {target.topic for target in self._targets})
        found = logs(self._target, topics, self._targets)
        for name, topic in topics.items():
            if self._topic_ids.setdefault(name, topic.topic_id) != topic.topic_id:
                self._topic_ids[name] = topic.topic_id
                self._topics.last.forget(name)
                self._known.clear()
        before, self._logs = self._logs, found
        if any(log.start != before.get(one, log).start for one, log in found.items()):
            self._known.clear()  # also what was exact may begin later now
        return found != before

    # -- translating -------------------------------------------------------------------------------

    def _translate(self, group: str, one: _Known) -> list[Checkpoint]:
        """Translate a group, and return the checkpoints that are due."""
        last, indexes = self._topics.last, self._syncs.indexes
        if self._topics.unreadable is not None:
            found = self._target.groups.offsets(group, [r.target for r, _ in one.replicas])
            last.restore(group, {at: o.offset for at, o in found.items() if o is not None})
        positions: dict[TopicPartition, Position] = {}
        one.reason, one.wanted = "", {}
        for replica, committed in one.replicas:
            log = self._logs.get(replica.target)
            result = translation(replica, committed.offset, log, indexes)
            one.reason = one.reason or result.reason
            if result.offset is None or log is None:
                continue
            position = Position(committed.offset, result.offset, committed.metadata, log.end)
            positions[replica.target] = position
            best = last.best(group, replica.target, position)
            one.wanted[replica.target] = GroupOffset(best, NO_EPOCH, committed.metadata)
        return last.due(group, positions)
