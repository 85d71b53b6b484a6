"""Encoders: from batches or decoded rows to the bytes of an object.

Sans-IO: bytes go to a target that has `write`. Memory is bounded by one row group, whatever the
size of the object, and where row groups end depends on the rows alone, not on how they arrived.
The formats are described in `docs/formats/`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logmirror.wire.columns import SCHEMA
from logmirror.wire.ndjson import encode_ndjson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from logmirror.stores.base import Buffer
    from logmirror.wire.columns import Columns

ROW_GROUP_BYTES: Final = 32 << 20
"""A row group ends with the row that brings its keys, values and headers to this many bytes."""

ROW_GROUP_ROWS: Final = 1 << 20
"""A row group ends after this many rows at the latest."""

COMPRESSIONS: Final[Mapping[str, tuple[str, int | None]]] = {
    "zstd-1": ("zstd", 1),
    "zstd-3": ("zstd", 3),
    "snappy": ("snappy", None),
    "lz4": ("lz4", None),  # LZ4_RAW in the file, not the deprecated codec of that name
    "uncompressed": ("none", None),
}
"""The names that a configuration may use, as pyarrow's codec and level."""

_WRITE_BYTES: Final = 1 << 20  # gathers page headers of 30 bytes into writes worth a system call
_PIECE_BYTES: Final = 2 << 20  # NDJSON text is made in pieces of this many payload bytes
_MERGE_BYTES: Final = 1 << 20  # waiting batches below this size are merged


class Target(Protocol):
    """Where an encoder's bytes go."""

    def write(self, data: Buffer) -> int:
        """Take all of `data`; the buffer is used again after the call."""
        ...


class NativeEncoder:
    """Record batches as the source served them, one after another, nothing added."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def append(self, batches: Buffer) -> None:
        """Append whole batches."""
        self._target.write(batches)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """End the object. The format has no place for metadata."""


class NdjsonEncoder:
    """One JSON object per record and line.

    Args:
        target: Where the lines go.
        topic: Stands in every line.
        partition: Stands in every line.
        utf8: Keys and values as text instead of base64.
    """

    def __init__(self, target: Target, *, topic: str, partition: int, utf8: bool = False) -> None:
        self._target = target
        self._topic = topic
        self._partition = partition
        self._utf8 = utf8
        self._text = bytearray()

    def append(self, columns: Columns, start: int = 0, stop: int | None = None) -> None:
        """Append rows start..stop.

        Raises:
            UsageError: `utf8`, and a key or value is not UTF-8. Facts: `offset`.
        """
        stop = columns.rows if stop is None else stop
        payload_bytes = columns.payload_bytes
        while start < stop:
            filled = np.cumsum(payload_bytes[start:stop])
            end = min(start + int(np.searchsorted(filled, _PIECE_BYTES)) + 1, stop)
            size_bytes = encode_ndjson(
                columns,
                start,
                end,
                topic=self._topic,
                partition=self._partition,
                out=self._text,
                utf8=self._utf8,
            )
            with memoryview(self._text) as text:
                self._target.write(text[:size_bytes])
            start = end

    def finish(self, metadata: Mapping[str, str]) -> None:
        """End the object. The format has no place for metadata."""


class ParquetEncoder:
    """A Parquet file with the columns and types of Spark's Kafka source.

    Args:
        target: Where the file goes.
        topic: Stands in every row.
        partition: Stands in every row.
        compression: One of `COMPRESSIONS`.
    """

    def __init__(
        self, target: Target, *, topic: str, partition: int, compression: str = "zstd-1"
    ) -> None:
        self._sink = _Sink(target)
        codec, level = COMPRESSIONS[compression]
        self._topic = topic
        self._partition = partition
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _WRITE_BYTES)
        # Dictionaries and statistics of keys and values cost a quarter of the time at 100 bytes per
        # record and make the file larger: Kafka payloads hardly repeat as a whole.
        self._writer = pq.ParquetWriter(
            self._stream,
            SCHEMA,
            compression=codec,
            compression_level=level,
            use_dictionary=False,
            column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
            write_statistics=["offset", "timestamp"],
            data_page_size=1 << 20,
        )

    def __del__(self) -> None:
        # Arrow completes an open file when it is collected. An object that nobody finished must
        # not become whole, and its target may be gone.
        self._sink.detach()

    def append(self, columns: Columns, start: int = 0, stop: int | None = None) -> None:
        """Append rows start..stop; the columns may be used again after the call.

        Raises:
            UsageError: A header key is not UTF-8. Facts: `offset`.
        """
        stop = columns.rows if stop is None else stop
        self._append(
            columns.payload_bytes,
            start,
            stop,
            lambda first, end: columns.to_arrow(self._topic, self._partition, first, end),
        )

    def append_arrow(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Append the rows of a batch of `wire.columns.SCHEMA`, as they stand in another object."""
        self._append(
            _row_bytes(batch), 0, len(batch), lambda first, end: batch.slice(first, end - first)
        )

    def _append(
        self,
        row_bytes: npt.NDArray[np.int64],
        start: int,
        stop: int,
        rows: Callable[[int, int], Any],
    ) -> None:
        while start < stop:
            room = min(stop, start + ROW_GROUP_ROWS - self._waiting_rows)
            filled = np.cumsum(row_bytes[start:room])
            reached = int(np.searchsorted(filled, ROW_GROUP_BYTES - self._waiting_bytes))
            end = min(start + reached + 1, room)
            batch = rows(start, end)
            self._waiting_rows += end - start
            self._waiting_bytes += int(filled[end - start - 1])
            if self._waiting_bytes >= ROW_GROUP_BYTES or self._waiting_rows >= ROW_GROUP_ROWS:
                self._write_group(batch)
            else:
                self._keep(batch)
            start = end

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write what waits, and the footer with `metadata` as key-value pairs."""
        if self._waiting:
            self._write_group()
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()
        self._stream.flush()
        self._sink.detach()

    def _write_group(self, *last: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        table = pa.Table.from_batches([*self._waiting, *last], SCHEMA)
        self._writer.write_table(table, row_group_size=len(table))
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _keep(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Copy a batch out of the memory it shares, next to those that wait."""
        waiting = self._waiting
        waiting.append(pa.ipc.read_record_batch(batch.serialize(), SCHEMA))
        # A trickle of single records must not wait as thousands of batches. Merging only equals
        # copies each row log(n) times.
        while len(waiting) > 1 and waiting[-2].nbytes <= min(waiting[-1].nbytes * 2, _MERGE_BYTES):
            waiting[-2:] = [pa.concat_batches(waiting[-2:])]


def _row_bytes(batch: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401  # pyarrow has no types
    """Bytes of key, value and headers of each row, as `Columns.payload_bytes` counts them."""
    total = _lengths(batch["key"]) + _lengths(batch["value"])
    headers = batch["headers"]
    pairs = headers.flatten()
    if len(pairs):
        sums = np.zeros(len(pairs) + 1, np.int64)
        np.cumsum(_lengths(pairs.field(0)) + _lengths(pairs.field(1)), out=sums[1:])
        counts = pc.list_value_length(headers).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(counts)
        total += sums[ends] - sums[ends - counts]
    return total


def _lengths(column: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401  # pyarrow has no types
    lengths = pc.binary_length(column).fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


class _Sink(io.RawIOBase):
    """A target as the file object that pyarrow wants."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target: Target | None = target
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:  # noqa: ANN401  # RawIOBase: any buffer
        if self._target is not None:
            self._target.write(data)
        self._position += len(data)
        return len(data)

    def detach(self) -> None:
        """Take no more bytes."""
        self._target = None
