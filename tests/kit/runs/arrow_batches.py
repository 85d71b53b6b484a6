"""Arrow record batches -> Kafka record batches, uncompressed, fast: input for benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from kit.runs.arrow_kernels import (
    HEADER_BYTES_MAX,
    NO_ROOM,
    ROW_BYTES_MAX,
    TOO_LARGE,
    encode_rows,
)
from logmirror.errors import InternalError, UsageError
from logmirror.wire import kernels_columns as c
from logmirror.wire.columns import SCHEMA
from logmirror.wire.kernels_encode import BATCH_HEADER_BYTES
from logmirror.wire.scan import address_of

if TYPE_CHECKING:
    import numpy.typing as npt

_MIB: Final = 1024 * 1024


def encode_batches(record_batch: pa.RecordBatch, *, batch_bytes: int = _MIB) -> bytes:
    """Encode rows as record batches of format v2, without producer, at their own offsets.

    Args:
        record_batch: The columns of `columns.SCHEMA`; topic and partition are ignored. It may
            be a slice.
        batch_bytes: The most that a batch takes; a larger record gets a batch of its own.

    Returns:
        Batches back to back. A batch also ends where the timestamp type changes, and with
        log-append time where the timestamp does.

    Raises:
        UsageError: The offsets have gaps (fact `offset`, after which one is missing), or a column
            is missing or invalid, or a record is larger than a batch can be.
    """
    columns = _Source(record_batch)
    if columns.rows == 0:
        return b""
    jumps = np.flatnonzero(np.diff(columns.offsets) != 1)
    if jumps.size:
        offset = int(columns.offsets[jumps[0]])
        raise UsageError("offsets to encode have gaps or do not ascend", offset=offset)
    out = np.empty(columns.bytes_max, np.uint8)
    context = address_of(columns.context)
    size = encode_rows(address_of(out), out.size, context, columns.rows, batch_bytes)
    if size == TOO_LARGE:
        raise UsageError("record is too large for one batch")
    if size == NO_ROOM:
        raise InternalError("output was measured too small", bytes_max=out.size)
    return out[:size].tobytes()


class _Source:
    """An Arrow batch as the kernels' context; keeps all that the context points at alive."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        try:
            if not batch.schema.equals(SCHEMA):
                batch = batch.select(SCHEMA.names).cast(SCHEMA)
            batch.validate(full=True)
        except (KeyError, pa.ArrowException) as error:
            raise UsageError(f"not a batch of records: {error}") from error
        for name in ("offset", "timestamp", "timestampType", "headers"):
            if batch[name].null_count:
                raise UsageError("column must not hold nulls", column=name)
        self.rows = batch.num_rows
        self.context: npt.NDArray[np.int64] = np.zeros(c.CONTEXT_WORDS, np.int64)
        self._kept: list[npt.NDArray[Any]] = []
        self.offsets = self._fixed(c.OFFSETS, batch["offset"], np.int64)
        self._fixed(c.TIMESTAMPS, batch["timestamp"], np.int64)
        self._fixed(c.TIMESTAMP_TYPES, batch["timestampType"], np.int32)
        total = self._binary(c.KEY_OFFSETS, batch["key"])
        total += self._binary(c.VALUE_OFFSETS, batch["value"])
        headers, pairs = batch["headers"], batch["headers"].flatten()
        # Flattened, the headers begin at 0; the list's own offsets may begin anywhere.
        edges = np.zeros(self.rows + 1, np.int32)
        if self.rows:
            own = np.frombuffer(headers.buffers()[1], np.int32)
            own = own[headers.offset : headers.offset + self.rows + 1]
            edges = own - own[0]
        self._point(c.HEADER_OFFSETS, edges)
        if pairs.null_count or pairs.field(0).null_count:
            raise UsageError("header or header key must not be null")
        total += self._binary(c.HEADER_KEY_OFFSETS, pairs.field(0))
        total += self._binary(c.HEADER_VALUE_OFFSETS, pairs.field(1))
        self.bytes_max = (
            total + len(pairs) * HEADER_BYTES_MAX + self.rows * (ROW_BYTES_MAX + BATCH_HEADER_BYTES)
        )

    def _point(self, word: int, array: npt.NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        self.context[word // 8] = address_of(array)

    def _fixed(
        self, word: int, column: pa.Array, kind: type[np.int64 | np.int32]
    ) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.zeros(0, kind)
        if self.rows:
            values = np.frombuffer(column.buffers()[1], kind)[column.offset :][: self.rows]
        self._point(word, values)
        return values

    def _binary(self, word: int, column: pa.Array) -> int:
        """Offsets, data and validity, three words from `word` on; the bytes of the column."""
        _, offsets, data = column.buffers()
        edges = np.zeros(1, np.int32)
        if len(column):
            edges = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1]
        nothing = data is None or data.size == 0
        self._point(word, edges)
        self._point(word + 8, np.zeros(1, np.uint8) if nothing else np.frombuffer(data, np.uint8))
        if word != c.HEADER_KEY_OFFSETS:  # a header key has no word for validity
            self._point(word + 16, np.asarray(column.is_valid()).astype(np.uint8))
        return int(edges[-1]) - int(edges[0])
