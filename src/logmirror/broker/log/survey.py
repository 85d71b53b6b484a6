"""Reads a partition's folder before recovery changes anything in it, and decides what to do."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.archive.chain import chain
from logmirror.archive.naming import NATIVE, split_name
from logmirror.broker.log.batch_scan import scan
from logmirror.broker.log.file_names import open_path, snapshot_path
from logmirror.broker.log.open_segments import OpenSegment, damaged, read_open, remember
from logmirror.broker.log.producer_state import ProducerState
from logmirror.broker.log.segment import Segment
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.durable_ends import DurableEnd

_LOG: Final = logging.getLogger(__name__)
_OPEN: Final = re.compile(r"\.([0-9]{20})\.open")
_CLEANED: Final = re.compile(r"\.[0-9]{20}\.cleaned")
_SNAPSHOT: Final = re.compile(r"\.([0-9]{20})\.producers")


@dataclass(slots=True, kw_only=True)
class Survey:
    """What a partition's folder holds."""

    names: list[str]
    """All names in the folder."""

    sealed: list[Segment]
    """The sealed segments, without those before the log start."""

    opened: list[OpenSegment]
    """The open segments that belong to the log."""

    to_remove: list[Path]
    """Sealed segments before the log start or covered by a compacted one, unfinished compacted
    ones, second names of sealed segments, old snapshots; in the order in which they are removed."""

    unreachable: list[Path]
    """Open segments behind a torn or a missing one."""

    producers: ProducerState
    """The producer state at the log's end."""

    snapshot: Path | None
    """The newest valid snapshot at a segment's end."""

    snapshot_due: bytes | None
    """The snapshot to write at the end of the last sealed segment; None: it exists."""

    durable_end: int
    """Records before it were acknowledged."""

    written_from: int
    """See `DurableEnd`."""

    archive_end: int = -1
    """The end of the segments that came from an archive; -1 without."""

    @property
    def log_end(self) -> int:
        """The end of the intact log; 0 for an empty folder."""
        if self.opened:
            return self.opened[-1].next_offset
        return self.sealed[-1].next_offset if self.sealed else 0


def survey(
    folder: Path, disk: Disk, *, log_start: int, durable: DurableEnd | None, accept_loss: bool
) -> Survey:
    """Read the folder of a partition. Nothing is changed.

    Args:
        folder: The partition's folder.
        disk: The system calls.
        log_start: The log start offset in the metadata.
        durable: The recorded durable end; None: not recorded yet.
        accept_loss: Whether damaged or missing records are accepted.

    Raises:
        DamagedLogError: Acknowledged records are damaged or missing, and that is not accepted.
        CorruptionError: The files contradict each other, in a way that no crash explains.
        OSError: The folder cannot be read.
    """
    # Records were durable before they were deleted.
    durable_end = log_start if durable is None else max(log_start, durable.offset)
    sizes = _listed(folder)
    names = list(sizes)
    deleted = _deleted(names, log_start)
    for name in deleted:
        _LOG.info("%s: removed: its records were deleted", folder / name)
    covered = _covered([name for name in names if name not in deleted])
    for name in covered:
        _LOG.info("%s: removed: a compacted segment replaced it", folder / name)
    unfinished = [name for name in names if _CLEANED.fullmatch(name)]
    firsts = sorted(int(match[1]) for name in names if (match := _OPEN.fullmatch(name)))
    without = {*deleted, *covered}
    sealed = _sealed(folder, {name: sizes[name] for name in names if name not in without})
    firsts, twins = _without_twins(folder, firsts, sealed)
    end = sealed[-1].next_offset if sealed else (firsts[0] if firsts else log_start)
    written_from = (firsts[0] if firsts else end) if durable is None else durable.written_from
    for segment in sealed:
        segment.is_exact = segment.first >= written_from
    found = Survey(
        names=names,
        sealed=sealed,
        opened=[],
        to_remove=[folder / name for name in (*deleted, *covered, *unfinished)] + twins,
        unreachable=[],
        producers=ProducerState(),
        snapshot=None,
        snapshot_due=None,
        durable_end=durable_end,
        written_from=written_from,
    )
    # Before the first durable end is recorded, a log of this broker has an open segment.
    archived = [one for one in sealed if not one.is_exact and (durable or not firsts)]
    bounds = {segment.next_offset for segment in sealed} | set(firsts[:1])
    found.archive_end = archived[-1].next_offset if archived else -1
    _read_producers(found, folder, bounds, disk, accept_loss=accept_loss)
    known_end = None if durable is None else durable_end
    _read_open_segments(found, folder, firsts, disk, known_end, accept_loss=accept_loss)
    if found.log_end < durable_end and not accept_loss:
        path, position = (sealed[-1].path, sealed[-1].size_bytes) if sealed else (folder, 0)
        raise damaged(folder, path, position, found.log_end, durable_end)
    return found


def _deleted(names: list[str], log_start: int) -> list[str]:
    """Return the sealed segments before the log start, oldest first.

    An interrupted deletion has removed the oldest ones already. The last segment stays, because it
    defines the log end offset.
    """
    parts = [(split_name(name), name) for name in names]
    covered = sorted((p[1], name) for p, name in parts if p is not None and p[2] == NATIVE)
    if not any(_OPEN.fullmatch(name) for name in names):
        covered = covered[:-1]
    return sorted(name for last, name in covered if last < log_start)


def _covered(names: list[str]) -> list[str]:
    """Return the segments that a compacted segment replaced, of which a crash left some.

    Any other overlap is an error, which `chain` reports.
    """
    parts = [(split_name(name), name) for name in names]
    ranges = sorted((p[0], -p[1], name) for p, name in parts if p is not None and p[2] == NATIVE)
    found, end = list[str](), -1
    for _, negative, name in ranges:
        if -negative <= end:
            found.append(name)
        end = max(end, -negative)
    return found


def _listed(folder: Path) -> dict[str, int]:
    """Return the names in a folder with the sizes of the files; no file is opened."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def _sealed(folder: Path, sizes: dict[str, int]) -> list[Segment]:
    objects = chain((n for n in sizes if n[0] != "."), extension=NATIVE, start=None).objects
    return [Segment(folder, first, last + 1, sizes[name]) for name, first, last in objects]


def _without_twins(
    folder: Path, firsts: list[int], sealed: list[Segment]
) -> tuple[list[int], list[Path]]:
    by_first = {segment.first: segment for segment in sealed}
    left, twins = [], []
    for first in firsts:
        path = open_path(folder, first)
        if first in by_first and path.samefile(by_first[first].path):
            twins.append(path)
        else:
            left.append(first)
    return left, twins


def _read_producers(
    found: Survey, folder: Path, bounds: set[int], disk: Disk, *, accept_loss: bool
) -> None:
    """Read the newest snapshot at a segment boundary, then the sealed segments after it."""
    offsets = sorted(int(match[1]) for name in found.names if (match := _SNAPSHOT.fullmatch(name)))
    known_to = -1
    for offset in reversed(offsets):
        path = snapshot_path(folder, offset)
        if offset not in bounds or found.snapshot is not None:
            # A snapshot of an earlier or an incomplete seal. The log is the source of truth.
            found.to_remove.append(path)
            continue
        try:
            found.producers = ProducerState.from_bytes(path.read_bytes(), offset)
        except CorruptionError as error:
            _LOG.warning("%s: ignored: %s; producer state is rebuilt from the log", path, error)
            found.to_remove.append(path)
            continue
        known_to, found.snapshot = offset, path
    for segment in found.sealed:
        if segment.first >= known_to:
            _read_sealed(found, folder, segment, disk, accept_loss=accept_loss)
        # A snapshot at this end has only transactions that are not over: of this broker, whose
        # recorded end was lost with the power, so that its segments are taken for an archive's.
        if segment.next_offset == found.archive_end > known_to:
            _end_archive(found, folder)
    if found.sealed and known_to < found.sealed[-1].next_offset:
        found.snapshot_due = found.producers.to_bytes(found.sealed[-1].next_offset)


def _end_archive(found: Survey, folder: Path) -> None:
    if count := found.producers.transactions.drop_ongoing():
        _LOG.warning("%s: the archive ends inside %d transactions: committed", folder, count)


def _read_sealed(
    found: Survey, folder: Path, segment: Segment, disk: Disk, *, accept_loss: bool
) -> None:
    file = disk.open_for_reading(segment.path)
    offset, end = segment.first, 0
    for batch in scan(file, segment.first, contiguous=False):
        remember(found.producers, batch)
        offset, end = batch.last_offset + 1, batch.end
    if end < os.fstat(file.fd).st_size and not accept_loss:
        # Without the producers behind it, duplicates would be accepted.
        raise damaged(folder, segment.path, end, offset, found.durable_end)


def _read_open_segments(  # noqa: PLR0913  # what is known of the folder
    found: Survey,
    folder: Path,
    firsts: list[int],
    disk: Disk,
    known_end: int | None,
    *,
    accept_loss: bool,
) -> None:
    expected = found.sealed[-1].next_offset if found.sealed else None
    for number, first in enumerate(firsts):
        path = open_path(folder, first)
        if expected is not None and first > expected:
            if known_end is None and not accept_loss:
                raise damaged(folder, path, 0, expected, found.durable_end)
            if known_end is None or expected >= known_end:
                # The name before it was not durable, nor was anything behind that acknowledged;
                # or the user gives that up.
                found.unreachable = [open_path(folder, later) for later in firsts[number:]]
                break
        if expected is not None and first != expected:
            raise CorruptionError(
                "open segment does not continue the log",
                path=str(path),
                expected=expected,
                found=first,
            )
        following = firsts[number + 1] if number + 1 < len(firsts) else None
        opened = read_open(path, following, disk, found.producers, found.durable_end)
        found.opened.append(opened)
        if opened.is_damaged(found.durable_end):
            if not accept_loss:
                position, offset = opened.size_bytes, opened.next_offset
                raise damaged(folder, path, position, offset, found.durable_end)
        elif following is not None and not opened.is_whole:
            found.unreachable = [open_path(folder, later) for later in firsts[number + 1 :]]
            break
        expected = following
