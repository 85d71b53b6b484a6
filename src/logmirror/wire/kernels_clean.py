"""Compaction of record batches: writes the records that stay.

The state is that of `kernels_keys`, with more words. The caller sets:

    NOW, HORIZON        the time; until when null values that are kept now are kept
    OUT, ROOM           address of the memory for the output, and its bytes

and the kernels update:

    FILL, EXPECTED      bytes of the output; the offset behind its last batch
    NEED                after FULL: the bytes that OUT must have
    KEPT, DROPPED, TOMBSTONES, MAX_TIMESTAMP   of the last batch: records that stay and that do not,
                        null values among those that stay, the largest timestamp of these
    REMOVED, REWRITTEN  records that did not stay, and batches that changed, in all

The output covers every offset: in the place of batches that do not stay is one batch without
records, so that a missing batch is recognised as damage.
"""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import (
    copy,
    inlined,
    kernel,
    load_be16,
    load_be32,
    load_be64,
    load_i64,
    load_u8,
    store_8,
    store_64,
    store_be16,
    store_be32,
    store_be64,
)
from logmirror.wire.kernels_columns import (
    BAD_COUNT,
    COMPRESSED,
    DONE,
    FULL,
)
from logmirror.wire.kernels_crc32c import crc32c
from logmirror.wire.kernels_encode import put_varint, varint_size, zigzag
from logmirror.wire.kernels_keys import (
    FILTER,
    HOLD,
    KEEP,
    REPLACE,
    ROW,
    UPTO,
    KeyedRecord,
    read_record,
    slot_of,
)

NOW: Final = 64
HORIZON: Final = 72
OUT: Final = 80
ROOM: Final = 88
FILL: Final = 96
EXPECTED: Final = 104
NEED: Final = 112
KEPT: Final = 120
DROPPED: Final = 128
TOMBSTONES: Final = 136
MAX_TIMESTAMP: Final = 144
REMOVED: Final = 152
REWRITTEN: Final = 160

STATE_WORDS: Final = 21

HORIZON_FLAG: Final = 64
"""The attribute of a batch whose base timestamp is a delete horizon (KIP-534)."""

_HEADER: Final = 61
_CODEC_BITS: Final = 7
_LOG_APPEND: Final = 8
_LAST_DELTA_MAX: Final = 2**31 - 1
_LEAST_TIMESTAMP: Final = -(2**62)
_GROWTH: Final = 15
"""What a record may grow when its timestamp delta and its length are rewritten."""


@inlined
def _stays(state: int, one: KeyedRecord, offset: int, is_past: bool) -> bool:
    """Whether a record stays. `is_past`: the time of the batch's null values is over."""
    if one.key_size < 0 or offset >= load_i64(state + UPTO):
        return True
    slot, _, _ = slot_of(state, one.key, one.key_size)
    if load_i64(slot + 16) > offset + 1:
        return False
    return one.value_size >= 0 or not is_past


@inlined
def _filter(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    state: int, header: int, position: int, end: int, out: int, new_base: int
) -> int:
    """Copy the records that stay to `out`, which has room; the bytes, or a negative status.

    `new_base`: the base timestamp of the copy.
    """
    attributes, base_timestamp = load_be16(header + 21), load_be64(header + 27)
    base_offset, last_delta = load_be64(header), load_be32(header + 23)
    is_past = attributes & HORIZON_FLAG != 0 and base_timestamp <= load_i64(state + NOW)
    kept = dropped = tombstones = 0
    max_timestamp = _LEAST_TIMESTAMP
    previous, to = -1, out
    for _ in range(load_be32(header + 57)):
        one = read_record(position, end, previous, last_delta)
        if one.status != DONE:
            return one.status
        if _stays(state, one, base_offset + one.offset_delta, is_past):
            if new_base == base_timestamp:
                copy(to, position, one.behind - position)
                to += one.behind - position
            else:
                delta = zigzag(base_timestamp + one.timestamp_delta - new_base)
                offset_delta = zigzag(one.offset_delta)
                rest = one.behind - one.after_deltas
                length = 1 + varint_size(delta) + varint_size(offset_delta) + rest
                to = put_varint(to, zigzag(length))
                store_8(to, load_u8(one.body))
                to = put_varint(put_varint(to + 1, delta), offset_delta)
                copy(to, one.after_deltas, rest)
                to += rest
            kept += 1
            tombstones += one.key_size >= 0 and one.value_size < 0
            max_timestamp = max(max_timestamp, base_timestamp + one.timestamp_delta)
        else:
            dropped += 1
        previous, position = one.offset_delta, one.behind
    if position != end:
        return BAD_COUNT
    if attributes & _LOG_APPEND:
        max_timestamp = load_be64(header + 35)
    store_64(state + KEPT, kept)
    store_64(state + DROPPED, dropped)
    store_64(state + TOMBSTONES, tombstones)
    store_64(state + MAX_TIMESTAMP, max_timestamp)
    return to - out


@inlined
def _filter_twice(state: int, header: int, position: int, end: int, out: int) -> tuple[int, int]:
    """Bytes (or a status) and base timestamp; a second time if null values get their horizon."""
    base_timestamp = load_be64(header + 27)
    written = _filter(state, header, position, end, out, base_timestamp)
    is_reached = load_be64(header) + load_be32(header + 23) < load_i64(state + UPTO)
    has_horizon = load_be16(header + 21) & HORIZON_FLAG != 0
    if written > 0 and load_i64(state + TOMBSTONES) > 0 and is_reached and not has_horizon:
        base_timestamp = load_i64(state + HORIZON)
        written = _filter(state, header, position, end, out, base_timestamp)
    return written, base_timestamp


@kernel("int64(int64,int64,int64,int64,int64)")
def filter_records(state: int, header: int, payload: int, payload_size: int, out: int) -> int:
    """Copy the records of one batch that stay, decompressed; the bytes, or a negative status.

    The copy has the base timestamp of the batch, or HORIZON if it has null values that are kept for
    their time from now on. OUT must have room for the payload and 15 more bytes for each record.
    """
    written, base_timestamp = _filter_twice(state, header, payload, payload + payload_size, out)
    store_64(state + NEED, base_timestamp)
    return written


@inlined
def _finish(batch: int, size: int) -> None:
    """Length and checksum of a batch."""
    store_be32(batch + 8, size - 12)
    store_be32(batch + 17, crc32c(batch + 21, size - 21))


@inlined
def _put_empty(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    batch: int, offset: int, last_delta: int, epoch: int, attributes: int, source: int
) -> None:
    """A batch without records; `source`: the header with its producer, 0: none."""
    store_be64(batch, offset)
    store_be32(batch + 12, epoch)
    store_8(batch + 16, 2)
    store_be16(batch + 21, attributes)
    store_be32(batch + 23, last_delta)
    store_be64(batch + 27, -1)
    store_be64(batch + 35, -1)
    if source:
        copy(batch + 43, source + 43, 14)
    else:
        store_be64(batch + 43, -1)
        store_be16(batch + 51, -1)
        store_be32(batch + 53, -1)
    store_be32(batch + 57, 0)
    _finish(batch, _HEADER)


@inlined
def _cover(state: int, offset: int, epoch: int) -> None:
    """Write batches without records up to `offset`; there is room."""
    expected, fill = load_i64(state + EXPECTED), load_i64(state + FILL)
    while expected < offset:
        delta = min(offset - expected - 1, _LAST_DELTA_MAX)
        _put_empty(load_i64(state + OUT) + fill, expected, delta, epoch, 0, 0)
        fill += _HEADER
        expected += delta + 1
    store_64(state + FILL, fill)


@inlined
def _cover_bytes(state: int, offset: int) -> int:
    gap = max(0, offset - load_i64(state + EXPECTED))
    return _HEADER * ((gap + _LAST_DELTA_MAX) // (_LAST_DELTA_MAX + 1))


@kernel("int64(int64,int64,int64)")
def cover(state: int, offset: int, epoch: int) -> int:
    """Complete the output up to `offset`; FULL if there is no room."""
    store_64(state + NEED, load_i64(state + FILL) + _cover_bytes(state, offset))
    if load_i64(state + NEED) > load_i64(state + ROOM):
        return FULL
    _cover(state, offset, epoch)
    store_64(state + EXPECTED, max(offset, load_i64(state + EXPECTED)))
    return DONE


@inlined
def _put(state: int, header: int, source: int, size: int) -> None:
    """Copy a batch to the output; there is room."""
    base_offset = load_be64(header)
    _cover(state, base_offset, load_be32(header + 12))
    fill = load_i64(state + FILL)
    copy(load_i64(state + OUT) + fill, source, size)
    store_64(state + FILL, fill + size)
    store_64(state + EXPECTED, base_offset + load_be32(header + 23) + 1)


@inlined
def _put_hold(state: int, header: int) -> None:
    """Write a batch without records in the place of one; there is room."""
    base_offset, last_delta = load_be64(header), load_be32(header + 23)
    epoch = load_be32(header + 12)
    _cover(state, base_offset, epoch)
    fill = load_i64(state + FILL)
    attributes = load_be16(header + 21) & ~(_CODEC_BITS | HORIZON_FLAG)
    _put_empty(load_i64(state + OUT) + fill, base_offset, last_delta, epoch, attributes, header)
    store_64(state + FILL, fill + _HEADER)
    store_64(state + EXPECTED, base_offset + last_delta + 1)


@inlined
def _put_filtered(state: int, header: int, size: int, action: int) -> int:
    """Write what stays of an uncompressed batch; there is room."""
    base_offset = load_be64(header)
    batch = load_i64(state + OUT) + load_i64(state + FILL) + _cover_bytes(state, base_offset)
    records = header + _HEADER
    written, base_timestamp = _filter_twice(state, header, records, header + size, batch + _HEADER)
    if written < 0:
        return written
    is_same = base_timestamp == load_be64(header + 27)
    if load_i64(state + DROPPED) == 0 and is_same:
        _put(state, header, header, size)
    elif load_i64(state + KEPT) > 0:
        _cover(state, base_offset, load_be32(header + 12))
        copy(batch, header, _HEADER)
        if not is_same:
            store_be64(batch + 27, base_timestamp)
            store_be16(batch + 21, load_be16(header + 21) | HORIZON_FLAG)
        store_be64(batch + 35, load_i64(state + MAX_TIMESTAMP))
        store_be32(batch + 57, load_i64(state + KEPT))
        _finish(batch, _HEADER + written)
        store_64(state + FILL, load_i64(state + FILL) + _HEADER + written)
        store_64(state + REWRITTEN, load_i64(state + REWRITTEN) + 1)
        store_64(state + EXPECTED, base_offset + load_be32(header + 23) + 1)
    elif action & HOLD:
        _put_hold(state, header)
    store_64(state + REMOVED, load_i64(state + REMOVED) + load_i64(state + DROPPED))
    return DONE


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def clean_batches(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    base: int,
    table: int,
    stride: int,
    stop: int,
    actions: int,
    state: int,
    other: int,
    other_size: int,
) -> int:
    """Write what stays of the batches; a status.

    COMPRESSED: filter the batch at ROW with `filter_records`, give it another action, and continue.
    FULL: empty OUT, or make it NEED bytes large, and continue.

    Args:
        base: Address of the buffer that was scanned.
        table: Address of the scanner's table (`kernels_scan`).
        stride: Bytes of one column of the table.
        stop: Rows of the table.
        actions: Address of an action for each row, int64.
        state: Address of the state.
        other: Address of the batch for the row with the action REPLACE.
        other_size: Its bytes.
    """
    row = load_i64(state + ROW)
    status = DONE
    while row < stop:
        cell, action = table + 8 * row, load_i64(actions + 8 * row)
        header, size = base + load_i64(cell), load_i64(cell + stride)
        what = action & ~HOLD
        if what == FILTER and load_i64(cell + 5 * stride) & _CODEC_BITS:
            status = COMPRESSED
            break
        most = size + _GROWTH * load_i64(cell + 4 * stride)
        if what == REPLACE:
            most = other_size
        need = load_i64(state + FILL) + _cover_bytes(state, load_i64(cell + 2 * stride))
        need += max(most, _HEADER)
        if need > load_i64(state + ROOM):
            store_64(state + NEED, need - load_i64(state + FILL))
            status = FULL
            break
        if what == KEEP:
            _put(state, header, header, size)
        elif what == REPLACE:
            _put(state, header, other, other_size)
        elif what == FILTER:
            status = _put_filtered(state, header, size, action)
            if status != DONE:
                break
        else:
            store_64(state + REMOVED, load_i64(state + REMOVED) + load_i64(cell + 4 * stride))
            if action & HOLD:
                _put_hold(state, header)
        row += 1
    store_64(state + ROW, row)
    return status
