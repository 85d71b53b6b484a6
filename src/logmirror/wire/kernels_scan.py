"""List the batches of a fetch response: one call checks, classifies and tabulates all of them.

The table has one column of `capacity` words for each field, in the order of `COLUMNS`. The state is
kept between calls when the table is full, and holds the facts of an error:

    0 position of the next batch  1 batches listed  2 last offset of the batch before, or -1
    3 aborted transactions activated so far  4 size of a truncated last batch, or 0
    5 base offset of the malformed batch  6 its magic

The aborted transactions are one int64 array: n, u, then n first offsets (ascending), n slots, u
producer ids (ascending), u flags "active". A slot is the place of a producer among the u.
"""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_be16,
    load_be32,
    load_be64,
    load_i64,
    load_u8,
    read_varint32,
    read_varint64,
    store_64,
)
from logmirror.wire.kernels_columns import (
    BAD_BASE_OFFSET,
    BAD_CODEC,
    BAD_COUNT,
    BAD_CRC,
    BAD_LAST_OFFSET_DELTA,
    BAD_LENGTH,
    BAD_MAGIC,
    BAD_MARKER,
    BAD_RECORD,
    DONE,
    FULL,
    OLD_MAGIC,
)
from logmirror.wire.kernels_crc32c import crc32c

COLUMNS: Final = (
    *("positions", "sizes", "base_offsets", "last_offsets", "record_counts", "attributes"),
    *("max_timestamps_ms", "producer_ids", "producer_epochs", "base_sequences"),
    *("leader_epochs", "kinds"),
)

STATE_WORDS: Final = 7

KIND_DATA: Final = 0
KIND_CONTROL: Final = 1
KIND_ABORTED: Final = 2

_HEADER: Final = 61
_MAGIC_END: Final = 17
_MAGIC: Final = 2
_RECORD_MIN: Final = 7
_CODEC_MAX: Final = 4
_TRANSACTIONAL: Final = 16
_CONTROL: Final = 32
_ABORT: Final = 0
_LAST_OFFSET_MAX: Final = 2**63 - 2


@inlined
def _check_header(batch: int, size: int) -> int:
    """The rules that a header must keep by itself; a status."""
    base_offset = load_be64(batch)
    attributes = load_be16(batch + 21)
    last_delta = load_be32(batch + 23)
    count = load_be32(batch + 57)
    codec = attributes & 7
    if base_offset < 0:
        return BAD_BASE_OFFSET
    if last_delta < 0 or base_offset > _LAST_OFFSET_MAX - last_delta:
        return BAD_LAST_OFFSET_DELTA
    if count < 0 or count > last_delta + 1:
        return BAD_COUNT
    if codec > _CODEC_MAX or (codec != 0 and attributes & _CONTROL):
        return BAD_CODEC
    if codec == 0 and count * _RECORD_MIN > size - _HEADER:
        return BAD_COUNT
    return DONE


@inlined
def _marker_type(batch: int, end: int) -> tuple[int, int]:
    """Type in the key of a control batch's first record: a status, the type (-1: no record)."""
    if load_be32(batch + 57) == 0:
        return DONE, -1
    length, position = read_varint32(batch + _HEADER, end)
    if position == 0 or length < 1 or length > end - position:
        return BAD_RECORD, 0
    end = position + length
    _, position = read_varint64(position + 1, end)
    if position != 0:
        _, position = read_varint32(position, end)
    if position != 0:
        length, position = read_varint32(position, end)
    if position == 0 or length < -1 or length > end - position:
        return BAD_RECORD, 0
    if length < 4:  # noqa: PLR2004  # two int16
        return BAD_MARKER, 0
    return DONE, load_be16(position + 2)


@inlined
def _slot_of(aborted: int, producer_id: int) -> int:
    """Address of the producer's flag "active", or 0 if it aborted nothing."""
    entries = load_i64(aborted)
    producers = load_i64(aborted + 8)
    ids = aborted + 16 + 16 * entries
    low = 0
    high = producers
    while low < high:
        middle = (low + high) // 2
        if load_i64(ids + 8 * middle) < producer_id:
            low = middle + 1
        else:
            high = middle
    if low < producers and load_i64(ids + 8 * low) == producer_id:
        return ids + 8 * (producers + low)
    return 0


@inlined
def _activate(aborted: int, activated: int, last_offset: int) -> int:
    """Mark the producers of transactions that begin at or before `last_offset`."""
    entries = load_i64(aborted)
    flags = aborted + 16 + 16 * entries + 8 * load_i64(aborted + 8)
    while activated < entries and load_i64(aborted + 16 + 8 * activated) <= last_offset:
        store_64(flags + 8 * load_i64(aborted + 16 + 8 * (entries + activated)), 1)
        activated += 1
    return activated


@inlined
def _classify(batch: int, size: int, aborted: int) -> int:
    """The kind, as Kafka's own consumer decides it; negative: a status."""
    attributes = load_be16(batch + 21)
    producer_id = load_be64(batch + 43)
    if attributes & _CONTROL:
        status, marker = _marker_type(batch, batch + size)
        if status != DONE:
            return status
        if marker == _ABORT and producer_id >= 0:
            flag = _slot_of(aborted, producer_id)
            if flag != 0:
                store_64(flag, 0)
        return KIND_CONTROL
    if attributes & _TRANSACTIONAL and producer_id >= 0:
        flag = _slot_of(aborted, producer_id)
        if flag != 0 and load_i64(flag) != 0:
            return KIND_ABORTED
    return KIND_DATA


@inlined
def _tabulate(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    cell: int, stride: int, batch: int, position: int, size: int, kind: int
) -> None:
    store_64(cell, position)
    store_64(cell + stride, size)
    store_64(cell + 2 * stride, load_be64(batch))
    store_64(cell + 3 * stride, load_be64(batch) + load_be32(batch + 23))
    store_64(cell + 4 * stride, load_be32(batch + 57))
    store_64(cell + 5 * stride, load_be16(batch + 21))
    store_64(cell + 6 * stride, load_be64(batch + 35))
    store_64(cell + 7 * stride, load_be64(batch + 43))
    store_64(cell + 8 * stride, load_be16(batch + 51))
    store_64(cell + 9 * stride, load_be32(batch + 53))
    store_64(cell + 10 * stride, load_be32(batch + 12))
    store_64(cell + 11 * stride, kind)


@inlined
def _whole_batch(batch: int, left: int, check_crc: int) -> int:
    """Size of a whole, valid batch; 0 if truncated; negative: a status."""
    if left < _MAGIC_END:
        return 0
    magic = load_u8(batch + 16)
    if magic != _MAGIC:
        return OLD_MAGIC if magic < _MAGIC else BAD_MAGIC
    size = 12 + load_be32(batch + 8)
    if size < _HEADER:
        return BAD_LENGTH
    if size > left:
        return 0
    if check_crc and crc32c(batch + 21, size - 21) != load_be32(batch + 17) & 0xFFFFFFFF:
        return BAD_CRC
    status = _check_header(batch, size)
    return status if status < 0 else size


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def scan_batches(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    base: int, size: int, check_crc: int, table: int, capacity: int, state: int, aborted: int
) -> int:
    """Tabulate the whole batches in the `size` bytes at `base`; a status.

    FULL asks for a larger table: copy the columns over and call again with the same state.
    """
    position = load_i64(state)
    count = load_i64(state + 8)
    previous = load_i64(state + 16)
    activated = load_i64(state + 24)
    status = DONE
    while position < size:
        if count >= capacity:
            status = FULL
            break
        batch = base + position
        found = _whole_batch(batch, size - position, check_crc)
        if found > 0 and load_be64(batch) <= previous:
            found = BAD_BASE_OFFSET
        if found > 0:
            last_offset = load_be64(batch) + load_be32(batch + 23)
            activated = _activate(aborted, activated, last_offset)
            kind = _classify(batch, found, aborted)
            if kind >= 0:
                _tabulate(table + 8 * count, 8 * capacity, batch, position, found, kind)
                count += 1
                position += found
                previous = last_offset
                continue
            found = kind
        if found == 0:
            if size - position >= _MAGIC_END:
                store_64(state + 32, 12 + load_be32(batch + 8))
            break
        store_64(state + 40, load_be64(batch))
        store_64(state + 48, load_u8(batch + 16))
        status = found
        break
    store_64(state, position)
    store_64(state + 8, count)
    store_64(state + 16, previous)
    store_64(state + 24, activated)
    return status
