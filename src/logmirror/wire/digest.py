"""Digest of records by content: the same for the same records, however they were cut into pieces.

Twelve streams run beside each other, one for each column, little-endian:

    offsets int64, timestamps int64, timestamp types int32,
    key lengths int32 (-1: null), key bytes, value lengths, value bytes, header counts int32,
    header key lengths, header key bytes, header value lengths, header value bytes

each into its own XXH3-128; the digest is the XXH3-128 of their digests, concatenated. The
lengths make the bytes unambiguous; no stream knows where a piece ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt

    from logmirror.wire.columns import Columns

_STREAMS: Final = 12
_OFFSETS, _TIMESTAMPS, _TYPES, _KEYS, _VALUES, _HEADER_COUNTS, _HEADER_KEYS, _HEADER_VALUES = (
    *(0, 1, 2),
    *(3, 5),
    *(7, 8, 10),
)


class ContentDigest:
    """Digest of a run of records; feed it rows in order."""

    def __init__(self) -> None:
        self._streams = [xxhash.xxh3_128() for _ in range(_STREAMS)]

    def update(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows start..stop (excluded) of decoded columns."""
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
        """The digest so far: "xxh3:" and 32 hexadecimal digits."""
        joined = b"".join(stream.digest() for stream in self._streams)
        return f"xxh3:{xxhash.xxh3_128(joined).hexdigest()}"

    def _add(self, stream: int, values: npt.NDArray[Any]) -> None:
        self._streams[stream].update(np.ascontiguousarray(values))

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
