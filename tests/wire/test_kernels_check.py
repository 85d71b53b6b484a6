"""Goal: a batch whose records do not match its header never passes; plain Python agrees.

Method: each body goes to the kernel and to plain Python, which must count the same records. Bodies
written by the reference encoder pass. Every body one edit away gets the verdict of the reference
decoder, and a body that is too short or too long is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.errors import LogmirrorError
from logmirror.wire import record_check
from logmirror.wire.batch_header import HEADER_SIZE
from logmirror.wire.kernels_check import count_sound_records
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.records import Record, decode_reference, encode_reference
from logmirror.wire.scan import address_of, as_bytes_array

RECORDS = [
    Record(0, 1000, 0, b"key", b"value", ()),
    Record(1, 900, 0, None, None, ((b"h", None), (b"h", b""))),
    Record(2, 2**41, 0, b"", b"x" * 300, ((b"", b"y"),)),
]
BATCH = encode_reference(RECORDS)


def _count(body: bytes, count: int) -> int:
    # Canaries on both sides: a read beyond the body would find lengths that fit.
    framed = np.frombuffer(b"\0" * 16 + body + b"\0" * 16, np.uint8)
    found = count_sound_records(address_of(framed) + 16, len(body), count)
    assert record_check.count_sound_records(b"\0" * 16 + body, 16, count) == found
    return found


def _reference_accepts(body: bytes) -> bool:
    batch = bytearray(BATCH[:HEADER_SIZE] + body)
    batch[8:12] = (len(batch) - 12).to_bytes(4)
    array = as_bytes_array(batch)
    batch[17:21] = crc32c_at(address_of(array) + 21, len(batch) - 21).to_bytes(4)
    try:
        found = decode_reference(bytes(batch))
    except LogmirrorError:
        return False
    return [record.offset for record in found] == [0, 1, 2]


def test_what_the_reference_encoder_writes_is_sound():
    assert _count(BATCH[HEADER_SIZE:], 3) == 3


def test_a_body_that_ends_early_or_late_is_not_sound():
    body = BATCH[HEADER_SIZE:]

    assert all(_count(body[:size], 3) != 3 for size in range(len(body)))
    assert _count(body + b"\0", 3) != 3


@pytest.mark.parametrize("count", [0, 1, 2, 4, 2**31 - 1, -1, -(2**31)])
def test_a_count_that_is_not_the_number_of_records_is_found(count):
    assert _count(BATCH[HEADER_SIZE:], count) != count or count < 0


@given(st.integers(0, len(BATCH) - HEADER_SIZE - 1), st.integers(0, 255))
def test_one_edit_away_it_agrees_with_the_reference_decoder(position, value):
    body = bytearray(BATCH[HEADER_SIZE:])
    body[position] = value

    assert (_count(bytes(body), 3) == 3) == _reference_accepts(bytes(body))


def test_a_flood_of_headers_is_refused():
    fields = b"\0\0\0\1\1" + b"\xfe\xff\xff\xff\x0f"  # null key and value, 2^31 - 1 headers
    body = bytes([len(fields) * 2]) + fields

    assert _count(body, 1) == 0
