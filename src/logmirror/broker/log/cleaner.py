"""Compaction: of the records with one key, the newest stays. The rules are Kafka's.

- C1 Compacted are sealed segments below the first transaction that is not decided, from the log
  start on. The part that was not compacted before is dirty. Its keys are put into a map of bounded
  size; if it is full, only the part up to there is compacted, and the rest by the next pass.
- C2 A record below that offset stays, unless there is a newer one with its key in the map. Records
  of aborted transactions do not count and do not stay. A record without a key stays.
- C3 A null value stays for `delete.retention.ms` after it was compacted first. The batch stores
  that time (KIP-534).
- C4 What stays is unchanged: offsets, timestamps, headers, codec, producer, sequences. A batch
  keeps its base offset and its last offset delta.
- C5 Transaction markers stay, because readers of committed records need those of aborted ones.
- C6 The last batch of each producer stays, without its records if need be, so that the log alone
  has its last sequence. The producer snapshot keeps the rest.
- C7 In the place of batches that do not stay is a batch without records and producer. So segments
  that this broker wrote still cover every offset, and a missing batch is recognised as damage.
- C8 A damaged or incomplete segment is never compacted, nor anything else of its partition.

Files, in this order:

    step                                               a crash behind it leaves
    .<first>.cleaned is written and flushed            the old segments; it is removed
    renamed to <first>-<last>.batches, in the place    the new one, and perhaps old ones that it
      of an old segment of this name if there is one   covers: these are removed
    the folder is flushed                              the same
    old segments that it covers are removed            the same, or the new one only

A power loss may undo a rename before the folder is flushed. The newest records are the same.
"""

from __future__ import annotations

import os
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.broker.log.batch_scan import WINDOW_BYTES
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.outcomes import Outcomes
from logmirror.broker.log.segment import HEADER_BYTES, Segment
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.wire import kernels_clean as k
from logmirror.wire import kernels_keys as keys
from logmirror.wire.compression import Codec, Decompressor, compress
from logmirror.wire.kernels_columns import COMPRESSED, DONE, FULL, WHY
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.scan import Batches, BatchScanner, address_of, as_bytes_array
from logmirror.wire.serve_markers import CONTROL_FLAG

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from logmirror.broker.log.disk import Disk, OpenFile

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
MAP_BYTES: Final = 32 * 1024 * 1024
"""Memory of the map: about a million keys."""

_WORDS: Final = {
    name: value // 8
    for module in (keys, k)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, int)
}
"""Words of the kernels' state, by name."""

_SLOT_BYTES: Final = 8 * keys.SLOT_WORDS
_LEAST_SLOTS: Final = 1024
_LOAD: Final = 0.75
_CODEC_BITS: Final = 7
_RECORD_GROWTH: Final = 15
_LEAST_RECORD: Final = 7
_ATTRIBUTES: Final = struct.Struct(">h")
_LONG: Final = struct.Struct(">q")
_INT: Final = struct.Struct(">i")
_CRC: Final = struct.Struct(">I")
_CRC_START: Final = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to compact.

    Attributes:
        folder: The partition's folder.
        segments: Sealed segments without a gap, from the log start on.
        behind: The segments behind them with their readable bytes, to find markers.
        dirty_from: Records before it were compacted.
        held: Base offsets of the last batches of producers (C6).
        segment_bytes: Limit for a merged segment.
        now_ms: The current time.
        delete_retention_ms: `delete.retention.ms`.
        archive_end: The end of the segments from an archive, see `Outcomes`.
        crossing: Offsets of markers, see `Outcomes`.
        is_whole: Whether `behind` goes up to the high watermark.
        map_bytes: Limit for the map.
        must_stop: Whether to stop; called often.
    """

    folder: Path
    segments: Sequence[Segment]
    behind: Sequence[tuple[Segment, int]]
    dirty_from: int
    held: Sequence[int]
    segment_bytes: int
    now_ms: int
    delete_retention_ms: int
    archive_end: int = 0
    crossing: Collection[int] = ()
    is_whole: bool = True
    map_bytes: int = MAP_BYTES
    must_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """A compacted segment, which is durable under its hidden name, and the ones it replaces."""

    path: Path
    segment: Segment
    old: tuple[Segment, ...]

    def finish(self, disk: Disk) -> None:
        """Remove the files of the old segments, once the name of the new one is durable.

        Raises:
            OSError: The folder could not be flushed; nothing was removed.
        """
        folder = self.segment.folder
        disk.sync_folder(folder)
        covered = [one.path for one in self.old if one.path != self.segment.path]
        for path in covered:
            disk.unlink(path)
        if covered:
            disk.sync_folder(folder)


class Cleaning:
    """One pass over a partition. Its methods block; they run in a worker thread.

    Args:
        disk: The system calls.
        plan: What to compact.

    Attributes:
        upto: Records before it are compacted when all segments are replaced.
    """

    def __init__(self, disk: Disk, plan: Plan) -> None:
        self._disk = disk
        self._plan = plan
        self._scanner = BatchScanner()
        self._decompressor = Decompressor()
        self._outcomes = Outcomes(plan.archive_end, plan.crossing)
        self._held = np.array(sorted(plan.held), np.int64)
        self._state = np.zeros(k.STATE_WORDS, np.int64)
        self._map = np.zeros(0, np.int64)
        self._out = np.empty(WINDOW_BYTES, np.uint8)
        self.upto = plan.dirty_from

    def prepare(self) -> bool:
        """Read the dirty part; returns whether there is anything to compact.

        Raises:
            OSError: A file cannot be read, possibly because it was deleted meanwhile.
            CorruptionError: A segment is damaged.
            UnavailableError: The pass was stopped.
        """
        plan = self._plan
        dirty = [found for found in plan.segments if found.next_offset > plan.dirty_from]
        record_count = 0
        for segment in dirty:
            for window, batches in self._windows(segment, segment.size_bytes):
                self._outcomes.add(window, batches)
                record_count += int(batches.record_counts.sum())
        end = plan.segments[-1].next_offset
        self._outcomes.close()
        for segment, size_bytes in plan.behind:
            if self._outcomes.is_decided:
                break
            for window, batches in self._windows(segment, size_bytes):
                self._outcomes.add(window, batches)
        undecided = self._outcomes.first_undecided(is_whole=plan.is_whole)
        self.upto = end if undecided is None else min(end, undecided)
        self._make_map(record_count)
        for segment in dirty:
            if segment.first >= self.upto or not self._index(segment):
                break
        self._put("UPTO", self.upto)
        return self.upto > plan.dirty_from

    def _make_map(self, record_count: int) -> None:
        most = max(_LEAST_SLOTS, self._plan.map_bytes // _SLOT_BYTES)
        slots = _LEAST_SLOTS
        while slots * 2 <= most and slots * _LOAD < record_count:
            slots *= 2
        self._map = np.zeros(slots * keys.SLOT_WORDS, np.int64)
        self._put("SLOTS", address_of(self._map))
        self._put("MASK", slots - 1)
        self._put("LIMIT", int(slots * _LOAD))
        self._put("NOW", self._plan.now_ms)
        self._put("HORIZON", min(self._plan.now_ms + self._plan.delete_retention_ms, 2**62))
        secret = np.frombuffer(secrets.token_bytes(16), np.int64)
        self._state[keys.SECRET // 8 : keys.SECRET // 8 + 2] = secret

    def _put(self, name: str, value: int) -> None:
        self._state[_WORDS[name]] = value

    def _get(self, name: str) -> int:
        return int(self._state[_WORDS[name]])

    # Reading

    def _windows(self, segment: Segment, size_bytes: int) -> Iterator[tuple[bytes, Batches]]:
        """Yield the batches in the first bytes of a segment, checked (C8).

        One that was open when the pass was planned may be sealed meanwhile, with more bytes.
        """
        file = segment.file or self._disk.open_for_reading(segment.path)
        position = needed = 0
        expected = segment.first
        while position < size_bytes:
            if self._plan.must_stop():
                raise UnavailableError("compaction was stopped")
            wanted = min(max(WINDOW_BYTES, needed), size_bytes - position)
            window = os.pread(file.fd, wanted, position)
            batches = self._scanner.scan(window, len(window))
            if not len(batches):
                fits = wanted < batches.needed_bytes <= size_bytes - position
                if len(window) < wanted or not fits:
                    raise _damaged(segment, position)
                needed = batches.needed_bytes
                continue
            needed = 0
            consumed = batches.consumed_bytes
            expected = _check_offsets(segment, batches, expected, position)
            yield window, batches
            position += consumed
        is_whole = segment.is_sealed and size_bytes == segment.size_bytes
        if is_whole and segment.is_exact and expected != segment.next_offset:
            raise _damaged(segment, position)

    def _actions(self, batches: Batches) -> npt.NDArray[np.int64]:
        actions = np.full(len(batches), keys.FILTER, np.int64)
        actions[self._outcomes.are_aborted(batches)] = keys.DROP
        actions[np.isin(batches.base_offsets, self._held)] |= keys.HOLD
        control = batches.attributes & CONTROL_FLAG != 0
        # A batch without records of this cleaner (C7) has no producer; others hold a sequence (C6).
        empty = (batches.record_counts == 0) & ~control
        actions[empty] = np.where(
            np.isin(batches.base_offsets[empty], self._held), keys.KEEP, keys.DROP
        )
        actions[control | (batches.base_offsets >= self.upto)] = keys.KEEP
        return actions

    def _index(self, segment: Segment) -> bool:
        """Put the keys of a segment into the map; returns whether all had room."""
        for window, batches in self._windows(segment, segment.size_bytes):
            actions = self._actions(batches)
            actions[batches.last_offsets < self._plan.dirty_from] = keys.DROP
            self._put("ROW", 0)
            body = None
            while True:
                status = keys.index_keys(
                    *_table(window, batches),
                    address_of(actions),
                    address_of(self._state),
                    *_located(body),
                )
                if status != COMPRESSED:
                    break
                body = self._decompressed(window, batches)
            if status == FULL:
                self.upto = min(self.upto, self._get("UPTO"))
                return False
            if status != DONE:
                raise _malformed(segment, batches, self._get("ROW"), status)
        return True

    def _decompressed(self, window: bytes, batches: Batches) -> npt.NDArray[np.uint8]:
        row = self._get("ROW")
        position, size_bytes = int(batches.positions[row]), int(batches.sizes[row])
        codec = Codec(int(batches.attributes[row]) & _CODEC_BITS)
        packed = memoryview(window)[position + HEADER_BYTES : position + size_bytes]
        body = self._decompressor.decompress(codec, packed, max_bytes=MAX_BODY_BYTES)
        return as_bytes_array(body)

    # Writing

    def groups(self) -> Iterator[Cleaned]:
        """Write the compacted segments one after the other; yields each when it is durable.

        The caller replaces the old ones before it continues. A segment that does not change, and is
        not merged, is not yielded.

        Raises:
            OSError: A file cannot be read or written.
            CorruptionError: A segment is damaged.
            UnavailableError: The pass was stopped.
        """
        segments = [found for found in self._plan.segments if found.first < self.upto]
        number = 0
        while number < len(segments):
            path = cleaned_path(self._plan.folder, segments[number].first)
            self._disk.unlink(path)
            file = self._disk.create(path)
            old, size_bytes, before = list[Segment](), 0, self._changes()
            self._put("EXPECTED", segments[number].first)
            try:
                while number < len(segments):
                    following = segments[number]
                    is_like = not old or old[-1].is_exact == following.is_exact
                    if old and (
                        not is_like or size_bytes + following.size_bytes > self._plan.segment_bytes
                    ):
                        break
                    size_bytes += self._rewrite(following, file)
                    old.append(following)
                    number += 1
                is_same = size_bytes == old[0].size_bytes and self._changes() == before
                if len(old) == 1 and is_same:
                    self._disk.unlink(path)
                    continue
                self._disk.sync(file)
            except BaseException:  # else what was written takes the last space of a full disk
                self._disk.unlink(path)
                raise
            first, end = old[0].first, old[-1].next_offset
            folder, is_exact = self._plan.folder, old[0].is_exact
            segment = Segment(folder, first, end, size_bytes, is_exact=is_exact)
            yield Cleaned(path=path, segment=segment, old=tuple(old))

    def _changes(self) -> tuple[int, int]:
        return self._get("REMOVED"), self._get("REWRITTEN")

    @property
    def removed(self) -> int:
        """Records that did not stay so far."""
        return self._get("REMOVED")

    def _rewrite(self, segment: Segment, file: OpenFile) -> int:
        """Write what stays of a segment; returns the bytes."""
        written = 0
        epoch = 0
        for window, batches in self._windows(segment, segment.size_bytes):
            actions = self._actions(batches)
            epoch = int(batches.leader_epochs[-1])
            self._put("ROW", 0)
            other: npt.NDArray[np.uint8] | None = None
            while True:
                self._put("OUT", address_of(self._out))
                self._put("ROOM", len(self._out))
                status = k.clean_batches(
                    *_table(window, batches),
                    address_of(actions),
                    address_of(self._state),
                    *_located(other),
                )
                if status == FULL:
                    written += self._emptied(file)
                elif status == COMPRESSED:
                    other = self._filtered(segment, window, batches, actions)
                elif status == DONE:
                    break
                else:
                    raise _malformed(segment, batches, self._get("ROW"), status)
            written += self._emptied(file)
        while k.cover(address_of(self._state), segment.next_offset, epoch) == FULL:
            written += self._emptied(file)
        return written + self._emptied(file)

    def _emptied(self, file: OpenFile) -> int:
        """Write the output to the file, and make it large enough for what comes next."""
        fill, needed = self._get("FILL"), self._get("NEED")
        if fill:
            self._disk.append(file, self._out[:fill].data)
            self._put("FILL", 0)
        if needed > len(self._out):
            self._out = np.empty(2 * needed, np.uint8)
        self._put("NEED", 0)
        return fill

    def _filtered(
        self,
        segment: Segment,
        window: bytes,
        batches: Batches,
        actions: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint8] | None:
        """Filter the compressed batch at ROW: sets its action, returns its replacement if any."""
        row = self._get("ROW")
        position, count = int(batches.positions[row]), int(batches.record_counts[row])
        body = self._decompressed(window, batches)
        room = len(body) + _RECORD_GROWTH * min(count, len(body) // _LEAST_RECORD + 1)
        records = np.empty(room, np.uint8)
        header = address_of(as_bytes_array(window)) + position
        located = (address_of(self._state), header, *_located(body))
        size_bytes = k.filter_records(*located, address_of(records))
        if size_bytes < 0:
            raise _malformed(segment, batches, row, size_bytes)
        base_timestamp_ms = self._get("NEED")
        self._put("NEED", 0)
        is_same = base_timestamp_ms == _LONG.unpack_from(window, position + 27)[0]
        self._put("REMOVED", self._get("REMOVED") + self._get("DROPPED"))
        if not self._get("DROPPED") and is_same:
            actions[row] = keys.KEEP
            return None
        if not self._get("KEPT"):
            actions[row] = keys.DROP | (actions[row] & keys.HOLD)
            self._put("REMOVED", self._get("REMOVED") - count)  # they are counted once
            return None
        actions[row] = keys.REPLACE
        self._put("REWRITTEN", self._get("REWRITTEN") + 1)
        attributes = int(batches.attributes[row])
        packed = compress(Codec(attributes & _CODEC_BITS), records[:size_bytes].data)
        batch = bytearray(window[position : position + HEADER_BYTES]) + packed
        _INT.pack_into(batch, 8, len(batch) - 12)
        if not is_same:
            _ATTRIBUTES.pack_into(batch, _CRC_START, attributes | k.HORIZON_FLAG)
            _LONG.pack_into(batch, 27, base_timestamp_ms)
        _LONG.pack_into(batch, 35, self._get("MAX_TIMESTAMP"))
        _INT.pack_into(batch, 57, self._get("KEPT"))
        replacement = as_bytes_array(batch)
        checksum = crc32c_at(address_of(replacement) + _CRC_START, len(batch) - _CRC_START)
        _CRC.pack_into(batch, 17, checksum)
        return replacement


def _table(window: bytes, batches: Batches) -> tuple[int, int, int, int]:
    table = batches.table
    return address_of(as_bytes_array(window)), address_of(table), table.strides[0], len(batches)


def _located(array: npt.NDArray[np.uint8] | None) -> tuple[int, int]:
    return (0, 0) if array is None else (address_of(array), len(array))


def _check_offsets(segment: Segment, batches: Batches, expected: int, position: int) -> int:
    """Check that no offset is missing or out of place; returns the next one."""
    ends = np.concatenate(([expected], batches.last_offsets[:-1] + 1))
    right = batches.last_offsets < segment.next_offset
    if segment.is_exact:
        right &= (batches.base_offsets == ends) & (batches.leader_epochs == 0)
    else:
        right[0] &= batches.last_offsets[0] >= expected
    if not segment.is_sealed:
        right |= batches.last_offsets >= segment.next_offset
    if not right.all():
        raise _damaged(segment, position + int(batches.positions[np.argmin(right)]))
    return int(batches.last_offsets[-1]) + 1


def _damaged(segment: Segment, position: int) -> CorruptionError:
    return CorruptionError("segment is damaged", path=str(segment.path), position=position)


def _malformed(segment: Segment, batches: Batches, row: int, status: int) -> CorruptionError:
    return CorruptionError(
        "record batch breaks its format",
        path=str(segment.path),
        offset=int(batches.base_offsets[row]),
        why=WHY[status],
    )
