"""Recovery: opens a partition's log from its files, after a clean stop or a crash.

    files                           state
    <first>-<last>.batches          sealed: durable before it got this name
    .<first>.open                   open: whole batches, possibly a partial one at the end
    .<first>.open beside a sealed   a crash between link and unlink: the same file under two names
    more than one open              a crash before the older ones were sealed
    sealed, before the log start    a crash during a deletion: removed now
    .<next>.producers               the producer state before offset <next>

Open segments are read in order, and the checksum of each batch is verified. The log ends before the
first invalid batch: the file is truncated there, and later open segments are removed. Acknowledged
records are not lost by that (L2 in `partition_log`).

Afterwards a producer snapshot exists at the end of the last sealed segment, so any sealed segment
can be deleted later without losing producer state.
"""

from __future__ import annotations

import logging
import os
import re
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.archive.chain import chain
from logmirror.archive.naming import NATIVE, split_name
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.producer_state import ProducerState, SequencedBatch, last_sequence
from logmirror.broker.log.segment import HEADER_BYTES, Segment, SparseIndex
from logmirror.broker.log.sync_job import open_path, seal_file, snapshot_path
from logmirror.errors import CorruptionError
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.serve_markers import CONTROL_FLAG, coordinator_epoch_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logmirror.broker.log.disk import Disk, OpenFile
    from logmirror.broker.log.segment_cache import SegmentCache

_LOG: Final = logging.getLogger(__name__)
_OPEN: Final = re.compile(r"\.([0-9]{20})\.open")
_SNAPSHOT: Final = re.compile(r"\.([0-9]{20})\.producers")
_WINDOW_BYTES: Final = 4 * 1024 * 1024
_HEADER: Final = Struct(">qiibIhiqqqhii")
_LENGTH_END: Final = 12
_CRC_START: Final = 21
_MAGIC: Final = 2


class _Stored(NamedTuple):
    """A valid batch in a file."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    coordinator_epoch: int | None
    """The coordinator epoch of a control batch; None for a data batch."""


def recover(
    folder: Path, *, disk: Disk, cache: SegmentCache, segment_bytes: int, log_start: int = 0
) -> PartitionLog:
    """Open a partition's log. Everything in the returned log is durable.

    Args:
        folder: The partition's folder.
        disk: The system calls.
        cache: The cache for sealed segments.
        segment_bytes: As in `PartitionLog`.
        log_start: The log start offset in the metadata. The first stored record may be later.

    Raises:
        CorruptionError: The files contradict each other or the log start, in a way that no crash
            explains.
        OSError: The folder cannot be read or written.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    names = _without_deleted(folder, names, log_start, disk)
    sealed = chain((n for n in names if n[0] != "."), extension=NATIVE, start=None)
    segments = [
        Segment(
            folder / found.name, found.first, found.last + 1, (folder / found.name).stat().st_size
        )
        for found in sealed.objects
    ]
    firsts = sorted(int(match[1]) for name in names if (match := _OPEN.fullmatch(name)))
    firsts = _without_sealed_twins(folder, firsts, segments, disk)
    bounds = {segment.next_offset for segment in segments} | set(firsts[:1])
    producers, snapshot = _recover_producers(folder, names, bounds, segments, disk)
    tail = None
    for number, first in enumerate(firsts):
        expected = segments[-1].next_offset if segments else first
        if first != expected:
            raise CorruptionError(
                "open segment does not continue the log",
                path=str(open_path(folder, first)),
                expected=expected,
                found=first,
            )
        tail = _recover_open(folder, first, disk, producers)
        segments.append(tail)
        if number + 1 == len(firsts):
            break
        if tail.next_offset != firsts[number + 1]:
            _remove_never_acknowledged(folder, firsts[number + 1 :], disk)
            break
        snapshot = _write_snapshot(folder, producers, tail.next_offset, snapshot, disk)
        tail.path = seal_file(disk, folder, first, tail.next_offset)
        tail.file = tail.index = None
    if names:
        for path in (folder, folder.parent, folder.parent.parent):
            disk.sync_folder(path)
    log_end = segments[-1].next_offset if segments else 0
    if log_end < log_start:
        raise CorruptionError(
            "log ends before its start", path=str(folder), expected=log_start, found=log_end
        )
    return PartitionLog(
        folder,
        disk=disk,
        cache=cache,
        segment_bytes=segment_bytes,
        segments=segments,
        tail=tail,
        log_start=max(log_start, segments[0].first) if segments else 0,
        producers=producers,
        snapshot=snapshot,
    )


def _without_deleted(folder: Path, names: list[str], log_start: int, disk: Disk) -> list[str]:
    """Remove sealed segments before the log start; returns the remaining names.

    An interrupted deletion has removed the oldest ones already. The last segment stays, because it
    defines the log end offset.
    """
    parts = [(split_name(name), name) for name in names]
    covered = sorted((p[1], name) for p, name in parts if p is not None and p[2] == NATIVE)
    if not any(_OPEN.fullmatch(name) for name in names):
        covered = covered[:-1]
    deleted = {name for last, name in covered if last < log_start}
    for name in sorted(deleted):
        _LOG.info("%s: removed: its records were deleted", folder / name)
        disk.unlink(folder / name)
    return [name for name in names if name not in deleted]


def _without_sealed_twins(
    folder: Path, firsts: list[int], segments: list[Segment], disk: Disk
) -> list[int]:
    sealed = {segment.first: segment.path for segment in segments}
    left = []
    for first in firsts:
        path = open_path(folder, first)
        if first in sealed and path.samefile(sealed[first]):
            disk.unlink(path)
        else:
            left.append(first)
    return left


def _remove_never_acknowledged(folder: Path, firsts: list[int], disk: Disk) -> None:
    for first in firsts:
        path = open_path(folder, first)
        _LOG.warning("%s: removed: the log ends before it", path)
        disk.unlink(path)


def _recover_open(folder: Path, first: int, disk: Disk, producers: ProducerState) -> Segment:
    path = open_path(folder, first)
    file = disk.open_for_append(path)
    index = SparseIndex()
    next_offset, size_bytes = first, 0
    for batch in scan(file, first, contiguous=True):
        index.add(batch.base_offset, batch.position, batch.max_timestamp_ms)
        next_offset, size_bytes = batch.last_offset + 1, batch.position + batch.size_bytes
        _remember(producers, batch)
    found_bytes = os.fstat(file.fd).st_size
    if found_bytes > size_bytes:
        _LOG.warning(
            "%s: truncated from %d to %d bytes; the log ends at offset %d",
            path,
            found_bytes,
            size_bytes,
            next_offset,
        )
        disk.truncate(file, size_bytes)
    # Bytes in the page cache survive a crash of the broker, but not of the machine. They become
    # readable now, so they must be durable.
    disk.sync(file)
    return Segment(path, first, next_offset, size_bytes, file=file, index=index)


def _remember(producers: ProducerState, batch: _Stored) -> None:
    if batch.producer_id < 0:
        return
    writer, timestamp_ms = (batch.producer_id, batch.producer_epoch), batch.max_timestamp_ms
    if batch.coordinator_epoch is not None:
        producers.marked(*writer, batch.coordinator_epoch, timestamp_ms)
    elif batch.base_sequence >= 0:
        first, last = batch.base_sequence, last_sequence(batch.base_sequence, batch.record_count)
        stored = SequencedBatch(first, last, batch.base_offset, batch.last_offset, timestamp_ms)
        producers.stored(*writer, stored)


def _write_snapshot(
    folder: Path, producers: ProducerState, next_offset: int, previous: Path | None, disk: Disk
) -> Path:
    """Write the producer state at the end of the last sealed segment; returns the path."""
    path = snapshot_path(folder, next_offset)
    disk.write_synced(path, [producers.to_bytes(next_offset)])
    if previous is not None:
        disk.sync_folder(folder)
        disk.unlink(previous)
    return path


def _recover_producers(
    folder: Path, names: list[str], bounds: set[int], segments: list[Segment], disk: Disk
) -> tuple[ProducerState, Path | None]:
    """Read the newest snapshot at a segment boundary, then the sealed segments after it."""
    offsets = sorted(int(match[1]) for name in names if (match := _SNAPSHOT.fullmatch(name)))
    state, known_to, snapshot = ProducerState(), -1, None
    for offset in reversed(offsets):
        path = snapshot_path(folder, offset)
        if offset not in bounds or snapshot is not None:
            # A snapshot of an earlier or an incomplete seal. The log is the source of truth.
            disk.unlink(path)
            continue
        try:
            state = ProducerState.from_bytes(path.read_bytes(), offset)
        except CorruptionError as error:
            _LOG.warning("%s: ignored: %s; producer state is rebuilt from the log", path, error)
            disk.unlink(path)
            continue
        known_to, snapshot = offset, path
    for segment in segments:
        if segment.first >= known_to:
            for batch in scan(disk.open_for_reading(segment.path), segment.first, contiguous=False):
                _remember(state, batch)
    if segments and known_to < segments[-1].next_offset:
        snapshot = _write_snapshot(folder, state, segments[-1].next_offset, snapshot, disk)
    return state, snapshot


def scan(file: OpenFile, first: int, *, contiguous: bool) -> Iterator[_Stored]:
    """Yield the valid batches from the start of a file; stops at the first invalid one.

    Args:
        file: The file, read from its start to its end.
        first: The lowest base offset that the first batch may have.
        contiguous: Whether each batch must continue at the next offset, as in segments that this
            broker wrote. Archive objects may have offset gaps.
    """
    size = os.fstat(file.fd).st_size
    window = b""
    window_start = position = 0
    expected = first
    while position + HEADER_BYTES <= size:
        at = position - window_start
        if at + HEADER_BYTES > len(window):
            window, window_start, at = os.pread(file.fd, _WINDOW_BYTES, position), position, 0
        header = _HEADER.unpack_from(window, at)
        base_offset, length, _, magic, checksum, attributes, last_delta = header[:7]
        size_bytes = _LENGTH_END + length
        if size_bytes < HEADER_BYTES or position + size_bytes > size or magic != _MAGIC:
            return
        if at + size_bytes > len(window):
            wanted = max(_WINDOW_BYTES, size_bytes)
            window, window_start, at = os.pread(file.fd, wanted, position), position, 0
        if base_offset < expected or last_delta < 0 or (contiguous and base_offset != expected):
            return
        address = np.frombuffer(window, np.uint8).__array_interface__["data"][0] + at
        if crc32c_at(address + _CRC_START, size_bytes - _CRC_START) != checksum:
            return
        last_offset = base_offset + last_delta
        coordinator_epoch = None
        if attributes & CONTROL_FLAG:
            coordinator_epoch = coordinator_epoch_of(window[at : at + size_bytes])
        place = position, size_bytes, base_offset, last_offset
        yield _Stored._make((*place, *header[8:13], coordinator_epoch))
        expected = last_offset + 1
        position += size_bytes
