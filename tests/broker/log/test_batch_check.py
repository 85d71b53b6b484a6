"""Goal: only batches that every reader can read are stored; others get Kafka's error code.

Method: every illegal batch by name; then batches with one byte changed and a corrected checksum:
what passes the check, the reference decoder can read.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from logmirror.broker.log import batch_check
from logmirror.broker.log.batch_check import RefusedBatchError, check_batch, place
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference
from logmirror.wire.scan import address_of, as_bytes_array

RECORDS = [Record(n, 1000 + n, 0, b"k%d" % n, b"v" * 20, ((b"h", b"x"),)) for n in range(3)]
LIMIT = 10_000


def _sealed(batch: bytes | bytearray) -> bytearray:
    """Make a changed batch's checksum right again."""
    batch = bytearray(batch)
    address = address_of(as_bytes_array(batch))
    batch[17:21] = crc32c_at(address + 21, len(batch) - 21).to_bytes(4)
    return batch


def _with(layout: str, position: int, value: int, batch: bytes | None = None) -> bytearray:
    changed = bytearray(encode_reference(RECORDS) if batch is None else batch)
    struct.pack_into(layout, changed, position, value)
    return _sealed(changed)


def _check(batch: bytes | bytearray | None, max_bytes: int = LIMIT) -> batch_check.BatchFacts:
    return check_batch(None if batch is None else memoryview(batch), max_bytes=max_bytes)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_of_any_codec_is_accepted(codec):
    batch = encode_reference(RECORDS, codec=codec, producer_id=5, producer_epoch=2, base_sequence=9)

    assert _check(batch) == (3, 1002, 5, 2, 9, False)


GOOD = encode_reference(RECORDS)
REFUSED = {
    "nothing": (b"", ErrorCode.invalid_record),
    "null": (None, ErrorCode.invalid_record),
    "half a header": (GOOD[:60], ErrorCode.corrupt_message),
    "cut off": (GOOD[:-1], ErrorCode.corrupt_message),
    "two batches": (GOOD + GOOD, ErrorCode.invalid_record),
    "length negative": (_with(">i", 8, -1), ErrorCode.corrupt_message),
    "length too small": (_with(">i", 8, 48), ErrorCode.corrupt_message),
    "length too large": (_with(">i", 8, 2**31 - 1), ErrorCode.corrupt_message),
    "magic 0": (_with(">b", 16, 0), ErrorCode.invalid_record),
    "magic 1": (_with(">b", 16, 1), ErrorCode.invalid_record),
    "magic 0, shorter than a header": (_with(">b", 16, 0)[:40], ErrorCode.invalid_record),
    "magic 1, shorter than a header": (_with(">b", 16, 1)[:17], ErrorCode.invalid_record),
    "magic 3": (_with(">b", 16, 3), ErrorCode.invalid_record),
    "checksum": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), ErrorCode.corrupt_message),
    "control": (
        encode_marker(MarkerType.COMMIT, offset=0, producer_id=5),
        ErrorCode.invalid_record,
    ),
    "transactional without a producer": (_with(">h", 21, 16), ErrorCode.invalid_record),
    "log-append time": (_with(">h", 21, 8), ErrorCode.invalid_timestamp),
    "codec 5": (_with(">h", 21, 5), ErrorCode.unsupported_compression_type),
    "codec 7": (_with(">h", 21, 7), ErrorCode.unsupported_compression_type),
    "codec lies": (_with(">h", 21, 3), ErrorCode.corrupt_message),
    "last offset delta too small": (_with(">i", 23, 1), ErrorCode.invalid_record),
    "last offset delta too large": (_with(">i", 23, 3), ErrorCode.invalid_record),
    "last offset delta negative": (_with(">i", 23, -1), ErrorCode.invalid_record),
    "no records": (_with(">i", 57, 0), ErrorCode.invalid_record),
    "records negative": (_with(">i", 57, -1), ErrorCode.invalid_record),
    "more records than there are": (
        _with(">i", 57, 4, _with(">i", 23, 3)),
        ErrorCode.invalid_record,
    ),
    "fewer records than there are": (
        _with(">i", 57, 2, _with(">i", 23, 1)),
        ErrorCode.invalid_record,
    ),
    "producer without sequence": (_with(">q", 43, 5), ErrorCode.invalid_record),
    "producer without epoch": (
        encode_reference(RECORDS, producer_id=5, producer_epoch=-1, base_sequence=0),
        ErrorCode.invalid_record,
    ),
    "too large": (
        encode_reference([Record(0, 1, 0, None, b"x" * LIMIT, ())]),
        ErrorCode.message_too_large,
    ),
}


@pytest.mark.statement("T10")
@pytest.mark.parametrize("name", REFUSED)
def test_an_illegal_batch_gets_the_code_that_kafka_gives_it(name):
    batch, code = REFUSED[name]

    with pytest.raises(RefusedBatchError) as raised:
        _check(batch)

    assert raised.value.code == code


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_decompression_bomb_is_refused(codec, monkeypatch):
    monkeypatch.setattr(batch_check, "MAX_BODY_BYTES", 1_000_000)
    bomb = encode_reference([Record(0, 1, 0, None, bytes(2_000_000), ())], codec=codec)

    with pytest.raises(RefusedBatchError) as raised:
        _check(bomb, max_bytes=10_000_000)

    assert raised.value.code == ErrorCode.corrupt_message


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_every_batch_that_passes_one_edit_away_is_readable(position, value):
    batch = bytearray(GOOD)
    batch[position] = value
    batch = _sealed(batch)

    try:
        facts = _check(batch)
    except RefusedBatchError:
        return

    place(memoryview(batch), 1000)
    found = decode_reference(bytes(batch))
    assert [record.offset for record in found] == [1000, 1001, 1002]
    assert facts.record_count == 3


def test_placing_a_batch_keeps_its_checksum():
    batch = bytearray(GOOD)

    place(memoryview(batch), 2**40)

    header = parse_header(batch, 0)
    assert (header.base_offset, header.leader_epoch) == (2**40, 0)
    assert [record.value for record in decode_reference(bytes(batch))] == [b"v" * 20] * 3


def test_many_records_are_checked_in_a_worker_until_the_kernel_is_loaded(monkeypatch):
    check = batch_check.RecordCheck()
    monkeypatch.setattr(batch_check, "RECORD_CHECK", check)
    batches = {
        count: memoryview(
            encode_reference([Record(n, 1000, 0, None, b"", ()) for n in range(count)])
        )
        for count in (1000, 1001)
    }
    assert batch_check.is_quick(batches[1000])
    assert not batch_check.is_quick(batches[1001])
    assert batch_check.is_quick(None)
    assert batch_check.is_quick(batches[1001][:60]), "refused at once"

    check.compile()

    assert batch_check.is_quick(batches[1001])
