"""Encoders: from batches or decoded rows to the bytes of an object.

Sans-IO: bytes go to a target that has `write`. Memory is bounded by one row group, for objects of
every size. The ends of row groups depend on the rows only, not on the chunks in which they arrive.
The formats are described in `docs/formats/`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from logmirror.archive.metadata import FILE_CHECK_KEY, NO_FILE_CHECK
from logmirror.archive.parquet_columns import as_written, schema_for
from logmirror.model import ColumnTypes
from logmirror.wire.columns import SCHEMA, payload_bytes
from logmirror.wire.ndjson import ndjson_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logmirror.stores.base import Buffer
    from logmirror.wire.columns import Columns, Int64s

ROW_GROUP_BYTES: Final = 32 << 20
"""Default size: a row group ends with the row that brings its keys, values and headers to this many
bytes."""

ROW_GROUP_ROWS: Final = 1 << 20
"""A row group ends after this many rows at the latest."""

COMPRESSIONS: Final[Mapping[str, tuple[str, int | None]]] = {
    "zstd-1": ("zstd", 1),
    "zstd-3": ("zstd", 3),
    "snappy": ("snappy", None),
    "lz4": ("lz4", None),  # LZ4_RAW in the file, not the deprecated codec of that name
    "uncompressed": ("none", None),
}
"""Compression names of the configuration, with pyarrow's codec and level."""

_BYTES: Final = ColumnTypes()
_WRITE_BYTES: Final = 1 << 20  # gathers page headers of 30 bytes into writes worth a system call
_TEXT_BYTES: Final = 2 << 20  # lines of NDJSON are made in a buffer of this size
_MERGE_BYTES: Final = 1 << 20  # waiting batches below this size are merged


class Target(Protocol):
    """The destination of an encoder's bytes."""

    def write(self, data: Buffer) -> int:
        """Write all of `data`; the buffer is reused after the call."""
        ...


class NativeEncoder:
    """Record batches as the source served them, one after another, without additions."""

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
        target: Receives the lines.
        topic: The topic in every line.
        partition: The partition in every line.
        utf8: Write keys and values as text instead of base64.
    """

    def __init__(self, target: Target, *, topic: str, partition: int, utf8: bool = False) -> None:
        self._target = target
        self._topic = topic
        self._partition = partition
        self._utf8 = utf8
        self._text = bytearray(_TEXT_BYTES)

    def append(self, columns: Columns, start: int = 0, stop: int | None = None) -> None:
        """Append rows start..stop.

        Raises:
            UsageError: `utf8`, and a key or value is not UTF-8. Facts: `offset`.
        """
        for piece in ndjson_pieces(
            columns,
            start,
            columns.rows if stop is None else stop,
            topic=self._topic,
            partition=self._partition,
            out=self._text,
            utf8=self._utf8,
        ):
            self._target.write(piece)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """End the object. The format has no place for metadata."""


class ParquetEncoder:
    """A Parquet file with the columns and types of Spark's Kafka source.

    Args:
        target: Receives the file.
        topic: The topic in every row.
        partition: The partition in every row.
        compression: One of `COMPRESSIONS`.
        row_group_bytes: A row group ends with the row that brings its keys, values and headers to
            this many bytes; None: `ROW_GROUP_BYTES`.
        types: Types of keys and values; the caller has checked that every value is of its type.
    """

    def __init__(  # noqa: PLR0913  # each option of the format
        self,
        target: Target,
        *,
        topic: str,
        partition: int,
        compression: str = "zstd-1",
        row_group_bytes: int | None = None,
        types: ColumnTypes = _BYTES,
    ) -> None:
        self._sink = _Sink(target)
        codec, level = COMPRESSIONS[compression]
        self._topic = topic
        self._partition = partition
        self._row_group_bytes = row_group_bytes or ROW_GROUP_BYTES
        self._schema = schema_for(types)
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _WRITE_BYTES)
        # Dictionaries and statistics of keys and values cost a quarter of the time at 100 bytes per
        # record and make the file larger: Kafka payloads hardly repeat as a whole.
        self._writer = pq.ParquetWriter(
            self._stream,
            self._schema,
            compression=codec,
            compression_level=level,
            use_dictionary=False,
            column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
            write_statistics=["offset", "timestamp"],
            data_page_size=1 << 20,
        )

    def __del__(self) -> None:
        # Arrow completes an open file when it is collected. An unfinished object must not become
        # complete, and its target may be gone.
        self.detach()

    def detach(self) -> None:
        """Abandon the object: nothing more is written to the target."""
        self._sink.detach()

    def append(self, columns: Columns, start: int = 0, stop: int | None = None) -> None:
        """Append rows start..stop; the columns may be reused after the call.

        Raises:
            UsageError: A header key is not UTF-8. Facts: `offset`.
        """
        stop = columns.rows if stop is None else stop
        topic, partition = self._topic, self._partition

        def rows(first: int, end: int) -> Any:  # noqa: ANN401  # pyarrow has no types
            return columns.to_arrow(topic, partition, first, end)

        self._append(rows, columns.payload_bytes, start, stop)

    def append_arrow(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Append a record batch of `wire.columns.SCHEMA`; its memory may be reused."""

        def rows(first: int, end: int) -> Any:  # noqa: ANN401  # pyarrow has no types
            return batch.slice(first, end - first)

        self._append(rows, payload_bytes(batch), 0, len(batch))

    def _append(
        self, rows: Callable[[int, int], Any], row_bytes: Int64s, start: int, stop: int
    ) -> None:
        while start < stop:
            room = min(stop, start + ROW_GROUP_ROWS - self._waiting_rows)
            filled = np.cumsum(row_bytes[start:room])
            reached = int(np.searchsorted(filled, self._row_group_bytes - self._waiting_bytes))
            end = min(start + reached + 1, room)
            batch = rows(start, end)
            self._waiting_rows += end - start
            self._waiting_bytes += int(filled[end - start - 1])
            is_full = self._waiting_bytes >= self._row_group_bytes
            if is_full or self._waiting_rows >= ROW_GROUP_ROWS:
                self._write_group(batch)
            else:
                self._keep(batch)
            start = end

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the last row group, and the footer with `metadata` as key-value pairs.

        The file's own checksum is added as a pair. Footer and page headers have no other checksum,
        and a changed bit in them changes how a reader interprets the file.
        """
        if self._waiting:
            self._write_group()
        self._stream.flush()
        self._sink.hold()
        self._writer.add_key_value_metadata({**metadata, FILE_CHECK_KEY: NO_FILE_CHECK})
        self._writer.close()
        self._stream.flush()
        self._sink.write_checked()
        self._sink.detach()

    def _write_group(self, *last: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        table = as_written([*self._waiting, *last], self._schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _keep(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Copy a batch out of shared memory and append it to the waiting ones."""
        waiting = self._waiting
        waiting.append(pa.ipc.read_record_batch(batch.serialize(), SCHEMA))
        # Many small batches are merged, so their number stays small. Merging only batches of
        # similar size copies each row log(n) times.
        while len(waiting) > 1 and waiting[-2].nbytes <= min(waiting[-1].nbytes * 2, _MERGE_BYTES):
            waiting[-2:] = [pa.concat_batches(waiting[-2:])]


class _Sink(io.RawIOBase):
    """A target as the file object that pyarrow needs."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target: Target | None = target
        self._checksum = xxhash.xxh3_128()
        self._held: bytearray | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401  # RawIOBase: any buffer
        if self._held is not None:
            self._held += data
        elif self._target is not None:
            self._target.write(data)
        self._checksum.update(data)
        return len(data)

    def hold(self) -> None:
        """Buffer everything written from now on: the footer."""
        self._held = bytearray()

    def write_checked(self) -> None:
        """Write the buffered footer with the file's checksum in its reserved place."""
        held, self._held = self._held or bytearray(), None
        at = held.index(NO_FILE_CHECK.encode(), held.rindex(FILE_CHECK_KEY.encode()))
        held[at : at + len(NO_FILE_CHECK)] = f"xxh3:{self._checksum.hexdigest()}".encode()
        if self._target is not None:
            self._target.write(held)

    def detach(self) -> None:
        """Discard all further bytes."""
        self._target = None
