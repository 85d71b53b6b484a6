"""Record batches (format v2) in plain Python: slow and obvious, the reference for the kernels.

It is not on a data path. The kernels are tested against it: both must accept and refuse the same
bytes, and find the same records. A batch is a header (`batch_header`) and its records, compressed
as a whole.

Layout of a record (varints are zigzag, `varint` at most 5 and `varlong` at most 10 bytes):

    varint length of the rest, int8 attributes (unused), varlong timestamp - base timestamp,
    varint offset - base offset, varint key length (-1: null) and key, the value alike,
    varint header count, then for each: varint key length and key, varint value length and value

What is legal, beyond the obvious:

- W1 Compaction leaves fewer records than offsets: the count is at most last offset delta + 1, and
  may be 0. Offset deltas ascend strictly and stay within the last offset delta.
- W2 Record count and batch length must match the content exactly; so must a record's length.
- W3 A timestamp is base + delta in 64 bits that wrap, as in Kafka's own arithmetic. With log-append
  time every record has the batch's max timestamp.
- W4 Batches in one run do not overlap and their offsets ascend. None goes beyond 2^63 - 2, as the
  offset after it must be one, too.
- W5 A control batch is never compressed. Its first record's key is int16 version, int16 type
  (0 abort, 1 commit); a control batch without records is legal and says nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import OFFSET_MAX, TimestampType
from logmirror.wire.batch_header import (
    CRC_START,
    FLAG_CONTROL,
    FLAG_LOG_APPEND,
    FLAG_TRANSACTIONAL,
    HEADER_SIZE,
    LENGTH_END,
    MAGIC,
    BatchHeader,
    MarkerType,
    crc32c_reference,
    parse_header,
)
from logmirror.wire.compression import Codec, compress, decompress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_BATCH_BYTES: Final = 256 * 1024 * 1024
"""The most that one batch may hold decompressed."""

_VARINT: Final = 32
_VARLONG: Final = 64


class Record(NamedTuple):
    """One record as a consumer sees it. Null is not empty."""

    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...]


def marker_type(data: bytes | memoryview, header: BatchHeader) -> MarkerType | None:
    """How a control batch ends its transaction; None: it is no such marker."""
    payload = bytes(data[header.position + HEADER_SIZE : header.position + header.size_bytes])
    found = _marker(header, payload)
    return MarkerType(found) if found in (MarkerType.ABORT, MarkerType.COMMIT) else None


def decode_reference(
    data: bytes,
    *,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> list[Record]:
    """All records of whole batches that a consumer with read_committed is shown.

    Args:
        data: Batches back to back. A truncated last batch is ignored.
        aborted: Producer id and first offset of each aborted transaction that overlaps the data.
        check_crc: Whether a wrong checksum is an error.
        max_batch_bytes: The most that one batch may hold decompressed.

    Raises:
        CorruptionError: The bytes break a rule of this module (facts `position`, `offset`, `why`).
        UsageError: A batch is of format v0 or v1 (facts `magic`, `offset`).
    """
    records: list[Record] = []
    for header in _data_batches(data, aborted, check_crc=check_crc):
        payload = data[header.position + HEADER_SIZE : header.position + header.size_bytes]
        codec = Codec(header.attributes & 7)
        payload = bytes(decompress(codec, payload, max_bytes=max_batch_bytes))
        records += _parse_records(header, payload)
    return records


def _data_batches(
    data: bytes, aborted: Sequence[tuple[int, int]], *, check_crc: bool
) -> list[BatchHeader]:
    """The batches that a consumer is shown; all of them are checked before any is decoded."""
    shown: list[BatchHeader] = []
    waiting = sorted(aborted, key=lambda entry: entry[1])
    active: set[int] = set()
    position, previous_last = 0, -1
    while (header := _next_batch(data, position, check_crc=check_crc)) is not None:
        if header.base_offset <= previous_last:
            raise _corrupt(header, "base-offset")
        while waiting and waiting[0][1] <= header.last_offset:
            active.add(waiting.pop(0)[0])
        if header.is_control:
            payload = data[position + HEADER_SIZE : position + header.size_bytes]
            if _marker(header, payload) == MarkerType.ABORT:
                active.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in active):
            shown.append(header)
        position, previous_last = position + header.size_bytes, header.last_offset
    return shown


def _corrupt(header: BatchHeader, why: str) -> CorruptionError:
    return CorruptionError(
        "record batch breaks its format",
        position=header.position,
        offset=header.base_offset,
        why=why,
    )


def _next_batch(data: bytes, position: int, *, check_crc: bool) -> BatchHeader | None:
    """The header of the batch at `position`, all its rules checked; None where the data ends."""
    if position + 17 > len(data):
        return None
    offset, length, _, magic = struct.unpack_from(">qiib", data, position)
    if magic in (0, 1):
        raise UsageError("record format is older than v2", magic=magic, offset=offset)
    if magic != MAGIC or length < HEADER_SIZE - LENGTH_END:
        why = "length" if magic == MAGIC else "magic"
        raise CorruptionError(
            "record batch breaks its format", position=position, offset=offset, why=why
        )
    if position + LENGTH_END + length > len(data):
        return None
    header = parse_header(data, position)
    if check_crc:
        found = crc32c_reference(data[position + CRC_START : position + header.size_bytes])
        if found != header.crc:
            raise _corrupt(header, "crc")
    _check_header(header)
    return header


def _check_header(header: BatchHeader) -> None:
    payload_bytes = header.size_bytes - HEADER_SIZE
    codec = header.attributes & 7
    if header.base_offset < 0:
        raise _corrupt(header, "base-offset")
    if header.last_offset_delta < 0 or header.last_offset >= OFFSET_MAX:
        raise _corrupt(header, "last-offset-delta")
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise _corrupt(header, "count")
    if codec > max(Codec) or (header.is_control and codec):
        raise _corrupt(header, "codec")
    if codec == Codec.NONE and header.record_count * _RECORD_BYTES_MIN > payload_bytes:
        raise _corrupt(header, "count")


_RECORD_BYTES_MIN: Final = 7
"""One byte each: length, attributes, two deltas, key length, value length, header count."""


def _marker(header: BatchHeader, payload: bytes) -> int | None:
    """The type in a control batch's first key; None if the batch is empty."""
    if header.record_count == 0:
        return None
    reader = _Reader(header, payload)
    length = reader.varint(len(payload))
    if not 1 <= length <= len(payload) - reader.position:
        raise _corrupt(header, "record")
    end = reader.position + length
    reader.position += 1
    reader.varint(end, _VARLONG)
    reader.varint(end)
    key = reader.sized(end)
    if key is None or len(key) < 4:  # noqa: PLR2004  # two int16
        raise _corrupt(header, "marker")
    _, marker_type = struct.unpack_from(">hh", key)
    return int(marker_type)


class _Reader:
    """Reads fields of one batch's records; any breach is a CorruptionError."""

    def __init__(self, header: BatchHeader, payload: bytes) -> None:
        self.header, self.payload, self.position = header, payload, 0

    def varint(self, end: int, bits: int = _VARINT) -> int:
        pattern = shift = 0
        while True:
            if self.position >= end:
                raise _corrupt(self.header, "record")
            byte = self.payload[self.position]
            self.position += 1
            pattern |= (byte & 0x7F) << shift
            if pattern >> bits or (byte > 0x7F and shift + 7 >= bits):  # noqa: PLR2004  # varint bytes
                raise _corrupt(self.header, "record")
            if byte <= 0x7F:  # noqa: PLR2004  # the continuation bit
                return (pattern >> 1) ^ -(pattern & 1)
            shift += 7

    def sized(self, end: int) -> bytes | None:
        length = self.varint(end)
        if length == -1:
            return None
        if not 0 <= length <= end - self.position:
            raise _corrupt(self.header, "record")
        self.position += length
        return self.payload[self.position - length : self.position]


def _parse_records(header: BatchHeader, payload: bytes) -> list[Record]:
    """The records of one batch, uncompressed, every length and count checked."""
    reader, records, previous = _Reader(header, payload), [], -1
    for _ in range(header.record_count):
        length = reader.varint(len(payload))
        if not 1 <= length <= len(payload) - reader.position:
            raise _corrupt(header, "record")
        end = reader.position + length
        reader.position += 1
        timestamp_delta = reader.varint(end, _VARLONG)
        offset_delta = reader.varint(end)
        if not previous < offset_delta <= header.last_offset_delta:
            raise _corrupt(header, "offset-delta")
        key, value = reader.sized(end), reader.sized(end)
        headers = _parse_headers(reader, end)
        if reader.position != end:
            raise _corrupt(header, "record")
        timestamp = _wrap(header.base_timestamp_ms + timestamp_delta)
        if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
            timestamp = header.max_timestamp_ms
        previous = offset_delta
        offset = header.base_offset + offset_delta
        records.append(Record(offset, timestamp, header.timestamp_type, key, value, headers))
    if reader.position != len(payload):
        raise _corrupt(header, "count")
    return records


def _parse_headers(reader: _Reader, end: int) -> tuple[tuple[bytes, bytes | None], ...]:
    count = reader.varint(end)
    if count < 0:
        raise _corrupt(reader.header, "record")
    headers = []
    for _ in range(count):  # ends by itself: every round reads at least two bytes or raises
        key = reader.sized(end)
        if key is None:
            raise _corrupt(reader.header, "record")
        headers.append((key, reader.sized(end)))
    return tuple(headers)


def _wrap(value: int) -> int:
    """Into int64, as two's complement does."""
    return (value + 2**63) % 2**64 - 2**63


_SHORT_VARINTS: Final = tuple(bytes([pattern]) for pattern in range(128))


def _varint(value: int) -> bytes:
    pattern = (value << 1) ^ (value >> 63)
    if pattern < len(_SHORT_VARINTS):
        return _SHORT_VARINTS[pattern]
    out = bytearray()
    while pattern > 0x7F:  # noqa: PLR2004  # the continuation bit
        out.append((pattern & 0x7F) | 0x80)
        pattern >>= 7
    out.append(pattern)
    return bytes(out)


def _sized(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _encode_record(record: Record, base_offset: int, base_timestamp_ms: int) -> bytes:
    body = b"".join(
        (
            b"\0",
            _varint(_wrap(record.timestamp_ms - base_timestamp_ms)),
            _varint(record.offset - base_offset),
            _sized(record.key),
            _sized(record.value),
            _varint(len(record.headers)),
            *(_sized(name) + _sized(value) for name, value in record.headers),
        )
    )
    return _varint(len(body)) + body


def encode_reference(  # noqa: PLR0913  # one keyword for each header field
    records: Sequence[Record],
    *,
    base_offset: int | None = None,
    last_offset: int | None = None,
    codec: Codec = Codec.NONE,
    base_timestamp_ms: int | None = None,
    max_timestamp_ms: int | None = None,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    leader_epoch: int = 0,
    transactional: bool = False,
    control: bool = False,
    attribute_bits: int = 0,
    checksum: Callable[[bytes], int] = crc32c_reference,
) -> bytes:
    """One batch around `records`, which may be none; their `timestamp_type` is not looked at.

    Args:
        records: Ascending offsets, not necessarily without gaps.
        base_offset: First offset covered; the first record's if not given.
        last_offset: Last offset covered; the last record's if not given.
        codec: How the records are compressed.
        base_timestamp_ms: What the deltas count from; the first record's if not given.
        max_timestamp_ms: The header's; the largest of the records if not given.
        timestamp_type: With LOG_APPEND_TIME readers see `max_timestamp_ms` in every record.
        producer_id: Who wrote the batch; epoch and sequence alike.
        producer_epoch: See `producer_id`.
        base_sequence: See `producer_id`.
        leader_epoch: As the leader stamped it.
        transactional: The attribute bit.
        control: The attribute bit.
        attribute_bits: More bits to set, for odd batches.
        checksum: CRC-32C; that of `wire.checksum` is a thousand times as fast.
    """
    if base_offset is None:
        base_offset = records[0].offset
    if last_offset is None:
        last_offset = records[-1].offset if records else base_offset
    stamps = [record.timestamp_ms for record in records] or [-1]
    first_ms = stamps[0] if base_timestamp_ms is None else base_timestamp_ms
    max_ms = max(stamps) if max_timestamp_ms is None else max_timestamp_ms
    payload = b"".join(_encode_record(record, base_offset, first_ms) for record in records)
    if records:
        payload = bytes(compress(codec, payload))
    attributes = int(codec) | timestamp_type * FLAG_LOG_APPEND | attribute_bits
    attributes |= transactional * FLAG_TRANSACTIONAL | control * FLAG_CONTROL
    tail = struct.pack(
        ">hiqqqhii",
        *(attributes, last_offset - base_offset, first_ms, max_ms),
        *(producer_id, producer_epoch, base_sequence, len(records)),
    )
    tail += payload
    crc = checksum(tail)
    return struct.pack(">qiibI", base_offset, len(tail) + 9, leader_epoch, MAGIC, crc) + tail


def encode_marker(
    marker: MarkerType,
    *,
    offset: int,
    producer_id: int,
    producer_epoch: int = 0,
    timestamp_ms: int = 0,
) -> bytes:
    """The control batch with which a coordinator ends a transaction."""
    record = Record(
        *(offset, timestamp_ms, TimestampType.CREATE_TIME),
        struct.pack(">hh", 0, marker),
        struct.pack(">hi", 0, 0),
        (),
    )
    return encode_reference(
        [record],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )
