"""Scanned batches -> columns of records, in bounded memory.

Uncompressed batches are decoded in place, any number in one call. A compressed batch is
decompressed first, up to a limit. `logmirror.wire.records` defines what is legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import CorruptionError, InternalError
from logmirror.model import Limits
from logmirror.wire.columns import BYTES_MAX, Columns
from logmirror.wire.compression import Codec, Decompressor, is_over_limit
from logmirror.wire.kernels_columns import COMPRESSED, DONE, FULL, WHY
from logmirror.wire.kernels_decode import (
    BATCH,
    END,
    FIRST,
    NEED_BYTES,
    PREVIOUS,
    PROGRESS_WORDS,
    decode_batches,
    decode_payload,
)
from logmirror.wire.limits import batch_too_large, record_too_large
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logmirror.wire.scan import Batches, Buffer

CHUNK_BYTES: Final = 32 << 20
"""The most that one chunk of columns holds by default, in bytes of record bodies."""

_HEADER_SIZE: Final = 61
_LIMITS: Final = Limits()
_BODY_BYTES_USUAL: Final = 32
"""Rows are reserved for bodies of this size; smaller ones end a chunk a little earlier."""


class RecordDecoder:
    """Decodes one response after the other into columns that are used again. Not thread-safe.

    Args:
        max_chunk_bytes: The most that one chunk of columns holds, in bytes of record bodies. A
            larger record gets a chunk of its own.
        limits: What one record and one batch may hold.
    """

    def __init__(self, max_chunk_bytes: int = CHUNK_BYTES, limits: Limits = _LIMITS) -> None:
        sizes = (max_chunk_bytes, limits.max_record_bytes, limits.max_batch_unpacked_bytes)
        if not all(0 < size <= BYTES_MAX for size in sizes):
            raise InternalError(
                "decoder limits out of range", max_chunk_bytes=max_chunk_bytes, limits=limits
            )
        # A record that does not fit into empty columns is compared with its limit.
        chunk_bytes = min(max_chunk_bytes, limits.max_record_bytes)
        rows_max = max(1, chunk_bytes // _BODY_BYTES_USUAL)
        self._columns = Columns(rows_max, rows_max, chunk_bytes)
        self._limits = limits
        self._decompressor = Decompressor()

    def decode(
        self, buffer: Buffer, batches: Batches, *, first: int, end: int
    ) -> Iterator[Columns]:
        """Yield the records of data batches with first <= offset < end, in order, chunk by chunk.

        Args:
            buffer: What was scanned, unchanged since.
            batches: The result of the scan. Control and aborted batches are skipped.
            first: First offset wanted.
            end: First offset not wanted any more.

        Yields:
            Columns with at least one row, valid until the next step of this iterator or the next
            decode. The buffer cannot be resized while the iterator lives.

        Raises:
            CorruptionError: A record breaks the format, or a batch cannot be decompressed (facts
                `position`, `offset`, `why`).
            UsageError: A batch, when decompressed, or a record is larger than its limit (facts
                `offset`, `limit_bytes`, and what is known of the size).
        """
        run = _Run(buffer, batches, first, end, self._decompressor, self._limits)
        columns, status = self._columns, FULL
        while status != DONE:
            columns.clear()
            status = run.step(columns)
            if columns.rows:
                yield columns
                columns = self._columns  # one made for a huge record goes when that one went
            elif status == FULL:
                columns = run.columns_for_next_record()


class _Run:
    """One call of `RecordDecoder.decode`: the buffer, and how far we got in it."""

    def __init__(  # noqa: PLR0913, PLR0917  # private, one caller
        self,
        buffer: Buffer,
        batches: Batches,
        first: int,
        end: int,
        decompressor: Decompressor,
        limits: Limits,
    ) -> None:
        self._array = as_bytes_array(buffer)
        self._batches = batches
        self._decompressor = decompressor
        self._limits = limits
        self._progress: npt.NDArray[np.int64] = np.zeros(PROGRESS_WORDS, np.int64)
        self._progress[[PREVIOUS // 8, FIRST // 8, END // 8]] = -1, first, end
        self._payload: npt.NDArray[np.uint8] | None = None

    def step(self, columns: Columns) -> int:
        """Decode until the columns are FULL or all is DONE."""
        while True:
            if self._payload is None:
                status = self._decode_batches(columns)
            else:
                status = self._decode_payload(columns, self._payload)
            if status == COMPRESSED:
                self._payload = self._decompress()
            elif status < 0:
                raise self._error(WHY[status])
            elif status == FULL or self._payload is None:
                return status
            else:
                self._payload = None

    def columns_for_next_record(self) -> Columns:
        """Columns for one record that is larger than a chunk.

        Raises:
            UsageError: The record is larger than its limit.
        """
        need_bytes = int(self._progress[NEED_BYTES // 8])
        if need_bytes > self._limits.max_record_bytes:
            raise record_too_large(
                offset=self._base_offset() + int(self._progress[PREVIOUS // 8]) + 1,
                batch_offset=self._base_offset(),
                size=need_bytes,
                limit_bytes=self._limits.max_record_bytes,
            )
        # A header takes two bytes at least; a record that claims more of them is refused first.
        return Columns(1, need_bytes // 2 + 1, need_bytes)

    def _decode_batches(self, columns: Columns) -> int:
        table = self._batches.table
        return decode_batches(
            address_of(self._array),
            self._array.size,
            address_of(table),
            table.strides[0],
            self._batches.count,
            columns.context_address,
            address_of(self._progress),
        )

    def _decode_payload(self, columns: Columns, payload: npt.NDArray[np.uint8]) -> int:
        return decode_payload(
            address_of(self._array) + self._position(),
            address_of(payload),
            payload.size,
            columns.context_address,
            address_of(self._progress),
        )

    def _row(self) -> int:
        return int(self._progress[BATCH // 8])

    def _position(self) -> int:
        return int(self._batches.positions[self._row()])

    def _decompress(self) -> npt.NDArray[np.uint8]:
        position, size = self._position(), int(self._batches.sizes[self._row()])
        codec = Codec(int(self._batches.attributes[self._row()]) & 7)
        data = self._array.data[position + _HEADER_SIZE : position + size]
        max_bytes = self._limits.max_batch_unpacked_bytes
        try:
            return as_bytes_array(self._decompressor.decompress(codec, data, max_bytes=max_bytes))
        except CorruptionError as error:
            if is_over_limit(error):
                raise batch_too_large(
                    offset=self._base_offset(), size=size, codec=codec, limit_bytes=max_bytes
                ) from None
            raise error.add_facts(position=position, offset=self._base_offset()) from None

    def _base_offset(self) -> int:
        return int(self._batches.base_offsets[self._row()])

    def _error(self, why: str) -> CorruptionError:
        return CorruptionError(
            "record batch breaks its format",
            hint="Its checksum is valid, so it was written like this: check its producer.",
            position=self._position(),
            offset=self._base_offset(),
            why=why,
        )
