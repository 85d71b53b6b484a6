"""Change the headers of whole batches, and patch their checksums without reading the records.

Attributes, producer id, epoch and base sequence lie inside the CRC. A CRC is linear, so the new one
follows from the 40 header bytes behind it alone:

    crc' = crc ^ advance(register(old 40 bytes) ^ register(new 40 bytes), bytes behind the header)

where both registers start from 0. The source's checksum still protects the records: a batch that
was damaged in transit still fails its checksum afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.wire.kernels_address import (
    inlined,
    kernel,
    load_be16,
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

BAD_BATCH: Final = -1
"""What lies there is not a whole batch of format v2; it was not touched."""

_HEADER: Final = 61
_CRC_START: Final = 21
_MAGIC: Final = 2
_CODEC_BITS: Final = 7
_TRANSACTIONAL: Final = 16


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


@inlined
def _patch(  # noqa: PLR0913, PLR0917  # a compiled kernel takes plain words
    batch: int, size: int, attributes: int, producer_id: int, producer_epoch: int, sequence: int
) -> None:
    before = _register_of_header(batch)
    store_be16(batch + 21, attributes)
    store_be64(batch + 43, producer_id)
    store_be16(batch + 51, producer_epoch)
    store_be32(batch + 53, sequence)
    changed = before ^ _register_of_header(batch)
    if changed:
        store_be32(batch + 17, load_be32(batch + 17) ^ _advance_zeros(changed, size - _HEADER))


@inlined
def _is_batch(batch: int, size: int) -> bool:
    """Whether exactly one batch fills the `size` bytes."""
    return size >= _HEADER and load_be32(batch + 8) == size - 12 and load_u8(batch + 16) == _MAGIC


@kernel("int64(int64,int64,int64,int64,int64)")
def patch_producer(
    batch: int, size: int, producer_id: int, producer_epoch: int, sequence: int
) -> int:
    """Give the one batch in the `size` bytes at `batch` a producer; 0 or BAD_BATCH."""
    if not _is_batch(batch, size):
        return BAD_BATCH
    _patch(batch, size, load_be16(batch + 21), producer_id, producer_epoch, sequence)
    return 0


@kernel("int64(int64,int64,int64,int64,int64)")
def patch_transactional(
    batch: int, size: int, producer_id: int, producer_epoch: int, sequence: int
) -> int:
    """As `patch_producer`, and say that the batch belongs to a transaction of that producer."""
    if not _is_batch(batch, size):
        return BAD_BATCH
    attributes = load_be16(batch + 21) | _TRANSACTIONAL
    _patch(batch, size, attributes, producer_id, producer_epoch, sequence)
    return 0


@kernel("int64(int64,int64,int64,int64)")
def patch_listed(base: int, size: int, pieces: int, count: int) -> int:
    """Make batches of a log into batches of a producer that has no id yet, where they lie.

    Base offset 0, no leader epoch, no producer; of the attributes only the codec stays, so that
    the batch is in no transaction. A delete horizon goes without harm: the base timestamp that it
    took the place of is what the records' deltas count from ever since.

    Args:
        base: Address of the buffer that was scanned.
        size: Its bytes.
        pieces: Address of a list of pieces (`kernels_rebatch`).
        count: Its rows; those not in the source are passed over.

    Returns:
        0, or BAD_BATCH: the batches before it in the list are done.
    """
    for piece in range(count):
        row = pieces + 48 * piece
        if load_i64(row + 16) == 0:
            continue
        at, whole = load_i64(row + 24), load_i64(row + 32)
        if at < 0 or whole < _HEADER or at > size - whole or not _is_batch(base + at, whole):
            return BAD_BATCH
        batch = base + at
        store_be64(batch, 0)
        store_be32(batch + 12, -1)
        _patch(batch, whole, load_be16(batch + 21) & _CODEC_BITS, -1, -1, -1)
    return 0
