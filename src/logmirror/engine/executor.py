"""The composition root of an executor, and the daemon from which Spark forks its Python workers.

Spark starts this module by name (`spark.python.daemon.module`) and forks a worker for each slot.
Modules are loaded and kernels compiled here once, so a worker starts in milliseconds and shares
this memory. Otherwise each worker would need at least one CPU second, and again after each crash.
The driver passes the name of `execute` and never imports it.
"""

from __future__ import annotations

import functools
import gc
import os
import resource
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.daemon import manager

from logmirror.archive.snapshots import RUN_BYTES
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.mirror.follow import open_follow_window
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.units import units
from logmirror.model import TimestampType
from logmirror.source.column_types import Gate
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.stores.opening import open_store
from logmirror.to_archive.memory import Memory
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.to_archive.transfer import Transfer
from logmirror.to_kafka.gap_writer import GapWriter
from logmirror.to_kafka.offset_syncs import OffsetSyncWriter
from logmirror.to_kafka.preserve_transfer import PreserveTransfer
from logmirror.to_kafka.producer_sessions import ProducerSessions
from logmirror.to_kafka.tail_check import TailCheck
from logmirror.to_kafka.translate_progress import ProgressReader
from logmirror.to_kafka.translate_transfer import TranslateTransfer
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.rebatch import Rebatcher
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logmirror.cluster.produce import ProducePipeline
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.follow import FollowWindow
    from logmirror.mirror.ports import SliceResult, Work
    from logmirror.stores.base import BlobStore


_TURN_MS: Final = 50
"""Part of the follow window for each pair of clusters, if one slot serves several in turn."""


@functools.cache
def _client(settings: ConnectionSettings, _process: int) -> ClusterClient:
    return ClusterClient(settings)


@functools.cache
def _tools(_process: int) -> tuple[FetchBuffer, BatchScanner, RecordDecoder]:
    return FetchBuffer(), BatchScanner(), RecordDecoder()


@functools.cache
def _pipeline(settings: ConnectionSettings, process: int, _purpose: str) -> ProducePipeline:
    return _client(settings, process).pipeline()


@functools.cache
def _gap_writer(settings: ConnectionSettings, process: int) -> GapWriter:
    return GapWriter(_client(settings, process))


@functools.cache
def _decoder(chunk_bytes: int, _process: int) -> RecordDecoder:
    return RecordDecoder(max_chunk_bytes=chunk_bytes)


@functools.cache
def _store(location: StoreLocation, writer_id: str, held_bytes: int, _process: int) -> BlobStore:
    return open_store(location, writer_id, held_bytes=held_bytes)


@functools.cache
def _rebatcher(max_batch_bytes: int, _process: int) -> Rebatcher:
    if max_batch_bytes == 0:
        return Rebatcher(merge_below_bytes=0, merge_compressed_below_bytes=0)
    return Rebatcher(max_batch_bytes=max_batch_bytes)


@functools.cache
def _translation(
    settings: ConnectionSettings, process: int
) -> tuple[ProducerSessions, ProgressReader]:
    client = _client(settings, process)
    return ProducerSessions(client), ProgressReader(client)


@functools.cache
def _sync_writer(
    source: ConnectionSettings, process: int, name: str, mirror: str
) -> OffsetSyncWriter:
    pipeline = _pipeline(source, process, f"syncs of {mirror} to {name}")
    return OffsetSyncWriter(pipeline, name, SYSTEM_CLOCK, mirror=mirror)


def execute(
    works: Sequence[Work], stop_channel: tuple[str, int] | None = None
) -> Iterator[SliceResult]:
    """Run the works of one slot in this process; yield one result for each.

    Errors are part of the results: no LogmirrorError is raised. Connections, buffers and decoders
    are kept for the next call.

    Args:
        works: Works for archives and clusters.
        stop_channel: Host and port of the driver's `StopChannel`. None: there is none.
    """
    for result in _execute(works, stop_channel):
        yield replace(result, peak_bytes=_peak_bytes())


def _peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _execute(works: Sequence[Work], stop_channel: tuple[str, int] | None) -> Iterator[SliceResult]:
    copies: dict[tuple[object, ...], list[Work]] = defaultdict(list)
    for work in works:
        if isinstance(work.destination, KafkaSpec):
            spec = work.destination
            kind = (spec.offsets, (spec.name, spec.mirror) if spec.offsets == "translate" else ())
            copies[(work.source, spec.cluster, spec.max_batch_bytes, *kind)].append(work)
    for unit in units(work for work in works if isinstance(work.destination, ArchiveSpec)):
        memory = Memory.of_share(unit[0].memory_bytes)
        for wave in memory.waves(unit):
            yield from _archive(wave, memory)
    duration_ms = max((work.window_ms for group in copies.values() for work in group), default=0)
    with open_follow_window(stop_channel, duration_ms, SYSTEM_CLOCK) as window:
        for group in copies.values():
            yield from _copy(group, window if len(copies) == 1 else window.part(_TURN_MS))


def _source(work: Work) -> KafkaSource:
    process = os.getpid()  # a forked worker must not share its parent's sockets
    buffer, scanner, _ = _tools(process)
    return KafkaSource(
        _client(work.source, process),
        work.slice.flow.source,
        topic_id=work.slice.topic_id,
        buffer=buffer,
        scanner=scanner,
    )


def _archive(works: list[Work], memory: Memory) -> list[SliceResult]:
    """Run works that share one read of the source."""
    process = os.getpid()
    decoder = _decoder(memory.chunk_bytes, process)
    if works[0].archive.compaction:
        return [_snapshot(work, memory, decoder) for work in works]
    transfers = [
        Transfer(
            work,
            _store(work.archive.location, work.writer_id, memory.held_bytes, process),
            decoder,
            row_group_bytes=memory.row_group_bytes,
        )
        for work in works
    ]
    return carry_out(transfers, _source(works[0]), decoder)


def _snapshot(work: Work, memory: Memory, decoder: RecordDecoder) -> SliceResult:
    store = _store(work.archive.location, work.writer_id, memory.held_bytes, os.getpid())
    # Spark's local directory, which is deleted with the session.
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return SnapshotTransfer(
        work,
        _source(work),
        store,
        decoder,
        folder=Path(folders[0]) if folders[0] else None,
        run_bytes=min(RUN_BYTES, memory.objects_bytes // 4),  # sorting copies it twice
        row_group_bytes=memory.row_group_bytes,
    ).run()


def _copy(works: list[Work], window: FollowWindow) -> list[SliceResult]:
    process, spec = os.getpid(), works[0].kafka
    client, gate = _client(spec.cluster, process), Gate(_tools(process)[2])
    if spec.offsets == "translate":
        sessions, progress = _translation(spec.cluster, process)
        return TranslateTransfer(
            works,
            source_client=_client(works[0].source, process),
            source={work.slice.flow.source: _source(work) for work in works},
            client=client,
            sessions=sessions,
            progress=progress,
            rebatcher=_rebatcher(spec.max_batch_bytes, process),
            gate=gate,
            sync_writer=_sync_writer(works[0].source, process, spec.name, spec.mirror),
            window=window,
        ).run()
    return PreserveTransfer(
        works,
        source_client=_client(works[0].source, process),
        source={work.slice.flow.source: _source(work) for work in works},
        client=client,
        pipeline=_pipeline(spec.cluster, process, "data"),
        rebatcher=_rebatcher(spec.max_batch_bytes, process),
        gate=gate,
        gap_writer=_gap_writer(spec.cluster, process),
        tail_check=TailCheck(
            client, _pipeline(spec.cluster, process, "padding"), _tools(process)[2]
        ),
        window=window,
    ).run()


def warm_up() -> None:
    """Load modules and compile kernels in this process before the first slice."""
    _, scanner, decoder = _tools(os.getpid())
    batch = encode_reference([Record(0, 0, TimestampType.CREATE_TIME, b"k", b"v", ())])
    batches = scanner.scan(batch, len(batch))
    for rows in decoder.decode(batch, batches, first=0, end=1):
        rows.to_arrow("t", 0)


def main() -> None:
    """Load, then serve Spark until it disconnects."""
    warm_up()
    gc.collect()
    gc.freeze()  # keeps memory shared: a worker's garbage collector must not write to it
    manager()


if __name__ == "__main__":
    main()
