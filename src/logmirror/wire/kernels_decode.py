"""Records of whole batches -> columns: one call for a whole fetch response.

Progress is an int64 array that a call leaves for the next one; words that say where to go on start
as 0, PREVIOUS as -1:

    BATCH              row of the table where to go on
    POSITION           where in that batch's payload
    RECORD, PREVIOUS   records of that batch behind us, offset delta of the last of them
    FIRST, END         the offsets wanted: first <= offset < end
    NEED_BYTES, NEED_HEADERS   after FULL: what the next record asks for
"""

from __future__ import annotations

from typing import Final

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
NEED_HEADERS: Final = 56

PROGRESS_WORDS: Final = 8

_HEADER: Final = 61
_LOG_APPEND: Final = 8
_HEADERS_FULL: Final = -1


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
    context: int,
    count: int,
    row: int,
    key_bytes: int,
    value_bytes: int,
    position: int,
    end: int,
    readable_end: int,
) -> tuple[int, int, int, int]:
    """Headers into their columns: fill levels and address behind them; address 0: bad."""
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    key_data = load_i64(context + c.HEADER_KEY_DATA)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    value_data = load_i64(context + c.HEADER_VALUE_DATA)
    value_valid = load_i64(context + c.HEADER_VALUE_VALID)
    for _ in range(count):
        length, position = read_varint32(position, end)
        if position == 0 or length < 0 or length > end - position:
            return row, key_bytes, value_bytes, 0
        store_32(key_offsets + 4 * row, key_bytes)
        copy_with_slack(key_data + key_bytes, position, length, readable_end)
        key_bytes += length
        value_bytes, position = _put_sized(
            value_offsets,
            value_data,
            value_valid,
            row,
            value_bytes,
            position + length,
            end,
            readable_end,
        )
        if position == 0:
            return row, key_bytes, value_bytes, 0
        row += 1
    return row, key_bytes, value_bytes, position


@inlined
def _close(context: int, rows: int, headers: int) -> None:
    """Write the fill levels' last entries, so that the columns are whole after every call."""
    store_32(load_i64(context + c.KEY_OFFSETS) + 4 * rows, load_i64(context + c.KEY_BYTES))
    store_32(load_i64(context + c.VALUE_OFFSETS) + 4 * rows, load_i64(context + c.VALUE_BYTES))
    store_32(load_i64(context + c.HEADER_OFFSETS) + 4 * rows, headers)
    store_32(
        load_i64(context + c.HEADER_KEY_OFFSETS) + 4 * headers,
        load_i64(context + c.HEADER_KEY_BYTES),
    )
    store_32(
        load_i64(context + c.HEADER_VALUE_OFFSETS) + 4 * headers,
        load_i64(context + c.HEADER_VALUE_BYTES),
    )


@inlined
def _record_head(position: int, end: int) -> tuple[int, int, int]:
    """Timestamp delta, offset delta and address behind them; address 0: bad."""
    timestamp_delta, position = read_varint64(position, end)
    if position == 0:
        return 0, 0, 0
    offset_delta, position = read_varint32(position, end)
    return timestamp_delta, offset_delta, position


@inlined
def _decode_payload(  # noqa: C901, PLR0912, PLR0913, PLR0914, PLR0915, PLR0917  # one loop; its state must stay in registers
    context: int, progress: int, header: int, payload: int, end: int, readable_end: int
) -> int:
    """The records of one batch, uncompressed, from where `progress` says; a status."""
    rows = load_i64(context + c.ROWS)
    key_bytes = load_i64(context + c.KEY_BYTES)
    value_bytes = load_i64(context + c.VALUE_BYTES)
    headers = load_i64(context + c.HEADERS)
    header_key_bytes = load_i64(context + c.HEADER_KEY_BYTES)
    header_value_bytes = load_i64(context + c.HEADER_VALUE_BYTES)
    used = load_i64(context + c.USED_BYTES)
    rows_max, headers_max = load_i64(context + c.ROWS_MAX), load_i64(context + c.HEADERS_MAX)
    bytes_max = load_i64(context + c.BYTES_MAX)
    offsets, timestamps = load_i64(context + c.OFFSETS), load_i64(context + c.TIMESTAMPS)
    types = load_i64(context + c.TIMESTAMP_TYPES)
    key_offsets, key_data = load_i64(context + c.KEY_OFFSETS), load_i64(context + c.KEY_DATA)
    key_valid, value_valid = load_i64(context + c.KEY_VALID), load_i64(context + c.VALUE_VALID)
    value_offsets, value_data = (
        load_i64(context + c.VALUE_OFFSETS),
        load_i64(context + c.VALUE_DATA),
    )
    header_offsets = load_i64(context + c.HEADER_OFFSETS)
    first, stop = load_i64(progress + FIRST), load_i64(progress + END)
    base_offset, last_delta = load_be64(header), load_be32(header + 23)
    log_append = load_be16(header + 21) & _LOG_APPEND
    base_timestamp = load_be64(header + 35) if log_append else load_be64(header + 27)
    count = load_be32(header + 57)
    position = payload + load_i64(progress + POSITION)
    record = load_i64(progress + RECORD)
    previous = load_i64(progress + PREVIOUS)
    status = c.DONE
    while record < count:
        length, body = read_varint32(position, end)
        if body == 0 or length < 1 or length > end - body:
            status = c.BAD_RECORD
            break
        if rows >= rows_max or length > bytes_max - used:
            store_64(progress + NEED_BYTES, length)
            store_64(progress + NEED_HEADERS, 0)
            status = c.FULL
            break
        record_end = body + length
        timestamp_delta, offset_delta, at = _record_head(body + 1, record_end)
        if at == 0:
            status = c.BAD_RECORD
            break
        if offset_delta <= previous or offset_delta > last_delta:
            status = c.BAD_OFFSET_DELTA
            break
        offset = base_offset + offset_delta
        store_64(offsets + 8 * rows, offset)
        store_64(timestamps + 8 * rows, base_timestamp + (0 if log_append else timestamp_delta))
        store_32(types + 4 * rows, 1 if log_append else 0)
        store_32(header_offsets + 4 * rows, headers)
        key_end, at = _put_sized(
            key_offsets, key_data, key_valid, rows, key_bytes, at, record_end, readable_end
        )
        if at == 0:
            status = c.BAD_RECORD
            break
        value_end, at = _put_sized(
            value_offsets, value_data, value_valid, rows, value_bytes, at, record_end, readable_end
        )
        if at == 0:
            status = c.BAD_RECORD
            break
        header_count, at = read_varint32(at, record_end)
        if at == 0 or header_count < 0 or header_count > (record_end - at) // 2:
            status = c.BAD_RECORD
            break
        headers_end, header_key_end, header_value_end = (
            headers,
            header_key_bytes,
            header_value_bytes,
        )
        if header_count > 0:
            if header_count > headers_max - headers:
                store_64(progress + NEED_BYTES, length)
                store_64(progress + NEED_HEADERS, header_count)
                status = c.FULL
                break
            headers_end, header_key_end, header_value_end, at = _put_headers(
                context,
                header_count,
                headers,
                header_key_bytes,
                header_value_bytes,
                at,
                record_end,
                readable_end,
            )
        if at != record_end:
            status = c.BAD_RECORD
            break
        if first <= offset and offset < stop:  # noqa: PLR1716  # numba compiles the chain worse
            rows += 1
            key_bytes, value_bytes, headers = key_end, value_end, headers_end
            header_key_bytes, header_value_bytes = header_key_end, header_value_end
            used += length
        previous = offset_delta
        record += 1
        position = record_end
    if status == c.DONE and position != end:
        status = c.BAD_COUNT
    store_64(context + c.ROWS, rows)
    store_64(context + c.KEY_BYTES, key_bytes)
    store_64(context + c.VALUE_BYTES, value_bytes)
    store_64(context + c.HEADERS, headers)
    store_64(context + c.HEADER_KEY_BYTES, header_key_bytes)
    store_64(context + c.HEADER_VALUE_BYTES, header_value_bytes)
    store_64(context + c.USED_BYTES, used)
    _close(context, rows, headers)
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

    COMPRESSED: the batch must be decompressed; call `decode_payload`, then go on behind it.
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
