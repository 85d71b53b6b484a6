"""Writes the records and the header of a padding batch, see `padding`."""

from __future__ import annotations

from logmirror.wire.kernels_address import inlined, kernel, store_8
from logmirror.wire.kernels_encode import put_batch_header, put_varint, varint_size, zigzag


@inlined
def _empty_record_size(delta: int) -> int:
    """A record without key, value and headers, its length field included."""
    return 6 + varint_size(zigzag(delta))


@kernel("int64(int64,int64,int64)")
def put_empty_records(out: int, capacity: int, count: int) -> int:
    """Write `count` records without key, value and headers; returns the bytes, -1 if too many."""
    written = 0
    for delta in range(count):
        size = _empty_record_size(delta)
        if size > capacity - written:
            return -1
        at = put_varint(out + written, zigzag(size - 1))
        store_8(at, 0)
        store_8(at + 1, 0)
        at = put_varint(at + 2, zigzag(delta))
        store_8(at, 1)
        store_8(at + 1, 1)
        store_8(at + 2, 0)
        written += size
    return written


@kernel("void(int64,int64,int64,int64,int64)")
def put_header(batch: int, size: int, timestamp: int, codec: int, count: int) -> None:
    """Make the `size` bytes at `batch` a batch of `count` records of one timestamp."""
    put_batch_header(batch, size, 0, timestamp, timestamp, codec, count)
