"""One source and one target: translates the groups of the source, round by round.

    committed offsets -> offset syncs -> log ends -> checkpoints -> offsets at the target
                                                  -> offset syncs of replicas that keep offsets

Invariants:
1. Offset syncs are read before the log ends of the replicas: no pair is beyond its log.
2. A group that did not change costs one request and no translation, unless its translation can have
   become better.
3. A group that cannot be read does not delay the others.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror.cluster.groups import GroupOffset
from logmirror.errors import LogmirrorError
from logmirror.groups.checkpoint_topics import CheckpointTopics, too_long
from logmirror.groups.emission import Position
from logmirror.groups.preserved_syncs import PreservedSyncs
from logmirror.groups.replica_logs import (
    CONSUMERS,
    NO_EPOCH,
    Replica,
    described,
    logs,
    topic_ids,
    translation,
)
from logmirror.groups.replicas import SyncReader
from logmirror.groups.target_sync import TargetSync
from logmirror.groups.way_back import WayBack
from logmirror.mirror.backoff import RETRIABLE
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import syncs_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import ReadOffsets
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.groups.link_spec import LinkSpec, ReplicaSpec
    from logmirror.groups.target_sync import TargetRound
    from logmirror.groups.translation import Cause, Log
    from logmirror.model import TopicPartition
    from logmirror.wire.mirrormaker import Checkpoint

_LOG = logging.getLogger("logmirror.groups")

PENDING_MS: Final = 60_000
"""How long an offset commit of an open transaction is usual: a producer's default time limit."""


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round has done."""

    groups: int = 0
    """Groups with committed offsets of mirrored partitions."""

    inexact: int = 0
    """Those of them that read records again, or have a partition that is not translated."""

    failed: dict[str, LogmirrorError] = field(default_factory=dict)
    """Groups of which an offset could not be read."""

    unfit: dict[str, LogmirrorError] = field(default_factory=dict)
    """Groups of which a text does not fit into a checkpoint."""

    checkpoints: int = 0
    """Checkpoints that were written."""

    inexact_offsets: int = 0
    """Offsets that are not translated exactly."""

    causes: Counter[Cause] = field(default_factory=Counter)
    """Groups with an offset that is not translated exactly, by cause."""

    delay_ms: int | None = None
    """From when the oldest change was seen at the source until its checkpoint was acknowledged;
    None: no checkpoint was due."""

    at_target: TargetRound | None = None
    """The commits at the target; None: there are none."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """One group, as it was read."""

    read: ReadOffsets
    replicas: list[tuple[Replica, GroupOffset]]
    wanted: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    """The offsets for the target."""

    unfit: LogmirrorError | None = None
    """Why its checkpoints cannot be written."""

    causes: list[Cause] = field(default_factory=list)
    """Why offsets are not translated exactly, one for each such offset."""


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
        self._source, self._target, self._clock = source, target, clock
        self._selects = spec.selects
        self._by_topic: dict[str, list[ReplicaSpec]] = defaultdict(list)
        for replica in spec.replicas:
            self._by_topic[replica.topic].append(replica)
        decoder = RecordDecoder()
        translates = any(one.written.offsets == "translate" for one in spec.replicas)
        topic = syncs_topic(spec.destination) if translates else None
        self._syncs = SyncReader(source, topic, decoder)
        self._offsets = source.groups.followed()
        self._names = {one.written.topic for one in spec.replicas}
        self._topics = CheckpointTopics(
            target,
            source_alias=spec.source_alias,
            target_alias=spec.destination,
            transactional_id=spec.transactional_id,
            topics=self._names,
            decoder=decoder,
            clock=clock,
        )
        self._preserved_syncs = PreservedSyncs(
            source,
            target,
            alias=spec.destination,
            mirror=spec.replicas[0].mirror,
            decoder=decoder,
            clock=clock,
        )
        self._preserved: dict[TopicPartition, TopicPartition] = {}
        """Replicas that keep offsets, of partitions that groups have committed."""

        self._target_sync = TargetSync(target) if spec.commits else None
        self._way_back = WayBack(source, spec.destination)
        self._known: dict[str, _Known] = {}
        self._targets: set[TopicPartition] = set()
        self._logs: dict[TopicPartition, Log] = {}
        self._topic_ids: dict[str, bytes | None] = {}
        self._seen_ms: int | None = None
        """When the oldest change was seen of which the checkpoint is not acknowledged."""

        self._unread_ms: dict[str, int] = {}
        """Since when groups have an offset that cannot be read, in monotonic time."""

        self._has_read = False
        self._compare_inexact = self._compare_all = False
        """Which groups are translated again although they did not change."""

    def close(self) -> None:
        """Close what this opened; the clients stay open."""
        self._topics.close()
        self._preserved_syncs.close()

    def round(self) -> Round:
        """Read, translate and write once.

        Raises:
            FencedError: Another process translates these groups now. This one must end.
            LogmirrorError: The source or the target failed; call it again later.
        """
        done = Round()
        self._begin()
        self._way_back.check()
        now_ms = self._clock.monotonic_ms()
        changed = self._read_groups(done)
        if changed and self._seen_ms is None:
            self._seen_ms = now_ms
        self._compare_inexact |= self._syncs.refresh()
        self._compare_inexact |= self._read_logs(changed)
        if self._compare_all:
            changed = self._known | changed
        elif self._compare_inexact:
            changed = {group: one for group, one in self._known.items() if one.causes} | changed
        due: list[Checkpoint] = []
        for group, one in changed.items():
            found = self._translate(group, one)
            one.unfit = too_long(found)
            due += [] if one.unfit else found
        self._topics.write(due, self._topic_ids)
        self._compare_inexact = self._compare_all = False
        self._preserved_syncs.write(self._preserved, self._logs)
        self._known |= changed
        done.checkpoints = len(due)
        if due and self._seen_ms is not None:
            done.delay_ms = self._clock.monotonic_ms() - self._seen_ms
        self._seen_ms = None
        for group, one in self._known.items():
            if one.unfit is not None:
                done.unfit[group] = one.unfit
            if one.replicas:
                done.groups += 1
                done.inexact += bool(one.causes)
                done.inexact_offsets += len(one.causes)
                done.causes.update(set(one.causes))
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
        self._preserved_syncs.close()  # another process may have written
        topics = described(self._target, self._names)
        if not self._topic_ids:
            self._topic_ids = dict.fromkeys(self._names) | topic_ids(topics)
        self._compare_ids(topics)
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
            if listing.protocol_type in CONSUMERS and self._selects(listing.group)
        ]
        self._offsets.retain(names)
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        for gone in self._unread_ms.keys() - set(names):
            del self._unread_ms[gone]
        changed: dict[str, _Known] = {}
        for group in names:
            try:
                read = self._offsets.read(group)
            except LogmirrorError as error:
                done.failed[group] = error
                continue
            if (unread := self._unread(group, read)) is not None:
                done.failed[group] = unread
            before = self._known.get(group)
            if before is None or before.read is not read:
                changed[group] = _Known(read=read, replicas=self._mirrored(read))
        self._has_read = True
        return changed

    def _unread(self, group: str, read: ReadOffsets) -> LogmirrorError | None:
        """Return why an offset is left out.

        Open transactions count only if they last, or in the first round, which may be the only one.
        """
        errors = [error for at, error in read.errors.items() if any(self._replicas_of(at))]
        if not errors:
            self._unread_ms.pop(group, None)
            return None
        now_ms = self._clock.monotonic_ms()
        since_ms = self._unread_ms.setdefault(group, now_ms if self._has_read else -PENDING_MS)
        lasting = [error for error in errors if not isinstance(error, RETRIABLE)]
        return next(iter(lasting or errors)) if lasting or now_ms - since_ms >= PENDING_MS else None

    def _replicas_of(self, at: TopicPartition) -> Iterator[ReplicaSpec]:
        for spec in self._by_topic.get(at.topic, ()):
            if spec.partitions is None or at.partition in spec.partitions:
                yield spec

    def _mirrored(self, read: ReadOffsets) -> list[tuple[Replica, GroupOffset]]:
        return [
            (Replica.of(spec.mirror, partition, spec.written), committed)
            for partition, committed in read.offsets.items()
            for spec in self._replicas_of(partition)
        ]

    def _read_logs(self, changed: Mapping[str, _Known]) -> bool:
        """Read the bounds of the replicas; return whether one has changed."""
        for one in changed.values():
            self._targets.update(replica.target for replica, _ in one.replicas)
            for replica, _ in one.replicas:
                if replica.written.offsets == "preserve":
                    self._preserved.setdefault(replica.source, replica.target)
        topics = described(self._target, {target.topic for target in self._targets})
        found = logs(self._target, topics, self._targets)
        self._compare_ids(topics)
        before, self._logs = self._logs, found
        if any(log.start != before.get(one, log).start for one, log in found.items()):
            self._compare_all = True  # also what was exact may begin later now
        return found != before

    def _compare_ids(self, topics: Mapping[str, TopicMetadata]) -> None:
        """Notice replicas that were created again: what is known of the old ones is void.

        The IDs are read before the first sync, so that no older sync is taken for the new one's.
        """
        for name, topic in topics.items():
            if self._topic_ids.get(name) != topic.topic_id:
                self._topic_ids[name] = topic.topic_id
                self._compare_all = True
                self._topics.last.forget(name)
                self._syncs.restart()
                for source, target in self._preserved.items():
                    if target.topic == name:
                        self._preserved_syncs.forget(source)

    # -- translating -------------------------------------------------------------------------------

    def _translate(self, group: str, one: _Known) -> list[Checkpoint]:
        """Translate a group, and return the checkpoints that are due."""
        last, indexes = self._topics.last, self._syncs.indexes
        if self._topics.unreadable is not None:
            found = self._target.groups.offsets(group, [r.target for r, _ in one.replicas])
            last.restore(group, {at: o.offset for at, o in found.items() if o is not None})
        positions: dict[TopicPartition, Position] = {}
        one.causes, one.wanted = [], {}
        for replica, committed in one.replicas:
            log = self._logs.get(replica.target)
            topic_id = self._topic_ids.get(replica.target.topic)
            result = translation(replica, committed.offset, log, indexes, topic_id)
            if result.cause is not None:
                one.causes.append(result.cause)
            if result.offset is None or log is None:
                continue
            position = Position(
                committed.offset, result.offset, committed.metadata, log.end, topic_id
            )
            positions[replica.target] = position
            best = last.best(group, replica.target, position)
            one.wanted[replica.target] = GroupOffset(best, NO_EPOCH, committed.metadata)
        return last.due(group, positions)
