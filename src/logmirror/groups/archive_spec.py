"""Which committed offsets are stored beside an archive, without the code that does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.ports import ArchiveSpec, ChainStart


class ArchivedTopic(NamedTuple):
    """A mirrored topic, and how it is archived."""

    mirror: str
    topic: str
    partitions: tuple[int, ...] | None
    """The archived partitions. None: all."""

    chain_start: ChainStart
    written: ArchiveSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLinkSpec:
    """The groups of one source, for one archive."""

    source: ConnectionSettings
    source_alias: str
    """The name of the source in snapshots and metrics."""

    location: StoreLocation
    destination: str
    """The name of the archive."""

    topics: tuple[ArchivedTopic, ...]
    include: tuple[str, ...]
    """Regular expressions; a group matches one of them as a whole."""

    exclude: tuple[str, ...]
    """The same, for groups that are left out."""

    interval_ms: int
    keep: int
    """How many snapshots are kept; see `archive.group_offsets.to_delete`."""
