"""Checks the records of one batch against its header; loads the compiler only if that pays.

Plain Python takes about a microsecond per record, the kernel (`kernels_check`) a hundredth of it.
Loading the kernel takes half a second and 90 MiB. So a process begins without it, and loads it for
a batch of many records, or when many records arrive in a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK_RECORDS: Final = 1000
"""Records that plain Python checks in about a millisecond."""

KERNEL_BATCH_RECORDS: Final = 200_000
"""The kernel is loaded for a batch of as many records."""

KERNEL_RECORDS_PER_S: Final = 50_000
"""The kernel is loaded when plain Python checks as many records in a second: 5 % of a processor."""

_LEAST_RECORD_BYTES: Final = 7


class RecordCheck:
    """Checks batches, and counts their records until the kernel is loaded.

    Safe to call from several threads; a count that is lost in a race only delays the kernel.

    Attributes:
        on_busy: Called once, in any thread, when the kernel would pay. It must not block.
    """

    def __init__(self) -> None:
        self._kernel: Callable[[bytes | bytearray | memoryview, int, int], int] | None = None
        self._records = 0
        self._is_wanted = False
        self.on_busy: Callable[[], object] | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel is loaded."""
        return self._kernel is not None

    def count_sound(self, body: bytes | bytearray | memoryview, start: int, count: int) -> int:
        """How many records from the front are sound, as `count_sound_records`."""
        possible = min(count, (len(body) - start) // _LEAST_RECORD_BYTES)
        if possible >= KERNEL_BATCH_RECORDS:
            self.compile()
        if self._kernel is not None:
            return self._kernel(body, start, count)
        self._records += possible
        if self._records >= KERNEL_RECORDS_PER_S and self.on_busy and not self._is_wanted:
            self._is_wanted = True
            self.on_busy()
        return count_sound_records(bytes(body), start, count)

    def begin_second(self) -> None:
        """Count the records of the next second; call it once a second."""
        self._records = 0

    def compile(self) -> None:
        """Load the kernel. Blocks for half a second, and longer before it was ever compiled."""
        if self._kernel is not None:
            return
        import numpy as np  # noqa: PLC0415  # see above

        from logmirror.wire import kernels_check  # noqa: PLC0415  # the compiler

        def count_sound(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
            if not len(body):
                return 0
            array = np.frombuffer(body, np.uint8)
            address: int = array.__array_interface__["data"][0]
            return kernels_check.count_sound_records(address + start, len(body) - start, count)

        self._kernel = count_sound


def count_sound_records(body: bytes, start: int, count: int) -> int:
    """How many records from the front are sound; `count` if all are and nothing follows, else less.

    Args:
        body: The records, decompressed, from `start` to its end.
        start: Position of the first record.
        count: As the batch header says.
    """
    position, size = start, len(body)
    for number in range(count):
        try:
            # Most lengths take one or two bytes; a zigzag varint of a positive length is even.
            byte = body[position]
            if byte < 128:  # noqa: PLR2004  # the continuation bit
                length, position = byte, position + 1
            elif (high := body[position + 1]) < 128:  # noqa: PLR2004  # the continuation bit
                length, position = byte & 127 | high << 7, position + 2
            else:
                length, position = _varint(body, position, size, 28, 15)
            end = position + (length >> 1)
            if length & 1 or end > size:
                return number
            position = _end_of_record(body, position, end, number)
        except IndexError:
            return number
        if position != end:
            return number
    return count if position == size else -1


def _end_of_record(body: bytes, position: int, end: int, number: int) -> int:
    """Where the fields of a record end, which is `end` if it is sound.

    Raises:
        IndexError: A field goes beyond the body. One that goes beyond `end` only is noticed by the
            caller, because no field makes the position smaller.
    """
    position += 1  # attributes, which mean nothing
    if body[position] < 128:  # noqa: PLR2004  # the continuation bit
        position += 1
    else:
        _, position = _varint(body, position, end, 63, 1)
    byte = body[position]
    if byte < 128:  # noqa: PLR2004  # the continuation bit
        position += 1
    else:
        byte, position = _varint(body, position, end, 28, 15)
    if byte != number << 1:
        return -1
    for _ in range(2):  # key and value, either may be null
        byte = body[position]
        if byte < 128:  # noqa: PLR2004  # the continuation bit
            position += 1
        else:
            byte, position = _varint(body, position, end, 28, 15)
        if not byte & 1:
            position += byte >> 1
        elif byte != 1:
            return -1
    if position == end - 1 and not body[position]:
        return end  # no headers
    return _end_of_headers(body, position, end)


def _end_of_headers(body: bytes, position: int, end: int) -> int:
    count, position = _varint(body, position, end, 28, 15)
    if count & 1 or count >> 1 > (end - position) // 2:
        return -1
    for _ in range(count >> 1):
        length, position = _varint(body, position, end, 28, 15)
        if length & 1:
            return -1
        length, position = _varint(body, position + (length >> 1), end, 28, 15)
        if not length & 1:
            position += length >> 1
        elif length != 1:
            return -1
    return position


def _varint(
    body: bytes, position: int, end: int, last_shift: int, last_byte_max: int
) -> tuple[int, int]:
    """Return the bits of a varint, not unzigzagged, and the position behind it.

    Raises:
        IndexError: It is cut off, too long or too large.
    """
    pattern = shift = 0
    while position < end:
        byte = body[position]
        position += 1
        if shift == last_shift and byte > last_byte_max:
            break
        pattern |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004  # the continuation bit
            return pattern, position
        shift += 7
    raise IndexError
