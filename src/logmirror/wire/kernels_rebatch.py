"""Record batches -> batches that a producer may send: listed in place, or rewritten.

One call walks many batches. A batch without offset gaps is listed and not read. The records of the
others are appended to the open piece: their three varints are rewritten, the rest is copied. A
piece is closed at an offset gap, when it is full, when the codec changes, or before a batch that is
passed through.

The state is an int64 array; the constants are byte offsets into it. The caller sets for a run:

    FIRST, END                  the requested offsets: first <= offset < end
    MAX_BATCH                   the largest size of a piece, header included
    MERGE_BELOW, MERGE_COMPRESSED_BELOW   batches of fewer bytes are merged with their neighbours
    PIECES, CAPACITY            address of the list of pieces, and its rows
    OUT, ROOM                   address of the memory for new pieces, and its bytes, SLACK of them
                                never filled

and each call updates for the next one (all 0 at first, PREVIOUS -1):

    ROW, POSITION, RECORD, PREVIOUS   where to continue, as in `kernels_decode`
    LISTED                      pieces in the list; the caller empties it
    OPEN, FILL                  where in OUT the open piece begins, and where it ends
    COUNT                       its records; 0: none is open
    OFFSET, TIMESTAMP, MAX_TIMESTAMP, CODEC   first offset, base and max timestamp, codec
    SAVED_FILL, SAVED_COUNT, SAVED_MAX   as they were before the row at hand, COUNT 0: it is first
    NEED_BYTES                  after NO_ROOM: bytes that OUT must have behind OPEN

A row of the list is six words: first offset, records, 1 if the piece lies in the source and 0 if in
OUT, where it begins there, its bytes, its max timestamp.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logmirror.wire.kernels_address import (
    SLACK,
    copy_with_slack,
    inlined,
    kernel,
    load_be16,
    load_be64,
    load_i64,
    load_u8,
    read_varint32,
    read_varint64,
    store_8,
    store_64,
)
from logmirror.wire.kernels_check import skip_field, skip_headers
from logmirror.wire.kernels_columns import (
    BAD_COUNT,
    BAD_LENGTH,
    BAD_OFFSET_DELTA,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    FULL,
)
from logmirror.wire.kernels_encode import put_batch_header, put_varint, varint_size, zigzag

FIRST: Final = 0
END: Final = 8
MAX_BATCH: Final = 16
MERGE_BELOW: Final = 24
MERGE_COMPRESSED_BELOW: Final = 32
PIECES: Final = 40
CAPACITY: Final = 48
OUT: Final = 56
ROOM: Final = 64
ROW: Final = 72
POSITION: Final = 80
RECORD: Final = 88
PREVIOUS: Final = 96
LISTED: Final = 104
OPEN: Final = 112
FILL: Final = 120
COUNT: Final = 128
OFFSET: Final = 136
TIMESTAMP: Final = 144
MAX_TIMESTAMP: Final = 152
CODEC: Final = 160
SAVED_FILL: Final = 168
SAVED_COUNT: Final = 176
SAVED_MAX: Final = 184
NEED_BYTES: Final = 192

STATE_WORDS: Final = 25
PIECE_WORDS: Final = 6

# How a call ends, beside what `kernels_columns` says.
SEAL: Final = 3
"""The open piece is complete and has a codec: compress it, call `seal`, then continue."""
NO_ROOM: Final = 4
"""OUT is too small: move the open piece into memory of NEED_BYTES or more, then continue."""

_GAP: Final = 5
_OVER: Final = 6
_AGAIN: Final = 7

_HEADER: Final = 61
_LOG_APPEND: Final = 8
_CODEC_BITS: Final = 7
_LENGTH_MAX: Final = 2**31 - 1

_PASS_OVER: Final = 0
_AS_IT_IS: Final = 1
_POUR: Final = 2


@inlined
def _list(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    state: int, offset: int, count: int, in_source: int, at: int, size: int, max_timestamp: int
) -> None:
    """Add a piece to the list; there is room."""
    listed = load_i64(state + LISTED)
    row = load_i64(state + PIECES) + 8 * PIECE_WORDS * listed
    store_64(row, offset)
    store_64(row + 8, count)
    store_64(row + 16, in_source)
    store_64(row + 24, at)
    store_64(row + 32, size)
    store_64(row + 40, max_timestamp)
    store_64(state + LISTED, listed + 1)


@inlined
def _seal(state: int, codec: int) -> None:
    """Give the open piece its header, and list it; there is room."""
    at, end, count = load_i64(state + OPEN), load_i64(state + FILL), load_i64(state + COUNT)
    max_timestamp = load_i64(state + MAX_TIMESTAMP)
    batch = load_i64(state + OUT) + at
    put_batch_header(batch, end - at, 0, load_i64(state + TIMESTAMP), max_timestamp, codec, count)
    _list(state, load_i64(state + OFFSET), count, 0, at, end - at, max_timestamp)
    store_64(state + OPEN, end)
    store_64(state + COUNT, 0)
    store_64(state + SAVED_COUNT, 0)


@inlined
def _close(state: int) -> int:
    """Complete the open piece, if there is one; DONE, or who must help."""
    if load_i64(state + COUNT) == 0:
        return DONE
    if load_i64(state + LISTED) >= load_i64(state + CAPACITY):
        return FULL
    if load_i64(state + CODEC) != 0:
        return SEAL
    _seal(state, 0)
    return DONE


@inlined
def _is_whole(cell: int, stride: int, state: int) -> bool:
    """Whether a producer could send the batch at `cell` of the table as it is, and all of it."""
    base_offset, last_offset = load_i64(cell + 2 * stride), load_i64(cell + 3 * stride)
    return (
        load_i64(cell + 4 * stride) == last_offset - base_offset + 1
        and load_i64(cell + 5 * stride) & _LOG_APPEND == 0
        and base_offset >= load_i64(state + FIRST)
        and last_offset < load_i64(state + END)
    )


@inlined
def _is_small(cell: int, stride: int, state: int) -> bool:
    """Whether merging the batch at `cell` pays."""
    size = load_i64(cell + stride)
    below = load_i64(state + MERGE_BELOW)
    if load_i64(cell + 5 * stride) & _CODEC_BITS:
        below = load_i64(state + MERGE_COMPRESSED_BELOW)
    return size < below and size <= load_i64(state + MAX_BATCH)


@inlined
def _follows(cell: int, stride: int, state: int) -> bool:
    """Whether the batch at `cell` goes into the open piece."""
    filled = load_i64(state + FILL) - load_i64(state + OPEN)
    next_offset = load_i64(state + OFFSET) + load_i64(state + COUNT)
    return (
        load_i64(state + COUNT) > 0
        and load_i64(cell + 2 * stride) == next_offset
        and load_i64(cell + 5 * stride) & _CODEC_BITS == load_i64(state + CODEC)
        and filled + load_i64(cell + stride) - _HEADER <= load_i64(state + MAX_BATCH)
    )


@inlined
def _way_of(cell: int, stride: int, state: int, is_last: bool) -> int:
    """What becomes of the batch at `cell`; `is_last`: no other one follows."""
    if (
        load_i64(cell + 11 * stride) != 0
        or load_i64(cell + 3 * stride) < load_i64(state + FIRST)
        or load_i64(cell + 2 * stride) >= load_i64(state + END)
    ):
        return _PASS_OVER
    if load_i64(state + RECORD) > 0 or not _is_whole(cell, stride, state):
        return _POUR
    if not _is_small(cell, stride, state):
        return _AS_IT_IS
    if _follows(cell, stride, state):
        return _POUR
    after = cell + 8
    if is_last or load_i64(after + 11 * stride) != 0:
        return _AS_IT_IS
    joins = (
        load_i64(after + 2 * stride) == load_i64(cell + 3 * stride) + 1
        and (load_i64(after + 5 * stride) ^ load_i64(cell + 5 * stride)) & _CODEC_BITS == 0
        and _is_whole(after, stride, state)
        and _is_small(after, stride, state)
    )
    return _POUR if joins else _AS_IT_IS


class _Record(NamedTuple):
    """One record of the source: the fields to rewrite, and the addresses of the rest."""

    status: int
    body: int
    timestamp_delta: int
    offset_delta: int
    rest: int
    behind: int


@inlined
def _bad(status: int) -> _Record:
    return _Record(status, 0, 0, 0, 0, 0)


@inlined
def _read_record(position: int, end: int, previous: int, last_delta: int) -> _Record:
    """The record at `position`; all of it is checked, key, value and headers are `rest`..`behind`.

    `previous`: the offset delta before it.
    """
    length, body = read_varint32(position, end)
    if body == 0 or length < 1 or length > end - body:
        return _bad(BAD_RECORD)
    behind = body + length
    timestamp_delta, rest = read_varint64(body + 1, behind)
    if rest == 0:
        return _bad(BAD_RECORD)
    offset_delta, rest = read_varint32(rest, behind)
    if rest == 0:
        return _bad(BAD_RECORD)
    if offset_delta <= previous or offset_delta > last_delta:
        return _bad(BAD_OFFSET_DELTA)
    after_value = skip_field(skip_field(rest, behind, -1), behind, -1)
    if skip_headers(after_value, behind) != behind:
        return _bad(BAD_RECORD)
    return _Record(DONE, body, timestamp_delta, offset_delta, rest, behind)


@inlined
def _pour(  # noqa: PLR0913, PLR0915, PLR0917  # one loop that keeps everything in registers
    state: int, cell: int, stride: int, header: int, payload: int, end: int, readable_end: int
) -> int:
    """Records of one batch into the open piece, as far as they go; why it stopped.

    DONE: all of them. _GAP, _OVER: the next one belongs into another piece.
    """
    log_append = load_be16(header + 21) & _LOG_APPEND
    base_timestamp = load_be64(header + 35) if log_append else load_be64(header + 27)
    base_offset = load_i64(cell + 2 * stride)
    last_delta = load_i64(cell + 3 * stride) - base_offset
    records = load_i64(cell + 4 * stride)
    first, stop, limit = load_i64(state + FIRST), load_i64(state + END), load_i64(state + MAX_BATCH)
    out, room = load_i64(state + OUT), load_i64(state + ROOM) - SLACK
    at, fill, count = load_i64(state + OPEN), load_i64(state + FILL), load_i64(state + COUNT)
    offset_0, timestamp_0 = load_i64(state + OFFSET), load_i64(state + TIMESTAMP)
    max_timestamp = load_i64(state + MAX_TIMESTAMP)
    position = payload + load_i64(state + POSITION)
    record, previous = load_i64(state + RECORD), load_i64(state + PREVIOUS)
    reason = DONE
    while record < records:
        one = _read_record(position, end, previous, last_delta)
        if one.status != DONE:
            reason = one.status
            break
        offset = base_offset + one.offset_delta
        if first <= offset and offset < stop:  # noqa: PLR1716  # numba compiles the chain worse
            timestamp = base_timestamp if log_append else base_timestamp + one.timestamp_delta
            if count == 0:
                offset_0, timestamp_0, max_timestamp = offset, base_timestamp, timestamp
                fill = at + _HEADER
            elif offset != offset_0 + count:
                reason = _GAP
                break
            new_timestamp, new_offset = zigzag(timestamp - timestamp_0), zigzag(count)
            new_length = (
                1 + varint_size(new_timestamp) + varint_size(new_offset) + one.behind - one.rest
            )
            size = varint_size(zigzag(new_length)) + new_length
            if count > 0 and fill - at + size > limit:
                reason = _OVER
                break
            if fill + size > room:
                store_64(state + NEED_BYTES, fill - at + size + SLACK)
                reason = NO_ROOM if fill - at + size <= _LENGTH_MAX else BAD_LENGTH
                break
            to = put_varint(out + fill, zigzag(new_length))
            store_8(to, load_u8(one.body))
            to = put_varint(put_varint(to + 1, new_timestamp), new_offset)
            copy_with_slack(to, one.rest, one.behind - one.rest, readable_end)
            fill += size
            count += 1
            max_timestamp = max(max_timestamp, timestamp)
        previous = one.offset_delta
        record += 1
        position = one.behind
    if reason == DONE and position != end:
        reason = BAD_COUNT
    store_64(state + FILL, fill)
    store_64(state + COUNT, count)
    store_64(state + OFFSET, offset_0)
    store_64(state + TIMESTAMP, timestamp_0)
    store_64(state + MAX_TIMESTAMP, max_timestamp)
    store_64(state + POSITION, position - payload)
    store_64(state + RECORD, record)
    store_64(state + PREVIOUS, previous)
    return reason


@inlined
def _begin_row(state: int, row: int) -> None:
    store_64(state + ROW, row)
    store_64(state + POSITION, 0)
    store_64(state + RECORD, 0)
    store_64(state + PREVIOUS, -1)


@inlined
def _save(state: int, codec: int) -> None:
    """Note where the open piece stands before the first record of a row."""
    store_64(state + SAVED_FILL, load_i64(state + FILL))
    store_64(state + SAVED_COUNT, load_i64(state + COUNT))
    store_64(state + SAVED_MAX, load_i64(state + MAX_TIMESTAMP))
    store_64(state + CODEC, codec)


@inlined
def _take_back(state: int, row: int) -> None:
    """Take the row at hand out of the open piece, so that it is not split."""
    store_64(state + FILL, load_i64(state + SAVED_FILL))
    store_64(state + COUNT, load_i64(state + SAVED_COUNT))
    store_64(state + MAX_TIMESTAMP, load_i64(state + SAVED_MAX))
    _begin_row(state, row)


@inlined
def _pass_row(state: int, cell: int, stride: int) -> int:
    """List one row as it is; a status."""
    status = _close(state)
    if status != DONE:
        return status
    if load_i64(state + LISTED) >= load_i64(state + CAPACITY):
        return FULL
    _list(
        *(state, load_i64(cell + 2 * stride), load_i64(cell + 4 * stride), 1),
        *(load_i64(cell), load_i64(cell + stride), load_i64(cell + 6 * stride)),
    )
    return DONE


@inlined
def _pour_row(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    state: int, row: int, cell: int, stride: int, header: int, payload: int, end: int, readable: int
) -> int:
    """What is left of one row, as far as one piece takes it; a status."""
    codec = load_i64(cell + 5 * stride) & _CODEC_BITS
    if load_i64(state + RECORD) == 0:
        if load_i64(state + COUNT) > 0 and load_i64(state + CODEC) != codec:
            status = _close(state)
            if status != DONE:
                return status
        if payload == 0:
            return COMPRESSED
        _save(state, codec)
    reason = _pour(state, cell, stride, header, payload, end, readable)
    if reason == _OVER:
        if load_i64(state + SAVED_COUNT) > 0:
            _take_back(state, row)
        elif _is_whole(cell, stride, state):  # packed it was small, unpacked it fills a piece
            _take_back(state, row)
            return _pass_row(state, cell, stride)
    elif reason != _GAP:
        return reason
    status = _close(state)
    return _AGAIN if status == DONE else status


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def rebatch(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    base: int,
    size: int,
    table: int,
    stride: int,
    stop: int,
    state: int,
    payload: int,
    payload_size: int,
) -> int:
    """Turn the batches of a table into pieces; a status, the state says at which row.

    Args:
        base: Address of the buffer that was scanned.
        size: Its bytes; everything behind is out of bounds.
        table: Address of the scanner's table (`kernels_scan`).
        stride: Bytes between its columns.
        stop: The row not to look at any more, nor any behind it.
        state: See the module.
        payload: Address of the decompressed records of the row in the state, or 0.
        payload_size: Their bytes.

    DONE: all rows are done, and no piece is open. FULL: empty the list, then continue. COMPRESSED:
    decompress the row and call with its records, until the row changes. SEAL, NO_ROOM: see there.
    """
    row = load_i64(state + ROW)
    while row < stop:
        cell = table + 8 * row
        way = _way_of(cell, stride, state, row + 1 == stop)
        status = DONE
        if way != _PASS_OVER:
            position, whole = load_i64(cell), load_i64(cell + stride)
            if position < 0 or whole < _HEADER or position > size - whole:
                return BAD_LENGTH
            if way == _AS_IT_IS:
                status = _pass_row(state, cell, stride)
            elif load_i64(cell + 5 * stride) & _CODEC_BITS:
                end = payload + payload_size
                status = _pour_row(state, row, cell, stride, base + position, payload, end, end)
            else:
                start = base + position
                end = start + whole
                status = _pour_row(
                    state, row, cell, stride, start, start + _HEADER, end, base + size
                )
        if status == _AGAIN:
            continue
        if status != DONE:
            return status
        row += 1
        payload = 0
        _begin_row(state, row)
    return _close(state)


@kernel("void(int64,int64,int64)")
def seal(state: int, payload_bytes: int, codec: int) -> None:
    """Complete the open piece, whose records were compressed where they lie.

    Args:
        state: See the module.
        payload_bytes: What the records take now; not more than before.
        codec: Their codec now.
    """
    store_64(state + FILL, load_i64(state + OPEN) + _HEADER + payload_bytes)
    _seal(state, codec)
