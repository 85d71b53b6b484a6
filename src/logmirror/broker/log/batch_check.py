"""Checks a producer's record batch before it is stored. Afterwards the batch is opaque bytes.

A batch is checked once, here. Code that reads the log later relies on its structure, and treats a
violation as damage on disk. The error codes are those that Kafka returns in the same case.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.errors import CorruptionError
from logmirror.wire.checksum import crc32c
from logmirror.wire.compression import Codec, decompress
from logmirror.wire.key_check import find_without_key
from logmirror.wire.record_check import QUICK_RECORDS, RecordCheck

HEADER_BYTES: Final = 61
_BATCH: Final = Struct(">qiibIhiqqqhii")
_LENGTH_END: Final = 12
_CRC_START: Final = 21
_MAGIC: Final = 2
_CODEC_BITS: Final = 7
_LAST_CODEC: Final = 4
_LOG_APPEND_TIME: Final = 8
_TRANSACTIONAL: Final = 16
_CONTROL: Final = 32
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Limit for the decompressed size of one batch, against decompression bombs."""

QUICK_BODY_BYTES: Final = 256 * 1024
"""A body of this size is decompressed and checked in less than a millisecond."""

_QUICK_PACKED_BYTES: Final = 64 * 1024
_QUICK_PLAIN_BYTES: Final = 4 * 1024 * 1024

_MAGIC_AT: Final = 16
_ATTRIBUTES_AT: Final = 21
_MAX_TIMESTAMP_AT: Final = 35
_CRC_AT: Final = 17
_RECORD_COUNT_AT: Final = 57
_ATTRIBUTES: Final = Struct(">h")
_CHECKSUM: Final = Struct(">I")
_OFFSETS: Final = Struct(">q")
_EPOCH: Final = Struct(">i")
_WRITER: Final = Struct(">qh")
_WRITER_AT: Final = 43
RECORD_CHECK: Final = RecordCheck()
"""Of all batches of this process."""


class RefusedBatchError(Exception):
    """The batch must not be stored. `code` is Kafka's error code for it."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RefusedBodyError(RefusedBatchError):
    """The records cannot be decompressed within the limit."""


class BatchFacts(NamedTuple):
    """The header fields of a batch that the log needs."""

    record_count: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool = False


def is_quick(records: memoryview | None) -> bool:
    """Whether a check takes about a millisecond, if the body has at most `QUICK_BODY_BYTES`."""
    if records is None or len(records) < HEADER_BYTES:
        return True
    (record_count,) = _EPOCH.unpack_from(records, _RECORD_COUNT_AT)
    if record_count > QUICK_RECORDS and not RECORD_CHECK.is_compiled:
        return False
    if len(records) <= _QUICK_PACKED_BYTES:
        return True
    is_plain = not records[_ATTRIBUTES_AT + 1] & _CODEC_BITS
    return is_plain and len(records) <= _QUICK_PLAIN_BYTES


def check_batch(
    records: memoryview | None,
    *,
    max_bytes: int,
    max_body_bytes: int | None = None,
    needs_keys: bool = False,
) -> BatchFacts:
    """Check the records for one partition of a Produce request: exactly one valid batch.

    Args:
        records: The records field of the request; null is refused.
        max_bytes: `max.message.bytes` of the topic.
        max_body_bytes: Limit for the decompressed size; None: `MAX_BODY_BYTES`.
        needs_keys: Whether every record must have a key: the topic is compacted.

    Raises:
        RefusedBatchError: The batch must not be stored.
    """
    if records is None or len(records) == 0:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "no batch")
    size = len(records)
    if size > _MAGIC_AT and records[_MAGIC_AT] < _MAGIC:  # may be shorter than a batch's header
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "message format is not v2")
    if size < HEADER_BYTES:
        raise RefusedBatchError(ErrorCode.CORRUPT_MESSAGE, "batch is shorter than its header")
    header = _BATCH.unpack_from(records, 0)
    base_offset, length, _, magic, checksum, attributes, last_delta, _, max_timestamp_ms = header[
        :9
    ]
    producer_id, producer_epoch, base_sequence, record_count = header[9:]
    if magic != _MAGIC:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "message format is not v2")
    _check_size(size, _LENGTH_END + length, max_bytes)
    if crc32c(records[_CRC_START:]) != checksum:
        raise RefusedBatchError(ErrorCode.CORRUPT_MESSAGE, "checksum does not match")
    if base_offset != 0:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "base offset is not 0")
    _check_attributes(attributes)
    is_transactional = bool(attributes & _TRANSACTIONAL)
    writer = producer_id, producer_epoch, base_sequence
    _check_writer(*writer, is_transactional=is_transactional)
    if record_count <= 0 or last_delta != record_count - 1:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "record count does not match the offsets")
    reason = _wrong_record(records, attributes, record_count, max_body_bytes, needs_keys=needs_keys)
    if reason:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, reason)
    return BatchFacts(record_count, max_timestamp_ms, *writer, is_transactional)


def _check_size(size: int, batch_end: int, max_bytes: int) -> None:
    if batch_end < HEADER_BYTES or batch_end > size:
        raise RefusedBatchError(ErrorCode.CORRUPT_MESSAGE, "length does not match the bytes")
    if batch_end < size:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "more than one batch for a partition")
    if size > max_bytes:
        raise RefusedBatchError(ErrorCode.MESSAGE_TOO_LARGE, "larger than max.message.bytes")


def _wrong_record(
    records: memoryview,
    attributes: int,
    record_count: int,
    max_body_bytes: int | None,
    *,
    needs_keys: bool,
) -> str:
    """Return what is wrong with a record; empty if all are sound.

    The caller raises the error: one that was raised here would keep the decompressed records.
    """
    body: bytes | bytearray | memoryview = records
    start = HEADER_BYTES
    if attributes & _CODEC_BITS:
        body, start = _decompressed(attributes, records, max_body_bytes), 0
    sound = RECORD_CHECK.count_sound(body, start, record_count)
    if sound != record_count:
        return f"record {sound} is malformed"
    if needs_keys and (number := find_without_key(body, start, record_count)) >= 0:
        return f"record {number} has no key"
    return ""


def _decompressed(
    attributes: int, records: memoryview, max_body_bytes: int | None
) -> bytes | bytearray | memoryview:
    codec = Codec(attributes & _CODEC_BITS)
    if max_body_bytes is None:
        max_body_bytes = MAX_BODY_BYTES
    try:
        return decompress(codec, records[HEADER_BYTES:], max_bytes=max_body_bytes)
    except CorruptionError as error:
        raise RefusedBodyError(ErrorCode.CORRUPT_MESSAGE, error.message) from error


def _check_writer(
    producer_id: int, producer_epoch: int, base_sequence: int, *, is_transactional: bool
) -> None:
    if is_transactional and producer_id < 0:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "transactional without a producer id")
    if producer_id >= 0 and (producer_epoch < 0 or base_sequence < 0):
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "producer id without epoch or sequence")


def _check_attributes(attributes: int) -> None:
    if attributes & _CONTROL:
        raise RefusedBatchError(ErrorCode.INVALID_RECORD, "control batch from a client")
    if attributes & _LOG_APPEND_TIME:
        raise RefusedBatchError(ErrorCode.INVALID_TIMESTAMP, "log-append time from a client")
    if attributes & _CODEC_BITS > _LAST_CODEC:
        raise RefusedBatchError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, "unknown codec")


def is_transactional(records: memoryview | None) -> bool:
    """Whether an unchecked batch has the transactional bit."""
    if records is None or len(records) < HEADER_BYTES or records[_MAGIC_AT] != _MAGIC:
        return False
    return bool(records[_ATTRIBUTES_AT + 1] & _TRANSACTIONAL)


def writer_of(records: memoryview) -> tuple[int, int]:
    """Return producer ID and epoch of an unchecked batch, which `is_transactional` accepted."""
    producer_id, epoch = _WRITER.unpack_from(records, _WRITER_AT)
    return producer_id, epoch


def stamp(records: memoryview, facts: BatchFacts, now_ms: int) -> BatchFacts:
    """Set a checked batch to log-append time `now_ms`, and update its checksum.

    The records keep the producer's timestamps; readers use the batch's largest timestamp instead.
    """
    (attributes,) = _ATTRIBUTES.unpack_from(records, _ATTRIBUTES_AT)
    _ATTRIBUTES.pack_into(records, _ATTRIBUTES_AT, attributes | _LOG_APPEND_TIME)
    _OFFSETS.pack_into(records, _MAX_TIMESTAMP_AT, now_ms)
    _CHECKSUM.pack_into(records, _CRC_AT, crc32c(records[_CRC_START:]))
    return facts._replace(max_timestamp_ms=now_ms)


def place(records: memoryview, base_offset: int) -> None:
    """Write base offset and leader epoch 0 into a batch header; the checksum covers neither."""
    _OFFSETS.pack_into(records, 0, base_offset)
    _EPOCH.pack_into(records, 12, 0)
