"""`logmirror compact`: merges small objects of every archive, one partition after the other.

Runs without Spark and beside running mirrors.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logmirror.app.specs import mirror_specs
from logmirror.archive import compact as chains
from logmirror.archive.merge import Archive
from logmirror.archive.naming import partition_folder
from logmirror.clock import SYSTEM_CLOCK, new_writer_id
from logmirror.errors import LogmirrorError, UsageError
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.reports import CompactReport
from logmirror.stores.opening import begin_writing, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.config.settings import Settings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.stores.base import BlobStore


def compact(
    settings: Settings, *, target_bytes: int, min_objects: int, dry_run: bool
) -> list[CompactReport]:
    """Merge small objects in all archives of the enabled mirrors; see `logmirror.compact`.

    Args:
        settings: The configuration.
        target_bytes: Size limit of a merged object: the sum of the objects that it replaces.
        min_objects: Fewer adjacent small objects are left alone.
        dry_run: Change nothing; report what would be merged.

    Raises:
        UsageError: There is no archive, or a store cannot be written to safely.
    """
    limits = chains.Limits(target_bytes=target_bytes, min_objects=min_objects)
    archives = [
        (spec, name, written)
        for spec in mirror_specs(settings)
        for name, written in spec.destinations
        if isinstance(written, ArchiveSpec) and not written.compaction
    ]
    if not archives:
        raise UsageError(
            "the configuration has no archive that can be compacted",
            hint="snapshots (`compaction: log`) are not merged; see `snapshots: keep N`",
        )
    writer_id = new_writer_id()

    def act(archive: Archive, start: int | None) -> chains.Outcome:
        if dry_run:
            return _planned(archive, limits, start)
        return chains.compact(archive, limits, start=start, writer_id=writer_id, clock=SYSTEM_CLOCK)

    rows: list[CompactReport] = []
    opened: dict[StoreLocation, BlobStore] = {}
    with contextlib.ExitStack() as stack:
        for spec, name, written in archives:
            where = written.location
            if where not in opened and dry_run:
                opened[where] = open_store(where, writer_id)
            elif where not in opened:
                opened[where] = begin_writing(where, writer_id, stack)
            rows += _rows(spec, name, written, opened[where], act)
    return rows


def _rows(
    spec: MirrorSpec,
    name: str,
    written: ArchiveSpec,
    store: BlobStore,
    act: Callable[[Archive, int | None], chains.Outcome],
) -> Iterator[CompactReport]:
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
            limits=written.limits,
        )
        try:
            yield _report(flow, act(archive, start))
        except LogmirrorError as error:
            yield _report(flow, chains.Outcome(), error)


def _report(
    flow: FlowId, outcome: chains.Outcome, error: LogmirrorError | None = None
) -> CompactReport:
    return CompactReport(
        mirror=flow.mirror,
        destination=flow.destination,
        topic=flow.topic,
        partition=flow.partition,
        objects_before=outcome.objects_before,
        objects_after=outcome.objects_after,
        bytes_before=outcome.bytes_before,
        bytes_after=outcome.bytes_after,
        merged=outcome.merged,
        into=outcome.into,
        finished=outcome.finished,
        error=error,
    )


def _planned(archive: Archive, limits: chains.Limits, start: int | None) -> chains.Outcome:
    found = chains.plan(archive, limits, start=start)
    objects, merged = len(found.cover.objects), sum(map(len, found.groups))
    size_bytes = sum(found.sizes_bytes[obj.name] for obj in found.cover.objects)
    return chains.Outcome(
        objects_before=objects,
        objects_after=objects - merged + len(found.groups),
        bytes_before=size_bytes,
        bytes_after=size_bytes,
        merged=merged,
        into=len(found.groups),
        finished=sum(map(len, found.cover.replaced.values())),
    )
