"""The header of a record batch (format v2) and its checksum, in plain Python.

Layout of a batch, big-endian, 61 bytes of header and then the records, compressed as a whole:

    0   int64   base offset             27  int64   base timestamp, ms
    8   int32   bytes behind this one   35  int64   max timestamp, ms
    12  int32   leader epoch            43  int64   producer id, -1: none
    16  int8    magic, 2                51  int16   producer epoch
    17  uint32  CRC-32C of 21..end      53  int32   base sequence
    21  int16   attributes              57  int32   record count
    23  int32   last offset - base      61  the records

Attributes: bits 0-2 codec, 3 log-append time, 4 transactional, 5 control, 6 the base timestamp is a
delete horizon. Bits 7-15 are not used by Kafka; readers ignore them, and so do we.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from logmirror.errors import CorruptionError
from logmirror.model import TimestampType

HEADER_SIZE: Final = 61
"""Bytes before the records."""

CRC_START: Final = 21
LENGTH_END: Final = 12
MAGIC: Final = 2
FLAG_LOG_APPEND: Final = 8
FLAG_TRANSACTIONAL: Final = 16
FLAG_CONTROL: Final = 32
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")


class MarkerType(enum.IntEnum):
    """How a transaction marker ends its transaction."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHeader:
    """The header of one batch, fields as in the module's layout."""

    position: int
    """Where the batch begins in its buffer."""

    base_offset: int
    batch_length: int
    """Bytes behind the length field; `size_bytes` is the whole."""

    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole batch."""
        return LENGTH_END + self.batch_length

    @property
    def last_offset(self) -> int:
        """Offset of the last position that the batch covers."""
        return self.base_offset + self.last_offset_delta

    @property
    def timestamp_type(self) -> TimestampType:
        """Who set the timestamps."""
        return TimestampType((self.attributes & FLAG_LOG_APPEND) != 0)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return (self.attributes & FLAG_TRANSACTIONAL) != 0

    @property
    def is_control(self) -> bool:
        """Whether the batch holds a marker instead of data."""
        return (self.attributes & FLAG_CONTROL) != 0


def crc32c_reference(data: bytes) -> int:
    """CRC-32C, bit by bit in a table of 256."""
    register = 0xFFFFFFFF
    for byte in data:
        register = (register >> 8) ^ _CRC_TABLE[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901  # a register
        table.append(value)
    return table


_CRC_TABLE: Final = _crc_table()


def parse_header(buffer: bytes | bytearray | memoryview, position: int) -> BatchHeader:
    """Read the 61 bytes at `position`, judging nothing.

    Raises:
        CorruptionError: Fewer than 61 bytes are left (fact `position`).
    """
    if position < 0 or position + HEADER_SIZE > len(buffer):
        raise CorruptionError("record batch header is cut off", position=position, why="length")
    names = (
        *("base_offset", "batch_length", "leader_epoch", "magic", "crc", "attributes"),
        *("last_offset_delta", "base_timestamp_ms", "max_timestamp_ms", "producer_id"),
        *("producer_epoch", "base_sequence", "record_count"),
    )
    fields = dict(zip(names, _HEADER.unpack_from(buffer, position), strict=True))
    return BatchHeader(position=position, **fields)
