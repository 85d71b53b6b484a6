"""The composition root of an executor, and the daemon from which Spark forks its Python workers.

Spark starts this module by name (`spark.python.daemon.module`) and forks a worker for each slot.
Modules are loaded and kernels compiled here once, so a worker starts in milliseconds and shares
this memory. Otherwise each worker would need at least one CPU second, and again after each crash.
The driver passes the name of `execute` and never imports it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import resource
import select
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.daemon import manager

from logmirror.archive.snapshots import RUN_BYTES
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.offset_syncs import OffsetSyncWriter, create_sync_topic
from logmirror.errors import UsageError
from logmirror.mirror.follow import SlotLink
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec, SliceResult
from logmirror.mirror.units import units
from logmirror.model import Limits, TimestampType
from logmirror.references import resolved
from logmirror.source.column_types import Gate
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.stores.opening import open_store
from logmirror.to_archive.memory import Memory
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.to_archive.transfer import Transfer
from logmirror.to_kafka.gap_writer import GapWriter
from logmirror.to_kafka.preserve_transfer import PreserveTransfer
from logmirror.to_kafka.producer_sessions import ProducerSessions
from logmirror.to_kafka.tail_check import TailCheck
from logmirror.to_kafka.translate_progress import ProgressReader
from logmirror.to_kafka.translate_transfer import TranslateTransfer
from logmirror.wire.decode import CHUNK_BYTES, RecordDecoder
from logmirror.wire.rebatch import Rebatcher
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logmirror.cluster.produce import ProducePipeline
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.follow import FollowWindow, JobAddress
    from logmirror.mirror.ports import Work
    from logmirror.stores.base import BlobStore


_STDIN: Final = 0
_TURN_MS: Final = 50
"""Part of the follow window for each pair of clusters, if one slot serves several in turn."""


class Slot(NamedTuple):
    """Whose connections and buffers are used: those of one thread of one process.

    A forked worker must not share its parent's sockets.
    """

    process: int
    thread: int


def _this_slot() -> Slot:
    return Slot(os.getpid(), threading.get_ident())


@functools.cache
def _client(settings: ConnectionSettings, _slot: Slot) -> ClusterClient:
    return ClusterClient(settings)


@functools.cache
def _tools(_slot: Slot) -> tuple[FetchBuffer, BatchScanner]:
    return FetchBuffer(), BatchScanner()


@functools.cache
def _pipeline(settings: ConnectionSettings, slot: Slot, _purpose: str) -> ProducePipeline:
    return _client(settings, slot).pipeline()


@functools.cache
def _gap_writer(settings: ConnectionSettings, slot: Slot) -> GapWriter:
    return GapWriter(_client(settings, slot))


@functools.cache
def _decoder(limits: Limits, chunk_bytes: int, _slot: Slot) -> RecordDecoder:
    return RecordDecoder(chunk_bytes, limits)


@functools.cache
def _store(location: StoreLocation, writer_id: str, held_bytes: int, _slot: Slot) -> BlobStore:
    return open_store(location, writer_id, held_bytes=held_bytes)


@functools.cache
def _rebatcher(max_batch_bytes: int, limits: Limits, _slot: Slot) -> Rebatcher:
    if max_batch_bytes == 0:
        return Rebatcher(merge_below_bytes=0, merge_compressed_below_bytes=0, limits=limits)
    return Rebatcher(max_batch_bytes=max_batch_bytes, limits=limits)


@functools.cache
def _translation(
    settings: ConnectionSettings, slot: Slot
) -> tuple[ProducerSessions, ProgressReader]:
    client = _client(settings, slot)
    return ProducerSessions(client), ProgressReader(client)


@functools.cache
def _sync_writer(
    source: ConnectionSettings, slot: Slot, name: str, mirror: str
) -> OffsetSyncWriter:
    pipeline = _pipeline(source, slot, f"syncs of {mirror} to {name}")
    create = functools.partial(
        create_sync_topic,
        _client(source, slot),
        name,
        SYSTEM_CLOCK,
        mirror=mirror,
        level=logging.DEBUG,
    )
    return OffsetSyncWriter(pipeline, name, SYSTEM_CLOCK, mirror=mirror, create=create)


def execute(works: Sequence[Work], job: JobAddress | None = None) -> Iterator[SliceResult]:
    """Run the works of one slot in this process; yield one result for each.

    Errors are part of the results: no LogmirrorError is raised. Connections, buffers and decoders
    are kept for the next call.

    Args:
        works: Works for archives and clusters.
        job: The address of the driver's `StopChannel`. None: there is none.
    """
    with SlotLink(job, SYSTEM_CLOCK) as link:
        works, results = link.take_over(works), []
        works, failed = with_secrets(works)
        for result in itertools.chain(failed, _execute(works, link)):
            results.append(result)
            yield replace(result, peak_bytes=_peak_bytes())
        if works and all(isinstance(work.destination, KafkaSpec) for work in works):
            link.hand_over(results)


def with_secrets(works: Sequence[Work]) -> tuple[list[Work], list[SliceResult]]:
    """Return the works with secrets in place of references, and the results of those that lack one.

    A `Work` that was pickled by the driver has no secrets if `spark.secrets` is `executors`.
    """
    found, failed = [], []
    for work in works:
        try:
            source, destination = resolved(work.source), resolved(work.destination)
        except UsageError as error:
            at = work.slice.first
            failed.append(SliceResult(slice=work.slice, receipts=(), next_offset=at, error=error))
        else:
            found.append(replace(work, source=source, destination=destination))
    return found, failed


def _peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _execute(works: Sequence[Work], link: SlotLink) -> Iterator[SliceResult]:
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
    window = link.window(duration_ms)
    for group in copies.values():
        yield from _copy(group, window if len(copies) == 1 else window.part(_TURN_MS))


def _source(work: Work) -> KafkaSource:
    slot = _this_slot()
    buffer, scanner = _tools(slot)
    return KafkaSource(
        _client(work.source, slot),
        work.slice.flow.source,
        topic_id=work.slice.topic_id,
        buffer=buffer,
        scanner=scanner,
        position=work.slice.first,
        leader_epoch=work.slice.leader_epoch,
        compacted=work.slice.compacted,
    )


def _archive(works: list[Work], memory: Memory) -> list[SliceResult]:
    """Run works that share one read of the source."""
    slot = _this_slot()
    decoder = _decoder(works[0].archive.limits, memory.chunk_bytes, slot)
    if works[0].archive.compaction:
        return [_snapshot(work, memory, decoder) for work in works]
    transfers = [
        Transfer(
            work,
            _store(work.archive.location, work.writer_id, memory.held_bytes, slot),
            decoder,
            row_group_bytes=memory.row_group_bytes,
        )
        for work in works
    ]
    return carry_out(transfers, _source(works[0]), decoder)


def _snapshot(work: Work, memory: Memory, decoder: RecordDecoder) -> SliceResult:
    store = _store(work.archive.location, work.writer_id, memory.held_bytes, _this_slot())
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
    slot, spec = _this_slot(), works[0].kafka
    client, decoder = _client(spec.cluster, slot), _decoder(spec.limits, CHUNK_BYTES, slot)
    if spec.offsets == "translate":
        sessions, progress = _translation(spec.cluster, slot)
        return TranslateTransfer(
            works,
            source_client=_client(works[0].source, slot),
            source={work.slice.flow.source: _source(work) for work in works},
            client=client,
            sessions=sessions,
            progress=progress,
            rebatcher=_rebatcher(spec.max_batch_bytes, spec.limits, slot),
            gate=Gate(decoder),
            sync_writer=_sync_writer(works[0].source, slot, spec.name, spec.mirror),
            window=window,
        ).run()
    return PreserveTransfer(
        works,
        source_client=_client(works[0].source, slot),
        source={work.slice.flow.source: _source(work) for work in works},
        client=client,
        pipeline=_pipeline(spec.cluster, slot, "data"),
        rebatcher=_rebatcher(spec.max_batch_bytes, spec.limits, slot),
        gate=Gate(decoder),
        gap_writer=_gap_writer(spec.cluster, slot),
        tail_check=TailCheck(client, _pipeline(spec.cluster, slot, "padding"), decoder),
        window=window,
    ).run()


def warm_up() -> None:
    """Load modules and compile kernels in this process before the first slice."""
    slot = _this_slot()
    scanner, decoder = _tools(slot)[1], _decoder(Limits(), CHUNK_BYTES, slot)
    batch = encode_reference([Record(0, 0, TimestampType.CREATE_TIME, b"k", b"v", ())])
    batches = scanner.scan(batch, len(batch))
    for rows in decoder.decode(batch, batches, first=0, end=1):
        rows.to_arrow("t", 0)


def main() -> None:
    """Load, then serve Spark until it disconnects."""
    with _ending_with_spark():
        warm_up()
    gc.collect()
    gc.freeze()  # keeps memory shared: a worker's garbage collector must not write to it
    manager()


@contextlib.contextmanager
def _ending_with_spark() -> Iterator[None]:
    """Within the block, end this process when Spark closes its standard input.

    `manager` does so later. The first start on a machine compiles for 20 seconds before that.
    """
    done, finish = os.pipe()
    poll = select.poll()
    poll.register(_STDIN, 0)  # reports only that it was closed
    poll.register(done, select.POLLIN)

    def watch() -> None:
        if any(descriptor == _STDIN for descriptor, _ in poll.poll()):
            os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.write(finish, b"!")
        watcher.join()  # no thread may live when `manager` forks
        os.close(done)
        os.close(finish)


if __name__ == "__main__":
    main()
