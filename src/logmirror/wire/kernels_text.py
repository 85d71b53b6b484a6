"""Checks the values of an Arrow `binary` column for UTF-8 or JSON.

UTF-8 is that of RFC 3629: no surrogates, nothing overlong. JSON is one value of RFC 8259 with
white space around it: no byte order mark, no comments, numbers of any size, escapes of half a
surrogate allowed, names that appear twice too. `DEPTH_MAX` is the one bound that we add.

An invalid value is reported by the address of the first invalid byte.
"""

from __future__ import annotations

from typing import Final

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_i32,
    load_i64,
    load_u8,
    store_8,
    store_64,
)

DEPTH_MAX: Final = 1000
"""Arrays and objects inside each other; readers of JSON have such bounds, from 128 upwards."""

ALL_GOOD: Final = 0
NOT_UTF8: Final = -1
NOT_JSON: Final = -2
TOO_DEEP: Final = -3

RESULT_WORDS: Final = 2
"""The first bad row, and the position of the fault in its value."""

_ONES: Final = 0x0101010101010101
_TOPS: Final = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte
_QUOTES: Final = 0x22 * _ONES
_BACKSLASHES: Final = 0x5C * _ONES
_SPACES: Final = 0x20 * _ONES

# What may come next in a JSON text.
_VALUE: Final = 0
_ITEM_OR_END: Final = 1
_NAME_OR_END: Final = 2
_NAME: Final = 3
_COMMA_OR_END: Final = 4

_TRUE: Final = int.from_bytes(b"true", "little")
_ALSE: Final = int.from_bytes(b"alse", "little")
_NULL: Final = int.from_bytes(b"null", "little")

_OPEN_ARRAY: Final = 0x5B
_OPEN_OBJECT: Final = 0x7B
_CLOSE_ARRAY: Final = 0x5D
_CLOSE_OBJECT: Final = 0x7D


@inlined
def utf8_size(source: int, left: int) -> int:  # noqa: C901  # the table of RFC 3629
    """Bytes of the character that begins at a byte >= 0x80; 0: not UTF-8."""
    lead = load_u8(source)
    low, high, size = 0x80, 0xBF, 2
    if lead < 0xC2 or lead > 0xF4:  # noqa: PLR2004  # the bounds of UTF-8
        return 0
    if lead >= 0xF0:  # noqa: PLR2004  # the bounds of UTF-8
        size = 4
        if lead == 0xF0:  # noqa: PLR2004  # overlong
            low = 0x90
        elif lead == 0xF4:  # noqa: PLR2004  # beyond U+10FFFF
            high = 0x8F
    elif lead >= 0xE0:  # noqa: PLR2004  # the bounds of UTF-8
        size = 3
        if lead == 0xE0:  # noqa: PLR2004  # overlong
            low = 0xA0
        elif lead == 0xED:  # noqa: PLR2004  # surrogates
            high = 0x9F
    if size > left:
        return 0
    second = load_u8(source + 1)
    if second < low or second > high:
        return 0
    for k in range(2, size):
        if load_u8(source + k) & 0xC0 != 0x80:  # noqa: PLR2004  # the bounds of UTF-8
            return 0
    return size


@inlined
def _all_ascii(at: int, end: int) -> int:
    """How far a run is ASCII, in whole blocks of 64 bytes: the address behind the last of them."""
    while at + 64 <= end:
        word = 0
        for k in range(0, 64, 8):
            word |= load_i64(at + k)
        if word & _TOPS:
            return at
        at += 64
    return at


@inlined
def _utf8_fault(at: int, end: int) -> int:
    """Address of the first byte that is no UTF-8; 0: there is none."""
    while at < end:
        while at + 8 <= end and load_i64(at) & _TOPS == 0:
            at += 8
        stop = min(end, at + 8)
        while at < stop:
            if load_u8(at) < 0x80:  # noqa: PLR2004  # the bounds of ASCII
                at += 1
            else:
                size = utf8_size(at, end - at)
                if size == 0:
                    return at
                at += size
    return 0


@inlined
def _after_spaces(at: int, end: int) -> int:
    while at < end and load_u8(at) in (32, 10, 13, 9):  # what RFC 8259 calls white space
        at += 1
    return at


@inlined
def _is_hex(byte: int) -> bool:
    return 48 <= byte <= 57 or 65 <= byte <= 70 or 97 <= byte <= 102  # noqa: PLR2004  # 0-9 A-F a-f


@inlined
def _after_escape(at: int, end: int) -> int:
    """From a backslash to behind what it escapes; negative: the address of a fault."""
    if at + 1 >= end:
        return -end
    byte = load_u8(at + 1)
    if byte != 117:  # noqa: PLR2004  # u
        known = byte in (34, 92, 47, 98, 102, 110, 114, 116)  # quote, backslash, slash, b f n r t
        return at + 2 if known else -(at + 1)
    for k in range(2, 6):
        if at + k >= end:
            return -end
        if not _is_hex(load_u8(at + k)):
            return -(at + k)
    return at + 6


@inlined
def _after_string(at: int, end: int) -> int:
    """From behind a quote to behind the one that closes; negative: the address of a fault."""
    while True:
        while at + 8 <= end:  # eight plain characters at once
            word = load_i64(at)
            quote = word ^ _QUOTES
            backslash = word ^ _BACKSLASHES
            special = ((quote - _ONES) & ~quote) | ((backslash - _ONES) & ~backslash)
            if (special | ((word - _SPACES) & ~word)) & _TOPS:
                break
            at += 8
        stop = min(end, at + 8)
        while at < stop:
            byte = load_u8(at)
            if byte == 34:  # noqa: PLR2004  # a quote
                return at + 1
            if byte < 32:  # noqa: PLR2004  # the bound of control characters
                return -at
            if byte == 92:  # noqa: PLR2004  # a backslash
                at = _after_escape(at, end)
                if at < 0:
                    return at
            else:
                at += 1
        if at >= end:
            return -end


@inlined
def _after_digits(at: int, end: int) -> int:
    """Behind one digit or more; negative: the address of what is none."""
    begin = at
    while at < end and 48 <= load_u8(at) <= 57:  # noqa: PLR2004  # 0-9
        at += 1
    return at if at > begin else -at


@inlined
def _after_number(at: int, end: int) -> int:
    """Behind a number; negative: the address of a fault."""
    if load_u8(at) == 45:  # noqa: PLR2004  # minus
        at += 1
    if at < end and load_u8(at) == 48:  # noqa: PLR2004  # a zero stands alone
        at += 1
    else:
        at = _after_digits(at, end)
    if 0 < at < end and load_u8(at) == 46:  # noqa: PLR2004  # point
        at = _after_digits(at + 1, end)
    if 0 < at < end and load_u8(at) | 32 == 101:  # noqa: PLR2004  # e, E
        at += 1
        if at < end and load_u8(at) in (43, 45):  # plus, minus
            at += 1
        at = _after_digits(at, end)
    return at


@inlined
def _after_scalar(at: int, end: int) -> int:
    """From the first byte of a text, a number or a word to behind it; negative: of a fault."""
    byte = load_u8(at)
    if byte == 34:  # noqa: PLR2004  # a quote
        return _after_string(at + 1, end)
    if byte == 116 and at + 4 <= end and load_i32(at) == _TRUE:  # noqa: PLR2004  # t
        return at + 4
    if byte == 110 and at + 4 <= end and load_i32(at) == _NULL:  # noqa: PLR2004  # n
        return at + 4
    if byte == 102 and at + 5 <= end and load_i32(at + 1) == _ALSE:  # noqa: PLR2004  # f
        return at + 5
    if byte == 45 or 48 <= byte <= 57:  # noqa: PLR2004  # minus or digit
        return _after_number(at, end)
    return -at


@inlined
def _after_name(at: int, end: int) -> int:
    """From the quote of an object's name to behind its colon; negative: the address of a fault."""
    at = _after_string(at + 1, end)
    if at < 0:
        return at
    at = _after_spaces(at, end)
    if at >= end or load_u8(at) != 58:  # noqa: PLR2004  # colon
        return -at
    return at + 1


@inlined
def _json_fault(  # noqa: C901, PLR0912  # a grammar, state by state
    at: int, end: int, stack: int
) -> tuple[int, int]:
    """Why UTF-8 text is not one JSON value, and at which address.

    `stack`: DEPTH_MAX bytes for what closes each array and object that is open.
    """
    depth, state = 0, _VALUE
    while True:
        at = _after_spaces(at, end)
        if at >= end:
            is_whole = state == _COMMA_OR_END and depth == 0
            return (ALL_GOOD if is_whole else NOT_JSON), end
        byte = load_u8(at)
        if state == _COMMA_OR_END:
            closing = load_u8(stack + depth - 1) if depth > 0 else 0
            if byte == 44 and depth > 0:  # noqa: PLR2004  # a comma
                state = _NAME if closing == _CLOSE_OBJECT else _VALUE
            elif byte == closing and depth > 0:
                depth -= 1
            else:
                return NOT_JSON, at
            at += 1
        elif (state == _ITEM_OR_END and byte == _CLOSE_ARRAY) or (
            state == _NAME_OR_END and byte == _CLOSE_OBJECT
        ):
            depth -= 1
            state = _COMMA_OR_END
            at += 1
        elif state in (_NAME, _NAME_OR_END):
            if byte != 34:  # noqa: PLR2004  # a quote
                return NOT_JSON, at
            at = _after_name(at, end)
            if at < 0:
                return NOT_JSON, -at
            state = _VALUE
        elif byte in (_OPEN_ARRAY, _OPEN_OBJECT):
            if depth == DEPTH_MAX:
                return TOO_DEEP, at
            store_8(stack + depth, byte + 2)  # what closes it is two code points further
            depth += 1
            state = _ITEM_OR_END if byte == _OPEN_ARRAY else _NAME_OR_END
            at += 1
        else:
            at = _after_scalar(at, end)
            if at < 0:
                return NOT_JSON, -at
            state = _COMMA_OR_END


@kernel("int64(int64,int64,int64,int64,int64)")
def find_not_utf8(offsets: int, data: int, start: int, stop: int, result: int) -> int:
    """Find the first of the values start..stop-1 that is not UTF-8; ALL_GOOD or NOT_UTF8.

    Args:
        offsets: int32[stop + 1], into the data; a null is empty.
        data: uint8, in the order of the rows.
        start: First row.
        stop: First row not looked at any more.
        result: int64[RESULT_WORDS].
    """
    row = start
    if start < stop:
        # What is ASCII throughout needs no look at where values end.
        plain = _all_ascii(
            data + load_i32(offsets + 4 * start), data + load_i32(offsets + 4 * stop)
        )
        while row < stop and data + load_i32(offsets + 4 * row + 4) <= plain:
            row += 1
    while row < stop:
        begin = data + load_i32(offsets + 4 * row)
        fault = _utf8_fault(begin, data + load_i32(offsets + 4 * row + 4))
        if fault:
            store_64(result, row)
            store_64(result + 8, fault - begin)
            return NOT_UTF8
        row += 1
    return ALL_GOOD


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def find_not_json(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    offsets: int, data: int, valid: int, start: int, stop: int, stack: int, result: int
) -> int:
    """Find the first of the values start..stop-1 that is not JSON; they are UTF-8.

    ALL_GOOD, NOT_JSON or TOO_DEEP. See `find_not_utf8`.

    Args:
        offsets: See there; alike `data`, `start`, `stop`, `result`.
        data: See there.
        valid: uint8[stop]; 0: the value is null, which passes.
        start: See there.
        stop: See there.
        stack: uint8[DEPTH_MAX], used.
        result: See there.
    """
    for row in range(start, stop):
        if load_u8(valid + row):
            begin = data + load_i32(offsets + 4 * row)
            status, fault = _json_fault(begin, data + load_i32(offsets + 4 * row + 4), stack)
            if status != ALL_GOOD:
                store_64(result, row)
                store_64(result + 8, fault - begin)
                return status
    return ALL_GOOD
