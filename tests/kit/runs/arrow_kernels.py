"""Columns -> uncompressed record batches, checksums included: one call for many batches.

The caller has checked that every offsets column ascends and stays within its data.

A batch ends before it would exceed `batch_bytes` (a larger record gets a batch of its own), where
the timestamp type changes, and with log-append time where the timestamp changes, because such a
batch has one timestamp for all of its records.
"""

from __future__ import annotations

from typing import Final

from logmirror.wire import kernels_columns as c
from logmirror.wire.kernels_address import (
    copy,
    inlined,
    kernel,
    load_i32,
    load_i64,
    load_u8,
    store_8,
)
from logmirror.wire.kernels_encode import (
    BATCH_HEADER_BYTES,
    put_batch_header,
    put_varint,
    varint_size,
    zigzag,
)

ROW_BYTES_MAX: Final = 36
"""The most that a record takes beside its key, value and headers: seven varints and a byte."""

HEADER_BYTES_MAX: Final = 10
"""The most that a header takes beside its key and value: two varints."""

TOO_LARGE: Final = -1
NO_ROOM: Final = -2

_LENGTH_MAX: Final = 2**31 - 1 - BATCH_HEADER_BYTES


@inlined
def _size_of(offsets: int, valid: int, index: int) -> int:
    """Bytes of a run, -1 where it is null."""
    if load_u8(valid + index) == 0:
        return -1
    return load_i32(offsets + 4 * index + 4) - load_i32(offsets + 4 * index)


@inlined
def _sized_bytes(size: int) -> int:
    """What a nullable run takes on the wire."""
    return varint_size(zigzag(size)) + max(size, 0)


@inlined
def _put_sized(at: int, offsets: int, data: int, index: int, size: int) -> int:
    at = put_varint(at, zigzag(size))
    if size > 0:
        copy(at, data + load_i32(offsets + 4 * index), size)
        at += size
    return at


@inlined
def _headers_size(context: int, first: int, end: int) -> int:
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    value_valid = load_i64(context + c.HEADER_VALUE_VALID)
    total = 0
    for index in range(first, end):
        key = load_i32(key_offsets + 4 * index + 4) - load_i32(key_offsets + 4 * index)
        total += _sized_bytes(key) + _sized_bytes(_size_of(value_offsets, value_valid, index))
    return total


@inlined
def _put_headers(at: int, context: int, first: int, end: int) -> int:
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    key_data = load_i64(context + c.HEADER_KEY_DATA)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    value_data = load_i64(context + c.HEADER_VALUE_DATA)
    value_valid = load_i64(context + c.HEADER_VALUE_VALID)
    for index in range(first, end):
        size = load_i32(key_offsets + 4 * index + 4) - load_i32(key_offsets + 4 * index)
        at = _put_sized(at, key_offsets, key_data, index, size)
        size = _size_of(value_offsets, value_valid, index)
        at = _put_sized(at, value_offsets, value_data, index, size)
    return at


@inlined
def _body_size(context: int, row: int, timestamp_delta: int, offset_delta: int) -> int:
    """Bytes of a record behind its length field."""
    keys, key_valid = load_i64(context + c.KEY_OFFSETS), load_i64(context + c.KEY_VALID)
    values, value_valid = load_i64(context + c.VALUE_OFFSETS), load_i64(context + c.VALUE_VALID)
    edges = load_i64(context + c.HEADER_OFFSETS)
    first, end = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
    size = 1 + varint_size(zigzag(timestamp_delta)) + varint_size(zigzag(offset_delta))
    size += _sized_bytes(_size_of(keys, key_valid, row))
    size += _sized_bytes(_size_of(values, value_valid, row))
    size += varint_size(zigzag(end - first))
    if end > first:
        size += _headers_size(context, first, end)
    return size


@inlined
def _put_record(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    at: int, context: int, row: int, body: int, timestamp_delta: int, offset_delta: int
) -> int:
    keys, key_valid = load_i64(context + c.KEY_OFFSETS), load_i64(context + c.KEY_VALID)
    values, value_valid = load_i64(context + c.VALUE_OFFSETS), load_i64(context + c.VALUE_VALID)
    edges = load_i64(context + c.HEADER_OFFSETS)
    first, end = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
    at = put_varint(at, zigzag(body))
    store_8(at, 0)
    at = put_varint(at + 1, zigzag(timestamp_delta))
    at = put_varint(at, zigzag(offset_delta))
    key_data, value_data = load_i64(context + c.KEY_DATA), load_i64(context + c.VALUE_DATA)
    at = _put_sized(at, keys, key_data, row, _size_of(keys, key_valid, row))
    at = _put_sized(at, values, value_data, row, _size_of(values, value_valid, row))
    at = put_varint(at, zigzag(end - first))
    if end > first:
        at = _put_headers(at, context, first, end)
    return at


@inlined
def _put_batch(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    batch: int, room: int, context: int, first: int, stop: int, batch_bytes: int
) -> tuple[int, int]:
    """One batch of rows from `first` on: the row behind it, and its size or a status."""
    timestamps, types = load_i64(context + c.TIMESTAMPS), load_i64(context + c.TIMESTAMP_TYPES)
    timestamp, kind = load_i64(timestamps + 8 * first), load_i32(types + 4 * first) & 1
    max_timestamp = timestamp
    at = batch + BATCH_HEADER_BYTES
    row = first
    while row < stop:
        own = load_i64(timestamps + 8 * row)
        own_kind = load_i32(types + 4 * row) & 1
        if own_kind != kind or (kind and own != timestamp):
            break
        body = _body_size(context, row, own - timestamp, row - first)
        size = at - batch + varint_size(zigzag(body)) + body
        if row > first and size > batch_bytes:
            break
        if size > _LENGTH_MAX:
            return row, TOO_LARGE
        if size > room:
            return row, NO_ROOM
        at = _put_record(at, context, row, body, own - timestamp, row - first)
        max_timestamp = max(max_timestamp, own)
        row += 1
    offset = load_i64(load_i64(context + c.OFFSETS) + 8 * first)
    put_batch_header(batch, at - batch, offset, timestamp, max_timestamp, kind << 3, row - first)
    return row, at - batch


@kernel("int64(int64,int64,int64,int64,int64)")
def encode_rows(out: int, capacity: int, context: int, rows: int, batch_bytes: int) -> int:
    """Write all rows as batches, back to back; bytes written, or TOO_LARGE or NO_ROOM.

    Offsets must be without gaps.
    """
    written = 0
    row = 0
    while row < rows:
        if capacity - written < BATCH_HEADER_BYTES:
            return NO_ROOM
        row, size = _put_batch(out + written, capacity - written, context, row, rows, batch_bytes)
        if size < 0:
            return size
        written += size
    return written
