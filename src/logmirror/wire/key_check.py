"""Finds a record without a key in a batch whose structure was checked before.

A compacted topic accepts no record without a key. Plain Python takes about a microsecond per
record; for many records there is a kernel, which takes half a second to load.
"""

from __future__ import annotations

from typing import Final

QUICK_RECORDS: Final = 1000
"""Records that plain Python checks in about a millisecond."""


def find_without_key(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
    """Return the number of the first record without a key; -1: all have one.

    Args:
        body: The records, decompressed, from `start` to its end.
        start: Position of the first record.
        count: As the batch header says; as many were checked.
    """
    if count > QUICK_RECORDS:
        from logmirror.wire import kernels_check, scan  # noqa: PLC0415  # the compiler, see above

        address = scan.address_of(scan.as_bytes_array(body)) + start
        return kernels_check.find_without_key(address, len(body) - start, count)
    return find_without_key_slowly(body, start, count)


def find_without_key_slowly(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
    """Do the same without the kernel."""
    position = start
    for number in range(count):
        pattern, position = _varint(body, position)
        end = position + (pattern >> 1)
        _, position = _varint(body, position + 1)  # behind the attributes: the timestamp delta
        _, position = _varint(body, position)  # the offset delta
        pattern, position = _varint(body, position)
        if pattern & 1:  # a negative length
            return number
        position = end
    return -1


def _varint(body: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """Return the bits of a varint, not unzigzagged, and the position behind it."""
    pattern = shift = 0
    while True:
        byte = body[position]
        position += 1
        pattern |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004  # the continuation bit
            return pattern, position
        shift += 7
