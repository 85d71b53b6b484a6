"""Reads a native object in one pass: its digest, and an index of its batches from their headers.

The mirror verifies every checksum before it writes an object, and the digest of its claim is that
of the verified bytes. So an object with this digest has sound checksums too, which are not computed
again.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import TYPE_CHECKING, Final

import xxhash

from logmirror.broker.log.mounted_transactions import TransactionEvents
from logmirror.broker.log.segment import HEADER_BYTES, SparseIndex
from logmirror.wire.serve_markers import (
    CONTROL_FLAG,
    MARKER_BYTES,
    TRANSACTIONAL_FLAG,
    is_commit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.segment import Segment
    from logmirror.model import Decided

_READ_BYTES: Final = 512 * 1024
"""Stays in the CPU's caches."""

_HEADER: Final = Struct(">qiib4xhi8xqq")
"""Base offset, length, leader epoch, magic, attributes, last offset delta, max timestamp, producer
ID."""

_LENGTH_END: Final = 12
_LENGTH_MIN: Final = HEADER_BYTES - _LENGTH_END
_MAGIC: Final = 2
_OF_TRANSACTIONS: Final = CONTROL_FLAG | TRANSACTIONAL_FLAG


class Survey:
    """What a native object consists of. Give it all bytes of the object, in order.

    Args:
        segment: The object's range.
        decided: Outcomes of its transactions that its claim holds.

    Attributes:
        digest: Of the bytes so far, XXH3 with 128 bits.
        size_bytes: Their number.
        end: The offset behind the last batch.
        epochs_at: Positions of the batches with a leader epoch that is not 0.
        index: Of the batches.
        events: Their transactions.
    """

    def __init__(self, segment: Segment, decided: Sequence[Decided] = ()) -> None:
        self._first, self._next_offset = segment.first, segment.next_offset
        self.digest = xxhash.xxh3_128()
        self.size_bytes = 0
        self.end = 0  # the first batch may begin before the object, if the copy began inside it
        self.epochs_at: list[int] = []
        self.index, self.events = SparseIndex(), TransactionEvents(decided)
        self._position = 0  # of the next header
        self._left = b""  # from there on: too little for a header or a marker
        self._is_damaged = False

    def add(self, data: memoryview) -> None:
        """Take the next bytes. They may be overwritten afterwards."""
        self.digest.update(data)
        begin = self.size_bytes
        self.size_bytes += len(data)
        if self._left:
            head = b"".join((self._left, data[: MARKER_BYTES - len(self._left)]))
            self._read(head, begin - len(self._left))
        if self._position >= begin:
            self._read(data, begin)
        missing = 0 if self._is_damaged else self.size_bytes - self._position
        self._left = (self._left + bytes(data[-MARKER_BYTES:]))[-missing:] if missing > 0 else b""

    def _read(self, data: memoryview | bytes, start: int) -> None:
        """Read the headers in bytes that begin at a position of the object."""
        if self._is_damaged:
            return
        position, expected, stop = self._position, self.end, start + len(data)
        last_header, first, next_offset = stop - HEADER_BYTES, self._first, self._next_offset
        while position <= last_header:
            base_offset, length, epoch, magic, attributes, last_delta, newest_ms, producer_id = (
                _HEADER.unpack_from(data, position - start)
            )
            last_offset = base_offset + last_delta
            is_batch = magic == _MAGIC and length >= _LENGTH_MIN and last_delta >= 0
            if not is_batch or base_offset < expected or not first <= last_offset < next_offset:
                self._is_damaged = True
                break
            if attributes & _OF_TRANSACTIONS:
                marker = None
                if attributes & CONTROL_FLAG:
                    size_bytes = _LENGTH_END + length
                    marker = data[position - start : min(stop, position + size_bytes) - start]
                    if len(marker) < size_bytes == MARKER_BYTES:
                        break  # the rest of it follows
                self._add_event(marker, producer_id, base_offset, last_offset)
            if epoch:
                self.epochs_at.append(position)
            self.index.add(base_offset, position, newest_ms)
            position, expected = position + _LENGTH_END + length, last_offset + 1
        self._position, self.end = position, expected

    def _add_event(
        self, marker: memoryview | bytes | None, producer_id: int, base_offset: int, last: int
    ) -> None:
        """Add a transactional batch, or a control batch with its bytes."""
        if marker is None:
            self.events.wrote(producer_id, base_offset)
            return
        commits = is_commit(marker)
        if commits is not None:
            self.events.ended(producer_id, last, is_commit=commits)

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are whole batches within the object's range."""
        return not self._is_damaged and self._position == self.size_bytes > 0

    def keep(self, segment: Segment) -> None:
        """Give the segment its index. It counts as checked."""
        self.events.finish()
        segment.index, segment.events, segment.is_checked = self.index, self.events, True


def survey(segment: Segment, file: OpenFile, decided: Sequence[Decided] = ()) -> Survey:
    """Read a whole file. Blocks."""
    found, buffer = Survey(segment, decided), memoryview(bytearray(_READ_BYTES))
    while count := os.preadv(file.fd, [buffer], found.size_bytes):
        found.add(buffer[:count])
    return found
