"""Decoded records as columns, and as Arrow record batches that share their memory.

The Arrow schema is that of Spark's Kafka source, so code for one works with the other.

The content digest depends only on the records, not on how they are divided. It has twelve streams,
one for each column, little-endian:

    offsets int64, timestamps int64, timestamp types int32,
    key lengths int32 (-1: null), key bytes, value lengths, value bytes, header counts int32,
    header key lengths, header key bytes, header value lengths, header value bytes

Each stream has its own XXH3-128; the digest is the XXH3-128 of their concatenated digests. The
lengths make the bytes unambiguous; no stream depends on where a piece ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from logmirror.errors import UsageError
from logmirror.wire import kernels_columns as c
from logmirror.wire.kernels_address import SLACK

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]
    Int32s = npt.NDArray[np.int32]
    Bytes = npt.NDArray[np.uint8]

__all__ = [
    "BYTES_MAX",
    "HEADERS_TYPE",
    "NO_ROWS",
    "SCHEMA",
    "TIMESTAMP_TYPE",
    "Columns",
    "ContentDigest",
    "boolean_column",
    "fixed_column",
    "header_key_error",
    "payload_bytes",
]

HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIMESTAMP_TYPE: Final = pa.timestamp("ms", tz="UTC")

SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("headers", HEADERS_TYPE),
    ]
)
"""Columns of `Columns.to_arrow`. A record without headers has an empty list, never null."""

# pa.array and pa.scalar load pandas where that is installed: a second of every executor's start.
# So nothing that a start does uses them (`tests/engine/test_executor.py`).
NO_ROWS: Final = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA
)
"""No records, in the columns of `SCHEMA`."""

BYTES_MAX: Final = 2**31 - 1 - SLACK
"""The largest size of one data column in bytes: Arrow's binary type has 32-bit offsets."""


class Columns:
    """Column buffers that a decode fills; see `kernels_columns` for their layout.

    Whatever shares their memory (arrays, Arrow batches) is valid until the next decode into them.
    Memory is reserved, not touched: only what records fill becomes resident.

    Args:
        rows_max: Capacity in records, at least 1.
        headers_max: Capacity in record headers, all records together.
        bytes_max: Capacity for record bodies, in bytes.

    Attributes:
        offsets: int64, one per row; alike `timestamps_ms`; `timestamp_types` is int32.
        key_offsets: int32, rows + 1, into `key_data`; alike for value, header key, header value.
        key_valid: uint8, 0 where the key is null; alike for value and header value.
        header_offsets: int32, rows + 1: which headers belong to a row.
    """

    def __init__(self, rows_max: int, headers_max: int, bytes_max: int) -> None:
        self._all_offsets: Int64s = np.empty(rows_max, np.int64)
        self._all_timestamps: Int64s = np.empty(rows_max, np.int64)
        self._all_types: Int32s = np.empty(rows_max, np.int32)
        self.key_offsets: Int32s = np.zeros(rows_max + 1, np.int32)
        self.key_data: Bytes = np.empty(bytes_max + SLACK, np.uint8)
        self.key_valid: Bytes = np.empty(rows_max, np.uint8)
        self.value_offsets: Int32s = np.zeros(rows_max + 1, np.int32)
        self.value_data: Bytes = np.empty(bytes_max + SLACK, np.uint8)
        self.value_valid: Bytes = np.empty(rows_max, np.uint8)
        self.header_offsets: Int32s = np.zeros(rows_max + 1, np.int32)
        self.header_key_offsets: Int32s = np.zeros(headers_max + 1, np.int32)
        self.header_key_data: Bytes = np.empty(bytes_max + SLACK, np.uint8)
        self.header_value_offsets: Int32s = np.zeros(headers_max + 1, np.int32)
        self.header_value_data: Bytes = np.empty(bytes_max + SLACK, np.uint8)
        self.header_value_valid: Bytes = np.empty(headers_max, np.uint8)
        arrays = (
            *(self._all_offsets, self._all_timestamps, self._all_types),
            *(self.key_offsets, self.key_data, self.key_valid),
            *(self.value_offsets, self.value_data, self.value_valid),
            *(self.header_offsets, self.header_key_offsets, self.header_key_data),
            *(self.header_value_offsets, self.header_value_data, self.header_value_valid),
        )
        words = [0] * 7 + [rows_max, headers_max, bytes_max]
        words += [array.ctypes.data for array in arrays]
        self._context: Int64s = np.array(words, np.int64)
        self.context_address: int = self._context.ctypes.data
        self._constants: tuple[str, int, int, Any, Any] = ("", -1, 0, None, None)

    def clear(self) -> None:
        """Remove all records."""
        self._context[: c.ROWS_MAX // 8] = 0

    @property
    def rows(self) -> int:
        """The number of records."""
        return int(self._context[c.ROWS // 8])

    @property
    def header_count(self) -> int:
        """The number of record headers of all records."""
        return int(self._context[c.HEADERS // 8])

    @property
    def offsets(self) -> Int64s:
        """Offset of each row; ascending."""
        return self._all_offsets[: self.rows]

    @property
    def timestamps_ms(self) -> Int64s:
        """Timestamp of each row in ms since the epoch; -1: none."""
        return self._all_timestamps[: self.rows]

    @property
    def timestamp_types(self) -> Int32s:
        """`logmirror.model.TimestampType` of each row."""
        return self._all_types[: self.rows]

    @property
    def key_lengths(self) -> Int32s:
        """Bytes of each key, -1: null. Computed every time."""
        return _lengths(self.key_offsets[: self.rows + 1], self.key_valid[: self.rows])

    @property
    def value_lengths(self) -> Int32s:
        """Bytes of each value, -1: null. Computed every time."""
        return _lengths(self.value_offsets[: self.rows + 1], self.value_valid[: self.rows])

    @property
    def payload_bytes(self) -> Int64s:
        """Bytes of key, value and headers (keys and values) of each row. Computed every time."""
        n = self.rows
        total: Int64s = np.diff(self.key_offsets[: n + 1]).astype(np.int64)
        total += np.diff(self.value_offsets[: n + 1])
        if self.header_count:
            edges = self.header_offsets[: n + 1]
            total += np.diff(self.header_key_offsets[edges])
            total += np.diff(self.header_value_offsets[edges])
        return total

    def to_arrow(
        self, topic: str, partition: int, start: int = 0, stop: int | None = None
    ) -> pa.RecordBatch:
        """Return rows start..stop (exclusive) as an Arrow batch of schema `SCHEMA`.

        Only validity, topic and partition are copied. The rest shares the columns' memory and is
        valid until the next decode into them.

        Raises:
            UsageError: A header key is not UTF-8, which Arrow's string type cannot hold (facts
                `topic`, `partition`, `offset`, `key`).
        """
        stop = self.rows if stop is None else stop
        n = stop - start
        topics, partitions = self._constant_columns(topic, partition, n)
        return pa.RecordBatch.from_arrays(
            [
                self._binary("key", start, stop),
                self._binary("value", start, stop),
                topics,
                partitions,
                fixed_column(pa.int64(), self._all_offsets[start:stop]),
                fixed_column(TIMESTAMP_TYPE, self._all_timestamps[start:stop]),
                fixed_column(pa.int32(), self._all_types[start:stop]),
                self._headers(topic, partition, start, stop),
            ],
            schema=SCHEMA,
        )

    def _constant_columns(self, topic: str, partition: int, n: int) -> tuple[Any, Any]:
        made_topic, made_partition, made, topics, partitions = self._constants
        if made < n or (made_topic, made_partition) != (topic, partition):
            name = topic.encode()
            edges = np.array([0, len(name)], np.int32)
            buffers = [None, pa.py_buffer(edges), pa.py_buffer(name)]
            topics = pa.repeat(pa.Array.from_buffers(pa.string(), 1, buffers)[0], n)
            partitions = fixed_column(pa.int32(), np.full(n, partition, np.int32))
            self._constants = (topic, partition, n, topics, partitions)
        return topics.slice(0, n), partitions.slice(0, n)

    def _binary(self, name: str, start: int, stop: int) -> pa.Array:
        offsets = getattr(self, f"{name}_offsets")[start : stop + 1]
        valid = getattr(self, f"{name}_valid")[start:stop]
        data = getattr(self, f"{name}_data")
        buffers = [_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), stop - start, buffers)

    def _headers(self, topic: str, partition: int, start: int, stop: int) -> pa.Array:
        edges = self.header_offsets[start : stop + 1]
        count = int(edges[-1])
        key_offsets = self.header_key_offsets[: count + 1]
        buffers = [None, pa.py_buffer(key_offsets), pa.py_buffer(self.header_key_data)]
        keys = pa.Array.from_buffers(pa.string(), count, buffers)
        try:
            keys.validate(full=True)
        except pa.ArrowInvalid as error:
            raise self._bad_header_key(topic, partition, start, stop) from error
        values = self._binary("header_value", 0, count)
        pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADERS_TYPE.value_type))
        return pa.Array.from_buffers(
            HEADERS_TYPE, stop - start, [None, pa.py_buffer(edges)], children=[pairs]
        )

    def _bad_header_key(self, topic: str, partition: int, start: int, stop: int) -> UsageError:
        """Find the first invalid key, slowly. Rows before `start` count: they share the buffers."""
        for row in range(stop):
            for index in range(self.header_offsets[row], self.header_offsets[row + 1]):
                low, high = self.header_key_offsets[index : index + 2]
                key = self.header_key_data[low:high].tobytes()
                if not _is_utf8(key):
                    offset = int(self._all_offsets[row])
                    return header_key_error(key, topic=topic, partition=partition, offset=offset)
        raise AssertionError("unreachable: Arrow refused a header key that is UTF-8", start)


def payload_bytes(batch: pa.RecordBatch) -> Int64s:
    """Return the bytes of key, value and headers of each row of a batch of `SCHEMA`."""
    total = np.zeros(len(batch), np.int64)
    for column in ("key", "value"):
        total += pc.binary_length(batch[column]).fill_null(0).to_numpy().astype(np.int64)
    headers = batch["headers"]
    pairs = headers.flatten()
    if len(pairs):
        lengths = np.zeros(len(pairs) + 1, np.int64)
        for child in (0, 1):
            sizes = pc.binary_length(pairs.field(child)).fill_null(0).to_numpy()
            lengths[1:] += np.cumsum(sizes, dtype=np.int64)
        edges = np.concatenate(([0], np.cumsum(pc.list_value_length(headers).to_numpy())))
        total += np.diff(lengths[edges])
    return total


def header_key_error(key: bytes, *, topic: str, partition: int, offset: int) -> UsageError:
    """Return the error for a header key that a text format cannot represent."""
    return UsageError(
        "header key is not UTF-8",
        hint="Parquet and NDJSON hold header keys as text; format native keeps any bytes.",
        topic=topic,
        partition=partition,
        offset=offset,
        key=key[:100],
    )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lengths(offsets: Int32s, valid: Bytes) -> Int32s:
    lengths: Int32s = np.diff(offsets)
    lengths[valid == 0] = -1
    return lengths


def _bitmap(valid: Bytes) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def fixed_column(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers as an Arrow array that shares their memory; `pa.array` would load pandas."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def boolean_column(values: npt.NDArray[np.bool_]) -> pa.Array:
    """Return truth values as an Arrow array; `pa.array` would load pandas."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


_STREAMS: Final = 12
_OFFSETS, _TIMESTAMPS, _TYPES, _KEYS, _VALUES, _HEADER_COUNTS, _HEADER_KEYS, _HEADER_VALUES = (
    *(0, 1, 2),
    *(3, 5),
    *(7, 8, 10),
)


class ContentDigest:
    """The content digest of records, which are added in order."""

    def __init__(self) -> None:
        self._streams = [xxhash.xxh3_128() for _ in range(_STREAMS)]

    def update(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows start..stop (exclusive) of decoded columns."""
        self._add(_OFFSETS, columns.offsets[start:stop])
        self._add(_TIMESTAMPS, columns.timestamps_ms[start:stop])
        self._add(_TYPES, columns.timestamp_types[start:stop])
        edges = columns.header_offsets[start : stop + 1]
        first, end = int(edges[0]), int(edges[-1])
        self._add(_HEADER_COUNTS, np.diff(edges))
        for stream, name, low, high in (
            (_KEYS, "key", start, stop),
            (_VALUES, "value", start, stop),
            (_HEADER_KEYS, "header_key", first, end),
            (_HEADER_VALUES, "header_value", first, end),
        ):
            offsets = getattr(columns, f"{name}_offsets")[low : high + 1]
            lengths = np.diff(offsets)
            valid = getattr(columns, f"{name}_valid", None)
            if valid is not None:
                lengths[valid[low:high] == 0] = -1
            self._add(stream, lengths)
            self._add(stream + 1, getattr(columns, f"{name}_data")[offsets[0] : offsets[-1]])

    def update_arrow(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch with the columns of `columns.SCHEMA`, as read from Parquet.

        Key, value and header keys may be binary or string, 32- or 64-bit.
        """
        self._add(_OFFSETS, _numbers(batch["offset"], pa.int64()))
        self._add(_TIMESTAMPS, _numbers(batch["timestamp"], pa.timestamp("ms", tz="UTC")))
        self._add(_TYPES, _numbers(batch["timestampType"], pa.int32()))
        self._add_binary(_KEYS, batch["key"])
        self._add_binary(_VALUES, batch["value"])
        headers = batch["headers"]
        counts = pc.list_value_length(headers).fill_null(0)
        self._add(_HEADER_COUNTS, _numbers(counts, pa.int32()))
        pairs = headers.flatten()
        self._add_binary(_HEADER_KEYS, pairs.field(0))
        self._add_binary(_HEADER_VALUES, pairs.field(1))

    def hexdigest(self) -> str:
        """Return the digest so far: "xxh3:" and 32 hexadecimal digits."""
        joined = b"".join(stream.digest() for stream in self._streams)
        return f"xxh3:{xxhash.xxh3_128(joined).hexdigest()}"

    def _add(self, stream: int, values: npt.NDArray[Any]) -> None:
        self._streams[stream].update(np.ascontiguousarray(values).data)

    def _add_binary(self, stream: int, column: pa.Array) -> None:
        column = column.cast(pa.large_binary())
        lengths = pc.binary_length(column).fill_null(-1)
        self._add(stream, _numbers(lengths, pa.int32()))
        # Null slots may own bytes in Arrow; without them the buffer holds the values and no more.
        kept = column.drop_null()
        _, offsets, data = kept.buffers()
        if len(kept) and data is not None:
            edges = np.frombuffer(offsets, np.int64)[kept.offset : kept.offset + len(kept) + 1]
            self._add(stream + 1, np.frombuffer(data, np.uint8)[edges[0] : edges[-1]])


def _numbers(column: pa.Array, kind: pa.DataType) -> npt.NDArray[Any]:
    width = np.int64 if kind.bit_width == 64 else np.int32  # noqa: PLR2004  # bits
    column = column.cast(kind)
    if column.null_count:
        raise ValueError("column must not hold nulls")
    values: npt.NDArray[Any] = np.frombuffer(column.buffers()[1], width)
    return values[column.offset : column.offset + len(column)]
