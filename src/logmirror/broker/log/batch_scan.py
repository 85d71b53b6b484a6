"""Reads the batches of a file, and finds those behind damaged bytes. For recovery and checks."""

from __future__ import annotations

import os
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from logmirror.broker.log.producer_state import last_sequence
from logmirror.broker.log.segment import HEADER_BYTES, BatchAt
from logmirror.errors import CorruptionError
from logmirror.wire.checksum import crc32c
from logmirror.wire.serve_markers import (
    CONTROL_FLAG,
    TRANSACTIONAL_FLAG,
    coordinator_epoch_of,
    is_commit,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from logmirror.broker.log.disk import OpenFile

WINDOW_BYTES: Final = 4 * 1024 * 1024
_SCAN_BYTES: Final = 1024 * 1024
"""One buffer for all: new pages, and bytes outside the CPU's caches, cost more than requests."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_LENGTH_END: Final = 12
_MAGIC_AT: Final = 16
_CRC_START: Final = 21
_MAGIC: Final = 2
_EPOCH: Final = 0
_SEARCH_FACTOR: Final = 8
_CANDIDATE_BYTES: Final = 4096
"""What a candidate costs of a search's budget beside its own bytes."""

_SHORT_BYTES: Final = 1024 * 1024
"""Up to this size, about 40 us, a checksum does not release Python's lock. A check of an archive,
while a consumer read it, was 6 % faster than with the library's default."""


class StoredBatch(NamedTuple):
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
    is_transactional: bool
    is_commit: bool | None
    """Whether a marker commits; None for anything else."""

    @property
    def last_sequence(self) -> int:
        """The sequence of its last offset, at which a record was before compaction."""
        return last_sequence(self.base_sequence, self.last_offset - self.base_offset + 1)

    @property
    def end(self) -> int:
        """Where the next batch begins."""
        return self.position + self.size_bytes


class Seen:
    """What a scan saw of a file beside its batches."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        """Of the bytes from the start to `end`, once the scan has ended."""
        self.end = 0

    def passed(self, data: memoryview) -> None:
        """Take the next bytes, which are whole batches. The buffer is used again afterwards."""
        self.digest.update(data)


class _Window:
    """Bytes of a file, in a buffer that is used again."""

    def __init__(self, file: OpenFile, start: int, end: int, seen: Seen | None) -> None:
        self.view = memoryview(bytearray(min(_SCAN_BYTES, max(HEADER_BYTES, end - start))))
        self.start = self.end = start
        self._file, self._seen = file, seen

    def load(self, position: int, size_bytes: int) -> bool:
        """Load bytes behind the view's end; whether the file has them. Positions ascend."""
        self.pass_to(position)
        if size_bytes > len(self.view):
            self.view = memoryview(bytearray(size_bytes))
        self.start = position
        self.end = position + os.preadv(self._file.fd, [self.view], position)
        return position + size_bytes <= self.end

    def pass_to(self, position: int) -> None:
        """Note what is before a position."""
        if self._seen is not None:
            self._seen.passed(self.view[: position - self.start])
            self._seen.end = position


def scan(  # noqa: PLR0913  # which batches, and what else is seen
    file: OpenFile,
    first: int,
    *,
    contiguous: bool,
    start: int = 0,
    end: int | None = None,
    seen: Seen | None = None,
) -> Generator[StoredBatch]:
    """Yield the valid batches of a file in order; stops at the first invalid one.

    Args:
        file: The file, read to its end.
        first: The lowest base offset that the first batch may have.
        contiguous: Whether the batches are as this broker writes them: each continues at the next
            offset and has leader epoch 0. Archive objects may have offset gaps and other epochs.
        start: Position of the first batch.
        end: Position where the last one ends; None: the file's end.
        seen: Where to note what else is seen.
    """
    size = os.fstat(file.fd).st_size if end is None else end
    window = _Window(file, start, size, seen)
    position, expected = start, first
    try:
        while position + HEADER_BYTES <= size:
            if position + HEADER_BYTES > window.end and not window.load(position, HEADER_BYTES):
                break
            header = _HEADER.unpack_from(window.view, position - window.start)
            base_offset, length, epoch, magic, checksum, attributes, last_delta = header[:7]
            size_bytes = _LENGTH_END + length
            is_possible = HEADER_BYTES <= size_bytes <= size - position and magic == _MAGIC
            is_strange = contiguous and (base_offset != expected or epoch != _EPOCH)
            if not is_possible or is_strange or base_offset < expected or last_delta < 0:
                break
            if position + size_bytes > window.end and not window.load(position, size_bytes):
                break
            at = position - window.start
            if _crc32c(window.view[at + _CRC_START : at + size_bytes]) != checksum:
                break
            last_offset = base_offset + last_delta
            coordinator_epoch = commits = None
            if attributes & CONTROL_FLAG:
                control = bytes(window.view[at : at + size_bytes])
                coordinator_epoch, commits = coordinator_epoch_of(control), is_commit(control)
            place = position, size_bytes, base_offset, last_offset
            transaction = coordinator_epoch, bool(attributes & TRANSACTIONAL_FLAG), commits
            expected, position = last_offset + 1, position + size_bytes
            yield StoredBatch._make((*place, *header[8:13], *transaction))
    finally:  # also if the caller needs no more
        window.pass_to(position)


def _crc32c(data: memoryview) -> int:
    """Return the checksum of a batch; only a long one releases Python's lock."""
    return crc32c(data, gil_release_mode=1 if len(data) > _SHORT_BYTES else 0)


def find_intact(
    file: OpenFile, start: int, end: int, *, above: int, epoch: int | None = _EPOCH
) -> BatchAt | None:
    """Find the first intact batch at or after a position, at any alignment.

    Args:
        file: The file.
        start: Where to begin.
        end: Where the file's batches end.
        above: The base offset is greater than this.
        epoch: The leader epoch of the batch; None: any.

    Returns:
        The batch, or None.

    Raises:
        CorruptionError: Too much of the file looks like batches; the search was ended.
    """
    budget = _SEARCH_FACTOR * (end - start) + WINDOW_BYTES
    while start + HEADER_BYTES <= end:
        window = os.pread(file.fd, min(WINDOW_BYTES, end - start), start)
        count = len(window) - HEADER_BYTES + 1
        if count <= 0:
            return None
        for at in _candidates(window, count, epoch):
            header = _HEADER.unpack_from(window, at)
            base_offset, length, _, _, checksum, _, last_delta = header[:7]
            position, size_bytes = start + at, _LENGTH_END + length
            if (
                base_offset <= above
                or last_delta < 0
                or not (HEADER_BYTES <= size_bytes <= end - position)
            ):
                continue
            budget -= size_bytes + _CANDIDATE_BYTES
            if budget < 0:
                raise CorruptionError("search for intact batches ended", position=position, end=end)
            batch = os.pread(file.fd, size_bytes, position)
            if len(batch) == size_bytes and crc32c(memoryview(batch)[_CRC_START:]) == checksum:
                last_offset = base_offset + last_delta
                return BatchAt(position, size_bytes, base_offset, last_offset, header[8])
        start += count
    return None


def _candidates(window: bytes, count: int, epoch: int | None) -> list[int]:
    """Return the positions before `count` whose bytes may be a batch header."""
    import numpy as np  # noqa: PLC0415  # only a damaged log needs it

    data = np.frombuffer(window, np.uint8)

    def byte(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return data[number : number + count]

    # The highest bytes of offset, length, attributes and last offset delta of any real batch are 0.
    likely = (byte(_MAGIC_AT) == _MAGIC) & (byte(0) == 0) & (byte(21) == 0) & (byte(23) < 128)  # noqa: PLR2004  # a sign bit
    if epoch == _EPOCH:
        likely &= (byte(12) | byte(13) | byte(14) | byte(15)) == 0
    found: list[int] = np.flatnonzero(likely).tolist()
    return found
