"""The control batch that ends a transaction, as a server writes and reads it.

A batch of 78 bytes with one record, uncompressed (`records` has the layout of both):

    0   the batch header: attributes transactional and control, base sequence -1
    61  record: length 16, attributes 0, timestamp delta 0, offset delta 0
    65  key length 4, then int16 version 0 | int16 type: 0 abort, 1 commit
    70  value length 6, then int16 version 0 | int32 coordinator epoch
    77  no headers

It takes one offset; consumers skip it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from logmirror.wire.checksum import crc32c

MARKER_BYTES: Final = 78
CONTROL_FLAG: Final = 0x20
TRANSACTIONAL_FLAG: Final = 0x10
_HEADER: Final = Struct(">qiibIhiqqqhii")
_RECORD: Final = Struct(">bbbbbhhbhib")
_CRC: Final = Struct(">I")
_COORDINATOR_EPOCH: Final = Struct(">i")
_COORDINATOR_EPOCH_AT: Final = 73
_TYPE_AT: Final = 69
_CRC_AT: Final = 17
_CRC_START: Final = 21
_LENGTH_END: Final = 12
_MAGIC: Final = 2


def pack_marker(
    producer_id: int,
    producer_epoch: int,
    *,
    commit: bool,
    coordinator_epoch: int,
    timestamp_ms: int,
) -> bytearray:
    """Return a marker at offset 0; where it stands lies outside its checksum."""
    out = bytearray(
        _HEADER.pack(
            *(0, MARKER_BYTES - _LENGTH_END, 0, _MAGIC, 0),
            *(TRANSACTIONAL_FLAG | CONTROL_FLAG, 0, timestamp_ms, timestamp_ms),
            *(producer_id, producer_epoch, -1, 1),
        )
    )
    # Lengths are zigzag varints: twice their value.
    out += _RECORD.pack(32, 0, 0, 0, 8, 0, commit, 12, 0, coordinator_epoch, 0)
    _CRC.pack_into(out, _CRC_AT, crc32c(memoryview(out)[_CRC_START:]))
    return out


def coordinator_epoch_of(batch: bytes | bytearray | memoryview) -> int:
    """Return the coordinator epoch of a control batch; -1 if it is no marker of this layout."""
    if len(batch) != MARKER_BYTES:
        return -1
    return int(_COORDINATOR_EPOCH.unpack_from(batch, _COORDINATOR_EPOCH_AT)[0])


def is_commit(batch: bytes | bytearray | memoryview) -> bool | None:
    """Whether a marker commits its transaction; None if it is no marker of this layout."""
    if len(batch) != MARKER_BYTES or batch[_TYPE_AT] > 1 or batch[_TYPE_AT - 1]:
        return None
    return batch[_TYPE_AT] == 1
