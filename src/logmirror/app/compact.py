"""The composition root of `logmirror compact`: settings to chains, one after the other.

Beside `wiring`, because it writes without Spark and without a mirror's loop, and beside
`overview`, because that writes nothing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.app.run import mirror_specs
from logmirror.archive.compact import Limits, Outcome, compact, plan
from logmirror.archive.merge import Archive
from logmirror.archive.naming import partition_folder
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.errors import LogmirrorError, UsageError
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.stores.opening import begin_writing, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.config.settings import Settings
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.stores.base import BlobStore
    from logmirror.stores.locations import StoreLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRow:
    """What was done, or is to be done, in one chain."""

    flow: FlowId
    outcome: Outcome
    error: LogmirrorError | None = None


def compact_archives(
    settings: Settings, *, target_bytes: int, min_objects: int, dry_run: bool
) -> list[CompactRow]:
    """Merge small objects in all archives of the enabled mirrors; one row for each partition.

    Args:
        settings: Whose archives.
        target_bytes: What a merged object holds at most, in bytes of the objects it replaces.
        min_objects: Fewer are not merged.
        dry_run: Change nothing, and say what would be done first.

    Raises:
        UsageError: There is no archive, or a store cannot be written to as it must be.
    """
    limits = Limits(target_bytes=target_bytes, min_objects=min_objects)
    archives = [
        (spec, name, written)
        for spec in mirror_specs(settings)
        for name, written in spec.destinations
        if isinstance(written, ArchiveSpec) and not written.compaction
    ]
    if not archives:
        raise UsageError(
            "the configuration has no archive of all records in files or objects",
            hint="objects of `compaction: log` are whole tables: `snapshots: keep N` prunes them",
        )
    writer_id = new_writer_id()

    def act(archive: Archive, start: int | None) -> Outcome:
        if dry_run:
            return _planned(archive, limits, start)
        return compact(archive, limits, start=start, writer_id=writer_id, clock=SYSTEM_CLOCK)

    rows: list[CompactRow] = []
    opened: dict[StoreLocation, BlobStore] = {}
    with contextlib.ExitStack() as stack:
        for spec, name, written in archives:
            where = written.location
            if where not in opened and dry_run:
                opened[where] = open_store(where, writer_id)
            elif where not in opened:
                opened[where] = begin_writing(where, writer_id, stack, beside_others=True)
            rows += _rows(spec, name, written, opened[where], act)
    return rows


def _rows(
    spec: MirrorSpec,
    name: str,
    written: ArchiveSpec,
    store: BlobStore,
    act: Callable[[Archive, int | None], Outcome],
) -> Iterator[CompactRow]:
    start = None if spec.chain_start == "earliest" else spec.chain_start or 0
    held = sorted(int(found) for found in store.folders(name) if found.isdecimal())
    for partition in spec.partitions or held:
        flow = FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=partition)
        archive = Archive(
            store=store,
            folder=partition_folder(name, partition),
            topic=spec.topic,
            extension=written.extension,
            compression=written.compression,
            utf8=written.encoding == "utf8",
        )
        try:
            yield CompactRow(flow=flow, outcome=act(archive, start))
        except LogmirrorError as error:
            yield CompactRow(flow=flow, outcome=Outcome(), error=error)


def _planned(archive: Archive, limits: Limits, start: int | None) -> Outcome:
    found = plan(archive, limits, start=start)
    objects, merged = len(found.cover.links), sum(map(len, found.groups))
    size_bytes = sum(found.sizes_bytes[link.name] for link in found.cover.links)
    return Outcome(
        objects_before=objects,
        objects_after=objects - merged + len(found.groups),
        bytes_before=size_bytes,
        bytes_after=size_bytes,
        merged=merged,
        into=len(found.groups),
        finished=sum(map(len, found.cover.replaced.values())),
    )
