"""One source and one archive: stores what groups have committed, as snapshots, when it changes.

    committed offsets -> time -> positions of the archive -> snapshot -> older ones pruned

Invariants:
1. The time of a snapshot is read after its offsets: each was committed at or before it.
2. Creating a snapshot never replaces. A process whose number is taken, or whose response was lost,
   reads the newest snapshot and the offsets again, before it writes another one.
3. A group that cannot be read keeps the offsets of its last read, and is marked as stale.
4. A group that did not change is not encoded again. In memory is the text of each group, beside
   what `CommittedOffsets` keeps.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.archive.group_offsets import (
    CommittedOffset,
    GroupEntry,
    Header,
    decoded_group,
    encoded_group,
)
from logmirror.archive.group_snapshots import Snapshots, next_sequence
from logmirror.errors import CorruptionError, LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.groups.replica_logs import CONSUMERS, described
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.groups import ReadOffsets
    from logmirror.groups.archive_spec import ArchivedTopic, ArchiveLinkSpec
    from logmirror.stores.base import BlobStore

    Position = Callable[[ArchivedTopic, int], int | None]
    """Returns the archive's position in a partition; None: not known."""

_LOG = logging.getLogger("logmirror.groups")

_ATTEMPTS: Final = 3
"""How often a snapshot is written again because another process was first."""


@dataclass(slots=True, kw_only=True)
class ArchiveRound:
    """What one round has done."""

    groups: int = 0
    """Groups with committed offsets of archived partitions."""

    failed: dict[str, LogmirrorError] = field(default_factory=dict)
    """Groups of which an offset could not be read."""

    written: int = 0
    """Snapshots that were written."""

    not_pruned: LogmirrorError | None = None
    """Why older snapshots could not be deleted."""


class _About(NamedTuple):
    """What a snapshot is about. If it changes, another snapshot is due."""

    source_alias: str
    cluster_id: str
    topic: str
    topic_id: str


class ArchiveLink:
    """Stores the committed offsets of the groups of one source. Not thread-safe.

    Args:
        spec: What to store.
        source: The source, with a short budget: a group that cannot be read is stale.
        store: The archive's store.
        position: The positions of the archive.
        clock: Time.
        writer: The writer ID of this process.
    """

    def __init__(  # noqa: PLR0913  # one for each thing that it works with
        self,
        spec: ArchiveLinkSpec,
        source: ClusterClient,
        store: BlobStore,
        position: Position,
        *,
        clock: Clock,
        writer: str,
    ) -> None:
        self._spec, self._source, self._position = spec, source, position
        self._clock, self._writer = clock, writer
        self._include = re.compile("|".join(f"(?:{one})" for one in spec.include))
        self._exclude = re.compile("|".join(f"(?:{one})" for one in spec.exclude))
        self._offsets = source.groups.followed()
        self._chains = [_Chain(topic, store, spec.destination) for topic in spec.topics]

    def round(self) -> ArchiveRound:
        """Read all offsets, and write the snapshots that are due.

        Raises:
            LogmirrorError: The source or the store failed; call it again later.
        """
        done = ArchiveRound()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._round(done)
            except (AlreadyExistsError, OutcomeUnknownError) as error:
                if attempt == _ATTEMPTS:
                    raise UnavailableError(
                        "a snapshot of group offsets was not written",
                        hint="another process may write snapshots of the same mirrors",
                        cause=error.message,
                        **error.facts,
                    ) from error
            else:
                break
        return done

    def _round(self, done: ArchiveRound) -> None:
        cluster_id = self._source.cluster_id()
        topics = described(self._source, {one.topic for one in self._spec.topics})
        chains = [chain for chain in self._chains if chain.topic.topic in topics]
        for chain in chains:
            chain.begin()
        read = self._read_groups(done)
        found: set[str] = set()
        for chain in chains:
            texts = chain.texts(read, done.failed)
            found |= texts.keys()
            topic = topics[chain.topic.topic]
            topic_id = topic.topic_id.hex() if topic.topic_id else ""
            about = _About(self._spec.source_alias, cluster_id, chain.topic.topic, topic_id)
            if chain.is_due(about, texts):
                time_ms = self._clock.now_ms()
                numbers = chain.topic.partitions or sorted(topic.partitions)
                positions = {number: self._position(chain.topic, number) for number in numbers}
                chain.write(self._header(chain, about, time_ms, positions), about, texts)
                done.written += 1
                done.not_pruned = chain.prune(self._spec.keep) or done.not_pruned
        done.groups = len(found)

    def _header(
        self, chain: _Chain, about: _About, time_ms: int, positions: Mapping[int, int | None]
    ) -> Header:
        return Header(
            sequence=next_sequence(chain.newest),
            time_ms=time_ms,
            writer=self._writer,
            mirror=chain.topic.mirror,
            destination=self._spec.destination,
            positions=positions,
            **about._asdict(),
        )

    def _read_groups(self, done: ArchiveRound) -> dict[str, ReadOffsets | None]:
        """Return what each group has committed, by name; None: it could not be read."""
        names = [
            listing.group
            for listing in self._source.groups.listed()
            if listing.protocol_type in CONSUMERS
            and self._include.fullmatch(listing.group)
            and not self._exclude.fullmatch(listing.group)
        ]
        self._offsets.retain(names)
        done.failed.clear()
        found: dict[str, ReadOffsets | None] = {}
        for group in names:
            try:
                found[group] = self._offsets.read(group)
            except LogmirrorError as error:
                found[group], done.failed[group] = None, error
        return found


class _Chain:
    """The snapshots of one mirror."""

    def __init__(self, topic: ArchivedTopic, store: BlobStore, destination: str) -> None:
        self.topic = topic
        self.newest: int | None = None
        self._snapshots = Snapshots(store, destination, topic.mirror)
        self._has_begun = False
        self._may_prune = True
        self._read: dict[str, tuple[ReadOffsets, bytes | None]] = {}
        """The text of each group as it was read; None: it has no such offset."""
        self._texts: dict[str, bytes] = {}
        """The groups of the newest snapshot."""
        self._latest: dict[str, bytes] = {}
        """The groups of the last round, which may not be written."""
        self._about: _About | None = None
        """What the newest snapshot is about; None: there is none, or it is damaged."""

    def begin(self) -> None:
        """Read the newest snapshot, if it is not known."""
        if self._has_begun:
            return
        self.newest, self._about, self._texts = self._snapshots.newest(), None, {}
        if self.newest is not None:
            try:
                found = self._snapshots.read(self.newest)
            except (KeyError, CorruptionError) as error:
                facts = {"folder": self._snapshots.folder, "sequence": self.newest}
                _LOG.warning(
                    "the newest snapshot of group offsets is damaged; another one is written",
                    extra={"facts": {**facts, "error": str(error)}},
                )
            else:
                head = found.header
                self._about = _About(head.source_alias, head.cluster_id, head.topic, head.topic_id)
                self._texts = {one.group: encoded_group(one) for one in found.groups}
        self._has_begun = True

    def texts(
        self, read: Mapping[str, ReadOffsets | None], failed: dict[str, LogmirrorError]
    ) -> dict[str, bytes]:
        """Return the text of each group with an offset of the mirrored partitions, by name.

        Args:
            read: What was read of each group; None: it could not be read.
            failed: Receives groups of which a partition could not be read.
        """
        found: dict[str, bytes] = {}
        for group, offsets in read.items():
            text = self._text(group, offsets, failed)
            if text is not None:
                found[group] = text
        for gone in self._read.keys() - read.keys():
            del self._read[gone]
        self._latest = found
        return found

    def _text(
        self, group: str, read: ReadOffsets | None, failed: dict[str, LogmirrorError]
    ) -> bytes | None:
        known = self._read.get(group)
        if read is not None and known is not None and known[0] is read:
            return known[1]
        if read is None:
            return self._stale(group, {}, None)
        offsets = {
            at.partition: CommittedOffset(at.partition, one.offset, one.metadata)
            for at, one in read.offsets.items()
            if self._is_mirrored(at.topic, at.partition)
        }
        unread = {
            at.partition: error
            for at, error in read.errors.items()
            if self._is_mirrored(at.topic, at.partition)
        }
        if unread:
            failed.setdefault(group, next(iter(unread.values())))
            return self._stale(group, offsets, unread)
        text = _encoded(group, offsets.values()) if offsets else None
        self._read[group] = read, text
        return text

    def _is_mirrored(self, topic: str, partition: int) -> bool:
        numbers = self.topic.partitions
        return topic == self.topic.topic and (numbers is None or partition in numbers)

    def _stale(
        self,
        group: str,
        offsets: Mapping[int, CommittedOffset],
        unread: Iterable[int] | None,
    ) -> bytes | None:
        """Return a group of which partitions were not read (None: all), with those of before."""
        text = self._latest.get(group) or self._texts.get(group)
        before = {one.partition: one for one in decoded_group(text).offsets} if text else {}
        kept = before if unread is None else {n: before[n] for n in unread if n in before}
        both = {**kept, **offsets}
        return _encoded(group, both.values(), is_stale=True) if both else None

    def is_due(self, about: _About, texts: Mapping[str, bytes]) -> bool:
        """Return whether the newest snapshot has anything else."""
        return about != self._about or texts != self._texts

    def write(self, header: Header, about: _About, texts: dict[str, bytes]) -> None:
        """Write a snapshot; what `Snapshots.create` raises means that the newest is not known."""
        try:
            self._snapshots.create(header, texts.values())
        except LogmirrorError:
            self._has_begun = False
            raise
        self.newest, self._about, self._texts = header.sequence, about, texts

    def prune(self, keep: int) -> LogmirrorError | None:
        """Delete older snapshots; returns why they could not be deleted.

        Nothing is deleted any more after an error, because each attempt reads all names.
        """
        if not self._may_prune:
            return None
        try:
            self._snapshots.prune(keep)
        except LogmirrorError as error:
            self._may_prune = isinstance(error, UnavailableError | OutcomeUnknownError)
            return error
        return None


def _encoded(group: str, offsets: Iterable[CommittedOffset], *, is_stale: bool = False) -> bytes:
    return encoded_group(GroupEntry(group, tuple(sorted(offsets)), is_stale))
