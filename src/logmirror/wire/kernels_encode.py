"""Writes varints and batch headers; compiled into the kernels that write record batches."""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import (
    inlined,
    shift_right,
    store_8,
    store_be16,
    store_be32,
    store_be64,
)
from logmirror.wire.kernels_crc32c import crc32c

BATCH_HEADER_BYTES: Final = 61


@inlined
def zigzag(value: int) -> int:
    """0, -1, 1, -2 -> 0, 1, 2, 3; the bit pattern, as `put_varint` wants it."""
    return (value << 1) ^ (value >> 63)


@inlined
def varint_size(pattern: int) -> int:
    """Bytes that `put_varint` writes for a zigzag pattern."""
    size = 1
    pattern = shift_right(pattern, 7)
    while pattern != 0:
        pattern = shift_right(pattern, 7)
        size += 1
    return size


@inlined
def put_varint(at: int, pattern: int) -> int:
    """Write a zigzag pattern; the address behind it."""
    rest = shift_right(pattern, 7)
    while rest != 0:
        store_8(at, (pattern & 127) | 128)
        at += 1
        pattern = rest
        rest = shift_right(pattern, 7)
    store_8(at, pattern)
    return at + 1


@inlined
def put_batch_header(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    batch: int,
    size: int,
    offset: int,
    timestamp: int,
    max_timestamp: int,
    attributes: int,
    count: int,
) -> None:
    """The 61 bytes before the records: no producer, no leader epoch; checksum last."""
    store_be64(batch, offset)
    store_be32(batch + 8, size - 12)
    store_be32(batch + 12, -1)
    store_8(batch + 16, 2)
    store_be16(batch + 21, attributes)
    store_be32(batch + 23, count - 1)
    store_be64(batch + 27, timestamp)
    store_be64(batch + 35, max_timestamp)
    store_be64(batch + 43, -1)
    store_be16(batch + 51, -1)
    store_be32(batch + 53, -1)
    store_be32(batch + 57, count)
    store_be32(batch + 17, crc32c(batch + 21, size - 21))
