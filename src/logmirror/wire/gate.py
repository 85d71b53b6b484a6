"""Finds the first record that must not be copied: by the types of columns, or by its time.

Nulls match every type. A kernel does the work (`kernels_text`); columns of type `bytes` cost
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from logmirror.errors import EndsEarlierError, UsageError
from logmirror.wire.kernels_text import (
    ALL_GOOD,
    DEPTH_MAX,
    NOT_JSON,
    NOT_UTF8,
    RESULT_WORDS,
    TOO_DEEP,
    find_not_json,
    find_not_utf8,
)
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from logmirror.model import ColumnType, ColumnTypes
    from logmirror.wire.columns import Bytes, Columns, Int32s

_WHAT: Final = {
    NOT_UTF8: "is not UTF-8",
    NOT_JSON: "is not JSON",
    TOO_DEEP: f"has more than {DEPTH_MAX} arrays and objects inside each other",
}


Column = Literal["key", "value"]


class Refused(NamedTuple):
    """The first value that does not match its type."""

    row: int
    offset: int
    column: Column
    kind: ColumnType
    what: str
    """The reason."""

    byte: int
    """Position of the first invalid byte in the value."""

    def error(self) -> UsageError:
        """Return the error, to which the caller adds mirror, topic and partition."""
        return UsageError(
            f"a {self.column} {self.what}",
            hint=f"the configuration says `{self.column}s: {{type: {self.kind}}}`; `type: bytes` "
            "takes every byte",
            column=self.column,
            type=self.kind,
            offset=self.offset,
            byte=self.byte,
        )


class Late(NamedTuple):
    """The first record as new as the time of `until`, below the offset that the source found."""

    row: int
    offset: int

    def error(self) -> EndsEarlierError:
        """Return the error, to which the caller adds mirror, topic and partition."""
        return EndsEarlierError(
            "a record before the offset that the source had found is as new as `until`",
            offset=self.offset,
        )


def first_not_copied(
    columns: Columns, types: ColumnTypes, until_ms: int | None
) -> Refused | Late | None:
    """Check all rows; returns None if all may be copied.

    Args:
        columns: The rows.
        types: The types that keys and values must have.
        until_ms: Records of this time or a later one are not copied, in ms since 1970. None: all.
    """
    refused = first_refused(columns, types)
    if until_ms is None:
        return refused
    late = np.flatnonzero(columns.timestamps_ms >= until_ms)
    if not len(late) or (refused is not None and refused.row < late[0]):
        return refused
    return Late(int(late[0]), int(columns.offsets[late[0]]))


def first_refused(columns: Columns, types: ColumnTypes) -> Refused | None:
    """Check all rows; returns None if every key and value matches its type."""
    if not types.are_checked:
        return None
    rows = columns.rows
    key = _Values(columns.key_offsets, columns.key_data, columns.key_valid)
    value = _Values(columns.value_offsets, columns.value_data, columns.value_valid)
    return _first(key, value, types, rows, columns.offsets)


def first_refused_arrow(batch: pa.RecordBatch, types: ColumnTypes) -> Refused | None:
    """Check a record batch of `wire.columns.SCHEMA`, like `first_refused`."""
    if not types.are_checked:
        return None
    offsets = batch.column("offset").to_numpy()
    key, value = (_values_of(batch.column(name)) for name in ("key", "value"))
    return _first(key, value, types, len(batch), offsets)


class _Values(NamedTuple):
    """A column of values. Where `valid` is 0 the value is null, and empty."""

    offsets: Int32s
    data: Bytes
    valid: Bytes


def _values_of(column: pa.Array) -> _Values:
    valid = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    # In Arrow a null may have bytes, which are dropped here.
    kept = column.drop_null() if column.null_count else column
    if not len(kept):
        return _Values(np.zeros(len(column) + 1, np.int32), as_bytes_array(b""), valid)
    _, offsets, data = kept.buffers()
    edges = np.frombuffer(offsets, np.int32)[kept.offset : kept.offset + len(kept) + 1]
    if len(kept) < len(column):
        edges = edges[np.concatenate(([0], np.cumsum(valid, dtype=np.int64)))]
    return _Values(np.ascontiguousarray(edges), as_bytes_array(data or b""), valid)


def _first(
    key: _Values, value: _Values, types: ColumnTypes, rows: int, offsets: npt.NDArray[np.int64]
) -> Refused | None:
    found: Refused | None = None
    asked: tuple[tuple[Column, ColumnType, _Values], ...] = (
        ("key", types.key, key),
        ("value", types.value, value),
    )
    for column, kind, values in asked:
        stop = rows if found is None else found.row  # behind a bad key nothing counts
        status, row, byte = _look(values, kind, stop)
        if status != ALL_GOOD:
            found = Refused(row, int(offsets[row]), column, kind, _WHAT[status], byte)
    return found


def _look(values: _Values, kind: ColumnType, stop: int) -> tuple[int, int, int]:
    """Return status, row and byte position of the first invalid value among 0..stop-1."""
    if kind == "bytes":
        return ALL_GOOD, 0, 0
    result = np.zeros(RESULT_WORDS, np.int64)
    where = address_of(values.offsets), address_of(values.data)
    status = find_not_utf8(*where, 0, stop, address_of(result))
    row, byte = result.tolist()
    if kind == "json-parseable":
        # Up to the first that is no text, another one may be no JSON.
        stack = np.empty(DEPTH_MAX, np.uint8)
        stop = stop if status == ALL_GOOD else row
        tools = address_of(stack), address_of(result)
        parsed = find_not_json(*where, address_of(values.valid), 0, stop, *tools)
        if parsed != ALL_GOOD:
            status = parsed
            row, byte = result.tolist()
    return status, row, byte
