"""Columns -> JSON lines, straight into the caller's buffer.

The texts between the values are one blob; its table is an int64 array of address and length for
each text, in the order of `TEXTS`. The first, which names topic and partition, is the caller's.

Before a row is written, its size is compared with the space left: first a quick upper bound, then,
if that is too large, the escapes are counted. A row is written whole or not at all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from logmirror.wire import kernels_columns as c
from logmirror.wire.kernels_address import (
    copy,
    inlined,
    kernel,
    load_be64,
    load_i32,
    load_i64,
    load_u8,
    shift_right,
    store_8,
    store_16,
    store_64,
)
from logmirror.wire.kernels_text import utf8_size

TEXTS: Final = (
    b"",
    b',"timestamp_ms":',
    b',"timestamp_type":"create_time"',
    b',"timestamp_type":"log_append_time"',
    b',"key":"',
    b',"value":"',
    b',"headers":[',
    b'{"key":"',
    b"]",
    b"}\n",
)
_OFFSET: Final = 0
_TIMESTAMP: Final = 1
_TYPE: Final = 2
_KEY: Final = 4
_VALUE: Final = 5
_HEADERS: Final = 6
_HEADER_KEY: Final = 7
_HEADERS_END: Final = 8
_END: Final = 9

ROW_DONE: Final = 0
ROW_FULL: Final = 1
ROW_NOT_UTF8: Final = -1
HEADER_NOT_UTF8: Final = -2

RESULT_WORDS: Final = 2
"""Bytes written, first row not written."""

_ROW_FIXED: Final = 256
"""More than all texts but the first, two 64-bit numbers, and two closing quotes take."""

_HEADER_FIXED: Final = 32
"""More than the texts and quotes of one header take."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_PAIRS: Final = np.array(
    [_ALPHABET[i >> 6] | _ALPHABET[i & 63] << 8 for i in range(4096)], np.int64
)
"""12 bits -> two base64 characters, the first in the low byte."""

_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8).astype(np.int64)
_SHORT_ESCAPES: Final = np.array(
    [{8: 98, 9: 116, 10: 110, 12: 102, 13: 114, 34: 34, 92: 92}.get(i, 0) for i in range(128)],
    np.int64,
)
"""What follows the backslash; 0: the escape is a long one."""

_ONES: Final = 0x0101010101010101
_TOPS: Final = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte
_QUOTES: Final = 0x22 * _ONES
_BACKSLASHES: Final = 0x5C * _ONES
_SPACES: Final = 0x20 * _ONES


@inlined
def _put_decimal(at: int, value: int) -> int:
    """A signed number in decimal; the address behind it."""
    if value < 0:  # the last digit apart: the smallest number has no positive twin
        digit = -(value % -10)
        rest = (value + digit) // -10
        store_8(at, 45)
        at += 1
        if rest > 0:
            at = _put_digits(at, rest)
        store_8(at, 48 + digit)
        return at + 1
    return _put_digits(at, value)


@inlined
def _put_digits(at: int, value: int) -> int:
    digits = 1
    bound = 10
    while digits < 19 and value >= bound:  # noqa: PLR2004  # 10^19 does not fit
        digits += 1
        bound *= 10
    end = at + digits
    at = end
    while at > end - digits:
        at -= 1
        rest = value // 10
        store_8(at, 48 + value - 10 * rest)
        value = rest
    return end


@inlined
def _put_escape(at: int, byte: int) -> int:
    short = _SHORT_ESCAPES[byte]
    store_8(at, 92)
    if short != 0:
        store_8(at + 1, short)
        return at + 2
    store_8(at + 1, 117)
    store_8(at + 2, 48)
    store_8(at + 3, 48)
    store_8(at + 4, _HEX[byte >> 4])
    store_8(at + 5, _HEX[byte & 15])
    return at + 6


@inlined
def _put_text(at: int, source: int, size: int) -> int:
    """JSON string content, checked to be UTF-8; the address behind it, or 0."""
    i = 0
    while i < size:
        while i + 8 <= size:  # eight plain ASCII characters at once
            word = load_i64(source + i)
            quote = word ^ _QUOTES
            backslash = word ^ _BACKSLASHES
            special = ((quote - _ONES) & ~quote) | ((backslash - _ONES) & ~backslash)
            if (special | ((word - _SPACES) & ~word) | word) & _TOPS:
                break
            store_64(at, word)
            at += 8
            i += 8
        stop = min(size, i + 8)
        while i < stop:
            byte = load_u8(source + i)
            if byte >= 0x80:  # noqa: PLR2004  # the bounds of UTF-8 and JSON
                length = utf8_size(source + i, size - i)
                if length == 0:
                    return 0
                for k in range(length):
                    store_8(at + k, load_u8(source + i + k))
                at += length
                i += length
            else:
                if byte < 32 or byte in (34, 92):  # noqa: PLR2004  # the bounds of UTF-8 and JSON
                    at = _put_escape(at, byte)
                else:
                    store_8(at, byte)
                    at += 1
                i += 1
    return at


@inlined
def _put_base64(at: int, source: int, size: int) -> int:
    i = 0
    while i + 8 <= size:  # reads 8 bytes, takes 6
        word = load_be64(source + i)
        store_64(
            at,
            _PAIRS[shift_right(word, 52)]
            | _PAIRS[(word >> 40) & 4095] << 16
            | _PAIRS[(word >> 28) & 4095] << 32
            | _PAIRS[(word >> 16) & 4095] << 48,
        )
        at += 8
        i += 6
    while i + 3 <= size:
        bits = load_u8(source + i) << 16 | load_u8(source + i + 1) << 8 | load_u8(source + i + 2)
        store_16(at, _PAIRS[bits >> 12])
        store_16(at + 2, _PAIRS[bits & 4095])
        at += 4
        i += 3
    if i < size:
        bits = load_u8(source + i) << 16
        if i + 1 < size:
            bits |= load_u8(source + i + 1) << 8
        store_16(at, _PAIRS[bits >> 12])
        store_16(at + 2, _PAIRS[bits & 4095])
        if i + 1 >= size:
            store_8(at + 2, 61)
        store_8(at + 3, 61)
        at += 4
    return at


@inlined
def _put_fixed(at: int, texts: int, index: int) -> int:
    size = load_i64(texts + 16 * index + 8)
    copy(at, load_i64(texts + 16 * index), size)
    return at + size


@inlined
def _put_value(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    at: int, offsets: int, data: int, index: int, utf8: int, closing: int
) -> int:
    """Content of one run and what closes it; the address behind it, or 0 if it is not UTF-8."""
    begin = load_i32(offsets + 4 * index)
    size = load_i32(offsets + 4 * index + 4) - begin
    if utf8:
        at = _put_text(at, data + begin, size)
        if at == 0:
            return 0
    else:
        at = _put_base64(at, data + begin, size)
    store_8(at, closing)
    return at + 1


@inlined
def _length(offsets: int, index: int) -> int:
    return load_i32(offsets + 4 * index + 4) - load_i32(offsets + 4 * index)


@inlined
def _text_size(source: int, size: int) -> int:
    """Bytes that a text takes in JSON. What is not UTF-8 counts as it is."""
    total = size
    i = 0
    while i < size:
        while i + 8 <= size:  # eight bytes without an escape at once
            word = load_i64(source + i)
            quote = word ^ _QUOTES
            backslash = word ^ _BACKSLASHES
            special = ((quote - _ONES) & ~quote) | ((backslash - _ONES) & ~backslash)
            if (special | ((word - _SPACES) & ~word)) & _TOPS:
                break
            i += 8
        stop = min(size, i + 8)
        while i < stop:
            byte = load_u8(source + i)
            if byte < 32 or byte in (34, 92):  # noqa: PLR2004  # the bounds of JSON
                total += 1 if _SHORT_ESCAPES[byte] != 0 else 5
            i += 1
    return total


@inlined
def _value_max(offsets: int, data: int, index: int, utf8: int, measured: int) -> int:
    size = _length(offsets, index)
    if utf8 == 0:
        return (size + 2) // 3 * 4
    if measured == 0:
        return 6 * size  # every byte escaped in the long form
    return _text_size(data + load_i32(offsets + 4 * index), size)


@inlined
def _row_max(context: int, texts: int, row: int, utf8: int, measured: int) -> int:
    """The most bytes that a row can take: quickly, or measured, which reads every text.

    Measured, only the allowance for fixed texts and numbers is not exact.
    """
    total = _ROW_FIXED + load_i64(texts + 8)
    offsets, data = load_i64(context + c.KEY_OFFSETS), load_i64(context + c.KEY_DATA)
    total += _value_max(offsets, data, row, utf8, measured)
    offsets, data = load_i64(context + c.VALUE_OFFSETS), load_i64(context + c.VALUE_DATA)
    total += _value_max(offsets, data, row, utf8, measured)
    edges = load_i64(context + c.HEADER_OFFSETS)
    first, end = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
    if end > first:
        offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
        data = load_i64(context + c.HEADER_KEY_DATA)
        values = load_i64(context + c.HEADER_VALUE_OFFSETS)
        total += (end - first) * (_HEADER_FIXED + 4)
        total += (load_i32(values + 4 * end) - load_i32(values + 4 * first)) * 4 // 3
        if measured == 0:
            total += 6 * (load_i32(offsets + 4 * end) - load_i32(offsets + 4 * first))
        else:
            for header in range(first, end):
                total += _value_max(offsets, data, header, 1, 1)
    return total


@inlined
def _put_headers(at: int, context: int, texts: int, row: int) -> int:
    """The headers of a row that has some; the address behind them, or 0 if a key is not UTF-8."""
    edges = load_i64(context + c.HEADER_OFFSETS)
    key_offsets = load_i64(context + c.HEADER_KEY_OFFSETS)
    key_data = load_i64(context + c.HEADER_KEY_DATA)
    value_offsets = load_i64(context + c.HEADER_VALUE_OFFSETS)
    value_data = load_i64(context + c.HEADER_VALUE_DATA)
    value_valid = load_i64(context + c.HEADER_VALUE_VALID)
    first, end = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
    at = _put_fixed(at, texts, _HEADERS)
    for header in range(first, end):
        if header > first:
            store_8(at, 44)
            at += 1
        at = _put_fixed(at, texts, _HEADER_KEY)
        at = _put_value(at, key_offsets, key_data, header, 1, 34)
        if at == 0:
            return 0
        if load_u8(value_valid + header):
            at = _put_fixed(at, texts, _VALUE)
            at = _put_value(at, value_offsets, value_data, header, 0, 34)
        store_8(at, 125)
        at += 1
    return _put_fixed(at, texts, _HEADERS_END)


@inlined
def _put_row(at: int, context: int, texts: int, row: int, utf8: int) -> int:
    """One line; the address behind it, or a negative status."""
    at = _put_fixed(at, texts, _OFFSET)
    at = _put_decimal(at, load_i64(load_i64(context + c.OFFSETS) + 8 * row))
    timestamp = load_i64(load_i64(context + c.TIMESTAMPS) + 8 * row)
    if timestamp != -1:
        at = _put_fixed(at, texts, _TIMESTAMP)
        at = _put_decimal(at, timestamp)
    log_append = load_i32(load_i64(context + c.TIMESTAMP_TYPES) + 4 * row) & 1
    at = _put_fixed(at, texts, _TYPE + log_append)
    if load_u8(load_i64(context + c.KEY_VALID) + row):
        offsets, data = load_i64(context + c.KEY_OFFSETS), load_i64(context + c.KEY_DATA)
        at = _put_value(_put_fixed(at, texts, _KEY), offsets, data, row, utf8, 34)
        if at == 0:
            return ROW_NOT_UTF8
    if load_u8(load_i64(context + c.VALUE_VALID) + row):
        offsets, data = load_i64(context + c.VALUE_OFFSETS), load_i64(context + c.VALUE_DATA)
        at = _put_value(_put_fixed(at, texts, _VALUE), offsets, data, row, utf8, 34)
        if at == 0:
            return ROW_NOT_UTF8
    if _length(load_i64(context + c.HEADER_OFFSETS), row) > 0:
        at = _put_headers(at, context, texts, row)
        if at == 0:
            return HEADER_NOT_UTF8
    return _put_fixed(at, texts, _END)


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def put_lines(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    out: int,
    capacity: int,
    context: int,
    start: int,
    stop: int,
    texts: int,
    utf8: int,
    result: int,
) -> int:
    """Write rows start..stop as lines; ROW_DONE, ROW_FULL or why the row `result[1]` cannot be."""
    at = out
    row = start
    status = ROW_DONE
    if start < 0 or stop > load_i64(context + c.ROWS):
        stop = start
    while row < stop:
        room = capacity - (at - out)
        if (
            _row_max(context, texts, row, utf8, 0) > room
            and _row_max(context, texts, row, utf8, 1) > room
        ):
            status = ROW_FULL
            break
        end = _put_row(at, context, texts, row, utf8)
        if end < 0:
            status = end
            break
        at = end
        row += 1
    store_64(result, at - out)
    store_64(result + 8, row)
    return status
