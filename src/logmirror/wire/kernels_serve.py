"""Writes records of Arrow columns in the format of record batches; see `serve_columns`."""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import copy, inlined, kernel, load_i32, load_i64, store_8
from logmirror.wire.kernels_encode import put_varint, varint_size, zigzag

OFFSETS: Final = 0
TIMESTAMPS: Final = 8
HEADER_EDGES: Final = 16
KEYS: Final = 24
VALUES: Final = 48
HEADER_KEYS: Final = 72
HEADER_VALUES: Final = 96
STATE_WORDS: Final = 15
"""Words of the state: addresses of int64 offsets and timestamps, and of int32 edges of headers; for
each column of bytes the addresses of int32 edges, int32 lengths (-1: null) and bytes."""


@inlined
def _size(column: int, row: int) -> int:
    """The bytes of a value with its length."""
    length = load_i32(load_i64(column + 8) + 4 * row)
    return varint_size(zigzag(length)) + max(length, 0)


@inlined
def _put(column: int, row: int, at: int) -> int:
    """Write a value with its length; the address behind it."""
    length = load_i32(load_i64(column + 8) + 4 * row)
    at = put_varint(at, zigzag(length))
    if length <= 0:
        return at
    copy(at, load_i64(column + 16) + load_i32(load_i64(column) + 4 * row), length)
    return at + length


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def put_records(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    state: int, start: int, stop: int, base_ms: int, out: int, capacity: int
) -> int:
    """Write the records of rows start..stop-1; returns the bytes, -1 if they do not fit.

    Offsets are relative to that of the first row, timestamps to `base_ms`.
    """
    offsets, times = load_i64(state + OFFSETS), load_i64(state + TIMESTAMPS)
    edges = load_i64(state + HEADER_EDGES)
    keys, values = state + KEYS, state + VALUES
    header_keys, header_values = state + HEADER_KEYS, state + HEADER_VALUES
    base_offset, at, end = load_i64(offsets + 8 * start), out, out + capacity
    for row in range(start, stop):
        delta = zigzag(load_i64(offsets + 8 * row) - base_offset)
        delta_ms = zigzag(load_i64(times + 8 * row) - base_ms)
        first, last = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
        size = 1 + varint_size(delta) + varint_size(delta_ms) + varint_size(zigzag(last - first))
        size += _size(keys, row) + _size(values, row)
        for pair in range(first, last):
            size += _size(header_keys, pair) + _size(header_values, pair)
        if varint_size(zigzag(size)) + size > end - at:
            return -1
        at = put_varint(at, zigzag(size))
        store_8(at, 0)
        at = put_varint(at + 1, delta_ms)
        at = put_varint(at, delta)
        at = _put(keys, row, at)
        at = _put(values, row, at)
        at = put_varint(at, zigzag(last - first))
        for pair in range(first, last):
            at = _put(header_keys, pair, at)
            at = _put(header_values, pair, at)
    return at - out
