"""Timestamps and offsets of one batch's records, in plain Python: for lookups by timestamp."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from logmirror.errors import CorruptionError
from logmirror.wire.compression import Codec, decompress

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER: Final = Struct(">q13xhiqq14xi")
_HEADER_BYTES: Final = 61
_CODEC_BITS: Final = 7
_LOG_APPEND_TIME: Final = 8
_CONTINUES: Final = 128
_MASK_64: Final = 2**64 - 1
_SIGN_64: Final = 2**63


def record_times(batch: bytes, *, max_body_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield timestamp in ms and offset of each record of a stored batch, in order.

    Args:
        batch: The whole batch. It was checked when it was stored.
        max_body_bytes: Limit for its decompressed size.

    Raises:
        CorruptionError: The records cannot be read.
    """
    base_offset, attributes, _, base_ms, max_ms, count = _HEADER.unpack_from(batch, 0)
    codec = Codec(attributes & _CODEC_BITS)
    body = bytes(decompress(codec, memoryview(batch)[_HEADER_BYTES:], max_bytes=max_body_bytes))
    position = 0
    try:
        for _ in range(count):
            length, position = _varint(body, position)
            delta_ms, at = _varint(body, position + 1)
            delta, _ = _varint(body, at)
            yield (
                max_ms if attributes & _LOG_APPEND_TIME else _wrapped(base_ms + delta_ms),
                base_offset + delta,
            )
            position += length
    except IndexError as error:
        raise CorruptionError("record is cut off", offset=base_offset, position=position) from error


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Return a zigzag varint and the position behind it."""
    pattern = shift = 0
    while True:
        byte = body[position]
        position += 1
        pattern |= (byte & 127) << shift
        if byte < _CONTINUES:
            return (pattern >> 1) ^ -(pattern & 1), position
        shift += 7


def _wrapped(timestamp_ms: int) -> int:
    """A sum in 64 bits that wrap, as in Kafka's own arithmetic."""
    return ((timestamp_ms + _SIGN_64) & _MASK_64) - _SIGN_64
