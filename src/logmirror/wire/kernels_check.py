"""Checks the records of one batch against its header, without decoding them.

A broker stores a batch as opaque bytes, so every later reader would fail on a malformed one. The
check costs a few nanoseconds per record and reads no key or value.

A producer's batch is stricter than one that was compacted: its offset deltas are 0, 1, 2, ...
"""

from __future__ import annotations

from logmirror.wire.kernels_address import inlined, kernel, read_varint32, read_varint64


@inlined
def skip_field(position: int, end: int, least: int) -> int:
    """Where a varint length and its bytes end; 0 if they do not fit, or after such a 0.

    `least` is the smallest length allowed: -1, which means null, or 0.
    """
    if position == 0:
        return 0
    length, position = read_varint32(position, end)
    if position == 0 or length < least or length > end - position:
        return 0
    return position + max(0, length)


@inlined
def skip_headers(position: int, end: int) -> int:
    """Where the headers of a record end; 0 as in `skip_field`."""
    if position == 0:
        return 0
    count, position = read_varint32(position, end)
    if position == 0 or count < 0 or count > (end - position) // 2:
        return 0
    for _ in range(count):
        position = skip_field(skip_field(position, end, 0), end, -1)
    return position


@inlined
def _is_sound(position: int, end: int, expected_delta: int) -> bool:
    """Whether one record, without its length, fills its bytes exactly."""
    if position >= end:
        return False
    _, position = read_varint64(position + 1, end)  # one byte of attributes, which means nothing
    if position == 0:
        return False
    delta, position = read_varint32(position, end)
    if position == 0 or delta != expected_delta:
        return False
    position = skip_field(skip_field(position, end, -1), end, -1)
    return skip_headers(position, end) == end


@kernel("int64(int64,int64,int64)")
def count_sound_records(position: int, size: int, count: int) -> int:
    """How many records from the front are sound; `count` if all are and nothing follows, else less.

    Args:
        position: Address of the first record, decompressed.
        size: Bytes of all records.
        count: As the batch header says.
    """
    end = position + size
    for number in range(count):
        length, position = read_varint32(position, end)
        if position == 0 or length < 0 or length > end - position:
            return number
        if not _is_sound(position, position + length, number):
            return number
        position += length
    return count if position == end else -1


@kernel("int64(int64,int64,int64)")
def find_without_key(position: int, size: int, count: int) -> int:
    """The number of the first record without a key, -1 if all have one; the records are sound.

    Args:
        position: Address of the first record, decompressed.
        size: Bytes of all records.
        count: As the batch header says.
    """
    end = position + size
    for number in range(count):
        length, position = read_varint32(position, end)
        if position == 0 or length < 1 or length > end - position:
            return number
        behind = position + length
        _, at = read_varint64(position + 1, behind)
        if at != 0:
            _, at = read_varint32(at, behind)
        if at != 0:
            length, at = read_varint32(at, behind)
        if at == 0 or length < 0:
            return number
        position = behind
    return -1
