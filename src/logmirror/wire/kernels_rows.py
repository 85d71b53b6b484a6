"""Digests of rows of columns: 128 bits of what a record is, without its offset.

A row's digest is a chain of SipHash-2-4 with 128 bits of output, over each part (key, value, and
key and value of each header) with the digest before it and the part's length, -1 for null. So equal
bytes in another part, or divided otherwise, have another digest. The timestamp changes the digest
of the key.
"""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_i32,
    load_i64,
    load_u8,
    store_64,
)
from logmirror.wire.kernels_keys import siphash

ROWS: Final = 0
TIMESTAMPS: Final = 8
HEADER_EDGES: Final = 16
KEYS: Final = 24
VALUES: Final = 48
HEADER_KEYS: Final = 72
HEADER_VALUES: Final = 96
SECRET: Final = 120
SCRATCH: Final = 136
STATE_WORDS: Final = 22
"""Words of the state: the rows; addresses of int64 timestamps and of int32 edges of headers; for
each column of bytes the addresses of int32 edges, bytes, and uint8 validity (0: no nulls); two
words of a secret, and five of scratch space."""

_PART_BYTES: Final = 40


@inlined
def _add(state: int, column: int, row: int, low: int, high: int) -> tuple[int, int]:
    """The digest so far with one more part."""
    edges, data, valid = load_i64(column), load_i64(column + 8), load_i64(column + 16)
    first = load_i32(edges + 4 * row)
    size = load_i32(edges + 4 * row + 4) - first
    part_low, part_high = siphash(data + first, size, state + SECRET)
    if valid != 0 and load_u8(valid + row) == 0:
        size = -1
    scratch = state + SCRATCH
    store_64(scratch, low)
    store_64(scratch + 8, high)
    store_64(scratch + 16, part_low)
    store_64(scratch + 24, part_high)
    store_64(scratch + 32, size)
    return siphash(scratch, _PART_BYTES, state + SECRET)


@kernel("int64(int64,int64,int64)")
def digest_rows(state: int, out: int, out_keys: int) -> int:
    """Write the digest of each row; returns the number of rows.

    Args:
        state: Address of `STATE_WORDS` int64, which say where the columns are.
        out: Address of two int64 for each row, for its digest.
        out_keys: The same, for the digest of the key alone.
    """
    rows, times = load_i64(state + ROWS), load_i64(state + TIMESTAMPS)
    edges = load_i64(state + HEADER_EDGES)
    for row in range(rows):
        low, high = _add(state, state + KEYS, row, 0, 0)
        store_64(out_keys + 16 * row, low)
        store_64(out_keys + 16 * row + 8, high)
        high ^= load_i64(times + 8 * row)
        low, high = _add(state, state + VALUES, row, low, high)
        for pair in range(load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)):
            low, high = _add(state, state + HEADER_KEYS, pair, low, high)
            low, high = _add(state, state + HEADER_VALUES, pair, low, high)
        store_64(out + 16 * row, low)
        store_64(out + 16 * row + 8, high)
    return rows
