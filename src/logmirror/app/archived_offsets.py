"""Committed offsets from the snapshots of an archive, for plans without the source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.archive.group_snapshots import Snapshots
from logmirror.cluster.groups import GroupListing, GroupOffset
from logmirror.errors import UsageError
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.model import TopicPartition
from logmirror.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from logmirror.archive.group_offsets import Snapshot
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.source_views import MirrorSpec

NO_SYNCS: Final = "the offset syncs are in the source's cluster, which this plan does not read"
STALE: Final = "the group's offset was read before the snapshot"


class OffsetsFrom(NamedTuple):
    """An archive whose snapshots have the committed offsets."""

    destination: str
    """Its name in the mirrors."""
    at_ms: int | None
    """Take the newest snapshot at or before this time, ms since 1970. None: the newest."""


class Archived(NamedTuple):
    """What the snapshots of one source have."""

    committed: dict[GroupListing, dict[TopicPartition, GroupOffset]]
    stale: set[tuple[str, TopicPartition]]
    """Groups and partitions whose offset may be of an earlier read."""
    as_of_ms: int
    """The time of the oldest of the snapshots, ms since 1970."""


def needed(specs: Iterable[MirrorSpec], wanted: OffsetsFrom) -> dict[str, Snapshot]:
    """Return the snapshot of each mirror with a replica in a cluster, by the mirror's name.

    Raises:
        UsageError: A mirror has no such archive, or the archive no such snapshot.
        CorruptionError: A snapshot is damaged.
    """
    found: dict[str, Snapshot] = {}
    for spec in specs:
        if not any(isinstance(written, KafkaSpec) for _, written in spec.destinations):
            continue
        archives = {
            name: written for name, written in spec.destinations if isinstance(written, ArchiveSpec)
        }
        if wanted.destination not in archives:
            raise UsageError(
                "the mirror has no archive of this name",
                hint="name a destination of type filesystem or s3; choose mirrors with --mirror",
                mirror=spec.name,
                destination=wanted.destination,
                archives=sorted(archives),
            )
        store = open_store(archives[wanted.destination].location, "groups")
        snapshots = Snapshots(store, wanted.destination, spec.name)
        found[spec.name] = snapshot = snapshots.find(wanted.at_ms)
        if snapshot.header.topic != spec.topic:
            raise UsageError(
                "the snapshot of group offsets is of another topic",
                hint="a mirror had this name before; take an earlier time with --at",
                mirror=spec.name,
                expected=spec.topic,
                found=snapshot.header.topic,
            )
    return found


def archived(
    specs: Iterable[MirrorSpec], snapshots: dict[str, Snapshot], groups: Collection[str]
) -> dict[ConnectionSettings, Archived]:
    """Return the committed offsets of all snapshots, by source.

    Args:
        specs: The mirrors.
        snapshots: The result of `needed`.
        groups: Only these. Empty: all.
    """
    found: dict[ConnectionSettings, Archived] = {}
    for spec in specs:
        if spec.name not in snapshots:
            continue
        snapshot = snapshots[spec.name]
        before = found.get(spec.source, Archived({}, set(), snapshot.header.time_ms))
        as_of_ms = min(before.as_of_ms, snapshot.header.time_ms)
        found[spec.source] = before._replace(as_of_ms=as_of_ms)
        for entry in snapshot.groups:
            if groups and entry.group not in groups:
                continue
            listing = GroupListing(entry.group, "consumer", "")
            offsets = before.committed.setdefault(listing, {})
            for one in entry.offsets:
                where = TopicPartition(snapshot.header.topic, one.partition)
                offsets[where] = GroupOffset(one.offset, -1, one.metadata)
                if entry.is_stale:
                    before.stale.add((entry.group, where))
    return found
