"""Records of whole batches -> columns: one call for a whole fetch response.

Progress is an int64 array that each call updates for the next one. All words are 0 at first, except
PREVIOUS, which is -1:

    BATCH              row of the table to continue with
    POSITION           position in that batch's payload
    RECORD, PREVIOUS   records of that batch already decoded, offset delta of the last of them
    FIRST, END         the offsets to decode: first <= offset < end
    NEED_BYTES         after FULL: the size of the next record's body
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logmirror.wire import kernels_columns as c
from logmirror.wire.kernels_address import (
    copy_with_slack,
    inlined,
    kernel,
    load_be16,
    load_be32,
    load_be64,
    load_i64,
    read_varint32,
    read_varint64,
    store_8,
    store_32,
    store_64,
)

BATCH: Final = 0
POSITION: Final = 8
RECORD: Final = 16
PREVIOUS: Final = 24
FIRST: Final = 32
END: Final = 40
NEED_BYTES: Final = 48

PROGRESS_WORDS: Final = 7

_HEADER: Final = 61
_LOG_APPEND_BIT: Final = 3


class _Targets(NamedTuple):
    """The context's addresses and limits, held in registers."""

    rows_max: int
    headers_max: int
    bytes_max: int
    offsets: int
    timestamps: int
    types: int
    key_offsets: int
    key_data: int
    key_valid: int
    value_offsets: int
    value_data: int
    value_valid: int
    header_offsets: int


class _Levels(NamedTuple):
    """The context's fill levels, held in registers."""

    rows: int
    key_bytes: int
    value_bytes: int
    headers: int
    header_key_bytes: int
    header_value_bytes: int
    used: int


class _Batch(NamedTuple):
    """What the records of one batch have in common, held in registers."""

    base_offset: int
    last_delta: int
    log_append: int
    base_timestamp: int
    end: int
    readable_end: int


@inlined
def _load_targets(context: int) -> _Targets:
    return _Targets(
        load_i64(context + c.ROWS_MAX),
        load_i64(context + c.HEADERS_MAX),
        load_i64(context + c.BYTES_MAX),
        load_i64(context + c.OFFSETS),
        load_i64(context + c.TIMESTAMPS),
        load_i64(context + c.TIMESTAMP_TYPES),
        load_i64(context + c.KEY_OFFSETS),
        load_i64(context + c.KEY_DATA),
        load_i64(context + c.KEY_VALID),
        load_i64(context + c.VALUE_OFFSETS),
        load_i64(context + c.VALUE_DATA),
        load_i64(context + c.VALUE_VALID),
        load_i64(context + c.HEADER_OFFSETS),
    )


@inlined
def _load_levels(context: int) -> _Levels:
    return _Levels(
        load_i64(context + c.ROWS),
        load_i64(context + c.KEY_BYTES),
        load_i64(context + c.VALUE_BYTES),
        load_i64(context + c.HEADERS),
        load_i64(context + c.HEADER_KEY_BYTES),
        load_i64(context + c.HEADER_VALUE_BYTES),
        load_i64(context + c.USED_BYTES),
    )


@inlined
def _store_levels(context: int, levels: _Levels) -> None:
    """Write the fill levels back, and each offsets column's closing entry."""
    rows, headers = levels.rows, levels.headers
    store_64(context + c.ROWS, rows)
    store_64(context + c.KEY_BYTES, levels.key_bytes)
    store_64(context + c.VALUE_BYTES, levels.value_bytes)
    store_64(context + c.HEADERS, headers)
    store_64(context + c.HEADER_KEY_BYTES, levels.header_key_bytes)
    store_64(context + c.HEADER_VALUE_BYTES, levels.header_value_bytes)
    store_64(context + c.USED_BYTES, levels.used)
    store_32(load_i64(context + c.KEY_OFFSETS) + 4 * rows, levels.key_bytes)
    store_32(load_i64(context + c.VALUE_OFFSETS) + 4 * rows, levels.value_bytes)
    store_32(load_i64(context + c.HEADER_OFFSETS) + 4 * rows, headers)
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    store_32(key_offsets + 4 * headers, levels.header_key_bytes)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    store_32(value_offsets + 4 * headers, levels.header_value_bytes)


@inlined
def _load_batch(header: int, end: int, readable_end: int) -> _Batch:
    log_append = (load_be16(header + 21) >> _LOG_APPEND_BIT) & 1
    return _Batch(
        load_be64(header),
        load_be32(header + 23),
        log_append,
        load_be64(header + 35) if log_append else load_be64(header + 27),
        end,
        readable_end,
    )


@inlined
def _put_sized(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    offsets: int,
    data: int,
    valid: int,
    row: int,
    used: int,
    position: int,
    end: int,
    readable_end: int,
) -> tuple[int, int]:
    """One nullable run of bytes into a column: fill level and address behind it; address 0: bad."""
    length, position = read_varint32(position, end)
    if position == 0 or length < -1 or length > end - position:
        return used, 0
    store_32(offsets + 4 * row, used)
    store_8(valid + row, 1 if length >= 0 else 0)
    if length > 0:
        copy_with_slack(data + used, position, length, readable_end)
        used += length
        position += length
    return used, position


@inlined
def _put_headers(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    context: int, count: int, levels: _Levels, position: int, end: int, readable_end: int
) -> tuple[int, int, int, int]:
    """Headers into their columns: fill levels and address behind them; address 0: bad."""
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    key_data = load_i64(context + c.HEADER_KEY_DATA)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    value_data = load_i64(context + c.HEADER_VALUE_DATA)
    value_valid = load_i64(context + c.HEADER_VALUE_VALID)
    row = levels.headers
    key_bytes, value_bytes = levels.header_key_bytes, levels.header_value_bytes
    for _ in range(count):
        length, position = read_varint32(position, end)
        if position == 0 or length < 0 or length > end - position:
            return row, key_bytes, value_bytes, 0
        store_32(key_offsets + 4 * row, key_bytes)
        copy_with_slack(key_data + key_bytes, position, length, readable_end)
        key_bytes += length
        position += length
        value_bytes, position = _put_sized(
            *(value_offsets, value_data, value_valid, row, value_bytes),
            *(position, end, readable_end),
        )
        if position == 0:
            return row, key_bytes, value_bytes, 0
        row += 1
    return row, key_bytes, value_bytes, position


@inlined
def _record_head(position: int, end: int) -> tuple[int, int, int]:
    """Timestamp delta, offset delta and address behind them; address 0: bad."""
    timestamp_delta, position = read_varint64(position, end)
    if position == 0:
        return 0, 0, 0
    offset_delta, position = read_varint32(position, end)
    return timestamp_delta, offset_delta, position


@inlined
def _put_record(  # noqa: PLR0911, PLR0913, PLR0917  # a return for each rule broken
    context: int, to: _Targets, levels: _Levels, batch: _Batch, body: int, end: int, previous: int
) -> tuple[int, int, _Levels]:
    """One record, body..end, behind what the columns hold: a status, offset delta, new levels.

    Room for one row and for `end - body` bytes is there. FULL: there is none for its headers.
    """
    rows, readable_end = levels.rows, batch.readable_end
    timestamp_delta, offset_delta, at = _record_head(body + 1, end)
    if at == 0:
        return c.BAD_RECORD, 0, levels
    if offset_delta <= previous or offset_delta > batch.last_delta:
        return c.BAD_OFFSET_DELTA, 0, levels
    store_64(to.offsets + 8 * rows, batch.base_offset + offset_delta)
    timestamp = batch.base_timestamp
    if batch.log_append == 0:
        timestamp += timestamp_delta
    store_64(to.timestamps + 8 * rows, timestamp)
    store_32(to.types + 4 * rows, batch.log_append)
    store_32(to.header_offsets + 4 * rows, levels.headers)
    key_bytes, at = _put_sized(
        *(to.key_offsets, to.key_data, to.key_valid, rows, levels.key_bytes),
        *(at, end, readable_end),
    )
    if at == 0:
        return c.BAD_RECORD, 0, levels
    value_bytes, at = _put_sized(
        *(to.value_offsets, to.value_data, to.value_valid, rows, levels.value_bytes),
        *(at, end, readable_end),
    )
    if at == 0:
        return c.BAD_RECORD, 0, levels
    count, at = read_varint32(at, end)
    if at == 0 or count < 0 or count > (end - at) // 2:
        return c.BAD_RECORD, 0, levels
    headers, header_key_bytes = levels.headers, levels.header_key_bytes
    header_value_bytes = levels.header_value_bytes
    if count > 0:
        if count > to.headers_max - headers:
            return c.FULL, count, levels
        headers, header_key_bytes, header_value_bytes, at = _put_headers(
            context, count, levels, at, end, readable_end
        )
    if at != end:
        return c.BAD_RECORD, 0, levels
    used = levels.used + end - body
    return (
        c.DONE,
        offset_delta,
        _Levels(
            *(rows + 1, key_bytes, value_bytes),
            *(headers, header_key_bytes, header_value_bytes, used),
        ),
    )


@inlined
def _decode_payload(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    context: int, progress: int, header: int, payload: int, end: int, readable_end: int
) -> int:
    """The records of one batch, uncompressed, from where `progress` says; a status."""
    to, levels = _load_targets(context), _load_levels(context)
    batch = _load_batch(header, end, readable_end)
    first, stop = load_i64(progress + FIRST), load_i64(progress + END)
    count = load_be32(header + 57)
    position = payload + load_i64(progress + POSITION)
    record, previous = load_i64(progress + RECORD), load_i64(progress + PREVIOUS)
    status = c.DONE
    while record < count:
        length, body = read_varint32(position, end)
        if body == 0 or length < 1 or length > end - body:
            status = c.BAD_RECORD
            break
        if levels.rows >= to.rows_max or length > to.bytes_max - levels.used:
            store_64(progress + NEED_BYTES, length)
            status = c.FULL
            break
        status, delta, after = _put_record(
            context, to, levels, batch, body, body + length, previous
        )
        if status != c.DONE:
            store_64(progress + NEED_BYTES, length)
            break
        offset = batch.base_offset + delta
        if first <= offset and offset < stop:  # noqa: PLR1716  # numba compiles the chain worse
            levels = after
        previous = delta
        record += 1
        position = body + length
    if status == c.DONE and position != end:
        status = c.BAD_COUNT
    _store_levels(context, levels)
    store_64(progress + POSITION, position - payload)
    store_64(progress + RECORD, record)
    store_64(progress + PREVIOUS, previous)
    return status


@inlined
def _next_batch(progress: int, batch: int) -> None:
    store_64(progress + BATCH, batch)
    store_64(progress + POSITION, 0)
    store_64(progress + RECORD, 0)
    store_64(progress + PREVIOUS, -1)


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def decode_batches(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    base: int, size: int, table: int, stride: int, count: int, context: int, progress: int
) -> int:
    """Decode the data batches of a table; a status, progress says at which row.

    Args:
        base: Address of the buffer that was scanned.
        size: Its bytes; everything behind is out of bounds.
        table: Address of the scanner's table (`kernels_scan`).
        stride: Bytes between its columns.
        count: Its rows.
        context: Where the columns are (`kernels_columns`).
        progress: See the module.

    COMPRESSED: the batch must be decompressed; call `decode_payload`, then continue after it.
    """
    readable_end = base + size
    first, stop = load_i64(progress + FIRST), load_i64(progress + END)
    batch = load_i64(progress + BATCH)
    while batch < count:
        cell = table + 8 * batch
        position = load_i64(cell)
        whole = load_i64(cell + stride)
        wanted = load_i64(cell + 3 * stride) >= first and load_i64(cell + 2 * stride) < stop
        if wanted and load_i64(cell + 11 * stride) == 0:
            if position < 0 or whole < _HEADER or position > size - whole:
                return c.BAD_LENGTH
            header = base + position
            if load_be16(header + 21) & 7:
                return c.COMPRESSED
            status = _decode_payload(
                context, progress, header, header + _HEADER, header + whole, readable_end
            )
            if status != c.DONE:
                return status
        batch += 1
        _next_batch(progress, batch)
    return c.DONE


@kernel("int64(int64,int64,int64,int64,int64)")
def decode_payload(header: int, payload: int, size: int, context: int, progress: int) -> int:
    """Decode one batch whose records were decompressed; a status.

    Args:
        header: Address of the batch's 61 header bytes.
        payload: Address of the decompressed records.
        size: Their bytes.
        context: Where the columns are (`kernels_columns`).
        progress: See the module; when the batch is done it points at the next one.
    """
    status = _decode_payload(context, progress, header, payload, payload + size, payload + size)
    if status == c.DONE:
        _next_batch(progress, load_i64(progress + BATCH) + 1)
    return status
