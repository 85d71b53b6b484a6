"""Give whole batches another producer, and patch their checksum without reading the records.

Producer id, epoch and base sequence lie inside the CRC. A CRC is linear, so the new one follows
from the 40 header bytes behind it alone:

    crc' = crc ^ advance(register(old 40 bytes) ^ register(new 40 bytes), bytes behind the header)

where both registers start from 0. The source's checksum goes on guarding the records: a batch that
was damaged on the way is still wrong afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_be32,
    load_i64,
    load_u8,
    store_be16,
    store_be32,
    store_be64,
)
from logmirror.wire.kernels_crc32c import advance, byte_tables, one_zero_byte, square, step

if TYPE_CHECKING:
    import numpy.typing as npt

_HEADER: Final = 61
_CRC_START: Final = 21
_SEQUENCE_MASK: Final = 0x7FFFFFFF


def _power_tables() -> npt.NDArray[np.int64]:
    """int64[32, 4, 256]: advance a register over 2^k zero bytes."""
    operator, tables = one_zero_byte(), []
    for _ in range(32):
        tables.append(byte_tables(operator))
        operator = square(operator)
    return np.array(tables)


_POWERS: Final = _power_tables()


@inlined
def _advance_zeros(register: int, count: int) -> int:
    power = 0
    while count:
        if count & 1:
            register = advance(_POWERS[power], register)
        count >>= 1
        power += 1
    return register


@inlined
def _register_of_header(batch: int) -> int:
    register = 0
    for word in range(5):
        register = step(register, load_i64(batch + _CRC_START + 8 * word))
    return register


@kernel("int64(int64,int64,int64,int64,int64)")
def patch_producer(
    base: int, size: int, producer_id: int, producer_epoch: int, sequence: int
) -> int:
    """Give every whole batch of the `size` bytes at `base` a producer, sequences from one on.

    Sequences advance by offsets, not by records, so that a compacted batch keeps its place, and
    wrap from 2^31 - 1 to 0.

    Returns:
        The sequence that the next batch would get; -1 where a length is wrong or the magic is not
        2, and then the batches before are patched and that one is not touched.
    """
    position = 0
    while size - position >= _HEADER:
        batch = base + position
        whole = 12 + load_be32(batch + 8)
        if whole < _HEADER or load_u8(batch + 16) != 2:  # noqa: PLR2004  # the magic
            return -1
        if whole > size - position:
            break
        before = _register_of_header(batch)
        store_be64(batch + 43, producer_id)
        store_be16(batch + 51, producer_epoch)
        store_be32(batch + 53, sequence)
        change = _advance_zeros(before ^ _register_of_header(batch), whole - _HEADER)
        store_be32(batch + 17, load_be32(batch + 17) ^ change)
        sequence = (sequence + load_be32(batch + 23) + 1) & _SEQUENCE_MASK
        position += whole
    return sequence
