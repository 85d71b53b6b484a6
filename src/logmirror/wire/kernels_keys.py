"""A map of the newest offset of each key, and how record batches are put into it.

The map is a table of slots with linear probing. A slot is three words: the 128-bit SipHash-2-4 of
the key, under a secret that a client does not know, and the newest offset plus 1; 0 is a free slot.

The state is an int64 array; the constants are byte offsets into it. The caller sets:

    SLOTS, MASK         address of the map, and its number of slots (a power of two) minus 1
    LIMIT               the largest number of keys
    SECRET              two words

and the kernel updates:

    KEYS                keys in the map
    UPTO                the first offset that is not in the map, once it is full
    ROW                 the row of the table to continue with
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_be32,
    load_be64,
    load_i64,
    load_u8,
    read_varint32,
    read_varint64,
    shift_right,
    store_64,
)
from logmirror.wire.kernels_columns import (
    BAD_OFFSET_DELTA,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    FULL,
)

SLOTS: Final = 0
MASK: Final = 8
LIMIT: Final = 16
SECRET: Final = 24
KEYS: Final = 40
UPTO: Final = 48
ROW: Final = 56

SLOT_WORDS: Final = 3

# What to do with a batch.
KEEP: Final = 0
DROP: Final = 1
FILTER: Final = 2
REPLACE: Final = 3
"""Write the batch that the caller passes instead."""
HOLD: Final = 4
"""To be added to DROP or FILTER: if no record stays, a batch without records stays, which holds the
last sequence of its producer."""

_HEADER: Final = 61
_CODEC_BITS: Final = 7


@inlined
def _rotl(value: int, bits: int) -> int:
    return (value << bits) | shift_right(value, 64 - bits)


@inlined
def _round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    """One SipRound."""
    a += b
    b = _rotl(b, 13) ^ a
    a = _rotl(a, 32)
    c += d
    d = _rotl(d, 16) ^ c
    a += d
    d = _rotl(d, 21) ^ a
    c += b
    b = _rotl(b, 17) ^ c
    c = _rotl(c, 32)
    return a, b, c, d


@inlined
def siphash(position: int, size: int, secret: int) -> tuple[int, int]:
    """SipHash-2-4 with 128 bits of output."""
    k0, k1 = load_i64(secret), load_i64(secret + 8)
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573
    whole = position + (size & ~7)
    at = position
    while at < whole:
        word = load_i64(at)
        d ^= word
        a, b, c, d = _round(a, b, c, d)
        a, b, c, d = _round(a, b, c, d)
        a ^= word
        at += 8
    word = (size & 255) << 56
    shift = 0
    while at < position + size:
        word |= load_u8(at) << shift
        shift += 8
        at += 1
    d ^= word
    a, b, c, d = _round(a, b, c, d)
    a, b, c, d = _round(a, b, c, d)
    a ^= word
    c ^= 0xEE
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    low = a ^ b ^ c ^ d
    b ^= 0xDD
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    return low, a ^ b ^ c ^ d


@kernel("int64(int64,int64,int64,int64)")
def siphash_at(position: int, size: int, secret: int, out: int) -> int:
    """Write the two words of a hash to `out`."""
    low, high = siphash(position, size, secret)
    store_64(out, low)
    store_64(out + 8, high)
    return DONE


@inlined
def slot_of(state: int, position: int, size: int) -> tuple[int, int, int]:
    """The slot of a key, or the free one where it belongs; and its hash."""
    low, high = siphash(position, size, state + SECRET)
    slots, mask = load_i64(state + SLOTS), load_i64(state + MASK)
    number = low & mask
    slot = slots + 8 * SLOT_WORDS * number
    while load_i64(slot + 16) != 0 and (load_i64(slot) != low or load_i64(slot + 8) != high):
        number = (number + 1) & mask
        slot = slots + 8 * SLOT_WORDS * number
    return slot, low, high


class KeyedRecord(NamedTuple):
    """One record: its fields that matter here, and addresses."""

    status: int
    body: int
    timestamp_delta: int
    offset_delta: int
    after_deltas: int
    key: int
    key_size: int
    value_size: int
    behind: int


@inlined
def _bad(status: int) -> KeyedRecord:
    return KeyedRecord(status, 0, 0, 0, 0, 0, 0, 0, 0)


@inlined
def read_record(  # noqa: PLR0911  # one for each field
    position: int, end: int, previous: int, last_delta: int
) -> KeyedRecord:
    """The record at `position`; `previous`: the offset delta before it."""
    length, body = read_varint32(position, end)
    if body == 0 or length < 1 or length > end - body:
        return _bad(BAD_RECORD)
    behind = body + length
    timestamp_delta, at = read_varint64(body + 1, behind)
    if at == 0:
        return _bad(BAD_RECORD)
    offset_delta, at = read_varint32(at, behind)
    if at == 0:
        return _bad(BAD_RECORD)
    if offset_delta <= previous or offset_delta > last_delta:
        return _bad(BAD_OFFSET_DELTA)
    after_deltas = at
    key_size, key = read_varint32(at, behind)
    if key == 0 or key_size < -1 or key_size > behind - key:
        return _bad(BAD_RECORD)
    value_size, at = read_varint32(key + max(0, key_size), behind)
    if at == 0 or value_size < -1 or value_size > behind - at:
        return _bad(BAD_RECORD)
    return KeyedRecord(
        DONE, body, timestamp_delta, offset_delta, after_deltas, key, key_size, value_size, behind
    )


@inlined
def _index(state: int, header: int, position: int, end: int) -> int:
    """Put the keys of one batch into the map."""
    base_offset, last_delta = load_be64(header), load_be32(header + 23)
    keys, limit = load_i64(state + KEYS), load_i64(state + LIMIT)
    previous, status = -1, DONE
    for _ in range(load_be32(header + 57)):
        one = read_record(position, end, previous, last_delta)
        if one.status != DONE:
            status = one.status
            break
        if one.key_size >= 0:
            slot, low, high = slot_of(state, one.key, one.key_size)
            if load_i64(slot + 16) == 0:
                if keys >= limit:
                    store_64(state + UPTO, base_offset + one.offset_delta)
                    status = FULL
                    break
                store_64(slot, low)
                store_64(slot + 8, high)
                keys += 1
            store_64(slot + 16, base_offset + one.offset_delta + 1)
        previous, position = one.offset_delta, one.behind
    store_64(state + KEYS, keys)
    return status


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def index_keys(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    base: int,
    table: int,
    stride: int,
    stop: int,
    actions: int,
    state: int,
    payload: int,
    payload_size: int,
) -> int:
    """Put the keys of the batches with the action FILTER into the map; a status.

    Args:
        base: Address of the buffer that was scanned.
        table: Address of the scanner's table (`kernels_scan`).
        stride: Bytes of one column of the table.
        stop: Rows of the table.
        actions: Address of an action for each row, int64.
        state: Address of the state.
        payload: Address of the decompressed records of the row at which the last call returned
            COMPRESSED; 0: none.
        payload_size: Their bytes.
    """
    row = load_i64(state + ROW)
    status = DONE
    while row < stop:
        if load_i64(actions + 8 * row) & ~HOLD == FILTER:
            cell = table + 8 * row
            header = base + load_i64(cell)
            if payload != 0:
                status = _index(state, header, payload, payload + payload_size)
                payload = 0
            elif load_i64(cell + 5 * stride) & _CODEC_BITS:
                status = COMPRESSED
            else:
                status = _index(state, header, header + _HEADER, header + load_i64(cell + stride))
            if status != DONE:
                break
        row += 1
    store_64(state + ROW, row)
    return status
